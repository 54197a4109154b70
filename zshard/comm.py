"""The one seam through which every collective goes: counted, labelled, and able to fail by name."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .errors import CommError
from .groups import Ranks, groups_of
from .messages import Work
from .streams import Lane, Mark, compute_waits


class Tag(NamedTuple):
    """The fingerprint of a collective: when in training, in which phase, for which unit."""

    step: int
    phase: str
    unit: str

    def __str__(self) -> str:
        return f"{self.phase} of unit {self.unit!r} in step {self.step}"


@dataclass
class CommStats:
    """What went through the seam since the last ``reset``.

    Attributes:
        calls: collectives issued, by operation.
        sent_bytes: bytes this rank had to send, by operation: the textbook volume.
        exposed_seconds: time the host spent waiting for a collective; with NCCL, where the compute
            stream waits instead, for other hosts alone.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    exposed_seconds: float = 0.0

    def reset(self) -> None:
        """Start counting anew."""
        self.calls.clear()
        self.sent_bytes.clear()
        self.exposed_seconds = 0.0


class Handle:
    """A collective under way; after ``wait`` the compute stream may use its result."""

    def __init__(self, comm: Comm, work: Work | None, mark: Mark, op: str, tag: Tag) -> None:
        self._comm, self._work, self._mark, self._op, self._tag = comm, work, mark, op, tag

    def wait(self) -> None:
        """Wait for the result: the compute stream on CUDA, the host on CPU."""
        if self._work is not None:
            start = time.perf_counter()
            with self._comm.named_errors(self._op, self._tag):
                self._work.wait()
            self._comm.stats.exposed_seconds += time.perf_counter() - start
            self._work = None
        compute_waits(self._mark)


class _NamedErrors(NamedTuple):
    """Turns the backend's error into one that names the collective and the rank that saw it."""

    comm: Comm
    op: str
    tag: Tag

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CommError):
            self.comm.broken = True
            raise CommError(
                f"rank {self.comm.place} of {self.comm.world}: {self.op} in {self.tag} failed: "
                f"{error}. Another rank has stopped, or runs a different model or order of units; "
                "look at the first error among the ranks' logs."
            ) from error


class Comm:
    """The collectives of one wrapped model. With one rank it is never called.

    Args:
        mesh: see ``groups_of``.
        device: where the buffers live.
    """

    def __init__(self, mesh: dist.ProcessGroup | DeviceMesh | None, device: torch.device) -> None:
        replicas, shards = groups_of(mesh)
        self.shards = Ranks(shards, device)  # the sharding group
        self.replicas = Ranks(replicas, device)  # the ranks that hold the same shard (HSDP)
        # The global ranks along both axes: models that have these in common meet each other.
        self.ranks = self.shards.members, self.replicas.members
        self.broken = False  # a collective has failed; those to come cannot be expected to work
        self.stats = CommStats()
        self.interpose: Callable[[str, Tag], None] | None = None  # tests delay or fail ops here
        # gather: all-gathers run ahead of the unit that computes, so they need their own order.
        self.gather_lane = Lane(device)
        # reduce: a unit's reduction runs while the next unit's backward computes.
        self.reduce_lane = Lane(device)
        for over in self.axes:
            with self.named_errors("all_gather_object", Tag(0, "wrap", "hosts")):
                over.find_hosts()

    @property
    def size(self) -> int:
        """N, the number of shards."""
        return self.shards.size

    @property
    def rank(self) -> int:
        """The shard that this rank holds."""
        return self.shards.rank

    @property
    def world(self) -> int:
        """All ranks that train the model: shards times replicas."""
        return self.shards.size * self.replicas.size

    @property
    def place(self) -> int:
        """This rank's place among all of them, replica by replica."""
        return self.replicas.rank * self.shards.size + self.shards.rank

    def named_errors(self, op: str, tag: Tag) -> _NamedErrors:
        """A context in which a backend's error becomes a CommError naming ``op`` and ``tag``."""
        return _NamedErrors(self, op, tag)

    def all_gather(
        self,
        full: torch.Tensor,
        shard: torch.Tensor,
        tag: Tag,
        *,
        over: Ranks | None = None,
        lane: Lane | None = None,
        lasting: bool = False,
    ) -> Handle:
        """Start gathering every rank's ``shard`` (S,) into ``full`` (N * S,), both uint8.

        ``shard`` may be this rank's part of ``full``. The backend's threads may outlive the
        caller's tensors, so these have to be long-lived.

        Args:
            over: whose shards; None is the sharding group.
            lane: None is the gather lane.
            lasting: see ``Ranks.start_gather``.
        """
        over, lane = over or self.shards, lane or self.gather_lane
        with lane.after_compute(), self.named_errors("all_gather", tag):
            self._count("all_gather", shard.nbytes * (over.size - 1), tag)
            work = over.start_gather(full, shard, lasting=lasting)
            return Handle(self, work, lane.mark(), "all_gather", tag)

    def exchange(
        self,
        chunks: torch.Tensor,
        packed: torch.Tensor,
        dtype: torch.dtype,
        tag: Tag,
        over: Ranks,
    ) -> Handle:
        """Start the communication of a reduce-scatter of ``packed`` (N * S,), uint8 of ``dtype``.

        ``chunks`` (C * S,), likewise, receives what the caller then sums in rank order; see
        ``Ranks.chunks``. Runs on the reduce lane; both have to be long-lived.
        """
        with self.reduce_lane.after_compute(), self.named_errors("reduce_scatter", tag):
            self._count("reduce_scatter", packed.nbytes // over.size * (over.size - 1), tag)
            work = over.start_exchange(chunks, packed, dtype)
            return Handle(self, work, self.reduce_lane.mark(), "reduce_scatter", tag)

    def all_reduce(
        self, value: torch.Tensor, tag: Tag, over: Ranks, *, maximum: bool = False
    ) -> Handle:
        """Start summing ``value`` (or taking its maximum), in place; a host's goes to hosts."""
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        volume = 2 * value.nbytes * (over.size - 1) // over.size
        with self.reduce_lane.after_compute(), self.named_errors("all_reduce", tag):
            self._count("all_reduce", volume, tag)
            nccl = over.nccl and not value.is_cpu
            group = over.group if nccl else over.control
            work = dist.all_reduce(value, op, group, async_op=not nccl)
            return Handle(self, work, self.reduce_lane.mark(), "all_reduce", tag)

    def broadcast(self, value: torch.Tensor, tag: Tag) -> None:
        """Replace ``value`` by that of the first of all ranks, in place."""
        for over in self.axes:
            with self.named_errors("broadcast", tag):
                self._count("broadcast", value.nbytes if over.rank == 0 else 0, tag)
                dist.broadcast(value, group=over.group, group_src=0)

    def all_gather_words(self, words: Sequence[int], tag: Tag) -> list[list[int]]:
        """Every rank's ``words`` (equally many), in the order of ``place``; the host waits."""
        if self.world == 1:
            return [list(words)]
        mine = torch.tensor(words, dtype=torch.int64, device="cpu")
        for over in self.axes:
            with self.named_errors("agree", tag):
                self._count("agree", mine.nbytes * (over.size - 1), tag)
                mine = over.all_gather_words(mine)
        return mine.view(-1, len(words)).tolist()

    def all_gather_object(self, value: object, tag: Tag) -> list[object]:
        """Every rank's ``value``, in the order of ``place``. For set-up, not for steps."""
        everyone = [value]
        for over in self.axes:
            out: list[list[object]] = [[] for _ in range(over.size)]
            with self.named_errors("all_gather_object", tag):
                self._count("all_gather_object", 0, tag)
                dist.all_gather_object(out, everyone, over.control)
            everyone = [item for part in out for item in part]
        return everyone

    @property
    def axes(self) -> list[Ranks]:
        """Along which a collective over all ranks goes, one after the other."""
        return [over for over in (self.shards, self.replicas) if over.size > 1]

    def _count(self, op: str, sent: int, tag: Tag) -> None:
        self.stats.calls[op] += 1
        self.stats.sent_bytes[op] += sent
        if self.interpose is not None:
            self.interpose(op, tag)
