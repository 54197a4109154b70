"""``zshard.load``: a checkpoint into a wrapped model, of any number of ranks, strategy and map."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError, Error, MismatchError, StateError
from ..flags import require_flags
from ..schedule import Schedule
from ..whole_files import StrPath
from ..words import counted
from ..wrap import schedule_of
from . import catalogue
from .held import HeldWhole
from .inventory import inventory_of, set_extra_state
from .manifest import Manifest
from .manifest_reading import check_files, read_manifest
from .match import Match, match_model
from .optimizer_match import OptimizerMatch, match_optimizers
from .optimizer_state import kinds_of, optimizers_of
from .paths import absolute, shown
from .peers import Peers
from .reader import fill
from .rng import NBYTES, set_random_state
from .save import begin

# Another job may replace the checkpoint while it is read: what is there then is loaded instead.
_ATTEMPTS = 20

# Of a model whose load failed halfway: the optimizers whose states that has left in part loaded.
_TORN: WeakKeyDictionary[Schedule, list[ref[Optimizer]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Loaded:
    """What a load found.

    Attributes:
        extra: what ``zshard.save`` was given.
        missing: what the model (or optimizer) has and the checkpoint does not.
        unexpected: what the checkpoint has and the model does not. Both are empty unless
            ``strict=False``.
    """

    extra: Any = None  # what JSON has
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def load(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    strict: bool = True,
    rng: bool = False,
) -> Loaded:
    """Load what ``zshard.save`` saved into a wrapped model, and its optimizer; all ranks call this.

    The model may be wrapped over another number of ranks, with another strategy, unit map or
    precision than the one that was saved: parameters and states get the same bits. (Of a bf16 or
    fp16 parameter that is ignored now, and was not then, the states of torch's optimizers are
    rounded to its dtype, as torch has them.)

    Args:
        path: of a checkpoint, as given to ``save``, or from ``latest``. If another job replaces it
            meanwhile, what is there then is loaded; never a part of each.
        optimizer: of the class that was saved (by name, so torch's AdamW for zshard's will do).
            Without it the optimizer's states in the checkpoint are left there. Of several that were
            saved, the list, in the same order.
        strict: refuse what is missing or unexpected; otherwise it is left as it is, and returned.
        rng: also restore the states of the random number generators; as many ranks as saved them.

    Returns:
        The ``extra`` of the save and, without ``strict``, what was missing and unexpected.

    Raises:
        CheckpointError: on every rank, and nothing has changed: nothing at ``path``; entries that
            are missing, unexpected, or of another shape or dtype; files that are missing or cut.
            If data is found damaged, the model is left in part loaded, and refuses to run until a
            load succeeds.
        CommError: if a rank cannot be reached.
        InputError: for an optimizer of other parameters; arguments of other types.
        MismatchError: on every rank, if they load with different arguments.
        OptimizerError: for an optimizer around another one.
        StateError: inside a forward or backward.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> zshard.save("step-10", model, extra={"step": 10})
        >>> zshard.load("step-10", model)
        Loaded(extra={'step': 10}, missing=[], unexpected=[])
    """
    schedule = schedule_of(model)
    label = shown(path)
    kinds = ", ".join(kinds_of(optimizer)) or None
    begin(schedule, f"load({label}, {kinds}, {strict=}, {rng=})", unusable_ok=True)
    peers = Peers(schedule.comm, f"load({label})")
    with schedule.comm.awaited(peers.what, but=(Exception,)):
        attempts = _ATTEMPTS
        while True:
            attempts -= 1
            seen: list[tuple[str, str]] = []
            try:
                return _load(schedule, path, optimizer, peers, seen, strict=strict, rng=rng)
            except Exception as error:  # on the others it is a CheckpointError, if not one of ours
                ours = isinstance(error, Error) and not isinstance(error, CheckpointError)
                if ours or not attempts:
                    raise
                if not any(peers.gather(partial(_is_another, path, seen))):
                    raise


def _is_another(path: StrPath, seen: list[tuple[str, str]]) -> bool:
    """Whether the checkpoint at ``path`` is not (any more) the one ``seen``, or not there."""
    try:
        folder = catalogue.find(absolute(path))
        return [(folder, read_manifest(folder).id)] != seen
    except CheckpointError:
        return False


def _load(
    schedule: Schedule,
    path: StrPath,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    peers: Peers,
    seen: list[tuple[str, str]],  # takes where the checkpoint was found, and its id
    *,
    strict: bool,
    rng: bool,
) -> Loaded:
    label = shown(path)

    def read() -> tuple[str, Manifest]:
        require_flags(strict=strict, rng=rng)
        folder = catalogue.find(absolute(path))
        manifest = read_manifest(folder)
        seen.append((folder, manifest.id))
        check_files(manifest, folder)
        return folder, manifest

    folder, saved = peers.together(read)
    ids = peers.gather(lambda: saved.id)
    if len(set(ids)) > 1:
        raise CheckpointError(f"{label}: the ranks found different checkpoints there: {ids}")
    generators = torch.empty(NBYTES, dtype=torch.uint8, device="cpu")

    def compare() -> tuple[Match, list[Optimizer], list[OptimizerMatch]]:
        inventory = inventory_of(schedule)
        stored, masters = saved.tensors["model"], saved.tensors["master"]
        match = match_model(stored, masters, saved.aliases, inventory)
        optimizers = optimizers_of(optimizer, inventory.names)
        states = match_optimizers(saved, optimizers, inventory, match)
        match.missing += [k for k in inventory.extra_state if k not in saved.extra_state]
        match.unexpected += [k for k in saved.extra_state if k not in inventory.extra_state]
        if rng:
            _match_generators(match, saved, label, peers, generators)
        match.refuse(label, strict=strict, has_values=not schedule.unusable)
        return match, optimizers, states

    match, optimizers, states = peers.together(compare)
    if not strict:  # else nothing is left out
        _compare_left_out(match, peers)

    def take() -> None:
        fill(folder, match.pairs, saved.seed)
        for each in states:
            each.finish()
        set_extra_state(schedule.model, saved.extra_state)
        if rng:
            set_random_state(generators, schedule.device)

    change(schedule, peers, take, optimizers)
    begin_anew(schedule, match.missing)
    return Loaded(saved.extra, match.missing, match.unexpected)


def _compare_left_out(match: Match, peers: Peers) -> None:
    """Make sure that what stays as it is stays so everywhere: else ranks would train apart.

    Raises:
        MismatchError: on every rank, where it does not, as of optimizers in another order.
    """
    left_out = peers.gather(lambda: {*match.missing, *match.unexpected})
    if differing := [rank for rank, names in enumerate(left_out) if names != left_out[0]]:
        names = sorted(left_out[differing[0]] ^ left_out[0])
        raise MismatchError(
            f"{peers.what}: {peers.comm.names(differing)} would leave out other things than "
            f"{peers.comm.name(0)} ({names[0]}), so nothing was loaded. Give every rank the same "
            "optimizers, in the same order"
        )


def _match_generators(
    match: Match,
    saved: Manifest,
    label: str,
    peers: Peers,
    generators: torch.Tensor,  # (NBYTES,) uint8, takes this rank's state
) -> None:
    there, own = saved.tensors.get("rng", {}), f"rank-{peers.world_rank:05d}"
    if len(there) != peers.world_size or own not in there:
        raise CheckpointError(
            f"{label} has the random states of {counted(len(there), 'rank')}, and there are "
            f"{peers.world_size}; save with rng=True, or leave rng=True out"
        )
    match.add(own, there[own], HeldWhole(generators, saves=False))


def change(
    schedule: Schedule, peers: Peers, take: Callable[[], None], optimizers: Sequence[Optimizer]
) -> None:
    """Give the masters, and the optimizers' states, new values by ``take``.

    If it fails, on any rank, the model is unusable until another change succeeds, of the same
    optimizers too as long as they live.

    Raises:
        StateError: for a change that would leave such an optimizer as it is.
    """
    # On all ranks: of a load that was interrupted only some may know.
    peers.gather(lambda: _check_torn(_TORN.get(schedule, ()), optimizers, peers.what))
    schedule.unusable = f"{peers.what} failed halfway; load again, from files that are whole"
    _TORN[schedule] = [ref(optimizer) for optimizer in optimizers]

    def taken() -> None:
        for flat in schedule.flats:
            flat.before_write()
        try:
            take()
        finally:  # also where it fails: on the other ranks it may not, and all count alike
            for flat in schedule.flats:
                flat.updated(send_written=False)

    peers.gather(taken)
    schedule.unusable = ""
    _TORN.pop(schedule, None)


def begin_anew(schedule: Schedule, missing: Collection[str]) -> None:
    """Forget, behind a load, what the ranks did unlike each other.

    A backward that raised on another rank is no news any more: said at this rank's next forward,
    it would end that here alone.

    Args:
        missing: what is left from before.
    """
    with suppress(StateError):
        schedule.reducer.read_outcome()
    schedule.updates.loaded(missing)


def _check_torn(torn: Sequence[ref[Optimizer]], optimizers: Sequence[Optimizer], what: str) -> None:
    given = {id(optimizer) for optimizer in optimizers}

    def left() -> list[str]:
        return [
            type(each).__name__
            for of in torn
            if (each := of()) is not None and id(each) not in given
        ]

    if left():
        gc.collect()  # one may be deleted, and part of a cycle
    if kinds := left():
        which = "another" if kinds[0] in kinds_of(optimizers) else "the"
        raise StateError(
            f"{what} would leave the states of {which} {kinds[0]} as a load that failed halfway "
            "has left them: load with it, too, or delete it and make a new one"
        )
