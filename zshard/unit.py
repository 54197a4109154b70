"""A unit: the parameters gathered and freed together, and its states.

[Note: the states of a unit]
A state says what is in memory. SHARDED: this rank's shard of master, optimizer states and send
buffer, and nothing else. GATHERING: also a slot, which an all-gather is writing. GATHERED: also
the whole parameters in the slot; while the unit computes, its modules hold views of them.
Where the strategy keeps whole parameters, they take no slot: SHARDED then says that they are out
of date but for this rank's shard, and ``Schedule.renew`` is what leads there, after an update; or
``Schedule.reset``, on ranks that have written to them.
``Unit._enter`` is the only function that changes a state, and refuses what the table does not list.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

import torch

from .comm import Comm
from .containers import map_tensors, tensors_in
from .errors import ShardedAccessError, StateError
from .layout import aligned
from .strategy import Strategy
from .tag import Tag
from .transports.handle import Handle
from .unitmap import UnitSpec
from .units.flat import Flat
from .units.forward_io import ForwardIO, lying_in
from .units.full_buffer import refuse_written
from .units.param_site import ParamSite
from .units.pool import Pool, Slot


class State(enum.Enum):
    """What a unit has in memory; see [Note: the states of a unit]."""

    SHARDED = "the shard alone"
    GATHERING = "the shard, and a full buffer that an all-gather is writing"
    GATHERED = "the shard, and the whole parameters"


_LEGAL = {
    State.SHARDED: (State.GATHERING,),
    State.GATHERING: (State.GATHERED, State.SHARDED),
    State.GATHERED: (State.SHARDED,),
}


class Unit:
    """The parameters of ``module`` that no inner unit has.

    Args:
        spec: the unit's place in the unit map.
        index: position in the order of the unit map, the same on every rank.
        parent: the closest unit whose module contains this one's, None for the root.
        strategy: what of the unit stays whole.

    Attributes:
        full_bytes: of the full buffer, all flats together.
        slot_bytes: what the unit takes of a slot while it is gathered; 0 where it needs none.
        attached: the slot that the leaves are views of.
        installed: whether the modules hold the whole parameters.
    """

    def __init__(
        self,
        spec: UnitSpec,
        index: int,
        parent: Unit | None,
        strategy: Strategy,
        flats: Sequence[Flat],
        sites: Sequence[ParamSite],
        comm: Comm,
        pool: Pool,
    ) -> None:
        self.name, self.label, self.module = spec.name, spec.label, spec.module
        self.index, self.parent, self.strategy = index, parent, strategy
        self.flats, self.sites = tuple(flats), tuple(sites)
        self.state = State.SHARDED
        self.in_use = False  # between the start and the end of a forward or backward of the module
        self.forward_io = ForwardIO()  # of the forward under way
        self.fired: set[tuple[Flat, int]] = set()  # leaves with their gradient of this backward
        self._comm, self._pool = comm, pool
        self._home: Slot | None = None
        self.attached: Slot | None = None
        self.installed = False
        self._gathers: list[Handle] = []
        self._last_gather = Tag(0, "gather", self.label)
        self._gathered_versions: list[int] | None = None  # of the flats, as gathered last
        self.full_bytes = sum(aligned(flat.full_bytes) for flat in self.flats)
        # zero3 at N > 1: the full buffer is the pool's, for as long as the unit is gathered.
        self.slot_bytes = self.full_bytes if comm.size > 1 and not strategy.resident else 0
        for flat in self.flats:
            pool.ledger.add("parameters", flat.copy.nbytes)
            pool.ledger.add("master", flat.master.nbytes)
            if flat.resident is not None:
                flat.full.attach(flat.resident)

    def encloses(self, other: Unit) -> bool:
        """Whether ``other``'s module lies inside this unit's."""
        above = other.parent
        return above is not None and (above is self or self.encloses(above))

    # --- gather and reshard ----------------------------------------------------------------------

    def can_prefetch(self) -> bool:
        """Whether a gather now would neither allocate memory nor push another unit out."""
        if self.state is not State.SHARDED:
            return False
        if self.slot_bytes == 0:
            return True
        if self._home is None:
            self._home = self._pool.free_slot()
        return self._home is not None and self._home.owner is None

    @property
    def outdated(self) -> bool:
        """Whether the master has other values than the unit was gathered with last, if it was."""
        return self._gathered_versions != [flat.version for flat in self.flats]

    def forget_gather(self) -> None:
        """Be outdated: other ranks may not know that this one has gathered the unit."""
        self._gathered_versions = None

    def gather(self, tag: Tag, *, move: bool, evict: Callable[[Unit], None]) -> None:
        """SHARDED -> GATHERING: take a slot and start the all-gathers into it.

        Args:
            move: whether the unit may change its home, which outdates views that a graph holds.
            evict: reshards a unit that gives way.
        """
        self._last_gather = tag
        if self.slot_bytes > 0:
            self._acquire_slot(move=move, evict=evict)
        self.forget_gather()  # an exception may leave some of them unstarted
        self._enter(State.GATHERING)
        for flat in self.flats:
            flat.refresh_send()
            if flat.needs_gather:
                # Units that stay whole are gathered after a step, which may be the last one.
                lasting = self.strategy.resident
                handle = self._comm.all_gather(flat.full.recv, flat.sent, tag, lasting=lasting)
                self._gathers.append(handle)
        self._gathered_versions = [flat.version for flat in self.flats]
        if self.strategy.resident and self._comm.shards.read_by_waiter:
            # It goes on only while this rank waits for it. Left open, a rank that writes its shard
            # waits for this one to read: for ever, if this one is waiting for that rank.
            self._finish_gathers()

    def join(self, tag: Tag, *, evict: Callable[[Unit], bool]) -> None:
        """Take part in a gather that only other ranks need; for ``evict`` see ``Pool.spare``."""
        self._last_gather = tag
        for flat in self.flats:
            flat.refresh_send()
            if flat.needs_gather:
                into = flat.full.recv  # which has the same values, or is marked as having none
                if self._comm.shards.in_memory:
                    into = None  # nothing is sent that has to go somewhere
                elif self.slot_bytes > 0 and self.state is State.SHARDED:
                    into = self._pool.spare(self, evict)[: flat.full_bytes]
                self._comm.all_gather(into, flat.sent, tag).wait()

    def wait(self) -> None:
        """GATHERING -> GATHERED: the whole parameters are there."""
        self._finish_gathers()
        for flat in self.flats:
            flat.full.mark(valid=True)
        self._enter(State.GATHERED)  # last: should an exception come here, all is done again

    def begin_use(self) -> None:
        """A forward or backward of the module begins: put the whole parameters into the modules."""
        self.install()
        self.in_use = True

    def end_use(self) -> None:
        """It has ended: put the sharded parameters back, and let others take the memory."""
        self.uninstall()
        self.in_use = False

    def give_way(self) -> None:
        """Let others take the memory; until one does, what is gathered stays."""
        self.in_use = False

    def install(self) -> None:
        """Put the whole parameters into the modules, for a forward or a recomputation."""
        if not self.installed:
            self.require_parameters()  # before any of the modules is changed
            self.installed = True  # or some of them, should an exception come here
            for site in self.sites:
                site.install(site.flat.full.leaf(site.segment))

    def uninstall(self) -> None:
        """Put the sharded parameters back; between forward and backward, memory may stay."""
        self.forward_io.drop_inputs()
        if self.installed:
            self.put_params({flat: flat.full.given_back() for flat in self.flats})
            self.installed = False

    def put_params(self, params: Mapping[Flat, Sequence[torch.Tensor]]) -> None:
        """Put ``params``, of each flat by segment, into the modules."""
        for site in self.sites:
            site.install(params[site.flat][site.segment])

    def require_parameters(self) -> None:
        """Make sure that the modules hold the sharded parameters.

        Raises:
            StateError: with the first that was replaced.
        """
        for site in self.sites:
            site.require()

    def check_unwritten(self) -> None:
        """Make sure that forward, or backward, has not written to a whole parameter.

        Raises:
            StateError: if it has; the shards do not have the change.
        """
        written = [flat for flat in self.flats if flat.full.note_writes()]
        if written:
            refuse_written(self.label, written[0].names)

    def reshard(self) -> None:
        """GATHERED or GATHERING -> SHARDED: give the slot back."""
        if self._comm.broken and self._comm.shards.in_memory:
            self._gathers.clear()  # which do not go on by themselves
        self._finish_gathers()
        if self.state is State.SHARDED:
            self._enter(State.SHARDED)  # raises
        # Else the state comes last: should an exception come here, all is done again.
        stays = self.slot_bytes == 0 and not self.outdated
        for flat in self.flats:
            flat.full.retire(stays=stays)
        self.end_use()
        self.give_slot_back()
        self._enter(State.SHARDED)

    def give_slot_back(self) -> None:
        """Let others have the slot, if this unit has one."""
        if self._home is not None and self._home.owner is self:
            self._home.owner = None

    def _enter(self, state: State) -> None:
        if state not in _LEGAL[self.state]:
            raise StateError(
                f"unit {self.label!r}: {self.state.name} ({self.state.value}) cannot become "
                f"{state.name} ({state.value}). Call zshard.reset(model) to shard every unit again."
            )
        self.state = state

    def _finish_gathers(self) -> None:
        while self._gathers:
            self._gathers[-1].wait()  # which an exception may leave, to be waited for again
            self._gathers.pop()

    def before_send_written(self, flat: Flat) -> None:
        """Wait until no gather sends what is sent of ``flat``, which is about to be written."""
        self._finish_gathers()
        if flat.needs_gather:
            self._comm.reclaim(flat.sent, Tag(self._last_gather.step, "step", self.label))

    def _acquire_slot(self, *, move: bool, evict: Callable[[Unit], None]) -> None:
        """Own the home slot, or a new home; see [Note: a unit keeps its slot]."""
        owner = self._home.owner if self._home is not None else None
        pinned = self.attached is self._home and not move
        # What was gathered ahead and did not come next gives way. In backward so does a unit whose
        # checkpointed region is being recomputed: its recomputation, or the end of a later one,
        # gathers it again; see `Backward.recomputed`.
        if owner is not None and (not owner.in_use or (pinned and not owner.encloses(self))):
            evict(owner)
            owner = None
        if owner is not None and pinned:
            raise StateError(
                f"unit {self.label!r} is needed in backward while unit {owner.label!r} around it, "
                "whose memory it shares, is computing. Make the two one unit "
                "(zshard.wrap(units=...))."
            )
        if self.parent is None:
            self._home = self._pool.own_slot()
        elif self._home is None or owner is not None:
            self._home = self._pool.free_slot() or self._pool.grow()
        memory = self._home.memory
        self._pool.take(self._home, self)
        if self.attached is not self._home:
            self.attached = None  # until all of it is there
            for flat in self.flats:
                flat.full.mark(valid=False)
                flat.full.attach(memory[: flat.full_bytes].view(flat.dtypes.compute))
                memory = memory[aligned(flat.full_bytes) :]
            self.attached = self._home

    # --- what goes in and out --------------------------------------------------------------------

    def hand_out(self, inputs: object, output: object) -> object:
        """``output`` as the caller may keep it.

        Raises:
            StateError: as ``check_unwritten``.
            ShardedAccessError: if a view of the full buffer, about to be given back, stays in an
                object that ``map_tensors`` does not copy, or in a container among ``inputs``.
        """
        self.check_unwritten()
        output = self.copy_views(output)
        found = (*tensors_in(output), *tensors_in(inputs)) if self.slot_bytes else ()
        if any(map(self._is_view(), found)):
            raise ShardedAccessError(
                f"unit {self.label!r}: forward leaves a view of one of its parameters in an object "
                "that it returns, or in a container that came in; the parameter's memory is about "
                "to hold another unit. Put a copy there (clone)."
            )
        return output

    def copy_views(self, output: object) -> object:
        """``output`` with copies of what lies in the full buffer.

        A module may return (a view of) its own parameter, as learned positions do.
        """
        is_view = self._is_view()
        return map_tensors(lambda tensor: tensor.clone() if is_view(tensor) else tensor, output)

    def _is_view(self) -> Callable[[torch.Tensor], bool]:
        return lying_in([f.full.base for f in self.flats if f.full.base is not None])

    # --- gradients -------------------------------------------------------------------------------

    def leaf_grad_arrived(self, flat: Flat, segment: int) -> None:
        """Note that a leaf has its gradient, for backward to go on."""
        self.fired.add((flat, segment))
        flat.schedule.backward.leaf_grad_arrived(self)

    @property
    def trained_count(self) -> int:
        """Parameters that require a gradient."""
        return sum(flat.trained_count for flat in self.flats)

    @property
    def all_fired(self) -> bool:
        """Whether every trained parameter has its gradient of this backward."""
        return len(self.fired) == self.trained_count

    @property
    def may_free_early(self) -> bool:
        """Whether the whole parameters are done with once all gradients are there.

        A node that reads a trainable weight also makes its gradient, so after the last gradient no
        node is left that reads one. That says nothing of frozen weights.
        """
        return all(all(flat.trained) for flat in self.flats)
