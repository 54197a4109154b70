"""Side streams and the events that order them; on CPU the same calls order nothing.

On CPU a collective runs on the backend's own threads and its handle is waited for by the host, so
a lane there is empty and a mark is None. The schedule is the same code on both.

These calls come several times for each unit, and it is the host that pays: torch's streams and
events of any accelerator are made in C++, those of ``torch.cuda`` take several times as long.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch

Mark = torch.Event | None

_NOTHING = nullcontext()


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that ``device``, a GPU, is given work on."""
    # By its number: torch would compare a device with the accelerator's each time.
    return torch.accelerator.current_stream(device.index)


class Lane:
    """One side stream of the schedule."""

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.Stream | None = None
        if device.type == "cuda":
            # Before the compute stream's kernels, whose blocks would fill the GPU first.
            self.stream = torch.Stream(device, priority=-1)

    def __del__(self) -> None:
        # With the model go the buffers that this lane may still be using. What gets their memory
        # next runs on the compute stream, which therefore waits.
        if self.stream is not None and not sys.is_finalizing():
            current_stream(self.stream.device).wait_stream(self.stream)

    def after_compute(self) -> AbstractContextManager[object]:
        """A context on this lane, after what the compute stream has been given so far."""
        if self.stream is None:
            return _NOTHING
        self.stream.wait_stream(current_stream(self.stream.device))
        return self.stream

    @property
    def is_current(self) -> bool:
        """Whether what is enqueued now goes on this lane."""
        return self.stream is not None and current_stream(self.stream.device) == self.stream

    def mark(self) -> Mark:
        """The point that this lane has been given work up to."""
        return None if self.stream is None else self.stream.record_event()


def mark_here(device: torch.device) -> Mark:
    """The point that the current stream has been given work up to."""
    return None if device.type != "cuda" else current_stream(device).record_event()


def compute_waits(mark: Mark) -> None:
    """Let the compute stream wait for ``mark``; the host goes on."""
    if mark is not None:
        # Not mark.wait(), which has the current device wait, whichever that is.
        current_stream(mark.device).wait_event(mark)


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``host`` on ``device``; neither waits for what the other is doing."""
    if device.type == "cuda":
        host = host.pin_memory()  # kept by its allocator until the copy has been made
    return host.to(device, non_blocking=True)
