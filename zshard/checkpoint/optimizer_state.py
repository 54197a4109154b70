"""What of an optimizer belongs into a checkpoint, and how it gets it back.

States by parameter and name: tensors of the parameter's shape are stored as tensors; 0-d ones, such
as the number of steps, as {"value", "dtype", "on"}; other values as {"value"}. What an optimizer
keeps under a key that is no parameter, for all of them, is stored so under the name "".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim import Optimizer

from ..errors import InputError, OptimizerError
from ..layout import Range, memory_order
from ..optimizers.fused import FusedOptimizer
from ..optimizers.other_optimizers import check_states
from ..param import Sharded
from .held import Held, HeldSlice, HeldWhole
from .inventory import as_json, as_text, saved_range
from .manifest import Json, OptimizerRecord
from .tensorfile import CODES

COMMON = ""  # stands for a parameter's name where a state is of all of them
_NOT_FINITE = {str(value): value for value in (math.inf, -math.inf, math.nan)}


@dataclass
class OptimizerInventory:
    """An optimizer's states: the tensors, by key, and the rest."""

    record: OptimizerRecord
    tensors: dict[str, Held]


def optimizers_of(given: object, names: Mapping[int, str]) -> list[Optimizer]:
    """The optimizers that a call was given: None, one, or a list or tuple of them.

    Args:
        names: id of a parameter of the model -> its name.

    Raises:
        InputError: for anything else, or if one has a parameter that the model does not have, or
            two have one in common.
    """
    found: list[Optimizer] = []
    owner: dict[int, int] = {}
    several = isinstance(given, list | tuple)
    for number, optimizer in enumerate(_listed(given)):
        what = f"optimizer[{number}]" if several else "optimizer"
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                f"{what}: expected a torch.optim.Optimizer, or a list of them, got a "
                f"{type(optimizer).__name__}"
            )
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if id(param) not in names:
                raise InputError(
                    f"{what} has a parameter of shape {tuple(param.shape)} that the model does not "
                    "have; give the model whose parameters it updates"
                )
            if owner.setdefault(id(param), number) != number:
                raise InputError(
                    f"optimizer[{owner[id(param)]}] and {what} both have the parameter "
                    f"{names[id(param)]}, and a checkpoint holds one state of it. Save each "
                    "optimizer to a folder of its own, and load it from there"
                )
        found.append(optimizer)
    return found


def kinds_of(given: object) -> list[str]:
    """The classes of what a call was given for optimizers, by name."""
    return [type(each).__name__ for each in _listed(given)]


def _listed(given: object) -> Sequence[object]:
    if isinstance(given, list | tuple):
        return given
    return [] if given is None else [given]


def parameters_of(
    optimizer: Optimizer, names: Mapping[int, str]
) -> list[tuple[str, torch.Tensor, dict[str, Any]]]:
    """The optimizer's parameters: name, itself, and its group.

    Raises:
        OptimizerError: if it is one around another one.
    """
    _refuse_states_elsewhere(optimizer)
    groups = optimizer.param_groups
    return [(names[id(param)], param, group) for group in groups for param in group["params"]]


def optimizer_inventory(
    optimizer: Optimizer, names: Mapping[int, str], *, first: bool
) -> OptimizerInventory:
    """What ``optimizer`` holds.

    Args:
        names: id of a parameter of the model -> its name.
        first: whether this rank saves what all ranks have whole.

    Raises:
        InputError: for param_groups or states that JSON cannot hold.
        OptimizerError: for a tensor that has not one element for each of its parameter's; see also
            ``parameters_of`` and ``check_states``.
    """
    kind, params = type(optimizer).__name__, parameters_of(optimizer, names)
    if isinstance(optimizer, FusedOptimizer):
        optimizer.lay_out()
    else:
        for _, param, _ in params:
            if isinstance(param, Sharded):
                check_states(param, optimizer)
    groups = [
        _options_of(group, f"{kind}.param_groups[{number}]", names)
        for number, group in enumerate(optimizer.param_groups)
    ]
    unused = _never_used(optimizer)
    taken = _Taken(first=first)
    for name, param, _ in params:
        values = optimizer.state.get(param, {})
        left_out = names_of_rule(optimizer, values) if id(param) in unused else set()
        taken.add(name, param, {k: v for k, v in values.items() if k not in left_out})
    if common := common_state(optimizer):
        taken.add(COMMON, None, common)
    taken.read_scalars()
    record = OptimizerRecord(kind, groups, taken.state)
    return OptimizerInventory(record, taken.tensors)


def _options_of(group: Mapping[str, Any], what: str, names: Mapping[int, str]) -> dict[str, Json]:
    """A group of parameters, with these by their names."""
    options = {
        key: value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
        for key, value in group.items()
    }
    options["params"] = [names[id(param)] for param in group["params"]]
    return cast("dict[str, Json]", as_json(options, what))


class _Taken:
    """States that were taken stock of.

    Attributes:
        state: see ``OptimizerRecord``; 0-d tensors lack their values until ``read_scalars``.
        tensors: by the keys that ``state`` has for them.
    """

    def __init__(self, *, first: bool) -> None:
        self.state: dict[str, dict[str, dict[str, Json]]] = {}
        self.tensors: dict[str, Held] = {}
        self._first = first
        self._scalars: list[tuple[dict[str, Json], torch.Tensor]] = []

    def add(self, name: str, param: torch.Tensor | None, values: Mapping[Any, object]) -> None:
        """Take ``values``, those of ``param``, or of all parameters where that is None."""
        entries = self.state.setdefault(name, {})
        of = "" if param is None else f" of {name}"
        for key, value in values.items():
            if type(key) is not str:
                raise InputError(
                    f"the optimizer's state{of} has the key {key!r}; JSON has text for keys"
                )
            text = as_text(key, f"a key of the optimizer's state{of}")
            what = f"the optimizer's state {key!r}{of}"
            entries[text] = self._entry(name, param, key, value, what)

    def _entry(
        self, name: str, param: torch.Tensor | None, key: str, value: object, what: str
    ) -> dict[str, Json]:
        if not isinstance(value, torch.Tensor):
            return {"value": as_json(value, what)}
        if is_scalar(value):
            if value.dtype not in CODES:
                raise InputError(f"{what} is of {value.dtype}, which checkpoints do not have")
            entry: dict[str, Json] = {}
            self._scalars.append((entry, value))
            return entry
        if param is None:
            raise OptimizerError(
                f"{what}, which belongs to no parameter, is a tensor of shape "
                f"{tuple(value.shape)}, not one value; it cannot be saved"
            )
        self.tensors[f"{name}.{key}"] = held_state(param, name, key, value, first=self._first)
        return {"tensor": f"{name}.{key}"}

    def read_scalars(self) -> None:
        """Fill in the values of 0-d tensors, with one read-back for each dtype and device."""
        numbers = _read_back([value for _, value in self._scalars])
        for (entry, value), number in zip(self._scalars, numbers, strict=True):
            in_json = isinstance(number, int | float) and math.isfinite(number)
            entry["value"] = number if in_json else str(number)
            entry["dtype"] = str(value.dtype).removeprefix("torch.")
            entry["on"] = "host" if value.device.type == "cpu" else "device"


def common_state(optimizer: Optimizer) -> dict[Any, Any]:
    """What it keeps for all parameters: under keys of ``optimizer.state`` that are no tensors."""
    return {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}


def names_of_rule(optimizer: Optimizer, *states: Mapping[str, Any]) -> set[str]:
    """Which states are those of a zshard optimizer's rule, where ``states`` are; not the user's."""
    if not isinstance(optimizer, FusedOptimizer):
        return set()
    return {"step", *optimizer._state_names(states)}


def _refuse_states_elsewhere(optimizer: Optimizer) -> None:
    """Refuse an optimizer around another one, whose states ``optimizer.state`` does not show."""
    for name, value in vars(optimizer).items():
        several = value.values() if isinstance(value, dict) else value
        for inner in several if isinstance(value, (dict, list, tuple)) else [value]:
            if isinstance(inner, Optimizer) and inner.state is not optimizer.state:
                raise OptimizerError(
                    f"the {type(optimizer).__name__} keeps states outside of its own .state, "
                    f"in the {type(inner).__name__} of its .{name}; they would be lost. Give "
                    "zshard.save and zshard.load that one"
                )


def _never_used(optimizer: Optimizer) -> set[int]:
    """Ids of parameters whose states zshard's optimizer has made, and no step has come to.

    Those are saved as torch.optim has them, not at all: its SGD takes a momentum of zeros, too, for
    one that has begun.
    """
    if not isinstance(optimizer, FusedOptimizer):
        return set()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = {id(param): optimizer.state.get(param) for param in params}
    steps = {p: values["step"] for p, values in states.items() if values and "step" in values}
    counts = _read_back(list(steps.values()))
    return {param for param, count in zip(steps, counts, strict=True) if count == 0}


def is_scalar(value: object) -> bool:
    """Whether it is a value of its own, not one for each of a parameter's elements."""
    if not isinstance(value, torch.Tensor):
        return True
    return value.ndim == 0 and not isinstance(value, Sharded)


def held_state(
    param: torch.Tensor, name: str, key: str, value: torch.Tensor, *, first: bool
) -> Held:
    """A state of ``param``, of its shape, as checkpoints read and write it.

    Raises:
        OptimizerError: for a state of another shape.
    """
    if isinstance(param, Sharded):
        flat, segment = param.flat, param.segment
        here, place = flat.local(segment).elements, flat.layout.segments[segment]
        local = value.local if isinstance(value, Sharded) else value
        if local.ndim == 1 and local.numel() == here.numel:
            mine = saved_range(flat, segment)
            return HeldSlice(local, place.shape, place.order, here.begin, mine)
    elif value.shape == param.shape:
        return HeldWhole(value, saves=first)
    elif value.ndim == 1 and value.numel() == param.numel():  # of zshard's optimizers
        mine = Range(0, value.numel() if first else 0)
        return HeldSlice(value, param.shape, memory_order(param.stride()), 0, mine)
    raise OptimizerError(
        f"the optimizer's state {key!r} of {name} {tuple(param.shape)} is a tensor of shape "
        f"{tuple(value.shape)}, not one element for each of the parameter's; it cannot be saved. "
        "Save without the optimizer, or keep the state as a 0-d tensor or a number"
    )


def _read_back(scalars: Sequence[torch.Tensor]) -> list[float]:
    """The values of 0-d tensors, with one read-back for each dtype and device."""
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for index, value in enumerate(scalars):
        alike[value.dtype, value.device].append(index)
    numbers = [0.0] * len(scalars)
    for indices in alike.values():
        values = torch.stack([scalars[index].detach() for index in indices]).tolist()
        for index, number in zip(indices, values, strict=True):
            numbers[index] = number
    return numbers


def scalar_of(entry: Mapping[str, Json], device: torch.device) -> object:
    """What an entry without a tensor stands for."""
    value: object = entry["value"]
    dtype = entry.get("dtype")
    if dtype is None:
        return value
    if isinstance(value, str):
        value = complex(value) if dtype == "complex64" else _NOT_FINITE[value]
    where = "cpu" if entry["on"] == "host" else device
    return torch.tensor(value, dtype=getattr(torch, str(dtype)), device=where)
