"""A plan held against a model in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..calls.memory_use import memory
from ..errors import PlanError
from ..units.ledger import KINDS
from ..words import counted
from ..wrap import schedule_of

if TYPE_CHECKING:
    from .plan import Plan

_TOLERANCE = 0.02


def check(plan: Plan, model: nn.Module) -> None:
    """See ``Plan.check``."""
    schedule = schedule_of(model)
    size = schedule.comm.size
    if size != plan.world_size:
        raise PlanError(
            f"the plan is for {counted(plan.world_size, 'rank')}, and the model is sharded "
            f"over {size}: plan.with_world_size({size}).check(model)"
        )
    found, planned = cast(Any, memory(model)), cast(Any, plan.to_dict())
    for unit, real in zip(schedule.units, found["units"], strict=True):
        besides = sum(flat.grads.held_back_bytes for flat in unit.flats)  # not planned
        real["gradients"] -= besides
        found["now"]["gradients"] -= besides
    # Not padding, which differs between ranks, nor activations, which are autograd's.
    wrong = list(_differences(planned["per_rank"], found["now"], "the model"))
    names = [[unit["name"] for unit in each["units"]] for each in (planned, found)]
    if names[0] != names[1]:
        raise PlanError(
            f"the plan has {counted(len(names[0]), 'unit')}, {', '.join(names[0][:5])} ..., "
            f"and the model {len(names[1])}, {', '.join(names[1][:5])} ...: give both the same "
            "units="
        )
    for mine, real in zip(planned["units"], found["units"], strict=True):
        wrong += _differences(mine, real, f"unit {mine['name']!r}")
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise PlanError(
            f"what the model takes differs from the plan by more than {_TOLERANCE:.0%}: "
            f"{'; '.join(wrong[:8])}{more}. Gradients and buffers are there after a backward, and "
            "the states of zshard's optimizers (others are not counted) after a step; all "
            "arguments have to be those of zshard.wrap."
        )


def _differences(planned: Mapping[str, int], found: Mapping[str, int], where: str) -> Iterator[str]:
    for kind in KINDS:
        expected, real = planned[kind], found[kind]
        if abs(real - expected) > _TOLERANCE * expected:
            yield f"{kind} of {where}: {real:,} bytes, planned {expected:,}"
