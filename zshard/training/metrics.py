"""What a training run leaves to read: metrics as JSON lines, a loss plot, the memory table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from ..errors import Error, InputError
from ..pictures import new_figure
from ..whole_files import write_whole
from .scalars import Scalars


@dataclass(frozen=True)
class StepMetrics:
    """One step, a line of ``metrics.jsonl``."""

    step: int  # 1 is the first
    loss: float  # nats per byte, the mean over ranks and micro-steps, before the step's update
    grad_norm: float  # before clipping
    learning_rate: float
    seconds: float  # wall clock of the step
    tokens_per_second: float  # of all ranks
    # Of the step's time, how much rank 0 waited for communication; None on CUDA, where the host
    # does not wait and only a trace can tell.
    exposed_percent: float | None

    @property
    def speed(self) -> str:
        """Tokens a second, and what of the step was waited for, in words."""
        exposed = "n/a" if self.exposed_percent is None else f"{self.exposed_percent:.0f}%"
        return f"{self.tokens_per_second:,.0f} tokens/s, exposed communication {exposed}"


@dataclass(frozen=True)
class Validation:
    """One measurement on the validation text, a line of ``metrics.jsonl`` too."""

    step: int  # steps taken before it
    validation_loss: float  # nats per byte


Line = StepMetrics | Validation


class MetricsError(Error):
    """What was measured cannot be written."""


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MetricsError(f"{what} cannot be written: {error}") from error


class MetricsLog:
    """Appends to ``metrics.jsonl``; each line is on disk when ``write`` returns.

    Attributes:
        validated: steps after which there is a validation already.
    """

    def __init__(
        self,
        path: Path,
        *,
        resumed_at: int,  # steps already taken; what an earlier run wrote after that is dropped
        scalars: Scalars | None = None,  # gets what is new, too
    ) -> None:
        """Open the file; create it when it is missing.

        Raises:
            InputError: for a file that cannot be read or written; it is as before.
        """
        kept = [m for m in read_metrics(path) if m.step <= resumed_at] if path.exists() else []
        self.validated = {m.step for m in kept if isinstance(m, Validation)}
        text = "".join(map(_line, kept))
        if path.exists() and path.read_text(encoding="utf-8") != text:
            write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
        self._file = path.open("a", encoding="utf-8")
        self._scalars = scalars

    def write(self, metrics: Line) -> None:
        """Append one line.

        Raises:
            MetricsError: if it cannot be written.
        """
        with _named(self._file.name):
            self._file.write(_line(metrics))
            self._file.flush()
        if self._scalars is not None:
            with _named("the scalars for TensorBoard"):
                self._scalars.write(metrics.step, _scalars_of(metrics))

    def close(self) -> None:
        """Close the file.

        Raises:
            MetricsError: if what is left of it cannot be written.
        """
        with _named(self._file.name):
            self._file.close()
        if self._scalars is not None:
            with _named("the scalars for TensorBoard"):
                self._scalars.close()


def _scalars_of(metrics: Line) -> dict[str, float | None]:
    """What TensorBoard shows of a line, by the names that it groups by."""
    if isinstance(metrics, Validation):
        return {"loss/validation": metrics.validation_loss}
    return {
        "loss/training": metrics.loss,
        "training/grad_norm": metrics.grad_norm,
        "training/learning_rate": metrics.learning_rate,
        "speed/tokens_per_second": metrics.tokens_per_second,
        "speed/exposed_percent": metrics.exposed_percent,
    }


def read_metrics(path: Path) -> list[Line]:
    """Read a ``metrics.jsonl``; a last line that was cut short by a crash is left out.

    Raises:
        InputError: for a file that cannot be read, with the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    return [_parse(line, f"{path}, line {n}") for n, line in enumerate(lines[:-1], 1)]


def _line(metrics: Line) -> str:
    return json.dumps(asdict(metrics)) + "\n"


def _parse(line: str, where: str) -> Line:
    try:
        fields = json.loads(line)
        kind = Validation if "validation_loss" in fields else StepMetrics
        for name, value in fields.items():
            if not isinstance(value, int | float) and (name, value) != ("exposed_percent", None):
                raise ValueError(f"{name} is {value!r}")
        return kind(**fields)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{where}: no metrics of zshard train ({error})") from error


def plot_loss(metrics: Sequence[Line], path: Path) -> None:
    """Draw training and validation loss over the steps into a PNG file.

    Raises:
        InputError: for a path that cannot be written.
        MissingPackage: without matplotlib.
    """
    figure = new_figure("zshard train", 8, 4.5)
    axes = figure.add_subplot()
    steps = [m for m in metrics if isinstance(m, StepMetrics)]
    axes.plot([m.step for m in steps], [m.loss for m in steps], lw=0.8, label="training")
    measured = [m for m in metrics if isinstance(m, Validation)]
    losses = [m.validation_loss for m in measured]
    axes.plot([m.step for m in measured], losses, "o-", label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    write_whole(path, lambda part: figure.savefig(part, format="png"))


class RankMemory(NamedTuple):
    """Bytes that one rank holds of the model, its gradients and its optimizer's state."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int = 0  # of gathered units and of reductions, at the peak


def memory_table(
    ranks: Sequence[RankMemory],
    ddp: RankMemory,
) -> str:
    """A table of the bytes each rank holds, with what a DDP rank would hold in the last row."""
    heads = ["", *RankMemory._fields[:3], "together", "+ buffers"]
    rows = []
    for name, held in [*((f"rank {rank}", each) for rank, each in enumerate(ranks)), ("DDP", ddp)]:
        sizes = (*held[:3], sum(held[:3]), held.buffers)
        rows.append((name, *(f"{size / 1e6:,.2f} MB" for size in sizes)))
    return tabulate(rows, heads, tablefmt="plain", stralign="right", colalign=["left"])


def ddp_memory(
    parameters: int,
    *,
    low_precision: bool,  # bf16 compute with an fp32 master and fp32 gradients
) -> RankMemory:
    """What a DDP rank with AdamW holds: all of the model, its gradients and its states."""
    weights = (4 + 2 * low_precision) * parameters
    return RankMemory(weights, 4 * parameters, 8 * parameters)
