"""The structure of a model, and tensors inside the structures that modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_map

from .errors import WrapError


class Structure:
    """The modules of a model as they were when it was wrapped."""

    def __init__(self, model: nn.Module) -> None:
        # Every module with its name, its children, and the number of its parameters.
        self._built = [
            (name, module, list(module._modules.values()), len(module._parameters))
            for name, module in model.named_modules()
        ]

    def check_unchanged(self) -> None:
        """Make sure that nothing was added, removed or put in another's place.

        Raises:
            WrapError: with the module that has changed.
        """
        for name, module, children, count in self._built:
            if list(module._modules.values()) != children or len(module._parameters) != count:
                raise WrapError(
                    f"{type(module).__name__} {name or 'root'!r} has other modules or parameters "
                    "than when it was wrapped; those would not be trained together. Change the "
                    "model before zshard.wrap."
                )


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: object) -> object:
    """``value`` with ``function`` applied to every tensor in its containers and dataclasses."""

    def leaf(item: object) -> object:
        if isinstance(item, torch.Tensor):
            return function(item)
        if not dataclasses.is_dataclass(item) or isinstance(item, type):
            return item
        fields = [f.name for f in dataclasses.fields(item) if hasattr(item, f.name)]
        before = {name: getattr(item, name) for name in fields}
        after = {name: map_tensors(function, held) for name, held in before.items()}
        if all(after[name] is held for name, held in before.items()):
            return item
        mapped = copy.copy(item)
        for name, held in after.items():
            object.__setattr__(mapped, name, held)  # a frozen dataclass refuses setattr
        return mapped

    return tree_map(leaf, value)


def cast_floating(value: object, dtype: torch.dtype) -> object:
    """``value`` with every floating-point tensor in its containers as ``dtype``."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in ``value``, in order: in containers, dataclasses, and attributes of objects."""
    return _tensors_in(value, set())


def _tensors_in(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, (str, int, float, bool, torch.nn.Module, type)):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        items: Iterable[object] = value.values()
    elif isinstance(value, (list, tuple, set)):
        items = value
    elif dataclasses.is_dataclass(value):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        items = list(getattr(value, "__dict__", {}).values())
    for item in items:
        yield from _tensors_in(item, seen)
