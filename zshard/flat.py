"""One flat buffer of a unit: segments, this rank's shard of everything, and the gathered views.

[Note: the version counter guards a gathered buffer]
Autograd saves views of the full buffer in forward and reads them in backward. In between the
unit is resharded, its memory holds another unit, and it is gathered again into the same place.
All leaves of a flat buffer share the version counter of ``base``. While the unit is gathered the
counter says which values the buffer holds (twice the number of updates of the master); while it is
not, it says so by an odd number. So a graph that reads a weight that is not there, or one that an
optimizer has changed since, gets autograd's own "modified by an inplace operation" error, never
another unit's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch._C._autograd import _unsafe_set_version_counter
from torch.nn import Parameter

from . import ops
from .errors import InputError, StateError
from .layout import Layout, Local
from .param import Sharded, ShardedGrad
from .precision import Dtypes

if TYPE_CHECKING:
    from .schedule import Schedule


class Flat:
    """The segments of a unit that share a parameter dtype and ``requires_grad``.

    Attributes:
        master: (S,) master dtype, the authority.
        send: (S,) compute dtype, what the all-gather sends; the master itself where dtypes agree.
        sent: the same memory as bytes, for the collective. (gloo knows few dtypes.)
        grad: (S,) reduce dtype, this rank's reduced gradients; None until the first reduction.
        base: (N * S,) compute dtype, the full buffer; the leaves are views of it.
        recv: the same memory as bytes, for the collective.
        params: the sharded parameters; leaves: what the modules hold while gathered.
    """

    def __init__(
        self,
        all_names: Sequence[tuple[str, ...]],
        params: Sequence[torch.Tensor],
        dtypes: Dtypes,
        rank: int,
        world_size: int,
    ) -> None:
        self.all_names = tuple(all_names)  # tied parameters have several
        self.names = tuple(names[0] for names in all_names)
        self.unit_label = ""  # set by the unit
        self.schedule: Schedule  # set by the schedule that takes the unit over
        self.dtypes = dtypes
        self.device = params[0].device
        self.requires_grad = params[0].requires_grad
        self.layout = Layout.of(params, world_size)
        self.rank = rank
        self._locals = tuple(self.layout.local(i, rank) for i in range(len(params)))
        self.master = self._shard_of(params)
        same = dtypes.compute == dtypes.master
        self.send = self.master if same else torch.empty_like(self.master, dtype=dtypes.compute)
        self.sent = self.send.view(torch.uint8)
        self.send_stale = not same
        self.updates = 0
        self._marked = 0  # the version counter of `base` as we last set it
        self.params = [
            Sharded(self.master[a:b], self, i, is_param=True)
            for i, (a, b, _) in enumerate(self._locals)
        ]
        self.leaves: list[Parameter] = []
        self.base: torch.Tensor | None = None
        self.recv: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.has_grad = [False] * len(params)
        # Whole gradients of backwards inside no_sync, (shape) in the reduce dtype.
        self._held: list[torch.Tensor | None] = [None] * len(params)
        self._grads: list[ShardedGrad | None] = [None] * len(params)
        # The reducer's: called before the user asks for a gradient, looks inside, or changes it.
        self.on_grad_query: Callable[[], None] = lambda: None
        self.on_grad_access: Callable[[], None] = lambda: None
        self.on_grad_change: Callable[[], None] = lambda: None

    def _shard_of(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's shard of ``params`` in the master dtype; the full buffer lives only here."""
        layout = self.layout
        full = torch.empty(layout.numel, dtype=self.dtypes.master, device=self.device)
        with torch.no_grad():
            sources = [s.physical(p.detach()) for s, p in zip(layout.segments, params, strict=True)]
        ops.pack_(full, sources, [s.offset for s in layout.segments])
        if layout.world_size == 1:
            return full
        return full[self.rank * layout.shard_size :][: layout.shard_size].clone()

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer."""
        return self.layout.numel * self.dtypes.compute.itemsize

    @property
    def local_padding(self) -> int:
        """Elements of this rank's shard that belong to no parameter."""
        return self.layout.shard_size - sum(end - begin for begin, end, _ in self._locals)

    def local(self, index: int) -> Local:
        """Where segment ``index`` lies in this rank's shard."""
        return self._locals[index]

    # --- the full buffer -------------------------------------------------------------------------

    def attach(self, memory: torch.Tensor, on_leaf_grad: Callable[[int], None]) -> None:
        """Make ``memory`` (N * S,) the full buffer, and new leaves as views of it."""
        # Leaves outlive a first use under inference_mode, so they are made outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._attach(memory, on_leaf_grad)
        self.mark(valid=False)

    def _attach(self, memory: torch.Tensor, on_leaf_grad: Callable[[int], None]) -> None:
        # Two aliases of one memory: the collective writes `recv`, whose version counter nobody
        # looks at; see [Note: the version counter guards a gathered buffer] for `base`'s.
        self.recv = _alias(memory).view(torch.uint8)
        self.base = _alias(memory)
        self.leaves = []
        for index, segment in enumerate(self.layout.segments):
            leaf = Parameter(segment.view_of(self.base), requires_grad=self.requires_grad)
            leaf.__dict__.update(user_attributes(self.params[index]))
            if self.requires_grad:
                leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _leaf_hook(on_leaf_grad, index)
                )
            self.leaves.append(leaf)

    def mark(self, *, valid: bool) -> None:
        """Say in the version counter what the full buffer holds."""
        if self.base is not None:
            self._marked = 2 * self.updates + (not valid)
            _unsafe_set_version_counter((self.base,), (self._marked,))

    def written_while_gathered(self) -> bool:
        """Whether somebody wrote to a leaf in place since the last ``mark``."""
        return self.base is not None and self.base._version != self._marked

    def refresh_send(self) -> None:
        """Bring the send buffer up to the master after something other than adamw_ wrote it."""
        if self.send_stale:
            ops.cast_(self.send, self.master)
            self.send_stale = False

    def slice_written(self, local: torch.Tensor) -> None:
        """Note that ``local`` was written in place: part of the master, or of the gradient."""
        written = local.untyped_storage().data_ptr()
        if written == self.master.untyped_storage().data_ptr():
            self.updated(send_written=False)
        elif self.grad is not None and written == self.grad.untyped_storage().data_ptr():
            self.on_grad_change()

    def updated(self, *, send_written: bool) -> None:
        """Note a new value of the master; ``send_written`` if the send buffer has it already."""
        self.updates += 1
        self.send_stale = not send_written and self.send is not self.master
        # At N = 1 the full buffer may be the master itself, and so has changed under the graph.
        self.mark(valid=False)

    # --- gradients -------------------------------------------------------------------------------

    def grad_buffer(self) -> torch.Tensor:
        """The gradient shard, (S,) in the reduce dtype, allocated once."""
        if self.grad is None:
            self.grad = torch.zeros(
                self.layout.shard_size, dtype=self.dtypes.reduce, device=self.device
            )
        return self.grad

    def get_grad(self, index: int) -> ShardedGrad | None:
        """The gradient of parameter ``index``, or None; not None either where no_sync holds one."""
        self.on_grad_query()
        if not self.has_grad[index] and not self.holds_back(index):
            return None
        cached = self._grads[index]
        if cached is None:
            begin, end, _ = self._locals[index]
            cached = self._grads[index] = ShardedGrad(self.grad_buffer()[begin:end], self, index)
        return cached

    def holds_back(self, index: int) -> bool:
        """Whether a backward inside no_sync has left a gradient that is not reduced yet."""
        return self._held[index] is not None

    def drop_held_back(self, index: int) -> None:
        """Forget what no_sync holds of gradient ``index``, whose shard is about to be zeroed."""
        if self.holds_back(index):
            self._held[index] = None
            self.has_grad[index] = True

    def before_grad_access(self, index: int) -> None:
        """Make the gradient shard hold what the user is to see.

        Raises:
            StateError: if part of the gradient is held back by no_sync; if it is fp16 and still has
                to be divided by a loss scale.
        """
        if self.holds_back(index):
            raise StateError(
                f"{self.names[index]}: its gradient is held back by zshard.no_sync and not reduced "
                "yet. Run the last backward of the step outside no_sync, or drop it with "
                "zero_grad(set_to_none=True)."
            )
        self._apply_scale(index)

    def _apply_scale(self, index: int) -> None:
        if self.dtypes.reduce == torch.float16 and self.schedule.reducer.unscales:
            raise StateError(
                f"{self.names[index]}: its gradient is float16 and is divided by the loss scale as "
                "zshard.AdamW or zshard.Adam reads it; in float16 small values would become 0. "
                "Look at gradients before scaler.unscale_, or reduce in fp32 "
                "(zshard.Precision.fp16()), which torch's optimizers need too."
            )
        self.on_grad_access()

    def set_grad(self, index: int, value: torch.Tensor | None) -> None:
        """Drop the gradient of parameter ``index`` (None), or take the values of ``value``."""
        if value is not None:
            self._apply_scale(index)
        self.on_grad_change()
        self._held[index] = None  # what no_sync has held back goes with it
        if value is None:
            self.has_grad[index] = False
            return
        if isinstance(value, Sharded) and (value.flat is not self or value.segment != index):
            raise InputError(f"{self.names[index]}: this is the gradient of {value.fqn}")
        if value is not self._grads[index]:
            begin, end, _ = self._locals[index]
            target = Sharded(self.grad_buffer()[begin:end], self, index)
            target.copy_(value)
        self.has_grad[index] = True

    def hold_back(self) -> None:
        """Move the leaves' gradients of a backward inside no_sync to where they add up."""
        for index, leaf in enumerate(self.leaves):
            if leaf.grad is not None:
                held, grad = self._held[index], leaf.grad
                # In the reduce dtype: a 16-bit sum of many micro-batches would stand still.
                self._held[index] = grad.to(self.dtypes.reduce) if held is None else held.add_(grad)
                leaf.grad = None

    def present(self) -> list[bool]:
        """Of each parameter: whether this rank has a gradient for it to be reduced."""
        left = [leaf.grad is not None for leaf in self.leaves] or [False] * len(self.params)
        return [new or held is not None for new, held in zip(left, self._held, strict=True)]

    def pack(self, packed: torch.Tensor, scale: float) -> None:
        """Write this rank's gradients, times ``scale``, into ``packed`` (N * S,) and free them.

        Raises:
            InputError: for a sparse gradient.
        """
        if any(held is not None for held in self._held):
            self.hold_back()
            grads, self._held = self._held, [None] * len(self.params)
        else:
            grads = [leaf.grad for leaf in self.leaves]
        segments = self.layout.segments[: len(grads)]
        for name, grad in zip(self.names, grads, strict=False):
            if grad is not None and grad.layout is not torch.strided:
                raise InputError(
                    f"{name} has a {grad.layout} gradient; zshard reduces dense ones. Pass "
                    "sparse=False to the embedding, or put it into ignored=[...]."
                )
        sources = [
            None if grad is None else segment.physical(grad)
            for grad, segment in zip(grads, segments, strict=True)
        ]
        ops.pack_(packed, sources, [segment.offset for segment in segments], scale)
        for leaf in self.leaves:
            leaf.grad = None

    def prepare_sum(self) -> bool:
        """Make the gradient shard ready to be added to; False where it is to be overwritten."""
        if not any(self.has_grad):
            return False
        # What no gradient fills must not enter the sum: the stale values of one that was dropped,
        # and the padding, which a NaN clip factor makes NaN.
        grad, filled = self.grad_buffer(), 0
        for (begin, end, _), present in zip(self._locals, self.has_grad, strict=True):
            if present and begin < end:
                if filled < begin:
                    grad[filled:begin].zero_()
                filled = end
        grad[filled:].zero_()
        return True


def user_attributes(param: torch.Tensor) -> dict[str, object]:
    """What user code has set on a parameter."""
    own = ("_local", "flat", "segment", "_is_param")
    return {name: value for name, value in param.__dict__.items() if name not in own}


def _alias(memory: torch.Tensor) -> torch.Tensor:
    """The same memory under a version counter of its own."""
    alias = torch.empty(0, dtype=memory.dtype, device=memory.device)
    return alias.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, (1,))


def _leaf_hook(on_leaf_grad: Callable[[int], None], index: int) -> Callable[[torch.Tensor], None]:
    def hook(leaf: torch.Tensor) -> None:
        on_leaf_grad(index)

    return hook
