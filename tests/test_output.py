"""What commands print may be closed, full, broken or of few characters: never a traceback."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_files import full
from tqdm import tqdm
from train_command import DEADLINE, TINY, environment, launched, write_text

from zshard.training.job import Job, Place

PYTHON = shlex.quote(sys.executable)
COMMAND = f"{PYTHON} -m zshard"
CHARACTER = 'from zshard import cli; cli._make_output_sure(); print("\\ufffd")'


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        (f"{COMMAND} info | true; exit ${{PIPESTATUS[0]}}", 141, ""),
        (f"{COMMAND} info > /dev/full", 1, "zshard: error: [Errno 28] No space left on device\n"),
        (f"PYTHONIOENCODING=ascii {PYTHON} -c '{CHARACTER}' > /dev/null", 0, ""),
    ],
)
def test_output_that_cannot_be_printed_is_no_traceback(line: str, status: int, said: str) -> None:
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (status, said)


@pytest.mark.parametrize("output", [">&-", "> /dev/full", "| true; exit ${PIPESTATUS[0]}"])
def test_a_rank_trains_whatever_becomes_of_its_output(output: str, tmp_path: Path) -> None:
    options = [*TINY, "--steps", "1", "--data", write_text(tmp_path / "text")]
    line = " ".join([COMMAND, "train", *map(str, options), "--out", f"{tmp_path}/run", output])
    rank = environment() | {"RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=DEADLINE, env=rank
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_job_goes_on_where_nobody_reads_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.__new__(Job)
    job.rank = Place().rank
    monkeypatch.setattr(tqdm, "write", full)
    job.say("text")


def test_bad_input_that_only_ranks_look_at_is_the_commands_exit_status_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZSHARD_COMM", "none")
    data = write_text(tmp_path / "text")
    done = launched("train", *TINY, "--steps", 1, "--data", data, "--out", tmp_path / "run")
    assert done.returncode == 2 and "ended with exit status 2" in done.stderr, done.stderr
