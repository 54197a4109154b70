"""A model that is as it was after code has run on it."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo at the end what the code inside does to the attributes of modules.

    That is parameters, their gradients, buffers, hooks and whatever else they hold, and the items
    of their lists, dicts and sets, and of those in these; not the values of tensors, nor what
    objects hold that are no modules.
    """
    gradients = [(param, param.grad) for param in model.parameters()]
    containers = _with_copies(module.__dict__ for module in model.modules())
    # TorchScript keeps tensors out of __dict__, behind views that cannot be cleared.
    scripted: list[tuple[Any, dict[str, Any]]] = [
        (held, dict(held.items()))
        for module in model.modules()
        if isinstance(module, torch.jit.ScriptModule)
        for held in (module._parameters, module._buffers)
    ]
    try:
        yield
    finally:
        for view, tensors in scripted:
            for name, tensor in tensors.items():
                view[name] = tensor
        for held, before in containers:
            held.clear()
            if isinstance(held, (list, deque)):
                held.extend(before)
            else:
                held.update(before)
        for param, grad in gradients:
            if param.grad is not grad:
                param.grad = grad


def _with_copies(values: Iterable[object]) -> list[tuple[Any, Any]]:
    """The lists, dicts and sets among ``values``, and inside them, each with a copy of it."""
    found: dict[int, tuple[Any, Any]] = {}
    due = [*values]
    while due:
        value: Any = due.pop()
        changes = type(value) in _CONTAINERS
        if id(value) not in found and (changes or isinstance(value, tuple)):
            found[id(value)] = value, copy.copy(value) if changes else None
            due += value.values() if isinstance(value, dict) else value
    return [(held, before) for held, before in found.values() if before is not None]
