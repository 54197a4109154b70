"""Sharded tensors as torch.distributed.checkpoint sees them: what to write, what to read, where.

A rank's slice is a few boxes. Each element is written by one rank: where several own it (replicas,
ddp), by the one that updates it first. All that a rank owns is read. What is stored are the bits
in memory, so an fp32 master under a 16-bit parameter, or two planes, come back as they were.

What is handed out to be filled is the memory itself. A load asks for each tensor's boxes once, on
every rank, and then fills them in the same call: at the first we tell the flat buffer that its
values change. At each copy would be too often, and more often on one rank than on another, from
which the next forward would conclude that the ranks differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_map

from .. import ops
from ..errors import StateError
from ..layout import Range
from ..param import Sharded
from ..transports.simulated import require_real
from ..units.storage import storage_of
from .boxes import Box, boxes_of
from .inventory import saved_range


def write_items(sharded: Sharded, name: str) -> list[WriteItem]:
    """What this rank writes of ``sharded``, stored as ``name``.

    Raises:
        StateError: if the parameters hold no valid values, or ranks are simulated.
        MismatchError: if the ranks were found to hold different versions of the model.
    """
    what, schedule = "torch.distributed.checkpoint.save", sharded.flat.schedule
    require_real(schedule.comm.axes, what)
    schedule.require_values(what)
    schedule.updates.require_whole(what)
    dtype = torch.float32 if sharded._local is None else sharded._local.dtype
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(_chunk(box), TensorProperties(dtype), sharded.shape),
        )
        for box in _parts(sharded)[1]
    ]


def chunks_to_read(sharded: Sharded) -> list[ChunkStorageMetadata]:
    """What this rank owns of ``sharded``, all of which is about to be written.

    Raises:
        StateError: as ``write_items``: this brings values of some parameters, perhaps not all.
    """
    flat, what = sharded.flat, "torch.distributed.checkpoint.load"
    require_real(flat.schedule.comm.axes, what)
    flat.schedule.require_values(what)
    if sharded._local is None:
        flat.before_write()
        flat.updated(send_written=True)
    else:
        written = {storage_of(sharded._local)}
        flat.before_slices(written)
        flat.slices_written(written)
    if flat.is_master(sharded):
        flat.schedule.updates.replaced(flat, sharded.segment)
    return [_chunk(box) for boxes in _parts(sharded) for box in boxes]


def box_at(sharded: Sharded, index: MetadataIndex) -> torch.Tensor:
    """The memory of the box that ``index`` names, in its shape, to read or to fill."""
    flat = sharded.flat
    local, segment = flat.local(sharded.segment), flat.layout.segments[sharded.segment]
    for box in (box for boxes in _parts(sharded) for box in boxes):
        if box.offsets == index.offset:
            begin = box.begin - local.elements.begin
            part = Range(begin, begin + box.numel)
            if sharded._local is not None or box.numel == 0:
                return box.view_of(segment, part.of(sharded.local))
            assert flat.master.low is not None
            planes = (local.at.of(plane) for plane in (flat.master.send, flat.master.low))
            return Planes(*(box.view_of(segment, part.of(plane)) for plane in planes))
    raise StateError(f"{sharded.fqn}: this rank holds no part that begins at {index.offset}")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _parts(sharded: Sharded) -> tuple[list[Box], list[Box], list[Box]]:
    """What this rank owns before, in and after the part that it writes.

    The cuts make a box that is read the same as the one written at its offsets, so that offsets
    are enough to find it.
    """
    flat = sharded.flat
    comm, segment = flat.schedule.comm, flat.layout.segments[sharded.segment]
    if segment.numel == 0:  # a box without elements says that the tensor exists
        box = Box((0,) * len(segment.shape), tuple(segment.shape), 0)
        return [], [box] if comm.world_rank == 0 else [], []
    skip, end = flat.local(sharded.segment).elements
    own = saved_range(flat, sharded.segment)
    before, after = (skip, own.begin), (own.end, end)
    return boxes_of(segment, *before), boxes_of(segment, *own), boxes_of(segment, *after)


class Planes(torch.Tensor):
    """A box of a split master: to readers an fp32 tensor, and it takes fp32 values."""

    high: torch.Tensor  # bf16, a view of the upper plane
    low: torch.Tensor  # int16, likewise of the lower

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> Planes:
        """Show both as one."""
        # A storage too small for the elements has the writers clone what they are given: joined.
        self: Planes = torch.Tensor._make_wrapper_subclass(
            cls,
            high.shape,
            strides=high.stride(),
            dtype=torch.float32,
            device=high.device,
            storage_size=0,
        )
        self.high, self.low = high, low
        return self

    def __init__(self, *args: object) -> None:
        super().__init__()

    def joined(self) -> torch.Tensor:
        """The values, in fresh memory."""
        high, low = self.high.contiguous(), self.low.contiguous()
        value = torch.empty_like(high, dtype=torch.float32)
        ops.join_master_(value.view(-1), high.view(-1), low.view(-1))
        return value

    def fill(self, value: torch.Tensor) -> None:
        """Take ``value``, of any dtype."""
        whole = torch.empty(self.shape, dtype=torch.float32, device=self.device).copy_(value)
        high = torch.empty_like(whole, dtype=torch.bfloat16)
        low = torch.empty_like(whole, dtype=torch.int16)
        ops.split_master_(high.view(-1), low.view(-1), whole.view(-1))
        self.high.copy_(high)
        self.low.copy_(low)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        target, rest, kwargs = args[0], args[1:], kwargs or {}
        if func is torch.ops.aten.copy_.default and isinstance(target, Planes):
            target.fill(rest[0])
            return target
        if func.is_view:
            return Planes(func(target.high, *rest, **kwargs), func(target.low, *rest, **kwargs))
        if func._schema.is_mutable and isinstance(target, Planes):
            raise StateError(f"{func._schema.name} of a split master: only copy_ writes to it")
        plain = tree_map(lambda x: x.joined() if isinstance(x, Planes) else x, (args, kwargs))
        return func(*plain[0], **plain[1])
