"""Around the calls of a user's ``init_fn``: what it writes is watched, what it draws is common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..comm import Comm
from ..errors import InputError
from ..param import Sharded
from ..sharded.operators import operator
from ..tag import Tag
from ..units.storage import storage_of


class Guard(TorchDispatchMode):
    """Sees what ``init_fn`` writes: ticks it off, and refuses what belongs to other units.

    Args:
        meta: the tensors that have no memory yet, by name.
    """

    def __init__(self, meta: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meta: dict[int, str] = {}
        for name, tensor in meta.items():
            self._meta.setdefault(storage_of(tensor), name)
        # Weak references, so that another storage cannot come to have the same key.
        self._unwritten: dict[int, StorageWeakRef] = {}

    def expect(self, tensor: torch.Tensor, fresh: torch.Tensor) -> str:
        """``tensor`` gets the memory of ``fresh``, which is to be written; returns its name."""
        held = StorageWeakRef(fresh.untyped_storage())  # type: ignore[no-untyped-call]
        self._unwritten[storage_of(fresh)] = held
        return self._meta.pop(storage_of(tensor), "a tensor")

    def check_written(self, name: str, tensor: torch.Tensor) -> None:
        """Raise InputError if nothing has written to the memory of ``tensor``."""
        if tensor.numel() > 0 and storage_of(tensor) in self._unwritten:
            raise InputError(
                f"init_fn wrote nothing to {name}, whose memory is uninitialised. It has to write "
                "every parameter and buffer of the module that it is called with, by torch "
                "operations; zeros where the values come later."
            )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        op = operator(func)
        if not op.mutable:
            return func(*args, **kwargs)
        for tensor in tree_leaves((args, kwargs)):
            if (elsewhere := self._elsewhere(tensor)) is not None:
                raise InputError(
                    f"{op.name} in init_fn uses {elsewhere}, which is not whole now: it is of "
                    "another unit than the module that init_fn was called with. Use what that "
                    "module owns, or make the two one unit (zshard.wrap(units=...))."
                )
        result = func(*args, **kwargs)
        for position, name in op.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self._unwritten.pop(storage_of(tensor), None)
        return result

    def _elsewhere(self, value: object) -> str | None:
        """The name of a parameter or buffer of a unit that is sharded, or not there yet."""
        if isinstance(value, Sharded):
            return value.fqn
        if isinstance(value, torch.Tensor) and value.is_meta:
            return self._meta.get(storage_of(value))
        return None


class RandomNumbers:
    """Rank 0's random numbers on every rank, and afterwards again each rank's own."""

    def __init__(self, device: torch.device, comm: Comm) -> None:
        self._device = device
        everyone = comm.all_gather_object(self._get(), Tag(None, "wrap"))
        self._next: list[torch.Tensor] = everyone[0]  # type: ignore[assignment]

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Go on with the common numbers where the last such context ended."""
        own = self._get()
        self._set(self._next)
        try:
            yield
        finally:
            self._next = self._get()
            self._set(own)

    def _get(self) -> list[torch.Tensor]:
        on_device = self._device.type == "cuda"
        return [
            torch.get_rng_state(),
            *([torch.cuda.get_rng_state(self._device)] if on_device else []),
        ]

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, self._device)
