"""From whole parameters to shards, unit by unit, on all ranks or on none.

A unit is sharded on this rank, and then the ranks tell each other whether all of them could. Until
then its whole parameters are kept. Where one could not, all put them back, and gather those of the
units before; the model is as it was. Where all that lacks is memory to share, and "auto" was asked
for, they leave what they share instead, and go on through the process group. Only a rank that
cannot be reached any more leaves the others with a model that is half wrapped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import nn

from ..comm import Comm
from ..errors import CommError
from ..precision import Precision
from ..step.reduction import scratch_sizes
from ..strategy import Strategy
from ..tag import Tag
from ..transports.refusal import Refusal, attempt, raise_together
from ..transports.shared import NoSharedMemory
from ..transports.transport import say_fallback
from ..unitmap import Owned, UnitSpec, flat_groups, owned_parameters
from ..units.flat import Flat, lend
from ..units.param_site import ParamSite
from ..units.pool import Pool
from .materialize import swap_contents


class _Swapped(NamedTuple):
    """A parameter that is sharded, and what it was."""

    owned: Owned
    whole: nn.Parameter  # its former contents; without values once all ranks have sharded the unit


class UnitParts(NamedTuple):
    """What a unit is made of."""

    flats: list[Flat]
    sites: list[ParamSite]


class _Made(NamedTuple):
    """What a unit's parameters have become."""

    flats: list[Flat]
    swapped: list[list[_Swapped]]  # of each flat


class Sharder:
    """Shards the units of ``model``; a context that an error leaves with the model as it was.

    Args:
        meta: its tensors that have no values yet, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        comm: Comm,
        device: torch.device,
        meta: Mapping[str, torch.Tensor],
    ) -> None:
        self._model, self._precision, self._comm, self._device = model, precision, comm, device
        self._meta = {id(tensor): (name, tensor) for name, tensor in meta.items()}
        self._done: list[_Made] = []
        self._to_move: list[Flat] = []  # from memory that the ranks no longer share

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        # After a CommError the other ranks do not come to undo anything.
        if isinstance(error, Exception) and not isinstance(error, CommError):
            self._undo()

    def shard(self, spec: UnitSpec, strategy: Strategy) -> UnitParts:
        """Make a unit's flat buffers, and put sharded parameters in place of the whole ones.

        Raises:
            Error: on every rank, if one of them cannot; the unit's parameters are as before.
        """
        tag = Tag(None, "wrap", spec.label)
        made = _Made([], [])
        while True:
            failure, told = attempt(partial(self._make, spec, strategy, made), self._comm, tag)
            if not told:
                break
            _put_back(made)
            self._raise_or_fall_back(failure, told)
        self._done.append(made)
        sites: list[ParamSite] = []
        for flat, swapped in zip(made.flats, made.swapped, strict=True):
            for segment, (owned, whole) in enumerate(swapped):
                flat.params[segment] = owned.param  # type: ignore[call-overload]
                sites += [ParamSite(m, attribute, flat, segment) for m, attribute in owned.sites]
                if not whole.is_meta:
                    whole.data = whole.data.new_empty(0)
        return UnitParts(made.flats, sites)

    def _make(self, spec: UnitSpec, strategy: Strategy, made: _Made) -> None:
        self._move()
        groups = flat_groups(spec, self._precision)
        # What the ranks make together comes before anything that one of them alone may fail in.
        lent = [
            lend([owned.param for owned in group], dtypes, strategy, self._comm)
            for dtypes, group in groups
        ]
        for (dtypes, group), memory in zip(groups, lent, strict=True):
            params = [owned.param for owned in group]
            names = [owned.names for owned in group]
            flat = Flat(names, params, dtypes, strategy, self._comm, self._device, memory)
            made.flats.append(flat)
            made.swapped.append([])
            for sharded, owned in zip(flat.params, group, strict=True):
                # See [Note: one object, two faces].
                swap_contents(owned.name, owned.param, sharded, owned.holders)
                made.swapped[-1].append(_Swapped(owned, cast(nn.Parameter, sharded)))

    def reserve(self, pool: Pool) -> None:
        """Make the reduce buffers, where that takes all ranks; after the last unit.

        Raises:
            Error: on every rank, if one of them cannot.
        """
        self._comm.shards.settle()
        while self._comm.shards.in_memory:
            flats = [flat for made in self._done for flat in made.flats if flat.requires_grad]
            pool.reserve_scratch(scratch_sizes(flats, self._comm))
            failure, told = attempt(pool.make_scratch, self._comm, Tag(None, "wrap"))
            if not told:
                return
            pool.drop_scratch()
            self._raise_or_fall_back(failure, told)
        self._move()

    def _undo(self) -> None:
        """Make the model as it was. All ranks come here together, if any unit is sharded.

        Raises:
            CommError: if a rank does not; the model is half wrapped then.
        """
        self._comm.leave_memory()
        for made in reversed(self._done):
            for flat, swapped in zip(made.flats, made.swapped, strict=True):
                if not all(id(owned.param) in self._meta for owned, _ in swapped):
                    self._fill(flat, swapped)
            made.swapped[:] = [
                [each for each in swapped if self._has_former(each)] for swapped in made.swapped
            ]
            _put_back(made)
        holders = {id(owned.param): owned.holders for owned in owned_parameters(self._model, ())}
        for name, tensor in self._meta.values():
            if not tensor.is_meta:
                swap_contents(name, tensor, _on_meta(tensor), holders.get(id(tensor), ()))

    def _has_former(self, swapped: _Swapped) -> bool:
        """Whether the former contents are what there was before wrap: no values, or the whole."""
        return swapped.whole.is_meta or id(swapped.owned.param) not in self._meta

    def _fill(self, flat: Flat, swapped: Sequence[_Swapped]) -> None:
        """Give the former contents of a flat buffer's parameters their values again."""
        tag = Tag(None, "wrap", about=flat.names[0])
        whole = flat.all_gather(flat.master.read(), self._comm, tag)
        for segment, (owned, former) in zip(flat.layout.segments, swapped, strict=True):
            if id(owned.param) not in self._meta:
                value = segment.view_of(whole).to(former.dtype)
                former.data = value.clone(memory_format=torch.preserve_format)

    def _raise_or_fall_back(
        self, failure: Exception | None, told: Sequence[Refusal | None]
    ) -> None:
        """Raise what the ranks have told; or leave shared memory, where that is the remedy."""
        refusals = [refusal for refusal in told if refusal is not None]
        if isinstance(failure, NoSharedMemory):
            failure.__traceback__ = None  # whose functions hold memory
        if not (self._comm.may_fall_back and all(refusal.lack for refusal in refusals)):
            raise_together(failure, told, self._comm.global_ranks)
        if self._comm.world_rank == 0:
            say_fallback(refusals[0].text, logging.WARNING)
        self._comm.leave_memory()
        self._to_move = [flat for made in self._done for flat in made.flats]

    def _move(self) -> None:
        while self._to_move:
            self._to_move[-1].move()
            self._to_move.pop()


def _put_back(made: _Made) -> None:
    """Put the former contents of a unit's parameters in place of the sharded ones."""
    for swapped in made.swapped:
        for owned, whole in swapped:
            swap_contents(owned.name, owned.param, whole, owned.holders)
    for flat in made.flats:
        flat.free()
    made.flats.clear()
    made.swapped.clear()


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without values, or Parameter, like ``tensor``."""
    bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    is_param = isinstance(tensor, nn.Parameter)
    return nn.Parameter(bare, tensor.requires_grad) if is_param else bare
