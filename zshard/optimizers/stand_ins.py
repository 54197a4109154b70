"""Whole parameters that stand in for sharded ones in ``full_params``; no step on them gets lost.

Inside, the modules hold Parameters of their own, without gradients, which the model does not look
at any more once the context has ended. An optimizer over them would change nothing without a word.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import OptimizerError, StateError
from ..param import Sharded
from ..schedule import live
from ..sharded.refusals import WHOLE_TENSORS

# Of each whole parameter that a context has in the modules now, by id: itself, and the sharded one.
# No weak reference meanwhile, with which torch.utils.swap_tensors would refuse it.
_STANDING_IN: dict[int, tuple[torch.Tensor, Sharded]] = {}
_STEPPED: set[int] = set()  # ids of those of them that an optimizer has made a step on
_TAKEN_OUT = WeakTensorKeyDictionary()  # of those whose context has ended, as long as they live

_USE_FORWARD = (
    "Compute what has it in a forward, or in a method that zshard.method(model, name) has gather; "
    "or assign whole gradients to the parameters outside of the context."
)


def put_in(whole: torch.Tensor, sharded: Sharded) -> None:
    """Note that ``whole`` stands in for ``sharded``, until it is taken out."""
    _STANDING_IN[id(whole)] = whole, sharded
    if whole.requires_grad:
        whole.register_post_accumulate_grad_hook(_refuse_lost_gradient)  # type: ignore[no-untyped-call]


def take_out(whole: torch.Tensor) -> None:
    """Note that the model does not look at ``whole`` any more."""
    _STANDING_IN.pop(id(whole), None)
    _STEPPED.discard(id(whole))
    _TAKEN_OUT[whole] = True


def _refuse_lost_gradient(whole: torch.Tensor) -> None:
    if whole in _TAKEN_OUT:
        whole.grad = None
        raise StateError(
            f"a backward after the end of zshard.full_params has come to a parameter of shape "
            f"{tuple(whole.shape)} that was lent there. {_USE_FORWARD}"
        )


def refuse_lost_gradients(wholes: Sequence[torch.Tensor]) -> None:
    """Refuse gradients of ``wholes``, at the end of their context, that nobody will look at.

    Raises:
        StateError: for one on which no optimizer has made a step.
    """
    for whole in wholes:
        if whole.grad is not None and id(whole) not in _STEPPED:
            _, sharded = _STANDING_IN[id(whole)]
            raise StateError(
                f"{sharded.fqn}: the whole parameter that zshard.full_params lends was left with a "
                "gradient, which the model will not see. If it was not meant for the model, drop "
                f"it inside (.grad = None, model.zero_grad()). Else: {_USE_FORWARD}"
            )


def refuse_lost_step(param: torch.Tensor, *, has_closure: bool) -> None:
    """Refuse an optimizer's step that would change nothing of the model.

    Args:
        has_closure: whether the step calls one, which makes the gradients only then.

    Raises:
        OptimizerError: if the context in which ``param`` stood in has ended, or if it has no
            gradient where the sharded parameter has one.
    """
    if param in _TAKEN_OUT:
        raise OptimizerError(
            f"the optimizer's parameter of shape {tuple(param.shape)} is one that "
            "zshard.full_params lent while it lasted: the model would not see this step. To train "
            "a model of your own on it, clone it. " + WHOLE_TENSORS
        )
    _, sharded = _STANDING_IN.get(id(param), (None, None))
    if sharded is None:
        return
    _STEPPED.add(id(param))
    if has_closure:
        return
    if param.grad is None and sharded.grad is not None:
        raise OptimizerError(
            f"{sharded.fqn}: the whole parameter that zshard.full_params lends has no gradient, so "
            "that this step would leave it as it is. " + WHOLE_TENSORS
        )


def refuse_parameters_of_a_copy(params: Sequence[torch.Tensor]) -> None:
    """Refuse ``params``, an optimizer's, that are those of a copy of a model that was wrapped.

    Raises:
        OptimizerError: if none of them is sharded or has a gradient, and such a model has some.
    """
    if any(isinstance(p, Sharded) or p.grad is not None for p in params):
        return
    if _wrapped_like(params) is None:
        return
    gc.collect()  # which frees a model that was dropped, and has gradients until then
    if model := _wrapped_like(params):
        raise OptimizerError(
            f"none of this optimizer's {len(params)} parameters is sharded or has a gradient, "
            f"while a wrapped {model} with parameters of the same shapes has gradients: the "
            "optimizer was given a copy's. Give it those of the wrapped model."
        )


def _wrapped_like(params: Sequence[torch.Tensor]) -> str | None:
    """The class of a wrapped model that has gradients, and parameters of the shapes of these."""
    shapes = sorted(tuple(p.shape) for p in params)
    for schedule in live():
        own = sorted(tuple(p.shape) for p in schedule.parameters())
        if own == shapes and schedule.totals.has_gradients:
            return type(schedule.model).__name__
    return None
