"""`zshard train`: a run leaves what it promises, resumes bitwise, and ends cleanly when it must."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, content
from train_command import TINY, as_ranks, launched, losses, ran, write_text

import zshard
from zshard.checkpoint.inspect import summarize
from zshard.errors import InputError
from zshard.gpt import GPT
from zshard.training.data import Corpus, find_files
from zshard.training.job import Job, Place
from zshard.training.options import TrainOptions, changes_on_resume, resolve
from zshard.training.train import Run, TrainError, train


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


@pytest.fixture(scope="module")
def whole_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Eight steps on two ranks without a break: its folder and what it printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = launched("train", *TINY, "--steps", 8, "--save-every", 4, "--data", text, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def assert_same_checkpoint(one: Path, other: Path, step: int) -> None:
    """Weights and optimizer states are equal bit by bit; out and resume may differ."""
    contents = [content(run / "checkpoints" / f"step-{step:08d}") for run in (one, other)]
    for found in contents:
        del found["extra"]
    assert_same(*contents, "the checkpoint")


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
    ran("train", *TINY, *steps, "--data", text, "--out", tmp_path)
    assert losses(tmp_path, after=-1) == losses(whole_run[0], after=-1)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    whole_run: tuple[Path, str], tmp_path: Path
) -> None:
    out, _ = whole_run
    ran("train", "--resume", out / "checkpoints" / "step-00000004", "--out", tmp_path)
    assert losses(tmp_path) == losses(out, after=4)
    assert_same_checkpoint(tmp_path, out, 8)


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
            group["lr"] = options.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        taken = run.take_step()
        assert taken.loss == pytest.approx(loss.item(), rel=1e-5), step
        assert taken.grad_norm == pytest.approx(norm.item(), rel=1e-4), step


def test_one_rank_with_bf16_accumulation_and_checkpointing_learns(
    text: Path, tmp_path: Path
) -> None:
    options = ("--precision", "bf16", "--accumulate", 2, "--tied-head")
    more = ("--activation-checkpointing", "--steps", 30, "--data", text, "--out", tmp_path / "run")
    ran("train", *TINY, *options, *more, ranks=1)
    lines = losses(tmp_path / "run", after=-1)
    first, last = lines[0][2], lines[-1][2]
    assert first > 5 and last < first - 1, (first, last)


# --- without starting ranks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no/such/place"], "no such file or folder"),
        (["--data", "EMPTY"], "no files found"),
        (["--data", "SHORT"], "too little text, 99 bytes in 1 file: with"),
        (["--width", "50"], "width=50 is not a multiple of .* = 12: .*try width=60"),
        (["--steps", "0"], "--steps 0: it has to be 1 or more"),
        (["--lr", "nan"], "--lr nan: it has to be above 0"),
        (["--lr", "inf"], "--lr inf: it has to be above 0, and finite"),
        (["--weight-decay", "nan"], "--weight-decay nan: it has to be 0 or more"),
        (["--seed", str(2**63)], "it has to be 9223372036854775807 or less"),
        (["--resume", "EMPTY"], "it contains no whole checkpoint"),
        (["--resume", "SHORT"], "SHORT: there is no such folder"),
        (["--out", "SHORT/run"], "--out .*/SHORT/run: .*/SHORT is no folder"),
        (["--out", "TEXT/a", "--data", "TEXT/a"], "name another one, .*/TEXT/a/run for instance"),
        (["--out", "TEXT/a", "--data", "TEXT"], "name another one, .*/TEXT/a/run for instance"),
        (["--data", "TEXT", "--trace", "TEXT/a"], "--trace .*/TEXT/a: --data takes text from this"),
        (["--plan", "--machine", "h1"], "machine='h1': expected one of a100, h100, h200"),
    ],
)
def test_bad_input_is_refused_with_its_value_and_a_remedy(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from zshard import cli

    monkeypatch.setattr(cli, "launch", lambda *_: pytest.fail("ranks were started"))
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "SHORT").write_text("x" * 99)
    (tmp_path / "TEXT/a").mkdir(parents=True)
    (tmp_path / "TEXT/a/text").write_text("x" * 999)
    names = ("EMPTY", "SHORT", "SHORT/run", "TEXT", "TEXT/a")
    paths = {name: str(tmp_path / name) for name in names}
    options = ["--ranks", "2", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert cli.main(["train", *options, *[paths.get(a, a) for a in arguments]]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_resume_refuses_what_would_change_the_curve(
    whole_run: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(whole_run[0])
    with pytest.raises(InputError, match=r"--batch 5: .* trained with --batch 3"):
        resolve({"resume": out, "batch": 5, "steps": 10})
    with pytest.raises(InputError, match=r"is from after 8 steps: --steps"):
        resolve({"resume": out})
    resumed = resolve({"resume": out, "steps": 10, "batch": 3})
    assert (resumed.steps, resumed.ranks, resumed.layers) == (10, 2, 2)
    saved = replace(resumed, width=None)
    monkeypatch.setattr("zshard.training.options.options_of", lambda origin: saved)
    with pytest.raises(InputError, match=r"--width 64: .* trained without it; leave"):
        resolve({"resume": out, "width": 64, "steps": 10})
    with pytest.raises(InputError, match=r"holds a run already"):
        resolve({"out": out})
    free = {"ranks": 3, "strategy": "ddp", "precision": "bf16", "accumulate": 2, "keep": 5}
    free |= {"device": "auto", "activation_checkpointing": True, "eval_every": 7, "save_every": 9}
    changed = resolve({"resume": out, "steps": 10, **free})
    assert {name: getattr(changed, name) for name in free} == free
    assert changes_on_resume(resumed, changed) == (
        "ranks 2 -> 3 (other batches), accumulate 1 -> 2 (other batches), strategy zero3 -> ddp "
        "(the same batches), precision fp32 -> bf16 (the same batches, rounded otherwise)"
    )
    assert changes_on_resume(resumed, replace(resumed, keep=5, out="x")) == ""


def test_a_resumed_run_does_not_go_on_in_another_runs_folder(
    whole_run: tuple[Path, str], tmp_path: Path
) -> None:
    out = whole_run[0]
    other, moved = tmp_path / "other", tmp_path / "moved"
    (other / "checkpoints").mkdir(parents=True)
    with pytest.raises(InputError, match="holds a run already"):
        resolve({"resume": str(out), "steps": 10, "out": str(other)})
    assert resolve({"resume": str(out), "steps": 10, "out": f"{out}/../run"}).steps == 10
    shutil.copytree(out / "checkpoints" / "step-00000004", moved)
    with pytest.raises(InputError, match="in no run's folder: say with --out"):
        resolve({"resume": str(moved)})
    assert resolve({"resume": str(moved), "out": str(tmp_path / "new")}).steps == 8


@pytest.mark.parametrize(
    ("folder", "resume"),
    [
        (".", ""),
        ("checkpoints", ".."),
        ("checkpoints", "."),
        ("checkpoints", "step-00000008"),
        ("checkpoints", "../checkpoints/step-00000004/../step-00000008"),
        ("checkpoints/step-00000008", "."),
    ],
)
def test_a_run_goes_on_in_its_folder_from_wherever_it_is_resumed(
    whole_run: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, folder: str, resume: str
) -> None:
    monkeypatch.chdir(whole_run[0] / folder)
    options = resolve({"resume": resume, "steps": 10})
    assert Path(options.out).resolve() == whole_run[0].resolve()


def test_a_run_is_resumed_by_an_empty_path_in_its_folder(
    whole_run: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole_run[0], out)
    monkeypatch.chdir(out)
    assert "step-00000008, step 8\n" in ran("train", "--resume", "", "--steps", 9, ranks=1)
    assert losses(out)[:-2] == losses(whole_run[0])  # of the ninth there are two


def test_gradients_that_are_not_finite_are_an_error_before_the_step(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TrainOptions(layers=1, width=36, heads=3, seq=24, batch=3, data=(str(text),))
    run = Run(Job(Place(), "cpu"), options, Corpus.read(find_files(options.data), options.seq))
    run.take_step()
    before = zshard.full_param(run.model, "norm.weight")
    loss_of = Run.loss
    # Finite, with a gradient that is not: the derivative of a square root at 0.
    monkeypatch.setattr(
        Run, "loss", lambda run, batch: (loss := loss_of(run, batch)) + (0.0 * loss).sqrt() * 0.0
    )
    with pytest.raises(TrainError, match=r"the loss is \d.* and the gradients' norm nan at step 2"):
        run.take_step()
    assert torch.equal(zshard.full_param(run.model, "norm.weight"), before)


def test_a_resumed_run_finds_its_text_elsewhere_and_refuses_another(
    whole_run: tuple[Path, str], text: Path, tmp_path: Path
) -> None:
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copy(text, moved)
    other.write_text("x" * 9999)
    options = resolve({"resume": str(whole_run[0]), "steps": 9, "data": (str(other),)})
    with pytest.raises(InputError, match=r"not the one that .*step-00000008 was trained on"):
        train(options, Place())
    resumed = ("--resume", whole_run[0], "--steps", 9, "--out", tmp_path / "run")
    ran("train", *resumed, "--data", moved, ranks=1)


def test_a_resumed_run_leaves_traces_beside_its_text_or_in_its_own_folder(
    whole_run: tuple[Path, str],
) -> None:
    run = whole_run[0]
    given = {"resume": str(run), "steps": 9, "data": (str(run.parent),)}
    with pytest.raises(InputError, match=r"--trace .*traces: --data takes text from this folder"):
        resolve({**given, "trace": str(run.parent / "traces")})
    own = str(run / "traces")  # no text is taken from the folder of a run
    assert resolve({**given, "trace": own}).trace == own


def test_a_checkpoint_of_another_program_is_not_resumed(tmp_path: Path) -> None:
    model = zshard.wrap(torch.nn.Linear(2, 3))
    for extra in ({"step": 1}, None, ["zshard train"]):
        zshard.save(tmp_path / "a", model, extra=extra)
        with pytest.raises(InputError, match=r"a: not a checkpoint of zshard train"):
            resolve({"resume": str(tmp_path / "a")})


def test_a_run_resumes_on_more_ranks_with_another_strategy_and_precision_and_says_so(
    whole_run: tuple[Path, str], tmp_path: Path
) -> None:
    """From a folder whose newest checkpoint is damaged."""
    out = tmp_path / "run"
    shutil.copytree(whole_run[0], out)
    weights = out / "checkpoints" / "step-00000008" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    options = ("--strategy", "ddp", "--precision", "bf16", "--keep", 1)
    printed = ran("train", "--resume", out, *options, ranks=3)
    assert re.search(r"^from: .*step-00000004, step 4$", printed, re.M), printed
    assert re.search(r"not from .*step-00000008, which is not whole: .*bytes", printed)
    assert "ranks 2 -> 3 (other batches)" in printed
    assert re.search(r"^rank 2 +\d", printed, re.M), printed
    assert [step for step, kind, _ in losses(out) if kind == "training"] == list(range(1, 9))
    # The first loss is that of the restored weights, but for the batches and the rounding.
    fifth = [[x for s, k, x in losses(o) if (s, k) == (5, "training")] for o in (out, whole_run[0])]
    assert fifth[0] == pytest.approx(fifth[1], rel=0.05) and fifth[0] != fifth[1]
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-00000008"]
    assert summarize(str(weights.parent)).ranks == 3


def test_a_failed_save_in_the_background_is_an_error_that_names_the_path(
    text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "checkpoints").write_text("in the way")
    options = ("--steps", 8, "--save-every", 4, "--data", text, "--out", out)
    for rank in as_ranks("train", *TINY, *options):
        assert rank.status == 1
        assert f"{out / 'checkpoints'}" in rank.errors


def test_a_loss_that_is_not_finite_is_an_error_after_the_save_under_way(
    text: Path, tmp_path: Path
) -> None:
    options = ("--steps", 50, "--save-every", 1, "--lr", 1e30, "--sample", 0)
    ended = as_ranks("train", *TINY, *options, "--data", text, "--out", tmp_path / "run")
    assert [rank.status for rank in ended] == [1, 1]
    said = {re.search(r"the loss is .* at step (\d+)", rank.errors)[1] for rank in ended}
    step = int(said.pop())
    assert not said
    folder = tmp_path / "run" / "checkpoints"
    assert zshard.latest(folder) == str(folder / f"step-{step - 1:08d}")
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]
