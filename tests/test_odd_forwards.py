"""What forwards may do that is unusual: right, or an error by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from odd import INPUT, Stacked, assert_same_grads, pair
from ranks import run_ranks
from torch import Tensor, nn

import zshard
import zshard.comm
import zshard.transports.transport
from zshard.units.leaf import as_autograd_sees
from zshard.wrap import schedule_of

# --- what a unit gives out -----------------------------------------------------------------------


class AddsInPlace(Stacked):
    """Writes to what a unit returned, a view, in place."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = start = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x.tanh()).transpose(1, 2).transpose(1, 2)
            x += start
        return x


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class GivesSlotted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Slotted | Tensor) -> Slotted:
        return Slotted(self.linear(x.value if isinstance(x, Slotted) else x).tanh())


class SlottedStack(Stacked):
    def __init__(self) -> None:
        super().__init__(GivesSlotted)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).value


def unseen_outputs(rank: int, world_size: int, make: Callable[[], nn.Module], hooked: bool) -> None:
    plain, wrapped = pair(make)
    for _ in range(2):
        for model in (plain, wrapped):
            model.zero_grad()
            if hooked:  # what they keep, autograd does not check
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                    out = model(INPUT)
            else:
                out = model(INPUT)
            out.square().mean().backward()
        assert_same_grads(plain, wrapped)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("make", [AddsInPlace, SlottedStack])
def test_backward_finds_units_by_views_written_in_place_and_objects_with_slots(
    world_size: int, hooked: bool, make: Callable[[], nn.Module]
) -> None:
    run_ranks(unseen_outputs, world_size, make, hooked)


def test_relu_in_place_behind_linear_layers() -> None:
    layers = [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)]
    plain, wrapped = pair(lambda: nn.Sequential(*layers, nn.Linear(8, 8)))
    for model in (plain, wrapped):
        model(INPUT).square().mean().backward()
    assert_same_grads(plain, wrapped)


class Spread(nn.Module):
    """Returns a distribution with a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.deviation = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor, into: list[Tensor] | None = None) -> object:
        if into is not None:
            into.append(self.deviation.expand_as(x))
            return self.linear(x)
        return torch.distributions.Normal(self.linear(x), self.deviation)


def leaves_a_view(rank: int, world_size: int, grad: bool) -> None:
    wrapped = zshard.wrap(Stacked(Spread), strategy="zero3")
    with torch.set_grad_enabled(grad):
        for call in (lambda: wrapped.blocks[0](INPUT), lambda: wrapped.blocks[0](INPUT, [])):
            with pytest.raises(zshard.ShardedAccessError, match=r"'blocks\.0'.*Put a copy there"):
                call()
    _, other = pair(lambda: Stacked(lambda: nn.Linear(8, 8)))
    other(INPUT).sum().backward()  # the ranks are still in step


@pytest.mark.parametrize("grad", [True, False])
def test_a_view_of_a_parameter_left_where_it_cannot_be_copied_is_refused(grad: bool) -> None:
    run_ranks(leaves_a_view, 2, grad)


class WritesThroughAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).view(2, 3, 2, 4)
        y[:, :, 0] = 0.0
        y[:1].mul_(0.5)
        return y.view(2, 3, 8) if self.training else y


class ViewsLast(Stacked):
    def __init__(self) -> None:
        super().__init__(WritesThroughAView)
        self.blocks[5].eval()


def views(rank: int, world_size: int) -> None:
    plain, wrapped = pair(ViewsLast)
    for model in (plain, wrapped):
        model(INPUT).square().mean().backward()
    assert_same_grads(plain, wrapped)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_unit_may_return_a_view_written_through_another(world_size: int) -> None:
    run_ranks(views, world_size)


class Straight(torch.autograd.Function):
    """Keeps the weight where autograd does not check it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.weight, None


class Detached(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Straight.apply(x, self.weight.detach()).tanh())


class Dropping(Stacked):
    """Leaves blocks out, so that units come next to each other which share memory."""

    order = (0, 1, 2, 3, 4, 5)

    def __init__(self) -> None:
        super().__init__(lambda: Detached(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def reads_detached(rank: int, world_size: int, comm: str) -> None:
    plain, wrapped = pair(Dropping, comm=comm)
    for step in range(6):
        for model in (plain, wrapped):
            model.order = (0, 1, 2, 3, 4) if step < 2 else (0, 2, 4)
            model.zero_grad()
            model(INPUT).square().mean().backward()
        for name, param in plain.named_parameters():
            if param.grad is not None:
                torch.testing.assert_close(zshard.full_grad(wrapped, name), param.grad)


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_node_that_reads_a_detached_weight_last_reads_that_weight(comm: str) -> None:
    run_ranks(reads_detached, 2, comm)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x.to_dense() if x.is_sparse else x)).relu().to_sparse()


def sparse_outputs(rank: int, world_size: int) -> None:
    plain, wrapped = pair(lambda: Stacked(Sparse))
    with torch.no_grad():
        torch.testing.assert_close(wrapped(INPUT).to_dense(), plain(INPUT).to_dense())


def test_a_unit_may_return_a_tensor_without_storage() -> None:
    run_ranks(sparse_outputs, 2)


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self) -> Tensor:
        return self.weight


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Position(), Position()])

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.blocks[0]()) * self.blocks[1]()


def returns_parameter(rank: int, world_size: int, strategy: str) -> None:
    plain, wrapped = pair(Positions, strategy=strategy)
    for _ in range(2):
        for model in (plain, wrapped):
            model.zero_grad()
            model(INPUT).square().mean().backward()
        assert_same_grads(plain, wrapped)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(INPUT), plain(INPUT))
    with as_autograd_sees():
        for unit in schedule_of(wrapped).units:
            for leaf in (leaf for flat in unit.flats for leaf in flat.full.leaves):
                assert len(leaf._backward_hooks) == 1  # our own, not one more at each forward


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_unit_may_return_its_own_parameter(world_size: int, strategy: str) -> None:
    run_ranks(returns_parameter, world_size, strategy)


class Scaled(nn.Module):
    """Returns a parameter of the root beside what it computes, as contrastive models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.linear(x), {"scale": self.scale}


def returns_root_parameter(rank: int, world_size: int) -> None:
    plain, wrapped = pair(Scaled)
    for grad in (True, False, True):
        outs = []
        for model in (plain, wrapped):
            model.zero_grad()
            with torch.set_grad_enabled(grad):
                out, more = model(INPUT)
                outs.append(loss := out.square().mean() * more["scale"].exp())
            if grad:
                loss.backward()
            outs.append(more["scale"].detach().clone())  # after backward, as loggers read it
        torch.testing.assert_close(outs[2:], outs[:2])
        if grad:
            assert_same_grads(plain, wrapped)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_model_may_return_its_own_parameter(world_size: int) -> None:
    run_ranks(returns_root_parameter, world_size)


class Listed(nn.Module):
    """Reads parameters out of containers, which are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(8)) for _ in range(2)])
        self.nested = nn.ModuleList([nn.ParameterDict({"shift": nn.Parameter(torch.rand(8))})])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0] * self.scales[1] + self.nested[0]["shift"]


def listed(rank: int, world_size: int) -> None:
    plain, wrapped = pair(lambda: Stacked(Listed), units="layer")
    for model in (plain, wrapped):
        model(INPUT).square().mean().backward()
    assert_same_grads(plain, wrapped)
    units = [unit.name for unit in schedule_of(wrapped).units[1:]]
    assert units == [f"blocks.{index}" for index in range(6)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameter_containers_are_part_of_the_layer_that_reads_them(world_size: int) -> None:
    run_ranks(listed, world_size)


class Hollow(nn.Module):
    """With units="layer", a unit that owns nothing but a zero-size parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.nothing = nn.Linear(8, 8), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.nothing.sum()


def hollow(rank: int, world_size: int, strategy: str, comm: str) -> None:
    plain, wrapped = pair(lambda: Stacked(Hollow), units="layer", strategy=strategy, comm=comm)
    optimizer = zshard.AdamW(wrapped.parameters())
    for _ in range(2):
        plain.zero_grad()
        optimizer.zero_grad()
        for side in (plain, wrapped):
            side(INPUT).square().sum().backward()
        assert_same_grads(plain, wrapped)
        with zshard.full_params(wrapped):
            assert wrapped.blocks[0].nothing.shape == (0,)
    optimizer.step()


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_unit_may_own_no_element(strategy: str, comm: str) -> None:
    run_ranks(hollow, 3, strategy, comm)
