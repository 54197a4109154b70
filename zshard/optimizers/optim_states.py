"""A parameter's optimizer state in its forms: this rank's slice, sharded like it, or whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import OptimizerError
from ..param import Sharded


class Place(NamedTuple):
    """Where a plain parameter lies, which assigning ``.data`` changes."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, param: torch.Tensor) -> Place | None:
        """Where ``param`` lies; None for a sharded one, which stays there."""
        if isinstance(param, Sharded):
            return None
        return cls(param.data_ptr(), param.shape, param.stride())


def saved_states(values: dict[str, Any]) -> dict[str, Any]:
    """Saved states, with the step that torch.optim.SGD does not count: its momentum has begun.

    A step may be a number, as in old versions of torch, and a momentum that has not begun None.
    """
    found = {name: value for name, value in values.items() if value is not None}
    if "momentum_buffer" in found:
        found.setdefault("step", 1)
    if not isinstance(found.get("step"), torch.Tensor | None):
        found["step"] = torch.tensor(found["step"], device="cpu")
    return found


def sharded_like(
    param: torch.Tensor, values: dict[str, Any], names: Collection[str]
) -> dict[str, Any]:
    """States of ``param`` as a state_dict has them, those of ``names`` sharded like it."""
    counted = {name: value.float() for name, value in values.items() if name == "step"}
    sharded = {name: as_sharded(param, values[name]) for name in names if name in values}
    return values | sharded | counted


def as_sharded(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A state of ``param`` as others see it: this rank's slice, 1-D, as a tensor like ``param``.

    Any other ``value`` is one already.
    """
    if isinstance(value, Sharded) or value.ndim != 1:
        return value
    if not isinstance(param, Sharded):  # the whole state, in the parameter's memory order
        return value.contiguous().as_strided(param.shape, param.stride())
    if value.numel() != param.local_numel:  # whole
        return value
    return Sharded(value, param.flat, param.segment)


def as_it_lay(
    param: torch.Tensor,
    states: dict[str, Any],
    laid_out: Mapping[str, torch.Tensor],
    place: Place | None,
) -> dict[str, Any]:
    """``states`` of a plain ``param``, those ``laid_out`` as tensors like it was in ``place``.

    Raises:
        OptimizerError: if it has had another shape.
    """
    if place is None:
        return states
    own = {n: each for n, each in laid_out.items() if each.ndim == 1 and states.get(n) is each}
    if own and place.shape != param.shape:
        raise OptimizerError(
            f"a parameter of shape {tuple(param.shape)} had shape {tuple(place.shape)} in the "
            "optimizer's last step, and its states have that. Make a new optimizer."
        )
    return states | {n: each.as_strided(place.shape, place.stride) for n, each in own.items()}


def slice_of(value: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a sharded state; other states as they are."""
    return value.local if isinstance(value, Sharded) else value


def _fits(value: torch.Tensor, own: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether ``value`` can be copied into the state ``own`` of ``param``."""
    if isinstance(value, Sharded):
        return isinstance(param, Sharded) and own.ndim == 1 and value._lines_up_with(param)
    if own.ndim == 1 and not isinstance(param, Sharded):
        return value.shape == param.shape
    # A step is 0-d, in torch.optim too.
    return value.shape == own.shape or (own.ndim == 1 and value.shape == param.shape)


def check_fits(
    param: torch.Tensor, values: dict[str, Any], states: dict[str, Any], names: Collection[str]
) -> None:
    """Make sure that ``values`` can be copied into the ``states`` of ``param``, those of ``names``.

    Raises:
        OptimizerError: with the first that is missing, of another shape, or cut otherwise.
    """
    if states and "momentum_buffer" in values:  # zshard.SGD makes it then, where it has none yet
        numel = param.local_numel if isinstance(param, Sharded) else param.numel()
        states = {"momentum_buffer": torch.empty(numel, device="meta")} | states
    for name, own in ((n, s) for n, s in states.items() if n in names):
        if name not in values or not _fits(values[name], own, param):
            label, due = str(tuple(param.shape)), own.shape
            if isinstance(param, Sharded):
                label = param.fqn
            elif own.ndim == 1:
                due = param.shape
            got = str(tuple(values[name].shape)) if name in values else "nothing"
            if isinstance(values.get(name), Sharded):
                got += ", cut into other shards"
            raise OptimizerError(
                f"state {name!r} of {label}: expected {tuple(due)}, got {got}. "
                "Shards fit the same model, unit map and number of ranks; others take "
                "whole tensors, or load by torch.distributed.checkpoint."
            )
