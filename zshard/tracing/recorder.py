"""Takes down what a rank does while it is traced; see [Note: what a trace holds].

The executor and the seam tell it; what it has is read through ``Trace``.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ..tag import Tag
from .clock import Clock, Stamp
from .phases import LANES, Phases, Told
from .records import Stall, Transfer, Unfinished, wait_for

# How long the end of a trace waits for transfers under way: they have been issued, and on every
# rank in the same order, but another rank may have something else to do first.
_LINGER_SECONDS = 1.0
_UNFINISHED = Unfinished()
_NOTHING = nullcontext()


class Recorder:
    """What is recorded from ``zshard.trace``'s beginning to its end.

    Attributes:
        transfers, stalls, seconds: as ``Trace`` has them.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self._now = clock, clock.now
        self.seconds = math.nan
        self.transfers: list[Transfer] = []
        self._told: list[Told] = []  # since the events were read
        self._tell = self._told.append
        self._reading = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded so far."""
        _UNFINISHED.add(self.transfers)
        self.transfers = []
        self.stalls: list[Stall] = []
        self._told.clear()
        self._phases = Phases()
        self.clock.start()

    def phases(self) -> Phases:
        """The phases, with all that was told so far."""
        with self._reading:
            if math.isnan(self.seconds):
                told = self._told[:]
                del self._told[: len(told)]
                self._phases.take(told)
            return self._phases

    # --- what the schedule tells -----------------------------------------------------------------

    def enter(self, phase: str, unit: str) -> None:
        """``phase`` of ``unit`` begins; what is for a lane is issued, and its transfers follow."""
        self._tell(("enter", phase, unit, self._now()))

    def leave(self, phase: str, unit: str) -> None:
        """``phase`` of ``unit`` ends, and what has begun within it; if it is under way."""
        self._tell(("leave", phase, unit, self._now()))

    def phase(self, phase: str, unit: str) -> AbstractContextManager[None]:
        """A context that is ``phase`` of ``unit``; of what is for a lane, the issuing of it."""
        if phase in LANES:
            self._tell(("enter", phase, unit, self._now()))
            return _NOTHING
        return _Phase(self._tell, self._now, phase, unit)

    def leave_all(self) -> None:
        """Whatever is under way ends."""
        self._tell(("leave_all", self._now()))

    def end_backward(self, unit: str | None = None) -> None:
        """The backward under way ends; with ``unit``, if it is that unit's."""
        self._tell(("end_backward", unit, self._now()))

    def resume_backward(self, unit: str) -> None:
        """Backward goes on in ``unit``, if it is in no other."""
        self._tell(("resume_backward", unit, self._now()))

    # --- what the seam tells ---------------------------------------------------------------------

    def span(self, phase: str, unit: str, stream: str) -> AbstractContextManager[None]:
        """A context that is no event of the schedule, on the current stream."""
        return _Span(self._tell, self._now, phase, unit, stream)

    def issue(self, op: str, tag: Tag, nbytes: int, lane: str) -> Transfer:
        """A collective is about to be started."""
        transfer = Transfer(op, tag, nbytes, lane, self._now)
        self.transfers.append(transfer)
        self._tell(("issue", transfer))
        return transfer

    def begin_stall(
        self, op: str, tag: Tag, transfer: Transfer | None, since: float | None = None
    ) -> Stall:
        """The compute stream waits; ``since``: that the host did is known only now."""
        stall = Stall(op, tag, transfer, self._now() if since is None else since)
        self.stalls.append(stall)
        self._tell(("begin_stall", stall))
        return stall

    def end_stall(self, stall: Stall) -> None:
        """The compute stream goes on."""
        stall.last = self._now()

    def meet(
        self, op: str, tag: Tag, nbytes: int, *, on_host: bool
    ) -> AbstractContextManager[None]:
        """A context in which a collective runs that compute waits for from its beginning.

        Args:
            on_host: whether it is the host that waits; on CUDA the compute stream may have work.
        """
        return _Meeting(self, op, tag, nbytes, time.perf_counter if on_host else self._now)

    # --- the end ---------------------------------------------------------------------------------

    def end(self, *, linger: bool) -> None:
        """Turn stamps into seconds; nothing may be recorded any more.

        Args:
            linger: whether to wait a while for transfers under way.
        """
        self.leave_all()
        last = self._now()
        if linger:
            wait_for(self.transfers, _LINGER_SECONDS)
        _UNFINISHED.add(self.transfers)
        self.clock.synchronize()
        phases, seconds = self.phases(), self.clock.seconds
        self.seconds = end = seconds(last)
        for event in (*phases.events, *phases.spans):
            event.issued = event.began = seconds(event.first)
            event.ended = seconds(last if event.last is None else event.last)
            event.__dict__.pop("last", None)
            del event.first
        for stall in self.stalls:
            stall.began, stall.ended = seconds(stall.first), seconds(stall.last)
        self._place_transfers(end)
        own = {id(transfer) for transfer in self.transfers}
        for stall in self.stalls:
            if id(stall.transfer) not in own:
                stall.transfer = None

    def _place_transfers(self, end: float) -> None:
        """Find when transfers began and ended, and with them gathers and reductions."""
        seconds = self.clock.seconds
        ends: dict[str, list[float]] = {}  # of the transfers issued so far on a lane, in order
        placed: set[int] = set()
        for transfer in self.transfers:
            transfer.issued = seconds(transfer.first)
            transfer.returned = max(transfer.issued, seconds(transfer.back))
            stamps = list(transfer.ends)
            transfer.complete = len(stamps) >= transfer.parts
            last = max(map(seconds, stamps)) if transfer.complete else end
            transfer.ended = last = max(last, transfer.issued)
            before = ends.setdefault(transfer.lane, [])
            if transfer.start is not None:
                transfer.began = min(max(transfer.issued, seconds(transfer.start)), last)
            else:
                # Backends run what they are given in order: until the last that ended before it
                # has ended, its lane was busy with that.
                earlier = bisect.bisect_right(before, last)
                transfer.began = max(transfer.issued, before[earlier - 1] if earlier else 0.0)
            bisect.insort(before, last)
            if (event := transfer.event) is not None:
                if id(event) not in placed:
                    event.began, event.ended = transfer.began, transfer.ended
                placed.add(id(event))
                event.bytes += transfer.bytes
                event.began = min(event.began, transfer.began)
                event.ended = max(event.ended, transfer.ended)


class _Phase:
    """The context of ``Recorder.phase``, which costs no call of Python's beside its own two."""

    __slots__ = ("_now", "_phase", "_tell", "_unit")

    def __init__(
        self, tell: Callable[[Told], None], now: Callable[[], Stamp], phase: str, unit: str
    ) -> None:
        self._tell, self._now, self._phase, self._unit = tell, now, phase, unit

    def __enter__(self) -> None:
        self._tell(("enter", self._phase, self._unit, self._now()))

    def __exit__(self, *exception: object) -> None:
        self._tell(("leave", self._phase, self._unit, self._now()))


class _Span:
    """The context of ``Recorder.span``."""

    def __init__(
        self,
        tell: Callable[[Told], None],
        now: Callable[[], Stamp],
        phase: str,
        unit: str,
        stream: str,
    ) -> None:
        self._tell, self._now, self._name = tell, now, (phase, unit, stream)

    def __enter__(self) -> None:
        self._first = self._now()

    def __exit__(self, *exception: object) -> None:
        self._tell(("span", *self._name, self._first, self._now()))


class _Meeting:
    """A collective that compute waits for from its beginning: a transfer and its stall in one."""

    def __init__(
        self, recorder: Recorder, op: str, tag: Tag, nbytes: int, clock: Callable[[], Stamp]
    ) -> None:
        self._recorder, self._tag = recorder, tag
        self._transfer = Transfer(op, tag, nbytes, "meet", clock)
        recorder.transfers.append(self._transfer)

    def __enter__(self) -> None:
        self._stall = self._recorder.begin_stall(self._transfer.op, self._tag, self._transfer)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._transfer.completed()
        self._recorder.end_stall(self._stall)
