"""The sharded parameter: global shape and identity outside, this rank's 1-D slice inside.

[Note: one object, two faces]
``wrap`` swaps the *contents* of every parameter (torch.utils.swap_tensors), so that the object
which optimizers, hooks and user code hold is the sharded parameter. While a unit is gathered its
modules hold other Parameters, the leaves, which are views of the full buffer; autograd only ever
sees those. A sharded parameter may become part of a graph (an elementwise operation), but no
gradient may come to it: see ``Sharded._forbid_gradients``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

import torch
from torch.utils.hooks import RemovableHandle

from .errors import ShardedAccessError, StateError
from .hooks import GradHook, ParamHook, ParamHooks

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from .units.flat import Flat

_as_they_are = torch._C.DisableTorchFunctionSubclass
_grad, _backward = torch.autograd.grad, torch.autograd.backward


class Sharded(torch.Tensor):
    """A tensor of a parameter's global shape of which this rank holds a slice.

    The parameter itself, its gradient and its optimizer states are of this class. Elementwise
    operations act on the local slices; anything that needs the whole tensor raises
    ShardedAccessError. ``dtype`` is the parameter's own; ``local`` has the master's (or, for a
    gradient, the reduce dtype).
    """

    _local: torch.Tensor | None
    _flat: Flat
    _segment: int  # its index in the flat buffer
    _of_model: bool  # whether it is the parameter itself
    _is_param: bool  # what isinstance(x, nn.Parameter) looks at; nn.Parameter sets it on a copy too

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor | None,
        flat: Flat,
        segment: int,
        *,
        is_param: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Sharded:
        """Wrap ``local``, this rank's slice of segment ``segment`` of ``flat``.

        None stands for the slice of a split master, which has no memory of its own.
        """
        place = flat.layout.segments[segment]
        self: Sharded = torch.Tensor._make_wrapper_subclass(
            cls,
            place.shape,
            strides=place.stride,
            dtype=dtype or flat.dtypes.param,
            device=flat.device,
            requires_grad=is_param and flat.trained[segment],
        )
        # It has no memory of its own: to_dlpack, which asks no subclass, would give a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(self)
        self._local, self._flat, self._segment = local, flat, segment
        self._of_model = self._is_param = is_param
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    # Not to be set: an attribute of the user's of such a name is an error. (It would hide a method:
    # those begin with an underscore.) Read for every parameter in every step, so by C alone.
    flat: Flat = property(attrgetter("_flat"))  # type: ignore[assignment]
    segment: int = property(attrgetter("_segment"))  # type: ignore[assignment]

    @property
    def local(self) -> torch.Tensor:
        """1-D, this rank's slice in the flat buffer's memory order; a copy of a split master's."""
        if self._local is None:
            return self.flat.master.read(*self.flat.local(self.segment).at)
        return self._local

    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced gradient, sharded like the parameter; None where the plain model's is."""
        return self.flat.grads.get(self.segment) if self._of_model else None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self._of_model:
            self.flat.grads.set(self.segment, value)
        elif value is not None:
            _refuse_grad_of_copy(self)

    @property
    def data(self) -> torch.Tensor:
        """The same slice, without autograd; assigning copies values, of a whole tensor too."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self:
            # A sharded one names its model's device; empty_like may have put it on another one.
            local = value._local if isinstance(value, Sharded) else None
            device = value.device if local is None else local.device
            if value.dtype != self.dtype or device != self.device:
                raise StateError(
                    f"{self.fqn}: .data = a tensor of {value.dtype} on {device} would change "
                    f"{self.dtype} on {self.device}: convert the model before zshard.wrap"
                )
            self.flat.layout.segments[self.segment].require_shape(value, self.fqn)
            self.flat.leave_data(self, value)
            with torch.no_grad():
                self.copy_(value)

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The parameter's dtype; not to be set, as no gradient comes to it from autograd."""
        return self.dtype

    @grad_dtype.setter
    def grad_dtype(self, value: torch.dtype | None) -> None:
        if value != self.dtype:
            raise StateError(
                f"{self.fqn}: .grad_dtype = {value}, but gradients come in the dtype of compute; "
                "pass wrap zshard.Precision(reduce=...) for the dtype of their reduction and sum."
            )

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained; may be changed between steps."""
        return bool(torch.Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Sharded:
        """As torch's. Every rank has to make the same change, outside of forward and backward."""
        changes = isinstance(requires_grad, bool) and requires_grad != self.requires_grad
        if self._of_model and changes:
            self.flat.set_trained(self.segment, requires_grad)
        super().requires_grad_(requires_grad)
        if self._of_model:
            self._forbid_gradients()
        elif changes and requires_grad:
            super().register_post_accumulate_grad_hook(_refuse_grad_of_copy)  # type: ignore[no-untyped-call]
        return self

    def detach_(self) -> torch.Tensor:
        """As torch's, which freezes a parameter."""
        return self.requires_grad_(False) if self._of_model else super().detach_()

    def _forbid_gradients(self) -> None:
        """Have a gradient that autograd brings here be an error: nobody would look at it."""
        if self.requires_grad and not self._backward_hooks:
            super().register_hook(partial(_refuse_outside_graph, ref(self.flat), self.segment))  # type: ignore[no-untyped-call]

    def register_hook(self, hook: GradHook) -> RemovableHandle:
        """As torch's: ``hook`` gets this rank's whole gradient, before it is reduced."""
        return self._own_hooks().on_grad.add(hook)

    def register_post_accumulate_grad_hook(self, hook: ParamHook) -> RemovableHandle:
        """As torch's: ``hook`` gets the parameter, after backward, with the reduced gradient."""
        return self._own_hooks().after_reduction.add(hook)

    def _own_hooks(self) -> ParamHooks:
        if not (self._of_model and self.requires_grad):
            raise StateError(f"{self.fqn}: a hook on what is not a trained parameter would not run")
        return self.flat.hooks[self.segment]

    @property
    def fqn(self) -> str:
        """The parameter's fully qualified name in the wrapped model."""
        return self.flat.names[self.segment]

    @property
    def local_numel(self) -> int:
        """Elements on this rank."""
        return self.flat.local(self.segment).elements.numel

    def _like(self, local: torch.Tensor) -> Sharded:
        """Another sharded tensor of the same elements, whose slice here is ``local``."""
        dtype = None if local.dtype == self.flat.dtypes.master else local.dtype
        return Sharded(local, self.flat, self.segment, dtype=dtype)

    def _lines_up_with(self, other: Sharded) -> bool:
        """Whether the two are cut alike, so that every rank has the same elements of both."""
        same = other.flat is self.flat and other.segment == self.segment
        return same or other._cut() == self._cut()

    def _cut(self) -> tuple[object, ...]:
        """Which rank has which elements."""
        layout = self.flat.layout
        place, size = layout.segments[self.segment], layout.shard_size
        if not self.flat.needs_gather:  # every rank has all
            return place.shape, place.stride
        first, begin = divmod(place.offset, size)
        ranks = self.flat.schedule.comm.shards.global_ranks
        return place.shape, place.stride, ranks, first, range(size - begin, place.numel, size)

    def is_shared(self) -> bool:
        """As torch's: nobody can take it into another process."""
        return False

    def __setitem__(self, index: Any, value: Any) -> None:  # of a mask, as in torch's Rprop
        is_mask = isinstance(index, Sharded) and index.dtype == torch.bool
        fills = is_mask and index.shape == self.shape and isinstance(value, (int, float))
        (self.masked_fill_ if fills else super().__setitem__)(index, value)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        kind = "parameter" if self._of_model else "tensor"
        return (
            f"zshard {kind} {self.fqn!r} {tuple(self.shape)} {self.dtype}, "
            f"{self.local_numel} of {self.numel()} elements on this rank"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        """A copy of the slice, of a tensor in a state_dict; a parameter is part of its model."""
        if self._is_param:
            raise ShardedAccessError(
                f"{self.fqn}: a wrapped model cannot be deep-copied: its parameters are shards of "
                "flat buffers. Copy the plain model before zshard.wrap, its state_dict(), or take "
                "whole tensors with zshard.state_dict(model)."
            )
        memo[id(self)] = copied = self.detach().clone()  # a look: it leaves a gradient as it is
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardedAccessError(
            f"{self.fqn}: a sharded tensor cannot be pickled. Save the whole tensors of "
            "zshard.state_dict(model), or let zshard.save(path, model, optimizer) save the shards."
        )

    # What torch.distributed.checkpoint asks of a tensor. Imported there: at its call it is loaded.

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        from .checkpoint.dcp import write_items

        return write_items(self, fqn)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from .checkpoint.dcp import chunks_to_read

        return chunks_to_read(self)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        from .checkpoint.dcp import box_at

        return box_at(self, index)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """torch's functions as they are, but for gradients that would be None without an error."""
        if func is _grad or func is _backward:
            from .sharded.refusals import refuse_as_inputs  # not above: it asks what is Sharded

            refuse_as_inputs(args[1] if func is _grad else kwargs["inputs"])
        for each in types:
            if not issubclass(each, Sharded):  # whose say it is, as if this were a plain tensor
                others = tuple(kind for kind in types if not issubclass(kind, Sharded))
                return each.__torch_function__(func, others, args, kwargs or {})
        with _as_they_are():
            if kwargs and kwargs.get("requires_grad"):  # of zeros_like, which would set it unseen
                return func(*args, **{**kwargs, "requires_grad": False}).requires_grad_()
            return func(*args, **kwargs) if kwargs else func(*args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[object, ...] = (), kwargs: Any = None
    ) -> object:
        from .sharded.dispatch import run  # likewise

        return run(func, args, kwargs or {})


def _refuse_outside_graph(flat: ref[Flat], segment: int, grad: torch.Tensor) -> NoReturn:
    raise StateError(
        f"{of.names[segment] if (of := flat()) else 'a parameter'}: a graph outside of a forward "
        "has used the sharded parameter, whose gradient would be lost. Use it in a forward, or in "
        "a method that zshard.method(model, name) has gather."
    )


def _refuse_grad_of_copy(of: Sharded) -> NoReturn:
    raise StateError(
        f"{of.fqn}: only the parameter itself has a gradient; this is a tensor made from it "
        "(.data, detach()). Assign .grad to the parameter, or take gradients by torch.autograd.grad"
    )


def _needs_memory(name: str) -> Callable[..., NoReturn]:
    """A method of torch.Tensor that looks at memory, of which a sharded tensor has none."""

    def refused(self: Sharded, *args: object, **kwargs: object) -> NoReturn:
        raise ShardedAccessError(
            f"{self.fqn}: {name} needs the whole of it in one place; this rank holds a shard, "
            f"{self.local_numel} of {self.numel()} elements. Read it with zshard."
            f"{'full_grad' if isinstance(self, ShardedGrad) else 'full_param'}, or work inside "
            "zshard.full_params(model). To save, use zshard.save or zshard.export, or hand on "
            "zshard.state_dict(model, all_ranks=True); to load a file, zshard.load_weights."
        )

    return refused


for _name in (
    *("tolist", "numpy", "item", "share_memory_", "__dlpack__", "__array__", "const_data_ptr"),
    *("data_ptr", "untyped_storage", "storage"),  # safetensors, so save_pretrained, asks for them
):
    setattr(Sharded, _name, _needs_memory(_name))


class ShardedGrad(Sharded):
    """The gradient of a sharded parameter.

    To ask whether it is there costs nothing. A look inside sees it times the clip factor that
    zshard's optimizers apply as they read it; a change applies that factor first.
    """

    def seen(self) -> torch.Tensor:
        """The slice as a reader sees it, in the master's dtype; a copy where that differs.

        A look leaves the gradient as it is: with 16-bit gradients and replicated masters, a rank
        that looks would otherwise round them, and so its masters, unlike the others.
        """
        assert self._local is not None
        scale = self.flat.grads.before_look(self.segment)
        value = self._local.to(self.flat.dtypes.master)
        return value if scale is None else value * scale.to(value.dtype)

    @property
    def local(self) -> torch.Tensor:
        """1-D, this rank's slice in the flat buffer's memory order."""
        self.flat.grads.before_access(self.segment)
        assert self._local is not None
        return self._local
