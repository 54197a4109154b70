"""What a trace holds: phases of units, transfers, and stalls; see [Note: what a trace holds]."""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..tag import Tag
from .clock import Stamp

TRACKS = ("compute", "gather", "reduce", "meet")  # streams and lanes, in the order drawn
_POLL_SECONDS = 2e-4
_EXIT_SECONDS = 5.0


class Name(NamedTuple):
    """What an event is, without its time."""

    phase: str  # gather, join, wait, forward, backward, reshard, pack, reduce, step; issue, sum
    unit: str


class Event(Name):
    """A phase of a unit. It equals, and unpacks to, (phase, unit).

    Times are in seconds since the trace began; NaN while it is being recorded.

    Attributes:
        stream: "compute", "gather" or "reduce".
        bytes: what this rank sent for it.
        issued: when the compute stream (on CPU, the host) came to it.
        began, ended: when its stream did it; of a gather or reduce, while its transfers were under
            way. What takes no time of its stream, as a reshard, begins and ends as it is issued.
    """

    stream = "compute"
    bytes = 0
    issued = began = ended = math.nan
    first: Stamp
    last: Stamp | None = None

    def __str__(self) -> str:
        return f"{self.phase} {self.unit}"


class Transfer:
    """One collective, as this rank sees it. Times are as those of events.

    Attributes:
        op: all_gather, reduce_scatter, all_reduce, broadcast, agree or all_gather_object.
        phase, unit: of its tag; what belongs to no unit is named for what it is about.
        bytes: what this rank sends.
        lane: "gather" or "reduce"; "meet" where compute waits while it runs, from its beginning.
        event: the gather, join or reduce that it belongs to, if any.
        issued: when it was given to the backend; returned: when compute could go on.
        began: when it was issued, and those before it on its lane had ended.
        ended: its completion.
        complete: False where it had not ended with the trace, or has failed; then ``ended`` is the
            end of the trace.
        exact: False where the backend does not tell of the completion, as for messages; then
            ``ended`` is when a wait has found it.
        by_waiter: the rank itself reads what others lend, when it waits: then it began and ended.

    Args:
        now: takes a stamp of the current stream.
    """

    def __init__(self, op: str, tag: Tag, nbytes: int, lane: str, now: Callable[[], Stamp]) -> None:
        self.op, self.phase, self.unit = op, tag.phase, tag.subject
        self.bytes, self.lane = nbytes, lane
        self.event: Event | None = None
        self.issued = self.returned = self.began = self.ended = math.nan
        self.complete, self.exact, self.by_waiter = False, True, False
        self._now = now
        self.first = self.back = now()
        self.start: Stamp | None = None  # of the lane's own stream, where it has one
        self.ends: list[Stamp] = []  # of its parts that have ended
        self.parts = 1

    def begins_here(self) -> None:
        """The current stream, the lane's own, has come to it."""
        self.start = self._now()

    def completed(self) -> None:
        """The current stream has come behind it."""
        self.ends.append(self._now())

    def returns(self) -> None:
        """Compute goes on."""
        self.back = self._now()

    def started(self, works: Sequence[object], *, by_waiter: bool) -> None:
        """The backend has been given it.

        Args:
            works: what it consists of; none where it is done, or the current stream runs it.
            by_waiter: see above.
        """
        if not works:
            self.completed()
        elif by_waiter:
            self.by_waiter = True
        else:
            self._watch(works)

    def _watch(self, works: Sequence[object]) -> None:
        """Note when ``works`` are complete."""
        self.parts, append, clock = len(works), self.ends.append, time.perf_counter
        for work in works:
            try:
                future = work.get_future()  # type: ignore[attr-defined]
            except RuntimeError:  # messages have none
                self.exact = False
                return
            # On a thread of the backend, which must not be kept: it stores a number, no more.
            future.add_done_callback(lambda _: append(clock()))

    def waited(self, first: Stamp, last: Stamp) -> None:
        """Note that a wait from ``first`` to ``last`` has found it complete."""
        if self.by_waiter:
            self.start = first
        if self.by_waiter or not self.exact:
            self.parts, self.ends = 1, [last]

    @property
    def to_be_told(self) -> bool:
        """Whether the backend has still to tell of its completion."""
        return self.exact and not self.by_waiter and len(self.ends) < self.parts

    def __str__(self) -> str:
        return f"{self.phase} {self.unit}"

    def __repr__(self) -> str:
        return f"Transfer({self.op} in {self}, {self.bytes} bytes)"


class Unfinished:
    """Transfers whose completion the backend has still to tell of, after their trace.

    Its threads need the interpreter for that: one that finds it shutting down aborts the process.
    """

    def __init__(self) -> None:
        self._transfers: list[Transfer] = []
        self._registered = False

    def add(self, transfers: Iterable[Transfer]) -> None:
        """Keep the process from ending before ``transfers`` have, for some seconds."""
        if not self._registered:
            self._registered = True
            atexit.register(self._wait_at_exit)
        self._transfers = [t for t in (*self._transfers, *transfers) if t.to_be_told]

    def _wait_at_exit(self) -> None:
        wait_for(self._transfers, _EXIT_SECONDS)


def wait_for(transfers: Sequence[Transfer], seconds: float) -> None:
    """Wait until the backend has told of the completion of all, but no longer than ``seconds``."""
    deadline = time.perf_counter() + seconds
    while any(t.to_be_told for t in transfers) and time.perf_counter() < deadline:
        time.sleep(_POLL_SECONDS)


class Stall:
    """The compute stream standing still for the other ranks. Times are as those of events.

    Attributes:
        op, phase, unit: of what it waited for.
        transfer: the same; None where that was issued before the trace began, or is no transfer.
        inside: the phase of the unit that was held up, if any.
    """

    def __init__(self, op: str, tag: Tag, transfer: Transfer | None, first: Stamp) -> None:
        self.op, self.phase, self.unit = op, tag.phase, tag.subject
        self.transfer = transfer
        self.inside: Event | None = None
        self.began = self.ended = math.nan
        self.first = self.last = first

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.ended - self.began

    def __str__(self) -> str:
        return f"{self.phase} {self.unit}"

    def __repr__(self) -> str:
        return f"Stall({self.op} in {self}, {self.seconds * 1e3:.3f} ms)"
