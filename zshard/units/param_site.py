"""Where a module holds a parameter: the sharded one, or the whole one while it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import StateError

if TYPE_CHECKING:
    from .flat import Flat


@dataclass(frozen=True)
class ParamSite:
    """One attribute of one module that holds a parameter of the unit."""

    module: nn.Module
    attribute: str
    flat: Flat
    segment: int  # index into the flat's segments

    def require(self) -> None:
        """Make sure that the module holds the sharded parameter.

        Raises:
            StateError: if it holds something else.
        """
        param: torch.Tensor = self.flat.params[self.segment]
        of = param.__dict__  # of its contents, which swap_tensors may have exchanged
        if (
            self.module._parameters.get(self.attribute) is not param
            or of.get("_flat") is not self.flat
            or of["_segment"] != self.segment
            or not of["_of_model"]
        ):
            name = self.flat.names[self.segment]
            raise StateError(
                f"{name} ({self.attribute} of a {type(self.module).__name__}) "
                "was replaced after zshard.wrap (by an assignment, torch.func.functional_call, or "
                "torch.utils.swap_tensors). Change values inside zshard.full_params(model, "
                "write=True); change modules before wrapping."
            )

    def install(self, param: torch.Tensor) -> None:
        """Make ``param`` what the module finds under the attribute."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.attribute] = param  # type: ignore[assignment]
        else:  # a module that keeps books on assignment, as nn.LSTM does
            setattr(self.module, self.attribute, param)
