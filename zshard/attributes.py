"""What a script has set on a parameter: attributes that both of its faces bear."""

from __future__ import annotations

import torch

from .param import Sharded

_OWN = ("_local", "_flat", "_segment", "_of_model", "_is_param")


def reserved_attributes(param: torch.Tensor) -> list[str]:
    """Names of attributes of a plain parameter that would be hidden by those of a sharded one."""
    return sorted(vars(param).keys() & {*vars(Sharded), *_OWN} - {"__dict__"})


def user_attributes(param: torch.Tensor) -> dict[str, object]:
    """What user code has set on a parameter."""
    return {name: value for name, value in param.__dict__.items() if name not in _OWN}


def share_attributes(of: torch.Tensor, to: torch.Tensor) -> None:
    """Have ``to`` bear what user code has set on ``of``, and nothing else.

    One of them is a ``Sharded``, the other a plain tensor; both are the same parameter.
    """
    if len(of.__dict__) + len(to.__dict__) == len(_OWN):
        return  # as most have none
    given = user_attributes(of)
    for name in user_attributes(to).keys() - given:
        del to.__dict__[name]
    to.__dict__.update(given)
