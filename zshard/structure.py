"""The structure of a model: which modules it consisted of when it was wrapped."""

from __future__ import annotations

from torch import nn

from .errors import WrapError


class Structure:
    """The modules of a model as they were when it was wrapped."""

    def __init__(self, model: nn.Module) -> None:
        # Every module with its name, its children, and the number of its parameters.
        self._built = [
            (name, module, list(module._modules.values()), len(module._parameters))
            for name, module in model.named_modules()
        ]

    def check_unchanged(self) -> None:
        """Make sure that nothing was added, removed or put in another's place.

        Raises:
            WrapError: with the module that has changed.
        """
        for name, module, children, count in self._built:
            if list(module._modules.values()) != children or len(module._parameters) != count:
                raise WrapError(
                    f"{type(module).__name__} {name or 'root'!r} has other modules or parameters "
                    "than when it was wrapped; those would not be trained together. Change the "
                    "model before zshard.wrap."
                )
