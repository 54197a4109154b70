"""What `zshard train` is made of: text, model and metrics, each on its own."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from ranks import run_ranks
from train_command import TINY, as_ranks

import zshard
from zshard import cli
from zshard.errors import InputError
from zshard.gpt import GPT, SIZES, GPTConfig, generate
from zshard.training import train
from zshard.training.data import Corpus, find_files
from zshard.training.job import Job, Place
from zshard.training.metrics import MetricsError, MetricsLog, StepMetrics, plot_loss, read_metrics
from zshard.training.options import TrainOptions
from zshard.training.output import output_folder
from zshard.training.trainplan import plan_of


def test_a_batch_is_a_function_of_seed_step_micro_step_and_rank_alone() -> None:
    corpus = Corpus(torch.arange(5000).to(torch.uint8), torch.arange(64).to(torch.uint8), 1, 0)
    where = {"seed": 1, "step": 2, "micro_step": 0, "rank": 1}
    tokens, targets = corpus.train_batch(4, 16, **where)
    assert torch.equal(corpus.train_batch(4, 16, **where).tokens, tokens)
    assert torch.equal(targets[:, :-1], tokens[:, 1:])
    assert torch.equal(targets, (tokens + 1) % 256)
    for key in where:
        other = corpus.train_batch(4, 16, **{**where, key: where[key] + 1})
        assert not torch.equal(other.tokens, tokens), key


def test_validation_batches_span_the_held_out_text_exactly() -> None:
    corpus = Corpus(torch.zeros(99, dtype=torch.uint8), torch.arange(100).to(torch.uint8), 1, 0)
    batches = [corpus.validation_batch(3, 9, index=i, count=4) for i in range(4)]
    assert batches[0].tokens[0, 0] == 0
    assert batches[-1].targets[-1, -1] == 99


def test_a_folder_is_read_in_order_without_hidden_files_and_those_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("runs/1/metrics.jsonl", "runs/1/loss.png", "runs/1/checkpoints/step-1/model.safetensors")
    for name in ("b/2.txt", "a.txt", "b/1.txt", ".hidden", ".git/config", *run):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = [str(f.relative_to(tmp_path)) for f in find_files([str(tmp_path)])]
    assert found == ["a.txt", "b/1.txt", "b/2.txt"]
    walk = os.walk

    def backwards(*given: Any, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for root, folders, names in walk(*given, **options):
            yield root, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)  # as another machine's disk may have it
    assert find_files([str(tmp_path)]) == [tmp_path / name for name in found]


def test_a_folder_of_text_that_cannot_be_read_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open.txt").write_text("x")
    (tmp_path / "closed").mkdir()
    look = os.scandir

    def closed(path: str) -> object:  # as permissions do to others than root
        if os.path.basename(path) == "closed":
            raise PermissionError(13, "Permission denied", path)
        return look(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(InputError, match=r"cannot read .*/closed: Permission denied"):
        find_files([str(tmp_path)])


def test_ranks_that_read_other_texts_are_told_before_the_first_step(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"text-{rank}").write_text(f"{rank} of 2 " * 99)
    options = ("--data", tmp_path / "text-{rank}", "--out", tmp_path / "run", "--steps", 1)
    for ended in as_ranks("train", *TINY, *options):
        assert ended.status == 2
        assert "ranks [1] read another text than rank 0 (CRC-32 " in ended.errors
    assert not (tmp_path / "run").exists()


def test_ranks_that_resume_on_other_texts_are_told_all_of_them(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"text-{rank}").write_text(f"{rank} of 2 " * 99)
    begin = ("--data", tmp_path / "text-0", "--out", tmp_path / "run", "--steps", 1)
    assert [ended.status for ended in as_ranks("train", *TINY, *begin)] == [0, 0]
    options = ("--data", tmp_path / "text-{rank}", "--resume", tmp_path / "run", "--steps", 2)
    for ended in as_ranks("train", *options):  # rank 0's text is the checkpoint's
        assert ended.status == 2
        assert "ranks [1] read another text than rank 0 (CRC-32 " in ended.errors


def test_metrics_written_after_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [StepMetrics(s, 1 / s, 1.0, 0.1, 0.1, 10.0, 0.0) for s in (1, 2, 3)]
    log = MetricsLog(path, resumed_at=0)
    for line in lines:
        log.write(line)
    log.close()
    path.write_text(path.read_text() + json.dumps({"step": 4})[:5])
    MetricsLog(path, resumed_at=2).close()
    assert read_metrics(path) == lines[:2]


def test_metrics_that_cannot_be_written_anew_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, resumed_at=0)
    for step in range(1, 200):
        log.write(StepMetrics(step, 1 / step, 1.0, 0.1, 0.1, 10.0, 0.0))
    log.close()
    before = path.read_bytes()

    def full(self: Path, text: str, **_: object) -> int:
        self.write_bytes(text.encode()[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(zshard.InputError, match="No space left"):
        MetricsLog(path, resumed_at=150)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_of_metrics_that_finds_no_room_is_an_error_with_the_files_name(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, resumed_at=0)
    log._file.close()
    log._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(MetricsError, match=r"/dev/full cannot be written: .*No space left"):
        log.write(StepMetrics(1, 1.0, 1.0, 0.1, 0.1, 10.0, 0.0))


@pytest.mark.parametrize("line", ["{", "[1]", '{"a": 2}', "3", '{"step":"1","validation_loss":1}'])
def test_a_line_of_metrics_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0, "validation_loss": 1.0}) + f"\n{line}\n")
    with pytest.raises(zshard.InputError, match=r"metrics\.jsonl, line 2: no metrics"):
        read_metrics(path)


@pytest.mark.parametrize(("exposed", "said"), [(12.4, "12%"), (None, "n/a")])
def test_the_speed_of_a_step_is_told_with_what_it_waited(exposed: float | None, said: str) -> None:
    step = StepMetrics(1, 2.0, 1.0, 0.1, 0.5, 1234.0, exposed)
    assert step.speed == f"1,234 tokens/s, exposed communication {said}"


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=r"rank 5 is number 2 on this machine .* has 2 GPUs"):
        Job(Place(5, 8, 2), "cuda")
    with pytest.raises(InputError, match=r"rank 0 is number -1 on this machine"):
        Job(Place(0, 1, -1), "cuda")


def test_a_local_rank_of_nothing_is_taken_where_there_is_no_gpu_to_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "-1")):
        monkeypatch.setenv(name, value)  # as of scripts that are not distributed
    place = Place.from_environment()
    assert place == Place(0, 1, -1) and Job(place, "cpu").device.type == "cpu"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("RANK=a WORLD_SIZE=2", "RANK=a WORLD_SIZE=2, in the environment, is no rank of a job"),
        ("RANK=0 WORLD_SIZE=0", "is no rank of a job: unset them, or start the ranks with torch"),
        ("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0", "LOCAL_RANK=0, in the environment, is no rank"),
        ("RANK=0 WORLD_SIZE=2", "rank 0 of 2 cannot join the others: .* MASTER_ADDR expected"),
    ],
)
def test_a_place_that_the_environment_names_in_part_is_refused(
    told: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, _, value in (each.partition("=") for each in told.split()):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr("zshard.training.job._follow_parent", lambda: None)
    (tmp_path / "text").write_text("x" * 999)
    options = [*TINY, "--data", str(tmp_path / "text"), "--out", str(tmp_path / "run")]
    try:
        status = cli.main(["train", *options])
    except SystemExit as end:  # as a rank, which ends its process
        status = end.code
    assert status == 2 and re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_ranks_that_do_not_come_are_an_error_of_communication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lonely(*_: object, **__: object) -> None:
        raise torch.distributed.DistStoreError("1/2 clients joined")

    monkeypatch.setattr("zshard.training.job._follow_parent", lambda: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", lonely)
    with pytest.raises(zshard.CommError, match=r"rank 0 of 2 cannot join .*: 1/2 clients joined"):
        Job(Place(0, 2), "cpu")


def test_runs_that_begin_in_one_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(Place(), "cpu")
    folders = [output_folder(job, None) for _ in range(5)]
    assert len(set(folders)) == 5 and all(folder.is_dir() for folder in folders)
    assert {folder.parent for folder in folders} == {Path("runs")}


def test_a_folder_in_which_another_run_is_under_way_is_refused(tmp_path: Path) -> None:
    script = (
        "from zshard.training.job import Job, Place\n"
        "from zshard.training.output import output_folder\n"
        f"output_folder(Job(Place(), 'cpu'), {str(tmp_path)!r})\n"
        "print('begun', flush=True)\ninput()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], text=True, **pipes) as other:
        assert other.stdout.readline() == "begun\n"
        with pytest.raises(InputError, match=r"--out .*another run is under way there"):
            output_folder(Job(Place(), "cpu"), str(tmp_path))
        other.kill()
    output_folder(Job(Place(), "cpu"), str(tmp_path))


def no_folder(rank: int, world_size: int, path: Path) -> None:
    class TwoRanks(Job):
        def __init__(self) -> None:
            self.rank, self.world_size = rank, world_size

        def _named_errors(self, what: str) -> AbstractContextManager[None]:
            return nullcontext()

    with pytest.raises(zshard.InputError, match=r"--out .*file/run: .*Not a directory"):
        output_folder(TwoRanks(), str(path / "file" / "run"))
    with pytest.raises(zshard.InputError, match=r"--out .*old: .*metrics\.jsonl, line 1"):
        output_folder(TwoRanks(), str(path / "old"))


def test_a_folder_that_cannot_be_used_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text("x\n")
    run_ranks(no_folder, 2, tmp_path)


def test_a_plot_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "loss.png").mkdir()
    (tmp_path / "loss.png" / "in the way").write_text("")
    with pytest.raises(zshard.InputError, match=r"loss\.png cannot be written"):
        plot_loss([StepMetrics(1, 2.0, 1.0, 0.1, 0.5, 10.0, None)], tmp_path / "loss.png")
    assert [each.name for each in tmp_path.iterdir()] == ["loss.png"]


def test_without_matplotlib_no_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "run"
    assert cli.main(["train", *TINY, "--ranks", "1", "--steps", "1", "--out", str(out)]) == 1
    assert "zshard train needs matplotlib" in capsys.readouterr().err
    assert not out.exists()


def test_the_gpt_is_causal_and_its_generation_depends_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=36, heads=3, context=16))
    tokens = torch.randint(0, 256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])

    def sample(seed: int) -> bytes:
        device = torch.device("cpu")
        return generate(model, b"ab", 24, context=16, device=device, seed=seed)

    assert len(sample(0)) == 24
    assert sample(0) == sample(0) != sample(1)


@pytest.mark.parametrize("size", [s for s in SIZES if s.endswith("m")])
def test_a_preset_has_the_size_its_name_says(size: str) -> None:
    with torch.device("meta"):
        model = GPT(TrainOptions(size=size).model_config())
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert millions == pytest.approx(float(size[:-1]), rel=0.03)


def test_a_plan_of_a_run_is_of_the_transport_that_the_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZSHARD_COMM", "peer")
    with pytest.raises(InputError, match="comm='peer': h100 was not measured"):
        plan_of(TrainOptions(machine="h100", plan=True), 2, "cpu")
    monkeypatch.setenv("ZSHARD_COMM", "pear")
    with pytest.raises(InputError, match="ZSHARD_COMM='pear'"):
        plan_of(TrainOptions(), 2, "cpu")


def test_rank_0_alone_plans_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("x" * 999)
    options = TrainOptions(data=(str(tmp_path),), plan=True)
    monkeypatch.setattr(train, "output_folder", lambda *_: tmp_path)
    for rank, planned, made in ((0, 1, 0), (1, 0, 1)):
        job = Mock(rank=rank, world_size=2, device=torch.device("cpu"), gather=lambda item: [item])
        monkeypatch.setattr(train, "Job", lambda *_, job=job: job)
        plan_of, run = Mock(side_effect=InterruptedError), Mock(side_effect=InterruptedError)
        monkeypatch.setattr(train, "plan_of", plan_of)
        monkeypatch.setattr(train, "Run", run)
        with pytest.raises(InterruptedError):
            train.train(options, Place(rank, 2))
        assert (plan_of.call_count, run.call_count) == (planned, made)


def test_a_plan_of_a_run_that_recomputes_does_not_suggest_to_do_so() -> None:
    options = [TrainOptions(batch=2, seq=16, activation_checkpointing=on) for on in (False, True)]
    plain, own = (plan_of(each, 2, "cpu") for each in options)
    suggested = [{each.change for each in planned.alternatives()} for planned in (plain, own)]
    assert "activation checkpointing" in suggested[0] - suggested[1]
    assert own.activations.bytes < plain.activations.bytes
