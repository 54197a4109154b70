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

from ..errors import ShardedAccessError, StateError
from ..training_state import inside_backward

# What is true of a leaf dead or alive. torch.utils.checkpoint compares it, of frozen weights too.
_TRUE_OF_THE_DEAD = {
    torch.Tensor.size,
    torch.Tensor.stride,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "requires_grad")
    ),
}


is_trained = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


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

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained; not to be changed now."""
        return bool(is_trained(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> LiveLeaf:
        """Refuse a change; between steps ``set_trained`` makes it."""
        if requires_grad != is_trained(self):
            raise StateError(
                "requires_grad of a parameter cannot change inside the forward or backward that "
                "uses it; change it between steps. After an exception out of a forward, call "
                "zshard.reset(model) first"
            )
        return self

    def detach_(self) -> torch.Tensor:
        """Refused likewise: torch's freezes it."""
        return self.requires_grad_(False)


class DeadLeaf(Parameter):
    """A whole parameter whose unit is not gathered, and whose memory may hold something else."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if cls._may_be_called(func):
            with as_autograd_sees():
                return func(*args, **(kwargs or {}))
        raise ShardedAccessError(
            "a whole parameter was kept from inside a forward or backward and used after its unit "
            "was resharded, so its memory holds something else now. Copy what is needed (clone) "
            "while the unit computes, or read it with zshard.full_param(model, name)."
        )

    @classmethod
    def _may_be_called(cls, func: Any) -> bool:
        return func in _TRUE_OF_THE_DEAD

    def __repr__(self) -> str:  # type: ignore[override]
        return "zshard: a whole parameter whose unit is not gathered"


class RestingLeaf(DeadLeaf, LiveLeaf):  # type: ignore[misc]
    """A whole parameter whose unit is not gathered, in memory that still holds its values.

    A backward may read them; see [Note: double backward] in double_backward.py.
    """

    @classmethod
    def _may_be_called(cls, func: Any) -> bool:
        return inside_backward() or super()._may_be_called(func)


def set_kind(leaves: Sequence[Parameter], kind: type[Parameter]) -> None:
    """Say whether the memory of ``leaves`` holds their values, by their class."""
    for leaf in leaves:
        leaf.__class__ = kind


def set_trained(leaf: Parameter, trained: bool) -> None:
    """Freeze or unfreeze ``leaf``."""
    torch.Tensor.requires_grad_(leaf, trained)


def as_autograd_sees() -> Any:
    """A context in which dead leaves are like others, for their gradients."""
    return torch._C.DisableTorchFunctionSubclass()
