"""The fingerprint of a collective, which errors, traces and tests name it by."""

from __future__ import annotations

from typing import NamedTuple


class Tag(NamedTuple):
    """When in training, in which phase, for which unit, and what for besides."""

    step: int | None  # None outside of training
    phase: str
    unit: str = ""  # "" where it is of no single one
    about: str = ""  # what tells it from others of the same phase and unit

    @property
    def what(self) -> str:
        """All but the step, in words."""
        text = f"{self.phase} of unit {self.unit!r}" if self.unit else self.phase
        if not self.about:
            return text
        return f"{text} ({'the meeting for ' * (self.phase == 'agree')}{self.about})"

    def doing(self, op: str) -> str:
        """``op``, a collective that is done for it, and what it is, in words; all but the step."""
        return self.what if op == self.phase else f"{op} in {self.what}"

    @property
    def subject(self) -> str:
        """The shortest name beside the phase's: what it is for, or else the unit."""
        return self.about or self.unit

    @property
    def when(self) -> str:
        """The step, in words that follow ``what``."""
        return "" if self.step is None else f" in step {self.step}"

    def __str__(self) -> str:
        return self.what + self.when
