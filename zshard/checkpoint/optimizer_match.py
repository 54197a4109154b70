"""Which states of a checkpoint go where in an optimizer, and how it gets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import OptimizerError
from ..optimizers.fused import FusedOptimizer
from ..param import Sharded
from .inventory import Inventory
from .manifest import Json, Manifest, OptimizerRecord
from .match import Match
from .optimizer_state import (
    COMMON,
    common_state,
    held_state,
    is_scalar,
    kinds_of,
    names_of_rule,
    parameters_of,
    scalar_of,
)


@dataclass
class OptimizerMatch:
    """The states to be read, and what to do with them then.

    Attributes:
        match: of the whole load, which is told of the tensors.
        states: parameter -> what its state is to be.
        common: what the state of all parameters is to be, by key.
    """

    optimizer: Optimizer
    match: Match
    states: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def finish(self) -> None:
        """Hand the states, now filled, to the optimizer."""
        optimizer = self.optimizer
        for group, options in self.groups:
            group.update(options)
        for key in common_state(optimizer).keys() - self.common.keys():
            del optimizer.state[key]
        optimizer.state.update(self.common)  # type: ignore[arg-type]
        if not isinstance(optimizer, FusedOptimizer):
            optimizer.state.update(self.states)
            return
        for param, state in self.states.items():
            own = optimizer.state.setdefault(param, {})
            for key, value in state.items():
                if isinstance(own.get(key), torch.Tensor):
                    if own[key] is not value:
                        own[key].copy_(value)
                else:
                    own[key] = value
        optimizer.tell_ledgers()


@torch.inference_mode(False)  # states outlive a load there
@torch.no_grad()
def match_optimizers(
    saved: Manifest, optimizers: Sequence[Optimizer], inventory: Inventory, match: Match
) -> list[OptimizerMatch]:
    """Find the place of every state; makes those that the optimizers do not have yet.

    Raises:
        OptimizerError: for an optimizer around another one.
    """
    params = [parameters_of(optimizer, inventory.names) for optimizer in optimizers]
    if not optimizers:
        return []
    if not saved.optimizers:
        match.missing.append("the optimizer's states")
        return []
    then, now = [record.kind for record in saved.optimizers], kinds_of(optimizers)
    if then != now:
        was, given = ", ".join(then), ", ".join(now)
        match.problems.append(f"the optimizer: {was} was saved, and it is {given} now")
        return []
    return [
        _match_optimizer(saved, record, optimizer, its, inventory, match)
        for record, optimizer, its in zip(saved.optimizers, optimizers, params, strict=True)
    ]


def _match_optimizer(
    saved: Manifest,
    record: OptimizerRecord,
    optimizer: Optimizer,
    params: Sequence[tuple[str, torch.Tensor, dict[str, Any]]],
    inventory: Inventory,
    match: Match,
) -> OptimizerMatch:
    found = OptimizerMatch(optimizer, match)
    if isinstance(optimizer, FusedOptimizer):
        optimizer.lay_out()
    key_of = {name: name for name in record.state}
    for alias, name in saved.aliases.items():
        if name in record.state:
            key_of.setdefault(alias, name)
    names: dict[str, str] = {}  # of a parameter now -> its name in the checkpoint
    for name, param, group in params:
        key = next((key_of[n] for n in inventory.names_of[name] if n in key_of), None)
        if key is None:
            match.missing.append(f"the optimizer's state of {name}")
            continue
        names[name] = key
        found.states[param] = _state(found, saved, record, group, param, name, key)
    for key, entry in record.state.get(COMMON, {}).items():
        # Beside the parameters, where they all are in one place.
        device = params[0][1].device if params else torch.device("cpu")
        found.common[key] = _value(entry, f"the optimizer's state {key!r}", device, match)
    of_others = record.state.keys() - {COMMON, *names.values()}
    match.unexpected += [f"the optimizer's state of {n}" for n in record.state if n in of_others]
    _match_groups(found, record.groups, inventory, names)
    return found


def _state(
    found: OptimizerMatch,
    saved: Manifest,
    record: OptimizerRecord,
    group: dict[str, Any],
    param: torch.Tensor,
    name: str,
    key: str,  # its name in the checkpoint
) -> dict[str, Any]:
    """The state of one parameter, of which tensors are to be filled yet."""
    optimizer, match = found.optimizer, found.match
    entries = record.state[key]
    fused = isinstance(optimizer, FusedOptimizer)
    there = optimizer.state.get(param, {}) if fused else {}
    rule = names_of_rule(optimizer, there, entries)  # the others are the user's
    now, then = rule & there.keys(), rule & entries.keys()
    uncounted = then == {"momentum_buffer"}  # torch.optim.SGD counts no steps
    if now and then and now != then | ({"step"} if uncounted else set()):
        match.problems.append(
            f"the optimizer's state of {name}: {sorted(entries)} were saved, and it has "
            f"{sorted(there)} now"
        )
        return {}
    state: dict[str, Any] = {}
    for state_name, entry in entries.items():
        label = f"the optimizer's state {state_name!r} of {name}"
        before = there.get(state_name)
        scalar = "tensor" not in entry
        if scalar:
            value = _value(entry, label, param.device, match)
            if not fused and state_name == "step":
                value = _as_torch_counts(value, group, param)
        else:
            stored = saved.tensors["optimizer"][str(entry["tensor"])]
            of_master = stored.torch_dtype == _updated_dtype(saved, key)
            dtype = _dtype_now(stored.torch_dtype, optimizer, param, of_master=of_master)
            value = before if torch.is_tensor(before) else _empty_state(param, dtype)
        # torch.optim's state of a 0-d parameter is 0-d, that of zshard's optimizers 1-D.
        alike = is_scalar(before) == scalar or param.ndim == 0
        alike = alike and torch.is_tensor(value) == torch.is_tensor(before)
        if state_name in there and not alike:
            match.problems.append(f"{label}: a scalar was saved, or is there now, but not both")
            continue
        state[state_name] = value
        if not scalar:
            assert isinstance(value, torch.Tensor)
            held = held_state(param, name, state_name, value, first=False)
            match.add(label, stored, held, cast=held.dtype == dtype)
    if now and uncounted:
        state["step"] = torch.ones_like(there["step"])
    if now and not then:  # as before the first step
        state |= {name: torch.zeros_like(there[name]) for name in now}
    return state


def _value(entry: dict[str, Json], label: str, device: torch.device, match: Match) -> object:
    """A state that is one value; None if it is none, which ``match`` is told."""
    try:
        return scalar_of(entry, device)
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        match.problems.append(f"{label}: {error!r}")
        return None


def _as_torch_counts(step: object, group: dict[str, Any], param: torch.Tensor) -> object:
    """A count of steps as torch.optim's kernels take it; zshard's is an integer on the device."""
    if not (isinstance(step, torch.Tensor) and step.dtype == torch.int64):
        return step
    on_device = group.get("fused") or group.get("capturable")
    return step.to(param.device if on_device else "cpu", torch.float32)


def _is_known(optimizer: Optimizer) -> bool:
    """Whether its states are in the dtype of what it updates: torch.optim's, and zshard's."""
    rules = [each for each in type(optimizer).__mro__ if each not in Optimizer.__mro__]
    return any(rule.__module__.startswith(("torch.optim.", "zshard.")) for rule in rules)


def _updated_dtype(saved: Manifest, key: str) -> torch.dtype | None:
    """The dtype that the optimizer which was saved updated a parameter in."""
    stored = saved.tensors["master"].get(key) or saved.tensors["model"].get(key)
    return None if stored is None else stored.torch_dtype


def _dtype_now(
    saved: torch.dtype, optimizer: Optimizer, param: torch.Tensor, *, of_master: bool
) -> torch.dtype:
    """The dtype that a state is to have which was saved in another, or the same.

    What is in the dtype of what is updated follows that, as torch has it: it is another where a
    bf16 parameter is ignored now, and was not then, or the other way. Another library's may be fp32
    for every parameter, and is not to be rounded; in a wider dtype it has the same value, and goes
    on in the precision of the master.

    Args:
        of_master: whether it was saved in the dtype of what was updated then.
    """
    if not of_master:  # nor does torch promote every dtype: float8 to none
        return saved
    updated = param.flat.dtypes.master if isinstance(param, Sharded) else param.dtype
    exact = torch.promote_types(saved, updated) == updated
    return updated if exact or _is_known(optimizer) else saved


def _empty_state(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(param, Sharded):
        return torch.empty_like(param, dtype=dtype)
    return param._like(torch.empty(param.local_numel, dtype=dtype, device=param.device))


def _match_groups(
    found: OptimizerMatch,
    groups: list[dict[str, Json]],
    inventory: Inventory,
    names: dict[str, str],  # of a parameter now -> its name in the checkpoint
) -> None:
    """Find the saved options of every group of parameters."""
    optimizer = found.optimizer
    group_of: dict[str, int] = {}
    for number, options in enumerate(groups):
        params = options["params"]
        assert isinstance(params, list)
        group_of.update({str(name): number for name in params})
    for number, group in enumerate(optimizer.param_groups):
        own = [names[n] for p in group["params"] if (n := inventory.names[id(p)]) in names]
        sources = {group_of[name] for name in own if name in group_of}
        if not group["params"] and number < len(groups) and not groups[number]["params"]:
            sources = {number}
        # With a name: of several optimizers it tells whose group it is.
        what = f"param_groups[{number}]" + (f" (with {own[0]})" if own else "")
        if len(sources) > 1:
            found.match.problems.append(f"{what}: its parameters were in groups {sorted(sources)}")
        elif sources:
            try:
                options = _options_for(optimizer, group, groups[sources.pop()])
            except (OptimizerError, TypeError, RuntimeError) as error:
                found.match.problems.append(f"{what}: {error}")
            else:
                found.groups.append((group, options))


def _options_for(
    optimizer: Optimizer, group: Mapping[str, Any], saved: dict[str, Json]
) -> dict[str, Any]:
    """The ``saved`` options of a group as ``group`` is to have them.

    Raises:
        OptimizerError: if they are of another rule.
        TypeError, RuntimeError: if one cannot be what ``group`` has in its place, a tensor.
    """
    if isinstance(optimizer, FusedOptimizer):
        saved = optimizer.own_settings(saved)
    # What the group does not have is a scheduler's, or the user's.
    names = ("params", "param_names")
    options = {key: _like(group.get(key), v) for key, v in saved.items() if key not in names}
    for key, value in _unsaved(optimizer).items():
        if key in group:
            options.setdefault(key, value)
    return options


def _like(old: object, value: Json) -> object:
    """``value`` as what it takes the place of: a tuple, which JSON has as a list, or a tensor."""
    if isinstance(old, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, value)  # type: ignore[arg-type]
    return value


def _unsaved(optimizer: Optimizer) -> dict[str, object]:
    """What zshard's Adam and AdamW do not save, since it is the same for all of these."""
    decoupled = type(optimizer).__name__ == "AdamW"
    return dict(amsgrad=False, maximize=False, decoupled_weight_decay=decoupled)
