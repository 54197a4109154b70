"""The compute stream cut into pieces, and the way through pieces and transfers that took longest.

[Note: the critical path]
From the end of the trace backwards along the compute stream. At a stall the way goes over to the
transfer that was waited for, at its end; from there to what held that up: the transfer before it on
its lane, if that ended after this was issued, or else compute, as it had issued it. What a rank
reads itself, over shared memory, is its own work, and the way stays with the stall. The pieces
cover the whole time once; what is not on the way would not have made the step shorter.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from .records import Stall, Transfer
from .trace import Trace

OUTSIDE = "outside"  # the phase of what lies in no phase of a unit: the loss, the data, the user's


class Piece(NamedTuple):
    """A part of the compute stream that belongs to one phase, or of the critical path."""

    phase: str
    unit: str
    began: float
    ended: float
    stall: Stall | None = None

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.ended - self.began


def pieces(trace: Trace) -> list[Piece]:
    """The compute stream from beginning to end, each moment in the innermost that was under way."""
    issues = [
        Piece("issue", t.unit, t.issued, t.returned)
        for t in trace.transfers
        if t.returned > t.issued
    ]
    phases = [
        Piece(e.phase, e.unit, e.began, e.ended)
        for e in (*trace.events, *trace.spans)
        if e.stream == "compute" and e.ended > e.began
    ]
    stalls = [
        Piece("wait", _waited_in(s), s.began, s.ended, s) for s in trace.stalls if s.seconds > 0
    ]
    found: list[Piece] = []
    around: list[Piece] = [Piece(OUTSIDE, "", 0.0, trace.seconds)]
    now = 0.0
    for piece in sorted([*phases, *issues, *stalls], key=lambda p: (p.began, -p.ended)):
        while len(around) > 1 and around[-1].ended <= piece.began:
            now = _cut(found, around.pop(), now)
        now = _cut(found, around[-1]._replace(ended=piece.began), now)
        around.append(piece._replace(ended=min(piece.ended, around[-1].ended)))
    while around:
        now = _cut(found, around.pop(), now)
    return found


def _cut(found: list[Piece], piece: Piece, now: float) -> float:
    """Append what of ``piece`` comes after ``now``; where that ends."""
    if piece.ended <= now:
        return now
    found.append(piece._replace(began=now))
    return piece.ended


def _waited_in(stall: Stall) -> str:
    return stall.unit if stall.inside is None else stall.inside.unit


def critical_path(trace: Trace, row: list[Piece]) -> list[Piece]:
    """See [Note: the critical path]; oldest first, without gaps, from 0 to the trace's end.

    Args:
        row: ``pieces`` of the trace.
    """
    before = _predecessors(trace)
    begins = [piece.began for piece in row]
    path: list[Piece] = []
    now = trace.seconds
    index = len(row) - 1
    while now > 0 and index >= 0:
        piece = row[index]
        transfer = None if piece.stall is None else piece.stall.transfer
        if transfer is not None and transfer.by_waiter:
            transfer = None
        came = now
        if transfer is not None and piece.began < transfer.ended and transfer.returned < now:
            # The time that it took to wake up is part of the stall.
            now = _step(path, piece, transfer.ended, now)
            now = _follow(path, transfer, before, now)
        if now < came:
            index = bisect.bisect_left(begins, now) - 1
        else:  # also where the transfers' ends lead nowhere else, being at one moment
            now = _step(path, piece, piece.began, now)
            index -= 1
    return path[::-1]


def _follow(
    path: list[Piece], transfer: Transfer, before: dict[int, Transfer], now: float
) -> float:
    """Put ``transfer`` on the path, and what held it up on its lane; where that begins."""
    while True:
        previous = before.get(id(transfer))
        issued = transfer.returned  # until then it is compute that starts it
        held = issued if previous is None else max(previous.ended, issued)
        name = Piece(transfer.phase, transfer.unit, 0.0, 0.0)
        now = _step(path, name, held, now)
        if previous is None or previous.ended <= issued:
            return now
        transfer = previous


def _step(path: list[Piece], piece: Piece, began: float, ended: float) -> float:
    """Put the time from ``began`` to ``ended``, if any, on the path as ``piece``; its begin."""
    if began < ended:
        path.append(piece._replace(began=began, ended=ended))
        return began
    return ended


def _predecessors(trace: Trace) -> dict[int, Transfer]:
    """Of each transfer, by id, that before it on its lane which was the last to end before it."""
    found: dict[int, Transfer] = {}
    lanes: dict[str, list[Transfer]] = {}  # in the order of their ends
    for transfer in trace.transfers:
        lane = lanes.setdefault(transfer.lane, [])
        place = bisect.bisect_right(lane, transfer.ended, key=lambda other: other.ended)
        if place:
            found[id(transfer)] = lane[place - 1]
        lane.insert(place, transfer)
    return found
