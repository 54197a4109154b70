"""The plain model's state_dict out of shards: whole tensors on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..containers import map_tensors
from ..errors import StateError
from ..flags import require_flags
from ..schedule import Schedule
from ..transports.simulated import require_real
from ..units.flat import Flat
from ..units.storage import storage_of
from ..wrap import schedule_of
from .whole import all_gather


@torch.no_grad()
def state_dict(model: nn.Module, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
    """What the plain model's ``state_dict()`` would hold, whole, in memory of its own on the CPU.

    Every rank has to call it. Keys and their order are the plain model's, hooks and
    ``_extra_state`` included; tied names share one tensor; parameters are the masters' values in
    their own dtypes; buffers are those of rank 0. On the device one flat buffer is whole at a time.

    Args:
        all_ranks: return it on every rank. Else the ranks other than 0 get an empty dict, and hold
            no more of the model than that one flat buffer.

    Raises:
        InputError: for an ``all_ranks`` that is neither True nor False.
        StateError: inside a forward or backward, or inside zshard.full_params; for simulated ranks;
            if a parameter was replaced.
        MismatchError: on every rank, if not all make this call, or they hold different versions of
            the model; with ``all_ranks``, if persistent buffers differ in shape.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> whole = zshard.state_dict(model)  # on ranks other than 0: {}
        >>> {name: tuple(value.shape) for name, value in whole.items()}
        {'weight': (2, 4), 'bias': (2,)}
    """
    schedule = schedule_of(model)
    require_real(schedule.comm.axes, "zshard.state_dict")
    if schedule.whole:
        raise StateError(
            "zshard.state_dict inside zshard.full_params: there the modules hold whole parameters, "
            "and model.state_dict() is whole as it is"
        )
    call = f"state_dict({all_ranks=})"
    with schedule.comm.awaited(call):
        schedule.begin_call(call, in_modules=True)
        schedule.updates.require_whole(call)
        require_flags(all_ranks=all_ranks)
        if all_ranks:  # whether a buffer seems changed or not: a write through .data does not
            schedule.module_buffers.broadcast(schedule.executor.step)
        wanted = all_ranks or schedule.comm.world_rank == 0
        whole = {flat: _on_the_host(flat, wanted) for flat in schedule.flats}
    return _with_parameters(model, schedule, whole) if wanted else {}


def _on_the_host(flat: Flat, wanted: bool) -> list[nn.Parameter]:
    """The whole parameters of ``flat``; none where they are not wanted."""
    full = all_gather(flat, flat.master.read())
    if not wanted:
        return []
    params = []
    for segment, trained in zip(flat.layout.segments, flat.trained, strict=True):
        value = torch.empty_strided(
            segment.shape, segment.stride, dtype=flat.dtypes.param, device="cpu"
        )
        value.copy_(segment.view_of(full))
        params.append(nn.Parameter(value, requires_grad=trained))
    return params


def _with_parameters(
    model: nn.Module, schedule: Schedule, whole: Mapping[Flat, list[nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """The model's own state_dict() while its modules hold ``whole``."""
    try:
        for unit in schedule.units:
            unit.put_params(whole)
        found = model.state_dict()
    finally:
        try:
            schedule.put_sharded()
        except BaseException:  # Ctrl-C, which would leave modules with these for good
            schedule.put_sharded()
            raise
    _own(found, [param for params in whole.values() for param in params])
    return found


def _own(found: dict[str, Any], whole: Iterable[torch.Tensor]) -> None:
    """Put copies on the CPU in the place of what is the model's memory: all but ``whole``."""
    # With what each was made of, whose memory could otherwise become another tensor's.
    copies = {_memory_of(param): (param, param.detach()) for param in whole}

    def own(value: torch.Tensor) -> torch.Tensor:
        # What is sparse has not one memory.
        memory = _memory_of(value) if value.layout is torch.strided else (id(value),)
        if memory not in copies:
            copies[memory] = value, value.detach().to("cpu", copy=True)
        return copies[memory][1]

    for name, value in found.items():
        found[name] = map_tensors(own, value)  # extra state may be anything


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are one: each ``detach`` makes a new object."""
    where = storage_of(tensor), tensor.storage_offset()
    lazily = tensor.is_conj(), tensor.is_neg()  # one memory, and other values
    return *where, tensor.shape, tensor.stride(), tensor.dtype, *lazily
