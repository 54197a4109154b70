"""The numbers of `zshard train`: text, rates, losses, bytes and times, against what they are of."""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from ranks import run_ranks

import zshard
from zshard.errors import InputError
from zshard.gpt import GPT
from zshard.training import launch
from zshard.training.data import Corpus, find_files
from zshard.training.job import Job, Place
from zshard.training.metrics import (
    MetricsError,
    MetricsLog,
    RankMemory,
    StepMetrics,
    Validation,
    ddp_memory,
    memory_table,
    plot_loss,
)
from zshard.training.options import TrainOptions, resolve
from zshard.training.resume import Progress
from zshard.training.train import Run
from zshard.training.trainplan import announce, compare, plan_of

TINY = {"layers": 2, "width": 36, "heads": 3, "seq": 24, "batch": 3}


def corpus_of(nbytes: int, sequence: int, folder: Path) -> Corpus:
    (folder / "text").write_bytes(bytes(range(256)) * (nbytes // 256) + bytes(range(nbytes % 256)))
    return Corpus.read([folder / "text"], sequence)


# --- text -----------------------------------------------------------------------------------------


def test_the_last_twentieth_of_a_text_is_held_out_and_not_trained_on(tmp_path: Path) -> None:
    corpus = corpus_of(4000, 16, tmp_path)
    assert (len(corpus.train), len(corpus.validation)) == (3800, 200)
    whole = bytes(corpus.train.tolist() + corpus.validation.tolist())
    assert whole == (tmp_path / "text").read_bytes()
    assert len(corpus_of(400, 60, tmp_path).validation) == 61  # a sequence, and the byte after it


def test_the_shortest_text_is_a_sequence_for_each_part_and_every_window_is_drawn(
    tmp_path: Path,
) -> None:
    with pytest.raises(InputError, match=r"too little text, 33 bytes in 1 file: .* 34 bytes"):
        corpus_of(33, 16, tmp_path)
    where = {"seed": 0, "step": 0, "micro_step": 0, "rank": 0}
    for spare in range(3):
        corpus = corpus_of(34 + spare, 16, tmp_path)
        assert len(corpus.validation) == 17
        first = corpus.train_batch(99, 16, **where).tokens[:, 0]
        assert set(first.tolist()) == set(range(spare + 1))
        assert corpus.validation_batch(2, 16, index=0, count=1).targets.shape == (2, 16)


def test_the_checksum_is_of_all_of_the_text(tmp_path: Path) -> None:
    before = corpus_of(400, 16, tmp_path).checksum
    text = bytearray((tmp_path / "text").read_bytes())
    for at in (0, -1):
        changed = bytearray(text)
        changed[at] ^= 1
        (tmp_path / "text").write_bytes(changed)
        assert Corpus.read([tmp_path / "text"], 16).checksum != before


def test_the_usual_text_is_pythons_own_library_without_what_is_installed_or_tests_it() -> None:
    files = find_files([])
    assert len(files) > 300 and {file.suffix for file in files} == {".py"}
    parts = {part for file in files for part in file.relative_to(Path(os.__file__).parent).parts}
    assert not parts & {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def test_a_folder_is_text_but_for_what_is_no_file_and_what_is_a_runs(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "linked").symlink_to(Path(os.__file__).parent)
    os.mkfifo(tmp_path / "pipe")  # reading it would never end
    (tmp_path / "metrics.jsonl").write_text("a user's")
    assert find_files([str(tmp_path)]) == [tmp_path / "metrics.jsonl"]
    with pytest.raises(InputError, match=r"cannot read .*nowhere: No such file"):
        Corpus.read([tmp_path / "nowhere"], 16)


# --- options --------------------------------------------------------------------------------------


def test_the_rate_rises_for_a_twentieth_of_the_steps_and_falls_to_a_tenth() -> None:
    options = TrainOptions(steps=100, lr=2.0)
    rates = [options.learning_rate(step) for step in range(101)]
    assert rates[:6] == [0.4, 0.8, pytest.approx(1.2), 1.6, 2.0, 2.0]
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert (rates[52] + rates[53]) / 2 == pytest.approx(1.1)  # halfway
    assert rates[100] == pytest.approx(0.2) and rates[99] > 0.2
    quarter = 0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * 19 / 95))
    assert rates[24] == pytest.approx(quarter)
    assert [TrainOptions(steps=1, lr=2.0).learning_rate(0)] == [2.0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ranks": 0}, "--ranks 0: it has to be 1 or more"),
        ({"size": "huge"}, "--size huge: expected one of tiny"),
        ({"keep": 0}, "--keep 0: it has to be 1 or more"),
        ({"save_every": 0}, "--save-every 0: it has to be 1"),
        ({"seed": -1}, "--seed -1: it has to be 0 or more"),
        ({"sample": -1}, "--sample -1: it has to be 0 or more"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1: it has to be 0"),
        ({"lr": 0.0}, "--lr 0.0: it has to be above 0"),
        ({"steps": 10**310}, "--steps 10*: it has to be 9223372036854775807 or less"),
        # Which no checkpoint can record: the first save would end the run.
        ({"data": ("a", "b\udcff")}, r"--data\[1\] has text that is no Unicode"),
        ({"save_every": 1, "out": "\udcff"}, "--out has text that is no Unicode"),
    ],
)
def test_options_out_of_range_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        resolve(given)


def test_a_run_in_a_folder_of_its_text_is_taken_and_leaves_the_text_as_it_was(
    tmp_path: Path,
) -> None:
    (tmp_path / "text").write_text("x" * 999)
    given = {"data": (str(tmp_path),), "out": str(tmp_path / "run")}
    assert resolve(given).out == given["out"]
    hidden = str(tmp_path / ".traces")  # of which no text is taken either
    assert resolve({**given, "trace": hidden}).trace == hidden
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")  # of a run that has not saved yet
    with pytest.raises(InputError, match="holds a run already"):
        resolve(given)


def test_a_run_of_another_version_is_resumed_by_none_but_that(tmp_path: Path) -> None:
    model = zshard.wrap(torch.nn.Linear(2, 3))
    progress = Progress(1, 1, 0, TrainOptions(data=(str(tmp_path),)).as_json())
    for name, extra, said in (
        ("a", {**progress.as_extra(), "wings": 2}, r'noted .*"wings".*: resume it with that one'),
        (
            "b",
            replace(progress, options={**progress.options, "wings": 2}).as_extra(),
            "options this zshard does not know: wings; resume it with the version",
        ),
    ):
        zshard.save(tmp_path / name, model, extra=extra)
        with pytest.raises(InputError, match=said):
            resolve({"resume": str(tmp_path / name), "out": str(tmp_path / "run")})


def test_the_model_is_what_the_options_ask_for() -> None:
    given = TrainOptions(**TINY, tied_head=True, activation_checkpointing=True)
    config = given.model_config()
    assert (config.tied_head, config.activation_checkpointing, config.context) == (True, True, 24)
    assert given.policy() == zshard.Precision()
    assert TrainOptions(precision="bf16").policy() == zshard.Precision.bf16()


# --- launching ------------------------------------------------------------------------------------


def test_how_many_ranks_start_is_by_the_gpus_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [launch.choose_ranks(asked, "auto") for asked in (None, 1, 7)] == [2, 1, 7]
    with pytest.raises(InputError, match=r"--device cuda: torch .* sees no GPU here"):
        launch.choose_ranks(None, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [launch.choose_ranks(asked, "auto") for asked in (None, 2, 3)] == [3, 2, 3]
    assert launch.choose_ranks(7, "cpu") == 7
    with pytest.raises(InputError, match="--ranks 4: this machine has 3 GPUs"):
        launch.choose_ranks(4, "auto")


def test_ranks_share_the_processors_and_each_has_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Mock()
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", agent)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    for ranks, threads in ((2, "4"), (3, "2"), (9, "1")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        assert launch._run_agent(ranks, ["train"]) == {}
        assert os.environ["OMP_NUM_THREADS"] == threads
        assert agent.call_args.args[0].nproc_per_node == ranks
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    launch._run_agent(2, ["train"])
    assert os.environ["OMP_NUM_THREADS"] == "5"


def lost(rank: int, world_size: int) -> None:
    class Rank(Job):
        def __init__(self) -> None:
            self.rank, self.world_size, self._asked_to_stop = rank, world_size, False

    job = Rank()
    mean = job.mean(torch.tensor(1.0 + 2 * rank))
    assert mean == 2.0 and not job.stopping
    job._asked_to_stop = rank == 1
    assert job.mean(torch.zeros(())) == 0.0 and job.stopping  # on both
    if rank == 1:
        return
    with pytest.raises(zshard.CommError, match="rank 0 of 2 lost another rank at the mean loss"):
        for _ in range(99):
            job.mean(torch.zeros(()))
    with pytest.raises(zshard.CommError, match="rank 0 of 2 lost another rank at a report"):
        job.gather("text")


def test_the_mean_loss_is_the_same_on_all_ranks_and_a_lost_one_is_an_error() -> None:
    run_ranks(lost, 2)


# --- a run ----------------------------------------------------------------------------------------


def run_of(corpus: Corpus, job: object = None, **options: object) -> Run:
    return Run(job or Job(Place(), "cpu"), TrainOptions(**(TINY | options)), corpus)


def test_a_validation_loss_is_the_mean_over_batches_that_ranks_share(tmp_path: Path) -> None:
    corpus = corpus_of(4000, 24, tmp_path)
    torch.manual_seed(0)
    model = GPT(TrainOptions(**TINY).model_config())

    def loss(index: int, count: int) -> float:
        tokens, targets = corpus.validation_batch(3, 24, index=index, count=count)
        logits = model(tokens).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten()).item()

    expected = statistics.fmean(loss(index, 8) for index in range(8))
    assert run_of(corpus).validation_loss() == pytest.approx(expected, rel=1e-5)
    # A rank of two takes every other of sixteen; the job makes the mean over ranks.
    second = Mock(rank=1, world_size=2, device=torch.device("cpu"), mean=float)
    expected = statistics.fmean(loss(index, 16) for index in range(1, 16, 2))
    assert run_of(corpus, second).validation_loss() == pytest.approx(expected, rel=1e-5)


def test_a_step_tells_its_rate_and_its_tokens_and_a_loss_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(corpus_of(4000, 24, tmp_path), accumulate=2, steps=40, lr=0.5)
    taken = run.take_step()
    assert (taken.step, taken.learning_rate) == (1, 0.25)
    assert taken.tokens_per_second * taken.seconds == pytest.approx(2 * 3 * 24)
    assert 0 <= taken.exposed_percent < 100
    monkeypatch.setattr(run.job, "mean", lambda loss: math.nan)
    with pytest.raises(zshard.Error, match=r"the loss is nan and the gradients' norm \d"):
        run.take_step()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_ddp_is_said_to_hold_is_what_a_rank_under_ddp_holds(
    tmp_path: Path, precision: str
) -> None:
    run = run_of(corpus_of(4000, 24, tmp_path), strategy="ddp", precision=precision)
    run.take_step()
    rows = [line.split() for line in run.memory_table().splitlines()[1:]]
    own, ddp = rows[0][2:], rows[1][1:]
    assert [row[0] for row in rows] == ["rank", "DDP"]
    assert [float(size) for size in own[:8:2]] == pytest.approx(
        [float(size) for size in ddp[:8:2]], abs=0.011
    )
    parameters = run.parameters / 1e6
    bytes_each = (4, 4, 8, 16) if precision == "fp32" else (6, 4, 8, 18)
    assert [float(size) for size in ddp[:8:2]] == pytest.approx(
        [each * parameters for each in bytes_each], abs=0.006
    )


def test_a_memory_table_has_a_row_a_rank_and_buffers_apart() -> None:
    held = [RankMemory(1_000_000, 2_000_000, 3_000_000, 4_000_000), RankMemory(5, 5, 5, 5)]
    heads, first, second, ddp = memory_table(held, ddp_memory(10**9, low_precision=True)).split(
        "\n"
    )
    assert heads.split() == ["weights", "gradients", "optimizer", "together", "+", "buffers"]
    assert first.split()[2::2] == ["1.00", "2.00", "3.00", "6.00", "4.00"]
    assert second.split()[:3] == ["rank", "1", "0.00"]
    assert ddp.split()[1::2] == ["6,000.00", "4,000.00", "8,000.00", "18,000.00", "0.00"]


def test_a_plot_has_both_losses_over_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    new_figure = zshard.training.metrics.new_figure
    monkeypatch.setattr(
        "zshard.training.metrics.new_figure",
        lambda *given: figures.append(new_figure(*given)) or figures[-1],
    )
    steps = [StepMetrics(step, 5.0 / step, 1.0, 0.1, 0.1, 10.0, None) for step in (1, 2, 3)]
    plot_loss([Validation(0, 6.0), *steps, Validation(3, 2.5)], tmp_path / "loss.png")
    training, validation = figures[0].axes[0].lines
    assert training.get_xydata().tolist() == [[1, 5.0], [2, 2.5], [3, 5.0 / 3]]
    assert validation.get_xydata().tolist() == [[0, 6.0], [3, 2.5]]


def test_metrics_that_cannot_be_closed_or_shown_are_typed_errors(tmp_path: Path) -> None:
    scalars = Mock()
    log = MetricsLog(tmp_path / "metrics.jsonl", resumed_at=0, scalars=scalars)
    scalars.write.side_effect = scalars.close.side_effect = OSError(28, "No space left on device")
    with pytest.raises(
        MetricsError, match=r"scalars for TensorBoard cannot be written: .*No space"
    ):
        log.write(Validation(0, 1.0))
    with pytest.raises(
        MetricsError, match=r"scalars for TensorBoard cannot be written: .*No space"
    ):
        log.close()
    log._file = Mock(close=Mock(side_effect=OSError(28, "No space left on device")))
    log._file.name = "metrics.jsonl"
    with pytest.raises(MetricsError, match=r"metrics\.jsonl cannot be written: .*No space"):
        log.close()


def test_a_plan_is_held_against_what_a_run_takes_and_the_median_of_its_steps(
    tmp_path: Path,
) -> None:
    options = TrainOptions(**TINY, machine="h100", plan=True)
    planned, run = plan_of(options, 1, "cpu"), run_of(corpus_of(4000, 24, tmp_path))
    run.take_step()
    seconds = (9.0, 9.0, 0.001, 0.002, 0.004)  # of which the first two learn
    steps = [StepMetrics(n, 1.0, 1.0, 0.1, each, 1.0, None) for n, each in enumerate(seconds, 1)]
    heads, *lines = compare(planned, options, run.model, steps).splitlines()
    assert heads.split()[-2:] == ["planned", "measured"]
    now = zshard.memory(run.model)["now"]
    found = {line.split()[0]: line.split()[1:] for line in lines[:-2]}
    for kind in ("parameters", "gradients", "optimizer"):
        expected = planned.to_dict()["per_rank"][kind]
        assert found[kind] == [f"{expected / 1e6:.3f}", f"{now[kind] / 1e6:.3f}"]
    assert lines[-1] == (
        f"A step took 2.0 ms (median); predicted were {planned.step_seconds * 1e3:,.1f} ms on h100."
    )
    assert "--accumulate" not in announce(planned, options)
    other = TrainOptions(**TINY, accumulate=3)
    assert "that of one of its 3 parts" in announce(planned, other)
