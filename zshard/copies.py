"""An optimizer that was given a copy's parameters: it would update nothing, and say nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import OptimizerError
from .param import Sharded
from .schedule import LIVE


def refuse_parameters_of_a_copy(params: Sequence[torch.Tensor]) -> None:
    """Refuse ``params``, an optimizer's, that are those of a copy of a model that was wrapped.

    Raises:
        OptimizerError: if none of them is sharded or has a gradient, and such a model has some.
    """
    if any(isinstance(p, Sharded) or p.grad is not None for p in params):
        return
    if model := _wrapped_like(params):
        raise OptimizerError(
            f"none of this optimizer's {len(params)} parameters is sharded or has a gradient, "
            f"while a wrapped {model} with parameters of the same shapes has gradients: the "
            "optimizer was given a copy's. Give it those of the wrapped model."
        )


def _wrapped_like(params: Sequence[torch.Tensor]) -> str | None:
    """The class of a wrapped model that has gradients, and parameters of the shapes of these."""
    shapes = sorted(tuple(p.shape) for p in params)
    for schedule in LIVE:
        if sorted(tuple(p.shape) for p in schedule.parameters()) == shapes:
            schedule.reducer.settle()
            if any(any(flat.grads.present) for flat in schedule.reducer.trained_flats):
                return type(schedule.model).__name__
    return None
