"""What a trace says in numbers: communication exposed and hidden, the critical path, the stalls."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tabulate import tabulate

from ..words import counted
from .path import OUTSIDE, Piece, critical_path, pieces
from .trace import Trace

_REST = "(other)"  # the row of what belongs to no unit: meetings, the norm, buffers
_SHOWN = 12  # rows of the path and of the stalls in a table

Interval = tuple[float, float]


@dataclass(frozen=True)
class Communication:
    """Of a unit, or of all; times in seconds.

    Attributes:
        unit: its label; "(other)" for what belongs to no unit, "all" for the sum.
        bytes: what this rank sent.
        seconds: while any of its transfers was under way.
        exposed: the part of those during which compute stood still, for whatever it waited.
        hidden: the part during which compute went on.
        stalled: how long compute stood still for its transfers, those before them included.
        compute: how long the compute stream was in its phases, and not stalled.
    """

    unit: str
    bytes: int
    seconds: float
    exposed: float
    stalled: float
    compute: float

    @property
    def hidden(self) -> float:
        """Seconds of communication under which compute went on."""
        return self.seconds - self.exposed

    @property
    def gb_per_s(self) -> float:
        """1e9 bytes that this rank sent, a second of communication; 0 where there was none."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def overlap_percent(self) -> float | None:
        """The share of communication that was hidden; None where there was none."""
        return 100 * self.hidden / self.seconds if self.seconds > 0 else None


class Leg(NamedTuple):
    """What a phase of a unit contributes to the critical path."""

    phase: str  # "outside": in no phase of a unit; "wait": a stall, where no transfer explains it
    unit: str
    seconds: float
    share: float  # of the trace's length


class Delay(NamedTuple):
    """All stalls of one phase for one transfer's phase."""

    waiting: str  # "wait blocks.1", what was held up; "" where it was no phase
    op: str
    on: str  # "gather blocks.1", what it waited for
    times: int
    seconds: float


@dataclass(frozen=True)
class Summary:
    """What a trace says; times in seconds, str() in milliseconds and MB (1e6 bytes).

    Attributes:
        seconds: the trace's length.
        units: a row a unit, in the order of the unit map, and one for what belongs to none.
        total: of all; simultaneous transfers count once.
        path: of the critical path, what each phase of each unit contributes; the largest first. The
            seconds add up to the trace's length.
        stalls: what waited for what; the longest first.
        cut: transfers that had not ended with the trace.
    """

    rank: int
    world: int
    seconds: float
    units: tuple[Communication, ...]
    total: Communication
    path: tuple[Leg, ...]
    stalls: tuple[Delay, ...]
    cut: int

    @property
    def exposed_percent(self) -> float:
        """The share of the trace's length during which compute stood still for transfers."""
        return 100 * self.total.stalled / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def summarize(trace: Trace) -> Summary:
    """The summary of a trace that has ended."""
    row = pieces(trace)
    busy: dict[str, list[Interval]] = {}
    sent: Counter[str] = Counter()
    for transfer in trace.transfers:
        unit = _row_of(trace, transfer.unit)
        busy.setdefault(unit, []).append((transfer.began, min(transfer.ended, trace.seconds)))
        sent[unit] += transfer.bytes
    still = _union((s.began, s.ended) for s in trace.stalls)
    stalled: dict[str, float] = defaultdict(float)
    for stall in trace.stalls:
        stalled[_row_of(trace, stall.unit)] += stall.seconds
    compute: dict[str, float] = defaultdict(float)
    for piece in row:
        if piece.stall is None:
            compute[_row_of(trace, piece.unit)] += piece.seconds

    def communication(unit: str, intervals: Iterable[Interval]) -> Communication:
        union = _union(intervals)
        return Communication(
            unit,
            bytes=sent[unit],
            seconds=_length(union),
            exposed=_common(union, still),
            stalled=stalled[unit],
            compute=compute[unit],
        )

    units = [communication(unit, busy.get(unit, ())) for unit in (*trace.units, _REST)]
    everything = _union(interval for intervals in busy.values() for interval in intervals)
    total = Communication(
        "all",
        bytes=sum(sent.values()),
        seconds=_length(everything),
        exposed=_common(everything, still),
        stalled=_length(still),
        compute=sum(compute.values()),
    )
    return Summary(
        rank=trace.rank,
        world=trace.world,
        seconds=trace.seconds,
        units=tuple(units),
        total=total,
        path=_legs(critical_path(trace, row), trace.seconds),
        stalls=_delays(trace),
        cut=sum(not transfer.complete for transfer in trace.transfers),
    )


def _row_of(trace: Trace, unit: str) -> str:
    return unit if unit in trace.units else _REST


def _legs(path: Sequence[Piece], length: float) -> tuple[Leg, ...]:
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for piece in path:
        seconds[piece.phase, piece.unit] += piece.seconds
    legs = [Leg(*key, each, each / length) for key, each in seconds.items()]
    return tuple(sorted(legs, key=lambda leg: -leg.seconds))


def _delays(trace: Trace) -> tuple[Delay, ...]:
    found: dict[tuple[str, str, str], list[float]] = {}
    for stall in trace.stalls:
        waiting = "" if stall.inside is None else str(stall.inside)
        found.setdefault((waiting, stall.op, str(stall)), []).append(stall.seconds)
    delays = [Delay(*key, len(each), sum(each)) for key, each in found.items()]
    return tuple(sorted(delays, key=lambda delay: -delay.seconds))


# --- intervals ------------------------------------------------------------------------------------


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same."""
    found: list[Interval] = []
    for began, ended in sorted(intervals):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        elif ended > began:
            found.append((began, ended))
    return found


def _length(union: Sequence[Interval]) -> float:
    return sum(ended - began for began, ended in union)


def _common(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """The length of what two unions share."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


# --- as text --------------------------------------------------------------------------------------


def _lines(summary: Summary) -> list[str]:
    total = summary.total
    overlap = total.overlap_percent
    hidden = "no communication" if overlap is None else f"{overlap:.0f} % of communication hidden"
    lines = [
        f"rank {summary.rank} of {summary.world}: {summary.seconds * 1e3:.2f} ms, compute stalled "
        f"for {summary.exposed_percent:.1f} % of it, {hidden} (times in ms, MB = 1e6 bytes sent)",
        "",
    ]
    columns = ["unit", "compute", "communication", "hidden", "exposed", "overlap", "MB", "GB/s"]
    rows = [
        [
            each.unit,
            _ms(each.compute),
            _ms(each.seconds),
            _ms(each.hidden),
            _ms(each.exposed),
            "-" if each.overlap_percent is None else f"{each.overlap_percent:.0f} %",
            f"{each.bytes / 1e6:.2f}",
            f"{each.gb_per_s:.2f}",
        ]
        for each in (*summary.units, total)
    ]
    lines += [*_table(columns, rows), "", "critical path"]
    rows = [[*_named(leg), _ms(leg.seconds), f"{leg.share:.1%}"] for leg in summary.path[:_SHOWN]]
    if rest := summary.path[_SHOWN:]:
        seconds, share = sum(leg.seconds for leg in rest), sum(leg.share for leg in rest)
        rows.append([counted(len(rest), "other"), _ms(seconds), f"{share:.1%}"])
    lines += _table(["what", "ms", "of the trace"], rows)
    if summary.stalls:
        lines += ["", "stalls"]
        rows = [
            [delay.waiting or "-", f"{delay.op}, {delay.on}", str(delay.times), _ms(delay.seconds)]
            for delay in summary.stalls[:_SHOWN]
        ]
        if others := summary.stalls[_SHOWN:]:
            times, seconds = sum(d.times for d in others), sum(d.seconds for d in others)
            rows.append([counted(len(others), "other"), "", str(times), _ms(seconds)])
        lines += _table(["held up", "waited for", "times", "ms"], rows, texts=2)
    if summary.cut:
        cut = counted(summary.cut, "transfer")
        lines += ["", f"{cut} had not ended: counted up to the trace's end"]
    return lines


def _named(leg: Leg) -> list[str]:
    if leg.phase == OUTSIDE:
        return ["outside the model's phases"]
    return [f"{leg.phase} {leg.unit}"]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Aligned lines; the first ``texts`` columns to the left."""
    text = tabulate(
        rows,
        columns,
        tablefmt="plain",
        disable_numparse=True,
        stralign="right",
        colalign=["left"] * texts,
    )
    return text.splitlines()
