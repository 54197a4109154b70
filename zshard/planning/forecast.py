"""The time of a step: what is computed and sent, over how fast a machine does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .footprint import Collective, FlatPlan, collectives_of
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
    in_memory: bool,
) -> Timeline:
    """The timeline of a step.

    Args:
        labels, units: of every unit, the root first.
        optimizer_states: for an element; see ``OPTIMIZERS``.
        in_memory: whether ranks read each other's memory.
    """
    seconds = _seconds_in_memory if in_memory else _seconds_on_a_link
    durations = [
        _durations(label, flats, work, machine, seconds, nccl=nccl)
        for label, flats, work in zip(labels, units, rehearsal.units, strict=True)
    ]
    flats = [flat for each in units for flat in each]
    world_size = flats[0].layout.world_size if flats else 1
    updated = sum(flat.update_bytes(optimizer_states) for flat in flats)
    meeting = 0.0
    if world_size > 1:
        link = machine.shared if in_memory else machine.links(world_size)[0]
        assert link is not None
        meeting = link.seconds(0, world_size)
    return timeline(
        durations,
        rehearsal.order,
        prefetch,
        step=max(updated / machine.memory, machine.call),
        meeting=meeting,
        interference=machine.interference,
        sums_on_host=machine.sums_on_host,
        in_memory=in_memory,
    )


def _durations(
    label: str,
    flats: Sequence[FlatPlan],
    work: UnitWork,
    machine: Machine,
    seconds: Callable[[Collective, Machine, int], float],
    *,
    nccl: bool,
) -> Durations:
    sent = {"gather": 0.0, "reduce": 0.0, "share": 0.0}
    for each in collectives_of(label, flats, gathers=1, reduced=work.reduced):
        kind = "reduce" if each.op == "reduce_scatter" else "gather"
        if each.op == "all_gather" and each.phase == "reduce":
            kind = "share"
        sent[kind] += seconds(each, machine, flats[0].layout.world_size)
    trained = [flat for flat in flats if flat.trained and work.reduced]
    return Durations(
        label,
        all(flat.strategy.resident or flat.layout.world_size == 1 for flat in flats),
        machine.seconds(work.forward),
        machine.seconds(work.backward),
        reached=work.reached,
        pack=sum(flat.pack_bytes for flat in trained) / machine.memory,
        sum=sum(flat.sum_bytes(nccl=nccl) for flat in trained) / machine.memory,
        **sent,
    )


def _seconds_on_a_link(each: Collective, machine: Machine, world_size: int) -> float:
    gather, reduce = machine.links(world_size)
    link = reduce if each.op == "reduce_scatter" else gather
    return link.seconds(each.bytes, world_size)


def _seconds_in_memory(each: Collective, machine: Machine, world_size: int) -> float:
    """What an exchange takes beside the sum, which reads where the others have packed: a meeting.

    Reduced gradients (ddp) pass a mailbox, into which each rank writes its own before.
    """
    assert machine.shared is not None
    if each.op == "reduce_scatter":
        return machine.shared.seconds(0, world_size)
    through_a_box = each.bytes // (world_size - 1) if each.phase == "reduce" else 0
    return machine.shared.seconds(each.bytes + through_a_box, world_size)
