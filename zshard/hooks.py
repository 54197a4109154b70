"""Hooks: zshard's own on modules, and the users' on parameters.

Those on parameters are kept here, since autograd never sees a sharded one. A parameter's hooks from
before zshard.wrap are taken over with the very dictionaries that torch made, so that handles given
out then still remove them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode
from torch.utils.hooks import RemovableHandle

from .errors import ShardedAccessError

GradHook = Callable[[torch.Tensor], torch.Tensor | None]
ParamHook = Callable[[torch.Tensor], None]
_Hook = TypeVar("_Hook", GradHook, ParamHook)


class ModuleHook:
    """A hook of a wrapped module, which thereby can neither be pickled nor copied."""

    def __init__(self, function: Callable[..., object]) -> None:
        _have_dynamo_skip_calls()
        self._function = function

    def __call__(self, *args: object) -> Any:
        """Call the function."""
        if not torch._C._len_torch_dispatch_stack():  # as nearly always
            return self._function(*args)
        with _outside_selective_checkpoints():
            return self._function(*args)

    def __reduce__(self) -> NoReturn:
        raise ShardedAccessError(
            "a wrapped model can neither be pickled nor copied: its parameters are shards of flat "
            "buffers. Take whole tensors inside zshard.full_params(model), or copy the plain model "
            "before zshard.wrap. (For an average of the weights wrap two copies, and update one by "
            "ema.lerp_(param, weight), parameter by parameter, under torch.no_grad().)"
        )


@contextmanager
def _outside_selective_checkpoints() -> Iterator[None]:
    """Hide what we do from the selective checkpoints (of torch.utils.checkpoint) that are around.

    They count a region's operations, and give back the saved results of those whose turn it is, in
    place of running them. But we gather in other places when a region is recomputed.
    """
    modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    selective = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
    others = [mode for mode in reversed(modes) if not isinstance(mode, selective)]
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)


@cache
def _have_dynamo_skip_calls() -> None:
    """Have torch.compile break its graph at module hooks: communication is not for it to trace.

    Nor the call of one, of which each module's arguments would make another graph. Not earlier: it
    imports Dynamo, which takes a second.
    """
    skipped = torch.compiler.disable(ModuleHook.__call__)  # type: ignore[no-untyped-call]
    ModuleHook.__call__ = skipped  # type: ignore[method-assign]


_OF_THREAD = threading.local()


def have_dynamo_look_at_hooks() -> None:
    """Have Dynamo look, in this thread, whether modules have the hooks that a graph was made with.

    Units are graphs of their own, of which blocks alike share one. By Dynamo's default a hook
    inside one of them would be lost; its settings are a thread's own.
    """
    if not hasattr(_OF_THREAD, "looks"):
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        _OF_THREAD.looks = True


class Hooks(Generic[_Hook]):
    """Hooks of one kind, in the order of registration."""

    def __init__(self, taken_over: dict[int, _Hook] | None) -> None:
        self._hooks: dict[int, _Hook] = OrderedDict() if taken_over is None else taken_over

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, hook: _Hook) -> RemovableHandle:
        """Register ``hook``; the handle removes it."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def in_order(self) -> list[_Hook]:
        """The hooks to be called now; one may remove itself meanwhile."""
        return list(self._hooks.values())


class ParamHooks:
    """The hooks of one parameter.

    Attributes:
        on_grad: get this rank's whole gradient, and may return another.
        after_reduction: get the parameter, once its reduced gradient is there.
    """

    def __init__(self, param: torch.Tensor) -> None:
        self.on_grad: Hooks[GradHook] = Hooks(param._backward_hooks)
        self.after_reduction: Hooks[ParamHook] = Hooks(
            getattr(param, "_post_accumulate_grad_hooks", None)
        )

    def change(self, grad: torch.Tensor) -> torch.Tensor:
        """What the hooks make of ``grad``."""
        for hook in self.on_grad.in_order():
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad
