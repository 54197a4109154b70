"""Programs: what every rank needs, in its order, and each reduction once."""

from __future__ import annotations

import random

import pytest

from zshard.step.program import Op, Turn, learn


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
    ("old", "needed", "reduced", "prefetch", "expected"),
    [
        (None, ["abc", "abc"], "", 1, "abc"),
        (None, ["abd", "acd"], "", 1, "abcd"),
        ("abd", ["acd", "acd"], "", 1, "abcd"),
        ("abcdefgh", ["ba", "ba"], "", 1, "ba"),  # of another time
        (None, ["cCbBaA"], "abc", 0, "cCbBaA"),
        (None, ["cCbBaA"], "abc", 1, "cbCaBA"),
        (None, ["cCbBaA"], "abc", 2, "cbaCBA"),
        (None, ["CbBaA"], "abc", 1, "bCaBA"),
        (None, ["cCbB", "cCaA"], "abcd", 0, "cCbBaAD"),
        (None, ["bBaA", "aAbB"], "ab", 0, "abBaA"),  # a reduction is the last of its places
    ],
)
def test_a_program_has_what_every_rank_needs_in_its_order_and_each_reduction_once(
    old: str | None, needed: list[str], reduced: str, prefetch: int, expected: str
) -> None:
    program = learn(
        None if old is None else tuple(turns(old)),
        [turns(text) for text in needed],
        ["abcdefgh".index(unit) for unit in reduced],
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
    program = learn(None, needed, [0, 1], rng.randrange(3))
    for sequence in needed:
        rest = iter(program)
        assert all(turn in rest for turn in sequence)
    assert [turn for turn in program if turn.op is Op.REDUCE] == turns("AB")
