"""The reduction of one flat buffer: exchange, sum in rank order, and what follows the sum.

Order of events: the packed gradients are exchanged over the shards and summed. With replicas (HSDP)
that sum is cut into pieces, exchanged over the replicas, and summed again. The last sum is the pass
that scales, accumulates, squares and checks. Then what is to be known more widely is gathered: the
pieces over the replicas, and with replicated masters (ddp) the shards over the ranks.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from . import ops
from .comm import Comm, Handle, Tag
from .errors import CommError
from .flat import Flat
from .groups import Ranks
from .pool import Pool
from .streams import Mark, compute_waits


class Stage(NamedTuple):
    """One exchange, and the sum that follows."""

    over: Ranks
    sent: torch.Tensor  # (size * n,) reduce dtype
    chunks: torch.Tensor  # (C, n) reduce dtype


class Route(NamedTuple):
    """The memory of a flat buffer's reduction: views of the pool's two reduce buffers."""

    packed: torch.Tensor  # (N * S,) reduce dtype
    stages: tuple[Stage, ...]  # none where there is a single rank
    last: torch.Tensor  # (C, n) reduce dtype: what the last sum reads

    @classmethod
    def of(cls, flat: Flat, comm: Comm, pool: Pool) -> Route:
        """Lay out the reduction of ``flat``."""
        dtype, layout = flat.dtypes.reduce, flat.layout
        packed = pool.scratch("packed", layout.numel * dtype.itemsize).view(dtype)
        sent, stages = packed, []
        for over in (comm.shards, comm.replicas):
            if over.size > 1 and layout.numel > 0:
                rows, n = over.chunks(dtype), sent.numel() // over.size
                chunks = pool.scratch("chunks", rows * n * dtype.itemsize)
                stages.append(Stage(over, sent, chunks.view(dtype).view(rows, n)))
                sent = packed[:n]  # the sum goes where nothing is read any more
        last = stages[-1].chunks if stages else packed.view(1, layout.numel)
        return cls(packed, tuple(stages), last)

    @staticmethod
    def bytes_of(flat: Flat, comm: Comm) -> tuple[int, int]:
        """Bytes of the two reduce buffers that the reduction of ``flat`` takes."""
        dtype, layout = flat.dtypes.reduce, flat.layout
        axes = ((comm.shards, layout.shard_size), (comm.replicas, layout.piece(0).numel))
        chunks = [over.chunks(dtype) * n for over, n in axes if over.size > 1]
        return layout.numel * dtype.itemsize, max(chunks, default=0) * dtype.itemsize


class Flight:
    """A reduction under way; the gradients are packed.

    Args:
        scale: of the last sum.
        stats: (2,) float64, for the sum of squares and the non-finite flag of the last sum.
    """

    def __init__(
        self, flat: Flat, route: Route, scale: float, stats: torch.Tensor, comm: Comm, tag: Tag
    ) -> None:
        self._flat, self._route, self._comm, self._tag = flat, route, comm, tag
        self._scale, self._stats = scale, stats
        self._handle: Handle | None = None
        self._gathers: list[Handle] = []
        self._mark: Mark = None  # of the last sum, where that is enqueued already (CUDA)
        flat.grads.shard()  # allocated here, on the compute stream
        self._start(0)
        if comm.reduce_lane.stream is not None:  # nothing blocks the host: it goes straight on
            with comm.reduce_lane.after_compute():
                self._finish()

    def land(self) -> None:
        """Have the reduce buffers free again; gathers may still be under way."""
        if self._mark is None:
            self._finish()
        else:
            compute_waits(self._mark)

    def wait(self) -> None:
        """Have the gradients in place, after ``land``."""
        while self._gathers:
            self._gathers.pop().wait()

    def abandon(self) -> None:
        """End without a result; the exchange still ends before its buffers are used again."""
        compute_waits(self._mark)
        with contextlib.suppress(CommError):
            if self._handle is not None:
                self._handle.wait()
            self.wait()

    def _start(self, stage: int) -> None:
        if stage < len(self._route.stages):
            over, sent, chunks = self._route.stages[stage]
            bytes_in, bytes_out = sent.view(torch.uint8), chunks.view(-1).view(torch.uint8)
            dtype = self._flat.dtypes.reduce
            self._handle = self._comm.exchange(bytes_out, bytes_in, dtype, self._tag, over)

    def _finish(self) -> None:
        stages = self._route.stages
        for index, stage in enumerate(stages):
            assert self._handle is not None
            self._handle.wait()
            if index + 1 < len(stages):
                ops.reduce_(stages[index + 1].sent, stage.chunks)
                self._start(index + 1)
        grads, replicas = self._flat.grads, self._comm.replicas
        accumulate = grads.prepare_sum()
        shard = grads.shard()
        piece = self._flat.layout.piece(replicas.rank).of(shard)
        ops.reduce_(piece, self._route.last, self._scale, accumulate, self._stats)
        self._mark = self._comm.reduce_lane.mark()
        if shard.numel() == 0:
            return
        if replicas.size > 1:
            self._gather(shard, piece, replicas)
        if self._flat.strategy.replicated and self._comm.size > 1:
            self.wait()
            self._gather(grads.owned(), shard, self._comm.shards)

    def _gather(self, whole: torch.Tensor, part: torch.Tensor, over: Ranks) -> None:
        full, own = whole.view(torch.uint8), part.view(torch.uint8)
        lane = self._comm.reduce_lane
        handle = self._comm.all_gather(full, own, self._tag, over=over, lane=lane)
        self._gathers.append(handle)
