"""When a backward is over, as far as the model knows."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from models import Block, Blocks
from ranks import run_ranks
from steps import batch, build
from torch import Tensor, nn

import zshard
from zshard.wrap import schedule_of


def outlived(rank: int, world_size: int, meanwhile: str) -> None:
    """A backward raises, and is let go of only later, as by the thread that runs it for a GPU."""
    model = build()
    optimizer = zshard.AdamW(model.parameters())
    sharded = model.inlet.weight
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
        sharded.requires_grad_(False)
        sharded.requires_grad_(True)
    model.zero_grad()
    model(batch(rank, 0)).sum().backward()
    assert torch.equal(zshard.full_grad(model, "inlet.weight"), expected)
    optimizer.step()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("meanwhile", ["a step", "a read", "a freeze", "a forward"])
def test_a_backward_that_raised_is_over_before_autograd_has_let_go_of_it(
    meanwhile: str, world_size: int
) -> None:
    run_ranks(outlived, world_size, meanwhile)


def test_a_backward_that_autograd_lets_go_of_late_leaves_the_next_forward_alone() -> None:
    model = build()
    sharded, held, used = model.inlet.weight, [], []
    out = model(batch(0, 0))
    out.register_hook(lambda grad: held.append(schedule_of(model).backward._end()))
    out.sum().backward()
    assert held[0] is not None

    def let_go(module: torch.nn.Module, args: object) -> None:
        held.clear()
        used.append(module.weight)

    model.inlet.register_forward_pre_hook(let_go)
    model(batch(0, 1))
    assert used[0] is not sharded and model.inlet.weight is sharded


def raise_planted(*_: object) -> None:
    raise ValueError("planted")


class FailsBetween(nn.Module):
    """Its backward raises, if it is to, between the gradients of ``b`` and of ``a``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(4)) for _ in range(2))
        self.fails = True

    def forward(self, x: Tensor) -> Tensor:
        product = x * self.a
        if self.fails:
            product.register_hook(raise_planted)
        return (product + self.b).sum()


@pytest.mark.parametrize("held", [False, True])
def test_a_gradient_made_before_an_exception_is_not_added_to_the_next_ones(held: bool) -> None:
    model = zshard.wrap(FailsBetween())
    with (
        zshard.no_sync(model) if held else nullcontext(),
        pytest.raises(ValueError, match="planted"),
    ):
        model(torch.ones(4)).backward()
    model.fails = False
    model(torch.ones(4)).backward()
    for name in ("a", "b"):
        assert torch.equal(zshard.full_grad(model, name), torch.ones(4)), name


class Skips(Block):
    """Of which a step may use the first layer alone, whose gradients are a backward's last."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x if self.skips else self.down(self.up(x))


def by_turns(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = Blocks(block=Skips)
    model = zshard.wrap(copy.deepcopy(plain))
    for Skips.skips in (True, False, True, False):
        for each in (plain, model):
            each.zero_grad()
            each(batch(0, 0)).square().mean().backward()
        for name, param in plain.named_parameters():
            grad = zshard.full_grad(model, name)
            assert (grad is None) == (param.grad is None)
            assert grad is None or torch.equal(grad, param.grad), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_unit_is_done_with_by_this_backwards_gradients_alone(world_size: int) -> None:
    run_ranks(by_turns, world_size)
