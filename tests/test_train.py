"""`zshard train`: a run leaves what it promises, resumes bitwise, and ends cleanly when it must."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from zshard.data import Corpus, find_files
from zshard.errors import InputError
from zshard.gpt import GPT
from zshard.job import Job, Place
from zshard.launch import LOST_PEER, describe_failure
from zshard.metrics import Validation, read_metrics
from zshard.options import TrainOptions, resolve
from zshard.snapshot import find_snapshot, load_rank
from zshard.train import Run, learning_rate

DEADLINE = 120  # seconds for one run of the command, most of it the start of Python
TINY = ["--device", "cpu", "--layers", "2", "--width", "36", "--heads", "3", "--seq", "24"]
TINY += ["--batch", "3", "--eval-every", "3", "--sample", "8"]


# A launcher and the process ids of its ranks.
Endless: TypeAlias = tuple["subprocess.Popen[str]", list[int]]


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


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: the square is {i * i}\n" for i in range(2000)))
    return path


@pytest.fixture(scope="module")
def whole_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Eight steps on two ranks without a break: its folder and what it printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = run("train", *TINY, "--steps", 8, "--save-every", 4, "--data", text, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def losses(out: Path, after: int = 0) -> list[tuple[int, str, float]]:
    """Training and validation losses of the steps after ``after``, in the order written."""
    return [
        (m.step, "validation", m.validation_loss)
        if isinstance(m, Validation)
        else (m.step, "training", m.loss)
        for m in read_metrics(out / "metrics.jsonl")
        if m.step > after
    ]


def test_a_run_leaves_metrics_a_plot_checkpoints_a_memory_table_and_a_sample(
    whole_run: tuple[Path, str],
) -> None:
    out, printed = whole_run
    lines = losses(out, after=-1)
    assert [step for step, kind, _ in lines if kind == "training"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [step for step, kind, _ in lines if kind == "validation"] == [0, 3, 6, 8]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    saved = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert saved == ["step-00000004", "step-00000008"]
    for row in ("rank 0", "rank 1", "DDP"):
        assert re.search(rf"^{row} +\d", printed, re.MULTILINE), printed
    assert "bytes of validation text" in printed


def test_zero3_ranks_hold_half_of_what_ddp_holds(whole_run: tuple[Path, str]) -> None:
    together = {
        row: float(re.search(rf"^{row} .*?([\d.]+) MB +\S+(?: MB)?$", whole_run[1], re.M)[1])
        for row in ("rank 0", "rank 1", "DDP")
    }
    # Printed to a hundredth of a megabyte; a model as small as this one is padded by some 2 %.
    assert together["rank 0"] == pytest.approx(together["DDP"] / 2, abs=0.02)
    assert together["rank 1"] == pytest.approx(together["DDP"] / 2, abs=0.02)


@pytest.mark.parametrize("strategy", ["zero1", "ddp"])
def test_a_run_under_another_strategy_has_the_same_losses(
    whole_run: tuple[Path, str], text: Path, tmp_path: Path, strategy: str
) -> None:
    steps = ("--steps", 8, "--save-every", 4, "--strategy", strategy)
    done = run("train", *TINY, *steps, "--data", text, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, after=-1) == losses(whole_run[0], after=-1)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    whole_run: tuple[Path, str], tmp_path: Path
) -> None:
    out, _ = whole_run
    done = run("train", "--resume", out / "checkpoints" / "step-00000004", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == losses(out, after=4)
    for rank in range(2):
        name = f"step-00000008/rank-{rank:05d}-of-00002.safetensors"
        resumed = (tmp_path / "checkpoints" / name).read_bytes()
        assert resumed == (out / "checkpoints" / name).read_bytes(), f"rank {rank} differs"


def test_one_rank_takes_the_steps_of_plain_torch(text: Path) -> None:
    """Accumulation, clipping, schedule, decay and cleared gradients, against ten plain lines."""
    options = TrainOptions(
        layers=2, width=36, heads=3, seq=24, batch=3, accumulate=2, steps=6, data=(str(text),)
    )
    corpus = Corpus.read(find_files(options.data), options.seq)
    run = Run(Job(Place(), "cpu"), options, corpus)
    torch.manual_seed(options.seed)
    model = GPT(options.model_config())
    weights = [p for p in model.parameters() if p.ndim == 2]
    norms = [{"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [{"params": weights}, *norms], betas=(0.9, 0.95), weight_decay=0.1
    )
    for step in range(options.steps):
        loss = torch.zeros(())
        for micro in range(2):
            where = {"seed": 0, "step": step, "micro_step": micro, "rank": 0}
            tokens, targets = corpus.train_batch(3, 24, **where)
            logits = model(tokens).flatten(0, 1)
            part = torch.nn.functional.cross_entropy(logits, targets.flatten()) / 2
            part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        optimizer.step()
        optimizer.zero_grad()
        taken = run.take_step()
        assert taken.loss == pytest.approx(loss.item(), rel=1e-5), step
        assert taken.grad_norm == pytest.approx(norm.item(), rel=1e-4), step


def test_one_rank_with_bf16_accumulation_and_checkpointing_learns(
    text: Path, tmp_path: Path
) -> None:
    options = ("--ranks", 1, "--precision", "bf16", "--accumulate", 2, "--tied-head")
    more = ("--activation-checkpointing", "--steps", 30, "--data", text, "--out", tmp_path / "run")
    done = run("train", *TINY, *options, *more)
    assert done.returncode == 0, done.stderr
    lines = losses(tmp_path / "run", after=-1)
    first, last = lines[0][2], lines[-1][2]
    assert first > 5 and last < first - 1, (first, last)


# --- the end of a job ---------------------------------------------------------------------------


@pytest.fixture
def endless(text: Path, tmp_path: Path) -> Iterator[Endless]:
    """A run that would go on for hours, in its sixth step at least, and its ranks' process ids."""
    out = tmp_path / "run"
    process = subprocess.Popen(
        command("train", *TINY, "--steps", 10**6, "--data", text, "--out", out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    ranks: list[int] = []
    try:
        deadline = time.monotonic() + DEADLINE
        metrics = out / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 6:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline, f"no fifth step in {DEADLINE} s"
            time.sleep(0.05)
        ranks += children(process.pid)
        assert len(ranks) == 2
        yield process, ranks
    finally:  # whatever the test found, nothing of it stays
        process.kill()
        for pid in ranks:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def children(pid: int) -> list[int]:
    """Process ids of the ranks that ``pid`` launched, by rank."""
    ranks = {}
    for line in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        variables = Path(f"/proc/{line}/environ").read_bytes().split(b"\0")
        ranks.update({int(v[5:]): int(line) for v in variables if v.startswith(b"RANK=")})
    return [ranks[rank] for rank in sorted(ranks)]


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


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_ctrl_c_ends_all_ranks_with_one_line(endless: Endless) -> None:
    process, ranks = endless
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.strip() == "zshard: interrupted; all ranks have ended"
    assert_gone(ranks)


@linux
def test_a_killed_rank_ends_the_job_with_an_error_that_names_it(endless: Endless) -> None:
    process, ranks = endless
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
    process, ranks = endless
    process.kill()
    process.wait(timeout=60)
    assert_gone(ranks)


# --- without starting ranks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no/such/place"], "no such file or folder"),
        (["--data", "EMPTY"], "there is no file in there"),
        (["--data", "SHORT"], "99 bytes of text in 1 files are too few"),
        (["--width", "50"], "width=50 is not a multiple of .* = 12: .*try width=60"),
        (["--steps", "0"], "--steps 0: it has to be 1 or more"),
        (["--lr", "nan"], "--lr nan: it has to be above 0"),
        (["--resume", "EMPTY"], "there is no checkpoint in there"),
    ],
)
def test_bad_input_is_refused_with_its_value_and_a_remedy(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from zshard.cli import main

    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "SHORT").write_text("x" * 99)
    paths = {"EMPTY": str(tmp_path / "EMPTY"), "SHORT": str(tmp_path / "SHORT")}
    options = ["--ranks", "2", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main(["train", *options, *[paths.get(a, a) for a in arguments]]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_resume_refuses_what_would_change_the_curve(whole_run: tuple[Path, str]) -> None:
    out = str(whole_run[0])
    with pytest.raises(InputError, match=r"--batch 5: .* trained with --batch 3"):
        resolve({"resume": out, "batch": 5, "steps": 10})
    with pytest.raises(InputError, match=r"has all 8 steps"):
        resolve({"resume": out})
    resumed = resolve({"resume": out, "steps": 10, "batch": 3})
    assert (resumed.steps, resumed.ranks, resumed.layers) == (10, 2, 2)
    with pytest.raises(InputError, match=r"holds a run already"):
        resolve({"out": out})
    with pytest.raises(InputError, match=r"shards of 2 ranks and this job has 3: .*--ranks 2"):
        load_rank(find_snapshot(Path(out)), rank=0, ranks=3)
