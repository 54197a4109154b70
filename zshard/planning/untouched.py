"""A model that is as it was after code has run on it."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CONTAINERS = (dict, OrderedDict, list, set, deque)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo at the end what the code inside does to the attributes of modules.

    That is parameters, their gradients, buffers, hooks and whatever else they hold, and the items
    of their lists, dicts and sets; not the values of tensors, nor what objects hold that are no
    modules.
    """
    gradients = [(param, param.grad) for param in model.parameters()]
    attributes = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    containers: dict[int, tuple[Any, Any]] = {}
    for _, before in attributes:
        for value in before.values():
            if type(value) in _CONTAINERS:
                containers[id(value)] = value, copy.copy(value)
    try:
        yield
    finally:
        for held, before in (*attributes, *containers.values()):
            held.clear()
            if isinstance(held, (list, deque)):
                held.extend(before)
            else:
                held.update(before)
        for param, grad in gradients:
            if param.grad is not grad:
                param.grad = grad
