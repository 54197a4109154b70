"""The one seam of a model's collectives: counted, labelled, and able to fail by name."""

from __future__ import annotations

import textwrap
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .awaited import Awaited
from .errors import Error
from .streams import Lane
from .tag import Tag
from .tracing.recorder import Recorder
from .tracing.records import Transfer
from .training_state import require_untransformed
from .transports.counters import CommStats
from .transports.groups import Ranks
from .transports.handle import Handle
from .transports.mesh import groups_of
from .transports.messages import Work, works_of
from .transports.named_errors import NamedErrors
from .transports.refusal import Refusal
from .transports.simulated import ranks_of
from .transports.transport import (
    Offer,
    Transport,
    agree_on_transport,
    asked_for,
    neighbours_of,
    over_memory,
    share_memory,
)

_NOTHING = nullcontext()


class Comm:
    """The collectives of one wrapped model, on contiguous tensors. One rank communicates nothing.

    Args:
        mesh: see ``groups_of``.
        device: where the buffers live.
        transport: of the sharding group; see ``wrap``.
        failure: what this rank has found wrong before it came here.

    Raises:
        Error: on every rank, if one has found anything wrong, or cannot be reached as is asked for.
    """

    def __init__(
        self,
        mesh: dist.ProcessGroup | DeviceMesh | None,
        device: torch.device,
        transport: Transport,
        failure: Exception | None = None,
    ) -> None:
        replicas, shards, global_ranks = groups_of(mesh)
        self.shards = ranks_of(shards, device)  # the sharding group
        self.replicas = ranks_of(replicas, device)  # the ranks that hold the same shard (HSDP)
        # torch.distributed's numbers of all ranks, by `world_rank`; errors name ranks by them.
        self.global_ranks = global_ranks
        # The mesh as text, without axes of one rank: models that have it in common meet each other.
        sizes = [each.size for each in self.axes[::-1]]
        self.mesh = str(torch.tensor(global_ranks, device="cpu").view(sizes).tolist())
        world = dist.group.WORLD  # the default group; None without one
        self._world = None if world is None else weakref.ref(world)
        self.broken = False  # a collective has failed; those to come cannot be expected to work
        self.stats = CommStats()
        self.interpose: Callable[[str, Tag], None] | None = None  # tests delay or fail ops here
        self.recorder: Recorder | None = None  # is told what goes through, while that is traced
        # gather: all-gathers run ahead of the unit that computes, so they need their own order.
        self.gather_lane = Lane(device)
        # reduce: a unit's reduction runs while the next unit's backward computes.
        self.reduce_lane = Lane(device)
        asked, failure = asked_for(transport, failure)
        shards_there, replicas_there = neighbours_of(self.shards), neighbours_of(self.replicas)
        mine = Offer(
            asked,
            Refusal.of(failure),
            shards_there.token if shards_there else "",
            replicas_there.token if replicas_there else "",
            (self.replicas.size, self.size),
        )
        told = self.all_gather_object(mine, Tag(None, "wrap", about="arguments"))
        offers = cast("list[Offer]", told)
        agree_on_transport(offers, global_ranks, failure)
        first = self.replicas.rank * self.size  # of this replica's
        if share_memory(offer.shards_token for offer in offers[first : first + self.size]):
            self.shards.neighbours = shards_there
        if share_memory(offer.replicas_token for offer in offers[self.rank :: self.size]):
            self.replicas.neighbours = replicas_there
        self.may_fall_back = asked == "auto"  # where there is too little memory to share
        self._in_group = self.shards
        with self.named_errors("all_gather_object", Tag(None, "wrap", about="hosts")):
            for over in self.axes:
                over.find_hosts()
            self.shards = over_memory(asked, self.shards, self.replicas)

    @property
    def is_over(self) -> bool:
        """Whether the default group that was there as it was made has been destroyed."""
        return self._world is not None and self._world() is not dist.group.WORLD

    @property
    def size(self) -> int:
        """N, the number of shards."""
        return self.shards.size

    @property
    def rank(self) -> int:
        """The shard that this rank holds."""
        return self.shards.rank

    @property
    def world_size(self) -> int:
        """All ranks that train the model: shards times replicas."""
        return self.shards.size * self.replicas.size

    @property
    def world_rank(self) -> int:
        """This rank's place among all of them, replica by replica."""
        return self.replicas.rank * self.shards.size + self.shards.rank

    @property
    def me(self) -> str:
        """What errors call this rank."""
        place, number = self.world_rank, self.global_ranks[self.world_rank]
        among = f"{place} of {self.world_size}"
        return f"rank {among}" if number == place else f"rank {number} ({among} in the mesh)"

    @property
    def mesh_name(self) -> str:
        """What errors call the mesh; every rank says it, so that of hundreds it is cut short."""
        ranks = textwrap.shorten(self.mesh, 80, placeholder=" ...")
        sizes = f" ({self.replicas.size} x {self.size})" if ranks != self.mesh else ""
        return f"ranks {ranks}{sizes}"

    def name(self, place: int) -> str:
        """What errors call the rank whose ``world_rank`` is ``place``."""
        return f"rank {self.global_ranks[place]}"

    def names(self, places: Iterable[int]) -> str:
        """What errors call several ranks."""
        return f"ranks {[self.global_ranks[place] for place in places]}"

    def empty(self, numel: int, dtype: torch.dtype, *, whole: bool = False) -> torch.Tensor:
        """(numel,): memory for what the shards' collectives take from this rank.

        Ranks that share memory make it together. ``whole``: see ``Ranks.empty``.
        """
        with self.named_errors("all_gather_object", Tag(None, "wrap", about="memory")):
            return self.shards.empty(numel, dtype, whole=whole)

    def give_back(self, lent: torch.Tensor) -> None:
        """Need ``lent``, which ``empty`` made, no longer."""
        self.shards.give_back(lent)

    def leave_memory(self) -> None:
        """Go on through the process group, and hold no memory of other ranks any more."""
        self.shards.leave()
        self.shards = self._in_group

    def named_errors(self, op: str, tag: Tag) -> NamedErrors:
        """A context in which a backend's error becomes a CommError naming ``op`` and ``tag``."""
        return NamedErrors(self, op, tag)

    def all_gather(
        self,
        full: torch.Tensor | None,
        shard: torch.Tensor,
        tag: Tag,
        *,
        over: Ranks | None = None,
        lane: Lane | None = None,
        lasting: bool = False,
    ) -> Handle:
        """Start gathering every rank's ``shard`` (S,) into ``full`` (N * S,), both uint8.

        S is a multiple of 64: some transports copy words. ``shard`` may be this rank's part of
        ``full``. The backend's threads may outlive the caller's tensors, so these have to be
        long-lived.

        Args:
            full: None where only other ranks need it, which ``Ranks.in_memory`` alone can do.
            over: whose shards; None is the sharding group.
            lane: None is the gather lane.
            lasting: see ``Ranks.start_gather``.
        """
        over, lane = over or self.shards, lane or self.gather_lane
        sent = shard.nbytes * (over.size - 1)
        start = partial(over.start_gather, full, shard, lasting=lasting)
        return self._start("all_gather", sent, tag, lane, over, start)

    def exchange(self, chunks: torch.Tensor, packed: torch.Tensor, tag: Tag, over: Ranks) -> Handle:
        """Start the communication of a reduce-scatter of ``packed`` (N * S,), reduce dtype.

        ``chunks`` (C, S), of that dtype, receives what the caller then sums in rank order, or is
        ``Ranks.rows_for_me``. Runs on the reduce lane; both have to be long-lived.
        """
        sent = packed.nbytes // over.size * (over.size - 1)
        start = partial(over.start_exchange, chunks, packed)
        return self._start("reduce_scatter", sent, tag, self.reduce_lane, over, start)

    def all_reduce(
        self, value: torch.Tensor, tag: Tag, over: Ranks, *, maximum: bool = False
    ) -> Handle:
        """Start summing ``value`` (or taking its maximum), in place; a host's goes to hosts."""
        sent = 2 * value.nbytes * (over.size - 1) // over.size
        start = partial(over.start_all_reduce, value, maximum=maximum)
        return self._start("all_reduce", sent, tag, self.reduce_lane, over, start)

    def reclaim(self, lent: torch.Tensor, tag: Tag) -> None:
        """Wait until ``lent``, which the shards' collectives took, may be written again."""
        if self.shards.in_memory and not self.broken:
            start = time.perf_counter()
            with self.named_errors("reclaim", tag):
                self.shards.note("reclaim", tag)
                self.shards.reclaim(lent)
            if self.shards.read_by_waiter:  # else it is the compute stream that waits
                self._waited("reclaim", tag, None, start)

    def _start(
        self,
        op: str,
        sent: int,
        tag: Tag,
        lane: Lane,
        over: Ranks,
        start: Callable[[], Work | None],
    ) -> Handle:
        """Start a collective by ``start``; the backend sends ``sent`` bytes."""
        transfer = None
        if self.recorder is not None:
            name = "gather" if lane is self.gather_lane else "reduce"
            transfer = self.recorder.issue(op, tag, sent, name)
        with lane.after_compute(), self.named_errors(op, tag):
            self._count(op, sent, tag, over)
            if transfer is not None and lane.stream is not None:
                transfer.begins_here()
            began = time.perf_counter()
            with over.attending():  # until somebody can wait for it
                work = start()
                if work is None and over.read_by_waiter:  # it was waited for here
                    self._waited(op, tag, transfer, began)
                if transfer is not None:
                    transfer.started(works_of(work), by_waiter=over.read_by_waiter)
                handle = Handle(self, work, lane.mark(), over, op, tag, transfer)
        if transfer is not None and not self.on_lane:
            transfer.returns()
        return handle

    def _waited(self, op: str, tag: Tag, transfer: Transfer | None, since: float) -> None:
        """Note that the host was held up ``since`` then."""
        self.stats.exposed_seconds += time.perf_counter() - since
        if (recorder := self.recorder) is not None:
            recorder.end_stall(recorder.begin_stall(op, tag, transfer, since))

    def broadcast(self, value: torch.Tensor, tag: Tag) -> None:
        """Replace ``value`` by that of the first of all ranks, in place."""
        for over in self.axes:
            sent = value.nbytes if over.rank == 0 else 0
            with self._at_once("broadcast", sent, tag, over, on_host=value.is_cpu):
                over.broadcast(value)

    def all_gather_words(self, words: Sequence[int], tag: Tag) -> list[list[int]]:
        """Every rank's ``words`` (equally many), in the order of ``world_rank``; the host waits."""
        if self.world_size == 1:
            return [list(words)]
        require_untransformed()
        mine = torch.tensor(words, dtype=torch.int64, device="cpu")
        for over in self.axes:
            sent = mine.nbytes * (over.size - 1)
            with self._at_once("agree", sent, tag, over):
                mine = over.all_gather_words(mine)
        return mine.view(-1, len(words)).tolist()

    def all_gather_object(self, value: object, tag: Tag) -> list[object]:
        """Every rank's ``value``, in the order of ``world_rank``. For set-up, not for steps."""
        everyone = [value]
        for over in self.axes:
            with self._at_once("all_gather_object", 0, tag, over):
                parts = over.all_gather_object(everyone)
            everyone = [item for part in parts for item in cast("list[object]", part)]
        return everyone

    @property
    def axes(self) -> list[Ranks]:
        """Along which a collective over all ranks goes, one after the other."""
        return [over for over in (self.shards, self.replicas) if over.size > 1]

    @property
    def on_lane(self) -> bool:
        """Whether the reduce lane is the current stream; what waits there holds up no compute."""
        return self.reduce_lane.is_current

    def summing(self, tag: Tag) -> AbstractContextManager[None]:
        """A context for the local sum that follows an exchange."""
        if self.recorder is None:
            return _NOTHING
        stream = "reduce" if self.on_lane else "compute"
        return self.recorder.span("sum", tag.subject, stream)

    @contextmanager
    def _at_once(
        self, op: str, sent: int, tag: Tag, over: Ranks, *, on_host: bool = True
    ) -> Iterator[None]:
        """A context for a collective that nobody can wait for again, should it be left."""
        with self.awaited(tag.doing(op) + tag.when), self.named_errors(op, tag):
            self._count(op, sent, tag, over)
            recorder = self.recorder
            with recorder.meet(op, tag, sent, on_host=on_host) if recorder else _NOTHING:
                yield

    def awaited(
        self, what: str, unit: str = "", *, but: tuple[type[Exception], ...] = (Error,)
    ) -> Awaited:
        """A context for what the other ranks wait for: an exception in it is to give up.

        Args:
            but: exceptions that all ranks have, or that the others are told of.
        """
        return Awaited(self, what, unit, but)

    def give_up(self, kind: type[BaseException], where: str) -> None:
        """Take part in no collective any more: see [Note: half done]."""
        for over in self.axes:
            for standing in over.standings:
                standing.leave(kind, where)
                self.broken = True

    def _count(self, op: str, sent: int, tag: Tag, over: Ranks) -> None:
        if (standing := over.standing) is not None:
            standing.require()
        self.stats.calls[op] += 1
        self.stats.sent_bytes[op] += sent
        if over.sends(op):
            self.stats.wire_bytes[op] += sent
        over.note(op, tag)
        if self.interpose is not None:
            self.interpose(op, tag)
