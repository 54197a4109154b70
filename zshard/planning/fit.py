"""What fits into a device, and what would change the answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError

if TYPE_CHECKING:
    from .plan import Plan

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")  # from the least that is sharded to the most
_MOST_DEVICES = 1 << 20


@dataclass(frozen=True)
class Fit:
    """What fits into a device.

    Attributes:
        strategy: of those that fit, the one with the least recomputation, and then the least
            sharding; None if none does.
        checkpointing: whether that takes activation checkpointing.
        plans: of every strategy, over as many ranks as the plan was made for.
        recomputed: likewise, with activation checkpointing; empty where activations were not
            measured, or the plan has it already.
        devices: the fewest that every strategy of ``plans`` fits on; None for one that never does.
    """

    hbm: float
    strategy: str | None
    checkpointing: bool
    plans: dict[str, Plan] = field(repr=False)
    recomputed: dict[str, Plan] = field(repr=False)
    devices: dict[str, int | None]

    def __str__(self) -> str:
        """A line for each strategy, the one that fits marked *."""
        from .report import compare  # not above: it is made of fits

        return compare(self)

    def to_dict(self) -> dict[str, object]:
        """As ``zshard plan --json`` prints it, in bytes."""
        return {
            "hbm": self.hbm,
            "strategy": self.strategy,
            "checkpointing": self.checkpointing,
            "peak": {name: plan.peak for name, plan in self.plans.items()},
            "peak_with_checkpointing": {n: plan.peak for n, plan in self.recomputed.items()},
            "devices": self.devices,
        }


def require_bytes(hbm: float | None) -> float:
    """``hbm``, if it can be the memory of a device.

    Raises:
        InputError: if it cannot.
    """
    if type(hbm) not in (int, float) or not 0 < hbm < math.inf:  # type: ignore[operator]
        raise InputError(f"hbm={hbm!r}: expected bytes of a device, 80e9 for instance")
    return hbm  # type: ignore[return-value]


def fit(plan: Plan, hbm: float | None) -> Fit:
    """See ``Plan.fit``."""
    hbm = require_bytes(hbm)
    plans = {name: plan.with_strategy(name) for name in STRATEGIES}
    recomputed = {}
    if plan.activations.source == "measured" and not plan.setup.checkpointing:
        recomputed = {name: each.changed(checkpointing=True) for name, each in plans.items()}
    fitting = [
        (name, each.setup.checkpointing)
        for name, each in (*plans.items(), *recomputed.items())
        if each.peak <= hbm
    ]
    strategy, checkpointing = fitting[0] if fitting else (None, False)
    devices = {name: _fewest_devices(each, hbm) for name, each in plans.items()}
    return Fit(hbm, strategy, checkpointing, plans, recomputed, devices)


def _fewest_devices(plan: Plan, hbm: float) -> int | None:
    """The fewest devices, by doubling and then halving: more take no more each, but for padding."""
    most = 1
    while plan.peak_over(most) > hbm:
        most *= 2
        if most > _MOST_DEVICES:
            return None
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        if plan.peak_over(middle) > hbm:
            least = middle
        else:
            most = middle
    return most


@dataclass(frozen=True)
class Alternative:
    """One change to a plan.

    Attributes:
        change: what is done ("strategy zero2", "master split").
        saves: bytes of a rank's peak; negative where it takes more.
        faster: predicted seconds of a step; negative where it takes longer, None without a batch.
        fits: whether it fits into the plan's ``hbm``; None if that is not given.
    """

    change: str
    plan: Plan = field(repr=False)
    saves: int
    faster: float | None
    fits: bool | None

    def to_dict(self) -> dict[str, object]:
        """As ``zshard plan --json`` prints it, in bytes and seconds."""
        fields = {name: getattr(self, name) for name in ("change", "saves", "faster", "fits")}
        return {**fields, "peak": self.plan.peak, "step_seconds": self.plan.step_seconds}


def alternatives(plan: Plan) -> list[Alternative]:
    """What would change the answer.

    First what fits into the plan's ``hbm``, if that is given. Of these, and where it is not, the
    fastest first, in steps of 1 %, and then what saves most; of what does not fit, what saves most.
    """
    found = []
    for change, changes in _changes(plan):
        try:
            other = plan.changed(**changes)
        except InputError:  # a precision that parameters of these dtypes cannot have
            continue
        faster = None
        if plan.step_seconds is not None and other.step_seconds is not None:
            faster = plan.step_seconds - other.step_seconds
        fits = None if plan.hbm is None else other.peak <= plan.hbm
        found.append(Alternative(change, other, plan.peak - other.peak, faster, fits))
    short = plan.hbm is not None and plan.peak > plan.hbm

    def rank(each: Alternative) -> tuple[bool, float, int]:
        share = 0.0
        if each.faster is not None and plan.step_seconds and (each.fits or not short):
            share = round(each.faster / plan.step_seconds, 2)  # a smaller difference is none
        return each.fits is False, -share, -each.saves

    return sorted(found, key=rank)


def _changes(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    setup = plan.setup
    for name in STRATEGIES:
        if name != plan.strategy and setup.world_size > 1:
            yield f"strategy {name}", {"strategy": name}
    precision = setup.precision
    if precision.compute in (None, torch.float32):
        bf16 = replace(precision, compute=torch.bfloat16, reduce=torch.float32)
        yield "bf16 compute", {"precision": bf16}
    elif precision.reduce in (None, torch.float32) and precision.compute == torch.bfloat16:
        low = replace(precision, reduce=torch.bfloat16)
        yield "bf16 reduction", {"precision": low}
    if precision.compute == torch.bfloat16 and precision.master == "fp32":
        yield "split master", {"precision": replace(precision, master="split")}
    if plan.buffers.full > 0:
        for prefetch in {max(setup.prefetch - 1, 0), setup.prefetch + 1} - {setup.prefetch}:
            yield f"prefetch {prefetch}", {"prefetch": prefetch}
    if plan.activations.source == "measured":
        on = not setup.checkpointing
        yield f"{'' if on else 'no '}activation checkpointing", {"checkpointing": on}
