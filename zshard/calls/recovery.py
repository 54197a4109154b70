"""After an exception in the middle of a collective over shared memory: all ranks begin anew.

[Note: giving up]
An exception that a signal's handler raises comes out of whatever the rank waits in, and the
collective is half done. The rank says so in its note, and takes part in nothing any more; whoever
waits for it finds that, gives up as well, and so all of them do. They stand at different places
then, and know different things: so they meet in the process group, through which nothing of such
models goes, forget all that was, gradients and programs too, and count their rounds from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ..errors import CommError
from ..schedule import Schedule, live
from ..step.debts import forgive
from ..step.updates import Tallies
from ..tag import Tag
from ..transports.neighbours import Neighbours
from ..transports.peer import PeerRanks

_Facts = tuple[Tallies, str]  # of a model; with its ``Schedule.unusable``


def given_up_in(schedule: Schedule) -> Neighbours | None:
    """Where this rank, or another, has left a collective over shared memory half done."""
    there = (over.neighbours for over in schedule.comm.axes)  # replicas meet in memory, too
    return next((each for each in there if each is not None and each.given_up()), None)


def recover(schedule: Schedule, neighbours: Neighbours) -> None:
    """Bring back all models that share the memory of ``neighbours``; for all ranks to call.

    Args:
        schedule: of one of these models.

    Raises:
        CommError: if that cannot be.
        MismatchError: on every rank, if some have updated parameters and others have not.
    """
    models = sorted(
        (each for each in live() if any(o.neighbours is neighbours for o in each.comm.axes)),
        key=lambda each: each.agreement.number,
    )
    if any(not each.comm.shards.in_memory or each.comm.replicas.size > 1 for each in models):
        raise CommError(
            f"{schedule.comm.me} cannot be brought back after it has given up "
            f"({neighbours.failed}): with replicas, or a model wrapped with comm='group', the "
            "process group may be in the middle of a collective, too. Start the processes anew, "
            "from the last checkpoint."
        )
    for each in models:
        each.comm.broken = True  # what is under way ends here
        each.reducer.forget()
        each.agreement.forget()
        forgive(each.agreement)
        each.backward.forget()
        for unit in each.units:
            each.executor.reshard(unit)
            unit.forget_gather()
            unit.give_slot_back()  # if the exception came as it was about to be gathered
    arenas = [cast(PeerRanks, each.comm.shards).arena for each in models]
    mine = [(each.agreement.number, (each.updates.tallies(), each.unusable)) for each in models]
    with schedule.comm.named_errors("reset", Tag(schedule.executor.step, "reset", "root")):
        told = neighbours.recover(arenas, mine)
    everyone = [dict(each) for each in cast("Sequence[list[tuple[int, _Facts]]]", told)]
    for each in models:
        each.comm.broken = False
    for each in models:
        number = each.agreement.number
        found = [facts[number] for facts in everyone if number in facts]
        tallies, unusable = zip(*found, strict=True)
        each.unusable = next(filter(None, unusable), "")  # as a load was left in the middle
        each.updates.catch_up(tallies)
