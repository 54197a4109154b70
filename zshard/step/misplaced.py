"""What a backward comes to where it must not, and what is said of it."""

from __future__ import annotations

from typing import NoReturn

from ..errors import StateError
from ..unit import Unit


def refuse_unexpected(unit: Unit) -> NoReturn:
    """Refuse a gradient of a parameter of ``unit`` that would not be reduced.

    Raises:
        StateError: always.
    """
    raise StateError(
        f"unit {unit.label!r}: a parameter got another gradient after the unit's gradients had "
        "been reduced. If it is used in several reentrant checkpoints, pass use_reentrant=False to "
        "torch.utils.checkpoint. If backward has taken another way than before, repeat the step."
    )


def refuse_overwritten(unit: Unit) -> NoReturn:
    """Refuse a gradient that was made while the memory of ``unit`` held something else.

    Raises:
        StateError: always.
    """
    raise StateError(
        f"unit {unit.label!r}: a gradient was made of a parameter while another unit was in its "
        "memory, so that it may be wrong. Pass a strategy that keeps whole parameters (zero2), or "
        "make the two units one (zshard.wrap(units=...)), which under torch.vmap does not help."
    )


def refuse_other_way(unit: Unit, rank: str) -> NoReturn:
    """Refuse a backward that needs ``unit`` at another place than the others expect.

    Args:
        rank: this one's name.

    Raises:
        StateError: always.
    """
    raise StateError(
        f"{rank}: backward reached unit {unit.label!r} by another way than the one before. The "
        "step's gradients are dropped on every rank. Repeat the step; from then on this way is "
        "expected."
    )
