"""Activation checkpointing, both variants: inside units, around units and around the model."""

from __future__ import annotations

import copy

import models
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import Record, Wrapped, adamw, assert_same_bits, kFewSteps, train

import zshard

# tests/test_steps_n1.py and test_steps_ddp.py train the cases gpt_inside, gpt_around and gpt_both
# against the plain model with the same checkpointing. Here: against no checkpointing at all, and
# the placements that those do not have.


def no_dropout(inside: bool | None = None, around: bool | None = None) -> nn.Module:
    torch.manual_seed(1234)
    return models.GPT(inside=inside, around=around)


def run_wrapped(model: nn.Module, rank: int, units: object = None) -> Record:
    model = zshard.wrap(model, units=units)
    return train(Wrapped(model), adamw(model), models.batches("gpt", kFewSteps, rank))


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
