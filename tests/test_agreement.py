"""Ranks that run different units, in other orders, or other passes: right results, or errors."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import models
import pytest
import torch
from models import Block
from ranks import RankFailure, run_ranks
from steps import all_by_messages, batch, build, one_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import Plain, Record, Wrapped, adamw, assert_close, assert_same_bits, train

import zshard
from zshard.wrap import schedule_of

BLOCKS = 4
STEPS = 8


class Routed(nn.Module):
    """Blocks of which each rank runs those, in that order, that its router says for each step.

    Args:
        region: recompute all blocks in backward, in one checkpointed region.
    """

    def __init__(self, rank: int, route: str, region: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, models.WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.outlet = nn.Linear(models.WIDTH, 1)
        self.rank, self.route, self.region, self.step = rank, route, region, 0

    def forward(self, x: Tensor) -> Tensor:
        path = ROUTES[self.route](self.rank, self.step)
        self.step += 1
        x = self.inlet(x)
        x = checkpoint(self.run, x, path, use_reentrant=False) if self.region else self.run(x, path)
        return self.outlet(x)

    def run(self, x: Tensor, path: list[int]) -> Tensor:
        for block in path:
            x = self.blocks[block](x)
        return x


def stochastic_depth(rank: int, step: int) -> list[int]:
    rng = random.Random(f"{rank} {step}")
    return [block for block in range(BLOCKS) if rng.random() < 0.6]


def any_order(rank: int, step: int) -> list[int]:
    rng = random.Random(f"{rank} {step}")
    return [rng.randrange(BLOCKS) for _ in range(rng.randrange(6))]


# (rank, step) -> the blocks that run, in order.
ROUTES: dict[str, Callable[[int, int], list[int]]] = {
    "an expert each": lambda rank, step: [0, 1 + rank % 3],
    "stochastic depth": stochastic_depth,
    "one rank skips all": lambda rank, step: [] if rank == 0 else [0, 1, 2, 3],
    "opposite orders": lambda rank, step: [0, 1, 2, 3][:: 1 - 2 * (rank % 2)],
    "a branch at times": lambda rank, step: [0, 1, 3] if (step + rank) % 3 else [0, 2, 3],
    "loops of other lengths": lambda rank, step: [0, *[1, 2] * (1 + (rank + step) % 3), 3],
    "any order": any_order,
    "one order": lambda rank, step: [0, 1, 2, 3],
}


def routed(
    rank: int, world_size: int, route: str, options: dict[str, object], region: bool = False
) -> tuple[Record, Record]:
    data = models.batches("blocks", STEPS, rank)
    records = []
    for is_wrapped in (False, True):
        torch.manual_seed(1)
        model = Routed(rank, route, region)
        if is_wrapped:
            side: Plain | Wrapped = Wrapped(zshard.wrap(model, **options))
        else:
            side = Plain(model, world_size, unused=True)
        records.append(train(side, adamw(model), data))
    return records[1], records[0]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("route", ROUTES)
def test_ranks_that_run_different_units_equal_ddp_bit_by_bit(route: str, strategy: str) -> None:
    for actual, expected in run_ranks(routed, 2, route, {"strategy": strategy}):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("route", ["stochastic depth", "any order"])
def test_so_they_do_with_any_prefetch(route: str, prefetch: int) -> None:
    for actual, expected in run_ranks(routed, 2, route, {"prefetch": prefetch}):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("route", ["stochastic depth", "opposite orders", "loops of other lengths"])
def test_so_they_do_where_a_region_of_several_units_is_recomputed(route: str) -> None:
    for actual, expected in run_ranks(routed, 2, route, {}, True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("route", ["stochastic depth", "any order"])
def test_three_ranks_that_run_different_units_are_within_tolerance_of_ddp(route: str) -> None:
    for actual, expected in run_ranks(routed, 3, route, {"units": "layer"}):
        assert_close(actual, expected, tolerance=2e-5)


def meetings(rank: int, world_size: int, route: str) -> list[int]:
    """How often the ranks met in each step."""
    torch.manual_seed(1)
    model = zshard.wrap(Routed(rank, route))
    counts = []
    for step in range(6):
        zshard.stats(model).reset()
        one_step(model, rank, step)
        zshard.clip_grad_norm_(model, 1.0)
        counts.append(zshard.stats(model).calls["agree"])
    return counts


def test_a_step_that_is_like_the_one_before_meets_twice() -> None:
    for first, _, *others in run_ranks(meetings, 3, "an expert each"):
        assert first > 8
        assert others == [2] * 4, "once before forward, once before backward"
    for _, _, *others in run_ranks(meetings, 2, "an expert each"):
        assert others == [3] * 4, "and once behind backward, where a unit got no gradient"


def test_a_forward_over_other_units_in_the_same_order_is_known_after_a_few_steps() -> None:
    for counts in run_ranks(forward_meetings, 2):
        assert counts[0] > 3 and counts[-3:] == [1, 1, 1]


def forward_meetings(rank: int, world_size: int) -> list[int]:
    torch.manual_seed(1)
    model = zshard.wrap(Routed(rank, "stochastic depth"))
    counts = []
    for step in range(10):
        zshard.stats(model).reset()
        with torch.no_grad():
            model(batch(rank, step))
        counts.append(zshard.stats(model).calls["agree"])
    return counts


# --- different passes ----------------------------------------------------------------------------


def different_phases(rank: int, world_size: int, what: str) -> str:
    model = build()
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    one_step(model, rank, 0)
    optimizer.step()
    optimizer.zero_grad()

    def act() -> None:
        if rank == 0:
            one_step(model, rank, 1)
        elif what == "forward":
            model(batch(rank, 1))
            model(batch(rank, 1))
        elif what == "read":
            zshard.full_param(model, "outlet.weight")
        else:
            with zshard.full_params(model):
                pass

    with pytest.raises(zshard.MismatchError) as caught:
        act()
    # The model stays usable.
    model.zero_grad()
    loss = one_step(model, rank, 2)
    zshard.clip_grad_norm_(model, 1.0)
    assert torch.isfinite(loss)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        ("forward", "rank 0: a backward; rank 1: a forward"),
        ("read", "rank 0: a forward; rank 1: full_param('outlet.weight')"),
        ("write", "rank 0: a forward; rank 1: full_params"),
    ],
)
def test_ranks_that_do_different_things_are_all_told_what_and_can_go_on(
    what: str, seen: str
) -> None:
    for message in run_ranks(different_phases, 2, what):
        assert seen in message


def evaluated_on_one(rank: int, world_size: int, strategy: str, evaluates: bool) -> list[Tensor]:
    """Losses of steps, between which rank 0 alone evaluates, once where it is refused."""
    model = build(strategy=strategy)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    losses, belongs = [], "alone belongs inside `with zshard.full_params"
    for index in range(4):
        losses.append(one_step(model, rank, index))
        optimizer.step()
        optimizer.zero_grad()
        if evaluates and index == 1:
            with pytest.raises(zshard.MismatchError, match=belongs), torch.no_grad():
                model(batch(2, 0)) if rank == 0 else zshard.full_param(model, "outlet.weight")
        elif evaluates:
            with zshard.full_params(model), torch.no_grad():
                for other in range(index if rank == 0 else 0):
                    model(batch(2, other))
    return losses


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_an_evaluation_on_one_rank_is_told_its_place_and_disturbs_nothing(strategy: str) -> None:
    undisturbed = run_ranks(evaluated_on_one, 2, strategy, False)
    evaluated = run_ranks(evaluated_on_one, 2, strategy, True)
    for losses, expected in zip(evaluated, undisturbed, strict=True):
        assert torch.equal(torch.stack(losses), torch.stack(expected))


class Planted(Exception):
    pass


def exception_on_one_rank(rank: int, world_size: int, where: str) -> tuple[list[Tensor], str]:
    """Losses after a step in which only rank 1 raised, and what rank 0 was told."""
    model = build()
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)

    def fail(*_: object) -> None:
        raise Planted

    def step(index: int) -> Tensor:
        loss = one_step(model, rank, index)
        zshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(0), step(1)]
    told = ""
    if where:
        module = model.blocks[1].up
        if rank == 1 and where == "forward":
            handle = module.register_forward_hook(fail)
        elif rank == 1:
            handle = module.register_full_backward_hook(fail)
        with pytest.raises((Planted, zshard.Error)) as caught:
            step(7)
        told = f"{type(caught.value).__name__}: {caught.value}"
        if rank == 1:
            handle.remove()
            if where != "forward":
                zshard.reset(model)
        optimizer.zero_grad()
    losses += [step(2), step(3)]
    return losses, told


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_on_one_rank_all_are_told_and_go_on_as_if_it_had_not_been(
    where: str,
) -> None:
    expected = [losses for losses, _ in run_ranks(exception_on_one_rank, 2, "")]
    results = run_ranks(exception_on_one_rank, 2, where)
    assert [losses for losses, _ in results] == expected
    assert results[1][1].startswith("Planted")
    if where == "forward":
        said = "rank 0: a backward; rank 1: a forward, after one that raised an exception"
        assert said in results[0][1] and "evaluate" not in results[0][1]
    else:
        assert "StateError: on rank 1 a backward of this step" in results[0][1]


def dies(rank: int, world_size: int, messages: bool) -> None:
    if messages:
        all_by_messages(rank)
    model = build()
    one_step(model, rank, 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zshard.CommError) as caught:
        one_step(model, rank, 1)
    with pytest.raises(zshard.CommError):  # and again, at once
        one_step(model, rank, 2)
    assert "rank 1 (process " in str(caught.value) or messages
    os._exit(0)  # the group's end would wait for a send that gloo has forgotten


@pytest.mark.parametrize("messages", [False, True])
def test_a_killed_rank_is_a_comm_error_on_the_other_not_a_hang(messages: bool) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(dies, 2, messages, timeout=30, grace=15)
    story = str(caught.value)
    assert "rank 1 was killed by SIGKILL" in story
    assert "rank 0 left no result and exited with status 0" in story


def strayed(rank: int, world_size: int) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """Steps of one forward whose backward changes its way, on rank 1 alone and then on both."""
    torch.manual_seed(1)
    model = zshard.wrap(Routed(rank, "one order"))
    torch.manual_seed(1)
    plain = nn.parallel.DistributedDataParallel(Routed(rank, "one order"))
    told: list[str] = []
    losses: tuple[list[Tensor], list[Tensor]] = ([], [])
    for step, regions in enumerate([(False, False)] * 2 + [(False, True), (True, True)] * 2):
        model.region = plain.module.region = regions[rank]
        for side, seen in zip((model, plain), losses, strict=True):
            loss = (side(batch(rank, step)) - 1.0).square().mean()
            seen.append(loss.detach())
            try:
                loss.backward()
                zshard.clip_grad_norm_(model, 1e9)
            except zshard.StateError as error:
                told.append(f"{step}: {error}")
                (side(batch(rank, step)) - 1.0).square().mean().backward()
        for name, parameter in plain.module.named_parameters():
            assert torch.equal(zshard.full_grad(model, name), parameter.grad), name
        for side in (model, plain):
            side.zero_grad()
    return told, *losses


def test_a_backward_that_takes_another_way_is_refused_on_all_ranks_once_and_then_expected() -> None:
    first, second = run_ranks(strayed, 2)
    assert len(first[0]) == len(second[0]) == 1
    assert first[0][0].startswith("2: on rank 1 a backward of this step")
    assert second[0][0].startswith("2: rank 1: backward reached unit 'blocks.1' by another way")
    for _, ours, theirs in (first, second):
        assert all(map(torch.equal, ours, theirs))


def test_programs_do_not_pile_up_on_ranks_that_never_repeat_themselves() -> None:
    torch.manual_seed(1)
    model = zshard.wrap(Routed(0, "any order"))
    for step in range(150):
        one_step(model, 0, step)
    agreement = schedule_of(model).agreement
    assert 32 < len(agreement._programs._learned) <= 64
