"""What goes through a unit's forward: which tensors it made, and which only pass through."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..containers import tensors_in
from .storage import storage_of

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class ForwardIO:
    """One forward of a unit, from its inputs to its outputs."""

    def __init__(self) -> None:
        self._given: object = None
        self._inputs: list[tuple[torch.Tensor, int]] = []
        # Id of the exception that its caller was handling as it began; another one ends it.
        self._handled = id(None)

    def begin(self) -> None:
        """Note that it begins, before anything of it may raise."""
        self._handled = id(sys.exc_info()[1])

    @property
    def raised(self) -> bool:
        """Whether it has ended in an exception; for the hook that comes after it."""
        return id(sys.exc_info()[1]) != self._handled

    def enter(self, inputs: object) -> None:
        """Note what goes in, also where no gradients are made: the forward may enable them."""
        if not torch.is_inference_mode_enabled():
            self._given = inputs
            tracked = (t for t in tensors_in(inputs) if t.requires_grad and not t.is_inference())
            self._inputs = [(t, t._version) for t in tracked]

    def leave(self, output: object) -> list[torch.Tensor]:
        """The differentiable tensors that have a node of this unit behind them.

        They may be in ``output``, or left in a list or cache that was among the inputs. Last come
        those that others are views of: a write to a view in place gives it another node.
        """
        unwritten = (tensor for tensor, version in self._inputs if tensor._version == version)
        outside = {id(t) for tensor in unwritten for t in (tensor, tensor._base)}
        given = self._given
        self.drop_inputs()
        if torch.is_inference_mode_enabled():
            return []
        found = {id(t): t for t in chain(tensors_in(output), tensors_in(given)) if t.requires_grad}
        # A leaf has no node, and a hook on it would stay. And register_hook crashes on a view whose
        # base was written to through another one, if nobody has asked for the node that it has now.
        own = [t for key, t in found.items() if t.grad_fn is not None and key not in outside]
        bases = {id(tensor._base): tensor._base for tensor in own}
        return own + [
            base
            for key, base in bases.items()
            if base is not None and base.grad_fn is not None and key not in outside | found.keys()
        ]

    def drop_inputs(self) -> None:
        """Hold the inputs no longer."""
        self._given, self._inputs = None, []


def lying_in(buffers: Iterable[torch.Tensor]) -> Callable[[torch.Tensor], bool]:
    """What tells whether a tensor is a view of one of ``buffers``."""
    storages = {storage_of(buffer) for buffer in buffers}

    def lies(tensor: torch.Tensor) -> bool:
        if inside := _made_of(tensor):
            return any(map(lies, inside))
        try:
            return storage_of(tensor) in storages
        except (NotImplementedError, RuntimeError):  # batched, say: not a view
            return False

    return lies


def _made_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the values of one that has no memory of its own: sparse, nested."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._values()]
    if tensor.layout in _COMPRESSED:
        return [tensor.values()]
    if is_traceable_wrapper_subclass(tensor):
        inside = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [each for each in inside if isinstance(each, torch.Tensor)]  # not a DTensor's mesh
    return []
