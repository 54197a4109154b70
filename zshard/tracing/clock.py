"""The time at which a stream gets somewhere: the host's clock on CPU, timing events on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..streams import current_stream

Stamp = float | torch.Event  # of the host's clock, in seconds; of a stream


class Clock:
    """Takes stamps, and tells what they mean once the work that they lie between is done.

    On CPU the host computes, so its clock is the compute stream's. On CUDA a stamp is an event in
    the current stream, which costs the host no wait. Both kinds count from the same beginning.

    Attributes:
        now: takes a stamp of the current stream.
        unix_ns: when the beginning was, in nanoseconds since 1970.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host = device.type != "cuda"
        self._free: list[torch.Event] = []
        self._used: list[torch.Event] = []
        self.now: Callable[[], Stamp] = time.perf_counter if self._on_host else self._record
        self.start()

    def start(self) -> None:
        """Count from here on; stamps that were taken before mean nothing any more."""
        self._free += self._used
        self._used = []
        self.synchronize()
        if not self._on_host:
            self._zero_event = self._record()
        # The two clocks are read as close together as the host manages in three tries.
        tries = [(time.perf_counter(), time.time_ns(), time.perf_counter()) for _ in range(3)]
        before, self.unix_ns, after = min(tries, key=lambda each: each[2] - each[0])
        self._zero = (before + after) / 2

    def synchronize(self) -> None:
        """Wait until every stamp is of the past."""
        if not self._on_host:
            torch.cuda.synchronize(self._device)

    def seconds(self, stamp: Stamp) -> float:
        """Seconds from the beginning to ``stamp``; after ``synchronize``."""
        if isinstance(stamp, float):
            return max(0.0, stamp - self._zero)
        return max(0.0, float(self._zero_event.elapsed_time(stamp)) / 1e3)

    def _record(self) -> torch.Event:
        event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
        event.record(current_stream(self._device))
        self._used.append(event)
        return event
