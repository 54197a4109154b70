"""A unit inside another that does not call it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from steps import batch
from torch import Tensor, nn

import zshard


class Around(nn.Module):
    """A unit around another, which it does not call itself; one of its parameters is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own, self.unused = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x)


class InnerFirst(nn.Module):
    """Calls the inner unit, and then the one around it."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.around, self.skips = Around(), skips

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x if self.skips else self.around.inner(x))


def inner_unit_first(rank: int, world_size: int, on: tuple[int, ...]) -> str:
    torch.manual_seed(0)
    model = InnerFirst(skips=rank not in on)
    plain = copy.deepcopy(model)
    zshard.wrap(model, units=["around", "around.inner"], prefetch=0)  # one memory for the two
    with pytest.raises(zshard.StateError) as caught:
        model(batch(rank, 0)).sum().backward()
        zshard.clip_grad_norm_(model, 1.0)
    with torch.no_grad():
        assert torch.equal(model(batch(rank, 1)), plain(batch(rank, 1)))
    return str(caught.value)


@pytest.mark.parametrize("on", [(0, 1), (0,)])
def test_a_unit_needed_while_the_one_around_it_has_its_memory_is_refused(
    on: tuple[int, ...],
) -> None:
    for rank, said in enumerate(run_ranks(inner_unit_first, 2, on, timeout=30)):
        if rank in on:
            assert "'around.inner' is needed in backward while unit 'around' around it" in said
        else:
            assert "on rank 0 a backward of this step" in said


class CallsInner(Around):
    """A unit that calls the one inside it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.inner(x))


class ByTurns(nn.Module):
    """Calls the inner unit alone, or the one around it, which calls it too."""

    def __init__(self) -> None:
        super().__init__()
        self.around, self.nested = CallsInner(), False

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x) if self.nested else self.around.inner(x)


def inner_unit_moves(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = ByTurns()
    plain = copy.deepcopy(model)
    zshard.wrap(model, units=["around", "around.inner"], prefetch=0)
    for each in (model, plain):
        each.around.inner.weight.register_hook(lambda grad: 3.0 * grad)
    for step in range(4):
        for each in (model, plain):
            each.nested = step > 0
            each(batch(0, step)).sum().backward()
        for name, param in plain.named_parameters():
            found = zshard.full_grad(model, name)
            assert (found is None) == (param.grad is None), f"step {step}, {name}"
            assert found is None or torch.equal(found, param.grad), f"step {step}, {name}"
        model.zero_grad()
        plain.zero_grad()


def test_a_unit_that_changes_its_memory_has_its_gradients_and_their_hooks() -> None:
    run_ranks(inner_unit_moves, 2)


class CallsSome(nn.Module):
    """Calls some of the units inside it, and then what is its own."""

    def __init__(self, calls: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.own, self.calls = nn.Linear(3, 3), calls

    def forward(self, x: Tensor) -> Tensor:
        for index in self.calls:
            x = self.inner[index](x)
        return self.own(x)


def train_beside(make: Callable[[], nn.Module], prefetch: int) -> None:
    """Check the outputs of steps of a unit and those inside it, on ranks that run unlike ones."""
    torch.manual_seed(0)
    model = nn.Sequential(make())
    plain = copy.deepcopy(model)
    units = ["0", *(f"0.inner.{index}" for index in range(len(model[0].inner)))]
    zshard.wrap(model, units=units, prefetch=prefetch, comm="group")
    for step in range(2):
        x = batch(dist.get_rank(), step)
        out = model(x)
        assert torch.equal(out, plain(x))
        out.sum().backward()


def others_inside(rank: int, world_size: int, prefetch: int) -> None:
    train_beside(lambda: CallsSome((0, 1) if rank == 0 else (1,)), prefetch)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_unit_in_use_stays_while_another_rank_needs_another_one_inside_it(prefetch: int) -> None:
    run_ranks(others_inside, 2, prefetch)


class Forces(nn.Module):
    """Adds what the gradient is of what its own layer and the first ``through`` units inside make.

    Of its input, which that gradient comes to through its own layer.
    """

    def __init__(self, through: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.own, self.through = nn.Linear(3, 3), through

    def forward(self, x: Tensor) -> Tensor:
        at = x.detach().requires_grad_()
        made = [self.own(at)]
        for inner in self.inner:
            made.append(inner(made[-1]).tanh())
        (force,) = torch.autograd.grad(made[self.through].sum(), at)
        return self.own(x) + force


def forces(rank: int, world_size: int, prefetch: int) -> None:
    train_beside(lambda: Forces(through=1 + rank), prefetch)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_so_does_one_whose_forward_a_backward_is_inside_of(prefetch: int) -> None:
    run_ranks(forces, 2, prefetch)
