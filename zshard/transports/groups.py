"""The ranks that a collective runs over, and how their backend is best asked to move bytes."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..errors import WrapError
from .control import control_group
from .discovery import find_each_other
from .mesh import groups_of
from .messages import Messenger, Together, Work
from .per_group import per_group
from .standing import Standing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..tag import Tag
    from .neighbours import Neighbours
    from .processes import Processes

# torch 2.13 renamed these, and warns at every call by the old name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_NOTHING = nullcontext()

# From this size of a row on, the moving of the bytes takes longer than saying so.
_LARGE_BYTES = 1 << 18

# [Note: the ways of gloo] As measured beside computing ranks. Small rows: the all-to-all, which
# sends them straight to their ranks, where the all-gather passes them around a ring. Large rows on
# one host: a broadcast from each rank, four times as fast as the all-gather, and the all-to-all;
# gloo's pool of threads gets more of the processors for them than messages do. Large rows between
# hosts: messages, which keep both directions of a wire busy; the all-to-all moved half as much.


Rows = torch.Tensor | list[torch.Tensor]  # (N, S), or N x (S,) where they lie apart


def chunk_rows(size: int, dtype: torch.dtype, *, nccl: bool) -> int:
    """Rows of a reduction that arrive at each of ``size`` ranks: one of sums, or every rank's.

    NCCL sums fp32 and fp64 itself. Its 16-bit sums would round at every hop, and gloo's
    reduce_scatter is a whole all-reduce: there every rank's row arrives, for us to sum in fp32.
    """
    return 1 if nccl and dtype.itemsize >= 4 else size


class Ranks:
    """The ranks that a collective runs over: the sharding group, or the replicas of one shard.

    Attributes:
        group: the process group; None for a single rank.
        size: number of ranks; global_ranks: torch.distributed's numbers of them.
        rank: this rank's place among them.
        backend: its name, for ``device``.
        nccl: whether NCCL carries the collectives of ``device``, or would, if they are simulated.
        control: a group whose collectives run on the host.
        in_memory: whether ranks read each other's memory (in_memory.py), and nothing is sent.
        read_by_waiter: whether it is the host that does, when it waits.
        neighbours: where the ranks meet that also wrap models over shared memory; else None.
        found: see ``find_each_other``; None where nobody has looked.
    """

    in_memory = read_by_waiter = False
    neighbours: Neighbours | None = None
    found: Processes | str | None = None

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size = dist.get_world_size(group) if group is not None else 1
        self.global_ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank(group) if group is not None else 0
        self.backend = "" if group is None else _backend_name(group, device)
        self.nccl = self.backend == "nccl"
        self._gloo = self.backend == "gloo" and device.type == "cpu"
        self._messenger: Messenger | None = None  # for large rows between hosts
        # What ranks tell each other is for the host, which must not wait for the device.
        self.control = group
        if group is not None and self.nccl and self.size > 1:
            self.control = control_group(group, device)
        self._standing: Standing | None = None
        if group is not None and self.size > 1 and self.backend != "fake":
            self._standing = per_group(group).standing

    def name(self, rank: int) -> str:
        """What errors call ``rank`` of these."""
        return f"rank {self.global_ranks[rank]}"

    @property
    def standing(self) -> Standing | None:
        """Whether this rank takes part still; None where there is nobody else."""
        return self.neighbours or self._standing

    @property
    def standings(self) -> list[Standing]:
        """Where this rank says that it has given up: in memory, in the group, or in both.

        Ranks that only meet in memory may have left half done what goes through the group.
        """
        both = (self.neighbours, None if self.in_memory and self.neighbours else self._standing)
        return [each for each in both if each is not None]

    def find_hosts(self) -> None:
        """Learn from every rank whether all are on one host; see [Note: the ways of gloo].

        There they see each other's processes; see [Note: a send that gloo forgets], which is true
        of what the hosts of GPUs tell each other, too.
        """
        if self.group is None or self.size == 1 or not (self._gloo or self.nccl):
            return
        if len(set(self.all_gather_object(_host()))) == 1:
            self.found = find_each_other(self)
        elif self._gloo:
            self._messenger = Messenger(self.group, self.rank, self.size)

    @property
    def _processes(self) -> Processes | None:
        return None if isinstance(self.found, str) else self.found

    def ended(self) -> str:
        """Which ranks have ended, for an error that names none; or ""."""
        if self.neighbours is not None:
            return self.neighbours.ended()
        if self._processes is None:
            return ""
        gone = self._processes.ended(after_error=True)
        return "".join(f" {self._processes.name(rank)} has ended." for rank in gone)

    def wait(self, work: Work) -> None:
        """Wait for what one of these collectives has started."""
        if self._processes is not None:
            self._processes.wait(work)
        else:
            work.wait()

    def row_count(self, dtype: torch.dtype) -> int:
        """Rows that ``Comm.exchange`` delivers; see ``chunk_rows``."""
        return chunk_rows(self.size, dtype, nccl=self.nccl and not self.in_memory)

    def empty(self, numel: int, dtype: torch.dtype, *, whole: bool = False) -> torch.Tensor:
        """(numel,): memory for what collectives take from this rank.

        Args:
            whole: it is a full buffer, of which every rank gives its own shard.
        """
        return torch.empty(numel, dtype=dtype, device=self.device)

    def sends(self, op: str) -> bool:
        """Whether the process group carries ``op``, as ``CommStats`` names it."""
        return True

    def attending(self) -> AbstractContextManager[None]:
        """A context in which an exception would leave other ranks waiting: they are told."""
        return _NOTHING

    def note(self, op: str, tag: Tag) -> None:
        """Publish what this rank is at, for the others' errors."""
        if self.neighbours is not None:
            self.neighbours.note(op, tag)

    def reclaim(self, lent: torch.Tensor) -> None:
        """Wait until ``lent``, which a collective took from this rank, may be written again."""

    def release(self, lent: torch.Tensor) -> None:
        """Say that this rank has read what the others gave where it gave ``lent``."""

    def give_back(self, lent: torch.Tensor) -> None:
        """Need ``lent``, which ``empty`` made, no longer."""

    def settle(self) -> None:
        """Have a reset keep what ``empty`` has made by now; what comes later is made anew."""

    def leave(self) -> None:
        """Free all memory that ``empty`` made."""

    def rows_for_me(self, packed: torch.Tensor) -> Rows | None:
        """The rows of ``packed`` (N * S,) that an exchange leaves where they lie, N x (S,).

        None where it delivers them, into memory that the caller gives.
        """
        return None

    def start_gather(
        self, full: torch.Tensor | None, shard: torch.Tensor, *, lasting: bool
    ) -> Work | None:
        """Start an all-gather of ``shard`` (S,) into ``full`` (N * S,).

        Args:
            full: None where only other ranks need it, and ranks read each other's memory.
            lasting: it may be under way when the process ends. gloo completes its collectives
                before a group goes, but not messages.
        """
        assert full is not None  # what is sent has to go somewhere
        work: Work | None
        if not self._gloo:
            work = _all_gather(full, shard, self.group, async_op=not self.nccl)
        elif shard.nbytes < _LARGE_BYTES:
            # Tensor.repeat takes five times as long.
            work = self._start_all_to_all(full, torch.cat([shard] * self.size))
        elif self._messenger is None or lasting:
            work = self._start_broadcasts(full, shard)
        else:
            work = self._messenger.all_gather(full, shard)
        return work

    def _start_broadcasts(self, full: torch.Tensor, shard: torch.Tensor) -> Together:
        parts = full.view(self.size, -1)
        if parts[self.rank].data_ptr() != shard.data_ptr():
            parts[self.rank].copy_(shard)
        return Together(
            [
                dist.broadcast(part, group=self.group, group_src=rank, async_op=True)
                for rank, part in enumerate(parts)
            ]
        )

    def start_exchange(self, chunks: torch.Tensor, packed: torch.Tensor) -> Work | None:
        """Start the communication of a reduce-scatter; see ``Comm.exchange``."""
        work: Work | None
        if self.row_count(packed.dtype) == 1:
            work = _reduce_scatter(chunks.view(-1), packed, group=self.group)
        else:
            work = self._start_all_to_all(chunks, packed)
        return work

    def _start_all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Work | None:
        if self._messenger is not None and sent.nbytes >= _LARGE_BYTES * self.size:
            return self._messenger.all_to_all(received, sent)
        work: Work | None = dist.all_to_all_single(
            received, sent, group=self.group, async_op=not self.nccl
        )
        return work

    def start_all_reduce(self, value: torch.Tensor, *, maximum: bool) -> Work | None:
        """Start summing ``value`` (or taking its maximum), in place; a host's goes to hosts."""
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        nccl = self.nccl and not value.is_cpu
        group = self.group if nccl else self.control
        work: Work | None = dist.all_reduce(value, op, group, async_op=not nccl)
        return work

    def broadcast(self, value: torch.Tensor) -> None:
        """Replace ``value`` by the first rank's, in place; a host's goes to hosts."""
        nccl = self.nccl and not value.is_cpu
        group = self.group if nccl else self.control
        work = dist.broadcast(value, group=group, group_src=0, async_op=not nccl)
        if work is not None:
            self.wait(work)

    def all_gather_words(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's ``mine`` (n,), one behind the other; the host waits.

        In one place for all models over the group: see ``transport.meet_in_one_place``.
        """
        if self.neighbours is not None:
            return self.neighbours.words(mine)
        everyone = mine.new_empty(self.size * mine.numel())
        sent = torch.cat([mine] * self.size)
        self.wait(dist.all_to_all_single(everyone, sent, group=self.control, async_op=True))
        return everyone

    def all_gather_object(self, value: object) -> list[object]:
        """Every rank's ``value``, pickled on the way; the host waits. In one place, likewise."""
        if self.neighbours is not None:
            return self.neighbours.objects(value)
        return gather_objects(value, self.size, self._all_gather)

    def first_problem(self, problem: str) -> tuple[str, str] | None:
        """Who is the first rank that has one, and what it is; None if none has. For all to call.

        Args:
            problem: this rank's, or "".
        """
        told = self.all_gather_object(problem)
        return next(((self.name(r), str(each)) for r, each in enumerate(told) if each), None)

    def _all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        # Not the collective that `all_gather_words` uses: a rank that sends words to one that sends
        # objects then waits for its timeout. In one collective of two sizes gloo would abort the
        # process that gets more bytes than it expects.
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self.wait(dist.all_gather(everyone, mine, group=self.control, async_op=True))
        return torch.cat(everyone)


def gather_objects(
    value: object, size: int, all_gather: Callable[[torch.Tensor], torch.Tensor]
) -> list[object]:
    """Every rank's ``value``, pickled on the way.

    Args:
        all_gather: makes (size * n,) of every rank's (n,).
    """
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = all_gather(torch.tensor([mine.numel()], device="cpu")).tolist()
    padded = mine.new_zeros(max(sizes))
    padded[: mine.numel()] = mine
    rows = all_gather(padded).view(size, -1).numpy()
    return [pickle.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]


def _host() -> str:
    """The same text on all ranks that reach each other without a wire, and only there."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def require_backends(mesh: dist.ProcessGroup | DeviceMesh | None, device: torch.device) -> None:
    """Make sure that the groups of ``mesh`` reach other ranks' memory on devices like ``device``.

    Raises:
        InputError: as ``groups_of``.
        WrapError: if a group has no backend for it.
    """
    groups = groups_of(mesh)
    for group in (groups.replicas, groups.shards):
        if group is not None:
            _backend_name(group, device)


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Of the group's backends, the one that handles ``device``."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError as error:
        raise WrapError(
            f"the process group (backend {dist.get_backend(group)!r}) has no backend for {device}, "
            "where the parameters are: pass device=..., or give init_process_group a backend for it"
        ) from error
