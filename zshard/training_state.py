"""Where in a step a model is, and what is under way around a call."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator

import torch
from torch import nn

from .errors import StateError

_CALL = nn.Module._call_impl.__code__


class TrainingState(enum.Enum):
    """Where in a step the model is."""

    IDLE = "between forward and backward, or between steps"
    FORWARD = "in the root's forward"
    BACKWARD = "in a backward through the model"


# Where a state may lead. A reset may find the model IDLE; a backward inside forward ends FORWARD.
NEXT_STATES = {
    TrainingState.IDLE: (TrainingState.IDLE, TrainingState.FORWARD, TrainingState.BACKWARD),
    TrainingState.FORWARD: (TrainingState.IDLE, TrainingState.BACKWARD),
    TrainingState.BACKWARD: (TrainingState.IDLE,),
}


def inside_backward() -> bool:
    """Whether this thread runs a backward, where activation checkpointing recomputes."""
    return torch._C._current_graph_task_id() != -1


def modules_called() -> Iterator[nn.Module]:
    """The modules whose calls are on this thread's stack, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def calls_under_way(module: nn.Module) -> int:
    """How many calls of ``module`` are on this thread's stack; above 1 it has called itself."""
    return sum(called is module for called in modules_called())


def require_untransformed() -> None:
    """Make sure that nothing is under way that collectives cannot be part of.

    Raises:
        StateError: inside torch.func's grad, vjp, jvp and what is made of them, which vmap is not;
            while torch.jit traces.
    """
    if torch._C._is_tracing():
        raise StateError(
            "torch.jit.trace of a wrapped model would trace the communication between ranks. Trace "
            "it inside zshard.full_params(model) and torch.no_grad()."
        )
    levels = torch._C._functorch.get_interpreter_stack() or ()
    kinds = {level.key().name for level in levels}
    if not kinds <= {"Vmap"}:
        raise StateError(
            f"torch.func transforms ({', '.join(sorted(kinds))}) of a wrapped model would "
            "transform the communication between ranks; they work on one rank. Use backward, "
            "torch.autograd.grad, or torch.autograd.forward_ad."
        )
