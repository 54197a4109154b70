"""A trace as a picture: a row a stream, a colour a phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..pictures import new_figure
from ..whole_files import StrPath, write_whole
from .path import OUTSIDE, pieces
from .records import TRACKS
from .trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# One colour a phase, in every picture of a step.
PHASE_COLORS = {
    "forward": "#4c72b0",
    "backward": "#8172b3",
    "step": "#55a868",
    "pack": "#ccb974",
    "sum": "#dd8452",
    "issue": "#937860",
    "reshard": "#8c8c8c",
    "wait": "#c44e52",
    OUTSIDE: "#e3e3e3",
    "gather": "#64b5cd",
    "reduce": "#da8bc3",
}
_OTHER = "#5f5f5f"  # meetings and whatever else


def plot(trace: Trace, path: StrPath) -> None:
    """Draw the timeline; see ``Trace.plot``."""
    bars = _bars(trace)
    rows = [row for row in TRACKS if any(bar[0] == row for bar in bars)]
    figure = new_figure("Trace.plot", 14, 1.6 + 0.6 * len(rows))
    from matplotlib.patches import Patch

    axes = figure.add_subplot()
    used = dict.fromkeys(phase for _, phase, _, _ in bars)
    for row, name in enumerate(rows):
        _draw(axes, row, [bar for bar in bars if bar[0] == name])
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, max(trace.seconds * 1e3, 1e-6))
    axes.set_xlabel("ms")
    axes.set_title(f"rank {trace.rank} of {trace.world}: {trace.model}", fontsize=9)
    patches = [Patch(color=PHASE_COLORS.get(p, _OTHER), label=_meaning(p)) for p in used]
    figure.legend(handles=patches, ncols=12, fontsize=7, loc="outside lower center")
    write_whole(path, lambda part: figure.savefig(part, format="png", dpi=120))


def _bars(trace: Trace) -> list[tuple[str, str, float, float]]:
    """Row, phase, begin and end; compute in its innermost phases, so that nothing is hidden."""
    bars = [("compute", p.phase, p.began, p.ended) for p in pieces(trace)]
    bars += [("reduce", e.phase, e.began, e.ended) for e in trace.spans if e.stream == "reduce"]
    bars += [(t.lane, t.phase, t.began, min(t.ended, trace.seconds)) for t in trace.transfers]
    return bars


def _draw(axes: Axes, row: int, bars: list[tuple[str, str, float, float]]) -> None:
    spans = [(began * 1e3, (ended - began) * 1e3) for _, _, began, ended in bars]
    colors = [PHASE_COLORS.get(phase, _OTHER) for _, phase, _, _ in bars]
    axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colors, linewidth=0)


def _meaning(phase: str) -> str:
    return "wait (stalled)" if phase == "wait" else phase
