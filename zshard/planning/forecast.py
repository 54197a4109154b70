"""The time of a step: what is computed and sent, over how fast a machine does it."""

from __future__ import annotations

from collections.abc import Sequence

from .footprint import FlatPlan, collectives_of
from .machine import Machine
from .rehearsal import Rehearsal, UnitWork
from .timeline import Durations, Timeline, timeline


def forecast(
    labels: Sequence[str],
    units: Sequence[Sequence[FlatPlan]],
    rehearsal: Rehearsal,
    machine: Machine,
    *,
    prefetch: int,
    optimizer_states: int,
    nccl: bool,
) -> Timeline:
    """The timeline of a step.

    Args:
        labels, units: of every unit, the root first.
        optimizer_states: fp32 states of the optimizer for an element.
    """
    durations = [
        _durations(label, flats, work, machine, nccl)
        for label, flats, work in zip(labels, units, rehearsal.units, strict=True)
    ]
    flats = [flat for each in units for flat in each]
    world_size = flats[0].layout.world_size if flats else 1
    updated = sum(flat.update_bytes(optimizer_states) for flat in flats)
    meeting = machine.links(world_size)[0].seconds(0, world_size) if world_size > 1 else 0.0
    return timeline(
        durations,
        rehearsal.order,
        prefetch,
        step=max(updated / machine.memory, machine.call),
        meeting=meeting,
        interference=machine.interference,
        sums_on_host=machine.sums_on_host,
    )


def _durations(
    label: str, flats: Sequence[FlatPlan], work: UnitWork, machine: Machine, nccl: bool
) -> Durations:
    sent = {"gather": 0.0, "reduce": 0.0, "share": 0.0}
    for each in collectives_of(label, flats, gathers=1):
        world_size = flats[0].layout.world_size
        gather, reduce = machine.links(world_size)
        kind, link = ("reduce", reduce) if each.op == "reduce_scatter" else ("gather", gather)
        if each.op == "all_gather" and each.phase == "reduce":
            kind = "share"
        sent[kind] += link.seconds(each.bytes, world_size)
    trained = [flat for flat in flats if flat.trained]
    return Durations(
        label,
        all(flat.resident for flat in flats),
        machine.seconds(work.forward),
        machine.seconds(work.backward),
        reached=work.returns > 0,
        pack=sum(flat.pack_bytes for flat in trained) / machine.memory,
        sum=sum(flat.sum_bytes(nccl=nccl) for flat in trained) / machine.memory,
        **sent,
    )
