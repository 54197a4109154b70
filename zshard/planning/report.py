"""Plans as text: a line for each strategy, when memory is at its peak, and what would change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tabulate import tabulate

from ..words import counted
from .fit import STRATEGIES, Alternative, Fit
from .plan import Plan

_KINDS = ("parameters", "gradients", "master", "optimizer", "states")
_SHOWN = 6  # alternatives
_CARRIERS = {"group": "", "peer": " over shared memory"}


class _Scale(NamedTuple):
    """What sizes are shown in."""

    name: str
    bytes: float
    power: str

    def text(self, nbytes: int) -> str:
        return f"{nbytes / self.bytes:,.3f}"


_GB, _MB = _Scale("GB", 1e9, "1e9"), _Scale("MB", 1e6, "1e6")


def report(plan: Plan, fit: Fit | None, title: str) -> str:
    """A plan as ``zshard plan`` prints it; sizes in GB, or MB if its peak is below one."""
    sent = sum(each.bytes * each.count for each in plan.collectives)
    count = sum(each.count for each in plan.collectives)
    scale = _scale(plan)
    lines = [
        f"{title}, over {counted(plan.world_size, 'rank')}: {plan.parameters:,} parameters in "
        f"{counted(len(plan.units), 'unit')}",
        _table(plan, fit, scale, marked=plan.strategy),
        f"A rank sends {scale.text(sent)} {scale.name} a step in {counted(count, 'collective')} "
        f"({plan.strategy}).",
    ]
    kept = plan.activations
    if kept.source == "measured":
        recomputed = ", every unit recomputed" if plan.setup.checkpointing else ""
        lines.append(
            f"Activations are measured on fake tensors{recomputed}; the peak is in {plan.peak_at}."
        )
    elif kept.source == "given":
        lines.append(f"Activations are as given: {scale.text(kept.bytes)} {scale.name}.")
    else:
        lines.append("Activations are not counted, nor times: --batch BxT measures and predicts.")
    if plan.timeline is not None:
        lines.append(_times(plan))
    lines += ["", "What would change it, against the strategy marked *:"]
    lines += [_alternative(each, scale) for each in plan.alternatives()[:_SHOWN]]
    if fit is not None:
        lines += ["", _verdict(fit, plan)]
    return "\n".join(lines)


def compare(fit: Fit) -> str:
    """What fits, strategy by strategy."""
    plan = fit.plans[fit.strategy or STRATEGIES[-1]]
    return f"{_table(plan, fit, _scale(plan), marked=fit.strategy)}\n{_verdict(fit, plan)}"


def _scale(plan: Plan) -> _Scale:
    return _GB if plan.peak >= 1e9 else _MB


def _times(plan: Plan) -> str:
    line = plan.timeline
    assert line is not None and plan.machine is not None and plan.flops is not None
    assert plan.comm is not None
    hidden = max(line.communication - line.exposed, 0.0)
    share = hidden / line.communication if line.communication else 1.0
    return (
        f"A step is predicted to take {line.seconds * 1e3:,.1f} ms on {plan.machine.name}: "
        f"{plan.flops:.3g} operations of matrix products a rank; communication"
        f"{_CARRIERS[plan.comm]} {line.communication * 1e3:,.1f} ms, of which "
        f"{line.exposed * 1e3:,.1f} ms are exposed ({share:.0%} hidden)."
    )


def _alternative(each: Alternative, scale: _Scale) -> str:
    verb, amount = ("saves", each.saves) if each.saves >= 0 else ("takes", -each.saves)
    text = f"  {each.change}: {verb} {scale.text(amount)} {scale.name}"
    if each.faster is not None:
        speed = "faster" if each.faster >= 0 else "slower"
        text += f", {abs(each.faster) * 1e3:,.1f} ms {speed}"
    if each.fits is not None:
        text += ", fits" if each.fits else ", does not fit"
    return text


def _verdict(fit: Fit, plan: Plan) -> str:
    best = "none of the strategies fits"
    if fit.strategy is not None:
        best = f"{fit.strategy} fits"
        if fit.checkpointing:
            best += " with activation checkpointing"
    return f"Into {fit.hbm / 1e9:,.4g} GB over {counted(plan.world_size, 'rank')}: {best}."


def _table(plan: Plan, fit: Fit | None, scale: _Scale, marked: str | None) -> str:
    """A line for each strategy."""
    timed = plan.timeline is not None
    heads = [f"{scale.name} ({scale.power}) a rank", *_KINDS]
    heads += ["full buffers", "reduce buffers", "activations", "peak"]
    heads += ["step ms", "exposed ms"] if timed else []
    heads += ["fits", "fewest devices"] if fit is not None else []
    lines: list[Sequence[str]] = []
    for name in STRATEGIES:
        row = plan.with_strategy(name)
        sizes = [getattr(row.holding, kind) for kind in _KINDS]
        sizes += [row.buffers.full, row.buffers.reduce, row.activations.bytes, row.peak]
        line = [name + (" *" if name == marked else "")]
        line += [scale.text(nbytes) for nbytes in sizes]
        if row.timeline is not None:
            line += [f"{row.timeline.seconds * 1e3:,.1f}", f"{row.timeline.exposed * 1e3:,.1f}"]
        if fit is not None:
            devices = fit.devices[name]
            fewest = "none will do" if devices is None else str(devices)
            line += ["yes" if row.peak <= fit.hbm else "no", fewest]
        lines.append(line)
    return tabulate(
        lines, heads, tablefmt="plain", disable_numparse=True, stralign="right", colalign=["left"]
    )
