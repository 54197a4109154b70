"""Checkpoints around several units, of which backward comes to some only."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from models import Blocks
from ranks import run_ranks
from steps import batch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import zshard
from zshard.wrap import schedule_of


class Heads(nn.Module):
    """As many outputs as units, of which a loss may leave out any."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(count))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [block(x) for block in self.blocks]


class Scaled(nn.Linear):
    """A unit around another one, of which it needs its own weights behind that, too."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x)) + self.bias


class Nested(Heads):
    """The same, of units around others."""

    def __init__(self, count: int) -> None:
        super().__init__(0)
        self.blocks.extend(Scaled() for _ in range(count))


class Auxiliary(Heads):
    """Sums its units' outputs, all but one detached."""

    def forward(self, x: Tensor) -> list[Tensor]:
        first, *rest = super().forward(x)
        return [sum((each.detach() for each in rest), start=first)]


class Around(nn.Module):
    """A checkpoint around units that backward does not come to."""

    def __init__(self, inner: nn.Module, frozen: bool) -> None:
        super().__init__()
        self.inlet, self.inner = nn.Linear(3, 5), inner
        inner.blocks[0].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.inlet(x), use_reentrant=False)[0]


def passed_over(
    rank: int, world_size: int, comm: str, kind: type[Heads], frozen: bool
) -> list[object]:
    """Cases whose gradients are not the plain model's: units after the first, prefetch."""
    wrong: list[object] = []
    for count in range(2, 6):
        for prefetch in range(3):
            torch.manual_seed(count)
            plain = Around(kind(count), frozen)
            model = zshard.wrap(
                copy.deepcopy(plain), comm=comm, prefetch=prefetch, units=[nn.Linear]
            )
            for each in (plain, model):
                each(torch.ones(2, 3)).square().sum().backward()
            for name, param in plain.named_parameters():
                got = zshard.full_grad(model, name)
                if param.grad is None:
                    same = got is None
                else:
                    same = got is not None and torch.equal(got, param.grad)
                if not same:
                    wrong.append((count, prefetch, name))
    return wrong


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [Heads, Nested, Auxiliary])
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_units_that_are_only_recomputed_push_no_other_out(
    comm: str, kind: type[Heads], frozen: bool
) -> None:
    assert run_ranks(passed_over, 2, comm, kind, frozen) == [[], []]


def pushed_out(rank: int, world_size: int) -> str:
    model = zshard.wrap(Around(Heads(4), frozen=False))
    schedule_of(model).backward.recomputed = lambda unit: setattr(unit, "in_use", False)
    loss = model(torch.ones(2, 3)).square().sum()
    with pytest.raises(zshard.StateError) as raised:
        loss.backward()
    return str(raised.value)


def test_a_gradient_made_without_the_weights_is_refused() -> None:
    for message in run_ranks(pushed_out, 2):
        assert "'inner.blocks.0'" in message and "another unit was in its memory" in message


def before_the_model(rank: int, world_size: int, strategy: str, alone: bool) -> None:
    """A backward that comes to what is beside the model in a checkpoint, and not to the model.

    The recomputation runs the model, up to the last tensor that was saved: it is left inside.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5))
    wrapped = zshard.wrap(copy.deepcopy(plain), strategy=strategy, units=["0", "2", "3"])
    schedule = schedule_of(wrapped)
    for _ in range(3):
        for model in (plain, wrapped):
            model.zero_grad()
            called = model[0] if alone else model

            def region(x: Tensor, called: nn.Module = called) -> tuple[Tensor, Tensor]:
                x = x.exp()
                return x, called(x)

            x = torch.linspace(-1.0, 1.0, 20).view(4, 5).requires_grad_()
            beside, out = checkpoint(region, x, use_reentrant=False)
            beside.sum().backward(retain_graph=True)
            assert not any(unit.in_use for unit in schedule.units)
            zshard.state_dict(wrapped)  # the modules hold the sharded parameters
            out.square().sum().backward()
            assert not any(unit.in_use for unit in schedule.units)
        for name, param in plain.named_parameters():
            grad = zshard.full_grad(wrapped, name)
            assert (grad is None) == (param.grad is None), name
            assert grad is None or torch.allclose(grad, param.grad), name


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_recomputation_before_the_backward_has_come_to_the_model_leaves_it_at_rest(
    alone: bool, strategy: str, world_size: int
) -> None:
    run_ranks(before_the_model, world_size, strategy, alone)


class Keeping(Blocks):
    """Recomputes its own layer, and keeps what the first block has made."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.inlet(x).exp(), x, use_reentrant=False)
        self.kept = self.blocks[0](x)
        return self.outlet(self.kept)


def from_what_is_kept(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(0)
    plain = Keeping()
    model = zshard.wrap(copy.deepcopy(plain), strategy=strategy)
    for each in (plain, model):
        output = each(batch(0, 0))
        each.kept.sum().backward()
        del output
    for name, param in plain.named_parameters():
        grad = zshard.full_grad(model, name)
        assert (grad is None) == (param.grad is None)
        assert grad is None or torch.equal(grad, param.grad), name


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_region_of_the_roots_own_layers_may_be_come_to_past_its_output(
    strategy: str, world_size: int
) -> None:
    run_ranks(from_what_is_kept, world_size, strategy)


class Selective(Blocks):
    """Checkpoints around blocks that keep the results of all their operations."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        contexts = partial(create_selective_checkpoint_contexts, save_all)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return self.outlet(x)


def save_all(*args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def selective(rank: int, world_size: int, comm: str) -> None:
    torch.manual_seed(0)
    plain = Selective()
    model = zshard.wrap(copy.deepcopy(plain), comm=comm, units="layer")
    optimizers = zshard.SGD(model.parameters(), lr=0.01), torch.optim.SGD(plain.parameters(), 0.01)
    for step in range(3):
        for other in range(world_size):
            (plain(batch(other, step)).square().mean() / world_size).backward()
        model(batch(rank, step)).square().mean().backward()
        for name, param in plain.named_parameters():
            torch.testing.assert_close(zshard.full_grad(model, name), param.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_selective_checkpoint_keeps_no_result_of_a_gather_within(comm: str) -> None:
    run_ranks(selective, 2, comm)
