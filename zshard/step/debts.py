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
    from ..comm import Comm
    from .agreement import Agreement

# Of all models, in the order in which the others wait.
_OWED: list[tuple[Agreement, Comm, str]] = []


def owe(agreement: Agreement, comm: Comm, what: str) -> None:
    """Note that the others, over ``comm``, will wait in the meeting for ``what``."""
    _OWED.append((agreement, comm, f"{what}, after an exception"))


def settle() -> None:
    """Come to the meetings that are owed."""
    owed = _OWED.copy()
    _OWED.clear()  # before: each begins with this
    for agreement, comm, label in owed:
        if comm.is_over:
            continue  # nobody waits any more
        with suppress(MismatchError):  # it is for the others
            agreement.begin(Intent.CALL, label, label, gathers=False)


def forgive(agreement: Agreement) -> None:
    """Owe nothing of this model any more, as nobody waits."""
    _OWED[:] = [debt for debt in _OWED if debt[0] is not agreement]


os.register_at_fork(after_in_child=_OWED.clear)  # a forked process is no rank
