"""Stages of a save or a load that all ranks end alike: all go on, or all raise."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import ClassVar, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..comm import Comm
from ..errors import CheckpointError, CommError
from ..tag import Tag
from ..transports.control import groups_made, make_group, timeout_of
from ..transports.refusal import Refusal, raise_together

T = TypeVar("T")


class Peers:
    """The ranks of a wrapped model, as a save or a load meets them.

    Args:
        what: is done, for errors.
    """

    def __init__(self, comm: Comm, what: str) -> None:
        self.world_rank, self.world_size, self.what = comm.world_rank, comm.world_size, what
        self.comm = comm

    def gather(self, stage: Callable[[], T]) -> list[T]:
        """Run ``stage`` on every rank; its results (picklable), in rank order.

        Raises:
            Error: on every rank, if it raised on one: there what it raised, elsewhere the same
                type with the same words, and the rank.
        """
        result: T | None = None
        failure: Exception | None = None
        try:
            result = stage()
        except Exception as error:
            failure = error
        everyone = cast(
            "list[tuple[Refusal | None, T]]",
            self._all_gather((Refusal.of(failure, CheckpointError), result)),
        )
        raise_together(failure, [refusal for refusal, _ in everyone], self.comm.global_ranks)
        return [each for _, each in everyone]

    def together(self, stage: Callable[[], T]) -> T:
        """Run ``stage`` on every rank; its result on this one, whatever that is.

        Raises:
            Error: as ``gather``.
        """
        made: list[T] = []
        self.gather(lambda: made.append(stage()))
        return made[0]

    def _all_gather(self, item: object) -> list[object]:
        if self.world_size == 1:
            return [item]
        return self.comm.all_gather_object(item, Tag(None, self.what))


class Background(Peers):
    """The same ranks, for a thread beside the one that trains: on a gloo group of their own.

    Every rank has to make one, in the same order. ``thread`` runs what it is given one after the
    other, so that all ranks' threads meet in the same order too.
    """

    # For each mesh: a gloo group holds threads and sockets, and nothing would end one that was made
    # for a single model. Those that failed are not there: gloo does not take them up again.
    _made: ClassVar[
        WeakKeyDictionary[
            dist.ProcessGroup,
            dict[tuple[object, timedelta], tuple[dist.ProcessGroup, ThreadPoolExecutor]],
        ]
    ] = WeakKeyDictionary()
    _alone = ThreadPoolExecutor(1, "zshard-save")  # starts its thread at the first use

    def __init__(self, comm: Comm, what: str) -> None:
        super().__init__(comm, what)
        self.thread = self._alone
        if self.world_size == 1:
            return
        control = comm.axes[0].control
        assert dist.group.WORLD is not None and control is not None
        timeout = timeout_of(control, torch.device("cpu"))
        made = self._made.setdefault(dist.group.WORLD, {})
        key = comm.mesh, timeout
        # A failure need not have been seen on every rank.
        mine = dist.get_rank(), key in made, groups_made()
        facts = comm.all_gather_object(mine, Tag(None, what))
        ranks, there, counts = zip(*cast("list[tuple[int, bool, int]]", facts), strict=True)
        if not all(there):
            with comm.named_errors("new_group", Tag(None, what)):
                group = make_group(ranks, timeout, max(counts))
            made[key] = group, ThreadPoolExecutor(1, "zshard-save")
        self._group, self.thread = made[key]
        self._forget = partial(made.pop, key, None)
        # torch numbers a group's ranks by their global ones.
        self._order = [sorted(ranks).index(rank) for rank in ranks]

    def _all_gather(self, item: object) -> list[object]:
        if self.world_size == 1:
            return [item]
        everyone: list[object] = [None] * self.world_size
        try:
            dist.all_gather_object(everyone, item, self._group)
        except RuntimeError as error:
            self._forget()
            ended = "".join(over.ended() for over in self.comm.axes)
            raise CommError(
                f"{self.comm.me} lost another rank at {self.what}: {error}.{ended}"
            ) from error
        return [everyone[index] for index in self._order]


def _forget_thread_in_child() -> None:
    """A forked process has its parent's executor, but not its thread; with ranks it is none."""
    Background._alone = ThreadPoolExecutor(1, "zshard-save")


os.register_at_fork(after_in_child=_forget_thread_in_child)
