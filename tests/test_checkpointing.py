"""Activation checkpointing, both variants: inside units, around units and around the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext

import models
import pytest
import torch
from models import Block
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from training import FEW_STEPS, Record, Wrapped, adamw, assert_same_bits, train

import zshard
from zshard.unitmap import unit_names

# tests/test_steps_n1.py and test_steps_ddp.py train the cases gpt_inside, gpt_around and gpt_both
# against the plain model with the same checkpointing. Here: against no checkpointing at all, and
# the placements that those do not have.


def no_dropout(inside: bool | None = None, around: bool | None = None) -> nn.Module:
    torch.manual_seed(1234)
    return models.GPT(inside=inside, around=around)


def run_wrapped(model: nn.Module, rank: int, units: object = None) -> Record:
    model = zshard.wrap(model, units=units)
    return train(Wrapped(model), adamw(model), models.batches("gpt", FEW_STEPS, rank))


def with_and_without(
    rank: int, world_size: int, inside: bool | None, around: bool | None, units: object
) -> tuple[Record, Record]:
    return (
        run_wrapped(no_dropout(inside, around), rank, units),
        run_wrapped(no_dropout(), rank, units),
    )


@pytest.mark.parametrize("units", [None, "model", "layer"])
@pytest.mark.parametrize("around", [False, True], ids=["around", "around_reentrant"])
def test_recomputation_around_units_does_not_change_a_bit(around: bool, units: str | None) -> None:
    actual, expected = with_and_without(0, 1, None, around, units)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("units", [None, "layer"])
@pytest.mark.parametrize(
    ("inside", "around"),
    [(False, None), (True, None), (None, False), (None, True), (False, False), (True, True)],
)
def test_recomputation_on_two_ranks_does_not_change_a_bit(
    inside: bool | None, around: bool | None, units: str | None
) -> None:
    for actual, expected in run_ranks(with_and_without, 2, inside, around, units):
        assert_same_bits(actual, expected)


class Whole(nn.Module):
    """Recomputes its whole model in backward: the recomputation passes through every unit."""

    def __init__(self, model: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.model(x)
        return checkpoint(self.model, x.requires_grad_(), use_reentrant=self.reentrant)


def around_the_model(
    rank: int, world_size: int, reentrant: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of five steps with the whole model recomputed: (wrapped, DDP)."""
    sides = []
    for is_wrapped in (True, False):
        model = Whole(models.build("blocks"), reentrant)
        optimizer_of = model
        if is_wrapped:
            model = optimizer_of = zshard.wrap(model)
        elif world_size > 1:
            model = DistributedDataParallel(model)
        optimizer = adamw(optimizer_of)
        losses = []
        for batch in models.batches("blocks", 5, rank):
            loss = models.loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        sides.append(losses)
    return sides[0], sides[1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_recomputation_of_the_whole_model_equals_the_plain_models(
    world_size: int, reentrant: bool
) -> None:
    if world_size == 1:
        results = [around_the_model(0, 1, reentrant)]
    else:
        results = run_ranks(around_the_model, world_size, reentrant)
    for actual, expected in results:
        assert [float(loss) for loss in actual] == [float(loss) for loss in expected]


def calls_of_blocks(model: nn.Module) -> list[int]:
    counts = [0] * len(model.blocks)
    for index, block in enumerate(model.blocks):

        def count(module: nn.Module, args: object, index: int = index) -> None:
            counts[index] += 1

        block.register_forward_pre_hook(count)
    return counts


@pytest.mark.parametrize("around", [False, True])
def test_blocks_are_really_recomputed(around: bool) -> None:
    model = zshard.wrap(no_dropout(around=around))
    counts = calls_of_blocks(model)
    models.loss_of(model, models.batches("gpt", 1)[0]).backward()
    assert counts == [2, 2, 2]


def test_early_stop_of_the_recomputation_leaves_the_model_usable() -> None:
    # The non-reentrant variant ends a recomputation by an exception inside the module's forward,
    # before the unit's own post-forward runs.
    model = zshard.wrap(no_dropout(around=False))
    batch = models.batches("gpt", 1)[0]
    losses = []
    for _ in range(3):
        loss = models.loss_of(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        model.zero_grad()
    assert losses[0] == losses[1] == losses[2]


class Region(nn.Module):
    """Recomputes several units at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.inlet(x), use_reentrant=False)


def partly_frozen(rank: int, world_size: int) -> list[bool]:
    torch.manual_seed(0)
    model = Region()
    for norm in (model.inner[0], model.inner[2]):
        norm.weight.requires_grad_(False)
    plain = copy.deepcopy(model)
    zshard.wrap(model, units="layer")
    right = []
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))  # on every rank
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        for name, param in plain.named_parameters():
            grad = zshard.full_grad(model, name)
            right.append(param.grad is grad is None or torch.equal(grad, param.grad))
        model.zero_grad()
        plain.zero_grad()
    return right


def test_units_with_frozen_weights_are_recomputed_together() -> None:
    """torch compares what it saves then, frozen weights themselves, whose units are sharded."""
    for right in run_ranks(partly_frozen, 2):
        assert all(right)


# --- several times in one backward, or in another order ------------------------------------------


class Reentrant(nn.Module):
    """Blocks in reentrant checkpoints, which autograd runs one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x.square().mean()


def twice(rank: int, world_size: int, wrapped: bool) -> dict[str, Tensor]:
    """Go through two forwards in one backward, in no_sync; then through one more."""
    torch.manual_seed(0)
    model: nn.Module = Reentrant()
    names = [name for name, _ in model.named_parameters()]
    if wrapped:
        model = zshard.wrap(model)
    x = torch.randn(2, 3)
    with zshard.no_sync(model) if wrapped else nullcontext():
        (model(x) + model(-x)).backward()
    model(x + 1).backward()
    if wrapped:
        return {name: zshard.full_grad(model, name) for name in names}
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_in_two_reentrant_checkpoints_of_one_backward(size: int) -> None:
    plain = twice(0, 1, False)
    for grads in run_ranks(twice, size, True):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, plain[name])


class Ordered(nn.Module):
    """Calls its blocks in the order that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x


def in_another_order(rank: int, world_size: int, comm: str) -> None:
    """Call blocks in another order, of which some stay whole; gradients are the plain model's."""
    torch.manual_seed(0)
    expected = Ordered()
    model = zshard.wrap(
        copy.deepcopy(expected),
        strategy=lambda name, _: "zero2" if name in ("blocks.0", "blocks.2") else "zero3",
        prefetch=0,
        comm=comm,
    )
    x = torch.randn(4, 3)
    for order in ([0, 1, 2, 3],) * 2 + ([0, 2, 1, 3],) * 3 + ([0, 1, 2, 3],):
        for each in (model, expected):
            each(x, order).square().mean().backward()
        for name, param in expected.named_parameters():
            assert torch.equal(zshard.full_grad(model, name), param.grad), (order, name)
        model.zero_grad()
        expected.zero_grad()


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("size", [1, 2])
def test_another_order_of_blocks_is_another_backward(size: int, comm: str) -> None:
    run_ranks(in_another_order, size, comm)


@pytest.mark.parametrize("around", ["the model", "a block"])
def test_what_torchs_checkpoint_wrapper_renames_is_read_by_every_name(around: str) -> None:
    block = checkpoint_wrapper(nn.Linear(3, 2))
    model = block if around == "the model" else nn.Sequential(block)
    value = block.weight.detach().clone()
    zshard.wrap(model)
    model(torch.ones(1, 3)).sum().backward()
    keys = model.state_dict().keys() | dict(model.named_parameters()).keys()
    for name in (key for key in keys if key.endswith("weight")):
        assert torch.equal(zshard.full_param(model, name), value)
        assert torch.equal(zshard.full_grad(model, name), torch.ones(2, 3))


def test_layers_in_checkpoint_wrappers_are_repeated_whichever_are_parametrized() -> None:
    """A wrapper has all attributes of what it wraps, parametrizations too."""
    made = (weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert unit_names(nn.Sequential(*map(checkpoint_wrapper, made)), None) == ["0", "1"]
