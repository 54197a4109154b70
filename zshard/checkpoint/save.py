"""``zshard.save``: a checkpoint that every rank writes its own part of, whole or absent."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Literal, overload
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from ..errors import CommError, InputError, StateError
from ..flags import require_flags
from ..schedule import Schedule
from ..transports.simulated import require_real
from ..whole_files import StrPath
from ..wrap import schedule_of
from .held import HeldWhole
from .inventory import as_json
from .optimizer_state import optimizer_inventory, optimizers_of
from .paths import shown
from .peers import Background, Peers
from .rng import random_state
from .writer import Contents, Writer, agree_on, contents_of_model

_PENDING: WeakKeyDictionary[Schedule, SaveHandle] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_PENDING.clear)  # those go on in the parent


class SaveHandle:
    """A save under way in the background.

    Attributes:
        path: of the checkpoint.
        total_bytes: bytes that this rank has to write.
        written_bytes: bytes that it has written.
        told: whether ``wait`` has told of the end.
    """

    def __init__(self, writer: Writer, future: Future[None]) -> None:
        self._writer, self._future, self._process = writer, future, os.getpid()
        self._ended = False
        future.add_done_callback(self._note_end)
        self.told = False
        self.path, self.total_bytes = writer.target, writer.total_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes that this rank has written so far."""
        return self._writer.written_bytes

    def done(self) -> bool:
        """Whether it has ended, well or not.

        Raises:
            StateError: in a process that was forked before it ended.
        """
        if os.getpid() == self._process:
            return self._future.done()
        # Not the future's own word: its lock may have been held as this process was forked.
        if not self._ended:
            raise StateError(
                f"save({shown(self.path)}) goes on in the process that this one was forked from, "
                "and is not heard of here: wait there"
            )
        return True

    def _note_end(self, _: object) -> None:
        self._ended = True

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            Error: on every rank, if it failed on one.
            StateError: in a process that was forked before it ended.
        """
        failure = self.failure()
        self.told = True
        if failure is not None:
            raise failure

    def failure(self) -> BaseException | None:
        """What it failed with, None if it did not; waits for its end."""
        self.done()  # raises in a forked process, where the future would never end
        return self._future.exception()


@overload
def save(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = ...,
    *,
    extra: object = ...,
    keep: int | None = ...,
    asynchronous: Literal[False] = ...,
    rng: bool = ...,
) -> None: ...


@overload
def save(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = ...,
    *,
    extra: object = ...,
    keep: int | None = ...,
    asynchronous: bool,
    rng: bool = ...,
) -> SaveHandle | None: ...


def save(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: object = None,
    keep: int | None = None,
    asynchronous: bool = False,
    rng: bool = False,
) -> SaveHandle | None:
    """Save a wrapped model, and its optimizer, to the folder ``path``; every rank calls this.

    The folder holds whole tensors in safetensors files under the model's own names, and a JSON
    manifest. Buffers and extra states (``get_extra_state``) are the first rank's; what else a
    module adds to its state_dict is not saved. The folder is there when it is whole; a checkpoint
    that was at ``path`` is replaced by it, and stays if the save fails or is killed.

    Args:
        path: a new folder, or an existing checkpoint; the same on every rank, on a file system that
            all ranks see.
        optimizer: any that works on the wrapped model, or a list of several, each with parameters
            of its own.
        extra: None, booleans, finite numbers, text, and lists, tuples (which come back as lists)
            and dicts (with text for keys) of them; the same on every rank.
        keep: how many checkpoints to keep in the path's folder; older ones are deleted after this
            one is whole, but for exports and those with other files in them.
        asynchronous: return as soon as the state is copied, which takes as much memory again on the
            host, and write in the background. Saves follow one another. A failure is raised by the
            handle's ``wait``, or by the model's next save.
        rng: save also the states of every rank's random number generators: torch's for the CPU and
            the current GPU, Python's and NumPy's.

    Returns:
        With ``asynchronous``, a handle to wait for, and to see the progress by.

    Raises:
        InputError: for arguments that cannot be used, before anything is written.
        MismatchError: on every rank, if the ranks' arguments, or ``ignored`` parameters, differ, or
            they hold different versions of the model.
        CheckpointError: on every rank, if a file system refuses; nothing but this save is lost.
        CommError: if another rank has died.
        StateError: inside a forward or backward; for a model without values.
        OptimizerError: for an optimizer whose states are not one element to a parameter's element.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> opt = zshard.AdamW(model.parameters())
        >>> zshard.save("run/step-10", model, opt, extra={"step": 10}, keep=3)
        >>> zshard.load(zshard.latest("run"), model, opt).extra
        {'step': 10}
    """
    schedule = schedule_of(model)
    # Only some ranks in the background would meet nobody there, each in a save of its own.
    what = f"save({shown(path)}{', asynchronous=True' if asynchronous else ''})"
    begin(schedule, what)
    peers = Peers(schedule.comm, what)

    def take() -> Contents:
        require_flags(asynchronous=asynchronous, rng=rng)
        if keep is not None and (type(keep) is not int or keep < 1):
            raise InputError(f"keep={keep!r}: expected a number of checkpoints, 1 or more")
        contents, found = contents_of_model(schedule, path)
        tensors = dict(contents.tensors)
        states = [
            optimizer_inventory(each, found.names, first=peers.world_rank == 0)
            for each in optimizers_of(optimizer, found.names)
        ]
        records = [state.record for state in states]
        if states:
            tensors["optimizer"] = {k: v for state in states for k, v in state.tensors.items()}
        if rng:
            own = random_state(schedule.device)
            tensors["rng"] = {
                f"rank-{rank:05d}": HeldWhole(own, saves=rank == peers.world_rank)
                for rank in range(peers.world_size)
            }
        noted = as_json(extra, "extra")
        saved = records if len(records) > 1 else next(iter(records), None)
        return replace(contents, tensors=tensors, optimizer=saved, extra=noted, keep=keep)

    with schedule.comm.awaited(peers.what, but=(Exception,)):
        contents = agree_on(peers, take)
        if not asynchronous:
            Writer(peers, contents).run()
            return None
        # Only its thread meets others on its group: another model's save may be under way.
        background = Background(schedule.comm, what)
        writer = Writer(background, contents)
        peers.gather(writer.take_snapshot)
        handle = _PENDING[schedule] = SaveHandle(writer, background.thread.submit(_run, writer))
        return handle


def _run(writer: Writer) -> None:
    """Run in the background; a failure is told at once, as nobody may ever ask for it."""
    try:
        writer.run()
    except Exception as error:
        logging.getLogger("zshard").error("the asynchronous save failed: %s", error)
        raise


def begin(schedule: Schedule, what: str, *, unusable_ok: bool = False) -> None:
    """Meet the other ranks for ``what``, after an asynchronous save that is under way.

    Raises:
        Error: on every rank, if that save failed, and a rank has not heard of it from ``wait``.
        MismatchError: on every rank, if the ranks are about to do different things, or hold
            different versions of the model, unless it is ``unusable_ok``.
        StateError: inside a forward, a backward or full_params; for a model without values, or of
            simulated ranks.
    """
    require_real(schedule.comm.axes, what)
    handle = _PENDING.get(schedule)
    failure = None if handle is None else handle.failure()
    told = handle is None or handle.told
    if isinstance(failure, CommError) and not told:
        del _PENDING[schedule]
        raise failure  # there is nobody to meet
    if schedule.whole:
        raise StateError(f"{what} inside zshard.full_params, whose changes are not taken in yet")
    schedule.begin_call(what, unusable_ok=unusable_ok)
    _PENDING.pop(schedule, None)
    # One rank may have waited, and another not: all raise, or none does.
    if failure is not None and not all(Peers(schedule.comm, what).gather(lambda: told)):
        raise failure
    if not unusable_ok:
        schedule.updates.require_whole(what)
