"""Where a module holds a parameter: the sharded one, or the whole one while it computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .errors import StateError


@dataclass(frozen=True)
class Place:
    """One attribute of one module that holds a parameter of the unit."""

    module: nn.Module
    attribute: str
    flat: int  # index into Unit.flats
    segment: int  # index into the flat's segments

    def install(self, param: torch.Tensor, instead_of: torch.Tensor | None = None) -> None:
        """Make ``param`` what the module finds under the attribute.

        Raises:
            StateError: if the module holds something else than ``instead_of`` there now.
        """
        if instead_of is not None and self.module._parameters.get(self.attribute) is not instead_of:
            raise StateError(
                f"{type(self.module).__name__}.{self.attribute} was replaced after zshard.wrap (by "
                "an assignment, or torch.func.functional_call). Change values inside "
                "zshard.full_params(model, write=True); change modules before wrapping."
            )
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.attribute] = param  # type: ignore[assignment]
        else:  # a module that keeps books on assignment, as nn.LSTM does
            setattr(self.module, self.attribute, param)
