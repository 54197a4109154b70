"""SIGTERM at every point of a training run in this process, and what resuming makes of it."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from train_command import losses, write_text

import zshard
from zshard.training.job import STOPPED, Place
from zshard.training.options import TrainOptions, resolve
from zshard.training.train import Run, train

SHAPE = {"layers": 2, "width": 36, "heads": 3, "seq": 24, "batch": 3, "device": "cpu"}
OPTIONS = TrainOptions(**SHAPE, steps=8, eval_every=3, save_every=4, sample=0)


@pytest.fixture(scope="module", autouse=True)
def own_sigterm() -> Iterator[None]:
    """After a run the process ignores SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing has stopped, and, in ``text``, what it trained on."""
    folder = tmp_path_factory.mktemp("whole")
    data = (str(write_text(folder / "text")),)
    assert train(replace(OPTIONS, data=data, out=str(folder / "run")), Place()) == 0
    return folder


@pytest.mark.parametrize(
    ("what", "call", "saved"),
    [
        ("validation_loss", 1, 0),
        ("take_step", 3, 3),  # after which there is a validation
        ("validation_loss", 2, 3),
        ("save", 1, 5),  # in the background, after step 4
        ("take_step", 8, 8),
        ("memory_table", 1, 2),
    ],
)
def test_a_run_stopped_anywhere_and_resumed_leaves_the_lines_of_the_uninterrupted_one(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    call: int,
    saved: int,
) -> None:
    out = tmp_path / "run"
    options = replace(OPTIONS, data=(str(whole / "text"),), out=str(out))
    plain, calls = getattr(Run, what), []

    def stopped(*args: object, **named: object) -> object:
        calls.append(what)
        if len(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return plain(*args, **named)

    monkeypatch.setattr(Run, what, stopped)
    complete = saved == options.steps
    assert train(options, Place()) == (0 if complete else STOPPED)
    assert zshard.latest(out / "checkpoints") == str(out / f"checkpoints/step-{saved:08d}")
    if not complete:
        assert train(resolve({"resume": str(out)}), Place()) == 0
    assert losses(out, after=-1) == losses(whole / "run", after=-1)
