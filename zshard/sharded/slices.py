"""This rank's slice of a tensor: out of a whole one, or out of one that is cut in other places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import ShardedAccessError
from ..layout import aligned
from ..param import Sharded, ShardedGrad
from ..tag import Tag

if TYPE_CHECKING:
    from ..units.flat import Flat


def own_slice(target: Sharded, whole: torch.Tensor) -> torch.Tensor:
    """This rank's slice of ``whole``, a tensor like ``target``.

    Raises:
        InputError: if it has another shape.
    """
    segment = target.flat.layout.segments[target.segment]
    segment.require_shape(whole, target.fqn)
    return target.flat.local(target.segment).elements.of(segment.physical(whole).reshape(-1))


def recut(other: Sharded, like: Sharded, op: str) -> Sharded:
    """The values of ``other`` cut where ``like`` is. A collective, unless every rank has all.

    Args:
        op: what they are for, for errors.

    Raises:
        ShardedAccessError: if the two have different shapes, or are sharded over other ranks.
        MismatchError: on every rank, if the ranks do different things.
        StateError: inside a forward or backward.
    """
    both = f"{op} of {like.fqn!r} and {other.fqn!r}"
    if other.shape != like.shape:
        raise ShardedAccessError(
            f"{both}, of shapes {tuple(like.shape)} and {tuple(other.shape)}: of sharded tensors "
            "it has to be one. Work on whole parameters inside zshard.full_params(model)."
        )
    segment = other.flat.layout.segments[other.segment]
    whole = _whole(other, like, both)
    value = own_slice(like, torch.as_strided(whole, segment.shape, segment.stride))
    return Sharded(value, like.flat, like.segment, dtype=other.dtype)


def _whole(other: Sharded, like: Sharded, both: str) -> torch.Tensor:
    """All elements of ``other``, (numel,), in its memory order."""
    flat, schedule = other.flat, other.flat.schedule
    mine = other.seen() if isinstance(other, ShardedGrad) else other.local
    if not flat.needs_gather or other.numel() == 0:
        return mine
    comm = schedule.comm
    if like.flat.schedule.comm.shards.global_ranks != comm.shards.global_ranks:
        raise ShardedAccessError(
            f"{both}: they are sharded over different ranks. Work on whole parameters inside "
            "zshard.full_params(model)."
        )
    call = f"{both} (cut into different shards)"
    with comm.awaited(call):
        schedule.begin_call(call)
        return all_of(flat, other.segment, mine)


def all_of(flat: Flat, index: int, mine: torch.Tensor) -> torch.Tensor:
    """All elements of segment ``index``, (numel,) in memory order, without the rest of its unit.

    A collective, behind ``Schedule.begin_call``; but not where every rank owns all: then it is
    ``mine`` itself, this rank's slice.
    """
    if not flat.needs_gather or flat.layout.segments[index].numel == 0:
        return mine
    comm = flat.schedule.comm
    shards = map(flat.layout.shard, range(comm.size))
    sizes = [flat.layout.local(index, shard).elements.numel for shard in shards]
    row = mine.new_empty(aligned(max(sizes) * mine.itemsize) // mine.itemsize)
    row[: mine.numel()] = mine
    row[mine.numel() :] = 0
    rows = row.new_empty(comm.size, row.numel())
    tag = Tag(flat.schedule.executor.step, "gather", flat.unit.label, flat.names[index])
    comm.all_gather(rows.view(-1).view(torch.uint8), row.view(torch.uint8), tag).wait()
    return torch.cat([r[:n] for r, n in zip(rows, sizes, strict=True)])
