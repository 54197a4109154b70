"""The gradients of one flat buffer: reduced ones, and those that no_sync holds back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .. import ops
from ..errors import InputError, StateError
from ..layout import Range
from ..param import Sharded, ShardedGrad
from .grad_objects import GradObjects
from .leaf import as_autograd_sees
from .storage import shares, storage_of

if TYPE_CHECKING:
    from ..step.reduction import Reducer
    from ..step.totals import Totals
    from .flat import Flat


class Gradients:
    """What a rank holds of the gradients of ``flat``.

    Attributes:
        present: of each parameter, whether any rank has a gradient that was reduced.
        arrived: likewise, of the last backward alone.
    """

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self.present = [False] * len(flat.names)
        self.arrived = [False] * len(flat.names)
        # (N * S,) or (S,) reduce dtype, as the strategy says; made at the first backward.
        self._memory: torch.Tensor | None = None
        self._shard: torch.Tensor | None = None  # a view of it, see ``shard``
        # Sums of backwards inside no_sync that were not reduced yet: (shape) in the reduce dtype.
        self._held: list[torch.Tensor | None] = [None] * len(flat.names)
        # (N * S,) reduce dtype, where those are that have to be cast; kept while steps need it.
        self._sums: torch.Tensor | None = None
        self.objects = GradObjects(flat)

    @property
    def _reducer(self) -> Reducer:
        return self._flat.schedule.reducer

    @property
    def _totals(self) -> Totals:
        return self._flat.schedule.totals

    # --- memory ----------------------------------------------------------------------------------

    def _allocated(self) -> torch.Tensor:
        if self._memory is None:
            with torch.inference_mode(False):
                self._memory = torch.zeros(
                    self._flat.reduced.numel,
                    dtype=self._flat.dtypes.reduce,
                    device=self._flat.device,
                )
            self._tell(self._memory.nbytes)
        return self._memory

    def free(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._tell(-self._memory.nbytes)
            self._memory = self._shard = None
        self._free_sums()
        self.objects.clear()

    def _tell(self, nbytes: int) -> None:
        self._flat.schedule.pool.ledger.add("gradients", nbytes)

    def _part(self, part: Range) -> torch.Tensor:
        first = self._flat.reduced.begin
        return self._allocated()[part.begin - first : part.end - first]

    def owned(self) -> torch.Tensor:
        """(O,) reduce dtype: the reduced gradients of what this rank updates."""
        return self._part(self._flat.owned)

    def shard(self) -> torch.Tensor:
        """(S,) reduce dtype: the part that this rank's reduction writes; one object."""
        if self._shard is None:
            self._shard = self._part(self._flat.shard)
        return self._shard

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated, those held back included."""
        kept = [t for t in (self._memory, self._sums) if t is not None]
        return sum(t.nbytes for t in kept) + sum(map(self._bytes_of_its_own, self._held))

    @property
    def held_back_bytes(self) -> int:
        """Those of ``nbytes`` that accumulation inside no_sync takes besides."""
        return self.nbytes - (0 if self._memory is None else self._memory.nbytes)

    def _bytes_of_its_own(self, held: torch.Tensor | None) -> int:
        """Bytes of one held back; 0 where it lies in the buffer or among the sums."""
        kept = (self._memory, self._sums)
        if held is None or any(shares(held, each) for each in kept if each is not None):
            return 0
        return held.nbytes

    # --- as the user sees them -------------------------------------------------------------------

    def get(self, index: int) -> ShardedGrad | None:
        """The gradient of parameter ``index``, or None. One that no_sync holds back is one."""
        self._reducer.read_outcome()
        if not self.present[index] and not self.is_held_back(index):
            return None
        found = self.objects.get(index)
        return self.objects.make(index, self.owned()) if found is None else found

    def set(self, index: int, value: torch.Tensor | None) -> None:
        """Drop the gradient of parameter ``index`` (None), or take the values of ``value``."""
        flat = self._flat
        if isinstance(value, Sharded) and (value.flat is not flat or value.segment != index):
            other = "" if value.flat.schedule is flat.schedule else " of another model"
            raise InputError(
                f"{flat.names[index]}: the gradient of {value.fqn}{other}, or what is made of it, "
                "cannot be its own. Copy the values: param.grad = torch.zeros_like(param); "
                "param.grad.copy_(tensor)"
            )
        if isinstance(value, ShardedGrad):
            return  # this very gradient, as ``grad += x`` assigns it, or an alias of it
        if value is not None:
            flat.layout.segments[index].require_shape(value, flat.names[index])
            self._apply_scale(index)
        self._totals.note_change()
        self._leave(index)
        self.forget_held_back(index)  # what no_sync has held back goes with it
        if value is None:
            self.present[index] = False
            return
        Sharded(flat.local(index).at.of(self.owned()), flat, index).copy_(_dense(value))
        self.present[index] = True

    def _leave(self, index: int) -> None:
        """Leave gradient ``index``, which is dropped, to those who keep it."""
        self.objects.leave(index, held_back=self.is_held_back(index))

    def before_access(self, index: int) -> None:
        """Make the gradient shard hold what the user is to see.

        Raises:
            StateError: if part of the gradient is held back by no_sync; if it is fp16 and still has
                to be divided by a loss scale.
        """
        self.refuse_held_back(index)
        self._apply_scale(index)

    def before_look(self, index: int) -> torch.Tensor | None:
        """As ``before_access``, but leaves the shard; (1,), the factor still to be applied."""
        self.refuse_held_back(index)
        self._refuse_fp16(index)
        self._reducer.read_outcome()
        return self._totals.grad_scale

    def seen(self, index: int) -> torch.Tensor:
        """This rank's slice of gradient ``index`` as a reader sees it, reduce dtype.

        Raises:
            StateError: as ``before_look``.
        """
        scale, mine = self.before_look(index), self._flat.local(index).at.of(self.owned())
        if scale is None:
            return mine
        master = self._flat.dtypes.master
        return (mine.to(master) * scale.to(master)).to(self._flat.dtypes.reduce)

    def _apply_scale(self, index: int) -> None:
        if self.present[index]:
            self._refuse_fp16(index)
        if self._totals.unscales:
            for flat in self._flat.schedule.flats:  # it applies to all of them
                if True in flat.grads.present:
                    flat.grads._refuse_fp16(flat.grads.present.index(True))
        self._totals.apply_scale()

    def _refuse_fp16(self, index: int) -> None:
        flat = self._flat
        if flat.dtypes.reduce == torch.float16 and self._totals.unscales:
            raise StateError(
                f"{flat.names[index]}: its gradient is float16 and is divided by the loss scale as "
                "zshard's optimizers read it; in float16 small values would become 0. Look at "
                "gradients before scaler.unscale_, or reduce in fp32 (zshard.Precision.fp16()), "
                "which torch's optimizers need too."
            )

    def written(self, storages: Iterable[int]) -> None:
        """Note that parts of some storages were written, which may be these gradients'."""
        if any(map(self.has, storages)):
            self._totals.note_change()

    def has(self, storage: int) -> bool:
        """Whether they lie in ``storage``."""
        return self._memory is not None and storage_of(self._memory) == storage

    # --- held back by no_sync --------------------------------------------------------------------

    def is_held_back(self, index: int) -> bool:
        """Whether a backward inside no_sync has left a gradient that is not reduced yet."""
        return self._held[index] is not None

    def refuse_held_back(self, index: int) -> None:
        """Raise StateError if gradient ``index`` is not reduced yet."""
        if self.is_held_back(index):
            raise StateError(held_back(self._flat.names[index]))

    def zero_held_back(self, index: int) -> None:
        """Zero what no_sync holds of gradient ``index``, whose shard is about to be zeroed.

        It stays held back: only the next reduction tells whether other ranks have one.
        """
        if (held := self._held[index]) is not None:
            held.zero_()

    def forget_held_back(self, *indices: int) -> None:
        """Forget what no_sync holds: of the gradients ``indices``, or of all."""
        freed = 0
        for index in indices or range(len(self._held)):
            held, self._held[index] = self._held[index], None
            freed += self._bytes_of_its_own(held)
        if freed > 0:
            self._tell(-freed)

    def drop_leaves(self) -> None:
        """Forget the gradients of a backward that was not reduced."""
        with as_autograd_sees():
            for leaf in self._flat.full.leaves:
                leaf.grad = None

    @torch.no_grad()
    def hold_back(self) -> None:
        """Move the leaves' gradients of a backward inside no_sync to where they add up."""
        with as_autograd_sees():
            self._hold_back()

    def _hold_back(self) -> None:
        flat = self._flat
        # A buffer of the whole unit has room for the sums, unless reduced gradients are in it.
        inside = flat.strategy.whole_grads and not any(self.present)
        kept = 0
        for index, leaf in enumerate(flat.full.leaves):
            if leaf.grad is None:
                continue
            held, grad, segment = self._held[index], leaf.grad, flat.layout.segments[index]
            # In the reduce dtype: a 16-bit sum of many micro-batches would stand still.
            if held is not None and grad.dtype == held.dtype:
                held.add_(grad)
            elif held is not None:  # add_ would make a cast copy of the gradient first
                row = segment.physical(_dense(grad)).reshape(1, -1)
                ops.reduce_(segment.physical(held).view(-1), row, accumulate=True)
            elif inside or grad.dtype != flat.dtypes.reduce:
                memory = self._allocated() if inside else self._room_for_sums()
                self._held[index] = segment.view_of(memory).copy_(_dense(grad))
            else:
                self._held[index] = own = _dense(grad)
                kept += own.nbytes
            leaf.grad = None
        if kept > 0:
            self._tell(kept)

    def _room_for_sums(self) -> torch.Tensor:
        if self._sums is None:
            numel, dtype = self._flat.layout.numel, self._flat.dtypes.reduce
            self._sums = torch.empty(numel, dtype=dtype, device=self._flat.device)
            self._tell(self._sums.nbytes)
        return self._sums

    def _free_sums(self) -> None:
        if self._sums is not None:
            self._tell(-self._sums.nbytes)
            self._sums = None

    # --- reduction -------------------------------------------------------------------------------

    def ready(self) -> list[bool]:
        """Of each parameter: whether this rank has a gradient for it to be reduced."""
        with as_autograd_sees():
            left = [leaf.grad is not None for leaf in self._flat.full.leaves]
        left = left or [False] * len(self._held)
        return [new or held is not None for new, held in zip(left, self._held, strict=True)]

    def room(self) -> torch.Tensor | None:
        """(S,) reduce dtype: the shard, where nothing lies in it that a reduction is to read."""
        taken = any(self.present) or any(held is not None for held in self._held)
        return None if taken else self.shard()

    def pack(self, packed: torch.Tensor, scale: float) -> None:
        """Write this rank's gradients, times ``scale``, into ``packed`` (N * S,) and free them."""
        flat = self._flat
        grads: list[torch.Tensor | None]
        held_back = any(held is not None for held in self._held)
        if held_back:
            self.hold_back()
            grads = list(self._held)
        else:
            self._free_sums()  # no micro-batches any more
            with as_autograd_sees():
                grads = [leaf.grad for leaf in flat.full.leaves]
        segments = flat.layout.segments[: len(grads)]
        sources = [
            None if grad is None else segment.physical(_dense(grad))
            for grad, segment in zip(grads, segments, strict=True)
        ]
        ops.pack_(packed, sources, [segment.offset for segment in segments], scale)
        if held_back:
            self.forget_held_back()
        self.drop_leaves()

    def drop(self) -> None:
        """Forget every gradient, as zero_grad does."""
        for index in range(len(self.present)):
            self._leave(index)
        self.present = [False] * len(self.present)
        self.forget_held_back()

    def prepare_sum(self) -> bool:
        """Make the gradient shard ready to be added to; False where it is to be overwritten."""
        if not any(self.present):
            return False
        # What no gradient fills must not enter the sum: the stale values of one that was dropped,
        # and the padding, which a NaN clip factor makes NaN.
        grad, filled = self.owned(), 0
        for index, present in enumerate(self.present):
            begin, end = self._flat.local(index).at
            if present and begin < end:
                if filled < begin:
                    grad[filled:begin].zero_()
                filled = end
        grad[filled:].zero_()
        return True


def held_back(name: str, where: str = "") -> str:
    """What to say of a gradient that is to be read; ``where``: on which ranks."""
    return (
        f"{name}: its gradient is held back by zshard.no_sync{where} and not reduced yet. Run the "
        "last backward of the step outside no_sync, or drop it with zero_grad(set_to_none=True)."
    )


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.layout is torch.strided else grad.to_dense()
