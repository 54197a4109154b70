"""``zshard train --plan``: the plan of a run before its first step, and what it came to after."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from ..calls.memory_use import memory
from ..errors import PlanError
from ..gpt import GPT
from ..planning import Plan, plan
from ..planning.report import report
from ..transports.transport import asked_for
from ..units.ledger import KINDS
from .metrics import StepMetrics
from .options import TrainOptions
from .steptrace import LEARNING_STEPS


def plan_of(options: TrainOptions, world_size: int, device: str) -> Plan:
    """The plan of a run; with times where the options name a machine.

    Raises:
        InputError: for a machine that is none; for a ZSHARD_COMM that is none, or not known of it.
    """
    comm, wrong = asked_for("auto", None)
    if wrong is not None:
        raise wrong
    config = replace(options.model_config(), activation_checkpointing=False)  # planned, not built
    with torch.device("meta"):
        model = GPT(config)
    return plan(
        model,
        world_size,
        strategy=options.strategy,
        precision=options.policy(),
        batch=(options.batch, options.seq),
        checkpointing=options.activation_checkpointing,
        machine=options.machine,
        comm=comm,
        backend="nccl" if device == "cuda" else "gloo",
    )


def announce(planned: Plan, options: TrainOptions) -> str:
    """The plan as text."""
    text = report(planned, None, title=f"--- planned: {options.precision}, AdamW")
    if options.accumulate > 1:
        text += (
            f"\n--accumulate {options.accumulate}: whole gradients are kept besides (no_sync), and "
            f"a step's time is that of one of its {options.accumulate} parts."
        )
    return text


def compare(
    planned: Plan, options: TrainOptions, model: nn.Module, steps: Sequence[StepMetrics]
) -> str:
    """What rank 0 takes, beside the plan, and how long its steps took: those of this run."""
    held = cast(dict[str, int], memory(model)["now"])
    expected = cast(dict[str, int], planned.to_dict()["per_rank"])
    lines = [f"{'--- planned and measured, MB':32}{'planned':>12}{'measured':>12}"]
    for kind in KINDS:
        lines.append(f"{kind:32}{expected[kind] / 1e6:12,.3f}{held[kind] / 1e6:12,.3f}")
    try:
        planned.check(model)
        lines.append("The plan held within 2 %. (Activations are autograd's, and not measured.)")
        if options.accumulate > 1:
            lines.append("(What gradients take besides, for --accumulate, is not planned.)")
    except PlanError as error:
        lines.append(f"The plan did not hold: {error}")
    taken = [step.seconds for step in steps[LEARNING_STEPS:]]
    if taken:
        measured = f"A step took {statistics.median(taken) * 1e3:,.1f} ms (median)"
        if planned.step_seconds is not None and planned.machine is not None:
            predicted = f"{planned.step_seconds * 1e3:,.1f} ms on {planned.machine.name}"
            part = "" if options.accumulate == 1 else f" for each of {options.accumulate} parts"
            measured += f"; predicted were {predicted}{part}"
        lines.append(measured + ".")
    return "\n".join(lines)
