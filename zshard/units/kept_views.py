"""Views of whole weights that somebody keeps beyond the forward or backward they were made in.

[Note: kept views]
Whoever keeps a whole parameter too long finds it dead; see leaf.py. A view of one
(``weight.detach()``, ``weight[0]``) is an ordinary tensor, and nobody could refuse that it is read
once its memory holds another unit. But torch counts the tensors that lie in a memory. In a slot
they are ours, views that a graph has saved, and what somebody keeps. After a backward, which has
freed its graph, and after a forward that made none, only the last is left beside ours, or there is
yet another graph. So if there are more than ours, the garbage collector is asked for them and for
who holds them. It names no holder of what is in a graph alone; nor of what numpy holds.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .storage import storage_of

if TYPE_CHECKING:
    from ..unit import Unit
    from .flat import Flat
    from .pool import Pool, Slot

_NAMED = 3  # of a list of names, so many are given


class KeptViews:
    """What lies in the slots of a model's ``units``, and is not ours."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], pool: Pool) -> None:
        self._model, self._units, self._pool = model, units, pool
        self._lying: dict[Slot, int] = {}  # tensors in a slot, as of the last time
        self._sought: dict[Slot, int] = {}  # how many were not ours, as they were sought last

    def warn(self) -> None:
        """Warn of views in the slots that somebody keeps, where there are more than before.

        To be called where the graph of the last forward is gone.
        """
        for slot in self._pool.all_slots:
            lying = slot.lying
            if lying != self._lying.get(slot):
                self._lying[slot] = lying
                self._warn_of(slot, lying)

    def _warn_of(self, slot: Slot, lying: int) -> None:
        flats = [flat for unit in self._units if unit.attached is slot for flat in unit.flats]
        foreign = lying - sum(flat.full.aliases for flat in flats)
        # To look through all objects takes some tenths of a second. Where graphs are kept, and ever
        # more of them, it is done a few times only.
        if foreign <= 2 * self._sought.get(slot, 0):
            return
        self._sought[slot] = foreign
        # What else there is in the process is neither asked nor shown to anybody.
        with torch._C.DisableTorchFunction():
            views = _views_in(slot, flats)
            named = [
                f"{tuple(view.shape)} of {_some(_parameters(view, flats), ' or ')} in {_some(held)}"
                for view, held in zip(views, self._holders(views), strict=True)
                if held
            ]
        if named:
            warnings.warn(
                "zshard: views of whole weights are kept beyond the forward and backward of their "
                f"unit, {_some(named)}. Their memory takes other values next, of another unit "
                "or later ones. Keep a copy (clone), or read the weight with "
                "zshard.full_param(model, name).",
                stacklevel=2,
            )

    def _holders(self, views: list[torch.Tensor]) -> list[list[str]]:
        """What holds each of ``views``, as far as the garbage collector knows."""
        names: dict[int, list[str]] = {id(view): [] for view in views}
        modules = {}
        for name, module in self._model.named_modules():
            modules[id(module)] = modules[id(vars(module))] = name, module
        passing = _passing_holders()
        for holder in gc.get_referrers(*views):
            if id(holder) in modules:
                name, module = modules[id(holder)]
                for key, held in vars(module).items():
                    if id(held) in names:
                        names[id(held)].append(f"attribute {f'{name}.{key}'.lstrip('.')!r}")
            elif holder is not views and id(holder) not in passing:
                for held in gc.get_referents(holder):
                    if id(held) in names:
                        names[id(held)].append(f"a {type(holder).__name__}")
        return list(names.values())


def _views_in(slot: Slot, flats: Sequence[Flat]) -> list[torch.Tensor]:
    """The Python tensors in the memory of ``slot`` that are not ours; ``flats`` lie there."""
    own = {id(slot.memory)}
    for flat in flats:
        own.update(map(id, (flat.full.base, flat.full.recv, *flat.full.leaves)))
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor) and id(thing) not in own and _lies_in(slot, thing)
    ]


def _passing_holders() -> set[int]:
    """The ids of what holds things only as long as a graph, or a call, is there.

    These are the contexts of functions of autograd, with the lists and objects there; weak
    dictionaries, in which checkpointing has what it has recomputed; and frames, which may be ours.
    """
    ids = set()
    for thing in gc.get_objects():
        kind = type(thing)
        if kind is FrameType:
            ids.add(id(thing))
        elif kind is WeakKeyDictionary or issubclass(kind, torch._C._FunctionBase):
            own = getattr(thing, "__dict__", {})
            held = list(own.values())
            ids.update(map(id, (thing, own, *held, *gc.get_referents(*held))))
    return ids


def _lies_in(slot: Slot, tensor: torch.Tensor) -> bool:
    try:  # not by what its class has made of untyped_storage
        storage = torch.Tensor.untyped_storage(tensor)
    except RuntimeError:  # without a storage of its own
        return False
    return int(storage._cdata) == storage_of(slot.memory)


def _parameters(view: torch.Tensor, flats: Sequence[Flat]) -> list[str]:
    """The parameters of ``flats``, which lie in one slot, of which ``view`` may be one."""
    names = []
    for flat in flats:
        base = flat.full.base
        assert base is not None
        start = (view.data_ptr() - base.data_ptr()) // base.itemsize
        for index, segment in enumerate(flat.layout.segments):
            if view._base is flat.full.leaves[index]:
                return [repr(flat.names[index])]
            if segment.offset <= start < segment.offset + segment.numel:
                names.append(repr(flat.names[index]))
    return names or ["a parameter"]


def _some(names: Sequence[str], between: str = ", ") -> str:
    """The first of ``names``."""
    more = ["..."] if len(names) > _NAMED else []
    return between.join([*names[:_NAMED], *more])
