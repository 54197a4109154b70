"""What ranks tell each other when they meet; see [Note: one agreed order] in agreement.py."""

from __future__ import annotations

import enum
from typing import NamedTuple, NoReturn

from .comm import Comm, Tag
from .errors import MismatchError


class Ask(enum.IntEnum):
    """What a rank brings to a meeting."""

    FORWARD = 0  # from here on: about to begin
    BACKWARD = 1
    HOLD = 2  # a backward inside no_sync
    RENEW = 3
    CALL = 4
    END = 5  # of a phase without a program, or of one that ranks have left before
    GATHER = 6  # from here on: needed now
    READY = 7


class Message(NamedTuple):
    """One rank's part of a meeting."""

    model: int  # number of the wrapped model
    ask: Ask
    word: int = 0  # index of a unit, or more about the phase: of a backward, what it trains
    digest: int = 0  # of what the phase depends on


def refuse(comm: Comm, label: str) -> NoReturn:
    """Say what each rank was about to do; every rank comes here.

    Args:
        label: what this one was.

    Raises:
        MismatchError: always.
    """
    everyone = comm.all_gather_object(label, Tag(0, "agree", label))
    seen = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(everyone))
    raise MismatchError(
        f"the ranks are about to do different things: {seen}. Every rank has to run the same "
        "forwards, backwards, steps and calls of zshard, of the same models, in the same order."
    )


def refuse_trained(comm: Comm, names: str) -> NoReturn:
    """Say which parameter is trained on some ranks alone; every rank comes here.

    Args:
        names: of this rank's trained parameters, one a line.

    Raises:
        MismatchError: always.
    """
    everyone = comm.all_gather_object(names, Tag(0, "agree", "requires_grad"))
    sets: list[set[str]] = [set(str(each).split("\n")) for each in everyone]
    name = min(set[str]().union(*sets) - sets[0].intersection(*sets))
    ranks = [rank for rank, each in enumerate(sets) if name in each]
    raise MismatchError(
        f"{name} requires a gradient on ranks {ranks} alone; freeze and unfreeze parameters "
        "on every rank"
    )
