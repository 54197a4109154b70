"""What may be done to sharded tensors: elementwise operations, on the local slices.

torch's own optimizers come here for every operation on every parameter. An operator's arguments and
results are tensors, lists of tensors, or neither, and never lie deeper, which is why a loop finds
them where a walk through a pytree would cost more than everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..errors import ShardedAccessError, StateError
from ..param import Sharded, ShardedGrad
from ..training_state import modules_called
from ..units.storage import memory_of, storage_of
from .operators import Operator, operator
from .refusals import (
    in_step,
    refuse_plain,
    refuse_split,
    refuse_to_divide,
    refuse_whole_tensor_op,
)
from .rows import apart, plain_rows
from .slices import own_slice, recut

if TYPE_CHECKING:
    from ..units.flat import Flat

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_COPY = torch.ops.aten.copy_.default
_TO_COPY = torch.ops.aten._to_copy.default


def run(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Carry ``func`` out on the local slices.

    A collective where tensors meet that are cut in different places; see ``slices.recut``.

    Raises:
        ShardedAccessError: if it needs whole tensors.
        StateError: if it would change a parameter's dtype or device.
        OptimizerError: if it would change a split master.
    """
    op = operator(func)
    sharded = _sharded_in((*args, *kwargs.values()))
    first = sharded[0]
    if func is _TO_COPY and _stays(first, kwargs):
        return first
    if op.name.startswith("aten::new_") and not isinstance(first, ShardedGrad):
        # A plain tensor, of which only dtype and device are asked. Of a gradient an optimizer that
        # needs whole matrices makes its states so, as Adafactor does.
        return func(torch.empty(0, dtype=first.dtype, device=first.device), *args[1:], **kwargs)
    if func is _TO_COPY and first._of_model and not (_lies_alike(first, kwargs) and in_step()):
        _refuse_to_convert(op, first)  # what an optimizer computes with is no longer the model's
    if not op.elementwise:
        refuse_whole_tensor_op(op.name, first)
    if op.of_lists and (plain := plain_rows(args, kwargs)):
        results = apart(func, args, kwargs, plain, run)
        return results if not op.mutable else args[0] if op.returns else None
    if len(sharded) > 1:
        args, kwargs = _cut_alike(op, args, kwargs)
    if func in _ALIASES:
        return _alias(func, op, first, args, kwargs)
    if func is _COPY:
        return _copy(op, args, kwargs)
    if op.zeroing:
        _zero_held_back(sharded)
    result = _on_slices(func, op, args, kwargs)
    if op.mutable:
        return args[0] if op.returns else None
    return _mapped(_wrap_like([row[0] for row in _computed_together(op, args, kwargs)]), result)


def _stays(param: Sharded, asked: Mapping[str, object]) -> bool:
    """Whether ``Module.to`` asks for the CPU, where ``param`` is; "cpu:0" is another to torch."""
    device = asked.get("device")
    return (
        param._of_model
        and not torch.is_grad_enabled()  # as there; autograd would take it for a result
        and isinstance(device, torch.device)
        and device.type == param.device.type == "cpu"
        and asked.get("dtype", param.dtype) == param.dtype
        and asked.get("layout", param.layout) == param.layout
        and asked.keys() <= {"device", "dtype", "layout", "non_blocking"}
    )


def _lies_alike(param: Sharded, asked: Mapping[str, object]) -> bool:
    """Whether what is asked for lies where and as ``param`` does, of whatever dtype."""
    return (
        asked.get("device") in (None, param.device)
        and asked.get("layout") in (None, param.layout)
        and asked.keys() <= {"device", "dtype", "layout", "non_blocking"}
    )


def _refuse_to_convert(op: Operator, param: Sharded) -> NoReturn:
    if next(modules_called(), None) is not None:  # autocast, say, of one that is not gathered
        refuse_whole_tensor_op(op.name, param)
    raise StateError(
        f"{param.fqn}: dtype and device cannot change after zshard.wrap, nor can the memory "
        "format. Convert the model before it, or pass device= and precision=zshard.Precision(...) "
        "to it."
    )


def _alias(
    func: Any, op: Operator, of: Sharded, args: tuple[object, ...], kwargs: dict[str, object]
) -> Sharded:
    """Another tensor of the same slice, or of a split master, which has none."""
    if isinstance(of, ShardedGrad):
        return of.flat.grads.objects.alias(of)
    if of._local is None:
        alias = Sharded(None, of.flat, of.segment)
    else:
        result = _on_slices(func, op, args, kwargs)
        assert isinstance(result, torch.Tensor)
        # What a parameter shares its version counter with is no inference tensor, nor is it one.
        with torch.inference_mode(False):
            alias = of._like(result)
    of.flat.aliases.note(alias)
    return alias


def _copy(op: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> Sharded:
    """Write a sharded tensor, or this rank's slice of a whole one, into a sharded tensor."""
    target, source = args[:2]
    if not isinstance(target, Sharded):
        assert isinstance(source, Sharded)
        raise ShardedAccessError(
            f"{source.fqn}: to copy a sharded tensor into a plain one needs the whole of "
            "it. Take whole tensors with zshard.full_param(model, name) or "
            "zshard.state_dict(model)."
        )
    whole = source if isinstance(source, torch.Tensor) and not isinstance(source, Sharded) else None
    if whole is not None and whole.ndim > 0:
        source = own_slice(target, whole)
    if target._local is None:
        _copy_into_split(target, source)
    else:
        _on_slices(_COPY, op, (target, source, *args[2:]), kwargs)
    if whole is not None:
        target.flat.took(target, whole)
    return target


def _zero_held_back(sharded: list[Sharded]) -> None:
    for grad in sharded:
        if isinstance(grad, ShardedGrad):
            grad.flat.schedule.totals.before_zeroing(grad.flat, grad.segment)
            grad.flat.grads.zero_held_back(grad.segment)


def _on_slices(
    func: Any, op: Operator, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """The operator's result on the local slices, its writes announced to their flat tensors."""
    written_to = _written(op, args, kwargs)
    changed = _sharded_in(written_to)
    storages: dict[Flat, set[int]] = {}
    for target in changed:
        if target._local is None:
            refuse_split(op.name, target)
        storages.setdefault(target.flat, set()).add(storage_of(target._local))
    for flat, written in storages.items():
        flat.before_slices(written)
    first = _sharded_in((*args, *kwargs.values()))[0]
    local = _local_of(op, first, written_to)
    result = func(
        *(_mapped(local, value) for value in args),
        **{name: _mapped(local, value) for name, value in kwargs.items()},
    )
    for flat, written in storages.items():
        flat.slices_written(written)
    return result


def _sharded_in(values: Iterable[object]) -> list[Sharded]:
    """The sharded tensors among an operator's arguments, in order."""
    found: list[Sharded] = []
    for value in values:
        if isinstance(value, Sharded):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Sharded)]
    return found


def _mapped(change: Callable[[object], object], value: object) -> object:
    """An operator's argument or result with ``change`` of what it is or, a list, what it holds."""
    if isinstance(value, list):
        return [change(item) for item in value]
    if isinstance(value, tuple):
        return tuple(change(item) for item in value)
    return change(value)


def _cut_alike(
    op: Operator, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments, those cut in the same places that meet element by element.

    What is written stays as it is cut, or else what comes first.
    """
    rows = _computed_together(op, args, kwargs)
    if all(first._lines_up_with(other) for row in rows for first, other in pairwise(row)):
        return args, kwargs
    changed = _sharded_in(_written(op, args, kwargs))
    written, memory = {id(each) for each in changed}, {memory_of(each) for each in changed}

    def recut_in_row(index: int, value: object) -> object:
        row = rows[index if op.of_lists else 0]
        like = next((each for each in row if id(each) in written), row[0] if row else None)
        if not isinstance(value, Sharded) or like is None or like._lines_up_with(value):
            return value
        if memory_of(value) in memory:  # what is gathered now would not have what is written
            raise ShardedAccessError(
                f"{op.name} changes {value.fqn!r}, and computes it with {like.fqn!r}, which is cut "
                "into other shards. Work on whole parameters inside zshard.full_params(model)."
            )
        return recut(value, like, op.name)

    def change(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return type(value)(recut_in_row(index, each) for index, each in enumerate(value))
        return recut_in_row(0, value)

    return tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}


def _computed_together(
    op: Operator, args: tuple[object, ...], kwargs: dict[str, object]
) -> list[list[Sharded]]:
    """The sharded arguments that meet element by element, with each other."""
    if not op.of_lists:
        return [_sharded_in((*args, *kwargs.values()))]
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple))]
    return [[x for x in row if isinstance(x, Sharded)] for row in zip_longest(*lists)]


def _copy_into_split(target: Sharded, source: object) -> None:
    at = target.flat.local(target.segment).at
    value = torch.empty(at.numel, dtype=torch.float32, device=target.device)
    value.copy_(source.local if isinstance(source, Sharded) else source)  # type: ignore[arg-type]
    target.flat.before_write()
    target.flat.master.store(at.begin, value)
    target.flat.updated(send_written=True)


def _local_of(op: Operator, first: Sharded, written_to: list[object]) -> Callable[[object], object]:
    written = {id(each) for each in written_to}

    def local_of(x: object) -> object:
        if isinstance(x, ShardedGrad):
            if op.zeroing:
                return x._local  # where a look would be refused, zeros are fine
            if id(x) not in written:
                return x.seen()
            local = x.local
            if op.name.startswith("aten::_fused_") and local.dtype != x.flat.dtypes.master:
                refuse_to_divide(op.name, x)
            return local
        if isinstance(x, Sharded):
            return x.local
        if (
            isinstance(x, torch.Tensor)
            and (x.ndim > 0 or id(x) in written)
            and op.name != "aten::copy_"
        ):
            refuse_plain(op.name, first, x, of_optimizer=op.mutable or op.of_lists)
        return x

    return local_of


def _written(op: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> list[object]:
    """The arguments, and what lists among them hold, that the operator writes element by element.

    Not the counts of steps of a fused optimizer.
    """
    written: list[object] = []
    for position, name in op.written:
        if name == "grads" and kwargs.get("grad_scale") is None:
            continue  # a fused optimizer writes them where it divides them by a loss scale
        if name != "state_steps":
            value = args[position] if position < len(args) else kwargs.get(name)
            written += value if isinstance(value, (list, tuple)) else [value]
    return written


def _wrap_like(of_rows: list[Sharded]) -> Callable[[object], object]:
    in_order = iter(of_rows)

    def wrap(x: object) -> object:
        return next(in_order, of_rows[0])._like(x) if isinstance(x, torch.Tensor) else x

    return wrap
