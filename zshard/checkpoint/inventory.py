"""What of a model belongs into a checkpoint, tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import InputError
from ..layout import Range
from ..param import Sharded
from ..schedule import Schedule
from ..unitmap import owned_parameters, persistent_buffers, state_key
from ..units.flat import Flat
from .held import Held, HeldMaster, HeldWhole
from .manifest import Json


@dataclass
class Inventory:
    """The tensors of a model, by their first key in its state_dict, in order of registration.

    Attributes:
        parameters: in their own dtypes; masters: those whose master has another, in that.
        aliases: further names of a tied weight or a shared buffer, and names that such a key was
            made of -> its first name.
        extra_state: what modules with a ``get_extra_state`` give, by key in the state_dict.
        ignored: those of the parameters that every rank has whole.
    """

    parameters: dict[str, Held] = field(default_factory=dict)
    masters: dict[str, Held] = field(default_factory=dict)
    buffers: dict[str, Held] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra_state: dict[str, Json] = field(default_factory=dict)
    ignored: dict[str, HeldWhole] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)  # id of a parameter -> its first name

    def add_aliases(self, registered: Iterable[str], first: str) -> None:
        """Note by which names the tensor is registered that is called ``first``."""
        for name in registered:
            self.aliases.update({each: first for each in (state_key(name), name) if each != first})

    @cached_property
    def names_of(self) -> dict[str, list[str]]:
        """The first name of every tensor -> all of its names, that before the others."""
        names = {name: [name] for name in self.parameters | self.buffers}
        for alias, first in self.aliases.items():
            names[first].append(alias)
        return names


def inventory_of(schedule: Schedule) -> Inventory:
    """What the wrapped model holds.

    Raises:
        InputError: for an extra state that JSON cannot hold; for a tensor that is sparse or whose
            class keeps its values in others.
        StateError, WrapError: for parameters or modules replaced, added or removed after wrap.
    """
    schedule.structure.check_unchanged()
    for unit in schedule.units:
        unit.require_parameters()
    found = Inventory()
    first = schedule.comm.world_rank == 0
    for owned in owned_parameters(schedule.model, ()):
        name, param = state_key(owned.name), owned.param
        found.names[id(param)] = name
        found.add_aliases(owned.names, name)
        if not isinstance(param, Sharded):
            found.parameters[name] = found.ignored[name] = _held(name, param, saves=first)
            continue
        flat, mine = param.flat, saved_range(param.flat, param.segment)
        found.parameters[name] = HeldMaster(flat, param.segment, mine, flat.dtypes.param)
        if flat.dtypes.param != flat.dtypes.master:
            found.masters[name] = HeldMaster(flat, param.segment, mine, flat.dtypes.master)
    seen: dict[int, str] = {}
    modules = schedule.model.named_modules(remove_duplicate=False)
    for name, buffer in persistent_buffers(modules):
        key = seen.setdefault(id(buffer), state_key(name))
        found.add_aliases([name], key)
        found.buffers[key] = _held(key, buffer, saves=first)
    for key, module in _with_extra_state(schedule.model):
        found.extra_state[key] = as_json(module.get_extra_state(), f"{key} (get_extra_state)")
    return found


def _held(name: str, tensor: Tensor, *, saves: bool) -> HeldWhole:
    if tensor.layout is not torch.strided:
        raise InputError(
            f"{name} is a tensor of {tensor.layout}, which checkpoints do not hold; make it dense, "
            "or a buffer with persistent=False"
        )
    if is_traceable_wrapper_subclass(tensor):
        raise InputError(
            f"{name} is a {type(tensor).__name__}, which checkpoints do not hold: save the model "
            "by torch.save(zshard.state_dict(model), path), or make this a buffer with "
            "persistent=False"
        )
    return HeldWhole(tensor, saves=saves)


def saved_range(flat: Flat, segment: int) -> Range:
    """The elements of a segment that this rank saves, counted from the segment's first."""
    comm = flat.schedule.comm
    piece = flat.layout.piece(comm.replicas.rank)
    shard = flat.layout.shard(comm.rank).begin
    return flat.layout.local(segment, Range(shard + piece.begin, shard + piece.end)).elements


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield state_key(f"{prefix}._extra_state" if prefix else "_extra_state"), module


def set_extra_state(model: nn.Module, states: dict[str, Json]) -> None:
    """Give modules back what their ``get_extra_state`` gave."""
    for key, module in _with_extra_state(model):
        if key in states:
            module.set_extra_state(states[key])


def as_json(value: object, what: str) -> Json:
    """``value``, if JSON gives it back, but for tuples, which become lists.

    Raises:
        InputError: naming the part that it would not.
    """
    try:
        found = _as_json(value, what)
        json.dumps(found)  # which refuses whole numbers of thousands of digits
    except InputError:
        raise
    except (RecursionError, ValueError) as error:
        raise InputError(f"{what} cannot be written as JSON: {error}") from error
    return found


def _as_json(value: object, what: str) -> Json:
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                raise InputError(
                    f"{what} has the key {key!r}; JSON has text for keys: make it text, or leave "
                    f"{what} out (a scheduler's constructor sets it anew)"
                )
        return {as_text(key, what): _as_json(v, f"{what}[{key!r}]") for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item, f"{what}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(
            f"{what} is {value}, which JSON does not have; store it as text, or leave it out"
        )
    if type(value) is str:
        return as_text(value, what)
    if isinstance(value, float):  # also numpy's
        return float(value)
    if value is None or type(value) in (bool, int):
        return value  # type: ignore[return-value]
    remedy = ". Tensors belong into buffers of the model" if isinstance(value, Tensor) else ""
    raise InputError(
        f"{what} is a {type(value).__name__}, which JSON does not have: store None, booleans, "
        f"numbers, text, lists and dicts of them{remedy}"
    )


def as_text(value: str, what: str) -> str:
    """``value``, if it is Unicode text that can be encoded.

    Raises:
        InputError: if not.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} has text that is no Unicode: {error}") from error
    return value
