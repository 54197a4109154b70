"""Simulated N: this process is rank r of N alone, over torch's fake process group.

``dist.init_process_group("fake", store=FakeStore(), rank=r, world_size=N)`` with the FakeStore of
``torch.testing._internal.distributed.fake_pg``, or such a group or DeviceMesh as ``mesh=``, is all
that it takes: wrap, forward, backward, clip and step are as always.

[Note: what a simulated rank's numbers mean]
Every other rank is taken to be this one. What it sends to this rank is what this rank has in that
place: a full buffer holds this rank's shard N times, and a sum is N times this rank's part. So
losses, gradients and norms are of no model, but finite wherever the shard is. Real are the layout,
the memory, the calls and bytes that ``zshard.stats`` counts, the order of events, and what the
host does for them. A simulated collective is one call of the fake group and one copy, for any N, on
the lane where the backend's own would be: on CUDA the group stands for NCCL, on CPU for gloo.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import StateError
from .groups import Ranks
from .messages import Work


class SimulatedRanks(Ranks):
    """Ranks of which only this one exists; see [Note: what a simulated rank's numbers mean]."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.nccl = device.type == "cuda"

    def find_hosts(self) -> None:
        """All are on this host."""

    def start_gather(
        self, full: torch.Tensor | None, shard: torch.Tensor, *, lasting: bool
    ) -> Work | None:
        """``full`` (N * S,) is ``shard`` (S,) N times."""
        assert full is not None
        _repeat(full, shard, self.size)
        return self._call(full)

    def start_exchange(self, chunks: torch.Tensor, packed: torch.Tensor) -> Work | None:
        """Every rank's row is this rank's; or their sum is N times it."""
        own = packed.view(self.size, -1)[self.rank]
        if self.row_count(packed.dtype) == 1:
            torch.mul(own, self.size, out=chunks.view(-1))
        else:
            _repeat(chunks, own, self.size)
        return self._call(chunks)

    def start_all_reduce(self, value: torch.Tensor, *, maximum: bool) -> Work | None:
        """Every rank's ``value`` is this rank's."""
        if not maximum:
            value.mul_(self.size)
        return self._call(value)

    def broadcast(self, value: torch.Tensor) -> None:
        """The first rank's ``value`` is this rank's."""
        self._call(value)

    def all_gather_words(self, mine: torch.Tensor) -> torch.Tensor:
        """This rank's ``mine`` (n,), N times."""
        return mine.repeat(self.size)

    def all_gather_object(self, value: object) -> list[object]:
        """This rank's ``value``, N times."""
        return [value] * self.size

    def _call(self, value: torch.Tensor) -> Work | None:
        """Go where the host would enqueue a collective of ``value``.

        The fake group's all_reduce leaves ``value`` alone. What its other collectives leave in
        their outputs depends on the version of torch, and takes it a copy for each rank.
        """
        if value.is_cpu and self.nccl:
            return None  # between hosts, where the group may have no backend
        work: Work | None = dist.all_reduce(value, group=self.group, async_op=not self.nccl)
        return work


def _repeat(rows: torch.Tensor, row: torch.Tensor, times: int) -> None:
    """Fill ``rows`` (times * S,) with ``row`` (S,), of one dtype."""
    # Shards are whole numbers of 64 bytes; a GPU copies an expanded tensor element by element.
    wide = torch.int64 if row.nbytes % 8 == 0 else row.dtype
    rows.view(-1).view(wide).view(times, -1).copy_(row.view(wide).expand(times, -1))


def ranks_of(group: dist.ProcessGroup | None, device: torch.device) -> Ranks:
    """The ranks of ``group``: simulated ones where it is torch's fake group; None is one rank."""
    ranks = Ranks(group, device)
    return SimulatedRanks(group, device) if group and ranks.backend == "fake" else ranks


def require_real(axes: Sequence[Ranks], what: str) -> None:
    """Refuse ``what``, which would take made-up values for the model's.

    Raises:
        StateError: if ranks are simulated.
    """
    for over in axes:
        if isinstance(over, SimulatedRanks):
            raise StateError(
                f"{what} is refused: this process simulates rank {over.rank} of {over.size} (the "
                "fake process group), and the other ranks' shards do not exist. Run real ranks, "
                "over gloo or NCCL, to save or load."
            )
