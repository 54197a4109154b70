"""sgd_ beside torch.optim.SGD; test_ops_optim.py has what every optimizer does."""

from __future__ import annotations

import itertools

import pytest
import torch
from ops_check import F, check, devices
from optim_calls import make, refuses_change

from zshard import ops

# Every combination that torch allows: nesterov takes momentum and no dampening.
FORMS = [
    [0.03, momentum, dampening, decay, nesterov, maximize]
    for momentum, dampening, decay, nesterov, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (0.0, 0.1), (0.0, 1.0), (0.0, 1.0)
    )
    if not nesterov or (momentum and not dampening)
]


@devices
@pytest.mark.parametrize("step", [0, 1, 40])
@pytest.mark.parametrize("grad_dtype", F)
def test_every_form_has_the_reference_bits(device: str, grad_dtype: torch.dtype, step: int) -> None:
    numel = 97
    segments = [[0, g * numel, (g + 1) * numel] for g in range(len(FORMS))]
    call = make("sgd_", [len(FORMS) * numel], segments, grad_dtype, hypers=FORMS)
    call.steps.fill_(step)
    check("sgd_", device, *call.arguments())


@pytest.mark.parametrize("form", FORMS)
def test_sgd_agrees_with_torch_within_rounding(form: list[float]) -> None:
    lr, momentum, dampening, decay, nesterov, maximize = form
    param = torch.nn.Parameter(torch.randn(4097))
    torch_opt = torch.optim.SGD(
        [param],
        lr,
        momentum,
        dampening,
        decay,
        bool(nesterov),
        maximize=bool(maximize),
        foreach=False,
    )
    call = make("sgd_", [4097], hypers=[form])
    call.masters[0].copy_(param.detach())
    for _ in range(10):
        call.grads[0].normal_()
        param.grad = call.grads[0].clone()
        torch_opt.step()
        ops.sgd_(*call.arguments())
    # A few roundings a step, each 2^-24 of values below 8.
    torch.testing.assert_close(call.masters[0], param.detach(), rtol=0.0, atol=2**-20)
    if momentum:
        torch.testing.assert_close(
            call.states["momentum_buffers"][0], torch_opt.state[param]["momentum_buffer"]
        )


@devices
@pytest.mark.parametrize(
    ("send_dtype", "split"), [(None, False), (torch.bfloat16, False), (None, True)]
)
def test_without_momentum_no_buffers_are_needed(
    device: str, send_dtype: torch.dtype | None, split: bool
) -> None:
    plain = [form for form in FORMS if not form[1]]
    call = make("sgd_", send_dtype=send_dtype, split=split, hypers=plain)
    call.states["momentum_buffers"] = []
    check("sgd_", device, *call.arguments())


@devices
def test_the_first_step_does_not_read_the_buffer(device: str) -> None:
    call = make("sgd_", [70], hypers=[[0.1, 0.9, 0.5, 0.0, 0.0, 0.0]])
    (buffer,) = call.states["momentum_buffers"]
    buffer.fill_(float("nan"))
    check("sgd_", device, *call.arguments())
    assert torch.equal(buffer, call.grads[0])


def test_a_decay_of_zero_adds_nothing_to_an_infinite_parameter() -> None:
    call = make("sgd_", [3], hypers=[[0.1, 0.0, 0.0, 0.0, 0.0, 0.0]])
    call.masters[0].fill_(float("inf"))
    ops.sgd_(*call.arguments())
    assert call.masters[0].tolist() == [float("inf")] * 3


def test_momentum_without_buffers_is_refused() -> None:
    refuses_change(
        "sgd_",
        ["hypers[1] has momentum 0.9", "momentum_buffers is []", "one for each shard"],
        momentum_buffers=[],
        hypers=torch.tensor([[0.1, 0.0, 0, 0, 0, 0], [0.1, 0.9, 0, 0, 0, 0]], dtype=torch.float64),
    )
