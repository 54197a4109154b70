"""Whole tensors out of shards: parameters, gradients, and a context with them in the modules.

All of these are collectives: every rank of the mesh has to call them. Each rank's own slices, which
it reads and writes by itself, are here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from ..attributes import share_attributes, user_attributes
from ..digest import digest
from ..errors import InputError, MismatchError, StateError
from ..flags import require_flags
from ..optimizers.stand_ins import put_in, refuse_lost_gradients, take_out
from ..param import Sharded
from ..schedule import Schedule
from ..sharded.slices import all_of, own_slice
from ..tag import Tag
from ..unit import State
from ..unitmap import state_key
from ..units.flat import Flat
from ..units.gradient import held_back
from ..wrap import schedule_of
from ..wrapping import same_model
from .replaced import require_values, take_replaced

_END = "the end of full_params(write=True)"


def full_param(model: nn.Module, name: str) -> torch.Tensor:
    """The whole parameter ``name``: the master's value in the parameter's own dtype and shape.

    A collective: every rank has to call it, between steps. The tensor is a copy.

    Raises:
        InputError: if the model has no such parameter, or it is whole (``ignored``).
        MismatchError: on every rank, if they do not all call it, or have made other updates.
        StateError: inside a forward or backward; if the parameters hold no valid values.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> zshard.full_param(model, "weight").shape
        torch.Size([2, 4])
    """
    schedule = schedule_of(model)
    flat, index = _find(schedule, name)
    call = f"full_param({name!r})"
    with schedule.comm.awaited(call):
        schedule.begin_call(call)
        mine = flat.master.read(*flat.local(index).at)
        return _whole(flat, index, mine).to(flat.dtypes.param)


def full_grad(model: nn.Module, name: str) -> torch.Tensor | None:
    """The whole reduced gradient of ``name``, in the reduce dtype; None where the plain model's is.

    A collective: every rank has to call it, between backward and ``zero_grad``. The tensor is a
    copy.

    Raises:
        InputError: if the model has no such parameter, or it is whole (``ignored``).
        MismatchError: on every rank, if they do not all call it, have made other updates, or some
            have dropped the gradient.
        StateError: inside a forward or backward; for a gradient that ``no_sync`` holds back on any
            rank.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> zshard.full_grad(model, "bias")
        tensor([3., 3.])
    """
    schedule = schedule_of(model)
    flat, index = _find(schedule, name)
    call = f"full_grad({name!r})"
    with schedule.comm.awaited(call):
        if schedule.backward.raised:
            schedule.reset()  # first: the gradients of this step go
        there = flat.params[index].grad is not None
        schedule.begin_call(call)
        tag = Tag(schedule.executor.step, "full_grad", "root")
        words = schedule.comm.all_gather_words([there, flat.grads.is_held_back(index)], tag)
        if held := [rank for rank, (_, held) in enumerate(words) if held]:
            raise StateError(held_back(name, f" on {schedule.comm.names(held)}"))
        if missing := [rank for rank, (there, _) in enumerate(words) if not there]:
            if len(missing) == len(words):
                return None
            raise MismatchError(
                f"{call}: {schedule.comm.names(missing)} have dropped the gradient (zero_grad, "
                ".grad = None), while the others still have it. Drop it on every rank"
            )
        return _whole(flat, index, flat.grads.seen(index))


@contextmanager
def full_params(model: nn.Module, write: bool = False) -> Iterator[nn.Module]:
    """Whole parameters in the modules of ``model``, on every rank, for the length of the context.

    They are the masters' values in the parameters' own dtypes, without gradients: neither a clip
    of gradients nor zero_grad means anything inside, and hooks set there are lost. Persistent
    buffers become rank 0's. A collective: every rank has to enter, between steps. The model may be
    called inside under torch.no_grad(), on any rank, without communication.

    Args:
        write: take what the context leaves in the parameters as their new values. Every rank has to
            leave the same values, which are compared as it ends; each keeps its own shard of them.
            Elements that are left as they were keep their master, whose fp32 has more bits than a
            16-bit parameter, unless ranks hold different versions of the model. After an exception
            nothing is taken. With ``write=False`` what is written into the parameters is dropped as
            the context ends, without an error.

    Raises:
        StateError: inside a forward or backward, or inside another full_params; if a parameter was
            replaced; at the end, for a gradient that was made inside and that no optimizer there
            has used; at the end of one for writing, if a sharded parameter was changed meanwhile
            (by an optimizer's step, say).
        InputError: for a ``write`` that is neither True nor False; at the end, for a parameter that
            was removed, or replaced by one of another shape, or of no values (on the meta device),
            or sparse, or by different ones in several modules that share it.
        MismatchError: on every rank, if they do not all enter, or some to write; if persistent
            buffers differ in shape; at the end of one for writing, if ranks left other values.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> with zshard.full_params(model, write=True):
        ...     _ = nn.init.constant_(model.weight, 0.5)
        >>> zshard.full_param(model, "weight").sum()
        tensor(4.)
    """
    schedule = schedule_of(model)
    if schedule.whole:
        raise StateError("zshard.full_params cannot be entered inside another full_params")
    with schedule.comm.awaited("full_params"):
        schedule.begin_call(f"full_params({write=})", in_modules=True, buffers=True)
        require_flags(write=write)
        wholes = {flat: _stand_ins(flat) for flat in schedule.flats}
    versions = [flat.version for flat in schedule.flats]
    with schedule.before_call(_END) if write else nullcontext():
        with _lent(schedule, wholes, write=write):
            yield model
        if write and versions != [flat.version for flat in schedule.flats]:
            raise StateError(
                "parameters were changed by an optimizer's step, or through their shards, inside "
                "zshard.full_params(model, write=True), which would undo that. They keep these "
                "changes, and nothing of what was written in the context; do one after the other."
            )
        if write:
            require_values(wholes)
    if write and schedule.comm.world_size > 1:
        _compare(schedule, wholes)
    _take_over(schedule, wholes, write=write)


@contextmanager
def _lent(
    schedule: Schedule, wholes: dict[Flat, list[nn.Parameter]], *, write: bool
) -> Iterator[None]:
    """A context in which the modules hold ``wholes``, which then are what was left in them.

    Raises:
        StateError: at the end, for a gradient that would be lost.
        InputError: at the end of one for writing, as ``take_replaced``.
    """
    given = [whole for params in wholes.values() for whole in params]
    schedule.whole = True
    try:
        for each, param in zip(given, schedule.parameters(), strict=True):
            put_in(each, param)
        for unit in schedule.units:
            if unit.state is not State.SHARDED and not unit.strategy.resident:
                unit.reshard()
            unit.put_params(wholes)
        yield
        refuse_lost_gradients(given)
        take_replaced(schedule.units, wholes, write=write)
    finally:
        try:
            _end_loan(schedule, given)
        except BaseException:  # Ctrl-C, which would leave modules with what was lent for good
            _end_loan(schedule, given)
            raise


def _end_loan(schedule: Schedule, given: list[nn.Parameter]) -> None:
    """Put the sharded parameters back into the modules; may be done again."""
    schedule.whole = False
    for each, param in zip(given, schedule.parameters(), strict=True):
        take_out(each)
        share_attributes(each, param)
    schedule.put_sharded()


def _compare(schedule: Schedule, wholes: dict[Flat, list[nn.Parameter]]) -> None:
    """Make sure that every rank has left the same values."""
    names = [name for flat in wholes for name in flat.names]
    mine = [digest(value) for whole in wholes.values() for value in whole]
    remedy = (
        "each would keep its own part of them, so nothing of what was written inside "
        "zshard.full_params(model, write=True) is taken. Write the same on every rank"
    )
    tag = Tag(schedule.executor.step, "full_params", "root")
    with schedule.comm.awaited(_END):
        schedule.begin_call(_END)
        same_model.same_values(names, mine, schedule.comm, tag, remedy)


def _take_over(schedule: Schedule, wholes: dict[Flat, list[nn.Parameter]], *, write: bool) -> None:
    """Freeze and unfreeze parameters as ``wholes`` are; with ``write``, take their values.

    Raises:
        InputError: for a parameter of another shape.
    """
    params = schedule.parameters()
    left = [value for whole in wholes.values() for value in whole]
    # All slices first: where one is refused, nothing is taken.
    slices = [own_slice(p, v.detach()) for p, v in zip(params, left, strict=True) if write]
    for param, value in zip(params, left, strict=True):
        param.requires_grad_(value.requires_grad)
    if write:
        for param, mine in zip(params, slices, strict=True):
            _take_back(param, mine)
        schedule.updates.mended()


def local_shards(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's slice of every parameter's master: name -> 1-D view, in the master dtype.

    The slices are in memory order and may be empty. Call ``mark_updated`` after writing any, on
    every rank. Take them anew before writing behind a forward, a backward or a read of whole values
    (``full_param``, ``full_params``, ``state_dict``, a save): other ranks may still be reading them
    there. On every rank: behind a forward without a backward the ranks meet here.

    Raises:
        MismatchError: on every rank, if others have begun something else there.
        StateError: if the master is split, and so has no such slices; if they hold no valid values.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> for shard in zshard.local_shards(model).values():
        ...     _ = shard.clamp_(-0.1, 0.1)
        >>> zshard.mark_updated(model)
    """
    schedule = schedule_of(model)
    schedule.require_values("zshard.local_shards")
    if any(flat.dtypes.split for flat in schedule.flats):
        raise StateError("zshard.local_shards: a split master is two planes; use full_params")
    for flat in schedule.flats:
        flat.before_write()
    return {
        name: param.local
        for flat in schedule.flats
        for name, param in zip(flat.names, flat.params, strict=True)
    }


def mark_updated(model: nn.Module) -> None:
    """Say that ``local_shards`` were written: the next gather sends the new values.

    Every rank has to call it before the next forward, also one that wrote nothing; it communicates
    nothing. Where it was left out on some, that forward is a MismatchError, as of an update.

    Raises:
        WrapError: if the model is not wrapped.
    """
    for flat in schedule_of(model).flats:
        flat.updated(send_written=False)


def _find(schedule: Schedule, name: str) -> tuple[Flat, int]:
    if not isinstance(name, str):
        raise InputError(f"name={name!r}: expected a name that model.named_parameters() lists")
    for as_registered in (True, False):
        for flat in schedule.flats:
            for index, names in enumerate(flat.all_names):
                if name in (names if as_registered else map(state_key, names)):
                    return flat, index
    if name in dict(schedule.model.named_parameters(remove_duplicate=False)):
        raise InputError(f"{name!r} is not sharded (ignored=): every rank has it, read it there")
    raise InputError(
        f"the wrapped model has no parameter {name!r}; model.named_parameters() lists them"
    )


def all_gather(flat: Flat, owned: torch.Tensor) -> torch.Tensor:
    """As ``Flat.all_gather``, after ``Schedule.begin_call``."""
    tag = Tag(flat.schedule.executor.step, "gather", flat.unit.label)
    return flat.all_gather(owned, flat.schedule.comm, tag)


def _whole(flat: Flat, index: int, mine: torch.Tensor) -> torch.Tensor:
    """All of parameter ``index``, or its gradient, as a tensor of its own; see ``all_of``."""
    segment, whole = flat.layout.segments[index], all_of(flat, index, mine)
    if whole is mine:
        whole = mine.clone()
    return torch.as_strided(whole, segment.shape, segment.stride).detach()  # no view


def _stand_ins(flat: Flat) -> list[nn.Parameter]:
    owned = flat.master.read()
    full = all_gather(flat, owned)
    if full is owned and flat.dtypes.param == full.dtype:
        full = full.clone()  # what is written in there is no new value of the master
    full = full.to(flat.dtypes.param)
    made = []
    for segment, param, trained in zip(
        flat.layout.segments, flat.params, flat.trained, strict=True
    ):
        whole = nn.Parameter(segment.view_of(full), requires_grad=trained)
        whole.__dict__.update(user_attributes(param))
        made.append(whole)
    return made


@torch.no_grad()
def _take_back(param: Sharded, value: torch.Tensor) -> None:
    """Make ``value``, this rank's slice, what ``param`` is, but for what was left as it was."""
    flat = param.flat
    value = value.to(flat.device)
    same = not flat.schedule.updates.torn  # or else the masters may differ between replicas
    if same and flat.dtypes.param != flat.dtypes.master and value.dtype == flat.dtypes.param:
        master = flat.master.read(*flat.local(param.segment).at)
        bits = torch.int16  # so that a NaN, too, is what it was
        left = value.contiguous().view(bits) == master.to(value.dtype).view(bits)
        value = torch.where(left, master, value.to(master.dtype))
    param.copy_(Sharded(value, flat, param.segment))
