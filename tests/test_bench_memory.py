"""The benchmarks of memory and of where the time goes, on the smallest model: what must hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zshard

BENCHMARKS = Path(zshard.__file__).parents[1] / "benchmarks"


def report(tmp_path: Path, script: str, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARKS / script), "--model", "tiny", "--tokens", "16"]
    done = subprocess.run(
        [*command, *arguments, "--json", str(path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["environment"]["ranks"] == 2
    return json.loads(path.read_text())


def test_zero3_holds_half_of_what_ddp_does_and_peaks_contain_what_rests(tmp_path: Path) -> None:
    given = ("--against", "fsdp2,ddp", "--steps", "1")
    (result,) = report(tmp_path, "bench_memory.py", *given)["results"]
    ours, _, ddp = result["contestants"]
    assert (ours["name"], ddp["name"]) == ("zshard zero3", "DDP")
    for contestant in (ours, ddp):
        assert len(contestant["ranks"]) == 2
        for rank in contestant["ranks"]:
            assert 0 < rank["rest"] <= rank["steady"] <= rank["whole"]
            assert 0 < rank["setup"] <= rank["whole"]
            assert rank["fresh_bytes"] >= rank["fresh"] << 20
    states = 16 * ddp["parameters"]
    for rank in ddp["ranks"]:
        assert rank["tensors"] == pytest.approx(states, rel=0.02), "parameters, gradients, states"
    unit = 4 * ddp["parameters"] / 4  # four blocks, and a root that is small beside them
    for rank in ours["ranks"]:
        buffers = 4 * unit  # two that are gathered, two of the reduction; the root's own besides
        assert states / 2 + buffers <= rank["tensors"] <= states / 2 + 1.3 * buffers


def test_the_parts_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    given = ("--precision", "bf16", "--quick")
    (result,) = report(tmp_path, "bench_breakdown.py", *given)["results"]
    for clock in ("wall", "processor"):
        parts = dict(result["median_s"][clock])
        step = parts.pop("step")
        assert sum(parts.values()) == pytest.approx(step)
        assert parts.keys() >= {"compute", "wait", "pack", "reduce", "optimizer", "host"}
        for part, seconds in parts.items():
            assert seconds > 0 or part == "host", part  # what is left may be less than nothing
        rounds = result[clock]
        assert {len(seconds) for seconds in rounds.values()} == {7}
        timed = [
            sum(rounds[part][i] for part in parts.keys() - {"compute", "host"}) for i in range(7)
        ]
        assert all(part < whole for part, whole in zip(timed, rounds["step"], strict=True))
