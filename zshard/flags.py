"""Arguments that are either True or False."""

from __future__ import annotations

from .errors import InputError


def require_flags(**flags: object) -> None:
    """Refuse an argument that is neither True nor False, which any text would be taken for.

    Raises:
        InputError: with its name.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(f"{name}={value!r}: expected True or False")
