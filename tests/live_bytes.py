"""The bytes of all tensors that a piece of code makes and that are alive at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zshard.param


class LiveBytes(TorchDispatchMode):
    """Counts storages that are made inside, by what torch's ops return.

    Attributes:
        peak: the most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._bytes = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._older: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # from before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for key, storage in self._storages((args, kwargs)).items():
            if key not in self._alive and key not in self._older:
                # An address is used again once its storage has gone.
                self._older[key] = weakref.ref(storage, lambda _, key=key: self._older.pop(key))
        out = func(*args, **(kwargs or {}))
        for key, storage in self._storages(out).items():
            if key not in self._alive and key not in self._older:
                self._count(key, storage)
        self.peak = max(self.peak, self._bytes)
        return out

    def _count(self, key: int, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()

        def freed(_: object) -> None:
            del self._alive[key]
            self._bytes -= nbytes

        self._alive[key] = weakref.ref(storage, freed)
        self._bytes += nbytes

    def _storages(self, value: object) -> dict[int, torch.UntypedStorage]:
        storages = [
            part.untyped_storage()
            for leaf in tree_leaves(value)
            if isinstance(leaf, Tensor) and not isinstance(leaf, zshard.param.Sharded)
            for part in _parts(leaf)
        ]
        return {storage._cdata: storage for storage in storages}


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor]


def peak_of(step: Callable[[], None]) -> int:
    """The most bytes that the third of three steps has alive at once."""
    step()
    step()
    gc.collect()
    with LiveBytes() as live:
        step()
    return live.peak
