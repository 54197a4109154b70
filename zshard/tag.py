"""The fingerprint of a collective, which errors, traces and tests name it by."""

from __future__ import annotations

from typing import NamedTuple


class Tag(NamedTuple):
    """When in training, in which phase, for which unit; of a meeting, for what the ranks meet."""

    step: int
    phase: str
    unit: str

    @property
    def what(self) -> str:
        """The phase and the unit, in words."""
        if self.phase == "agree":
            return f"{self.phase} of unit 'root' (the meeting for {self.unit})"
        return f"{self.phase} of unit {self.unit!r}"

    def __str__(self) -> str:
        return f"{self.what} in step {self.step}"
