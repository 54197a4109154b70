"""What torch's operators are to sharded tensors, asked of each one's schema once."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

# Elementwise, but without torch's `pointwise` tag: copies, constructors like their argument, and
# the multi-tensor and fused optimizer kernels.
_ELEMENTWISE = frozenset(
    "aten::" + name
    for name in (
        *("_to_copy", "alias", "clone", "copy_", "detach", "detach_", "fill_", "lerp_", "zero_"),
        "masked_fill_",
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
    )
)
_ZEROING = ("aten::zero_", "aten::_foreach_zero_")


class Operator(NamedTuple):
    """What an operator is to sharded tensors."""

    name: str
    elementwise: bool
    of_lists: bool  # what lies at one index of its lists is computed together
    zeroing: bool
    mutable: bool
    written: tuple[tuple[int, str], ...]  # the arguments that it writes: position and name
    returns: bool


@functools.cache
def operator(func: Any) -> Operator:
    """What ``func``, an overload of an ATen operator, is."""
    schema, name = func._schema, func._schema.name
    foreach = name.startswith("aten::_foreach_")
    if foreach:
        elementwise = _foreach_of_elementwise(name.removeprefix("aten::_foreach_"))
    else:
        elementwise = _is_pointwise(func) or name in _ELEMENTWISE or _is_in_place_of_pointwise(func)
    return Operator(
        name,
        elementwise=elementwise,
        of_lists=foreach or name.startswith("aten::_fused_"),
        zeroing=name in _ZEROING,
        mutable=schema.is_mutable,
        written=tuple(
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        returns=bool(schema.returns),
    )


def _is_pointwise(func: Any) -> bool:
    # torch tags aten::equal as pointwise too, but its one answer is about all elements; and rrelu,
    # whose random numbers would be those of another element.
    random = torch.Tag.nondeterministic_seeded in func.tags
    return torch.Tag.pointwise in func.tags and func._schema.name != "aten::equal" and not random


def _is_in_place_of_pointwise(func: Any) -> bool:
    """Whether it is like ``abs_``, which torch does not tag, while ``abs`` it does."""
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    other = getattr(packet, func._overloadname, None)
    return other is not None and _is_pointwise(other)


def _foreach_of_elementwise(name: str) -> bool:
    """Whether ``_foreach_`` ``name`` is elementwise, by the operator of one tensor.

    torch tags no _foreach operator itself.
    """
    name = name.removesuffix("_")
    if _ELEMENTWISE & {f"aten::{name}", f"aten::{name}_"}:
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet else []
    # max and min are elementwise of two tensors only, and else reduce.
    reduces = any(arg.name == "dim" for each in overloads for arg in each._schema.arguments)
    return any(map(_is_pointwise, overloads)) and not reduces
