"""What lies in the slots of a model and is not zshard's own, as torch counts it."""

from __future__ import annotations

import gc

from torch import nn

from zshard.wrap import schedule_of


def foreign(model: nn.Module) -> list[int]:
    """How many tensors lie in each slot beside zshard's; those of a graph, and what is kept."""
    schedule = schedule_of(model)
    flats = [(unit.attached, flat) for unit in schedule.units for flat in unit.flats]
    return [
        slot.lying - sum(flat.full.aliases for lies_in, flat in flats if lies_in is slot)
        for slot in schedule.pool.all_slots
    ]


def assert_all_ours(model: nn.Module) -> None:
    """Nothing of a step outlives it; to be called where there is no graph."""
    gc.collect()  # an exception's frames hold what they had
    assert not any(foreign(model)), foreign(model)
