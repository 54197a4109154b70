"""Where in a step a model is, and how the end of a backward is known."""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch


class Phase(enum.Enum):
    """Where in a step the model is."""

    IDLE = "between forward and backward, or between steps"
    FORWARD = "in the root's forward"
    BACKWARD = "in a backward through the model"


class EndOfBackward:
    """What autograd calls at the end of a backward, if that has not raised.

    Autograd holds it for exactly as long as the backward runs, so a weak reference to it tells
    whether a backward that has not ended is still under way.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self) -> None:
        """End the backward."""
        self._function()


def inside_backward() -> bool:
    """Whether this thread runs a backward, where activation checkpointing recomputes."""
    return torch._C._current_graph_task_id() != -1
