"""Persistent buffers, such as BatchNorm's statistics: every rank has those of the first, as in DDP.

They stay whole. Before a forward they are broadcast if any rank has changed one since the last, or
may have: a module that trains may write to floating-point ones unnoticed (``.data``, batch_norm),
so those of up to 1 MiB are taken to have changed. (DDP broadcasts before every forward, and caches
that are no part of the state too.)
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils.weak import WeakIdRef

from ..comm import Comm
from ..errors import MismatchError
from ..structure import is_within
from ..tag import Tag

_SMALL = 1 << 20  # bytes

_State = tuple[WeakIdRef, int]  # a buffer and its version


class ModuleBuffers:
    """The persistent buffers of ``model``."""

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self._comm = comm
        # Modules may put other tensors in place of their buffers, but seldom get their first later.
        self._modules = [(n, m) for n, m in model.named_modules() if m._buffers]
        # Names of those with buffers that a forward since the last broadcast may have written to
        # unnoticed; and of all, what their buffers were then.
        self._trained: set[str] = set()
        self._seen: dict[str, list[_State]] = {}

    def _within(self, module: str) -> list[tuple[str, nn.Module]]:
        """The modules with buffers that lie in ``module``, a name; "" is the whole model."""
        return [each for each in self._modules if is_within(module, each[0])]

    def ask(self, within: str) -> bool:
        """Whether a buffer was, or may have been, written or replaced since the last ``broadcast``.

        Args:
            within: the module whose forward begins, by name.
        """
        if self._comm.world_size == 1:
            return False
        modules = self._within(within)
        self._trained.update(name for name, module in modules if _trains(module))
        return any(
            name in self._trained or _states(module) != self._seen.get(name, [])
            for name, module in modules
        )

    @torch.no_grad()
    def broadcast(self, step: int, within: str = "") -> None:
        """Take the values of the first rank.

        Args:
            step: of training, for errors.
            within: the module whose buffers are meant, by name; "" is the whole model.

        Raises:
            MismatchError: on every rank, if the buffers differ in name, shape or dtype.
        """
        tag = Tag(step, "broadcast", "root", "buffers")
        modules = self._within(within)
        # By name, as ranks may have registered them in different orders.
        named = sorted(persistent_buffers(modules), key=lambda item: item[0])
        own = [f"{name} {tuple(b.shape)} {b.dtype}" for name, b in named]
        digests = self._comm.all_gather_words([zlib.crc32("\n".join(own).encode())], tag)
        if digests.count(digests[0]) < len(digests):
            everyone = self._comm.all_gather_object(own, tag)
            facts: list[set[str]] = [set(each) for each in everyone]  # type: ignore[call-overload]
            differing = sorted(set[str]().union(*facts) - facts[0].intersection(*facts))
            raise MismatchError(
                f"persistent buffers differ between ranks: {', '.join(differing[:4])}. They are "
                "part of the model's state and the same on every rank; register what depends on a "
                "rank's batch with persistent=False."
            )
        alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for _, buffer in named:
            if buffer.numel() > 0:
                alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        for buffers in alike.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self._comm.broadcast(flat.view(torch.uint8), tag)
            begin = 0
            for buffer in buffers:
                end = begin + buffer.numel()
                # Not under autograd's eyes: a forward before may have saved the buffer.
                _write(buffer.data, flat[begin:end].view(buffer.shape))
                begin = end
        self._trained.difference_update(name for name, module in modules if not _trains(module))
        self._seen.update((name, _states(module)) for name, module in modules)


def _states(module: nn.Module) -> list[_State]:
    """What tells whether buffers that ``module`` itself has were written or replaced."""
    # By reference: another tensor may have the address of one that has gone. Tensors made in
    # inference mode have no version, and cannot be changed outside of it.
    buffers = [buffer for _, buffer in persistent_buffers([("", module)])]
    return [(WeakIdRef(b), 0 if b.is_inference() else b._version) for b in buffers]


def _trains(module: nn.Module) -> bool:
    """Whether a forward of ``module`` may write to its own buffers unnoticed."""
    found = persistent_buffers([("", module)] if module.training else [])
    return any(b.is_floating_point() and b.nbytes <= _SMALL for _, b in found)


def persistent_buffers(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that are part of the state, by name, of modules with their names."""
    for prefix, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _write(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` into ``buffer``, which may be expanded: then once for what it repeats."""
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dim] > 1:
            buffer, values = buffer.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    buffer.copy_(values)
