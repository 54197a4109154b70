"""``zshard.memory``: what this rank holds of a wrapped model, counted from what is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict, cast

from torch import nn

from ..comm import Comm
from ..flags import require_flags
from ..step.reduction import scratch_sizes
from ..unit import Unit
from ..units.flat import Flat
from ..wrap import schedule_of


class Bytes(TypedDict):
    """Bytes that this rank holds, by what they are for; padding is part of each."""

    parameters: int  # compute-dtype copies and send buffers, whole or sharded as the strategy says
    gradients: int  # gradient buffers that are allocated, and what no_sync holds back
    master: int  # masters beside the parameters; 0 where the parameters are it
    optimizer: int  # states of zshard's optimizers that have taken a step
    padding: int  # the part of parameters and master that belongs to no parameter
    states: int  # the sum of the above but padding
    full_buffers: int  # memory that gathered units share
    reduce_buffers: int
    activations: int  # 0: they are autograd's
    peak: int  # states and buffers together


class UnitBytes(Bytes):
    """Bytes that this rank holds of one unit, now.

    But for the buffers that units share: there it is what the unit takes of them, in its turn:
    full_buffers when it is gathered, if whole parameters do not stay; reduce_buffers when it is
    reduced; and with these its peak.
    """

    name: str
    model_parameters: int  # elements, of the whole unit


class Memory(TypedDict):
    """The result of ``memory``, in bytes of this rank.

    The kinds are parameters (copies in the compute dtype, and send buffers), gradients, master (0
    where the parameters are it), optimizer, padding (a part of these), states (the sum of these),
    full_buffers, reduce_buffers, activations (0: they are autograd's), and peak (states and
    buffers). A unit also has its name and its model_parameters, in elements.

    Keys:
        now: each kind of bytes as it is.
        peak: the most of each kind so far, since wrap or the last ``reset_peak``.
        units: what each unit holds now, in the order of the unit map.
    """

    now: Bytes
    peak: Bytes
    units: list[UnitBytes]


def memory(model: nn.Module, *, reset_peak: bool = False) -> Memory:
    """Bytes that this rank holds for the model's parameters: now, at the peak so far, and by unit.

    Counted from what zshard has allocated, under the keys of ``zshard.plan``, so that the two can
    be compared. At the peak each kind is the most that there was of it; ``states`` and ``peak`` are
    the most that there was at one time, which may be less than the sum of the kinds above.

    Not counted, because it is not zshard's: activations; the gradients that autograd makes of the
    unit under way, until they are packed or no_sync holds them; the states of other libraries'
    optimizers; what the collectives' backend stages; what ignored parameters take. Nor what a
    single call lends or copies: ``full_params``, ``state_dict``, saves.

    Args:
        reset_peak: let the next peak begin from what there is now, after this reading.

    Raises:
        InputError: for a ``reset_peak`` that is neither True nor False.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(400, 200))
        >>> held = zshard.memory(model)
        >>> held["now"]["parameters"], held["units"][0]["model_parameters"]
        (320896, 80200)
    """
    require_flags(reset_peak=reset_peak)
    schedule = schedule_of(model)
    pool = schedule.pool
    optimizer: Counter[Flat] = Counter()
    for each in schedule.optimizers:
        optimizer.update(each.state_bytes(schedule))
    now = _bytes_of(schedule.flats, optimizer, pool.slot_bytes, pool.scratch_bytes)
    peak = cast(Bytes, {**now, **pool.ledger.peak})
    units = [_of_unit(unit, optimizer, schedule.comm) for unit in schedule.units]
    if reset_peak:
        pool.ledger.restart()
    return Memory(now=now, peak=peak, units=units)


def _of_unit(unit: Unit, optimizer: Counter[Flat], comm: Comm) -> UnitBytes:
    trained = [flat for flat in unit.flats if flat.requires_grad]
    full = sum(flat.full_bytes for flat in unit.flats if flat.resident is None)
    reduce = sum(scratch_sizes(trained, comm).values())
    return {
        "name": unit.label,
        "model_parameters": sum(s.numel for flat in unit.flats for s in flat.layout.segments),
        **_bytes_of(unit.flats, optimizer, full, reduce),
    }


def _bytes_of(
    flats: Sequence[Flat], optimizer: Counter[Flat], full_buffers: int, reduce_buffers: int
) -> Bytes:
    """Of ``flats``, with these buffers; ``optimizer``: bytes of the states of every flat buffer."""
    parameters = sum(flat.copy.nbytes for flat in flats)
    gradients = sum(flat.grads.nbytes for flat in flats)
    master = sum(flat.master.nbytes for flat in flats)
    states = sum(optimizer[flat] for flat in flats)
    held = parameters + gradients + master + states
    return Bytes(
        parameters=parameters,
        gradients=gradients,
        master=master,
        optimizer=states,
        padding=sum(_padding(flat) for flat in flats),
        states=held,
        full_buffers=full_buffers,
        reduce_buffers=reduce_buffers,
        activations=0,
        peak=held + full_buffers + reduce_buffers,
    )


def _padding(flat: Flat) -> int:
    of_copy = flat.padding if flat.resident is None else flat.layout.padding
    return of_copy * flat.copy.element_size() + flat.padding * flat.dtypes.beside_bytes
