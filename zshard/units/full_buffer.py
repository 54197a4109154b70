"""A full buffer: its memory, the leaves that are views of it, and what autograd is told of both.

[Note: the version counter guards a gathered buffer]
Autograd saves views of the full buffer in forward and reads them in backward. In between the
unit is resharded, its memory holds another unit, and it is gathered again into the same place.
All leaves of a flat buffer share the version counter of ``base``. While the unit is gathered the
counter says which values the buffer holds (twice the version of the master); while it is not, it
says so by an odd number, unless nobody else takes the memory and it still holds those values. So a
graph that reads a weight that is not there, or one that an optimizer has changed since, gets
autograd's own "modified by an inplace operation" error, never another unit's numbers. Writes in
place, which count up the counter as well, and are refused in the end, have ``_ROOM`` between two
such numbers: what is saved behind one is no version of anything else.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch._C import _will_engine_execute_node
from torch._C._autograd import _unsafe_set_version_counter
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter

from ..attributes import share_attributes
from ..errors import StateError
from ..param import Sharded
from .leaf import (
    DeadLeaf,
    LiveLeaf,
    RestingLeaf,
    as_autograd_sees,
    is_trained,
    set_kind,
    set_trained,
)

if TYPE_CHECKING:
    from .flat import Flat


_ROOM = 1 << 12  # see [Note: the version counter guards a gathered buffer]
_COUNTERS = 1 << 32  # that torch's version counters count up to


class FullBuffer:
    """The whole parameters of ``flat``, once there is memory for them.

    Attributes:
        base: (N * S,) compute dtype, the full buffer; the leaves are views of it.
        recv: the same memory as bytes, for the collective. (gloo knows few dtypes.)
        leaves: what the modules hold of each parameter while it is gathered.
    """

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self.base: torch.Tensor | None = None
        self.recv: torch.Tensor | None = None
        self.leaves: list[Parameter] = []
        self._valid = False  # as last marked
        self._marked = 0  # the version counter of `base` as we last set it
        self._noted = 0  # what it was as writes were noted last, or `_marked`
        self._watched: set[int] = set()  # leaves that call at their gradient
        self._accumulators: list[Node] | None = None  # of the trained leaves, once asked for

    def attach(self, memory: torch.Tensor) -> None:
        """Make ``memory`` (N * S,) the full buffer, which holds no values yet, with new leaves."""
        # Leaves outlive a first use under inference_mode, so they are made outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._attach(memory)
        self.mark(valid=False)

    def _attach(self, memory: torch.Tensor) -> None:
        # Two aliases of one memory: the collective writes `recv`, whose version counter nobody
        # looks at; see [Note: the version counter guards a gathered buffer] for `base`'s.
        self.recv = _alias(memory).view(torch.uint8)
        self.base = _alias(memory)
        self.leaves = []
        self._watched.clear()
        self._accumulators = None
        for index, segment in enumerate(self._flat.layout.segments):
            leaf = Parameter(segment.view_of(self.base), requires_grad=self._flat.trained[index])
            self.leaves.append(leaf)
            self._watch(index)
        set_kind(self.leaves, DeadLeaf)

    @property
    def aliases(self) -> int:
        """Tensors here that lie in the memory."""
        return 0 if self.base is None else 2 + len(self.leaves)

    def _watch(self, index: int) -> None:
        """Hook leaf ``index``, to be called when its gradient is there."""
        leaf = self.leaves[index]
        if not leaf.requires_grad or index in self._watched:
            return
        self._watched.add(index)
        full = weakref.ref(self)  # autograd keeps hooks out of the garbage collector's sight

        def change(grad: torch.Tensor) -> torch.Tensor:
            owner = full()
            return grad if owner is None else owner._flat.hooks[index].change(grad)

        def leaf_grad_arrived(leaf: torch.Tensor) -> None:
            # Torch calls it too where the leaf, frozen since the forward, has taken no gradient.
            if (owner := full()) is not None and owner._flat.trained[index]:
                try:
                    owner._flat.unit.leaf_grad_arrived(owner._flat, index)
                except BaseException:
                    # Where no backward could begin, nothing else would: the next one adds to it.
                    with as_autograd_sees():
                        leaf.grad = None
                    raise

        leaf.register_hook(change)  # type: ignore[no-untyped-call]
        leaf.register_post_accumulate_grad_hook(leaf_grad_arrived)  # type: ignore[no-untyped-call]

    def leaf(self, index: int) -> Parameter:
        """What the modules hold of parameter ``index`` while it is whole, and its attributes."""
        leaf, trained = self.leaves[index], self._flat.trained[index]
        share_attributes(self._flat.params[index], leaf)
        if is_trained(leaf) != trained:  # frozen or not while a module held it
            set_trained(leaf, trained)
            self._accumulators = None
        return leaf

    def given_back(self) -> Sequence[Sharded]:
        """The sharded parameters, for the modules, with the attributes that the leaves got."""
        params = self._flat.params
        for param, leaf in zip(params, self.leaves, strict=False):  # no leaves yet: nothing
            share_attributes(leaf, param)
        return params

    def set_trained(self, index: int, value: bool) -> None:
        """Freeze or unfreeze leaf ``index``, if there is one."""
        if self.leaves:
            with as_autograd_sees():
                set_trained(self.leaves[index], value)
                self._watch(index)
            self._accumulators = None

    def will_be_reached(self) -> bool:
        """Whether the backward under way makes a gradient of any leaf.

        To be asked in one of its hooks.
        """
        if self._accumulators is None:
            # Transforms of torch.func, inside of which it may be asked, would have other nodes.
            with as_autograd_sees(), torch._C._DisableFuncTorch():
                trained = [leaf for leaf in self.leaves if leaf.requires_grad]
                self._accumulators = [get_gradient_edge(leaf).node for leaf in trained]
        try:
            return any(map(_will_engine_execute_node, self._accumulators))
        except RuntimeError:  # in torch.autograd.grad, which makes none
            return False

    def mark(self, *, valid: bool) -> None:
        """Say what the buffer holds: to autograd, and to those who have kept a leaf.

        Args:
            valid: whether it holds the master's values; else something else, or older ones.
        """
        if self.base is not None:
            if self._valid and self.written and self._flat.master.has_copy:
                self._flat.master.stale = True  # it may have been written: to be cast anew
            if valid or self._valid:  # an optimizer comes here for every parameter it writes
                self._valid = True  # until all leaves are told: an exception may come before
                set_kind(self.leaves, LiveLeaf if valid else DeadLeaf)
            self._valid = valid
            state = 2 * self._flat.version + (not valid)
            self._marked = self._noted = state * _ROOM % _COUNTERS
            _unsafe_set_version_counter((self.base,), (self._marked,))

    def retire(self, *, stays: bool) -> None:
        """End a use of the values.

        Args:
            stays: whether they stay in the buffer; then, if unwritten, a graph may read them.
        """
        if stays and self._valid and not self.written:
            set_kind(self.leaves, RestingLeaf)
        else:
            self.mark(valid=False)

    @property
    def written(self) -> bool:
        """Whether somebody wrote to a leaf in place since the last ``mark``."""
        return self.base is not None and self.base._version != self._marked

    def forget_writes(self) -> None:
        """Hold no values, if somebody wrote to them: another use is to begin with the master's."""
        if self.written:
            self.mark(valid=False)

    def note_writes(self) -> bool:
        """Note what somebody wrote to leaves that hold their values; whether there was anything.

        Other data that a leaf was given is taken back.
        """
        if self.base is None or not self._valid:
            return False
        with as_autograd_sees():
            moved = [
                (leaf, segment)
                for leaf, segment in zip(self.leaves, self._flat.layout.segments, strict=True)
                if leaf.data_ptr() != self.base.data_ptr() + segment.offset * leaf.itemsize
                and leaf.numel() > 0
            ]
            for leaf, segment in moved:
                leaf.data = segment.view_of(self.base)
        flat = self._flat
        unnoted = self.base._version != self._noted
        if unnoted and flat.resident is not None and not flat.master.has_copy:
            # The master itself was written: ranks that have not done alike are torn.
            self._noted = self.base._version
            for index, segment in enumerate(flat.layout.segments):
                flat.schedule.updates.note_written(flat, index, segment.view_of(self.base))
        return bool(moved) or self.written


def refuse_written(unit: str, names: Sequence[str]) -> NoReturn:
    """Refuse what was written to a parameter of ``unit``, one of ``names``, while it was whole."""
    raise StateError(
        f"unit {unit!r}: backward or forward changed one of {', '.join(names)} in place, which "
        "would be lost. Change parameters between steps, on the sharded parameters (elementwise) "
        "or inside zshard.full_params(model, write=True); those that a first batch initialises "
        "(ActNorm), by a forward before wrap. Leave whole, by ignored=, what every forward updates "
        "(a codebook's averages)."
    )


def _alias(memory: torch.Tensor) -> torch.Tensor:
    """The same memory under a version counter of its own."""
    alias = torch.empty(0, dtype=memory.dtype, device=memory.device)
    return alias.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, (1,))
