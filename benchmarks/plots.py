"""The figures as pictures: kernels against the copy's rate, and what steps consist of."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from optim_cases import PATTERNS
from protocol import Result

_OURS, _THEIRS, _COMPUTE, _EXPOSED = "#c44e52", "#8c8c8c", "#4c72b0", "#dd8452"
_REFERENCES = ("copy", *PATTERNS.values())  # ceilings, no peers
_BASES = ("compute", "plain")  # what every side's time is counted from


def plot_ops(results: Sequence[Result], path: Path, title: str) -> None:
    """GB/s of the fewest bytes, for zshard and its fastest peer, beside the copy's.

    Args:
        results: the first is the copy's ceiling.
    """
    ceiling, cases = results[0], results[1:]
    figure = Figure(figsize=(10, 1.6 + 0.42 * len(cases)), layout="constrained")
    axes = figure.add_subplot()
    for row, result in enumerate(cases):
        own, nbytes = result.first, result.nbytes[result.first]
        peers = [n for n in result.seconds if n not in (own, *_REFERENCES)]
        fastest = sorted(peers, key=lambda name: min(result.seconds[name]))[:1]
        bars = zip((own, *fastest), (-0.2, 0.2), (_OURS, _THEIRS), strict=False)
        for name, offset, color in bars:  # ours alone where no peer can be replayed
            rate = nbytes / _least(result, name) / 1e9
            axes.barh(row + offset, rate, 0.38, color=color)
            axes.text(rate, row + offset, f" {name}", va="center", fontsize=7)
        copied = result.nbytes["copy"] / _least(result, "copy") / 1e9
        axes.plot([copied, copied], [row - 0.4, row + 0.4], color="black", lw=1.5)
    rate = ceiling.nbytes[ceiling.first] / _least(ceiling, ceiling.first) / 1e9
    axes.axvline(rate, color="black", ls="--", lw=1)
    axes.set_yticks(range(len(cases)), [result.case for result in cases], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15, y=0.01)
    axes.set_xlabel("GB/s of the fewest bytes, best round (red: zshard, grey: its fastest peer)")
    copies = f"black: the copy, dashed of {_size(ceiling)}, solid of the case's bytes"
    figure.suptitle(f"{title}\n{copies}", fontsize=8)
    figure.savefig(path, format="png", dpi=120)


def plot_steps(results: Sequence[Result], path: Path, title: str) -> None:
    """A stacked bar for each contestant: compute, what zshard waits for, and the rest beyond."""
    figure = Figure(figsize=(10, 1 + 2.6 * len(results)), layout="constrained")
    for axes, result in zip(
        figure.subplots(len(results), squeeze=False).flat, results, strict=True
    ):
        _stack(axes, result)
    figure.suptitle(title, fontsize=8)
    figure.savefig(path, format="png", dpi=120)


def _stack(axes: Axes, result: Result) -> None:
    base = next(name for name in _BASES if name in result.seconds)
    names = [name for name in result.seconds if name not in _BASES]
    exposed = result.extra.get("exposed_s", {})
    assert isinstance(exposed, dict)
    parts: dict[str, list[float]] = {
        base: [],
        "exposed communication (zshard)": [],
        "the rest beyond": [],
    }
    for name in names:
        total = _median(result, name) * 1e3
        computed = min(_median(result, base) * 1e3, total)
        waited = min(exposed.get(name, 0.0) * 1e3, total - computed)
        split = (computed, waited, total - computed - waited)
        for part, value in zip(parts, split, strict=True):
            parts[part].append(value)
    left = [0.0] * len(names)
    for (part, values), color in zip(parts.items(), (_COMPUTE, _EXPOSED, _THEIRS), strict=True):
        axes.barh(names, values, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_title(result.case, fontsize=9)
    axes.set_xlabel("ms a step, medians", fontsize=8)
    axes.legend(fontsize=7, loc="best")


def _least(result: Result, name: str) -> float:
    return min(result.seconds[name])


def _median(result: Result, name: str) -> float:
    return statistics.median(result.seconds[name])


def _size(result: Result) -> str:
    return f"{result.nbytes[result.first] / 2**20:.0f} MiB"
