"""Persistent buffers, such as BatchNorm's statistics: every rank has those of the first, as in DDP.

They stay whole. Before a forward, or as whole parameters are lent, they are broadcast if any rank
has changed one since the last time, or may have: a module that trains may write to floating-point
ones unnoticed (``.data``, batch_norm), so those of up to 1 MiB are taken to have changed. (DDP
broadcasts before every forward, and caches that are no part of the state too.)
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.weak import WeakIdRef

from ..comm import Comm
from ..errors import MismatchError
from ..tag import Tag
from ..unitmap import persistent_buffers

_SMALL = 1 << 20  # bytes

_State = tuple[WeakIdRef, int]  # a buffer and its version


class ModuleBuffers:
    """The persistent buffers of a model.

    Args:
        units: modules whose forward may begin by itself, with their names; that of all is "".
    """

    def __init__(self, units: Iterable[tuple[str, nn.Module]], comm: Comm) -> None:
        self._comm = comm
        # Of each, all: a module may get its first buffer later.
        self._modules = {unit: list(top.named_modules(prefix=unit)) for unit, top in units}
        # Those with buffers that a forward since the last broadcast may have written to unnoticed;
        # and of all, what their buffers were then. (Several units may have one of them.)
        self._trained: set[nn.Module] = set()
        self._seen: dict[nn.Module, list[_State]] = {}

    def ask(self, within: str) -> bool:
        """Whether a buffer was, or may have been, written or replaced since the last ``broadcast``.

        Args:
            within: the unit whose forward begins, by name.
        """
        if self._comm.world_size == 1:
            return False
        modules = [module for _, module in self._with_buffers(within)]
        self._trained.update(module for module in modules if _trains(module))
        return any(
            module in self._trained or _states(module) != self._seen.get(module, [])
            for module in modules
        )

    @torch.no_grad()
    def broadcast(self, step: int, within: str = "") -> None:
        """Take the values of the first rank.

        Args:
            step: of training, for errors.
            within: the unit whose buffers are meant, by name; "" is the whole model.

        Raises:
            MismatchError: on every rank, if the buffers differ in name, shape or dtype.
        """
        tag = Tag(step, "broadcast", "root", "buffers")
        modules = self._with_buffers(within)
        # By name, as ranks may have registered them in different orders.
        named = sorted(persistent_buffers(modules), key=lambda item: item[0])
        self._require_alike([f"{name} {tuple(b.shape)} {b.dtype}" for name, b in named], tag)
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
        self._trained.difference_update(module for _, module in modules if not _trains(module))
        self._seen.update((module, _states(module)) for _, module in modules)

    def _require_alike(self, own: list[str], tag: Tag) -> None:
        """Make sure that all ranks have buffers of which they say the same.

        Args:
            own: this rank's, a name with shape and dtype each.
        """
        digests = self._comm.all_gather_words([zlib.crc32("\n".join(own).encode())], tag)
        if digests.count(digests[0]) == len(digests):
            return
        everyone = self._comm.all_gather_object(own, tag)
        facts: list[set[str]] = [set(each) for each in everyone]  # type: ignore[call-overload]
        differing = sorted(set[str]().union(*facts) - facts[0].intersection(*facts))
        found = [
            f"{each} on {self._comm.names(at for at, its in enumerate(facts) if each in its)}"
            for each in differing[:4]
        ]
        raise MismatchError(
            f"persistent buffers differ between ranks: {', '.join(found)}. They are part of the "
            "model's state and the same on every rank; register what depends on a rank's batch "
            "with persistent=False."
        )

    def _with_buffers(self, within: str) -> list[tuple[str, nn.Module]]:
        """Those that have any, or had: a rank may have lost its own."""
        everyone = self._modules[within]
        return [(name, each) for name, each in everyone if each._buffers or each in self._seen]


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


def _write(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` into ``buffer``, which may be expanded: then once for what it repeats."""
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dim] > 1:
            buffer, values = buffer.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    buffer.copy_(values)
