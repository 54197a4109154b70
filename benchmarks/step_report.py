"""What the times of steps mean: over compute alone, waiting, and the host's overhead."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from protocol import Ratio, Result, aligned, median_ratio
from setting import UNITS


class Overhead(NamedTuple):
    """Of a contestant beyond the plain model, a unit and step."""

    microseconds: float  # median
    ratio: Ratio  # over that of the side on trial


def overheads(result: Result) -> dict[str, Overhead]:
    """The host's overhead of every contestant of the tiny units."""
    plain = result.seconds["plain"]
    beyond = {
        name: [(s - p) / UNITS for s, p in zip(seconds, plain, strict=True)]
        for name, seconds in result.seconds.items()
        if name != "plain"
    }
    own = beyond[result.first]
    return {
        name: Overhead(statistics.median(seconds) * 1e6, median_ratio(seconds, own))
        for name, seconds in beyond.items()
    }


def over_compute(result: Result) -> dict[str, Ratio]:
    """The time of every contestant over that of computing alone."""
    if "compute" not in result.seconds:
        return {}
    base = result.seconds["compute"]
    return {n: median_ratio(s, base) for n, s in result.seconds.items() if n != "compute"}


def _by_name(result: Result, figure: str) -> dict[str, float]:
    found = result.extra.get(figure, {})
    assert isinstance(found, dict)
    return found


def summary(results: Sequence[Result]) -> str:
    """A line a contestant: time over compute's, waiting, the host's overhead, the wire's bytes."""
    rows = []
    for result in results:
        host = overheads(result) if "plain" in result.seconds else {}
        over, waits = over_compute(result), _by_name(result, "exposed_s")
        sent = _by_name(result, "sent_bytes")
        for name in over or host:
            cells = [""] * 5
            if name in over:
                cells[0] = f"{over[name].median - 1:+.0%}"
            if name in waits:
                cells[1] = f"{waits[name] * 1e3:.2f}"
            if name in host:
                ratio = host[name].ratio
                cells[2] = f"{host[name].microseconds:.1f}"
                cells[3] = f"{ratio.median:.2f} ({ratio.interval})"
            if name in sent:
                cells[4] = f"{sent[name] / 1e6:.1f}"
            rows.append([result.case, name, *cells])
    columns = [
        "case",
        "step",
        "over compute",
        "waits ms",
        "host us/unit",
        "host ratio (95 %)",
        "sent MB",
    ]
    return aligned(columns, rows)


def as_json(result: Result) -> dict[str, object]:
    """Every figure of a case, the host's overhead too."""
    figures = result.as_json()
    if over := over_compute(result):
        figures["over_compute"] = {name: ratio._asdict() for name, ratio in over.items()}
    if "plain" in result.seconds:
        host = overheads(result)
        figures["host_us_per_unit"] = {name: o.microseconds for name, o in host.items()}
        figures["host_over_first"] = {name: o.ratio._asdict() for name, o in host.items()}
    return figures
