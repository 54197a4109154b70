"""The time of a step by arithmetic: the schedule's order of events, with a duration for each.

It follows [Note: one step] in schedule.py on three lines of time: compute, all-gathers, reductions.
Where ranks read each other's memory there is one line: a rank reads when it needs what it reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Durations(NamedTuple):
    """Seconds of a unit's phases on one rank."""

    label: str
    resident: bool  # whole parameters stay, and are gathered after a step
    forward: float
    backward: float
    gather: float = 0.0  # of whole parameters
    pack: float = 0.0
    reduce: float = 0.0  # the exchange
    sum: float = 0.0  # over the ranks, and what follows it
    share: float = 0.0  # the all-gather of reduced gradients (ddp)
    reached: bool = True  # whether backward comes to it


class Span(NamedTuple):
    """One phase of a unit, or a wait for one."""

    phase: str
    unit: str
    stream: str  # compute, gather or reduce
    began: float  # seconds since the step began
    ended: float


@dataclass(frozen=True)
class Timeline:
    """A predicted step, in steady state.

    Attributes:
        seconds: from the end of one step to that of the next.
        exposed: of these, how long computing waits for communication.
        communication: seconds that it takes, exposed or hidden.
    """

    spans: tuple[Span, ...]
    seconds: float
    exposed: float
    communication: float


def timeline(
    units: Sequence[Durations],
    order: Sequence[int],
    prefetch: int,
    *,
    step: float,
    meeting: float,
    interference: float,
    sums_on_host: bool,
    in_memory: bool,
) -> Timeline:
    """What a step takes.

    Args:
        units: by index.
        order: of those that forward comes to, the root first.
        step: seconds of the update.
        meeting: seconds in which all ranks tell each other something, three times a step.
        interference: see ``Machine``.
        sums_on_host: likewise.
        in_memory: whether a rank itself reads what it gathers, when it waits for it.
    """
    lines = _Lines(sums_on_host=sums_on_host or in_memory, in_memory=in_memory)
    root, *inner = (units[index] for index in order)
    for unit in (root, *inner):
        if unit.resident:
            lines.gather(unit)  # what the last step has updated
            if in_memory:
                lines.await_gather(unit)  # so that others may write
    lines.meet(meeting)
    lines.run("forward", [root, *inner], prefetch, kept=())
    lines.meet(meeting)
    # The root stays gathered, and so does the unit that backward needs first.
    reached = [unit for unit in inner if unit.reached]
    lines.run("backward", [root, *reversed(reached)], prefetch, kept=(root, *inner[-1:]))
    for unit in units:
        if unit not in (root, *reached):
            lines.reduce(unit)  # what it has got without its output
    lines.reduce(root)
    lines.land()
    lines.wait("reduce", root, lines.reductions)
    lines.meet(meeting)
    lines.compute("step", "root", step)
    slowed = interference * max(lines.communication - lines.exposed, 0.0)
    return Timeline(tuple(lines.spans), lines.now + slowed, lines.exposed, lines.communication)


class _Lines:
    """The three lines of time.

    Attributes:
        now: what compute has come to; gathers, reductions: up to when their streams are busy.
    """

    def __init__(self, *, sums_on_host: bool, in_memory: bool) -> None:
        self.now = self.gathers = self.reductions = 0.0
        self.exposed = self.communication = 0.0
        self.spans: list[Span] = []
        self._sums_on_host, self._in_memory = sums_on_host, in_memory
        self._there: dict[str, float] = {}  # unit -> when its last gather is complete
        self._unread: set[str] = set()  # units whose gather is the reader's own work
        self._in_flight: Durations | None = None

    def compute(self, phase: str, unit: str, seconds: float) -> None:
        """Run something on the compute stream."""
        self.spans.append(Span(phase, unit, "compute", self.now, self.now + seconds))
        self.now += seconds

    def wait(self, phase: str, unit: Durations, until: float) -> None:
        """Stall the compute stream for ``phase`` of ``unit``, over at ``until``."""
        if until > self.now:
            if getattr(unit, phase) > 0:  # else it is this rank's own sum
                self.exposed += until - self.now
            self.compute("wait", f"{phase} {unit.label}", until - self.now)

    def meet(self, seconds: float, what: str = "meet") -> None:
        """Stall it for a message from every rank, or for a read of what they lend."""
        self.communication += seconds
        self.exposed += seconds
        if seconds > 0:
            self.compute("wait", what, seconds)

    def gather(self, unit: Durations, issued: float | None = None) -> None:
        """Start gathering whole parameters, now or when they were ``issued``."""
        if self._in_memory:
            self._unread.add(unit.label)
            return
        began = max(self.now if issued is None else issued, self.gathers)
        self.gathers = self._there[unit.label] = self._send("gather", unit, began, unit.gather)

    def await_gather(self, unit: Durations) -> None:
        """Stall the compute stream for the whole parameters of ``unit``."""
        if not self._in_memory:
            self.wait("gather", unit, self._there[unit.label])
        elif unit.label in self._unread:
            self._unread.remove(unit.label)
            self.meet(unit.gather, f"gather {unit.label}")

    def run(
        self, phase: str, units: Sequence[Durations], prefetch: int, kept: Collection[Durations]
    ) -> None:
        """Forward or backward of ``units``, gathered ``prefetch`` ahead but for those ``kept``."""
        due = deque(unit for unit in units if not unit.resident and unit not in kept)
        ahead = 0
        for unit in units:
            if not unit.resident and unit not in kept:
                if ahead == 0:
                    self.gather(due.popleft())
                else:
                    ahead -= 1
            self.await_gather(unit)
            began = self.now
            self.compute(phase, unit.label, getattr(unit, phase))
            while due and ahead < prefetch:
                self.gather(due.popleft(), began)
                ahead += 1
            if phase == "backward" and unit is not units[0]:
                self.reduce(unit)

    def reduce(self, unit: Durations) -> None:
        """Pack the gradients, if any, and start their reduction, once its buffers are free."""
        if unit.pack == 0:
            return
        self.land()
        self.compute("pack", unit.label, unit.pack)
        if not self._in_memory:
            began = max(self.now, self.reductions)
            self.reductions = self._send("reduce", unit, began, unit.reduce)
            if not self._sums_on_host:
                self.reductions += unit.sum
        self._in_flight = unit

    def land(self) -> None:
        """End the reduction in flight."""
        unit, self._in_flight = self._in_flight, None
        if unit is None:
            return
        if self._in_memory:
            self.meet(unit.reduce, f"reduce {unit.label}")
        else:
            self.wait("reduce", unit, self.reductions)
        if self._sums_on_host:
            self.compute("sum", unit.label, unit.sum)
        if unit.share and self._in_memory:
            self.meet(unit.share, f"reduce {unit.label}")
        elif unit.share:
            began = max(self.now, self.reductions)
            self.reductions = self._send("reduce", unit, began, unit.share)

    def _send(self, stream: str, unit: Durations, began: float, seconds: float) -> float:
        self.communication += seconds
        if seconds:
            self.spans.append(Span(stream, unit.label, stream, began, began + seconds))
        return began + seconds
