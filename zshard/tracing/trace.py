"""The timed record of what the schedule did, what it sent, and where it waited.

[Note: what a trace holds]
The compute stream is one row of intervals, each within another or beside it: the phases of units,
the starting of transfers, and the stalls, in which it does nothing because a transfer, or another
rank, has not come that far. Transfers lie on lanes of their own. While it records, a trace takes
stamps and does nothing else: what it is told becomes events when they are read, and the stamps
seconds when the context ends. What is under way then is cut there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import StateError
from ..whole_files import StrPath
from .recorder import Recorder
from .records import Event, Stall, Transfer

if TYPE_CHECKING:
    from .summary import Summary


class Trace:
    """What one rank did during ``zshard.trace``; see [Note: what a trace holds].

    Attributes:
        rank, world: of this process, among those that train the model.
        units: labels of the model's units, the root first; model: its class's name.
    """

    def __init__(
        self, recorder: Recorder, *, rank: int, world: int, units: Sequence[str], model: str
    ) -> None:
        self.rank, self.world, self.units, self.model = rank, world, tuple(units), model
        self._recorder = recorder

    def clear(self) -> None:
        """Forget what was recorded so far, and go on recording.

        Raises:
            StateError: after the context.
        """
        if self.ended:
            raise StateError("Trace.clear: this trace has ended; begin another zshard.trace(model)")
        self._recorder.clear()

    @property
    def events(self) -> list[Event]:
        """The phases of units, in the order in which they were issued."""
        return self._recorder.phases().events

    @property
    def spans(self) -> list[Event]:
        """What else takes time: "issue", "sum", and the root's "backward" after an inner unit's."""
        return self._recorder.phases().spans

    @property
    def transfers(self) -> list[Transfer]:
        """Collectives, in the order of issue."""
        return self._recorder.transfers

    @property
    def stalls(self) -> list[Stall]:
        """Where compute waited for them, oldest first."""
        return self._recorder.stalls

    @property
    def seconds(self) -> float:
        """The trace's length; NaN while it is being recorded."""
        return self._recorder.seconds

    @property
    def ended(self) -> bool:
        """Whether the context has ended, so that times are known."""
        return not math.isnan(self.seconds)

    @property
    def unix_ns(self) -> int:
        """When the trace began, in nanoseconds since 1970."""
        return self._recorder.clock.unix_ns

    def save(self, path: StrPath) -> None:
        """Write this rank's trace for ui.perfetto.dev and chrome://tracing, as a whole or not.

        Ranks have a file each; ``zshard.merge_traces`` makes them one.

        Raises:
            InputError: for a path that cannot be written. StateError: inside the context.
        """
        from .file import save

        self._require_ended("save")
        save(self, path)

    def summary(self) -> Summary:
        """What was communicated, hidden and waited for, by unit; its str() is a table.

        Raises:
            StateError: inside the context.
        """
        from .summary import summarize

        self._require_ended("summary")
        return summarize(self)

    def plot(self, path: StrPath = "trace.png") -> None:
        """Draw the timeline into a PNG file: a row a stream, a colour a phase.

        Raises:
            InputError: for a path that cannot be written. StateError: inside the context.
            MissingPackage: without matplotlib.
        """
        from .plot import plot

        self._require_ended("plot")
        plot(self, path)

    def _require_ended(self, what: str) -> None:
        if not self.ended:
            raise StateError(f"Trace.{what} is for after the trace: call it below the with block")
