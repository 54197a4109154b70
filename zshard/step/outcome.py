"""What came out of a backward, as the ranks tell each other: one sum over all of them.

Each rank adds a vector of float64. On the device it is (2,), which only the optimizer's step reads.
On the host it is (3 + parameters,), and must not come from a GPU, which the host would have to wait
for. On CPU the two are one message.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..comm import Comm
from ..tag import Tag
from ..transports.handle import Handle


class Outcome(NamedTuple):
    """What came out, of all ranks together."""

    sum_of_squares: torch.Tensor  # 0-d float64, on the device
    non_finite: torch.Tensor  # 0-d float64, on the device: not 0 if any gradient is not finite
    failures: int  # ranks whose backward raised
    failed_ranks: int  # the sum of those ranks' numbers: where there is one, its number
    strays: int  # ranks whose backward took another way than before
    present: list[bool]  # of each trained parameter, whether any rank has a gradient


class Ending(enum.Enum):
    """How a step's backward has ended on this rank."""

    WELL = "well"
    RAISED = "an exception has left it"
    STRAYED = "it has taken another way than before"
    LOST = "well, but an exception has left an earlier one inside no_sync, where nobody was told"

    @property
    def without_gradients(self) -> bool:
        """Whether this rank has taken part in the reductions without its gradients."""
        return self in (Ending.RAISED, Ending.STRAYED)


class OutcomeSum:
    """This rank's part, then the sum, while it is under way.

    Args:
        stats: (2,) float64, of this rank's shards: the sum of squares, and the non-finite flag.
        ending: of the backward on this rank.
        present: of each trained parameter, whether this rank has a gradient.
    """

    def __init__(
        self, stats: torch.Tensor, ending: Ending, present: Iterable[bool], comm: Comm
    ) -> None:
        failed = ending is not Ending.WELL
        mine = [failed, failed * comm.world_rank, ending is Ending.STRAYED, *present]
        told = torch.tensor(mine, dtype=torch.float64, device="cpu")
        self._stats, self._told, self._messages = stats, told, [stats, told]
        if stats.is_cpu:
            joined = torch.cat([stats, told])
            self._stats, self._told, self._messages = joined[:2], joined[2:], [joined]
        self._comm = comm
        self._handles: list[Handle] = []

    def start(self, tag: Tag) -> None:
        """Start summing over all ranks."""
        for over in self._comm.axes:
            self.wait()
            self._handles = [self._comm.all_reduce(m, tag, over) for m in self._messages]

    def wait(self) -> None:
        """Wait for the sum; a wait that an exception has ended may be begun again."""
        for handle in self._handles:
            handle.wait()
        self._handles = []

    def outcome(self) -> Outcome:
        """The sum, after ``wait``."""
        sum_of_squares, non_finite = self._stats
        failures, failed_ranks, strays, *present = self._told.tolist()
        return Outcome(
            sum_of_squares,
            non_finite,
            failures=int(failures),
            failed_ranks=int(failed_ranks),
            strays=int(strays),
            present=[ranks > 0 for ranks in present],
        )
