"""The command line: exit statuses, what starts ranks and what does not, what it tells of itself."""

from __future__ import annotations

import platform
import signal
import sys
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from train_command import TINY

import zshard
from zshard import cli
from zshard.errors import InputError
from zshard.training import launch as launcher
from zshard.training.job import STOPPED, Job, Place
from zshard.training.launch import BAD_INPUT, LOST_PEER, InterruptedJob

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (zshard.InputError("why"), 2),
        (zshard.CommError("why"), 3),  # so that the launcher does not name this rank
        (zshard.CheckpointError("why"), 1),
        (OSError(28, "why"), 1),
        (BrokenPipeError(), 141),
        (KeyboardInterrupt(), 130),
        (InterruptedJob(signal.SIGINT), 130),
        (InterruptedJob(signal.SIGTERM), 143),
    ],
)
def test_how_a_command_fails_is_in_its_exit_status(
    error: BaseException, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._report(Mock(side_effect=error), "zshard: rank 7") == status
    said = capsys.readouterr().err
    if isinstance(error, BrokenPipeError):
        assert said == ""
    elif status < 128:
        assert said.startswith("zshard: rank 7: error: ") and said.endswith("why\n")
    else:
        assert said.endswith("; all ranks have ended\n")


def test_what_a_command_returns_is_its_exit_status() -> None:
    assert [cli._report(lambda given=given: given, "zshard") for given in (None, 0, 1)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("told", "statuses", "end"),
    [
        (False, {}, 0),
        (True, {}, 0),  # too late: all had ended well
        (False, {0: STOPPED, 1: STOPPED}, STOPPED),
        (True, {0: -signal.SIGTERM, 1: LOST_PEER}, "ended by SIGTERM, and nothing was saved"),
        (False, {1: -signal.SIGTERM}, "ended by SIGTERM, and nothing was saved"),
        (False, {0: -signal.SIGTERM, 1: LOST_PEER}, "rank 1 ended with exit status 3"),
        (True, {0: LOST_PEER}, "rank 0 ended with exit status 3"),
        (True, {0: STOPPED, 1: 1}, "rank 0 ended with exit status"),
        (False, {0: LOST_PEER, 1: BAD_INPUT}, "rank 1 ended with exit status 2"),
    ],
)
def test_how_a_job_has_ended_is_told_by_how_its_ranks_have(
    told: bool, statuses: dict[int, int], end: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def run(ranks: int, arguments: list[str]) -> dict[int, int]:
        if told:
            signal.raise_signal(signal.SIGTERM)
        return statuses

    monkeypatch.setattr(launcher, "_run_agent", run)
    monkeypatch.setattr(launcher, "_children", list)
    try:
        assert launcher.launch(2, ["train"]) == end
    except zshard.Error as error:
        assert str(end) in str(error)
        assert isinstance(error, InputError) == (BAD_INPUT in statuses.values())
    finally:
        ignored = signal.signal(signal.SIGTERM, before)
    assert ignored == signal.SIG_IGN  # the process's exit status says how it was


class Started:
    """What `zshard train` starts, in the place of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        for name in LAUNCHER:
            monkeypatch.delenv(name, raising=False)
        self.launch, self.train = Mock(return_value=0), Mock(return_value=0)
        monkeypatch.setattr(cli, "launch", self.launch)
        monkeypatch.setattr(cli, "train", self.train)
        monkeypatch.setattr("os._exit", sys.exit)
        (folder / "text").write_text("x" * 999)
        self.words = ["train", *TINY, "--data", str(folder / "text"), "--out", str(folder / "run")]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    return Started(monkeypatch, tmp_path)


def test_several_ranks_are_launched_with_the_words_of_the_command_and_one_is_not(
    started: Started,
) -> None:
    for ranks in (2, 3):
        words = [*started.words, "--ranks", str(ranks)]
        assert cli.main(words) == 0
        started.launch.assert_called_with(ranks, words)
    started.train.assert_not_called()
    assert cli.main([*started.words, "--ranks", "1"]) == 0
    options, place = started.train.call_args.args
    assert place == Place() and options.batch == 3 and started.launch.call_count == 2


def test_a_rank_of_a_job_trains_in_its_place_and_refuses_another_number_of_ranks(
    started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in zip(LAUNCHER, "142", strict=True):
        monkeypatch.setenv(name, value)
    for words, status in (([], 0), (["--ranks", "4"], 0), (["--ranks", "3"], 2)):
        with pytest.raises(SystemExit) as ended:
            cli.main([*started.words, *words])
        assert ended.value.code == status
    assert [call.args[1] for call in started.train.call_args_list] == [Place(1, 4, 2)] * 2
    assert capsys.readouterr().err == (
        "zshard: rank 1: error: --ranks 3: this job was started with 4 ranks\n"
    )
    started.launch.assert_not_called()


def test_a_rank_that_is_told_of_no_gpu_takes_that_of_its_number_and_waits_five_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    place = Place.from_environment()
    assert place == Place(1, 2, 1)
    join, use = Mock(), Mock()
    monkeypatch.setattr("zshard.training.job._follow_parent", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", use)
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    for device, backend in (("cpu", "gloo"), ("cuda", "nccl")):
        Job(place, device)
        join.assert_called_with(backend, timeout=timedelta(minutes=5))
    use.assert_called_once_with(torch.device("cuda", 1))


def test_info_tells_versions_and_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Mock(total_memory=80_000_000_000, major=9, minor=0)
    gpu.name = "H100"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = dict(map(str.strip, line.split("  ", 1)) for line in lines)
    assert found["zshard"] == f"{zshard.__version__}, {Path(zshard.__file__).parent}"
    assert found["torch"] == torch.__version__
    assert found["python"].startswith(platform.python_version())
    assert "gloo" in found["backends"].split(", ")
    assert found["GPU 0"] == found["GPU 1"] == "H100, 80 GB, sm_90"
    assert any(name.startswith("build: ") for name in found)
