"""One flat buffer of a unit: where its segments lie, its master, its gradients, its full buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .. import ops
from ..comm import Comm
from ..hooks import ParamHooks
from ..layout import Layout, Local
from ..param import Sharded, ShardedGrad
from ..precision import Dtypes
from ..strategy import Strategy
from ..tag import Tag
from .full_buffer import FullBuffer
from .grad_objects import Aliases
from .gradient import Gradients
from .master import Master
from .sizes import FlatSizes
from .storage import memory_of, storage_of

if TYPE_CHECKING:
    from ..schedule import Schedule
    from ..unit import Unit


class Flat(FlatSizes):
    """The segments of a unit that share a parameter dtype and ``requires_grad``.

    S is the size of a shard, O that of the range this rank owns: its shard, or everything.

    Attributes:
        unit: whose it is; schedule: that runs it. Not there before ``belong_to``.
        shard: the range of this rank's shard; owned: the range that it updates; reduced: the range
            that it has memory for the gradients of.
        master: (O,), the authority.
        grads: of the owned range, reduced or held back by no_sync.
        resident: (N * S,) compute dtype, the full buffer where that stays in memory; else None.
        full: what is there of the whole parameters while they are gathered.
        sent: (bytes,) uint8, this rank's part of what the collective gathers.
        params: the sharded parameters; ``full.leaves`` are the whole ones.
        trained: of each parameter, whether it requires a gradient; alike at first, as the unit map
            puts them together, but users may freeze and unfreeze single ones.

    Args:
        params: whole; those on the meta device have no values yet, and zeros in their place.
        lent: of ``lend``.
    """

    def __init__(
        self,
        all_names: Sequence[tuple[str, ...]],
        params: Sequence[torch.Tensor],
        dtypes: Dtypes,
        strategy: Strategy,
        comm: Comm,
        device: torch.device,
        lent: torch.Tensor | None,
    ) -> None:
        self.all_names = tuple(all_names)  # tied parameters have several
        self.names = tuple(names[0] for names in all_names)
        self.unit: Unit
        self.schedule: Schedule
        self.dtypes, self.strategy, self.device = dtypes, strategy, device
        self.trained = [param.requires_grad for param in params]
        self.trained_count = sum(self.trained)  # asked for at every gradient
        self.hooks = [ParamHooks(param) for param in params]
        self.layout = Layout.of(params, comm.size, comm.replicas.size)
        self.shard = self.layout.shard(comm.rank)
        self.owned, self.reduced = self.owned_by(comm.rank), self.grads_of(comm.rank)
        self._locals = tuple(self.layout.local(i, self.owned) for i in range(len(params)))
        self.version = 0  # of the master's values: how often they were changed
        self.resident: torch.Tensor | None = None
        self.master = self._allocate(params, lent)
        self.sent = self.master.send.view(torch.uint8)
        self.grads = Gradients(self)
        self.aliases = Aliases(len(params))  # of parameters
        self.params = [
            Sharded(None if dtypes.split else self.master.read(*at), self, i, is_param=True)
            for i, (at, _) in enumerate(self._locals)
        ]
        self.full = FullBuffer(self)

    def _allocate(self, params: Sequence[torch.Tensor], lent: torch.Tensor | None) -> Master:
        """The master, of the owned range alone; and the full buffer, where that stays."""
        dtypes, numel = self.dtypes, self.owned.numel
        if lent is None:
            lent = torch.empty(self.layout.numel, dtype=dtypes.compute, device=self.device)
        self.resident = lent if self.stays else None
        send = self.owned.of(lent) if self.stays else lent
        if dtypes.compute == dtypes.master:
            initial = send
        else:
            initial = torch.empty(numel, dtype=dtypes.master, device=self.device)
        pieces = [
            None
            if param.is_meta
            else local.elements.of(segment.physical(param.detach()).reshape(-1))
            for segment, param, local in zip(
                self.layout.segments, params, self._locals, strict=True
            )
        ]
        ops.pack_(initial, pieces, [local.at.begin for local in self._locals])
        return Master(initial, send, dtypes)

    def belong_to(self, unit: Unit, schedule: Schedule) -> None:
        """Be part of ``unit``, which ``schedule`` runs, from here on; the model is wrapped."""
        self.unit, self.schedule = unit, schedule
        for param in self.params:
            param._forbid_gradients()

    def move(self) -> None:
        """Leave the memory that other ranks read, for this rank's own, before any use."""
        moved = self.copy.clone()
        if self.resident is None:
            self.master.move(moved)
        else:
            self.resident = moved
            self.master.move(self.owned.of(moved))
        self.sent = self.master.send.view(torch.uint8)
        if self.master.values is self.master.send:
            for param, local in zip(self.params, self._locals, strict=True):
                param._local = self.master.read(*local.at)

    def free(self) -> None:
        """Free the memory at once, whoever still refers to this; it is of no more use."""
        del self.master, self.sent, self.full
        self.resident, self.params = None, []

    @property
    def copy(self) -> torch.Tensor:
        """What the compute dtype's values are kept in: the full buffer, or what is sent."""
        return self.master.send if self.resident is None else self.resident

    @property
    def padding(self) -> int:
        """Elements of the owned range that belong to no parameter."""
        return self.layout.padding_in(self.owned)

    def local(self, index: int) -> Local:
        """Where segment ``index`` lies in the owned range."""
        return self._locals[index]

    def all_gather(self, owned: torch.Tensor, comm: Comm, tag: Tag) -> torch.Tensor:
        """The full buffer (N * S,) that ``owned`` (O,) is this rank's part of, in its dtype.

        In fresh memory, for reads outside of a step; steps have ``Unit.gather``. A collective,
        except where every rank owns all: then it is ``owned`` itself.
        """
        if not self.needs_gather:
            return owned
        full = torch.empty(self.layout.numel, dtype=owned.dtype, device=owned.device)
        comm.all_gather(full.view(torch.uint8), owned.view(torch.uint8), tag).wait()
        return full

    # --- trained or frozen -----------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether any of the parameters is trained."""
        return self.trained_count > 0

    def set_trained(self, index: int, value: bool) -> None:
        """Freeze or unfreeze parameter ``index``.

        Raises:
            StateError: inside a forward or backward; if no_sync holds a gradient of it.
        """
        if hasattr(self, "schedule"):  # else wrap is under way, in an init_fn
            self.schedule.backward.before_set_trained(self.names[index])
        self.grads.refuse_held_back(index)
        self.trained_count += value - self.trained[index]
        self.trained[index] = value
        self.full.set_trained(index, value)

    # --- the master ------------------------------------------------------------------------------

    def leave_data(self, of: Sharded, value: torch.Tensor) -> None:
        """Before ``of.data = value``: part ``of`` from what shares its memory.

        As with plain tensors, where that assignment gives it other memory. A parameter and its
        gradient stay where they are, so what was taken from them gets a copy of its own.
        """
        if isinstance(value, Sharded) and memory_of(value) == memory_of(of):
            return  # it shares it still
        if isinstance(of, ShardedGrad):
            self.grads.objects.leave_data(of)
            return
        leaving = [a for a in self.aliases.of(of.segment) if memory_of(a) == memory_of(of)]
        if leaving and not of._of_model:
            leaving = [of]
        for each in leaving:  # a state_dict's state is no alias: an optimizer's lies in its memory
            each._local = each.local.clone()
            self.aliases.drop(each)

    def refresh_send(self) -> None:
        """Update what is sent, if the master is newer, or a forward has written to what is sent.

        Such a write is refused in the end, but the other ranks' gather may come before.
        """
        if self.resident is not None and self.full.written and self.master.has_copy:
            self.master.stale = True
        if self.master.stale:
            self.unit.before_send_written(self)
        self.master.refresh()

    def before_write(self) -> None:
        """Wait for those who still read the master, which is about to be written.

        Raises:
            MismatchError: on every rank, if others do not come to a change of parameters.
        """
        self.schedule.agreement.meet_before_change()  # other ranks may still need the values
        self.unit.before_send_written(self)  # as may a gather under way

    def before_slices(self, storages: set[int]) -> None:
        """Prepare for writes to parts of some storages: the master's, the gradients', or others."""
        if self._has_master(storages):
            self.before_write()
            self.updated(send_written=False)  # before: an exception may come behind the write

    def slices_written(self, storages: set[int]) -> None:
        """Note that parts of some storages were written."""
        self.grads.written(storages)

    def took(self, target: Sharded, whole: torch.Tensor) -> None:
        """Note that ``target``, a parameter or something else, got its part of ``whole``."""
        updates, index = self.schedule.updates, target.segment
        if self.is_master(target):
            updates.note_value(self, index, whole)
            return
        # Of gradients in slices each rank may have its own: noise, say.
        copied = self.strategy.replicated or self.layout.replicas > 1
        if copied and target._local is not None and self.grads.has(storage_of(target._local)):
            updates.note_gradient(self, index, whole)

    def is_master(self, sharded: Sharded) -> bool:
        """Whether ``sharded`` is a parameter, and nothing else, such as a gradient."""
        return sharded._local is None or self._has_master({storage_of(sharded._local)})

    def _has_master(self, storages: set[int]) -> bool:
        return self.master.values is not None and storage_of(self.master.values) in storages

    def updated(self, *, send_written: bool) -> None:
        """Note a new value of the master; ``send_written`` if what is sent gets it as well."""
        self.version += 1
        self.master.stale = not send_written and self.master.has_copy
        # Where the full buffer stays in memory, its values have changed under the graph.
        self.full.mark(valid=False)


def lend(
    params: Sequence[torch.Tensor], dtypes: Dtypes, strategy: Strategy, comm: Comm
) -> torch.Tensor | None:
    """Memory of a flat buffer of ``params`` that collectives take: what is sent, or all of it.

    None where they take none. Ranks that share memory come here together.
    """
    if strategy.replicated:
        return None
    layout = Layout.of(params, comm.size, comm.replicas.size)
    if strategy.resident or comm.size == 1:
        return comm.empty(layout.numel, dtypes.compute, whole=True)
    return comm.empty(layout.shard_size, dtypes.compute)
