"""Leaves: what modules hold as parameters while their unit is gathered, views of the full buffer.

Between, the memory of a leaf holds another unit. Autograd keeps leaves, and so may a user; what
autograd does is guarded by version counters, and what a user does by the leaf's class: while the
unit is not gathered the class is one whose every operation on values is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

from ..errors import ShardedAccessError

# What is true of a leaf dead or alive. torch.utils.checkpoint compares it, of frozen weights too.
_TRUE_OF_THE_DEAD = {
    torch.Tensor.size,
    torch.Tensor.stride,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "requires_grad")
    ),
}


class LiveLeaf(Parameter):
    """A whole parameter while its unit is gathered."""

    # Torch's functions as they are.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        """The values without autograd, under the version counter that tells of a change in place.

        torch's would have one of its own, and what is written through it would be lost unnoticed.
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


class DeadLeaf(Parameter):
    """A whole parameter whose unit is not gathered."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _TRUE_OF_THE_DEAD:
            with as_autograd_sees():
                return func(*args, **(kwargs or {}))
        raise ShardedAccessError(
            "a whole parameter was kept from inside a forward or backward and used after its unit "
            "was resharded, so its memory holds something else now. Copy what is needed (clone) "
            "while the unit computes, or read it with zshard.full_param(model, name)."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return "zshard: a whole parameter whose unit is not gathered"


def set_alive(leaves: Sequence[Parameter], alive: bool) -> None:
    """Say whether the memory of ``leaves`` holds their values."""
    kind = LiveLeaf if alive else DeadLeaf
    for leaf in leaves:
        leaf.__class__ = kind


def as_autograd_sees() -> Any:
    """A context in which dead leaves are like others, for their gradients."""
    return torch._C.DisableTorchFunctionSubclass()
