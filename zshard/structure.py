"""The structure of a model: which modules it consisted of when it was wrapped."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable
from typing import NamedTuple

from torch import nn

from .errors import WrapError


class _Built(NamedTuple):
    """A module as it was when it was wrapped."""

    name: str
    module: nn.Module
    children: ItemsView[str, nn.Module | None]
    params: set[str]  # names of its own parameters
    absent: list[str]  # those of them that stand for none

    @classmethod
    def of(cls, name: str, module: nn.Module) -> _Built:
        # By items() and keys(): a module of TorchScript has no more.
        children, params = dict(module._modules.items()).items(), {*module._parameters.keys()}
        absent = [key for key, param in module._parameters.items() if param is None]
        return cls(name, module, children, params, absent)


class Structure:
    """The modules of a model as they were when it was wrapped.

    Args:
        units: modules that may be checked by themselves, with their names; that of all is "".
    """

    def __init__(self, units: Iterable[tuple[str, nn.Module]]) -> None:
        self._built = {
            unit: [_Built.of(name, module) for name, module in top.named_modules(prefix=unit)]
            for unit, top in units
        }

    def check_unchanged(self, within: str = "") -> None:
        """Make sure that nothing in unit ``within`` was added, removed or put in another's place.

        Raises:
            WrapError: with the module that has changed, and what of it.
        """
        for name, module, children, params, absent in self._built[within]:
            filled = absent and [key for key in absent if module._parameters.get(key) is not None]
            other_params = filled or len(module._parameters) != len(params)
            if other_params or module._modules.items() != children:
                others = {child for child, _ in module._modules.items() ^ children}
                others |= params ^ {*module._parameters.keys()} | {*filled}
                raise WrapError(
                    f"{type(module).__name__} {name or 'root'!r} has other modules or parameters "
                    f"than when it was wrapped ({', '.join(sorted(others))}); those would not be "
                    "trained together. Change the model before zshard.wrap."
                )
