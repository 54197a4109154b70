"""``zshard.describe``: what a wrapped model consists of, as text."""

from __future__ import annotations

import torch
from tabulate import tabulate
from torch import nn

from ..units.flat import Flat
from ..words import counted
from ..wrap import schedule_of

_HEADS = (
    "unit",
    "module",
    "strategy",
    "parameters",
    "trained",
    "shard",
    "padding",
    "compute",
    "reduce",
    "master",
    "now",
)


def describe(model: nn.Module) -> str:
    """A table, as text: the model's ranks, and a line for each flat buffer of each of its units.

    Numbers are elements: of all its parameters, of those that are trained, of a rank's shard, and
    of the whole buffer's padding. "now" is what the unit has in memory: SHARDED (its
    shard alone), GATHERING, or GATHERED (whole parameters, too).

    Raises:
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> print(zshard.describe(model))  # doctest: +ELLIPSIS
        Linear: 10 parameters in 1 unit, sharded over one rank on cpu; this is rank 0 of 1
        unit    module    strategy      parameters    trained    shard ...
        root    Linear    zero3                 10         10 ...
    """
    schedule = schedule_of(model)
    comm = schedule.comm
    rows = [_row(flat) for flat in schedule.flats]
    total = sum(segment.numel for f in schedule.flats for segment in f.layout.segments)
    over = f"{comm.size} ranks" if comm.size > 1 else "one rank"
    if comm.replicas.size > 1:
        over += f", {comm.replicas.size} times"
    count = sum(bool(unit.flats) for unit in schedule.units)  # the root may have nothing of its own
    head = (
        f"{type(model).__name__}: {total:,} parameters in {counted(count, 'unit')}, sharded "
        f"over {over} on {schedule.device}; this is {comm.me}"
    )
    table = tabulate(
        rows, _HEADS, tablefmt="plain", intfmt=",", disable_numparse=[0, 1] if rows else False
    )
    return f"{head}\n{table}"


def _row(flat: Flat) -> tuple[object, ...]:
    unit, layout, dtypes = flat.unit, flat.layout, flat.dtypes
    numels = [segment.numel for segment in layout.segments]
    trained = sum(n for n, each in zip(numels, flat.trained, strict=True) if each)
    return (
        unit.label,
        type(unit.module).__name__,
        unit.strategy.name,
        sum(numels),
        trained,
        layout.shard_size,
        layout.padding,
        _name(dtypes.compute),
        _name(dtypes.reduce),
        "split" if dtypes.split else _name(dtypes.master),
        unit.state.name,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
