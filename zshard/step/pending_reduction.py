"""The reduction of one flat buffer: exchange, sum in rank order, and what follows the sum.

Order of events: the packed gradients are exchanged over the shards and summed. With replicas (HSDP)
that sum is cut into pieces, exchanged over the replicas, and summed again. The last sum is the pass
that scales, accumulates, squares and checks. A single row, of one rank or of NCCL's sums, arrives
where the sum stays, and that pass only reads it. Then what is to be known more widely is gathered:
the pieces over the replicas, and with replicated masters (ddp) the shards over the ranks.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from .. import ops
from ..comm import Comm
from ..errors import CommError
from ..streams import Mark, compute_waits
from ..tag import Tag
from ..transports.groups import Ranks, Rows
from ..transports.handle import Handle
from ..units.flat import Flat
from ..units.pool import Pool, Scratch


class Stage(NamedTuple):
    """One exchange, and the sum that follows."""

    over: Ranks
    sent: torch.Tensor  # (size * n,) reduce dtype
    chunks: Rows  # (C, n) reduce dtype


class ReduceBuffers(NamedTuple):
    """The memory of a flat buffer's reduction: views of the pool's reduce buffers.

    Over the process group one of them is packed into, and one receives. Over shared memory the
    others read what was packed where it lies, and the next reduction packs into the second
    meanwhile.
    """

    packed: torch.Tensor  # (N * S,) reduce dtype
    stages: tuple[Stage, ...]  # none where there is a single rank
    last: Rows  # (C, n) reduce dtype: what the last sum reads
    scale_packed: float  # of the gradients as they are packed
    scale_sum: float  # of the last sum
    apart: bool = False  # it takes no reduce buffer, so that it is in no other's way

    @classmethod
    def of(cls, flat: Flat, comm: Comm, pool: Pool, index: int) -> ReduceBuffers:
        """Lay out the reduction of ``flat``, which is the ``index``-th of those to be trained.

        fp32 is divided before the sum, as DDP does, so that N = 2 has DDP's bits; 16-bit gradients
        after it, in fp32, so that the division rounds nothing away.
        """
        dtype, layout = flat.dtypes.reduce, flat.layout
        name: Scratch = "chunks" if comm.shards.in_memory and index % 2 else "packed"
        packed = pool.scratch(name, layout.numel * dtype.itemsize).view(dtype)
        sent, room, stages = packed, packed, []
        received: Scratch = "chunks"
        for over in (comm.shards, comm.replicas):
            if over.size == 1 or layout.numel == 0:
                continue
            rows, n = over.row_count(dtype), sent.numel() // over.size
            chunks = over.rows_for_me(sent)
            if chunks is None:
                chunks = pool.scratch(received, rows * n * dtype.itemsize).view(dtype).view(rows, n)
            elif comm.replicas.size > 1:  # others may read what was packed longer than this rank
                room, received = pool.scratch("sum", n * dtype.itemsize).view(dtype), "pieces"
            stages.append(Stage(over, sent, chunks))
            sent = room[:n]  # the sum goes where nothing is read any more
        last = stages[-1].chunks if stages else packed.view(1, layout.numel)
        mean = 1.0 / comm.world_size
        scales = (mean, 1.0) if dtype in (torch.float32, torch.float64) else (1.0, mean)
        return cls(packed, tuple(stages), last, *scales, apart=layout.numel == 0)

    def landing_in(self, shard: torch.Tensor) -> ReduceBuffers:
        """As this one, but a single row that is the sum already arrives in ``shard`` itself.

        Such a row was packed by a single rank or summed by NCCL; the last pass then reads it, to
        measure it, and writes nothing. ``shard`` (S,), reduce dtype, must hold nothing to be kept.
        """
        if len(self.stages) > 1 or isinstance(self.last, list) or len(self.last) != 1:
            return self
        if self.scale_sum != 1.0 or shard.numel() != self.last.numel():
            return self
        row = shard.view(1, -1)
        if not self.stages:
            return self._replace(packed=shard, last=row, apart=True)
        return self._replace(stages=(self.stages[0]._replace(chunks=row),), last=row)

    @staticmethod
    def bytes_of(flat: Flat, comm: Comm) -> dict[Scratch, int]:
        """Bytes of the reduce buffers that the reduction of ``flat`` takes, by their names."""
        dtype, packed, shard = flat.dtypes.reduce, flat.packed_bytes, flat.rows_bytes(1)
        piece = flat.layout.piece(0).numel * dtype.itemsize
        pieces = comm.replicas.row_count(dtype) * piece if comm.replicas.size > 1 else 0
        if comm.shards.in_memory:
            summed = shard if pieces else 0
            return {"packed": packed, "chunks": packed, "sum": summed, "pieces": pieces}
        chunks = flat.rows_bytes(comm.shards.row_count(dtype)) if comm.size > 1 else 0
        return {"packed": packed, "chunks": max(chunks, pieces)}


class PendingReduction:
    """A reduction under way; the gradients are packed.

    Args:
        stats: (2,) float64, for the sum of squares and the non-finite flag of the last sum.
    """

    def __init__(
        self, flat: Flat, buffers: ReduceBuffers, stats: torch.Tensor, comm: Comm, tag: Tag
    ) -> None:
        self._flat, self._buffers, self._comm, self._tag = flat, buffers, comm, tag
        self._stats = stats
        self._handle: Handle | None = None
        self._unread: Stage | None = None  # what was exchanged and is not summed yet
        self._gathers: list[Handle] = []
        self._summed = False  # the last sum is made, or enqueued (CUDA)
        self._mark: Mark = None  # of that
        flat.grads.shard()  # allocated here, on the compute stream
        self._start(0)
        # Where nothing blocks the host it goes straight on.
        if comm.reduce_lane.stream is not None:
            with comm.reduce_lane.after_compute():
                self._finish()
        elif not buffers.stages:
            self._finish()

    def leaves_free(self, buffers: ReduceBuffers) -> bool:
        """Whether ``buffers`` may be packed into before this lands.

        It may if this has packed into another buffer, and its last sum is made or enqueued. Buffers
        beside the packed ones are used on the reduce lane alone, one reduction after the other.
        """
        apart = self._buffers.packed.data_ptr() != buffers.packed.data_ptr()
        return self._summed and apart

    def land(self) -> None:
        """Finish with the reduce buffers; gathers may still be under way."""
        if not self._summed:
            self._finish()
        elif self._mark is not None:
            self._await_mark()

    def _await_mark(self) -> None:
        recorder = self._comm.recorder
        if recorder is None:
            compute_waits(self._mark)
            return
        transfer = self._handle.transfer if self._handle else None
        stall = recorder.begin_stall("reduce_scatter", self._tag, transfer)
        compute_waits(self._mark)
        recorder.end_stall(stall)

    def wait(self) -> None:
        """Wait for the gradients, after ``land``."""
        while self._gathers:
            self._gathers[-1].wait()
            self._gathers.pop()

    def abandon(self) -> None:
        """End without a result; the exchange still ends before its buffers are used again."""
        compute_waits(self._mark)
        with contextlib.suppress(CommError):
            if self._handle is not None:
                self._handle.wait()
                self._release()
            self.wait()

    def _start(self, stage: int) -> None:
        if stage < len(self._buffers.stages):
            over, sent, chunks = self._buffers.stages[stage]
            # Rows that lie apart are read where they lie, and nothing is delivered.
            received = sent if isinstance(chunks, list) else chunks
            self._handle = self._comm.exchange(received, sent, self._tag, over)
            self._unread = self._buffers.stages[stage]

    def _release(self) -> None:
        """Let the others write again what was summed, or will not be."""
        stage, self._unread = self._unread, None
        if stage is not None:
            stage.over.release(stage.sent)

    def _finish(self) -> None:
        stages = self._buffers.stages
        for index, stage in enumerate(stages):
            assert self._handle is not None
            self._handle.wait()
            if index + 1 < len(stages):
                with self._comm.shards.attending():
                    with self._comm.summing(self._tag):
                        _sum(stages[index + 1].sent, stage.chunks)
                    self._release()
                    self._start(index + 1)
        grads, replicas = self._flat.grads, self._comm.replicas
        accumulate = grads.prepare_sum()
        shard = grads.shard()
        piece = shard
        if replicas.size > 1:
            piece = self._flat.layout.piece(replicas.rank).of(shard)
        with self._comm.shards.attending():
            with self._comm.summing(self._tag):
                _sum(piece, self._buffers.last, self._buffers.scale_sum, accumulate, self._stats)
            self._release()
        self._summed, self._mark = True, self._comm.reduce_lane.mark()
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


def _sum(
    acc: torch.Tensor,
    rows: Rows,
    scale: float = 1.0,
    accumulate: bool = False,
    stats: torch.Tensor | None = None,
) -> None:
    if isinstance(rows, list):
        ops.reduce_peers_(acc, rows, scale, accumulate, stats)
    else:
        ops.reduce_(acc, rows, scale, accumulate, stats)
