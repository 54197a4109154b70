"""The command `zshard train` as tests start it, and what it leaves."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from ranks import run_ranks
from torch.distributed import TCPStore

from zshard import cli
from zshard.training.metrics import Validation, read_metrics

DEADLINE = 120  # seconds for one run of the command, most of it the start of Python
TINY = ["--device", "cpu", "--layers", "2", "--width", "36", "--heads", "3", "--seq", "24"]
TINY += ["--batch", "3", "--eval-every", "3", "--sample", "8"]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "zshard", *map(str, arguments)]


def environment() -> dict[str, str]:
    """Of a process that no launcher started, and that buffers what it prints."""
    others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONUNBUFFERED")
    return {k: v for k, v in os.environ.items() if k not in others} | {"OMP_NUM_THREADS": "1"}


def launched(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The whole command: three processes that import torch, which is nearly all they do."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=DEADLINE, env=environment()
    )


class Ended(NamedTuple):
    """How one rank ended."""

    status: int
    printed: str
    errors: str


def ran(*arguments: object, ranks: int = 2) -> str:
    """What the command prints on rank 0 of forked ranks, which all end with status 0."""
    ended = as_ranks(*arguments, ranks=ranks)
    assert all(rank.status == 0 for rank in ended), ended
    return ended[0].printed


def as_ranks(*arguments: object, ranks: int = 2) -> list[Ended]:
    """The command on forked ranks, as if a launcher had started them; by rank.

    In the arguments "{rank}" is the rank's number.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    given = [str(argument) for argument in arguments]
    return run_ranks(_as_rank, ranks, given, store.port, timeout=DEADLINE, group=False)


def _as_rank(rank: int, world_size: int, arguments: list[str], port: int) -> Ended:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="localhost", TORCHELASTIC_USE_AGENT_STORE="True")
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()) as errors,
        mock.patch("os._exit", sys.exit),  # the command ends its process, which has to report first
        pytest.raises(SystemExit) as end,
    ):
        cli.main([argument.replace("{rank}", str(rank)) for argument in arguments])
    return Ended(end.value.code, printed.getvalue(), errors.getvalue())


def write_text(path: Path) -> Path:
    """Some 60 KB to train on."""
    path.write_text("".join(f"line {i}: the square is {i * i}\n" for i in range(2000)))
    return path


def losses(out: Path, after: int = 0) -> list[tuple[int, str, float]]:
    """Training and validation losses of the steps after ``after``, in the order written."""
    return [
        (m.step, "validation", m.validation_loss)
        if isinstance(m, Validation)
        else (m.step, "training", m.loss)
        for m in read_metrics(out / "metrics.jsonl")
        if m.step > after
    ]
