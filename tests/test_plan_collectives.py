"""Planned collectives of models whose units are not each called once and trained."""

from __future__ import annotations

from collections import Counter

import models
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import zshard

ORDERS = {
    "skipped": (0, 2),
    "repeated": (0, 1, 2, 0, 1, 2),
    "reversed": (2, 1, 0),
    "in a row": (0, 1, 1, 1, 2, 0, 0),
    "in a row at the end": (0, 1, 2, 2),
}
FROZEN = ("frozen at first", "frozen at first, in a row", "frozen between")


def build(case: str) -> nn.Module:
    """Return the blocks, called in the case's order, or without training some of them."""
    torch.manual_seed(0)
    model = models.Blocks(ORDERS.get(case, (0, 1, 2)))
    if case == "frozen at first":  # of the root, a part
        for module in (model.inlet, model.blocks[0]):
            module.requires_grad_(False)
    if case == "frozen at first, in a row":  # whose outputs backward does not come to
        model.order = (0, 0, 1, 2)
        for module in (model.inlet, model.blocks[0]):
            module.requires_grad_(False)
    if case == "frozen between":
        model.blocks[1].requires_grad_(False)
    return model


class Passing(models.Block):
    """Returns what it was given beside its own, as a block of T5 does with the position bias."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class Leaving(models.Block):
    """Leaves its output in a list that it was given, as in a cache."""

    def forward(self, x: Tensor, into: list[Tensor]) -> None:
        into.append(super().forward(x))


BLOCKS = {
    "blocks pass on what they were given": Passing,
    "blocks leave their outputs in a list": Leaving,
}


class Rows(models.Blocks):
    """Calls of a unit that are in a row in backward alone, or in forward alone."""

    def __init__(self, way: str) -> None:
        super().__init__(block=BLOCKS.get(way, models.Block))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = self.inlet(x)
        if self.way == "blocks pass on what they were given":
            for block in self.blocks:
                x = sum(block(x))
            return self.outlet(x)
        if self.way == "blocks leave their outputs in a list":
            outputs = [x]
            for block in self.blocks:
                block(outputs[-1], outputs)
            return self.outlet(outputs[-1])
        if self.way == "backward comes to one of them":
            return self.outlet(second(first(first(x).detach())))
        if self.way == "backward passes over what is between":
            y = first(x)
            target = second(y).detach()
            return self.outlet(third(first(y) - target))
        y = first(x)
        with torch.no_grad():
            target = first(y)
        return self.outlet(y - target)


WAYS = (
    "backward comes to one of them",
    "backward passes over what is between",
    "the last makes no graph",
    *BLOCKS,
)


def compare_units(rank: int, size: int) -> None:
    """Hold the gathers of each unit in a third step against plans."""
    x = torch.ones(4, 3)
    for way in WAYS:
        planned = zshard.plan(Rows(way), size, batch=x)
        model = zshard.wrap(Rows(way))
        for _ in range(3):
            with zshard.trace(model) as recorded:
                model(x).sum().backward()
            model.zero_grad()
        assert gathers_of(planned) == traced(recorded), way


def traced(recorded: zshard.Trace) -> Counter[str]:
    """How often each unit was gathered."""
    return Counter(event.unit for event in recorded.events if event.phase == "gather")


def gathers_of(planned: zshard.Plan) -> dict[str, int]:
    """How often each unit is gathered."""
    return {each.unit: each.count for each in planned.collectives if each.op == "all_gather"}


def test_units_that_backward_comes_to_otherwise_than_forward_are_gathered_as_planned() -> None:
    run_ranks(compare_units, 2, timeout=120)


class Recomputed(nn.Module):
    """Five blocks, some with two layers inside, of which more than one are recomputed at a time."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.inlet = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh()) for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        if self.way.startswith("sequential"):
            blocks = nn.Sequential(*self.blocks)
            return checkpoint_sequential(blocks, 2, x, use_reentrant="not" not in self.way)
        first, *middle, last = self.blocks
        x = checkpoint(nn.Sequential(*middle), first(x), use_reentrant=False)
        if self.way == "two regions":
            return checkpoint(nn.Sequential(last, first), x, use_reentrant=False)
        return checkpoint(nn.Sequential(last, nn.Tanh()), x, use_reentrant=False)


def compare_recomputed(rank: int, size: int) -> None:
    """Hold the gathers of regions against plans, in which several units push each other out."""
    x, most = torch.ones(4, 3), 0
    for way in ("sequential, reentrant", "sequential, not", "two regions", "one region"):
        for prefetch, inner in ((0, True), (1, False), (1, True), (2, False)):

            def units(name: str, module: nn.Module, inner: bool = inner) -> bool:
                return name.count(".") == 1 or (inner and name.endswith(".1"))

            planned = zshard.plan(Recomputed(way), size, batch=x, units=units, prefetch=prefetch)
            model = zshard.wrap(Recomputed(way), units=units, prefetch=prefetch)
            for _ in range(3):
                with zshard.trace(model) as recorded:
                    model(x).sum().backward()
                model.zero_grad()
            assert gathers_of(planned) == traced(recorded), (way, prefetch, inner)
            taken = zshard.memory(model)["now"]["full_buffers"]
            assert planned.to_dict()["per_rank"]["full_buffers"] == taken, (way, prefetch, inner)
            most = max(most, *gathers_of(planned).values())
    assert most == 4  # in forward twice, once more for the second region, and for its own backward


def test_gathers_of_units_that_are_recomputed_together_are_counted() -> None:
    run_ranks(compare_recomputed, 2, timeout=120)


class Regions(nn.Module):
    """Blocks of three layers, called in checkpointed regions, some of which end in tanh.

    In backward, what ends a region is recomputed before the region's last block is come to.
    """

    def __init__(self, regions: tuple[tuple[int | None, ...], ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.regions = regions
        self.inlet = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for region in self.regions:
            called = [nn.Tanh() if index is None else self.blocks[index] for index in region]
            x = checkpoint(nn.Sequential(*called), x, use_reentrant=False)
        return x


ALL_BLOCKS = tuple(f"blocks.{index}" for index in range(4))
SECOND = tuple(f"{block}.1" for block in ALL_BLOCKS)  # of each block's layers

# Regions, the units inside blocks, and prefetch. Each holds a rule that the others do not: who is
# gathered again behind a region, and who is not; the last, that nobody is while a block computes.
REGIONS = (
    (((3, None), (2, None), (3, None)), SECOND, 0),
    (((1, 0, None), (1,)), SECOND, 0),
    (((1, 3, 0), (0,)), (), 0),
    (((0, 1, 0),), ("blocks.1.0", "blocks.1.1"), 1),
)


def compare_regions(rank: int, size: int) -> None:
    """Hold the gathers of regions that share blocks against plans."""
    x = torch.ones(4, 3)
    for regions, inner, prefetch in REGIONS:
        units = [*ALL_BLOCKS, *inner]
        planned = zshard.plan(Regions(regions), size, batch=x, units=units, prefetch=prefetch)
        model = zshard.wrap(Regions(regions), units=units, prefetch=prefetch)
        for _ in range(3):
            with zshard.trace(model) as recorded:
                model(x).sum().backward()
            model.zero_grad()
        assert {k: n for k, n in gathers_of(planned).items() if n} == traced(recorded), regions


def test_gathers_of_regions_that_share_units_are_counted() -> None:
    run_ranks(compare_regions, 2, timeout=120)


class OwnTarget(nn.Linear):
    """A layer that calls itself for its target, of which there is no graph."""

    def forward(self, x: Tensor, inside: bool = False) -> Tensor:
        y = super().forward(x)
        if inside:
            return y.tanh()
        with torch.no_grad():
            target = self(x, inside=True)
        return y - target


def compare_own_calls(rank: int, size: int) -> None:
    x, units = torch.ones(4, 3), ["1", "2", "3"]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), *(OwnTarget(3, 3) for _ in units), nn.Linear(3, 3))

    planned = zshard.plan(build(), size, batch=x, units=units)
    model = zshard.wrap(build(), units=units, init="broadcast")
    for _ in range(3):
        with zshard.trace(model) as recorded:
            model(x).sum().backward()
        model.zero_grad()
    assert gathers_of(planned) == traced(recorded)


def test_a_call_of_a_unit_by_itself_is_no_call_of_its_own() -> None:
    run_ranks(compare_own_calls, 2)


@pytest.mark.parametrize(("prefetch", "slots"), [(0, 2), (1, 2), (2, 3)])
def test_without_a_batch_a_plan_is_that_of_one_call_of_each_unit(prefetch: int, slots: int) -> None:
    """Also where a unit is inside another one, and both are in use at the same time."""

    def units(name: str, module: nn.Module) -> bool:
        return isinstance(module, (nn.Sequential, nn.Linear))

    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)))
    model.append(nn.Linear(3, 3))
    model[0].scale = nn.Parameter(torch.ones(()))  # around what the first has inside
    model[0].register_forward_hook(lambda module, _, output: output * module.scale)
    with_one = zshard.plan(model, 2, units=units, prefetch=prefetch, batch=torch.ones(4, 3))
    without = zshard.plan(model, 2, units=units, prefetch=prefetch)
    assert without.collectives == with_one.collectives
    assert without.buffers == with_one.buffers
    assert without.buffers.full == slots * max(unit.full_buffer for unit in without.units)


def compare(rank: int, size: int) -> int:
    """Hold the collectives of a third step against plans; returns how many."""
    x, count = torch.ones(4, 3), 0
    for case in (*ORDERS, *FROZEN):
        for strategy in ("zero3", "zero2", "ddp"):
            planned = zshard.plan(build(case), size, strategy=strategy, batch=x)
            model = zshard.wrap(build(case), strategy=strategy)
            trained = [param for param in model.parameters() if param.requires_grad]
            optimizer = zshard.AdamW(trained)
            stats = zshard.stats(model)
            for _ in range(3):
                stats.reset()
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            for op in ("all_gather", "reduce_scatter"):
                alike = [each for each in planned.collectives if each.op == op]
                calls, sent = stats.calls[op], stats.sent_bytes[op]
                assert sum(each.count for each in alike) == calls, (case, strategy, op)
                assert sum(each.bytes * each.count for each in alike) == sent, (case, strategy, op)
            count += 1
    return count


def test_gathers_and_reductions_are_those_of_the_units_that_run() -> None:
    assert set(run_ranks(compare, 2, timeout=120)) == {24}


@pytest.mark.parametrize(("case", "gathers"), [("skipped", 4), ("frozen at first", 5)])
def test_a_timeline_has_the_gathers_of_the_units_that_run(case: str, gathers: int) -> None:
    planned = zshard.plan(build(case), 2, batch=torch.ones(4, 3))
    line = planned.timeline
    assert line is not None
    spans = [span for span in line.spans if span.stream == "gather"]
    assert len(spans) == gathers
    packed = [span.unit for span in line.spans if span.phase == "pack"]
    reduced = [each.unit for each in planned.collectives if each.op == "reduce_scatter"]
    assert sorted(packed) == sorted(reduced)


def test_backward_of_a_unit_that_makes_the_models_output_is_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))  # the root computes nothing
    line = zshard.plan(model, 2, batch=torch.ones(4, 3)).timeline
    assert line is not None
    took = {s.unit: s.ended - s.began for s in line.spans if s.phase == "backward"}
    assert took["1"] > 0
