"""How `zshard train` ends when it must: Ctrl-C, SIGTERM, a killed rank, a killed launcher."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from train_command import DEADLINE, TINY, command, environment, losses, write_text

import zshard
from zshard.training.job import STOPPED
from zshard.training.launch import _BOOTSTRAP, LOST_PEER, describe_failure
from zshard.training.metrics import read_metrics

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Endless(NamedTuple):
    """A run that would go on for hours."""

    process: "subprocess.Popen[str]"
    ranks: list[int]  # process ids of the launcher's ranks, or of the process itself
    out: Path

    @property
    def printed(self) -> str:
        return self.out.with_suffix(".txt").read_text()


@contextlib.contextmanager
def started(
    out: Path, *arguments: object, ranks: int = 2, steps: int = 5, launcher: Sequence[str] = ()
) -> Iterator[Endless]:
    """A run that has taken so many steps, and that is killed after the block."""
    with out.with_suffix(".txt").open("w") as printed:
        process = subprocess.Popen(
            [*launcher, *command("train", *arguments)[1 if launcher else 0 :]],
            stdout=printed,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
    found: list[int] = []
    try:
        deadline = time.monotonic() + DEADLINE
        metrics = out / "metrics.jsonl"
        while (
            not metrics.exists() or max((m.step for m in read_metrics(metrics)), default=0) < steps
        ):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline, f"not {steps} steps in {DEADLINE} s"
            time.sleep(0.05)
        found += children(process.pid) or [process.pid]
        assert len(found) == ranks
        yield Endless(process, found, out)
    finally:  # whatever the test found, nothing of it stays
        process.kill()
        for pid in found:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def fresh(tmp_path: Path) -> list[object]:
    """Arguments of a run without an end, in ``tmp_path / "run"``."""
    text = write_text(tmp_path / "text")
    return [*TINY, "--steps", 10**6, "--data", text, "--out", tmp_path / "run"]


@pytest.fixture
def endless(fresh: list[object], tmp_path: Path) -> Iterator[Endless]:
    with started(tmp_path / "run", *fresh) as run:
        yield run


def children(pid: int) -> list[int]:
    """Process ids of the ranks that ``pid`` launched, by rank."""
    ranks = {}
    for line in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):  # a tool that the launcher ran, and that has ended
            variables = Path(f"/proc/{line}/environ").read_bytes().split(b"\0")
            ranks.update({int(v[5:]): int(line) for v in variables if v.startswith(b"RANK=")})
    return [ranks[rank] for rank in sorted(ranks)]


def handles_sigterm(pid: int) -> bool:
    caught = re.search(r"^SigCgt:\s(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1]
    return bool(int(caught, 16) >> signal.SIGTERM - 1 & 1)


def assert_gone(ranks: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = list(filter(alive, ranks))
    assert not left, f"ranks outlived their job: {left}"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@linux
def test_ctrl_c_ends_all_ranks_with_one_line(endless: Endless) -> None:
    process, ranks, _ = endless
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.strip() == "zshard: interrupted; all ranks have ended"
    assert_gone(ranks)


@linux
def test_a_killed_rank_ends_the_job_with_an_error_that_names_it(endless: Endless) -> None:
    process, ranks, _ = endless
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "rank 1 was killed by SIGKILL" in errors
    assert_gone(ranks)


@pytest.mark.parametrize(
    ("statuses", "named"),
    [
        ({0: LOST_PEER, 1: -signal.SIGKILL}, "rank 1 was killed by SIGKILL"),
        ({0: -signal.SIGTERM, 1: 1}, "rank 1 ended with exit status 1; its error is above"),
        ({0: LOST_PEER, 1: 1, 2: -signal.SIGTERM}, "rank 1 ended with exit status 1"),
        ({0: 1, 1: -signal.SIGSEGV}, "rank 1 was killed by SIGSEGV"),
        ({0: -signal.SIGTERM, 1: LOST_PEER}, f"rank 1 ended with exit status {LOST_PEER}"),
    ],
)
def test_the_rank_that_ended_the_job_is_named_not_one_that_noticed(
    statuses: dict[int, int], named: str
) -> None:
    assert describe_failure(statuses).startswith(named)


@linux
def test_a_killed_launcher_takes_its_ranks_with_it(endless: Endless) -> None:
    process, ranks, _ = endless
    process.kill()
    process.wait(timeout=60)
    assert_gone(ranks)
    assert "step 3: training loss" in endless.printed  # at once, and not as the ranks end


@linux
def test_a_killed_torchrun_takes_its_ranks_with_it(fresh: list[object], tmp_path: Path) -> None:
    with started(tmp_path / "run", *fresh, launcher=TORCHRUN) as run:
        run.process.kill()
        run.process.wait(timeout=60)
        assert_gone(run.ranks)


def test_a_rank_whose_launcher_has_ended_already_does_not_begin() -> None:
    done = subprocess.run([sys.executable, "-c", _BOOTSTRAP, "1", "info"])
    assert done.returncode == LOST_PEER


@linux
def test_a_launcher_killed_at_once_takes_ranks_with_it_that_still_import(
    fresh: list[object],
) -> None:
    process = subprocess.Popen(command("train", *fresh), env=environment())
    ranks: list[int] = []
    try:
        deadline = time.monotonic() + DEADLINE
        while len(ranks) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            ranks = children(process.pid)
        process.kill()
        process.wait(timeout=60)
        assert_gone(ranks)
    finally:
        process.kill()
        for pid in filter(alive, ranks):
            os.kill(pid, signal.SIGKILL)


def test_ranks_run_the_zshard_that_started_them(fresh: list[object], tmp_path: Path) -> None:
    package = Path(zshard.__file__).parent
    shutil.copytree(package, tmp_path / "zshard", ignore=shutil.ignore_patterns("*.so", "__pyc*"))
    for extension in package.glob("*.so"):
        (tmp_path / "zshard" / extension.name).symlink_to(extension)
    seen = tmp_path / "seen"
    with (tmp_path / "zshard" / "__init__.py").open("a") as code:
        code.write(f"\nopen({str(seen)!r}, 'a').write('imported\\n')\n")
    done = subprocess.run(
        command("train", *fresh, "--steps", 1),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert seen.read_text().count("imported") == 3, "the launcher and two ranks"


# --- SIGTERM: save and stop ---------------------------------------------------------------------


def to_the_launcher(run: Endless) -> None:
    run.process.terminate()


def to_one_rank(run: Endless) -> None:
    os.kill(run.ranks[1], signal.SIGTERM)


def to_all_again_and_again(run: Endless) -> None:
    """As Slurm does, to every process; and it is the more urgent the longer it takes."""
    while run.process.poll() is None:
        for pid in (run.process.pid, *run.ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.001)


def stopped_at(run: Endless) -> int:
    """The step that the run stopped at; it ended as it should, and saved."""
    _, errors = run.process.communicate(timeout=60)
    assert (run.process.returncode, errors) == (STOPPED, ""), errors
    assert_gone(run.ranks)
    step = losses(run.out)[-1][0]
    path = run.out / "checkpoints" / f"step-{step:08d}"
    assert zshard.latest(path.parent) == str(path)
    assert f"stopped by SIGTERM; step {step} is saved in {path}\n" in run.printed
    assert run.printed.endswith(f"go on with: zshard train --resume {run.out}\n")
    return step


@linux
@pytest.mark.parametrize("sigterm", [to_the_launcher, to_all_again_and_again])
def test_sigterm_saves_and_stops_all_ranks(
    fresh: list[object], tmp_path: Path, sigterm: Callable[[Endless], None]
) -> None:
    with started(tmp_path / "run", *fresh) as run:
        sigterm(run)
        stopped_at(run)


@linux
def test_resuming_what_sigterm_has_stopped_is_bitwise_the_run_that_goes_on(
    fresh: list[object], tmp_path: Path
) -> None:
    fresh += ["--save-every", 1, "--eval-every", 1]  # always within a save, or a validation
    out = tmp_path / "run"
    with started(out, *fresh) as run:
        to_one_rank(run)
        first = stopped_at(run)
    with started(out, "--resume", out, steps=first + 4) as run:
        to_the_launcher(run)
        second = stopped_at(run)
    with started(tmp_path / "whole", *fresh, "--out", tmp_path / "whole", steps=second + 1) as run:
        whole = losses(run.out, after=-1)
    # At a step of validation a run may stop before that, or in it; who resumes makes up for it.
    last = (second, "validation")
    stopped, straight = (
        [line for line in lines if line[0] <= second and line[:2] != last]
        for lines in (losses(out, after=-1), whole)
    )
    assert stopped == straight


@linux
def test_sigterm_saves_and_stops_one_rank_without_a_launcher(
    fresh: list[object], tmp_path: Path
) -> None:
    with started(tmp_path / "run", *fresh, "--ranks", 1, ranks=1) as run:
        run.process.terminate()
        stopped_at(run)


@linux
def test_a_job_under_nohup_goes_on_when_its_terminal_is_closed(
    fresh: list[object], tmp_path: Path
) -> None:
    nohup = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable)
    with started(tmp_path / "run", *fresh, launcher=nohup) as run:
        for pid in (run.process.pid, *run.ranks):
            os.kill(pid, signal.SIGHUP)  # to the launcher ahead of the other, so handled first
        run.process.terminate()
        stopped_at(run)


@linux
def test_sigterm_to_torchrun_saves_and_stops_its_ranks(fresh: list[object], tmp_path: Path) -> None:
    with started(tmp_path / "run", *fresh, launcher=TORCHRUN) as run:
        run.process.terminate()
        run.process.communicate(timeout=60)  # its status and its words are torchrun's
        assert_gone(run.ranks)
    step = losses(run.out)[-1][0]
    assert f"stopped by SIGTERM; step {step} is saved in " in run.printed


@linux
@pytest.mark.parametrize("target", ["launcher at once", "launcher", "rank"])
def test_sigterm_before_the_ranks_train_ends_them_and_says_that_nothing_was_saved(
    fresh: list[object], tmp_path: Path, target: str
) -> None:
    process = subprocess.Popen(
        command("train", *fresh), stderr=subprocess.PIPE, text=True, env=environment()
    )
    ranks: list[int] = []
    try:
        while not handles_sigterm(process.pid) if target == "launcher at once" else len(ranks) < 2:
            assert process.poll() is None
            ranks = children(process.pid)
        os.kill(ranks[1] if target == "rank" else process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == STOPPED
    assert errors.strip() == "zshard: ended by SIGTERM, and nothing was saved; all ranks have ended"
    assert_gone(ranks)
    assert not (tmp_path / "run").exists()


@linux
def test_a_save_that_fails_at_sigterm_is_an_error_that_names_the_path(endless: Endless) -> None:
    (endless.out / "checkpoints").write_text("in the way")
    endless.process.terminate()
    _, errors = endless.process.communicate(timeout=60)
    assert endless.process.returncode == 1
    assert str(endless.out / "checkpoints") in errors
    assert_gone(endless.ranks)
