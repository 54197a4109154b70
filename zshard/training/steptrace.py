"""``zshard train --trace``: a few steps near the beginning, traced on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch import nn

from ..calls.session import trace
from ..errors import InputError
from ..tracing.file import merge_traces
from ..tracing.trace import Trace
from ..words import counted
from .job import Job

LEARNING_STEPS = 2  # learn the order of collectives, and allocate; those after them are alike
_STEPS = 5  # that are traced then


def make_folder(path: str) -> Path:
    """The folder that traces are written to.

    Raises:
        InputError: if it cannot be made.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"--trace {path}: the folder cannot be made: {reason}") from error
    return folder


class StepTrace:
    """A context around the steps of a run: traces the third to the seventh, as far as it goes.

    A file that cannot be written ends no training: ``require_written`` says so after it.

    Args:
        folder: where the files go; None for no trace at all.
    """

    def __init__(self, job: Job, model: nn.Module, folder: str | None) -> None:
        self._job, self._model = job, model
        self._folder = None if folder is None else make_folder(folder)
        self._taken = 0
        self._context = ExitStack()
        self._trace: Trace | None = None
        self._failure = ""

    def require_written(self) -> None:
        """After the context, and after the run is saved.

        Raises:
            InputError: on every rank, if one could not write its file.
        """
        if self._failure:
            raise InputError(f"--trace: {self._failure}")

    def before_step(self) -> None:
        """Begin the trace, or end it and write it; every rank calls this before every step."""
        if self._folder is not None:
            if self._taken == LEARNING_STEPS:
                self._trace = self._context.enter_context(trace(self._model))
            elif self._taken == LEARNING_STEPS + _STEPS:
                self._finish(self._folder)
        self._taken += 1

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._context.close()
        elif self._folder is not None and self._trace is not None:
            self._finish(self._folder)
        elif self._folder is not None and self._taken <= LEARNING_STEPS:
            self._job.say(f"nothing is traced: a trace begins after {LEARNING_STEPS} steps")

    def _finish(self, folder: Path) -> None:
        """Write the files, and print what they say; on every rank."""
        self._context.close()
        done, self._trace = self._trace, None
        assert done is not None  # it has begun
        parts = [folder / f"rank-{rank}.json" for rank in range(self._job.world_size)]
        self._write(lambda: done.save(parts[self._job.rank]))
        first = self._job.rank == 0
        self._write(lambda: merge_traces(folder / "trace.json", parts) if first else None)
        where = f"all ranks are in {folder / 'trace.json'}, for ui.perfetto.dev"
        self._job.say(
            f"--- {counted(min(self._taken - LEARNING_STEPS, _STEPS), 'step')} of rank 0, traced; "
            f"{self._failure or where} ---\n{done.summary()}"
        )

    def _write(self, write: Callable[[], None]) -> None:
        """Do that on every rank, unless one has failed before; note on all what fails on one."""
        failed = ""
        try:
            if not self._failure:
                write()
        except InputError as error:
            failed = str(error)
        everyone = [str(text) for text in self._job.gather(failed)]
        self._failure = next(filter(None, (self._failure, *everyone)), "")
