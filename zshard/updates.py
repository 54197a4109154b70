"""Whether all ranks have changed the parameters equally often, or one has left out a step."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import MismatchError
from .unit import Unit


class Updates:
    """Counts the changes of the masters of ``units`` from forward to forward."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._flats = [flat for unit in units for flat in unit.flats]
        self._agreed = self._before = 0  # changes, up to the last check and the one before
        self._checks = 0

    def count(self) -> int:
        """Changes since ``check`` was called last."""
        return sum(flat.updates for flat in self._flats) - self._agreed

    def counts(self) -> tuple[int, int, int]:
        """How often ``check`` was called; the changes since the last time, and the one before."""
        return self._checks, self.count(), self.count() + self._agreed - self._before

    def catch_up(self, everyone: Sequence[tuple[int, int, int]]) -> None:
        """As ``check``, where ranks may have come to the last one or not: from the one before.

        Args:
            everyone: the ranks' ``counts``.
        """
        first = min(checks for checks, _, _ in everyone)
        self._checks = first
        self.check([last if checks == first else both for checks, last, both in everyone])

    def check(self, everyone: Sequence[int]) -> None:
        """Compare the ranks' counts, and begin anew.

        Raises:
            MismatchError: on every rank, if they differ.
        """
        self._before, self._agreed = self._agreed, self._agreed + self.count()
        self._checks += 1
        if len(set(everyone)) > 1:
            raise MismatchError(
                f"since the last forward the ranks have changed {list(everyone)} flat buffers: the "
                "optimizer's step, or another change of parameters, was left out on some, and the "
                "model is torn. Every rank has to make the same changes; to mend it, write whole "
                "values inside zshard.full_params(model, write=True)."
            )
