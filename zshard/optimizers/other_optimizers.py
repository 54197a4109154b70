"""Other libraries' optimizers over sharded parameters: what is looked at before their steps.

torch calls a hook before every optimizer's step. It finds what those operations on shards that an
optimizer consists of would come to know too late, or not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import OptimizerError
from ..param import Sharded
from ..sharded.slices import own_slice
from ..step.updates import note_step
from .buckets import has_grad
from .fused import FusedOptimizer
from .stand_ins import refuse_lost_step, refuse_parameters_of_a_copy

# What of a group says how a step is computed, and not which step.
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}

# Steps under way, as traces and the profiler show them; one that has raised ends with the next.
_shown: WeakKeyDictionary[Optimizer, ExitStack] = WeakKeyDictionary()


@functools.cache
def look_after() -> None:
    """Check every other optimizer's steps from now on, and show them."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(
    optimizer: Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Check that all ranks make the same step, and that it cannot fail halfway.

    Raises:
        OptimizerError: if it has states of whole tensors for sharded parameters, or others' shards;
            if nothing of the model would change; if it steps each parameter on one rank alone.
        StateError: if no_sync holds back a gradient; as ``Backward.require_gradients``.
    """
    # A closure runs the last backward of the step, which may be the one that reduces.
    has_closure = any(callable(each) for each in (*args[1:], kwargs.get("closure")))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        refuse_lost_step(param, has_closure=has_closure)
    if isinstance(optimizer, FusedOptimizer):
        return
    schedules = dict.fromkeys(p.flat.schedule for p in params if isinstance(p, Sharded))
    # By name: to import it takes long, and warns.
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if schedules and "ZeroRedundancyOptimizer" in kinds:
        raise OptimizerError(
            "ZeroRedundancyOptimizer steps each parameter on one rank, and of a sharded one every "
            "rank has a part. zshard.wrap takes its place: leave it out, and give its "
            "optimizer_class the parameters."
        )
    if not has_closure:
        refuse_parameters_of_a_copy(params)
        for schedule in schedules:
            schedule.backward.require_gradients()
    settings: list[dict[str, object]] = []
    for group in optimizer.param_groups:
        sharded = [param for param in group["params"] if isinstance(param, Sharded)]
        for param in sharded:
            if not has_closure:
                has_grad(param)  # which refuses one that no_sync holds back
            check_states(param, optimizer)
        if sharded:
            numbers = {k: _number(group[k]) for k in sorted(group.keys() - _HOW)}
            settings.append({k: value for k, value in numbers.items() if value is not None})
    note_step(type(optimizer).__name__, optimizer.param_groups, settings)
    _end(optimizer)
    if schedules and not has_closure:  # which would be all of the step, forward and backward
        _shown[optimizer] = shown = ExitStack()
        for schedule in schedules:
            shown.enter_context(schedule.executor.doing("step", schedule.root))


def _after_step(
    optimizer: Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    _end(optimizer)


def _end(optimizer: Optimizer) -> None:
    if (shown := _shown.pop(optimizer, None)) is not None:
        shown.close()


def check_states(param: Sharded, optimizer: Optimizer) -> None:
    """Cut whole states of ``param`` to its shard where nothing is lost by that; refuse others.

    Raises:
        OptimizerError: for a state of the whole parameter, or of another shard.
    """
    states = optimizer.state.get(param, {})
    cut = any(isinstance(value, Sharded) for value in states.values())
    for name, value in list(states.items()):
        if isinstance(value, Sharded) and not value._lines_up_with(param):
            raise OptimizerError(
                f"the optimizer's state {name!r} of {param.fqn} is cut for another model, unit map "
                "or number of ranks. Take it over by zshard.save and zshard.load, or "
                "torch.distributed.checkpoint."
            )
        if not isinstance(value, torch.Tensor) or isinstance(value, Sharded):
            continue
        if value.shape != param.shape or name == "step":
            continue
        if value.numel() == 1 and _is_number(name, value.shape, optimizer):
            continue
        # Made before wrap, as Adagrad does at once; or of a single element, whose whole state is as
        # good as cut. (Beside those that are, a 0-d one is a number: NAdam's product of momenta.)
        single = param.ndim == 0 and value.is_floating_point() and not cut
        if single or _number(states.get("step")) == 0:
            dtype = param.flat.dtypes.master
            states[name] = param._like(own_slice(param, value).to(dtype, copy=True))
        elif value.ndim > 0:
            raise OptimizerError(
                f"the optimizer's state {name!r} of {param.fqn} is of the whole parameter: it had "
                "taken steps before zshard.wrap, a plain state_dict was loaded, or it makes such "
                "states itself and cannot work on shards. Wrap the model first, or make a new "
                "optimizer; zshard's take plain state_dicts."
            )


def _is_number(name: str, shape: torch.Size, optimizer: Optimizer) -> bool:
    """Whether state ``name`` has ``shape`` for parameters of other shapes, too."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = ((param, optimizer.state.get(param, {}).get(name)) for param in params)
    states = ((p, state) for p, state in found if isinstance(state, torch.Tensor))
    return any(state.shape == shape != param.shape for param, state in states)


def _number(value: object) -> object:
    """A setting as it is compared; what is on a GPU is not waited for."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.is_cpu and value.numel() == 1 else None
    numbers = value if isinstance(value, (tuple, list)) else [value]
    return value if all(isinstance(each, (int, float)) for each in numbers) else None
