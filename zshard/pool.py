"""The memory of gathered units and of reductions: owned here, allocated once, reused for ever.

[Note: a unit keeps its slot]
Autograd holds views of a unit's full buffer from forward to backward, so a unit must be gathered
into the same memory again. A unit therefore keeps the slot that it was given first, its home. With
1 + prefetch slots handed out in turn, neighbours in the order of execution never share one, and
the next unit's gather never waits for the running one. The root, which is gathered for as long
as any other unit is, has a slot of its own. Only a unit that finds its home in use (a
unit inside another, an order that changed) moves to another slot, which outdates the views that a
graph may hold; see [Note: the version counter guards a gathered buffer].

[Note: what the C library keeps]
A unit's gradients are autograd's, and are freed together once they are packed. glibc then returns
the end of its heap to the kernel, if it is more than twice the largest block that was ever mapped
by itself and freed; the next unit's gradients fault it in again, page by page. One such block of a
unit's size, never touched, is enough for glibc to keep as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from .unit import Unit


# glibc learns nothing from blocks above 32 MiB, its own header and rounding included.
_LARGEST_LESSON = (32 << 20) - (64 << 10)


def keep_freed(nbytes: int) -> None:
    """Have freed memory of this size stay with the process, for the next gradients (CPU)."""
    torch.empty(min(nbytes, _LARGEST_LESSON), dtype=torch.uint8)  # and freed at once


def aligned(nbytes: int) -> int:
    """Flats of one slot begin where torch's allocators would put them, at 64 bytes."""
    return -(-nbytes // 64) * 64


class Slot:
    """Memory for one full buffer."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # it outlives a first use there
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.owner: Unit | None = None


class Pool:
    """The slots of a model's full buffers, and the two buffers of the reduction in flight.

    Args:
        slots: how many there are besides the root's in steady state, 1 + prefetch.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device, self._regular = device, slots
        self._slot_bytes = self._root_bytes = 0
        self.root_slot: Slot | None = None
        self.slots: list[Slot] = []
        self._next = 0
        self.allocations = 0
        self.peak_live = 0
        self._discard: torch.Tensor | None = None
        self._scratch: dict[str, torch.Tensor] = {}
        self._scratch_bytes: dict[str, int] = {}

    def reserve(self, full_bytes: Sequence[int]) -> None:
        """Size the slots for units of these many bytes, the root first; allocate nothing yet."""
        self._root_bytes = full_bytes[0]
        self._slot_bytes = max(full_bytes[1:], default=0)
        self._regular = min(self._regular, len(full_bytes) - 1)

    def own_slot(self) -> Slot:
        """The root's slot."""
        if self.root_slot is None:
            self.allocations += 1
            self.root_slot = Slot(self._root_bytes, self._device)
        return self.root_slot

    @property
    def live(self) -> int:
        """Slots that hold a unit now, the root's not counted."""
        return sum(slot.owner is not None for slot in self.slots)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots, the root's too, and of what takes the place of one to discard."""
        slots = [*self.slots, *([self.root_slot] if self.root_slot else [])]
        discard = 0 if self._discard is None else self._discard.numel()
        return discard + sum(slot.memory.numel() for slot in slots)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the reduce buffers."""
        return sum(memory.numel() for memory in self._scratch.values())

    def free_slot(self, *, grow: bool) -> Slot | None:
        """The next free slot in turn; a new one where none is free and ``grow`` allows it."""
        while len(self.slots) < self._regular:
            self.slots.append(self._new_slot())
        count = len(self.slots)
        for step in range(count):
            slot = self.slots[(self._next + step) % count]
            if slot.owner is None:
                self._next = (self._next + step + 1) % count
                return slot
        if not grow:
            return None
        self.slots.append(self._new_slot())
        return self.slots[-1]

    def take(self, slot: Slot, unit: Unit) -> None:
        """Give ``slot`` to ``unit``."""
        slot.owner = unit
        self.peak_live = max(self.peak_live, self.live)

    def discard(self, nbytes: int) -> torch.Tensor:
        """Memory for a gather that only other ranks need, (nbytes,) uint8; made if there is one."""
        if self._discard is None or self._discard.numel() < nbytes:
            self.allocations += 1
            size = max(nbytes, self._slot_bytes)
            with torch.inference_mode(False):  # it outlives a first use there
                self._discard = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._discard[:nbytes]

    def reserve_scratch(self, *, packed: int, chunks: int) -> None:
        """Size the two reduce buffers, in bytes; what is allocated already stays if it fits."""
        self._scratch_bytes = {"packed": packed, "chunks": chunks}
        for name, memory in list(self._scratch.items()):
            if memory.numel() < self._scratch_bytes[name]:
                del self._scratch[name]

    def scratch(self, name: Literal["packed", "chunks"], nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` of a reduce buffer, (nbytes,) uint8."""
        if name not in self._scratch:
            self.allocations += 1
            size = self._scratch_bytes[name]
            self._scratch[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._scratch[name][:nbytes]

    def _new_slot(self) -> Slot:
        self.allocations += 1
        return Slot(self._slot_bytes, self._device)
