"""Tensors inside the structures that modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.utils._pytree import tree_map_only


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: object) -> object:
    """``value`` with ``function`` applied to every tensor in its containers."""
    return tree_map_only(torch.Tensor, function, value)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in (nested) mappings, lists, tuples and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
