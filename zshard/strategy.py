"""What of a unit a rank keeps whole: the strategies, by their ZeRO names and by FSDP's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from .errors import InputError


@dataclass(frozen=True)
class Strategy:
    """What a rank keeps whole of a unit, and what it keeps a shard of.

    In all of them the gradients are reduced to shards by the same collectives and sums, so that
    losses and gradients are the same bit by bit.

    Attributes:
        resident: whole parameters stay in memory; the updated shards are gathered after a step.
        whole_grads: the gradient buffer is that of the whole unit; no_sync accumulates in it.
        replicated: master and optimizer states are those of the whole unit, and so what is
            gathered is the reduced gradient.
    """

    name: str
    resident: bool = False
    whole_grads: bool = False
    replicated: bool = False


_ZERO3 = Strategy("zero3")
_ZERO2 = Strategy("zero2", resident=True)
_ZERO1 = Strategy("zero1", resident=True, whole_grads=True)
_DDP = Strategy("ddp", resident=True, whole_grads=True, replicated=True)
_BY_NAME = {
    **{strategy.name: strategy for strategy in (_ZERO3, _ZERO2, _ZERO1, _DDP)},
    **{"full_shard": _ZERO3, "shard_grad_op": _ZERO2, "no_shard": _DDP},
}


def zero_name(choice: str) -> str:
    """The ZeRO name of a strategy that is given by either name; another word as it is."""
    return _BY_NAME[choice].name if choice in _BY_NAME else choice


Choice = str | Callable[[str, nn.Module], str]


def strategy_of(choice: Choice, name: str, module: nn.Module) -> Strategy:
    """The strategy of the unit ``name`` ("" is the root) whose module is ``module``.

    Raises:
        InputError: for a name that is no strategy.
    """
    wanted = choice if isinstance(choice, str) or not callable(choice) else choice(name, module)
    if not isinstance(wanted, str) or wanted not in _BY_NAME:
        where = "" if wanted is choice else f" for unit {name or 'root'!r}"
        raise InputError(f"strategy={wanted!r}{where}: expected one of {', '.join(_BY_NAME)}")
    return _BY_NAME[wanted]
