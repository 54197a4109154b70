"""Meetings of ranks that have several models, which come and go."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from models import Blocks
from ranks import run_ranks
from steps import batch

import zshard
from zshard.step.meeting import Intent, Meetings, Message
from zshard.tag import Tag


class Member:
    """A part of a cycle, which the garbage collector takes whenever it runs."""

    def __init__(self) -> None:
        self.itself = self
        self.told: list[str] = []

    def serve(self, mine: Message, messages: Sequence[Message]) -> None:
        raise AssertionError

    def forgo_learning(self) -> None:
        raise AssertionError

    def pause(self) -> None:
        self.told.append("pause")

    def go_on(self) -> None:
        self.told.append("go on")


class Alone:
    """The collectives of one rank."""

    def all_gather_words(self, words: Sequence[int], tag: Tag) -> list[list[int]]:
        return [list(words)]


def test_models_may_be_collected_at_any_moment_of_a_meeting() -> None:
    meetings, stays = Meetings(), Member()
    number = meetings.add(stays)
    before = gc.get_threshold()
    try:
        for threshold in range(1, 60):
            gc.set_threshold(threshold, 1, 1)
            for _ in range(30):
                meetings.add(Member())
                (told,) = meetings.meet(Alone(), Message(number, Intent.CALL), "it", 0)
                assert (told.model, told.intent) == (number, Intent.CALL)
    finally:
        gc.set_threshold(*before)


def test_the_innermost_forward_is_told_of_phases_inside_it_and_none_that_has_ended() -> None:
    meetings, outer, inner, other = Meetings(), Member(), Member(), Member()
    for member in (outer, inner, inner):  # whose first forward an exception has left
        meetings.enter_forward(member)
    meetings.pause(other)
    meetings.pause(inner)
    meetings.go_on(other)
    meetings.leave_forward(inner)
    meetings.pause(other)
    assert (outer.told, inner.told) == (["pause"], ["pause", "go on"])
    meetings.leave_forward(outer)
    meetings.pause(other)
    assert outer.told == ["pause"]


def deleted_early(rank: int, world_size: int, comm: str) -> list[object]:
    """A rank deletes a model in whose forward another one still is, and goes on to the next."""
    gone, other = zshard.wrap(Blocks(), comm=comm), zshard.wrap(Blocks(), comm=comm)
    x = batch(rank, 0)
    found: list[object] = []
    with torch.no_grad():
        gone.order = (0,)
        for _ in range(2):
            gone(x)
            found.append(other(x))
        if rank == 1:
            gone.order = (0, 1)
        try:
            gone(x)
            del gone
            gc.collect()
            other(x)
        except zshard.MismatchError as error:
            found.append(str(error))
        found.append(other(x))
    return found


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_model_that_a_rank_deletes_too_early_is_told_of_on_all(comm: str) -> None:
    for before, again, message, after in run_ranks(deleted_early, 2, comm):
        assert "wrapped model 0 has been deleted on ranks [0]" in message
        assert torch.equal(before, again) and torch.equal(before, after)


def unlike_after_leaving(rank: int, world_size: int) -> list[object]:
    """Ranks begin forwards of different models just after one has left the other's program."""
    routed, other = zshard.wrap(Blocks()), zshard.wrap(Blocks())
    x = batch(rank, 0)
    found: list[object] = []
    with torch.no_grad():
        routed.order = (0,)
        for _ in range(2):
            found.append(routed(x))
            other(x)
        if rank == 1:
            routed.order = (0, 1)
        routed(x)  # which rank 1 ends in the meeting of what comes next
        try:
            (routed, other)[rank](x)
        except zshard.MismatchError as error:
            found.append(str(error))
        routed.order = (0,)
        found.append(routed(x))
    return found


def test_ranks_that_differ_after_one_has_left_a_program_come_to_the_same_again() -> None:
    for before, again, message, after in run_ranks(unlike_after_leaving, 2):
        assert "about to do different things" in message
        assert torch.equal(before, again) and torch.equal(before, after)
