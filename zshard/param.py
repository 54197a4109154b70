"""The sharded parameter: global shape and identity outside, this rank's 1-D slice inside.

[Note: one object, two faces]
``wrap`` swaps the *contents* of every parameter (torch.utils.swap_tensors), so that the object
which optimizers, hooks and user code hold is the sharded parameter. While a unit is gathered its
modules hold other Parameters, the leaves, which are views of the full buffer; autograd only ever
sees those. A sharded parameter is never part of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_map

from .errors import InputError, ShardedAccessError, StateError

if TYPE_CHECKING:
    from .flat import Flat

# Elementwise, but without torch's `pointwise` tag: copies, constructors like their argument, and
# the multi-tensor and fused optimizer kernels.
_ELEMENTWISE = frozenset(
    "aten::" + name
    for name in (
        *("_to_copy", "alias", "clone", "copy_", "detach", "detach_", "fill_", "lerp_", "zero_"),
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
    )
)
_NOT_ELEMENTWISE_FOREACH = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")


class Sharded(torch.Tensor):
    """A tensor of a parameter's global shape of which this rank holds a slice.

    The parameter itself, its gradient and its optimizer states are of this class. Elementwise
    operations act on the local slices; anything that needs the whole tensor raises
    ShardedAccessError. ``dtype`` is the parameter's own; ``local`` has the master's (or, for a
    gradient, the reduce dtype).
    """

    _local: torch.Tensor
    flat: Flat
    segment: int  # index of its segment in the flat buffer
    _is_param: bool  # what isinstance(x, torch.nn.Parameter) looks at

    # A subclass that keeps torch's functions as they are: only __torch_dispatch__ intervenes.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        flat: Flat,
        segment: int,
        *,
        is_param: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Sharded:
        """Wrap ``local``, this rank's slice of segment ``segment`` of ``flat``."""
        place = flat.layout.segments[segment]
        self: Sharded = torch.Tensor._make_wrapper_subclass(
            cls,
            place.shape,
            strides=place.stride,
            dtype=dtype or flat.dtypes.param,
            device=flat.device,
            requires_grad=is_param and flat.requires_grad,
        )
        self._local, self.flat, self.segment, self._is_param = local, flat, segment, is_param
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    @property
    def local(self) -> torch.Tensor:
        """1-D, this rank's slice in the flat buffer's memory order."""
        return self._local

    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced gradient, sharded like the parameter; None where the plain model's is."""
        return self.flat.get_grad(self.segment) if self._is_param else None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self._is_param:
            self.flat.set_grad(self.segment, value)

    @property
    def data(self) -> torch.Tensor:
        """The same slice, without autograd; assigning copies values, of a whole tensor too."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self:
            with torch.no_grad():
                self.copy_(value)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained; fixed by zshard.wrap."""
        return bool(torch.Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Sharded:
        """As torch's, but refused where it would change a wrapped parameter."""
        if self._is_param and requires_grad != self.requires_grad:
            raise StateError(
                f"{self.fqn}: requires_grad cannot change after zshard.wrap, since trained and "
                "frozen parameters lie in different flat buffers. Set it before wrapping."
            )
        super().requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: object) -> NoReturn:
        """Refused: autograd never sees the sharded parameter."""
        raise StateError(
            f"{self.fqn}: a hook on a sharded parameter would never run. Read reduced gradients "
            "after backward (zshard.full_grad(model, name), or elementwise from p.grad)."
        )

    def register_post_accumulate_grad_hook(self, hook: object) -> NoReturn:
        """Refused, as ``register_hook`` is."""
        self.register_hook(hook)

    @property
    def fqn(self) -> str:
        """The parameter's fully qualified name in the wrapped model."""
        return self.flat.names[self.segment]

    def extent(self) -> tuple[object, ...]:
        """Which elements the local slice has: equal for tensors that line up element by element."""
        place, local = self.flat.layout.segments[self.segment], self.flat.local(self.segment)
        return place.shape, place.stride, local.skip, local.end - local.begin

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        kind = "parameter" if self._is_param else "tensor"
        return (
            f"zshard {kind} {self.fqn!r} {tuple(self.shape)} {self.dtype}, "
            f"{self._local.numel()} of {self.numel()} elements on this rank"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ShardedAccessError(
            f"{self.fqn}: a wrapped model cannot be deep-copied: its parameters are shards of flat "
            "buffers. Copy the plain model before zshard.wrap, or read whole parameters with "
            "zshard.full_params(model)."
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardedAccessError(
            f"{self.fqn}: a sharded tensor cannot be pickled. Take whole tensors inside "
            "zshard.full_params(model) and save those."
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        sharded = _sharded_arguments(args, kwargs)
        if func is torch.ops.aten._to_copy.default and sharded[0]._is_param:
            raise StateError(
                f"{sharded[0].fqn}: dtype and device cannot change after zshard.wrap. Convert the "
                "model before it, or pass device= and precision=zshard.Precision(...) to it."
            )
        _refuse_whole_tensor_ops(func, sharded)
        _refuse_different_layouts(func, sharded)
        if func._schema.name in ("aten::zero_", "aten::_foreach_zero_"):
            for grad in sharded:
                if isinstance(grad, ShardedGrad):
                    grad.flat.drop_held_back(grad.segment)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Sharded):
            args = (args[0], _own_slice(args[0], args[1]), *args[2:])
            sharded = _sharded_arguments(args, kwargs)
        locals_, local_kwargs = tree_map(_local_of(func, sharded[0]), (args, kwargs))
        result = func(*locals_, **local_kwargs)
        if func._schema.is_mutable:
            for written in _mutated(func, args, kwargs):
                written.flat.slice_written(written._local)
            return args[0] if func._schema.returns else None
        return tree_map(_wrap_like(sharded), result)


class ShardedGrad(Sharded):
    """The gradient of a sharded parameter.

    To ask whether it is there costs nothing; to look inside, or change it, applies the clip factor
    that zshard's optimizers would have applied as they read it.
    """

    @property
    def local(self) -> torch.Tensor:
        """1-D, this rank's slice in the flat buffer's memory order."""
        self.flat.before_grad_access(self.segment)
        return self._local


def _sharded_arguments(args: object, kwargs: object) -> list[Sharded]:
    found: list[Sharded] = []
    tree_map(lambda x: found.append(x) if isinstance(x, Sharded) else None, (args, kwargs))
    return found


def _refuse_whole_tensor_ops(func: Any, sharded: list[Sharded]) -> None:
    name = func._schema.name
    foreach = name.startswith("aten::_foreach_") and not name.startswith(_NOT_ELEMENTWISE_FOREACH)
    # torch tags aten::equal as pointwise too, but its one answer is about all elements.
    pointwise = torch.Tag.pointwise in func.tags and name != "aten::equal"
    if foreach or name in _ELEMENTWISE or pointwise:
        return
    raise ShardedAccessError(
        f"{name} needs the whole of {sharded[0].fqn!r} {tuple(sharded[0].shape)}, of which this "
        f"rank holds {sharded[0]._local.numel()} elements. In a forward: the parameter is used "
        f"outside the module of its unit {sharded[0].flat.unit_label!r}; make the module that uses "
        "it a unit (zshard.wrap(units=...)). Elsewhere: work on whole parameters inside "
        "zshard.full_params(model); clip with zshard.clip_grad_norm_(model, ...)."
    )


def _refuse_different_layouts(func: Any, sharded: list[Sharded]) -> None:
    if func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")):
        return  # torch's optimizers give lists that line up
    first = sharded[0]
    for other in sharded[1:]:
        if other.extent() != first.extent():
            raise ShardedAccessError(
                f"{func._schema.name} of {first.fqn!r} and {other.fqn!r}: this rank holds "
                "different parts of the two. Work on whole parameters inside "
                "zshard.full_params(model)."
            )


def _own_slice(target: Sharded, source: object) -> object:
    """What of ``source`` goes into ``target``: a whole tensor gives this rank's slice of it."""
    if not isinstance(source, torch.Tensor) or isinstance(source, Sharded) or source.ndim == 0:
        return source
    segment = target.flat.layout.segments[target.segment]
    if source.shape != segment.shape:
        raise InputError(
            f"{target.fqn}: cannot copy a tensor of shape {tuple(source.shape)} into a parameter "
            f"of shape {tuple(segment.shape)}"
        )
    whole = segment.physical(source).reshape(-1)
    skip = target.flat.local(target.segment).skip
    return whole[skip : skip + target.local.numel()]


def _local_of(func: Any, first: Sharded) -> Callable[[object], object]:
    def local(x: object) -> object:
        if isinstance(x, Sharded):
            return x.local
        if isinstance(x, torch.Tensor) and x.ndim > 0 and func is not torch.ops.aten.copy_.default:
            raise ShardedAccessError(
                f"{func._schema.name} mixes the sharded {first.fqn!r} with a plain tensor of shape "
                f"{tuple(x.shape)}. In a forward: the parameter is used outside the module of its "
                f"unit {first.flat.unit_label!r}; make the module that uses it a unit "
                "(zshard.wrap(units=...)). In an optimizer: its state was made before zshard.wrap. "
                "Elsewhere: work on whole parameters inside zshard.full_params(model)."
            )
        return x

    return local


def _mutated(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> list[Sharded]:
    """The sharded arguments that ``func``'s schema says it writes."""
    written: list[Sharded] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += _sharded_arguments(value, None)
    return written


def _wrap_like(sharded: list[Sharded]) -> Callable[[object], object]:
    in_order = iter(sharded)

    def wrap(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        like = next(in_order, sharded[0])
        masters = (like.flat.dtypes.master, like.flat.dtypes.reduce)
        return Sharded(x, like.flat, like.segment, dtype=None if x.dtype in masters else x.dtype)

    return wrap
