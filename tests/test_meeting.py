"""Meetings of models that come and go."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from zshard.meeting import Ask, Meetings, Message
from zshard.tag import Tag


class Member:
    """A part of a cycle, which the garbage collector takes whenever it runs."""

    def __init__(self) -> None:
        self.itself = self

    def serve(self, mine: Message, messages: Sequence[Message]) -> None:
        raise AssertionError

    def forgo_learning(self) -> None:
        raise AssertionError


class Alone:
    """The collectives of one rank."""

    def all_gather_words(self, words: Sequence[int], tag: Tag) -> list[list[int]]:
        return [list(words)]


def test_models_may_be_collected_at_any_moment_of_a_meeting() -> None:
    meetings, stays = Meetings(), Member()
    number = meetings.join(stays)
    before = gc.get_threshold()
    try:
        for threshold in range(1, 60):
            gc.set_threshold(threshold, 1, 1)
            for _ in range(30):
                meetings.join(Member())
                (told,) = meetings.meet(Alone(), Message(number, Ask.CALL), Tag(0, "agree", "it"))
                assert (told.model, told.ask) == (number, Ask.CALL)
    finally:
        gc.set_threshold(*before)
