"""The command `zshard train` as tests start it, and what it leaves."""

import os
import subprocess
import sys
from pathlib import Path

from zshard.metrics import Validation, read_metrics

DEADLINE = 120  # seconds for one run of the command, most of it the start of Python
TINY = ["--device", "cpu", "--layers", "2", "--width", "36", "--heads", "3", "--seq", "24"]
TINY += ["--batch", "3", "--eval-every", "3", "--sample", "8"]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "zshard", *map(str, arguments)]


def environment() -> dict[str, str]:
    """Of a process that no launcher started."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    return {k: v for k, v in os.environ.items() if k not in launcher} | {"OMP_NUM_THREADS": "1"}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=DEADLINE, env=environment()
    )


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
