"""The account of a model's memory on this rank: bytes of each kind, now and at the peak.

Whoever allocates memory that lasts beyond a call, or frees it, tells the ledger then, so the peak
is exact and nothing is polled. In steady state nobody has anything to tell; only the gradients
that no_sync holds come and go with every step.
"""

from __future__ import annotations

STATES = ("parameters", "gradients", "master", "optimizer")
BUFFERS = ("full_buffers", "reduce_buffers")
KINDS = (*STATES, *BUFFERS)


class Ledger:
    """Bytes by kind.

    Attributes:
        now: of each kind.
        peak: the most that there ever was of each kind; "states" and "peak" are the most that there
            was at one time of the states, and of all kinds together.
    """

    def __init__(self) -> None:
        self.now = dict.fromkeys(KINDS, 0)
        self.peak: dict[str, int] = {}
        self._optimizers: dict[int, int] = {}
        self.restart()

    def restart(self) -> None:
        """Let the peak be what there is now."""
        self.peak = dict.fromkeys((*self.now, "states", "peak"), 0)
        for kind in self.now:
            self._raise(kind)

    def add(self, kind: str, nbytes: int) -> None:
        """Count ``nbytes`` more, or less, of ``kind``."""
        self.now[kind] += nbytes
        if nbytes > 0:
            self._raise(kind)

    def set_optimizer(self, number: int, nbytes: int) -> None:
        """Count ``nbytes`` for the optimizer of this number; 0 when it is gone."""
        self.add("optimizer", nbytes - self._optimizers.pop(number, 0))
        if nbytes > 0:
            self._optimizers[number] = nbytes

    def _raise(self, kind: str) -> None:
        states = sum(self.now[each] for each in STATES)
        found = {
            kind: self.now[kind],
            "states": states,
            "peak": states + sum(self.now[each] for each in BUFFERS),
        }
        for key, value in found.items():
            self.peak[key] = max(self.peak[key], value)
