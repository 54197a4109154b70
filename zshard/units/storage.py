"""Which memory a tensor lies in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..param import Sharded


def shares(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether the two lie in one storage."""
    return storage_of(tensor) == storage_of(memory)


def storage_of(tensor: torch.Tensor) -> int:
    """A key of the storage that the tensor lies in, also where it has no address (meta)."""
    return int(tensor.untyped_storage()._cdata)


def memory_of(sharded: Sharded) -> tuple[object, ...]:
    """Which memory it is, alike for its aliases; on a rank that has no element of it, too."""
    local = sharded._local
    return sharded.flat, sharded.segment, None if local is None else storage_of(local)
