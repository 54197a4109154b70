"""zshard's optimizers over plain parameters: memory that moves, graphs that are out of date."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import zshard

KINDS = [zshard.SGD, zshard.AdamW]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_got_other_memory_is_updated_there(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    found = []
    for moves in (False, True):
        param = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        optimizer = kind([param], lr=0.1)
        for step in range(3):
            if moves:
                left = param.data
                param.data = left.clone()
                kept = left.clone()
            param.grad = torch.full_like(param, 1.0 + step)
            optimizer.step()
            assert not moves or torch.equal(left, kept), "what was left is not written any more"
        found.append(param.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_whose_memory_got_another_order_keeps_each_elements_states(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    found = []
    for moves in (False, True):
        param = nn.Parameter(torch.ones(2, 3, 2, 2, dtype=dtype))
        optimizer = kind([param], lr=0.1, **({"momentum": 0.9} if kind is zshard.SGD else {}))
        for step in range(3):
            if moves and step == 1:
                param.data = param.data.contiguous(memory_format=torch.channels_last)
            param.grad = torch.arange(24, dtype=dtype).view_as(param) * (step - 1.5)
            optimizer.step()
        found += [param.detach(), *optimizer.state_dict()["state"][0].values()]
    assert all(map(torch.equal, found[: len(found) // 2], found[len(found) // 2 :]))


@pytest.mark.parametrize("other", [torch.ones(2), torch.ones(4)])
def test_a_parameter_that_got_another_shape_is_refused_if_there_are_states_of_it(
    other: torch.Tensor,
) -> None:
    param, free = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    adam, sgd = zshard.AdamW([param]), zshard.SGD([free], lr=1.0)
    for each in (param, free):
        each.grad = torch.ones(3)
    adam.step()
    sgd.step()
    for each in (param, free):
        each.grad, each.data = None, other.clone()
        each.grad = torch.ones_like(each)
    with pytest.raises(zshard.OptimizerError, match=r"had shape \(3,\)"):
        adam.step()
    assert torch.equal(param, other)
    sgd.step()
    assert torch.equal(free, other - 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [*KINDS, torch.optim.SGD])
def test_a_graph_that_was_made_before_a_step_is_refused_behind_it_as_torch_does(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = kind([param], lr=0.1)
    loss = (param * param).sum()
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_state_with_gaps_in_its_memory_is_loaded_as_it_is() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = zshard.AdamW([param])
    param.grad = torch.ones(4)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.arange(8.0)[::2]
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"][0]["exp_avg"].tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_slice_with_gaps_that_is_set_as_a_state_is_taken_as_it_is() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = zshard.AdamW([param])
    param.grad = torch.zeros(2, 2)
    optimizer.step()
    optimizer.state[param]["exp_avg"] = torch.arange(8.0)[::2]
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["exp_avg"].tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize("kind", [*KINDS, zshard.Adam])
def test_what_torchs_optimizer_can_do_besides_is_taken_if_unused_and_refused_by_name_else(
    kind: type[torch.optim.Optimizer],
) -> None:
    """A script that gives torch's optimizer all of its arguments goes on with ours."""
    params = [nn.Parameter(torch.ones(2))]
    _, *takes = inspect.signature(getattr(torch.optim, kind.__name__)).parameters.values()
    kind(params, **{each.name: each.default for each in takes})
    kind(params, *(each.default for each in takes if each.kind is each.POSITIONAL_OR_KEYWORD))
    refused = {"capturable", "differentiable", "decoupled_weight_decay"}
    for flag in refused & {each.name for each in takes}:
        match = rf"{flag}=True .*(optim\.{kind.__name__}|zshard\.AdamW) has"
        with pytest.raises(zshard.InputError, match=match):
            kind(params, **{flag: True})
