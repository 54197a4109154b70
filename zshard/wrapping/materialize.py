"""Values for a model that was built on the meta device: one unit at a time, alike on every rank.

Without an ``init_fn``, memory for values that are loaded later.

[Note: the order of initialisation]
Units come in the order of the unit map, the root first. With a unit come the modules that own a
parameter of it, children before their parents, as in ``model.apply``; with the root also those that
own nothing but buffers or ignored parameters. Each is called once, and before the first of a unit
is called, what all of them own is there, uninitialised. With units="model" that is the order of
``model.apply``; with another map, random numbers go to the modules in another order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..attributes import user_attributes
from ..comm import Comm
from ..errors import InputError, WrapError
from ..tag import Tag
from ..transports.mesh import groups_of
from ..transports.refusal import together
from ..unitmap import Owned, UnitSpec, owned_parameters, persistent_buffers
from ..words import counted
from .init_calls import Guard, RandomNumbers

InitFn = Callable[[nn.Module], object]


def move(model: nn.Module, device: torch.device | str) -> None:
    """As ``model.to(device)``, but what is on the meta device stays there."""
    model._apply(  # type: ignore[no-untyped-call]
        lambda tensor: tensor if tensor.is_meta else tensor.to(device)
    )


def default_device(
    device: torch.device | str | None, mesh: dist.ProcessGroup | DeviceMesh | None
) -> torch.device:
    """Where a model without any values goes: ``device``; the current GPU under NCCL; the CPU."""
    if device is None:
        shards = groups_of(mesh).shards
        nccl = shards is not None and "cuda:nccl" in dist.get_backend_config(shards)
        device = "cuda" if nccl else "cpu"
    return torch.empty(0, device=device).device  # with its index


def on_meta(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of ``model`` on the meta device, by name."""
    tensors = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {name: tensor for name, tensor in tensors if tensor.is_meta}


def swap_contents(
    name: str, tensor: torch.Tensor, contents: torch.Tensor, holders: Iterable[nn.Module]
) -> None:
    """Exchange the contents of two tensor objects; attributes set on ``tensor`` stay.

    Args:
        name: of ``tensor``, for errors.
        holders: the modules that have it.

    Raises:
        WrapError: if something else holds the contents.
    """
    recurrent = [module for module in holders if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []  # what it refers to weakly cannot be swapped
    contents.__dict__.update(user_attributes(tensor))
    try:
        torch.utils.swap_tensors(tensor, contents)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise WrapError(
            f"{name} cannot be replaced: {error}. Something else holds it: {_who_holds(holders)}"
        ) from error
    finally:
        for module in recurrent:
            module._flat_weight_refs = [
                None if weight is None else weakref.ref(weight) for weight in module._flat_weights
            ]


def _who_holds(holders: Iterable[nn.Module]) -> str:
    """What is likely to refer to a parameter of ``holders``, and what to do."""
    for module in holders:
        if isinstance(module, torch.jit.ScriptModule):
            return "TorchScript. Put the plain module in its place, or name it in ignored=."
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                return (
                    f"the graph of its module's attribute {name!r}. Detach that; a forward makes "
                    "it anew. (torch.nn.utils.parametrizations.weight_norm keeps none.)"
                )
    return "an autograd graph of an earlier forward (drop its outputs), or a weak reference."


def allocate_outside(model: nn.Module, specs: Sequence[UnitSpec], device: torch.device) -> str:
    """Give what is on the meta device and belongs to no unit memory, yet without values.

    That is ignored parameters, and persistent buffers.

    Returns:
        What ``Schedule.unusable`` has to say until values are loaded; "" if nothing was on meta.

    Raises:
        WrapError: for buffers of which a checkpoint holds no values either.
    """
    meta = on_meta(model)
    if not meta:
        return ""
    loadable = {id(buffer) for _, buffer in persistent_buffers(model.named_modules())}
    if lost := [n for n, b in model.named_buffers() if b.is_meta and id(b) not in loadable]:
        raise WrapError(
            f"no checkpoint has values for the non-persistent buffers on the meta device: "
            f"{', '.join(lost)}. Build buffers on a real device (only parameters under "
            'torch.device("meta")), assign real ones before zshard.wrap, or pass init_fn.'
        )
    in_units = {id(owned.param) for spec in specs for owned in spec.params}
    for owned in owned_parameters(model, ()):
        if owned.param.is_meta and id(owned.param) not in in_units:
            swap_contents(owned.name, owned.param, _memory(owned.param, device), owned.holders)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            swap_contents(name, buffer, _memory(buffer, device), [])
        else:
            buffer.data = buffer.data.to(device)
    first, *others = meta
    more = counted(len(others), "more tensor")
    return (
        f"the model was wrapped on the meta device without an init_fn, and {first} "
        f"{f'and {more} have' if others else 'has'} no values yet. Call "
        "zshard.load or zshard.load_weights; or pass init_fn to zshard.wrap."
    )


class Materializer:
    """Gives a model on the meta device its values, by the user's ``init_fn``.

    Args:
        init_fn: called with every module that owns a tensor on the meta device; see
            [Note: the order of initialisation].
        device: where the values go.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Sequence[UnitSpec],
        init_fn: InitFn,
        device: torch.device,
        comm: Comm,
    ) -> None:
        self._model, self._init_fn, self._device, self._comm = model, init_fn, device, comm
        self._owned = {id(owned.param): owned for owned in owned_parameters(model, ())}
        self._wanted = {key: _Facts.of(owned.param) for key, owned in self._owned.items()}
        in_units = {id(owned.param) for spec in specs for owned in spec.params}
        self._ignored = [
            owned
            for key, owned in self._owned.items()
            if key not in in_units and owned.param.is_meta
        ]
        self._turns = _turns(model, specs)
        self._guard = Guard(on_meta(model))
        self._random = RandomNumbers(device, comm)

    def fill(self, spec: UnitSpec) -> None:
        """Make the next unit's parameters whole on the device, with their values.

        Raises:
            InputError: if ``init_fn`` did what cannot work; on every rank, if it did so on one.
        """
        unit = spec.label
        together(
            partial(self._fill, spec),
            self._comm,
            Tag(None, "wrap", unit),
            InputError,
            at=f"initialise unit {unit!r}",
        )

    def _fill(self, spec: UnitSpec) -> None:
        modules = self._turns.pop(0)
        for module in modules:
            self._allocate(module)
        with torch.no_grad():
            with self._random.shared(), self._guard:
                for module in modules:
                    self._init_fn(module)
            for owned in spec.params:
                self._adopt(owned)
            if not self._turns:
                self._finish()

    def _allocate(self, module: nn.Module) -> None:
        """Memory for what ``module`` itself owns, as ``to_empty(recurse=False)`` would make it."""
        for tensor in _own_tensors(module):
            if not tensor.is_meta:
                continue
            fresh = _memory(tensor, self._device)
            name = self._guard.expect(tensor, fresh)
            owned = self._owned.get(id(tensor))
            swap_contents(name, tensor, fresh, [] if owned is None else owned.holders)

    def _adopt(self, owned: Owned) -> None:
        """Move what ``init_fn`` left in a parameter's places into the Parameter object itself."""
        param, wanted = owned.param, self._wanted[id(owned.param)]
        held = {id(p): p for p in (m._parameters.get(a) for m, a in owned.sites)}
        now = next(iter(held.values()))
        if len(held) > 1 or (now is not param and id(now) in self._owned):
            raise InputError(
                f"init_fn tied or untied {' and '.join(owned.names)}. Tie parameters before "
                "zshard.wrap, and have init_fn write values in place."
            )
        if now is None or now.is_meta or param.is_meta:
            raise InputError(
                f"init_fn left {owned.name} without values: it removed it, replaced it by one on "
                "the meta device, or replaced it when called with a module of another unit"
            )
        found = _Facts.of(now)
        if found[:3] != wanted[:3]:
            raise InputError(
                f"init_fn made {owned.name} {found}; it was {wanted}. Only values may change: "
                "build the model with the shapes, dtypes and requires_grad that it is to have."
            )
        self._guard.check_written(owned.name, now)
        if now is not param or now.device != self._device or found != wanted:
            value = torch.empty_strided(
                now.shape, wanted.stride, dtype=now.dtype, device=self._device
            )
            param.data = value.copy_(now)
        if now is not param:
            param.__dict__.update(now.__dict__)
            for module, attribute in owned.sites:
                setattr(module, attribute, param)

    def _finish(self) -> None:
        """Look at what belongs to no unit, and whether the model still has the same parameters."""
        for owned in self._ignored:
            self._adopt(owned)
        for name, buffer in self._model.named_buffers():
            if buffer.is_meta:
                raise InputError(f"init_fn left the buffer {name} on the meta device")
            self._guard.check_written(name, buffer)
            buffer.data = buffer.data.to(self._device)
        before = {(owned.names, key) for key, owned in self._owned.items()}
        after = {(owned.names, id(owned.param)) for owned in owned_parameters(self._model, ())}
        if changed := sorted({names[0] for names, _ in before ^ after}):
            raise InputError(
                f"init_fn added, removed, replaced or tied {', '.join(changed)}, not being called "
                "with the module of it. Change modules before zshard.wrap."
            )


class _Facts(NamedTuple):
    """What of a parameter has to be after ``init_fn`` as it was before; only strides are mended."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    stride: tuple[int, ...]

    @classmethod
    def of(cls, param: torch.Tensor) -> _Facts:
        dense = torch.empty_like(param, device="meta")
        return cls(param.shape, param.dtype, param.requires_grad, dense.stride())

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype} requires_grad={self.requires_grad}"


def _turns(model: nn.Module, specs: Sequence[UnitSpec]) -> list[list[nn.Module]]:
    """The modules to initialise with each unit; see [Note: the order of initialisation]."""
    unit_of = {id(owned.param): i for i, spec in enumerate(specs) for owned in spec.params}
    turns: list[list[nn.Module]] = [[] for _ in specs]
    for module in _children_first(model, set()):
        own = _own_tensors(module)
        if any(tensor.is_meta for tensor in own):
            units = [unit_of[id(tensor)] for tensor in own if id(tensor) in unit_of]
            turns[min(units, default=0)].append(module)
    return turns


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor, or Parameter, like ``tensor``."""
    fresh = torch.empty_like(tensor, device=device)
    is_param = isinstance(tensor, nn.Parameter)
    return nn.Parameter(fresh, tensor.requires_grad) if is_param else fresh


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers that ``module`` itself owns."""
    own = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in own if tensor is not None]
