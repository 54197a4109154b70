"""A collective under way, as who has started it sees it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..errors import CommError
from ..streams import Mark, compute_waits
from ..tracing.records import Transfer
from .groups import Ranks
from .messages import Work

if TYPE_CHECKING:
    from ..comm import Comm
    from ..tag import Tag


class Handle:
    """A collective under way; after ``wait`` the compute stream may use its result.

    Attributes:
        transfer: its record, if it was traced.
    """

    def __init__(
        self,
        comm: Comm,
        work: Work | None,
        mark: Mark,
        over: Ranks,
        op: str,
        tag: Tag,
        transfer: Transfer | None,
    ) -> None:
        self._comm, self._work, self._mark, self._over = comm, work, mark, over
        self._op, self._tag = op, tag
        self.transfer = transfer

    def wait(self) -> None:
        """Wait for the result: the compute stream on CUDA, the host on CPU."""
        recorder = self._comm.recorder
        if recorder is None or self._comm.on_lane:
            self._wait()
            return
        stall = recorder.begin_stall(self._op, self._tag, self.transfer)
        try:
            self._wait()
        finally:
            recorder.end_stall(stall)

    def _wait(self) -> None:
        if self._work is not None:
            start = time.perf_counter()
            try:
                with self._comm.named_errors(self._op, self._tag):
                    self._over.wait(self._work)
            except CommError:
                self._work = None  # it has ended
                raise
            now = time.perf_counter()
            self._comm.stats.exposed_seconds += now - start
            self._work = None
            if self.transfer is not None:
                self.transfer.waited(start, now)
        compute_waits(self._mark)
