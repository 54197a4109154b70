"""The memory of gathered units and of reductions: owned here, allocated once, reused for ever.

[Note: a unit keeps its slot]
Autograd holds views of a unit's full buffer from forward to backward, so a unit must be gathered
into the same memory again. A unit therefore keeps the slot that it was given first, its home. With
1 + prefetch slots handed out in turn, neighbours in the order of execution never share one, and
the next unit's gather never waits for the running one. The root, which is gathered for as long
as any other unit is, has a slot of its own. Only a unit that finds its home in use (a
unit inside another, an order that changed) moves to another slot, which outdates the views that a
graph may hold; see [Note: the version counter guards a gathered buffer].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from .ledger import Ledger

if TYPE_CHECKING:
    from ..unit import Unit


Scratch = Literal["packed", "chunks", "sum", "pieces"]  # a reduce buffer; see ``ReduceBuffers``


class Slot:
    """Memory for one full buffer."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # it outlives a first use there
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.owner: Unit | None = None
        self._alone = 0
        self._alone = self.lying

    @property
    def lying(self) -> int:
        """Tensors that lie in the memory, besides ``memory``; for [Note: kept views]."""
        storage = self.memory.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) - self._alone


class Pool:
    """The slots of a model's full buffers, and the buffers of the reductions in flight.

    Args:
        slots: how many there are besides the root's in steady state, 1 + prefetch.
        lend: makes memory that a collective takes from this rank.
        give_back: told of such memory that is needed no longer.
    """

    def __init__(
        self,
        slots: int,
        device: torch.device,
        lend: Callable[[int, torch.dtype], torch.Tensor],
        give_back: Callable[[torch.Tensor], None],
    ) -> None:
        self._lend, self._give_back = lend, give_back
        self._device, self._regular = device, slots
        self.ledger = Ledger()  # of the whole model
        self._slot_bytes = self._root_bytes = 0
        self.root_slot: Slot | None = None
        self.slots: list[Slot] = []
        self._next = 0
        self.allocations = 0
        self.peak_live = 0
        self._scratch: dict[Scratch, torch.Tensor] = {}
        self._scratch_bytes: dict[Scratch, int] = {}

    def reserve(self, full_bytes: Sequence[int]) -> None:
        """Size the slots for what each unit takes of one, the root first; make none yet."""
        self._root_bytes = full_bytes[0]
        self._slot_bytes = max(full_bytes[1:], default=0)
        self._regular = min(self._regular, sum(nbytes > 0 for nbytes in full_bytes[1:]))

    def own_slot(self) -> Slot:
        """The root's slot."""
        if self.root_slot is None:
            self.root_slot = self._new_slot(self._root_bytes)
        return self.root_slot

    @property
    def live(self) -> int:
        """Slots that hold a unit now, the root's not counted."""
        return sum(slot.owner is not None for slot in self.slots)

    @property
    def all_slots(self) -> list[Slot]:
        """The slots, the root's too."""
        return [*self.slots, *([self.root_slot] if self.root_slot else [])]

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.memory.numel() for slot in self.all_slots)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the reduce buffers."""
        return sum(memory.numel() for memory in self._scratch.values())

    def free_slot(self) -> Slot | None:
        """The next free slot in turn; None where none is free."""
        self._make_regular()
        count = len(self.slots)
        for step in range(count):
            slot = self.slots[(self._next + step) % count]
            if slot.owner is None:
                self._next = (self._next + step + 1) % count
                return slot
        return None

    def grow(self) -> Slot:
        """A slot beside those that there are."""
        self.slots.append(self._new_slot(self._slot_bytes))
        return self.slots[-1]

    def spare(self, unit: Unit, evict: Callable[[Unit], bool]) -> torch.Tensor:
        """Memory for a gather of ``unit`` that only other ranks need, uint8: a slot without owner.

        The slot stays without one, and the turn of ``free_slot`` where it is.

        Args:
            evict: reshards a unit that can give way, where no slot is free; whether it could.
        """
        if unit.parent is None:
            return self.own_slot().memory
        self._make_regular()
        for slot in self.slots:
            if slot.owner is None:
                return slot.memory
        for slot in self.slots:
            if slot.owner is not None and evict(slot.owner):
                return slot.memory
        return self.grow().memory

    def _make_regular(self) -> None:
        while len(self.slots) < self._regular:
            self.grow()

    def take(self, slot: Slot, unit: Unit) -> None:
        """Give ``slot`` to ``unit``."""
        slot.owner = unit
        self.peak_live = max(self.peak_live, self.live)

    def reserve_scratch(self, nbytes: dict[Scratch, int]) -> None:
        """Note how large the reduce buffers have to be; those that are large enough stay.

        Nothing is freed or allocated here: ranks come here at different times, and some with sizes
        that a meeting is about to refuse. ``make_scratch`` replaces what is too small, on all.
        """
        self._scratch_bytes = nbytes

    @property
    def lacks_scratch(self) -> bool:
        """Whether a reduce buffer is still to be made, or too small."""
        return any(self._falls_short(name) for name, size in self._scratch_bytes.items() if size)

    def scratch(self, name: Scratch, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` of a reduce buffer, (nbytes,) uint8."""
        if self._falls_short(name):
            self.make_scratch()
            if name not in self._scratch:
                self._scratch[name] = torch.empty(0, dtype=torch.uint8, device=self._device)
        return self._scratch[name][:nbytes]

    def _falls_short(self, name: Scratch) -> bool:
        return name not in self._scratch or self._scratch[name].numel() < self._scratch_bytes[name]

    def make_scratch(self) -> None:
        """Make the reduce buffers, all at once: ranks that share memory make them together.

        After an error it may be called again, by all of them.
        """
        for name, nbytes in self._scratch_bytes.items():
            if nbytes == 0 or not self._falls_short(name):
                continue
            if (old := self._scratch.pop(name, None)) is not None:
                self.ledger.add("reduce_buffers", -old.numel())
                self._give_back(old)
                del old  # the two need not be there at once
            if name in ("packed", "chunks"):
                self._scratch[name] = self._lend(nbytes, torch.uint8)
            else:
                self._scratch[name] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self.allocations += 1
            self.ledger.add("reduce_buffers", nbytes)

    def drop_scratch(self) -> None:
        """Free the reduce buffers."""
        self.ledger.add("reduce_buffers", -self.scratch_bytes)
        while self._scratch:
            self._give_back(self._scratch.popitem()[1])

    def _new_slot(self, nbytes: int) -> Slot:
        slot = Slot(nbytes, self._device)  # may lack memory
        self.allocations += 1
        self.ledger.add("full_buffers", nbytes)
        return slot
