"""A run of `zshard train`: its steps on two ranks, against plain torch, and what it leaves."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from ranks import run_ranks
from train_command import write_text

import zshard
from zshard.errors import InputError
from zshard.gpt import GPT
from zshard.training import steptrace
from zshard.training.data import Corpus, MicroBatch
from zshard.training.job import Job, Place
from zshard.training.metrics import MetricsError
from zshard.training.options import TrainOptions, resolve
from zshard.training.output import check_output
from zshard.training.resume import Progress
from zshard.training.scalars import Scalars
from zshard.training.steptrace import StepTrace
from zshard.training.train import Run, TrainError, train
from zshard.training.trainplan import plan_of

SHAPE = {"layers": 2, "width": 36, "heads": 3, "seq": 24, "batch": 3, "device": "cpu"}


class Member(Job):
    """A rank of a group that is there already."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device("cpu")
        self.stopping = self._asked_to_stop = False


def steps(rank: int, world_size: int, text: Path, parts: int) -> set[int]:
    """Compare one with plain torch's; how often the later ones reduce."""
    options, corpus = TrainOptions(**SHAPE, accumulate=parts), Corpus.read([text], 24)
    run = Run(Member(rank, world_size), options, corpus)
    torch.manual_seed(0)
    plain, loss = GPT(options.model_config()), torch.zeros(())
    for micro_step, each in itertools.product(range(parts), range(2)):
        where = {"seed": 0, "step": 0, "micro_step": micro_step, "rank": each}
        tokens, targets = corpus.train_batch(3, 24, **where)
        logits = plain(tokens).flatten(0, 1)
        part = torch.nn.functional.cross_entropy(logits, targets.flatten()) / (2 * parts)
        part.backward()
        loss += part.detach()
    taken = run.take_step()
    assert taken.loss == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert taken.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert taken.tokens_per_second * taken.seconds == pytest.approx(2 * parts * 3 * 24)
    reductions = set()
    for _ in range(2):
        taken, stats = run.take_step(), zshard.stats(run.model)
        reductions.add(stats.calls["reduce_scatter"])
        exposed = 100 * stats.exposed_seconds / taken.seconds
        assert taken.exposed_percent == pytest.approx(exposed)
    return reductions


def test_a_step_is_of_every_ranks_own_batches_and_reduces_once_for_all_micro_steps(
    tmp_path: Path,
) -> None:
    text = write_text(tmp_path / "text")
    one, two = (run_ranks(steps, 2, text, parts) for parts in (1, 2))
    assert one == two and all(len(each) == 1 for each in one), (one, two)


def test_a_validation_makes_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(
        Job(Place(), "cpu"), TrainOptions(**SHAPE), Corpus.read([write_text(tmp_path / "text")], 24)
    )
    losses = []
    loss_of = run.loss

    def loss(batch: MicroBatch) -> torch.Tensor:
        losses.append(loss_of(batch))
        return losses[-1]

    monkeypatch.setattr(run, "loss", loss)
    run.validation_loss()
    assert losses and not any(loss.requires_grad for loss in losses)


def test_a_run_whose_last_scalars_find_no_room_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", Mock())
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(Scalars, "close", Mock(side_effect=full))
    data, out = (str(write_text(tmp_path / "text")),), str(tmp_path / "run")
    options = TrainOptions(**SHAPE, data=data, steps=1, sample=0, out=out)
    with pytest.raises(MetricsError, match=r"the scalars for TensorBoard cannot .*No space"):
        train(options, Place())
    assert zshard.latest(tmp_path / "run" / "checkpoints") is not None


@pytest.mark.parametrize("kind", [TrainError, MetricsError])
def test_a_run_that_cannot_go_on_ends_once_the_save_under_way_is_whole(
    kind: type[zshard.Error], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Mock()

    def loop(run: Run, out: Path) -> bool:
        run._saving = saving
        raise kind("the loss is nan, or a disk full")

    monkeypatch.setattr(signal, "signal", Mock())
    monkeypatch.setattr("zshard.training.train._loop", loop)
    data, out = (str(write_text(tmp_path / "text")),), str(tmp_path / "run")
    with pytest.raises(kind):
        train(TrainOptions(**SHAPE, data=data, out=out), Place())
    saving.wait.assert_called_once_with()


def test_a_resumed_run_is_traced_and_planned_only_where_it_is_asked_to_be(tmp_path: Path) -> None:
    data = (str(write_text(tmp_path / "text")),)
    before = TrainOptions(data=data, trace="", plan=True, machine="h100")
    extra = Progress(1, 1, 0, before.as_json()).as_extra()
    zshard.save(tmp_path / "saved", zshard.wrap(torch.nn.Linear(2, 3)), extra=extra)
    now = resolve({"resume": str(tmp_path / "saved"), "out": str(tmp_path / "run")})
    assert (now.trace, now.plan, now.machine) == (None, False, None)


def test_rank_0_alone_puts_the_ranks_traces_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge = Mock()
    monkeypatch.setattr(steptrace, "merge_traces", merge)
    model = zshard.wrap(torch.nn.Linear(2, 3))
    for rank in (1, 0):
        merge.assert_not_called()
        job = Mock(rank=rank, world_size=2, gather=lambda item: [item, item])
        with StepTrace(job, model, str(tmp_path)) as traced:
            for _ in range(4):
                traced.before_step()
        assert "--- 2 steps of rank 0, traced; " in job.say.call_args.args[0]
    merge.assert_called_once()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-1.json"]


def test_a_run_on_gpus_is_planned_with_the_reduce_buffers_of_nccl() -> None:
    cpu, cuda = (plan_of(TrainOptions(**SHAPE), 3, device) for device in ("cpu", "cuda"))
    assert cuda.to_dict()["per_rank"] != cpu.to_dict()["per_rank"]


def test_a_folder_that_cannot_be_written_to_is_refused_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # not so for root
    with pytest.raises(InputError, match=rf"--out .*run: {tmp_path} cannot be written to"):
        check_output(str(tmp_path / "run"))


def test_ranks_import_what_the_launcher_does_from_where_it_does(tmp_path: Path) -> None:
    (folder := tmp_path / "run:1 'caf\udce9'").mkdir()
    (folder / "tabulate.py").write_text("raise SystemExit(77)")  # found before that of others
    (tmp_path / "signal.py").write_text("raise SystemExit(78)")  # the launcher finds Python's
    script = (
        "import sys; del sys.path[0]; from zshard.training import launch; "
        f"sys.path.insert(0, {str(folder)!a}); print(launch._run_agent(1, ['info']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "{0: 77}\n", done.stderr
