"""Bytes of memory that a piece of a program moves, op by op: a count, without a clock.

[Note: how bytes are counted]
An op reads each of its inputs once, and writes each of its outputs once: the fewest bytes it can
move. What it writes in place it has read as well, but for the ops of ``_ONLY_WRITTEN``. Views move
nothing. Matrix products, convolutions and attention are left out (they compute), and so are
collectives, and what the caller brackets with ``Traffic.leaving_out``. A kernel that passes twice
over its input, or a cache that saves a pass, is not seen; that holds for both sides of a ratio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import zip_longest
from typing import cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

# op -> the arguments that it writes without reading them, besides "out"
_ONLY_WRITTEN = {
    "aten::copy_": ("self",),
    "aten::fill_": ("self",),
    "aten::zero_": ("self",),
    "aten::_foreach_copy_": ("self",),
    "aten::_foreach_zero_": ("self",),
    "zshard::unpack_": ("targets",),
    "zshard::gather_cast_": ("full",),
    "zshard::split_master_": ("hi", "lo"),
    "zshard::adamw_": ("sends",),
    "zshard::sgd_": ("sends",),
}
_COMPUTES = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Traffic(TorchDispatchMode):
    """Counts, while it is entered, what is moved; see [Note: how bytes are counted]."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Counter[str] = Counter()  # op, as "aten::copy_" -> bytes
        self.written: Counter[str] = Counter()
        self._left_out = 0

    @contextmanager
    def leaving_out(self, owner: object, names: Sequence[str]) -> Iterator[None]:
        """Do not count what happens inside ``owner``'s functions ``names``."""
        plain = {name: getattr(owner, name) for name in names}

        def silent(function: Callable[..., object]) -> Callable[..., object]:
            @wraps(function)
            def call(*args: object, **kwargs: object) -> object:
                self._left_out += 1
                try:
                    return function(*args, **kwargs)
                finally:
                    self._left_out -= 1

            return call

        for name, function in plain.items():
            setattr(owner, name, silent(function))
        try:
            yield
        finally:
            for name, function in plain.items():
                setattr(owner, name, function)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass(leaf) for leaf in tree_leaves((args, kwargs))):
            return NotImplemented  # a DTensor: its local op comes here in its turn
        out = func(*args, **kwargs)
        if not self._left_out:
            self._count(func._schema, args, kwargs, out)
        return out

    def _count(
        self,
        schema: torch._C.FunctionSchema,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        out: object,
    ) -> None:
        namespace, _, short = schema.name.partition("::")
        if namespace in _COLLECTIVES or short in _COMPUTES or "attention" in short:
            return
        values = {
            argument.name: kwargs.get(argument.name, value)
            for argument, value in zip_longest(schema.arguments, args)
        }
        marked = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        inputs = {t.untyped_storage().data_ptr() for v in values.values() for t in _tensors(v)}
        fresh = [t for t in _tensors(out) if t.untyped_storage().data_ptr() not in inputs]
        if short in _EMPTY or not (marked or fresh):
            return
        unread, unwritten = _exceptions(schema.name, values)
        for name, value in values.items():
            moved = sum(map(_bytes, _tensors(value)))
            if name not in unread:
                self.read[schema.name] += moved
            if name in marked and name not in unwritten:
                self.written[schema.name] += moved
        if not marked:
            self.written[schema.name] += sum(map(_bytes, fresh))


def _exceptions(op: str, values: dict[str, object]) -> tuple[list[str], list[str]]:
    """Arguments that ``op`` does not read, and those marked as written that it only reads."""
    unread, unwritten = ["out", *_ONLY_WRITTEN.get(op, ())], []
    if op == "aten::_fused_adamw_" and values["grad_scale"] is None:
        unwritten = ["grads"]  # marked for the sake of that scale
    if op in ("zshard::reduce_", "zshard::reduce_peers_") and not values["accumulate"]:
        unread.append("acc")
        if _lies_in(values.get("chunks"), values["acc"]):
            unwritten = ["acc"]  # measured where it lies
    return unread, unwritten


def _lies_in(rows: object, acc: object) -> bool:
    both = isinstance(rows, Tensor) and isinstance(acc, Tensor)
    return both and cast("Tensor", rows).data_ptr() == cast("Tensor", acc).data_ptr()


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Of its different elements: what an expanded tensor repeats is moved once."""
    shape = (n if stride else 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.Size(shape).numel() * tensor.element_size()
