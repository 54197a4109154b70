"""The structure of a model: which modules it consisted of when it was wrapped."""

from __future__ import annotations

from torch import nn

from .errors import WrapError


def is_within(module: str, name: str) -> bool:
    """Whether ``name`` is that of ``module``, or of one inside; "" is the whole model."""
    return not module or name == module or name.startswith(f"{module}.")


class Structure:
    """The modules of a model as they were when it was wrapped."""

    def __init__(self, model: nn.Module) -> None:
        # Every module with its name, its children, its parameters' names, and those of them that
        # stand for none. (By items() and keys(): a module of TorchScript has no more.)
        self._built = [
            (
                name,
                module,
                dict(module._modules.items()).items(),
                {*module._parameters.keys()},
                [key for key, param in module._parameters.items() if param is None],
            )
            for name, module in model.named_modules()
        ]

    def check_unchanged(self, within: str = "") -> None:
        """Make sure that nothing in module ``within`` was added, removed or put in another's place.

        Raises:
            WrapError: with the module that has changed, and what of it.
        """
        for name, module, children, params, absent in self._built:
            if not is_within(within, name):
                continue
            filled = [key for key in absent if module._parameters.get(key) is not None]
            other_params = filled or len(module._parameters) != len(params)
            if other_params or module._modules.items() != children:
                others = {child for child, _ in module._modules.items() ^ children}
                others |= params ^ {*module._parameters.keys()} | {*filled}
                raise WrapError(
                    f"{type(module).__name__} {name or 'root'!r} has other modules or parameters "
                    f"than when it was wrapped ({', '.join(sorted(others))}); those would not be "
                    "trained together. Change the model before zshard.wrap."
                )
