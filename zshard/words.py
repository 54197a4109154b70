"""Words that printed text and errors have in common."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """How many there are of ``what``: "1 rank", "2 ranks"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
