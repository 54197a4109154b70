"""``zshard.save``: a checkpoint that every rank writes its own part of, whole or absent."""

from __future__ import annotations

import os
from concurrent.futures import Future
from concurrent.futures import wait as concurrent_wait
from typing import Literal, overload
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import Optimizer

from ..schedule import Schedule
from ..wrap import schedule_of
from .peers import Background, Peers
from .saving import Job, take_stock

_PENDING: WeakKeyDictionary[Schedule, SaveHandle] = WeakKeyDictionary()

Path = str | os.PathLike[str]


class SaveHandle:
    """A save under way in the background.

    Attributes:
        path: of the checkpoint.
        total_bytes: that this rank writes; written_bytes: those it has written.
        told: whether ``wait`` has told of the end, so that the next save need not.
    """

    def __init__(self, job: Job, future: Future[None]) -> None:
        self._job, self._future = job, future
        self.told = False
        self.path, self.total_bytes = job.target, job.total_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes that this rank has written so far."""
        return self._job.written_bytes

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Wait for its end; every rank calls this, or none.

        Raises:
            Error: on every rank, if it failed on one.
        """
        concurrent_wait([self._future])
        self.told = True
        self._future.result()


@overload
def save(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None = ...,
    *,
    extra: object = ...,
    keep: int | None = ...,
    asynchronous: Literal[False] = ...,
    rng: bool = ...,
) -> None: ...


@overload
def save(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None = ...,
    *,
    extra: object = ...,
    keep: int | None = ...,
    asynchronous: bool,
    rng: bool = ...,
) -> SaveHandle | None: ...


def save(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: object = None,
    keep: int | None = None,
    asynchronous: bool = False,
    rng: bool = False,
) -> SaveHandle | None:
    """Save a wrapped model, and its optimizer, to the folder ``path``; every rank calls this.

    The folder holds whole tensors in safetensors files under the model's own names, and a JSON
    manifest. It is there when it is whole; a checkpoint that was at ``path`` is replaced by it, and
    stays if the save fails or is killed.

    Args:
        path: a new folder, or an existing checkpoint; the same on every rank, on a file system that
            all ranks see.
        optimizer: any that works on the wrapped model.
        extra: None, booleans, finite numbers, text, and lists, tuples (which come back as lists)
            and dicts (with text for keys) of them; the same on every rank.
        keep: how many checkpoints to keep in the path's folder; older ones are deleted after this
            one is whole.
        asynchronous: return as soon as the state is copied, which takes as much memory again on the
            host, and write in the background. Saves follow one another. A failure is raised by the
            handle's ``wait``, or by the model's next save.
        rng: save also the states of every rank's random number generators: torch's for the CPU and
            the current GPU, Python's and NumPy's.

    Returns:
        With ``asynchronous``, a handle to wait for, and to see the progress by.

    Raises:
        InputError: for arguments that cannot be used, before anything is written.
        MismatchError: on every rank, if the ranks' arguments differ.
        CheckpointError: on every rank, if a file system refuses; nothing but this save is lost.
        CommError: if another rank has died.
        StateError: inside a forward or backward; for a model without values.
    """
    schedule = schedule_of(model)
    settle(schedule)
    what = f"save({os.path.abspath(os.fspath(path))})" if _is_path(path) else f"save({path!r})"
    schedule.begin_call(what)
    peers = Background(schedule.comm, what) if asynchronous else Peers(schedule.comm, what)
    stock = take_stock(peers, schedule, path, optimizer, extra, keep, rng=rng)
    job = Job(peers, stock)
    if not isinstance(peers, Background):
        job.run()
        return None
    peers.together(job.take_snapshot)
    handle = _PENDING[schedule] = SaveHandle(job, peers.thread.submit(job.run))
    return handle


def settle(schedule: Schedule) -> None:
    """Wait for the model's asynchronous save, if there is one.

    Raises:
        Error: if it failed, on every rank.
    """
    handle = _PENDING.pop(schedule, None)
    if handle is not None and not handle.told:
        handle.wait()


def _is_path(path: object) -> bool:
    return isinstance(path, str | os.PathLike)
