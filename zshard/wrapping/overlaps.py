"""Parameters that share memory with something else, which sharding would part without a word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import nn

from ..errors import WrapError
from ..param import Sharded
from ..unitmap import UnitSpec


class _Located(NamedTuple):
    """A tensor that the model holds, and the bytes between its first and its last element."""

    begin: int
    end: int
    name: str
    tensor: torch.Tensor
    sharded: bool


def check_apart(model: nn.Module, specs: Sequence[UnitSpec]) -> None:
    """Check that no parameter to be sharded shares elements with another tensor of the model.

    One Parameter in several places is one parameter. Views of one memory that do not overlap are
    as good as any.

    Raises:
        WrapError: with the two; with one that is a buffer, too; with what is sharded already.
    """
    owned = {id(each.param): each.name for spec in specs for each in spec.params}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if id(buffer) in owned:
            raise WrapError(
                f"the buffer {name} is the parameter {owned[id(buffer)]} itself, and buffers stay "
                "whole. Register it as a parameter there, too (assign it as an attribute), which "
                "ties the two; or give the buffer a copy (detach().clone())."
            )
    # That reach to where the sweep has come: many others may lie upon each other.
    sharded: list[_Located] = []
    others: list[_Located] = []
    for found in sorted(
        _located(model, owned), key=lambda each: (str(each.tensor.device), each.begin)
    ):
        sharded = _reaching(sharded, found)
        if found.sharded:
            others = _reaching(others, found)
        for other in (*sharded, *others) if found.sharded else sharded:
            if _overlap(found, other):
                first, second = (found, other) if found.sharded else (other, found)
                raise WrapError(
                    f"{first.name} shares memory with {second.name}, and sharding would part "
                    "them: only one of the two would be trained. To tie two parameters, assign the "
                    "Parameter itself; else give one of them a copy (clone)."
                )
        (sharded if found.sharded else others).append(found)


def _located(model: nn.Module, owned: dict[int, str]) -> Iterator[_Located]:
    """Every tensor of the modules once: parameters, buffers, and what is in plain attributes."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        registered = (*module._buffers.items(), *module._parameters.items())
        for name, tensor in (*_in_attributes(module), *registered):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if name in module.__dict__ and _made_by_hook(module, name):
                continue
            label = owned.get(id(tensor), f"{path}.{name}" if path else name)
            if isinstance(tensor, Sharded):
                raise WrapError(
                    f"{label}, which is not to be sharded, is of a model that is wrapped already. "
                    "Wrap that as a part of this one, or keep it outside."
                )
            # Nested, without a shape yet, of a transform that is over, of a class without memory.
            with suppress(RuntimeError, TypeError, ValueError):
                if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0:
                    steps = zip(tensor.shape, tensor.stride(), strict=True)
                    last = sum((size - 1) * stride for size, stride in steps)
                    begin = tensor.data_ptr()
                    end = begin + (last + 1) * tensor.itemsize
                    yield _Located(begin, end, label, tensor, id(tensor) in owned)


def _in_attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that are attributes, or lie in a list or a dict that is one, with their names."""
    apart = ["_buffers", "_parameters"]
    if isinstance(module, nn.RNNBase):
        apart.append("_flat_weights")  # which its forward makes anew of its attributes
    for name, held in module.__dict__.items():
        items: Iterable[tuple[object, object]] = ()
        # Not by the methods of a class of the user's, which may do more.
        if isinstance(held, torch.Tensor):
            yield name, held
        elif isinstance(held, list) and name not in apart:
            items = enumerate(list.__iter__(held))
        elif isinstance(held, tuple):
            items = enumerate(tuple.__iter__(held))
        elif isinstance(held, dict) and name not in apart:
            items = dict.items(held)
        for key, each in items:
            if isinstance(each, torch.Tensor) and not isinstance(each, Sharded):
                yield f"{name}[{key!r}]" if type(key) in (int, str) else f"{name}[...]", each


def _made_by_hook(module: nn.Module, name: str) -> bool:
    """Whether the attribute is what torch.nn.utils' weight_norm or spectral_norm makes anew."""
    hooks = module._forward_pre_hooks.values()
    return any(name in (getattr(h, "name", ""), getattr(h, "_tensor_name", "")) for h in hooks)


def _reaching(active: list[_Located], found: _Located) -> list[_Located]:
    """Those of ``active`` that end behind the beginning of ``found``, on its device."""
    device = found.tensor.device
    return [o for o in active if o.end > found.begin and o.tensor.device == device]


def _overlap(a: _Located, b: _Located) -> bool:
    """Whether two tensors, whose ranges of bytes overlap, have an element in common."""
    if a.tensor.is_contiguous() and b.tensor.is_contiguous():
        return True
    origin = min(a.begin, b.begin)
    places = []
    for each in (a, b):
        index = torch.arange((each.end - each.begin) // each.tensor.itemsize, device="cpu")
        index = index.as_strided(each.tensor.shape, each.tensor.stride()).reshape(-1)
        places.append(index * each.tensor.itemsize + (each.begin - origin))
    return bool(torch.isin(*places).any())
