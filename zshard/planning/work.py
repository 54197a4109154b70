"""The work of a step as calls of ops: what each computes and moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..containers import cast_floating

aten = torch.ops.aten


class Call(NamedTuple):
    """One call of an op.

    Attributes:
        kind: "product" for matrix products and convolutions, "attention", or "pointwise": all else.
        flops: of the first two kinds; a multiplication and an addition are two.
        bytes: that it reads and writes at least: its inputs and outputs.
        dtype: of what it computes with, as "float32".
    """

    kind: str
    flops: int
    bytes: int
    dtype: str


Work = Counter[Call]  # how often each is made


def call_of(func: Any, args: Any, kwargs: Mapping[str, Any], out: object) -> Call | None:
    """What a call of an op does; None if nothing, as a view."""
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        return None
    if func.overloadpacket in _NOTHING_MOVES or not _tensors(out):
        return None
    tensors = _tensors((args, kwargs, out))
    moved = sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())
    packet, kind, flops = func.overloadpacket, "pointwise", 0
    if packet is aten._grouped_mm:
        kind, flops = "product", _grouped_products(args[0].shape, args[1].shape)
    elif packet in _CPU_ATTENTION:
        shapes = [t.shape if isinstance(t, Tensor) else t for t in args]
        kind, flops = "attention", _CPU_ATTENTION[packet](*shapes)
    elif packet in _RECURRENT:
        kind, flops = "product", _RECURRENT[packet] * _recurrent(*args[:3])
    elif packet in (counts := _flop_counter().flop_registry):
        kind = "attention" if "attention" in str(packet) else "product"
        flops = counts[packet](*args, **kwargs, out_val=out)
    return Call(kind, flops, moved, str(tensors[0].dtype).removeprefix("torch."))


def run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What an op returns of fake tensors."""
    if func.overloadpacket is aten._grouped_mm and args[0].dtype != torch.bfloat16:
        # Its fake kernel takes bf16 alone; the real ones take fp32 and fp16 as well.
        cast: Any = cast_floating(args, torch.bfloat16)
        return func(*cast, **kwargs).to(args[0].dtype)
    sparse = [each for each in args[:2] if _is_sparse(each)]
    if (func is aten.clone.default and sparse) or (func is aten.add.Tensor and len(sparse) == 2):
        # Their fake kernels leave the elements out. Of a sum it has those of both.
        indices = torch.cat([each._indices() for each in sparse], 1)
        values = torch.cat([each._values() for each in sparse])
        return torch.sparse_coo_tensor(indices, values, args[0].shape, check_invariants=False)
    return func(*args, **kwargs)


def _is_sparse(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _grouped_products(a: torch.Size, b: torch.Size) -> int:
    """Of groups of the rows of ``a`` with a matrix each, or of the matrices with columns of ``b``.

    Where neither has a dimension for the groups, these are of what is summed over.
    """
    flops = 2 * a.numel() * b[-1]
    return flops // a[0] if len(a) > len(b) else flops


def _attention(query: Any, key: Any, value: Any, *rest: Any) -> int:
    flops = _flop_counter().sdpa_flop_count(query, key, value)
    return _causal(flops, rest)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any) -> int:
    flops = _flop_counter().sdpa_backward_flop_count(grad, query, key, value)
    return _causal(flops, rest)


def _recurrent(x: Tensor, of_input: Tensor, of_state: Tensor) -> int:
    """Of a layer with these weights on ``x`` (T, B, n): each step takes both."""
    return 2 * x.shape[0] * x.shape[1] * (of_input.numel() + of_state.numel())


def _flop_counter() -> ModuleType:
    """Not imported above: it imports triton, and a CUDA build of torch without one warns of it."""
    from torch.utils import flop_counter

    return flop_counter


def _causal(flops: int, rest: tuple[Any, ...]) -> int:
    return flops // 2 if True in rest else flops  # what is masked is left out


_NOTHING_MOVES = {
    aten._unsafe_view,
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided),
}

# torch's formulas are for the GPUs' ops alone.
_CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}

# An LSTM's layer on the CPU is one op, which torch has no formula for. Its backward multiplies
# twice: for the gradients of what came in, and of the weights.
_RECURRENT: dict[Any, int] = {aten.mkldnn_rnn_layer: 1, aten.mkldnn_rnn_layer_backward: 2}
