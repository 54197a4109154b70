"""Programs: the collectives of a pass, in the order in which every rank issues them.

[Note: one agreed order]
A collective meets the other ranks' by nothing but its place in the order of issue: ranks that issue
different ones at one place hang, crash, or get wrong numbers. So none is issued that the others do
not know of. A pass (a forward, a backward) follows a program: what it consisted of when it was run
before, the same on every rank. A rank that does not need a gather takes part and discards.

Before a pass the ranks meet: a small all-gather of what each is about to do. A rank that needs
what its program does not have finishes the program first and then brings its need to the meeting,
in which the others, about to begin their next pass, take part until nobody needs anything. A pass
without a program, the first of its kind, goes from meeting to meeting, up to one at its end, where
the ranks put together what each has needed; that is the program of the next. Once a rank has left a
program, passes that follow one end with a meeting as well, so that a rank in need finds the others
there, and not in a collective of the user's own. So does a change of parameters behind a pass that
has ended without a meeting begin with one: a rank in need gets what they were. Where ranks begin
different passes, or passes of different models, or only some do so inside of a forward, all of them
raise. If it is because a forward has raised on some, only the others do: that ends the step there,
too, and all come to the same next pass, or change of parameters.

A backward whose program does not reduce all that is trained ends with a meeting as well, in which
the ranks tell of which other units they have gradients; what no rank has is not reduced.

Another model's pass, or a backward of its own, cuts the forward that it begins inside of in two,
each with its own program: ranks in unlike places of one would not find each other behind it.

A backward that begins inside another model's follows a program only if that does too, and every
rank needs all of both; else both go from meeting to meeting, in whatever order autograd has.

[Note: an example of one order]
A root r around units a, b and c, zero3, prefetch 1, on two ranks. The first step:

    forward   meet; meet, gather r; meet, gather a; meet, gather b; meet, gather c; meet
    backward  meet; meet, reduce c; meet, gather b; meet, reduce b; meet, gather a; meet, reduce a;
              meet, reduce r

The last meeting of each is its end, where the ranks put together what they have needed, and move
each gather ahead of the need before it. From then on:

    forward   meet; gather r, gather a, gather b, gather c
    backward  meet; gather b, reduce c, gather a, reduce b, reduce a, reduce r

Now rank 1 skips b in one step. Its forward follows the program, and takes part in the gather of b.
Its backward is of another kind, as both ranks hear in its first meeting, so both go from meeting to
meeting: where rank 0 brings its need of b and rank 1 that of a, both units are gathered, on both.
"""

from __future__ import annotations

import difflib
import enum
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from .meeting import Intent


class Op(enum.Enum):
    """What a turn does."""

    GATHER = "gather"
    REDUCE = "reduce"


class Turn(NamedTuple):
    """A unit's collective, as a program lists it."""

    op: Op
    unit: int  # index in the unit map


Program = tuple[Turn, ...]
Told = tuple[Sequence[Turn], Sequence[int]]  # what a rank has needed, and late; see ``Pass``
Key = tuple[int, ...]  # what tells one kind of pass from others, the same on every rank

_MOST = 64  # kept at a time: ranks that never repeat themselves would learn one each step


@dataclass
class Pass:
    """A pass under way, or the last one: what it follows, and what has come of it on this rank.

    Attributes:
        key: what kind of pass it is.
        program: what it follows; None where it goes from meeting to meeting.
        trained: units that it may reduce: at its end, in this order, those that were not before.
        reduces: whether it is a backward that reduces them, and has not ended.
        makes_gradients: whether this rank has got any in it.
        follows: whether it began with a program; where it reduces, with one that has all
            reductions, and that it has not left.
        to_be_learned: whether ranks have needed what is in no program, so there is a new one.
        meets_at_end: whether a meeting ends it.
        needed: what this rank has needed, in its order.
        late: units that were not ready, of which it has gradients at its end.
        ready: units that are complete on this rank.
        ready_on: where there is no program, unit -> the ranks on which it is.
        reduced: units that were reduced in it.
        aborted: whether this rank has left it by an exception.
        interrupted: whether another model's backward has begun inside of it, a backward.
        paused: whether another model's pass is under way inside of it, a forward.
        ended: whether this rank has nothing more to do with it.
        cuts: how many were before; needed_before: what this rank has needed before the last.
    """

    key: Key = ()
    program: Program | None = None
    trained: Sequence[int] = ()
    reduces: bool = False
    makes_gradients: bool = False
    follows: bool = field(init=False)
    to_be_learned: bool = False
    meets_at_end: bool = False
    needed: list[Turn] = field(default_factory=list)
    late: Sequence[int] = ()
    ready: set[int] = field(default_factory=set)
    ready_on: dict[int, set[int]] = field(default_factory=dict)
    reduced: set[int] = field(default_factory=set)
    aborted: bool = False
    interrupted: bool = False
    paused: bool = False
    ended: bool = False
    cuts: int = 0
    needed_before: list[Turn] = field(default_factory=list)
    _at: int = 0  # the next turn of the program

    def __post_init__(self) -> None:
        self.follows = self.program is not None

    def reduce(self, trained: Sequence[int]) -> None:
        """Be a backward that reduces what gets a gradient of the units ``trained``."""
        self.trained, self.reduces = trained, True
        if self.follows and sum(turn.op is Op.REDUCE for turn in self.rest) < len(trained):
            # Of some units no rank got a gradient before. One may now: what reentrant checkpoints
            # make, say, cannot be foreseen. The ranks hear of it at the end.
            self.follows, self.meets_at_end = False, True

    @property
    def intent(self) -> Intent | None:
        """What the ranks brought to the meeting that it began with; None before the first pass."""
        return Intent(self.key[0]) if self.key else None

    @property
    def is_forward(self) -> bool:
        """Whether it is a forward, or a part of one."""
        return self.intent is not None and self.intent.is_forward

    @property
    def next(self) -> Turn | None:
        """The turn of the program that comes next; None where there is none."""
        if self.program is None or self._at == len(self.program):
            return None
        return self.program[self._at]

    @property
    def rest(self) -> Program:
        """What of the program is to come."""
        return () if self.program is None else self.program[self._at :]

    def take(self) -> Turn:
        """The next turn, which is about to be carried out."""
        assert self.program is not None
        self._at += 1
        return self.program[self._at - 1]

    def leave_program(self, ranks: Iterable[int]) -> None:
        """Go on from meeting to meeting; what reduces brings all that is ready to them.

        Args:
            ranks: those that are as far as this one.
        """
        if self.reduces:
            self.ready_on = {unit: set(ranks) for unit in self.ready}
            self.follows, self.meets_at_end = False, True
        self.program, self.to_be_learned = None, True

    def complete(
        self, ready: Iterable[tuple[int, int]], ended: set[int], world_size: int
    ) -> list[int]:
        """The units that can be reduced now, where there is no program.

        Args:
            ready: units that have become so, each with the rank; ended: ranks that bring no more.
        """
        for unit, rank in ready:
            self.ready_on.setdefault(unit, set()).add(rank)
        return [
            unit
            for unit in self.trained
            if unit in self.ready_on
            and unit not in self.reduced
            and len(self.ready_on[unit] | ended) == world_size
        ]

    def asks(self, has_new: Callable[[int], bool], has_old: Callable[[int], bool]) -> int:
        """What this rank says at its end, of the units that are left.

        Args:
            has_new: whether it has gradients of a unit to be reduced; has_old: or reduced ones.

        Returns:
            1 where it has made a gradient in this pass, else 0; and a bit for each unit of which it
            has any. It is one word: of more than 62 units some share a bit.
        """
        self.late = [unit for unit in self._left if has_new(unit)]
        there = (*self.late, *filter(has_old, self._left))
        return functools.reduce(operator.or_, map(_bit, there), int(self.makes_gradients))

    def left_to_reduce(self, asked: Iterable[int]) -> list[int]:
        """What is to be reduced at its end: that of which any rank has gradients.

        Nothing where no rank has made one in this pass and it has reduced none: they stay.

        Args:
            asked: what each rank has said.
        """
        wanted = functools.reduce(operator.or_, asked)
        if not (wanted & 1 or self.reduced):
            return []
        return [unit for unit in self._left if _bit(unit) & wanted]

    @property
    def _left(self) -> list[int]:
        return [unit for unit in self.trained if unit not in self.reduced]

    def end(self) -> None:
        """Leave nothing to take part in, nothing to reduce, and no meeting to come."""
        self.program, self.reduces, self.meets_at_end = None, False, False
        self.ended = True


class Programs:
    """The programs of one model's passes, by key; the latest are kept."""

    def __init__(self) -> None:
        self._learned: dict[Key, Program] = {}
        self._unsteady: dict[Key, None] = {}  # those seen to go other ways under the same key
        self._alike: dict[Key, bool] = {}  # whether every rank needed all of it

    def begin(self, key: Key, loose: bool) -> Pass:
        """A pass of ``key``, with the program that it is to follow, if any.

        Args:
            loose: whether the ranks meet at its end in any case.
        """
        program = None if key in self._unsteady else self._learned.get(key)
        anew = program is None
        return Pass(key, program, to_be_learned=anew, meets_at_end=anew or loose)

    def learn(self, ended: Pass, told: Sequence[Told], prefetch: int) -> None:
        """Learn from what the ranks have ``told`` of a pass that has ended; see ``learn``."""
        key, old, needed = ended.key, self._learned.pop(ended.key, None), [each for each, _ in told]
        late = {unit for _, each in told for unit in each} & ended.reduced
        last = [Turn(Op.REDUCE, unit) for unit in ended.trained if unit in late]
        self._learned[key] = learn(old, needed, last, prefetch)
        self._alike.pop(key, None)
        self._alike[key] = all(each == needed[0] for each in needed)
        _keep_latest(self._learned)
        _keep_latest(self._alike)
        if ended.interrupted and not self._alike[key]:
            self.distrust(key)  # its rest would have to come before its own end

    def is_alike(self, key: Key) -> bool:
        """Whether all ranks needed the same as they learned the program of ``key``."""
        return self._alike.get(key, False)

    def distrust(self, key: Key) -> None:
        """From now on, have no pass of ``key`` follow a program."""
        self._unsteady[key] = None
        _keep_latest(self._unsteady)

    def forget(self) -> None:
        """Begin anew."""
        self._learned.clear()
        self._unsteady.clear()
        self._alike.clear()


def _bit(unit: int) -> int:
    return 2 << unit % 62  # in 63 bits, with the lowest left


def _keep_latest(found: dict[Key, Any]) -> None:
    while len(found) > _MOST:
        del found[next(iter(found))]


def learn(
    old: Program | None, needed: Sequence[Sequence[Turn]], late: Sequence[Turn], prefetch: int
) -> Program:
    """The program of a pass that has run on every rank.

    Args:
        old: the program that it followed and had to leave; None if there was none.
        needed: what each rank needed, in its own order.
        late: reductions of what was not ready; those that no rank needed before come last.
        prefetch: how many gathers are issued ahead of the one that is needed.
    """
    longest = max(map(len, needed))
    merged = _merge([[turn for turn in old or () if turn not in late], *needed])
    if len(merged) > 2 * max(longest, 1):  # of other times than these
        merged = _merge(needed)
    last = {turn: place for place, turn in enumerate(merged) if turn.op is Op.REDUCE}
    once = [s for i, s in enumerate(merged) if s.op is Op.GATHER or last[s] == i]
    once += [turn for turn in late if turn not in last]
    return _issue_ahead(once, prefetch)


def _merge(sequences: Iterable[Sequence[Turn]]) -> list[Turn]:
    """A sequence in which each of ``sequences`` is contained, in order, if not contiguously."""
    merged: list[Turn] = []
    for other in sequences:
        if _contains(merged, other):
            continue
        out: list[Turn] = []
        matcher = difflib.SequenceMatcher(None, merged, other, autojunk=False)
        for what, a, b, c, d in matcher.get_opcodes():
            out += merged[a:b]
            if what in ("insert", "replace"):
                out += other[c:d]
        merged = out
    return merged


def leads_to(turn: Turn, rest: Program, *, past_reductions: bool) -> bool:
    """Whether ``turn`` comes in ``rest``, and before any reduction unless ``past_reductions``."""
    passed = takewhile(lambda other: other != turn, rest)
    return turn in rest and (past_reductions or all(other.op is Op.GATHER for other in passed))


def _contains(sequence: Sequence[Turn], part: Sequence[Turn]) -> bool:
    rest = iter(sequence)
    return all(turn in rest for turn in part)


def _issue_ahead(turns: Sequence[Turn], prefetch: int) -> Program:
    """``turns`` with every gather moved forward to where the one ``prefetch`` before is needed."""
    gathers = [turn for turn in turns if turn.op is Op.GATHER]
    out: list[Turn] = gathers[:prefetch]
    needed = 0
    for turn in turns:
        if turn.op is Op.REDUCE:
            out.append(turn)
            continue
        needed += 1
        out += gathers[needed + prefetch - 1 : needed + prefetch]
    return tuple(out)
