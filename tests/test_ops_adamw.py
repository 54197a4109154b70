"""adamw_ beside torch.optim's AdamW and Adam; test_ops_optim.py has what every optimizer does."""

from __future__ import annotations

import pytest
import torch
from optim_calls import HYPERS, make, refuses_change

from zshard import ops


@pytest.mark.parametrize("hyper", HYPERS["adamw_"])
def test_adamw_agrees_with_torch_within_rounding(hyper: list[float]) -> None:
    lr, beta1, beta2, eps, decay, decoupled = hyper
    param = torch.nn.Parameter(torch.randn(4097))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    torch_opt = kind([param], lr, (beta1, beta2), eps, decay, foreach=False)
    call = make("adamw_", [4097], hypers=[hyper])
    call.masters[0].copy_(param.detach())
    for (state,) in call.states.values():
        state.zero_()
    for _ in range(10):
        call.grads[0].normal_()
        param.grad = call.grads[0].clone()
        torch_opt.step()
        ops.adamw_(*call.arguments())
    # A few roundings a step, each 2^-24 of the parameter or of the step it takes.
    torch.testing.assert_close(call.masters[0], param.detach(), rtol=2**-20, atol=lr * 2**-16)
    for ours, theirs in (("exp_avgs", "exp_avg"), ("exp_avg_sqs", "exp_avg_sq")):
        torch.testing.assert_close(call.states[ours][0], torch_opt.state[param][theirs])


@pytest.mark.parametrize("decoupled", [1.0, 0.0])
def test_a_decay_of_zero_adds_nothing_to_an_infinite_parameter(decoupled: float) -> None:
    call = make("adamw_", [3], hypers=[[1e-3, 0.9, 0.99, 1e-8, 0.0, decoupled]])
    call.masters[0].fill_(-float("inf"))
    ops.adamw_(*call.arguments())
    assert call.masters[0].tolist() == [-float("inf")] * 3


def test_no_state_is_optional() -> None:
    for name in ("exp_avgs", "exp_avg_sqs"):
        refuses_change("adamw_", [f"{name} has 0 entries but masters has 2"], **{name: []})
