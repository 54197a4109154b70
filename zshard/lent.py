"""Which whole parameters ``full_params`` has lent, so that no optimizer's step on them is lost.

Inside, the modules hold Parameters of their own, without gradients, which the model does not look
at any more once the context has ended. An optimizer over them would change nothing without a word.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .errors import OptimizerError
from .param import Sharded

# A whole parameter -> the sharded one that it stands for; None once the context has ended.
_LENT = WeakTensorKeyDictionary()

_REMEDY = (
    "An optimizer that needs whole matrices takes whole tensors of your own: "
    "zshard.full_param(model, name) of each parameter, with zshard.full_grad(model, name) as its "
    ".grad before a step; then copy them into the parameters inside "
    "zshard.full_params(model, write=True)."
)


def lend(whole: torch.Tensor, sharded: Sharded) -> None:
    """Note that ``whole`` stands for ``sharded``."""
    _LENT[whole] = sharded


def take_back(whole: torch.Tensor) -> None:
    """Note that the model does not look at ``whole`` any more."""
    _LENT[whole] = None


def refuse_lost_step(param: torch.Tensor) -> None:
    """Refuse an optimizer's step that would change nothing of the model.

    Raises:
        OptimizerError: if ``param`` was lent by a context that has ended, or has no gradient where
            the sharded parameter has one.
    """
    if param not in _LENT:
        return
    sharded = _LENT[param]
    if sharded is None:
        raise OptimizerError(
            f"the optimizer's parameter of shape {tuple(param.shape)} is one that "
            "zshard.full_params lent while it lasted: the model would not see this step. " + _REMEDY
        )
    if param.grad is None and sharded.grad is not None:
        raise OptimizerError(
            f"{sharded.fqn}: the whole parameter that zshard.full_params lends has no gradient, so "
            "that this step would leave it as it is. " + _REMEDY
        )
