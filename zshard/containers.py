"""Tensors inside the containers that modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

_MOST, _MOST_PLAIN = 10_000, 100_000  # that ``tensors_in`` looks at
_PLAIN = frozenset((type(None), str, int, float, bool, bytes))


def map_tensors(
    function: Callable[[torch.Tensor], torch.Tensor],
    value: object,
    made: dict[int, tuple[object, object]] | None = None,
) -> object:
    """``value`` with ``function`` applied to every tensor in its containers and dataclasses.

    A container in which that changes nothing stays itself, so that a module may write to it. One
    that is found in several places is looked at once.

    Args:
        made: by its id, what was met, and what was made of it: itself, while that is under way, as
            ``value`` may lead back to what it lies in.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in _PLAIN:
        return value
    made = {} if made is None else made
    if id(value) not in made:
        made[id(value)] = value, value
        made[id(value)] = value, _mapped(function, value, made)
    return made[id(value)][1]


def _mapped(
    function: Callable[[torch.Tensor], torch.Tensor],
    value: object,
    made: dict[int, tuple[object, object]],
) -> object:
    """What ``map_tensors`` makes of ``value``, which may be a container or a dataclass."""
    # Not by ``value``: torch's tree_flatten makes a cycle that holds this until it is collected.
    outermost = iter((True,))
    children, spec = tree_flatten(value, is_leaf=lambda _: not next(outermost, False))
    if not (len(children) == 1 and children[0] is value):
        mapped = [map_tensors(function, child, made) for child in children]
        same = all(after is before for after, before in zip(mapped, children, strict=True))
        return value if same else tree_unflatten(mapped, spec)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
    before = {name: getattr(value, name) for name in fields}
    after = {name: map_tensors(function, held, made) for name, held in before.items()}
    if all(after[name] is held for name, held in before.items()):
        return value
    copied = copy.copy(value)
    for name, held in after.items():
        object.__setattr__(copied, name, held)  # a frozen dataclass refuses setattr
    return copied


def cast_floating(value: object, dtype: torch.dtype | None) -> object:
    """``value`` with every floating-point tensor in its containers as ``dtype``; None: as it is."""
    if dtype is None:
        return value
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in ``value``: in containers, dataclasses, and attributes of objects.

    Breadth first, and no further than ``_MOST`` objects, or ``_MOST_PLAIN`` numbers and texts: an
    object may lead to anything, a vocabulary say.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    seen: dict[int, object] = {}  # which keeps what is made on the fly, and so its id
    due: deque[Iterable[object]] = deque(((value,),))
    others = plain = 0
    while due:
        for item in due.popleft():
            if isinstance(item, torch.Tensor):
                yield item
            elif type(item) in _PLAIN:
                plain += 1
                if plain > _MOST_PLAIN:
                    return
            else:
                others += 1
                if others > _MOST:
                    return
                if id(item) not in seen and not isinstance(item, (torch.nn.Module, type)):
                    seen[id(item)] = item
                    due.append(_items_of(item))


def _items_of(value: object) -> Iterable[object]:
    if isinstance(value, (tuple, list, set, frozenset, deque, ValuesView, ItemsView)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return [*getattr(value, "__dict__", {}).values(), *_slots_of(value)]


def _slots_of(value: object) -> list[object]:
    """What an object has in ``__slots__``."""
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    return [getattr(value, name, None) for name in names]
