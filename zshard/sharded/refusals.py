"""What is said where an operation cannot be carried out on the slices of sharded tensors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import torch

from ..errors import OptimizerError, ShardedAccessError, StateError
from ..param import Sharded, ShardedGrad
from ..repeated import NEVER_CALLED
from ..training_state import TrainingState, modules_called
from ..words import counted

if TYPE_CHECKING:
    from ..unit import Unit

_WRAPPERS = {
    "DistributedDataParallel": "torch.nn.parallel.distributed",
    "DataParallel": "torch.nn.parallel.data_parallel",
    "FSDP": "torch.distributed.fsdp",
}
_COLLECTIVES = ("c10d::", "_c10d_functional::")
_NORMS = ("aten::linalg_vector_norm", "aten::norm", "aten::_foreach_norm")
WHOLE_TENSORS = (
    "An optimizer that needs whole tensors (Muon, Adafactor, LAMB) takes ones of your own: "
    "zshard.full_param(model, name) of each parameter, with zshard.full_grad(model, name) as its "
    ".grad before a step; then copy them into the parameters inside "
    "zshard.full_params(model, write=True)."
)

# Of torch, what looks for the node of the graph that accumulates a parameter's gradient.
_NEED_THE_NODE = ("register_multi_grad_hook", "get_gradient_edge", "_apply_optimizer_in_backward")

# Code that runs when what its call has made is asked to go on.
_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_LOOKS_AT = "What only looks at values, as a hook, can do so between steps, with zshard.full_param."


def refuse_whole_tensor_op(name: str, first: Sharded) -> NoReturn:
    """Raise a ShardedAccessError that says what to do instead of ``name``.

    Args:
        first: of the sharded tensors among its arguments.
    """
    if name == "aten::_amp_foreach_non_finite_check_and_unscale_":
        raise ShardedAccessError(
            f"{first.fqn}: torch.amp.GradScaler would look for overflow in this rank's shards "
            "alone, and ranks would skip different steps. Use zshard.GradScaler instead; it takes "
            "the same arguments."
        )
    if name in _NORMS:
        raise ShardedAccessError(
            f"{name} of {first.fqn!r} would be the norm of this rank's part alone. Clip with "
            "zshard.clip_grad_norm_(model, max_norm), which returns the norm over all ranks; take "
            "other norms of what zshard.full_param(model, name) and zshard.full_grad read. "
            f"{WHOLE_TENSORS}"
        )
    called = {frame.f_code.co_name for frame in _callers()}
    if "_broadcast_state_dict" in called:
        raise ShardedAccessError(
            f"broadcast_from_rank0 sends whole tensors, and {first.fqn!r} is sharded in the "
            "state_dict of rank 0, as torch's get_model_state_dict, get_optimizer_state_dict and "
            "get_state_dict give it, also with full_state_dict=True: leave out "
            "broadcast_from_rank0, and let every rank set what it got. Or pass whole tensors "
            "(zshard.state_dict(model)), or use zshard.save and zshard.load."
        )
    if name.startswith(_COLLECTIVES):
        raise ShardedAccessError(
            f"{name} of {first.fqn!r} would join elements that are not the same on each rank: "
            "leave it out. Gradients are averaged over the ranks as backward ends, and "
            "zshard.wrap(init='broadcast') gives every rank rank 0's values. Read whole tensors "
            "with zshard.full_param(model, name) and zshard.full_grad."
            + (f" {WHOLE_TENSORS}" if in_step() else "")
        )
    if isinstance(first, ShardedGrad):
        raise ShardedAccessError(
            f"{name} needs the whole gradient of {first.fqn!r} {tuple(first.shape)}, of which this "
            f"rank holds {counted(first.local_numel, 'element')}: on every rank, read it with "
            "zshard.full_grad(model, name), and assign what is to replace it (param.grad = whole). "
            f"{WHOLE_TENSORS}"
        )
    if seeker := next((each for each in _NEED_THE_NODE if each in called), None):
        raise ShardedAccessError(
            f"{seeker} needs the graph's node at {first.fqn!r}, and a sharded parameter has none: "
            "give it a hook, which has this rank's whole gradient (register_hook), or is called "
            "once the reduced one is there (register_post_accumulate_grad_hook)."
        )
    raise ShardedAccessError(
        f"{name} needs the whole of {first.fqn!r} {tuple(first.shape)}, of which this rank holds "
        f"{counted(first.local_numel, 'element')}. {_remedy(first)}"
    )


def refuse_plain(name: str, first: Sharded, plain: torch.Tensor, *, of_optimizer: bool) -> NoReturn:
    """Raise a ShardedAccessError for ``plain`` among the arguments of ``name``.

    Args:
        first: of the sharded tensors among them.
        of_optimizer: whether it is likely an optimizer that has called it.
    """
    state = (
        "In an optimizer, its state is of whole tensors, made before zshard.wrap or loaded "
        "from a plain state_dict, which zshard's optimizers take. An average of the weights (EMA) "
        "is made of parameters after zshard.wrap; or copy the model before it, and wrap both."
    )
    if in_step():  # whose states were looked at before: it has made the plain one itself
        advice = WHOLE_TENSORS
    elif of_optimizer:
        advice = f"{state} Elsewhere: {_remedy(first)}"
    else:
        advice = f"{_remedy(first)} {state}"
    raise ShardedAccessError(
        f"{name} mixes the sharded {first.fqn!r} with a plain tensor of shape "
        f"{tuple(plain.shape)}. {advice}"
    )


def refuse_split(name: str, target: Sharded) -> NoReturn:
    """Raise an OptimizerError, as ``name`` would write to ``target``, whose master is split."""
    raise OptimizerError(
        f"{name} would change {target.fqn!r} in place, whose master is split into two 16-bit "
        "planes. Only zshard's optimizers update it: use zshard.AdamW, Adam or SGD, or "
        "Precision(master='fp32'); by hand, copy_ whole values, or write inside "
        "zshard.full_params(model, write=True)."
    )


def refuse_to_divide(name: str, grad: ShardedGrad) -> NoReturn:
    """Raise an OptimizerError, as ``name``, a fused optimizer, would divide in another dtype."""
    dtypes = grad.flat.dtypes
    remedy = "Reduce in fp32, or use zshard's optimizers."
    if dtypes.reduce != torch.float16:  # which is divided nowhere but in those
        remedy += " Or call scaler.unscale_(optimizer) before scaler.step, or pass fused=False."
    raise OptimizerError(
        f"{name} divides gradients by the loss scale where they lie, in {dtypes.master}, but that "
        f"of {grad.fqn!r} is {dtypes.reduce}. {remedy}"
    )


def _remedy(param: Sharded) -> str:
    """What to do where ``param`` is whole nowhere, and an operation needs all of it."""
    if wrapper := _wrapper_at_work():
        return (
            f"{wrapper} is at work on a model that zshard.wrap has sharded already, which takes "
            "its place: leave it out. (README, 'Under a trainer', says how, where a library does "
            "this by itself.)"
        )
    if in_step():
        return WHOLE_TENSORS
    unit, state = param.flat.unit, param.flat.schedule.executor.state
    if _calls_itself(unit.module):
        return (
            f"It is used in the __call__ of {type(unit.module).__name__}, outside of nn.Module's, "
            "which gathers. Call that in the forward of a module around it, and "
            + ("wrap that one." if unit.parent is None else "make that one the unit (units=).")
        )
    if held := _whole_in(param):
        return (
            f"It is whole now, as {held}: read it there, anew each time. What else refers to it, "
            "such as a list that was made of parameters before, has the sharded one."
        )
    label, user = unit.label, _called_past(unit)
    outside = f"is used outside the module of its unit {label!r}"
    names = param.flat.all_names[param.segment]
    if user and not all(name.startswith(f"{user}.") for name in names):
        outside += (
            f", which has all of its names ({', '.join(names)}): call {user!r} in "
            f"{_a_forward_of(unit)}, or in a method that zshard.method(model, name) has "
            "gather"
        )
        if state is TrainingState.IDLE:
            return f"It {outside}."
    else:
        outside += (
            f": make {repr(user) if user else 'the module that uses it'} a unit "
            "(zshard.wrap(units=...))"
        )
    if state is TrainingState.BACKWARD and not user:
        return (
            "In a backward the modules hold shards again once their unit has all its gradients: an "
            "autograd.Function that needs weights there takes them as inputs of apply(), and "
            "saves them (ctx.save_for_backward); the module that calls apply() has to be the unit "
            f"(units=), or they are shards there, too. {_LOOKS_AT} In a forward that is recomputed "
            f"there, it {outside}."
        )
    if state is not TrainingState.IDLE:
        return (
            f"It {outside}. Or else {label!r} was called past its forward: module(...), not "
            "module.forward(...), gathers. Its other methods work where it is no unit (units=). "
            f"{_LOOKS_AT}"
        )
    if frame := _method_at_work(param.flat.schedule.root.module):
        method = frame.f_code.co_name
        if frame.f_code.co_flags & _LATER:
            return (
                f"The model's {method}() is a generator, or a coroutine, and computes behind the "
                "end of its call, outside of a forward. Go through it in a method that "
                "zshard.method(model, name) has gather."
            )
        return (
            f"The model's {method}() uses it outside of a forward: call zshard.method(model, "
            f"{method!r}) once, and it gathers what it computes with; or, to read or write "
            "parameters, call it inside zshard.full_params(model), with write=True to write. "
            "What adds parameters, or changes their shapes, comes before zshard.wrap."
        )
    return (
        "Read it with zshard.full_param(model, name), a gradient with zshard.full_grad, or work on "
        "whole parameters inside zshard.full_params(model), with write=True to change them. "
        "A penalty on weights, for a loss, is computed in a forward: what full_param reads has no "
        "graph. In a forward, that was called past the module (model(...), not model.forward(...), "
        "gathers), it is another method (which gathers after zshard.method(model, name)), or the "
        f"parameter {outside}."
    )


def _whole_in(param: Sharded) -> str:
    """Where the whole of ``param`` is found, in words, if a module holds that now; or ""."""
    flat, segment = param.flat, param.segment
    if not (flat.unit.installed or flat.schedule.whole):
        return ""  # what else is there is the user's
    sharded: torch.Tensor = flat.params[segment]
    for site in (s for s in flat.unit.sites if s.flat is flat and s.segment == segment):
        held = site.module._parameters.get(site.attribute)
        if held is not None and held is not sharded:
            return f"the attribute {site.attribute!r} of its {type(site.module).__name__}"
    return ""


def _calls_itself(module: torch.nn.Module) -> bool:
    """Whether its class's own ``__call__`` runs it (gpytorch's), and not nn.Module's."""
    own = any(
        frame.f_code.co_name == "__call__" and frame.f_locals.get("self") is module
        for frame in _callers()
    )
    return own and all(called is not module for called in modules_called())


def _called_past(unit: Unit) -> str:
    """The outermost module of ``unit`` that is called, where the unit's own is not; or ""."""
    names = {id(module): name for name, module in unit.module.named_modules(prefix=unit.name)}
    inside = [names[id(module)] for module in modules_called() if id(module) in names]
    return inside[-1] if inside and inside[-1] != unit.name else ""


def _a_forward_of(unit: Unit) -> str:
    """What gathers ``unit``, in words."""
    if type(unit.module) not in NEVER_CALLED:
        return f"a forward of {unit.label!r}"
    return (
        f"the forward of a module around the nn.{type(unit.module).__name__}, which is wrapped in "
        "its place (`return self.models[name](*args)`)"
    )


def _method_at_work(model: torch.nn.Module) -> FrameType | None:
    """The innermost public method of ``model``, none of nn.Module's, that calls this.

    Those further out may be a whole training loop, which cannot gather as one.
    """
    own = {name for name in dir(type(model)) if name[0] != "_"} - set(dir(torch.nn.Module))
    methods = (frame for frame in _callers() if frame.f_locals.get("self") is model)
    return next((frame for frame in methods if frame.f_code.co_name in own), None)


def _callers() -> Iterator[FrameType]:
    """The frames that this is called from, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def in_step() -> bool:
    """Whether an optimizer is at work, and not in its closure, which runs with gradients.

    So do the steps of some (Prodigy), which write to .data: there it is their own line that asks.
    """
    callers: Iterator[FrameType] = _callers()
    if torch.is_grad_enabled():
        libraries = (__name__.partition(".")[0], torch.__name__)
        asking = (f for f in callers if _package_of(f) not in libraries)
        callers = islice(asking, 1)
    return any(isinstance(f.f_locals.get("self"), torch.optim.Optimizer) for f in callers)


def _package_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def _wrapper_at_work() -> str | None:
    """The data-parallel wrapper of torch that this is called from."""
    for frame in _callers():
        module = frame.f_globals.get("__name__", "")
        for wrapper, package in _WRAPPERS.items():
            if module.startswith(package):
                return wrapper
    return None


def refuse_as_inputs(inputs: torch.Tensor | Sequence[object] | None) -> None:
    """Raise if a parameter is among ``inputs``, of which gradients are wanted."""
    for each in (inputs,) if isinstance(inputs, torch.Tensor) else inputs or ():
        if isinstance(each, Sharded) and each._of_model:
            raise StateError(
                f"{each.fqn}: no graph leads to the sharded parameter, because units compute with "
                "whole ones; so torch.autograd.grad and backward(inputs=...) would find no "
                "gradient of it. Call loss.backward() and read .grad or zshard.full_grad(model, "
                "name). Freeze (requires_grad_(False)) before the forward what is to have none."
            )
