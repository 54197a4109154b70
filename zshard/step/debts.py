"""Meetings that an exception has led this rank past, and in which the others wait for it.

They are settled before the rank does anything else with other ranks: it comes late, and as what it
brings is not what they bring, they get an error.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import MismatchError
from .meeting import Intent

if TYPE_CHECKING:
    from .agreement import Agreement

_OWED: list[tuple[Agreement, str]] = []  # of all models, in the order in which the others wait


def owe(agreement: Agreement, what: str) -> None:
    """Note that the others will wait in the meeting for ``what``."""
    _OWED.append((agreement, f"{what}, after an exception"))


def settle() -> None:
    """Come to the meetings that are owed."""
    owed = _OWED.copy()
    _OWED.clear()  # before: each begins with this
    for agreement, label in owed:
        with suppress(MismatchError):  # it is for the others
            agreement.begin(Intent.CALL, label, label, gathers=False)


def forgive(agreement: Agreement) -> None:
    """Owe nothing of this model any more, as nobody waits."""
    _OWED[:] = [debt for debt in _OWED if debt[0] is not agreement]


os.register_at_fork(after_in_child=_OWED.clear)  # a forked process is no rank
