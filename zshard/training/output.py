"""The folder that a training run writes to."""

from __future__ import annotations

import fcntl
import os
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import cast

from ..checkpoint.paths import not_url
from ..errors import InputError
from .job import Job
from .metrics import read_metrics

_RUNS = "runs"  # holds those that nobody gave a name
_CLAIMED: set[Path] = set()  # by this process, for all of its runs


def check_output(given: str | None) -> None:
    """Look whether the folder can be made, and make nothing: no rank has started.

    Raises:
        InputError: if it cannot.
    """
    folder = Path(not_url(given or _RUNS, "--out"))
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not nearest.is_dir():
        raise InputError(f"--out {folder}: {nearest} is no folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"--out {folder}: {nearest} cannot be written to")


def output_folder(job: Job, given: str | None) -> Path:
    """Make the folder, ``given`` or a new one; every rank calls this.

    Raises:
        InputError: on every rank, if it cannot be made, or what a run has left there not be read;
            if another run is under way there.
    """
    made, problem = "", ""
    if job.rank == 0:
        try:
            folder = Path(given) if given else _new_folder()
            folder.mkdir(parents=True, exist_ok=True)
            _claim(folder)
            if (metrics := folder / "metrics.jsonl").exists():
                read_metrics(metrics)
            made = str(folder)
        except (OSError, InputError) as error:
            problem = f"--out {given or _RUNS}: {error}"
    made, problem = cast("tuple[str, str]", job.gather((made, problem))[0])
    if problem:
        raise InputError(problem)
    return Path(made)


def _claim(folder: Path) -> None:
    """Keep other runs out of ``folder`` until this process ends, however it ends."""
    if (path := folder.resolve()) in _CLAIMED:
        return
    held = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise InputError("another run is under way there; name another folder") from None
    except OSError:  # a file system without locks
        os.close(held)
    else:
        _CLAIMED.add(path)


def _new_folder() -> Path:
    """A folder that no other run has, however many begin in one second."""
    runs, name = Path(_RUNS), f"{datetime.now():%Y-%m-%d-%H%M%S}"
    runs.mkdir(exist_ok=True)
    for number in count(1):
        folder = runs / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError
