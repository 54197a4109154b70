"""zshard plan: tables, JSON, pictures, and a profile of this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import zshard
from zshard.cli import main


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run zshard plan in this process."""

    def run(*arguments: object) -> Done:
        try:
            status = main(["plan", *map(str, arguments)])
        except SystemExit as error:  # argparse's
            status = int(error.code)
        out, err = capfd.readouterr()
        return Done(status, out, err)

    return run


def test_the_command_prints_a_table_of_strategies_and_what_fits(
    command: Command,
) -> None:
    done = command("gpt:7b", "--world", 8, "--hbm", "80GB", "--precision", "bf16/bf16")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "gpt:7b: bf16/bf16, adamw, over 8 ranks: 7,003,897,390 parameters in 33 units"
    )
    rows = {line.split()[0]: line.split() for line in lines[2:6]}
    assert list(rows) == ["ddp", "zero1", "zero2", "zero3"]
    assert rows["zero3"][1] == "*" and rows["zero3"][-2:] == ["yes", "2"]
    assert rows["ddp"][-4:] == ["no", "none", "will", "do"]
    assert lines[1].startswith("GB (1e9) a rank")
    assert lines[-1] == "Into 80 GB over 8 ranks: zero1 fits."


def test_a_strategy_goes_by_fsdps_names_too(command: Command) -> None:
    by_either = [
        command("gpt:7b", "--world", 8, "--strategy", name, "--json").stdout
        for name in ("zero2", "shard_grad_op")
    ]
    assert by_either[0] == by_either[1] and json.loads(by_either[0])["strategy"] == "zero2"
    assert command("gpt:7b", "--world", 8, "--strategy", "zero4").returncode == 2


def test_the_command_prints_json(command: Command) -> None:
    done = command("gpt:7b", "--world", 8, "--hbm", "80GiB", "--json")
    printed = json.loads(done.stdout)
    planned = zshard.plan("gpt:7b", 8, precision=zshard.Precision.bf16()).to_dict()
    assert {key: printed[key] for key in planned} == planned
    assert printed["fit"]["hbm"] == 80 * 2**30


SPLIT = zshard.Precision.bf16(reduce=torch.bfloat16, master="split")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--strategy zero1", {"strategy": "zero1"}),
        ("--units layer", {"units": "layer"}),
        ("--precision split", {"precision": SPLIT}),
        ("--precision fp32", {"precision": zshard.Precision()}),
        ("--optimizer momentum", {"optimizer": "momentum"}),
        ("--prefetch 2", {"prefetch": 2}),
        ("--batch 2x64", {"batch": (2, 64)}),
        ("--batch 2x64 --checkpointing", {"batch": (2, 64), "checkpointing": True}),
        ("--batch 1x64 --network 8Gbit", {"batch": (1, 64), "network": 1e9}),
        ("--batch 1x64 --network 2GB", {"batch": (1, 64), "network": 2e9}),
        ("--batch 1x64 --machine a100", {"batch": (1, 64), "machine": "a100"}),
        ("--activations 3MiB", {"activations": 3 * 2**20}),
        ("--activations 3MB", {"activations": 3_000_000}),
        ("--activations 0.5TB", {"activations": 500_000_000_000}),
        ("--backend nccl", {"backend": "nccl"}),
    ],
)
def test_an_option_of_the_command_is_one_of_the_plan(
    command: Command, words: str, options: dict[str, object]
) -> None:
    usual = {"precision": zshard.Precision.bf16(), "machine": "h100", "backend": "gloo"}
    planned = zshard.plan("gpt:tiny", 4, **(usual | options)).to_dict()
    assert planned != zshard.plan("gpt:tiny", 4, **usual).to_dict()
    others = [] if "backend" in options else ["--backend", "gloo"]
    done = command("gpt:tiny", "--world", 4, *others, *words.split(), "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert {key: printed[key] for key in planned} == planned


def test_what_the_command_cannot_plan_with_is_refused(command: Command) -> None:
    done = command("gpt:tiny", "--world", 4, "--batch", "1x64", "--comm", "peer")
    assert done.returncode == 2 and "comm='peer': h100 was not measured" in done.stderr


def test_with_a_batch_the_command_measures_and_predicts(command: Command) -> None:
    done = command(
        "gpt:25m", "--world", 2, "--batch", "1x64", "--hbm", "0.2GB", "--machine", "h200"
    )
    assert done.returncode == 0, done.stderr
    assert "the peak is in backward" in done.stdout
    assert "ms on h200" in done.stdout and "hidden" in done.stdout
    assert "activation checkpointing: saves" in done.stdout
    heads = done.stdout.splitlines()[1]
    assert "activations" in heads and "step ms" in heads and "exposed ms" in heads


def test_the_command_draws_memory_and_the_step(command: Command, tmp_path: Path) -> None:
    from PIL import Image

    plain, timed = tmp_path / "memory.png", tmp_path / "step.png"
    assert command("gpt:tiny", "--world", 2, "--plot", plain).returncode == 0
    assert command("gpt:tiny", "--world", 2, "--batch", "1x64", "--plot", timed).returncode == 0
    heights = [Image.open(path).height for path in (plain, timed)]
    assert heights[1] > 1.5 * heights[0]  # the step is drawn below
    refused = command("gpt:tiny", "--world", 2, "--plot", tmp_path / "no" / "folder.png")
    assert refused.returncode == 2 and "cannot be written" in refused.stderr


def test_without_matplotlib_the_command_says_what_to_install(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused = command("gpt:tiny", "--world", 2, "--plot", tmp_path / "memory.png")
    assert refused.returncode == 1
    assert refused.stderr == (
        "zshard: error: zshard plan --plot needs matplotlib, which is not installed: pip install "
        "matplotlib\n"
    )


def test_the_command_measures_this_machine_and_plans_with_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    monkeypatch.setattr("bench_machine._ROUNDS", 1)  # what it finds is not looked at closely
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "machine.json"
    options = ("--world", 2, "--batch", "1x64", "--backend", "gloo")
    done = command("gpt:tiny", *options, "--calibrate", "--json")
    assert done.returncode == 0, done.stderr
    measured = zshard.Machine.of(path)
    assert measured.facts["ranks"] == 2 and measured.sums_on_host
    assert measured.gather.bandwidth > 0 and 0 <= measured.interference <= 1
    assert min(measured.flops.values()) > 0
    assert "wrote" in done.stderr
    printed = json.loads(done.stdout)
    expected = zshard.plan(
        "gpt:tiny", 2, batch=(1, 64), machine=path, precision=zshard.Precision.bf16()
    )
    assert printed["step_seconds"] == expected.step_seconds
    assert {each["change"] for each in printed["alternatives"]} >= {"split master", "strategy ddp"}
    options = ("--world", torch.cuda.device_count() + 1, "--backend", "nccl")
    refused = command(*options, "--calibrate", tmp_path / "other.json")
    assert refused.returncode == 2 and "NCCL needs a GPU a rank" in refused.stderr


@pytest.mark.parametrize("name", ["none/machine.json", ""])
def test_a_profile_that_could_not_be_written_is_not_measured(
    command: Command, tmp_path: Path, name: str
) -> None:
    done = command("--world", 2, "--calibrate", tmp_path / name)
    assert done.returncode == 2
    assert f"--calibrate {tmp_path / name}: name a file" in done.stderr


@pytest.mark.parametrize(
    "given",
    [
        ("--hbm", "80XB"),
        ("--hbm", "80"),
        ("--world", "0"),
        ("--hbm", "0"),
        ("--hbm", f"{10**400}GB"),
        ("--batch", "64"),
        ("--batch", "0x64"),
        ("--network", "0Gbit"),
        ("--network", "3"),
        ("--machine", "abacus"),
    ],
)
def test_the_command_refuses_bad_input(command: Command, given: tuple[str, str]) -> None:
    done = command("gpt:7b", "--world", 8, *given)
    assert done.returncode == 2
    assert given[1] in done.stderr or "batch=(0, 64)" in done.stderr


def test_the_command_wants_a_model_or_a_calibration(command: Command) -> None:
    done = command("--world", 8)
    assert done.returncode == 2 and "MODEL is missing" in done.stderr
