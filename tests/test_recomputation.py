"""Who is gathered again behind what a checkpoint recomputes: the book alone, without a model."""

from __future__ import annotations

from typing import Any

from zshard.step.recomputation import Recomputation
from zshard.unit import State


class Named:
    """As much of a unit as the book looks at."""

    def __init__(self, around: Named | None = None) -> None:
        self.around, self.state, self.in_use = around, State.GATHERED, True

    def give_way(self) -> None:
        self.in_use = False

    def encloses(self, other: Any) -> bool:
        return other.around is self


def again(book: Recomputation, *units: Any) -> list[Any]:
    """Run ``units`` again, each beside the others; what was due behind the last."""
    due: list[Any] = []
    for unit in units:
        book.enter(unit)
        book.leave(unit)
        due = list(book.note(unit))
    return due


def test_the_announced_unit_is_due_once_a_later_one_has_pushed_it_out() -> None:
    book, a, b = Recomputation(), Named(), Named()
    book.announce(a)
    assert again(book, a) == []
    a.state = State.SHARDED
    assert again(book, b) == [a]
    assert a.in_use and not b.in_use


def test_it_is_not_due_before_it_has_run_again_itself() -> None:
    book, a, b = Recomputation(), Named(), Named()
    book.announce(a)
    a.state = State.SHARDED
    assert again(book, b) == []
    assert again(book, a) == [a]


def test_only_what_has_run_since_it_was_announced_counts() -> None:
    book, a, b = Recomputation(), Named(), Named()
    book.announce(a)
    again(book, a)
    book.announce(a)  # another call of the same unit
    a.state = State.SHARDED
    assert again(book, b) == []


def test_no_unit_is_due_behind_its_end_or_in_another_backward() -> None:
    for over in (lambda book, unit: book.end(unit), lambda book, unit: book.begin()):
        book, a, b = Recomputation(), Named(), Named()
        book.announce(a)
        again(book, a)
        over(book, a)
        a.state = State.SHARDED
        assert again(book, b) == []
        assert not b.in_use


def test_units_around_the_announced_one_are_due_as_well_and_others_no_longer() -> None:
    outer, before = Named(), Named()
    inner, beside = Named(outer), Named()
    book = Recomputation()
    for unit in (before, outer, inner):
        book.announce(unit)
    again(book, before, outer, inner)
    assert [unit.in_use for unit in (before, outer, inner)] == [False, True, True]
    for unit in (before, outer, inner):
        unit.state = State.SHARDED
    assert again(book, beside) == [outer, inner]


def test_none_is_due_while_a_unit_around_the_recomputed_one_computes() -> None:
    outer, a = Named(), Named()
    inner = Named(outer)
    book = Recomputation()
    book.announce(a)
    again(book, a)
    a.state = State.SHARDED
    book.enter(outer)
    assert again(book, inner) == []
    book.enter(inner)  # which an exception leaves
    book.leave(outer)
    assert book.note(outer) == [a]
    book.enter(outer)
    book.begin()
    book.announce(a)
    assert again(book, a) == [a]
