"""When a backward is over, as far as the model knows."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from steps import batch, build

import zshard
from zshard.wrap import schedule_of


def outlived(rank: int, world_size: int, meanwhile: str) -> None:
    """A backward raises, and is let go of only later, as by the thread that runs it for a GPU."""
    model = build()
    optimizer = zshard.AdamW(model.parameters())
    model(batch(rank, 0)).sum().backward()
    expected = zshard.full_grad(model, "inlet.weight")
    held = []

    def fail_late(*_: object) -> None:
        held.append(schedule_of(model).backward._end())
        raise ValueError("user code")

    hook = model.blocks[0].register_forward_hook(
        lambda *call: call[2].register_hook(fail_late) and None
    )
    out = model(batch(rank, 0))
    hook.remove()
    with pytest.raises(ValueError, match="user code"):
        out.sum().backward()
    assert held[0] is not None
    if meanwhile == "a step":
        with pytest.raises(zshard.StateError, match="the last backward raised"):
            optimizer.step()
    elif meanwhile == "a read":
        zshard.full_param(model, "inlet.weight")
    elif meanwhile == "a freeze":
        model.inlet.weight.requires_grad_(False)
        model.inlet.weight.requires_grad_(True)
    model.zero_grad()
    out = model(batch(rank, 0))
    out.register_hook(lambda grad: held.clear())  # let go in the middle of the next one
    out.sum().backward()
    assert not held
    assert torch.equal(zshard.full_grad(model, "inlet.weight"), expected)
    optimizer.step()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("meanwhile", ["a step", "a read", "a freeze", "a forward"])
def test_a_backward_that_raised_is_over_before_autograd_has_let_go_of_it(
    meanwhile: str, world_size: int
) -> None:
    run_ranks(outlived, world_size, meanwhile)
