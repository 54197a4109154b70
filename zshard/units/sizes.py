"""How large a flat buffer is, by arithmetic: ``Flat``, which has memory, and a plan of one."""

from __future__ import annotations

from ..layout import Layout, Range
from ..precision import Dtypes
from ..strategy import Strategy


class FlatSizes:
    """What layout, dtypes and strategy say of a flat buffer, with memory or without."""

    layout: Layout
    dtypes: Dtypes
    strategy: Strategy

    @property
    def needs_gather(self) -> bool:
        """Whether the whole takes an all-gather, of what each rank has a shard of."""
        return self.layout.world_size > 1 and self.layout.numel > 0 and not self.strategy.replicated

    @property
    def stays(self) -> bool:
        """Whether the full buffer stays in memory."""
        return self.strategy.resident or not self.needs_gather

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer."""
        return self.layout.numel * self.dtypes.compute.itemsize

    @property
    def packed_bytes(self) -> int:
        """Bytes of its gradients as they are packed."""
        return self.layout.numel * self.dtypes.reduce.itemsize

    def rows_bytes(self, rows: int) -> int:
        """Bytes of so many ranks' gradients of one shard."""
        return rows * self.layout.shard_size * self.dtypes.reduce.itemsize

    def owned_by(self, rank: int) -> Range:
        """The range that ``rank`` updates."""
        return self.layout.whole if self.strategy.replicated else self.layout.shard(rank)

    def grads_of(self, rank: int) -> Range:
        """The range that ``rank`` has memory for the gradients of."""
        return self.layout.whole if self.strategy.whole_grads else self.layout.shard(rank)
