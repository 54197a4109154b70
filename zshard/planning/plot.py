"""A plan as a picture: memory by strategy, and the predicted step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..pictures import new_figure
from ..tracing.plot import PHASE_COLORS
from ..units.ledger import STATES
from ..whole_files import write_whole
from ..words import counted
from .fit import STRATEGIES
from .plan import Plan
from .timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PHASES = ("forward", "backward", "wait", "gather", "reduce", "pack", "sum", "step")
_STREAMS = ("compute", "gather", "reduce")


def plot(plan: Plan, path: Path) -> None:
    """Draw a bar for each strategy, stacked by kind; with a batch, the step's timeline below.

    Raises:
        InputError: if the file cannot be written.
        MissingPackage: without matplotlib.
    """
    rows = 1 if plan.timeline is None else 2
    figure = new_figure("zshard plan --plot", 10, 1 + 3.2 * rows)
    axes = figure.subplots(rows, squeeze=False)
    _memory(axes[0, 0], plan)
    if plan.timeline is not None and plan.machine is not None:
        _step(axes[1, 0], plan.timeline, plan.machine.name)
    write_whole(path, lambda part: figure.savefig(part, format="png", dpi=120))


def _memory(axes: Axes, plan: Plan) -> None:
    rows = {name: plan.with_strategy(name) for name in STRATEGIES}
    parts: dict[str, list[int]] = {
        kind: [getattr(row.holding, kind) for row in rows.values()] for kind in STATES
    }
    parts["full buffers"] = [row.buffers.full for row in rows.values()]
    parts["reduce buffers"] = [row.buffers.reduce for row in rows.values()]
    parts["activations"] = [row.activations.bytes for row in rows.values()]
    left = [0.0] * len(rows)
    for kind, sizes in parts.items():
        if any(sizes):
            axes.barh(list(rows), [n / 1e9 for n in sizes], left=left, label=kind)
            left = [a + n / 1e9 for a, n in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        shown = f"{total:,.0f}" if total >= 100 else f"{total:.3g}"
        axes.text(total, row, f" {shown}", va="center", fontsize=8)
    if plan.hbm is not None:
        axes.axvline(plan.hbm / 1e9, color="black", ls="--", lw=1, label="hbm")
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(f"GB (1e9 bytes) a rank, over {counted(plan.world_size, 'rank')}")
    axes.legend(fontsize=7)


def _step(axes: Axes, line: Timeline, machine: str) -> None:
    for span in line.spans:
        axes.barh(
            _STREAMS.index(span.stream),
            (span.ended - span.began) * 1e3,
            left=span.began * 1e3,
            color=PHASE_COLORS[span.phase],
            edgecolor="white",
            lw=0.3,
        )
    for phase in _PHASES:
        axes.barh(0, 0, color=PHASE_COLORS[phase], label=phase)
    axes.set_yticks(range(len(_STREAMS)), _STREAMS)
    axes.invert_yaxis()
    axes.set_xlabel(
        f"ms of a step, predicted for {machine}: {line.seconds * 1e3:,.1f}, of which waiting "
        f"{line.exposed * 1e3:,.1f}"
    )
    axes.legend(fontsize=7, ncols=len(_PHASES))
