"""Whether all ranks have changed the parameters alike, or one has left out a step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

import torch

from .agree import digest
from .comm import Comm, Tag
from .errors import MismatchError
from .flat import Flat
from .unit import Unit

_BITS = 30  # of a checksum
_MEND = (
    "The model is torn. Every rank has to make the same changes; to mend it, write whole values "
    "inside zshard.full_params(model, write=True), or load a checkpoint."
)


class Tally(NamedTuple):
    """What a rank has changed over some time.

    Args:
        changes: how often it has changed the master of a flat buffer.
        checksum: of what every rank has to give alike, in any order; ``_BITS`` bits.
    """

    changes: int
    checksum: int

    def since(self, before: Tally) -> Tally:
        """What has come after ``before``."""
        checksum = (self.checksum - before.checksum) % (1 << _BITS)
        return Tally(self.changes - before.changes, checksum)

    def as_word(self) -> int:
        """As one integer, below 2**62."""
        return self.changes << _BITS | self.checksum

    @classmethod
    def of_word(cls, word: int) -> Tally:
        """What ``as_word`` has made an integer of."""
        return cls(word >> _BITS, word % (1 << _BITS))


_NOTHING = Tally(0, 0)


class Updates:
    """Tallies the changes of the masters of ``units`` from forward to forward."""

    def __init__(self, units: Sequence[Unit], comm: Comm) -> None:
        self._flats = [flat for unit in units for flat in unit.flats]
        self._comm = comm
        self._checksum = 0  # of all that was noted
        self._noted: dict[str, object] = {}  # since the last check, for errors
        self._agreed = self._before = _NOTHING  # up to the last check and the one before
        self._checks = 0
        for flat in self._flats:
            flat.on_whole_value = partial(self._note_value, flat)

    def note(self, what: str, value: object) -> None:
        """Note a value that changes parameters, and that every rank has to give alike.

        Args:
            what: what it is, for errors.
            value: numbers, which errors show.
        """
        if self._comm.world > 1:
            self._noted[what] = value
            self._checksum += zlib.crc32(f"{what}: {value}".encode())

    def _note_value(self, flat: Flat, index: int, whole: torch.Tensor) -> None:
        if self._comm.world > 1:
            seen = digest(whole.detach().to(flat.dtypes.master))
            self.note(f"the values of {flat.names[index]} (by checksum)", seen)

    def _now(self) -> Tally:
        changes = sum(flat.updates for flat in self._flats)
        return Tally(changes, self._checksum % (1 << _BITS))

    def tally(self) -> Tally:
        """What was changed since ``check`` was called last."""
        return self._now().since(self._agreed)

    def tallies(self) -> tuple[int, Tally, Tally]:
        """How often ``check`` was called; what came since the last time, and the one before."""
        return self._checks, self.tally(), self._now().since(self._before)

    def catch_up(self, everyone: Sequence[tuple[int, Tally, Tally]]) -> None:
        """As ``check``, where ranks may have come to the last one or not: from the one before.

        Args:
            everyone: the ranks' ``tallies``.
        """
        first = min(checks for checks, _, _ in everyone)
        self._checks = first
        self._noted.clear()  # the ranks' are of different times
        self.check([last if checks == first else both for checks, last, both in everyone])

    def check(self, everyone: Sequence[Tally]) -> None:
        """Compare the ranks' tallies, and begin anew. All ranks come here.

        Raises:
            MismatchError: on every rank, if they differ.
        """
        self._before, self._agreed = self._agreed, self._now()
        self._checks += 1
        noted, self._noted = self._noted, {}
        if len({tally.changes for tally in everyone}) > 1:
            raise MismatchError(
                f"since the last forward the ranks have changed {[t.changes for t in everyone]} "
                "flat buffers: the optimizer's step, or another change of parameters, was left out "
                f"on some. {_MEND}"
            )
        if len(set(everyone)) > 1:
            told = self._comm.all_gather_object(noted, Tag(0, "agree", "a change of parameters"))
            raise MismatchError(
                "since the last forward the ranks have changed the parameters differently: "
                f"{_first_difference(cast('list[dict[str, object]]', told))}. {_MEND}"
            )


def _first_difference(noted: Sequence[dict[str, object]]) -> str:
    """Which of the values that the ranks have noted differs, rank by rank."""
    for what in dict.fromkeys(what for each in noted for what in each):
        values = [each.get(what) for each in noted]
        if len(set(map(str, values))) > 1:
            shown = "; ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            return f"{what}: {shown}"
    return "a value that has been replaced since"
