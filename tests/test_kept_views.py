"""Views of whole weights that outlive their unit's turn are warned of, with what keeps them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import slots
import torch
from odd import INPUT, Stacked
from ranks import run_ranks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import zshard
from zshard.units import kept_views
from zshard.units.kept_views import KeptViews
from zshard.units.pool import Slot
from zshard.wrap import schedule_of


class Keeper(nn.Linear):
    """Keeps a view of its weight, where ``keeps``."""

    keeps = False

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight.detach()[0] if self.keeps else None
        return super().forward(x)


class ByHand(nn.Linear):
    """Has autograd keep a view of its weight that Python has made."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


class Contextual(torch.autograd.Function):
    """Keeps a view where autograd does not free it, but with the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight.t(), INPUT.flatten(0, 1).t() @ grad.flatten(0, 1)


class OnContext(ByHand):
    def forward(self, x: Tensor) -> Tensor:
        return Contextual.apply(x, self.weight.t())


class ByObjects(torch.autograd.Function):
    """Keeps views in what its context holds, which a backward does not free either."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.pair, ctx.state = (None, weight), SimpleNamespace(weight=weight.detach())
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        weight = ctx.pair[1]
        return grad @ weight.t(), INPUT.flatten(0, 1).t() @ grad.flatten(0, 1)


class InObjects(ByHand):
    def forward(self, x: Tensor) -> Tensor:
        return ByObjects.apply(x, self.weight.t())


class Recomputed(Stacked):
    """Recomputes more than a backward through what it returns reads."""

    def forward(self, x: Tensor) -> Tensor:
        y, rest = checkpoint(self._run, x, use_reentrant=False)
        y.rest = rest
        return y

    def _run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.blocks[0](x)
        return y, super().forward(y.detach())


def step(model: nn.Module) -> None:
    model(INPUT).square().mean().backward()


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def kept_by_modules(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Stacked(Keeper))
    with silence():
        step(model)
    Keeper.keeps = rank == 1
    held = r"unit, \(8,\) of 'blocks\.\d\.weight' or .* in attribute 'blocks\.\d\.kept'"
    with pytest.warns(UserWarning, match=held) if rank == 1 else silence() as warned:
        step(model)
    if rank == 1:
        assert len(warned) == len(schedule_of(model).pool.slots)  # one for all that lies there
    with silence():  # what is there yet was told of
        step(model)
        step(model)


def test_views_that_modules_keep_are_named_once() -> None:
    run_ranks(kept_by_modules, 2)


def kept_by_a_hook(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Stacked(lambda: nn.Linear(8, 8)), strategy="zero3")
    kept: list[Tensor] = []
    model.blocks[2].register_forward_hook(
        lambda module, args, output: kept.append(module.weight.data)
    )
    with torch.no_grad(), pytest.warns(UserWarning, match=r"'blocks\.2\.weight'.* in a list"):
        model(INPUT)
    assert not torch.equal(kept[0], zshard.full_param(model, "blocks.2.weight"))  # as it says


def test_a_view_that_a_hook_keeps_from_a_forward_without_gradients_is_named() -> None:
    run_ranks(kept_by_a_hook, 2)


def kept_by_graphs(rank: int, world_size: int, made: type[Stacked], block: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(made(block))
    seeks: list[int] = []  # how many were found
    seek = kept_views._views_in
    kept_views._views_in = lambda *args: seeks.append(len(views := seek(*args))) or views
    with silence():
        outputs = [model(INPUT) for _ in range(2)]
        outputs[0].mean().backward(retain_graph=True)
        assert any(seeks)  # there are some, which nobody but the graphs has
        for _ in range(20):
            step(model)
            outputs.append(model(INPUT))
    all_slots = schedule_of(model).pool.all_slots
    assert len(seeks) <= 5 * len(all_slots)  # as 20 graphs gathered


@pytest.mark.parametrize(
    ("made", "block"),
    [(Stacked, ByHand), (Stacked, OnContext), (Stacked, InObjects), (Recomputed, ByHand)],
)
def test_what_a_graph_keeps_is_not_warned_of_and_not_sought_at_every_step(
    made: type[Stacked], block: type[nn.Module]
) -> None:
    run_ranks(kept_by_graphs, 2, made, block)


class Own(Tensor):
    """Has a storage that is nobody's business."""

    def untyped_storage(self) -> Any:
        raise LookupError("asked for it")


class OfBytes(TorchFunctionMode):
    """Refuses what is done with other tensors than slots and their views."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args[0].dtype is not torch.uint8:
            raise LookupError(f"asked of {func}")
        return func(*args, **(kwargs or {}))


def test_what_else_there_is_in_the_process_is_not_asked() -> None:
    slot = Slot(64, torch.device("cpu"))
    others = [
        torch.ones(2).as_subclass(Own),
        WeakKeyDictionary.__new__(WeakKeyDictionary),  # another thread may be about to fill it
        torch._C._FunctionBase(),
        torch.eye(2).to_sparse(),
    ]
    model = nn.Module()
    model.kept = slot.memory[3:]
    views = KeptViews(model, [], SimpleNamespace(all_slots=[slot]))
    with pytest.warns(match=r"\(61,\) of a parameter in attribute 'kept'"), OfBytes():
        views.warn()
    del others  # there until now


class Around(nn.Module):
    """A unit with a unit inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = ByHand(), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor


def all_ours(rank: int, world_size: int, block: type[nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Stacked(block), strategy="zero3", **options)
    optimizer = zshard.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(INPUT).square().mean()
        assert any(slots.foreign(model))
        loss.backward()
        assert not any(slots.foreign(model))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(INPUT)
        assert not any(slots.foreign(model))


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("block", [ByHand, Around])
def test_without_a_graph_every_tensor_in_a_slot_is_ours(
    block: type[nn.Module], comm: str, prefetch: int
) -> None:
    run_ranks(all_ours, 2, block, {"comm": comm, "prefetch": prefetch, "units": "layer"})
