"""`zshard train --trace`, and the scalars that TensorBoard shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from train_command import TINY, as_ranks, losses, ran, write_text

import zshard
from zshard.checkpoint.catalogue import RUN_FOLDER
from zshard.errors import InputError
from zshard.training.job import Job, Place
from zshard.training.metrics import MetricsLog, StepMetrics, Validation
from zshard.training.options import resolve
from zshard.training.scalars import Scalars
from zshard.training.steptrace import StepTrace, make_folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


def steps_in(path: Path) -> list[int]:
    """How many optimizer steps each rank's track holds."""
    events = json.loads(path.read_text())["traceEvents"]
    ranks = sorted({event["pid"] for event in events})
    return [sum(e["name"] == "step root" and e["pid"] == rank for e in events) for rank in ranks]


def test_a_traced_run_leaves_every_ranks_file_all_in_one_and_a_summary(
    text: Path, tmp_path: Path
) -> None:
    out, folder = tmp_path / "run", tmp_path / "made" / "trace"
    options = ("--steps", 9, "--trace", folder, "--data", text, "--out", out)
    printed = ran("train", *TINY, *options)
    assert sorted(p.name for p in folder.iterdir()) == ["rank-0.json", "rank-1.json", "trace.json"]
    assert steps_in(folder / "trace.json") == [5, 5]
    assert steps_in(folder / "rank-1.json") == [5]
    assert "--- 5 steps of rank 0, traced; all ranks are in" in printed
    for words in ("rank 0 of 2: ", "critical path", "held up", "blocks.1"):
        assert words in printed
    ran("train", *TINY, "--steps", 9, "--data", text, "--out", tmp_path / "plain")
    assert losses(out, after=-1) == losses(tmp_path / "plain", after=-1)
    # A resumed run traces if it is told to, and not because the run before it was.
    assert resolve({"resume": str(out), "steps": 10}).trace is None
    assert resolve({"resume": str(out), "steps": 10, "trace": "x"}).trace == "x"


def test_a_run_that_ends_earlier_is_traced_as_far_as_it_goes_into_its_own_folder(
    text: Path, tmp_path: Path
) -> None:
    for steps, traced in ((4, [2]), (2, None)):
        folder = tmp_path / f"run-{steps}" / "trace"
        options = ("--trace", "--steps", steps, "--data", text)
        printed = ran("train", *TINY, *options, "--out", folder.parent, ranks=1)
        if traced is None:
            assert "nothing is traced: a trace begins after 2 steps" in printed
            assert not list(folder.iterdir())
        else:
            assert steps_in(folder / "trace.json") == traced


def test_a_folder_that_cannot_be_made_is_refused_before_anything_starts(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from zshard.cli import main

    arguments = ["train", "--ranks", "2", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main([*arguments, "--data", str(text), "--trace", f"{text}/trace"]) == 2
    assert f"--trace {text}/trace: the folder cannot be made" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="cannot be made"):
        make_folder(f"{text}/trace")


@pytest.mark.parametrize("name", ["rank-1.json", "trace.json"])
def test_a_file_that_one_rank_cannot_write_is_an_error_on_all(
    text: Path, tmp_path: Path, name: str
) -> None:
    taken = tmp_path / "trace" / name
    taken.mkdir(parents=True)
    options = ("--steps", 9, "--trace", taken.parent, "--data", text, "--out", tmp_path / "run")
    for rank in as_ranks("train", *TINY, *options):
        assert rank.status == 2
        assert f"{taken} cannot be written" in rank.errors
    last = zshard.latest(tmp_path / "run" / RUN_FOLDER)
    assert last is not None and last.endswith("step-00000009")  # nothing is lost by it


def test_a_trace_of_steps_that_raise_is_not_written(tmp_path: Path) -> None:
    from steps import build, one_step

    model = build()
    with (
        pytest.raises(ValueError, match="user"),
        StepTrace(Job(Place(), "cpu"), model, str(tmp_path)) as traced,
    ):
        for step in range(4):
            traced.before_step()
            one_step(model, 0, step)
        raise ValueError("user code")
    assert not list(tmp_path.iterdir())
    with StepTrace(Job(Place(), "cpu"), model, None) as traced:
        traced.before_step()


# --- TensorBoard ---------------------------------------------------------------------------------

LINES = [
    Validation(0, 5.5),
    StepMetrics(1, 5.25, 2.0, 0.1, 0.5, 1000.0, 12.5),
    StepMetrics(2, 5.0, 1.5, 0.1, 0.5, 2000.0, None),
]


def log(folder: Path, resumed_at: int, lines: list[StepMetrics | Validation]) -> None:
    scalars = Scalars.open(folder, resumed_at=resumed_at)
    written = MetricsLog(folder / "metrics.jsonl", resumed_at=resumed_at, scalars=scalars)
    for line in lines:
        written.write(line)
    written.close()


def test_without_tensorboard_metrics_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    log(tmp_path, 0, [*LINES])
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_tensorboard_gets_every_metric_that_is_known_and_a_resumed_run_goes_on(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(tmp_path, 0, [*LINES])
    log(tmp_path, 1, [StepMetrics(2, 4.5, 1.0, 0.1, 0.5, 3000.0, 25.0)])
    found = EventAccumulator(str(tmp_path)).Reload()
    shown = {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }
    assert shown["loss/validation"] == [(0, 5.5)]
    assert shown["loss/training"] == [(1, 5.25), (2, 4.5)]
    assert shown["training/grad_norm"] == [(1, 2.0), (2, 1.0)]
    assert shown["speed/tokens_per_second"] == [(1, 1000.0), (2, 3000.0)]
    assert shown["speed/exposed_percent"] == [(1, 12.5), (2, 25.0)]


def test_a_planned_run_prints_the_plan_and_what_it_came_to(text: Path, tmp_path: Path) -> None:
    options = ("--steps", 4, "--plan", "--machine", "h100", "--data", text, "--out", tmp_path)
    printed = ran("train", *TINY, *options, "--precision", "bf16")
    plan, _, rest = printed.partition("model: GPT")
    assert "--- planned: bf16, AdamW, over 2 ranks" in plan
    assert "A step is predicted to take" in plan
    assert "planned and measured, MB" in rest and "The plan held within 2 %." in rest
    assert "A step took" in rest and "predicted were" in rest and " ms on " in rest
    resumed = resolve({"resume": str(tmp_path), "steps": 6})
    assert not resumed.plan and resumed.machine is None
    # A resumed run's own steps are too few to say, and those before may have been others.
    more = ("--resume", tmp_path, "--plan", "--machine", "h100", "--accumulate", 2, "--steps")
    printed = ran("train", *more, 6)
    assert "planned and measured, MB" in printed and "A step took" not in printed
    printed = ran("train", *more, 9)
    assert "The plan held within 2 %." in printed and "for --accumulate, is not" in printed
    assert "on h100 for each of 2 parts." in printed


def test_a_machine_without_a_plan_is_refused() -> None:
    with pytest.raises(InputError, match="--machine is what --plan predicts times for"):
        resolve({"machine": "h100"})
