"""Ranks that read each other's memory: what is common to those of CPUs and of GPUs."""

from __future__ import annotations

from typing import Generic

import torch

from .arena import Arena, W
from .groups import Ranks


class InMemoryRanks(Ranks, Generic[W]):
    """Ranks whose collectives read what the others lend; one object for each model.

    Attributes:
        arena: of what is lent. It goes with the model, and at once.
    """

    in_memory = True
    arena: Arena[W]

    def empty(self, numel: int, dtype: torch.dtype, *, whole: bool = False) -> torch.Tensor:
        """(numel,) that the other ranks can read. All ranks have to ask for the same."""
        window = self.arena.window(numel * dtype.itemsize)
        window.whole = whole
        return window.own.view(dtype)

    def find(self, lent: torch.Tensor) -> tuple[W, int]:
        """The window that ``lent`` lies in, and the byte of it that it starts at."""
        found = self.arena.find(lent)
        assert found is not None, "every buffer that is exchanged is made by `empty`"
        return found

    def give_back(self, lent: torch.Tensor) -> None:
        """Need ``lent`` no longer; others still may, and have it mapped themselves."""
        self.arena.give_back(lent)

    def settle(self) -> None:
        """See ``Arena``."""
        self.arena.settle()

    def leave(self) -> None:
        """Lend nothing any more; nobody reads."""
        self.arena.close()
