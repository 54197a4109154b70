"""Which memory a tensor lies in."""

from __future__ import annotations

import torch


def shares(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether the two lie in one storage."""
    return storage_of(tensor) == storage_of(memory)


def storage_of(tensor: torch.Tensor) -> int:
    """A key of the storage that the tensor lies in, also where it has no address (meta)."""
    return int(tensor.untyped_storage()._cdata)
