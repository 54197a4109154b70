"""The processes of the ranks of one host: which of them have ended, and who waits for them.

[Note: a send that gloo forgets]
A send to a process that has just ended may fail while gloo writes it at once. gloo then closes the
connection, and every send and receive that it has noted fails, but this one is not noted anywhere:
its collective ends only when the group's timeout is over, half an hour as a rule. So a wait looks
from time to time whether the other processes still live. One that has ended is no error by itself:
a rank that has all it needs of the last collective may go before the others have. Looks are counted
until a wait gives up, not seconds: where this process itself was stopped for a while, by a signal
or with its machine, gloo's threads were as well, and are given their time when it goes on.

[Note: waits that stay awake]
A small collective is complete sooner than a core that has gone to sleep, of a virtual machine above
all, is awake again. So a wait looks for half a millisecond whether it is, and sleeps then. Between
looks it gives way to whoever wants the core, gloo's threads first.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from .messages import Work, works_of

_SLICE = timedelta(seconds=0.5)  # of a wait, between looks at whether the others live
_AWAKE_SECONDS = 5e-4  # of a wait, at its beginning; see [Note: waits that stay awake]
_GRACE_LOOKS = 10  # from the end of a rank to that of the collectives it had taken part in
_END_LOOKS = 50  # from the end of a process's connections to its own, at most; 10 ms apart


class Life(NamedTuple):
    """A rank's process: ``fd`` is readable once it has ended."""

    pid: int
    fd: int


class Processes:
    """Those of all ranks of a group.

    Args:
        names: what errors call the ranks; lives: of every rank, this one's too.
    """

    def __init__(self, names: Sequence[str], lives: Sequence[Life]) -> None:
        self._names = [
            f"{name} (process {life.pid})" for name, life in zip(names, lives, strict=True)
        ]
        self._ranks = {life.fd: rank for rank, life in enumerate(lives)}
        self._poll = select.poll()
        self._lock = threading.Lock()  # a save in the background asks as well
        for life in lives:
            self._poll.register(life.fd, select.POLLIN)
        self._gone: set[int] = set()  # as of the last look
        self._looks = 0  # the most that one wait has had since it found that a rank has ended
        # At exit the system does it: others' functions may still communicate then.
        weakref.finalize(self, close_all, [life.fd for life in lives]).atexit = False

    def name(self, rank: int) -> str:
        """What errors call ``rank``."""
        return self._names[rank]

    def ended(self, *, after_error: bool = False) -> list[int]:
        """The ranks whose processes have ended.

        Args:
            after_error: a connection was closed; its process is seen to have ended a moment later,
                which may be another than those that are seen already.
        """
        looks = _END_LOOKS if after_error else 1  # counted, as in `wait`
        while True:
            # Not POLLNVAL: a script may have closed what it does not know.
            with self._lock:
                found = self._poll.poll(0)
            gone = {self._ranks[fd] for fd, event in found if event & select.POLLIN}
            looks -= 1
            if gone > self._gone or looks == 0:
                self._gone = gone
                return sorted(gone)
            time.sleep(0.01)

    def wait(self, work: Work) -> None:
        """Wait for a collective of gloo; see [Note: a send that gloo forgets].

        Raises:
            RuntimeError: it failed, or is not complete although a rank ended a while ago.
        """
        for each in works_of(work):
            if isinstance(each, dist.Work):
                self._wait(each)
            else:
                each.wait()

    def _wait(self, work: dist.Work) -> None:
        begin = time.perf_counter()  # see [Note: waits that stay awake]
        while not work.is_completed() and time.perf_counter() - begin < _AWAKE_SECONDS:
            os.sched_yield()
        looks = 0
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what went wrong, unless it has just become complete
                    return
            else:
                return
            if self._looks or self.ended():
                looks += 1
                self._looks = max(self._looks, looks)
            # A wait that begins later than that has looks of its own, too, before it gives up.
            if looks > 1 and self._looks > _GRACE_LOOKS:
                grace = f"{_GRACE_LOOKS} times {_SLICE.total_seconds():g} s"
                raise RuntimeError(f"not complete {grace} after a rank has ended")


def descriptor_path(descriptor: int) -> str:
    """Where other processes of this user find an open file of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def close_all(descriptors: Iterable[int]) -> None:
    """Close files, whatever has become of them."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
