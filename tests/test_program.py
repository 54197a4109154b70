"""Programs: what every rank needs, in its order, and each reduction once."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from models import Block, Blocks
from ranks import run_ranks
from steps import batch
from torch import Tensor, nn

import zshard
from zshard.schedule import live
from zshard.step.program import Op, Pass, Turn, learn
from zshard.tag import Tag


def gathers(units: str) -> list[Turn]:
    return [Turn(Op.GATHER, "abcdefgh".index(unit)) for unit in units]


def spelled(program: tuple[Turn, ...]) -> str:
    names = "abcdefgh"
    return "".join(names[u] if op is Op.GATHER else names[u].upper() for op, u in program)


def turns(text: str) -> list[Turn]:
    return [
        Turn(Op.GATHER if c.islower() else Op.REDUCE, "abcdefgh".index(c.lower())) for c in text
    ]


@pytest.mark.parametrize(
    ("old", "needed", "late", "prefetch", "expected"),
    [
        (None, ["abc", "abc"], "", 1, "abc"),
        (None, ["abd", "acd"], "", 1, "abcd"),
        ("abd", ["acd", "acd"], "", 1, "abcd"),
        ("abcdefgh", ["ba", "ba"], "", 1, "ba"),  # of another time
        (None, ["cCbBaA"], "", 0, "cCbBaA"),
        (None, ["cCbBaA"], "", 1, "cbCaBA"),
        (None, ["cCbBaA"], "", 2, "cbaCBA"),
        (None, ["CbBaA"], "", 1, "bCaBA"),
        (None, ["cCbB", "cCaA"], "D", 0, "cCbBaAD"),
        (None, ["bBaA", "aAbB"], "", 0, "abBaA"),  # a reduction is the last of its places
        (None, ["cC", "aA"], "BD", 0, "cCaABD"),
        ("cDC", ["cC", "aA"], "CD", 0, "cCaAD"),  # on another rank it was not late
    ],
)
def test_a_program_has_what_every_rank_needs_in_its_order_and_each_reduction_once(
    old: str | None, needed: list[str], late: str, prefetch: int, expected: str
) -> None:
    program = learn(
        None if old is None else tuple(turns(old)),
        [turns(text) for text in needed],
        turns(late),
        prefetch,
    )
    assert spelled(program) == expected


@pytest.mark.parametrize("seed", range(50))
def test_any_needs_are_contained_in_the_program_that_is_learned_of_them(seed: int) -> None:
    rng = random.Random(seed)
    needed = [
        gathers("".join(rng.choices("abcdefgh", k=rng.randrange(9))))
        for _ in range(rng.choice([1, 2, 4]))
    ]
    program = learn(None, needed, turns("AB"), rng.randrange(3))
    for sequence in needed:
        rest = iter(program)
        assert all(turn in rest for turn in sequence)
    assert [turn for turn in program if turn.op is Op.REDUCE] == turns("AB")


def test_at_the_end_of_a_backward_one_word_tells_which_of_any_number_of_units_are_left() -> None:
    ranks = [Pass(makes_gradients=True), Pass(makes_gradients=True), Pass()]
    for each in ranks:
        each.reduce(range(200))
    new, old = [{7, 61}, {120}, {3}], [{1}, {1}, {1}]
    none_made = ranks[2].asks(new[2].__contains__, old[2].__contains__)
    assert ranks[2].left_to_reduce([none_made] * 3) == []
    for each in ranks:
        each.reduced.add(7)
    asked = [
        p.asks(n.__contains__, o.__contains__) for p, n, o in zip(ranks, new, old, strict=True)
    ]
    assert max(asked) < 2**63
    # 1, 3, 61, 120, and what shares a bit with them.
    left = [1, 3, 58, 61, 63, 65, 120, 123, 125, 127, 182, 185, 187, 189]
    for each in ranks:
        assert each.left_to_reduce(asked) == left
        assert each.left_to_reduce([none_made] * 3) == [1, 3, 63, 65, 125, 127, 187, 189]
        assert each.left_to_reduce([0, 0, 0]) == []
    assert [each.late for each in ranks] == [[61], [120], [3]]


class Chain(nn.Module):
    """A root with a head of its own around three units, the middle of which may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.units
        return self.head(c(a(x) if self.skips else b(a(x))))


NAMES = {"root": "r", "units.0": "a", "units.1": "b", "units.2": "c"}


def example(rank: int, world_size: int) -> list[tuple[str, str]]:
    """What forward and backward of each step issue; rank 1 skips b in the last."""
    model = zshard.wrap(Chain())
    optimizer = zshard.AdamW(model.parameters())
    issued: list[str] = []

    def note(op: str, tag: Tag) -> None:
        if op == "agree":
            issued.append("meet")
        elif op in ("all_gather", "reduce_scatter"):
            issued.append(f"{tag.phase} {NAMES[tag.unit]}")

    live()[0].comm.interpose = note
    steps = []
    for step in range(3):
        model.skips = (rank, step) == (1, 2)
        loss = model(torch.ones(2, 4)).sum()
        forward = len(issued)
        loss.backward()
        steps.append((", ".join(issued[:forward]), ", ".join(issued[forward:])))
        optimizer.step()
        issued.clear()
    return steps


def test_the_example_in_the_note_is_what_happens() -> None:
    ranks = run_ranks(example, 2)
    for first, second, last in ranks:
        assert first == (
            "meet, meet, gather r, meet, gather a, meet, gather b, meet, gather c, meet",
            "meet, meet, reduce c, meet, gather b, meet, reduce b, meet, gather a, meet, reduce a, "
            "meet, reduce r",
        )
        assert second == (
            "meet, gather r, gather a, gather b, gather c",
            "meet, gather b, reduce c, gather a, reduce b, reduce a, reduce r",
        )
        assert last[0] == second[0]
        assert last[1].startswith("meet, meet, reduce c, meet, gather b, gather a, meet, ")


class Twice(nn.Module):
    """One of its units runs again behind a cut, and another one behind the next cut."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.inside = [inside]

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        for block in (first, first, second):
            self.inside[0](x)  # of another model, for which this forward is cut
            x = block(x)
        return x


def gathers_of_each(rank: int, world_size: int) -> list[int]:
    counts = []
    for inside in (nn.Identity(), zshard.wrap(Block(), init="broadcast")):
        model = zshard.wrap(Twice(inside), init="broadcast")
        with torch.no_grad():
            for _ in range(4):
                zshard.stats(model).reset()
                model(torch.ones(2, 7))
        counts.append(zshard.stats(model).calls["all_gather"])
    return counts


def test_the_parts_of_a_forward_have_a_program_each_and_gather_no_more_than_all_of_it() -> None:
    for whole, parts in run_ranks(gathers_of_each, 2):
        assert whole == parts


class Held(nn.Linear):
    """A layer whose parameters may be left out of the graph."""

    out = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.detach() if self.out else self.weight
        return F.linear(x, weight, self.bias.detach() if self.out else self.bias)


def test_what_is_complete_as_a_program_is_left_is_reduced_before_backward_goes_on() -> None:
    model = zshard.wrap(nn.Sequential(*(Held(4, 4) for _ in range(3))), units="layer")
    for step in range(3):
        model[2].out = step == 2  # the first that the program reduces
        loss = model(torch.ones(2, 4)).sum()
        with zshard.trace(model) as trace:
            loss.backward()
        model.zero_grad()
    events = [str(event) for event in trace.events]
    assert events.index("reduce 1") < events.index("backward 0"), events


def left_and_read(rank: int, world_size: int) -> str:
    """Behind a forward that has raised on rank 0 alone, the other one reads a parameter."""
    torch.manual_seed(0)
    model, raising = zshard.wrap(Blocks()), rank == 0

    def fail(*_: object) -> None:
        if raising:
            raise ValueError("user code")

    model.blocks[1].register_forward_pre_hook(fail)
    with torch.no_grad():
        if rank == 0:
            with pytest.raises(ValueError, match="user"):
                model(batch(0, 0))
            raising = False
        else:
            model(batch(0, 0))
        with pytest.raises(zshard.MismatchError) as told:
            model(batch(0, 0)) if rank == 0 else zshard.full_param(model, "outlet.weight")
        model(batch(0, 0))
    return str(told.value)


def test_what_is_no_part_of_a_step_is_refused_on_a_rank_too_that_has_left_one() -> None:
    for told in run_ranks(left_and_read, 2, timeout=20):
        assert "rank 0: a forward; rank 1: full_param('outlet.weight')" in told
