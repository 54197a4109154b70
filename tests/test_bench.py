"""`zshard bench`: bad input is refused first, every figure is kept, the wheel has all of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zshard import bench, cli

ROOT = Path(__file__).parent.parent
DEADLINE = 240  # seconds for one run of the command, most of it the start of Python
QUICK_ROUNDS = {"ops": 7, "step": 5, "collectives": 7}


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Calls the command line in this process; returns its exit status and what stderr got."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(*arguments: object) -> tuple[int, str]:
        try:
            status = cli.main(["bench", *map(str, arguments)])
        except SystemExit as end:
            status = int(end.code or 0)
        return status, capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: benchmark"),
        ("memories", "invalid choice: 'memories'"),
        ("ops --threads 0", "--threads: 0: it has to be a whole number, 1 or more"),
        ("ops --only nothing", "no case's name holds it; names begin adamw, cast, gather, pack, "),
        ("ops --plot bars.pdf", "bars.pdf: the file's name has to end with .png"),
        ("ops --json .", "--json .: name a file"),
        ("ops --json README.md/x/a.json", "README.md/x cannot be made"),
        ("collectives --json README.md/x/a.json", "README.md/x cannot be made"),
        ("breakdown --json .", "--json .: name a file"),
        ("memory --json .", "--json .: name a file"),
        ("plan --json .", "--json .: name a file"),
        ("plan --ranks 2 0", "--ranks: 0: it has to be a whole number, 1 or more"),
        ("step --ranks two", "--ranks: two: it has to be a whole number"),
        ("step --tokens 8 -3", "--tokens: -3"),
        ("step --model 26m", "--model: invalid choice: '26m'"),
        ("step --precision fp64", "--precision: invalid choice: 'fp64'"),
        ("step --against fsdp2,fsdp3", "--against 'fsdp3' is none of fsdp2, fsdp1, ddp, zero1"),
        ("memory --against fsdp2,zero1", "--against 'zero1' is none of fsdp2, fsdp1, ddp, none"),
        ("step --zshard zero3,zero4", "--zshard 'zero4': 'zero4' is none of zero3"),
        ("step --zshard prefetch=-1", "'prefetch=-1' is none of"),
        ("step --zshard zero3+reduce=fp8", "'reduce=fp8' is none of"),
        ("step --zshard zero2,zero2", "has one variant twice"),
        ("bytes --zshard zero4", "--zshard 'zero4': 'zero4' is none of zero3"),
        ("step --check-only --plot a.png", "--plot with --check-only: nothing is timed"),
        ("step --check-only --backend fake", "its losses mean nothing; use gloo or nccl"),
        (
            "machine --ranks 2 --output no/such.json",
            "--output no/such.json: name a file in a folder that can be written to",
        ),
        ("machine --ranks 2 --output tests", "--output tests: name a file in a folder"),
        ("checkpoint --folder no/such", "--folder no/such: none can be made in it: No such file"),
        ("checkpoint --folder README.md", "--folder README.md: none can be made in it: Not a dir"),
        ("step --backend nccl --ranks 99", "--ranks 99: NCCL needs --device cuda and a GPU a rank"),
        ("step --network 1gbit --zshard zero3,peer", "memory that the ranks share is no wire"),
    ],
)
def test_what_cannot_be_used_ends_with_status_2_and_the_value(
    command: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")  # argparse breaks its line where the terminal ends
    status, error = command(*arguments.split())
    assert status == 2
    assert message in error and error.count("\n") == 2, error  # a line of usage, a line of error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(command: Callable[..., tuple[int, str]]) -> None:
    for benchmark in ("ops", "step"):
        status, error = command(benchmark, "--device", "cuda")
        assert status == 2 and "torch finds no GPU here; use --device cpu" in error


def test_a_missing_package_is_one_line_that_names_it(
    command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for module in ("bench_ops", "protocol"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    status, error = command("ops", "--plot", tmp_path / "bars.png")
    assert status == 1
    assert error == (
        "zshard: error: bench ops needs matplotlib, which is not installed: pip install "
        "matplotlib\n"
    )


def test_a_peer_that_is_not_installed_or_does_not_import_is_refused_by_name(
    command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    status, error = command("step", "--against", "fsdp2,deepspeed")
    assert status == 2 and "deepspeed is not installed. Leave it out, or install it." in error
    monkeypatch.delitem(sys.modules, "deepspeed")
    (tmp_path / "deepspeed.py").write_text("raise OSError('no accelerator')\n")
    monkeypatch.syspath_prepend(tmp_path)
    status, error = command("step", "--against", "deepspeed")
    assert status == 2 and "import deepspeed raises OSError('no accelerator')" in error


def run(folder: Path, *arguments: str, plots: bool = True) -> tuple[dict[str, Any], str]:
    """Run a benchmark with --quick; return its JSON and what it printed."""
    report, plot = folder / "made" / "report.json", folder / "plot.png"
    line = [*arguments, "--quick", "--json", str(report), *(["--plot", str(plot)] * plots)]
    done = subprocess.run(
        [sys.executable, "-m", "zshard", "bench", *line],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
    )
    assert done.returncode == 0, done.stderr
    assert not plots or plot.read_bytes().startswith(b"\x89PNG\r\n")
    assert "only a look" in done.stdout
    return json.loads(report.read_text()), done.stdout


def check_figures(report: dict[str, Any], printed: str) -> None:
    """Every round of every side is there, and so is what the table says of it."""
    rounds = QUICK_ROUNDS[report["benchmark"]]
    rows = [re.split(" {2,}", line) for line in printed.splitlines()]
    assert report["quick"] and report["environment"]["torch"] == torch.__version__
    for result in report["results"]:
        assert {len(side["rounds_s"]) for side in result["sides"].values()} == {rounds}
        assert len(result["again_rounds_s"]) == rounds
        assert list(result["time_over_first"]) == list(result["sides"])[1:]
        for name, ratio in result["time_over_first"].items():
            assert ratio["low"] <= ratio["median"] <= ratio["high"]
            row = next(line for line in rows if line[:2] == [result["case"], name])
            assert f"{ratio['median']:.2f}" in row
            assert f"{ratio['low']:.2f}-{ratio['high']:.2f}" in row


def test_bench_ops_keeps_every_figure_and_the_share_of_the_copy(tmp_path: Path) -> None:
    report, printed = run(tmp_path, "ops", "--only", "cast fp32>bf16 odd")
    check_figures(report, printed)
    ceiling, case = report["results"]
    assert list(ceiling["sides"]) == ["copy"]
    assert list(case["sides"]) == ["cast_", "Tensor.to", "Tensor.copy_", "copy"]
    assert case["sides"]["cast_"]["bytes"] == case["sides"]["Tensor.to"]["bytes"] > 0
    share = case["share_of_rate"]["copy"]
    assert f"{share['median']:.2f}" in printed.split("of copy")[1]


def test_a_case_that_no_peer_can_replay_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from plots import plot_ops
    from protocol import Result

    sides = {"copy": 8}, {"copy": 8, "copy by a kernel": 8}, {"pack_": 8, "copy": 8}
    results = [Result("case", {name: [1.0] for name in side}, [1.0], side) for side in sides]
    plot_ops(results, tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_bench_collectives_checks_every_way_and_keeps_every_figure(tmp_path: Path) -> None:
    report, printed = run(tmp_path, "collectives", "--millions", "1", plots=False)
    check_figures(report, printed)
    kinds = {result["case"]: list(result["sides"]) for result in report["results"]}
    ours = ["zshard peer", "zshard group"]
    for dtype in ("float32", "bfloat16"):
        assert kinds[f"gather 1M {dtype} N=2"] == [*ours, "gloo all_gather", "copy"]
        assert kinds[f"pack and reduce 1M {dtype} N=2"] == [*ours, "gloo reduce_scatter"]


def test_the_ranks_of_a_benchmark_end_before_their_interpreters_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = "import atexit, os\natexit.register(lambda: open(f'{__file__}.{os.getpid()}', 'w'))\n"
    (tmp_path / "sitecustomize.py").write_text(site)
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, rank_group, tqdm\n"
        "cpu = torch.device('cpu')\n"
        "def main():\n"
        "    return dict(tqdm.tqdm([], disable=True))\n"  # holds a semaphore
        "if __name__ == '__main__':\n"
        "    print(rank_group.run_ranks(main, (), ranks=2, backend='gloo', device=cpu))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT / 'benchmarks'}")
    line = [sys.executable, str(program)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout == "{}\n" and "leaked" not in done.stderr, done.stderr
    ended = [path.suffix for path in tmp_path.glob("sitecustomize.py.*")]
    assert len(ended) == 2, "this program's, and that of multiprocessing's resource tracker"


def test_what_the_host_gave_to_others_is_kept_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import environment

    stat = "cpu  100 20 30 4000 9 5 6 7 8 8\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
    path = tmp_path / "out" / "report.json"
    for ticks, share in ((stat, 7 / 168), (stat.replace("7 8 8", "67 8 8"), 67 / 228)):
        with monkeypatch.context() as patch:
            patch.setattr(environment, "_TICKS_AT_START", (0, 0))
            patch.setattr(Path, "read_text", lambda path, ticks=ticks: ticks)
            environment.write_json(str(path), {"benchmark": "any"})
        assert json.loads(path.read_text()) == {"benchmark": "any", "stolen": share}


@pytest.mark.parametrize("name", ["b", "copy"])
def test_collectives_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from bench_collectives import Way, check_ways

    right, wrong = torch.zeros(3), torch.zeros(3)
    ways = [Way("a", lambda: right.zero_(), right), Way(name, lambda: wrong.fill_(1.0), wrong)]
    with pytest.raises(AssertionError, match=f"sum: {name} and a differ"):
        check_ways("sum", ways, 1e-5)


@pytest.mark.parametrize(("by_kernel", "op"), [(False, "aten::copy_"), (True, "aten::add")])
def test_a_copy_is_the_drivers_or_a_kernels(
    monkeypatch: pytest.MonkeyPatch, by_kernel: bool, op: str
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from op_cases import copy_side

    side = copy_side(64, torch.device("cpu"), 1, by_kernel=by_kernel)
    with torch.profiler.profile() as profile:
        side.run(0)
    assert profile.events()[0].name == op


@pytest.mark.parametrize("ends_by", [AssertionError("differs"), signal.SIGTERM, signal.SIGINT])
def test_a_case_that_fails_does_not_lose_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_by: object
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import bench_ops
    from op_cases import Case, copy_side

    def fail(*_: object) -> None:
        if isinstance(ends_by, Exception):
            raise ends_by
        os.kill(os.getpid(), ends_by)

    good = Case("good", 64, lambda device, sets: [copy_side(64, device, sets)])
    cases = [Case("bad", 64, fail), good]
    monkeypatch.setattr(bench_ops, "cases", lambda *_: cases)
    monkeypatch.setattr(bench_ops, "ceiling", lambda *_: bench_ops.run(good, *_))
    handlers = {ending: signal.getsignal(ending) for ending in (signal.SIGTERM, signal.SIGINT)}
    path = tmp_path / "ops.json"
    try:
        with pytest.raises(SystemExit) as ended:
            bench_ops.main(["--quick", "--json", str(path)])
    finally:
        for ending, handler in handlers.items():
            signal.signal(ending, handler)
    assert ended.value.code == 1
    report = json.loads(path.read_text())
    going_on = isinstance(ends_by, Exception)
    assert [result["case"] for result in report["results"]] == ["good"] * (1 + going_on)
    said = "FAILED: bad: AssertionError: differs"
    if isinstance(ends_by, signal.Signals):
        said = f"FAILED: ended by {ends_by.name} in bad"
    assert report["not_run"][-1].startswith(said)


def test_bench_step_trains_every_peer_and_variant_alike_and_keeps_every_figure(
    tmp_path: Path,
) -> None:
    report, printed = run(
        tmp_path,
        *("step", "--model", "tiny", "--tokens", "8", "--precision", "fp32", "bf16/bf16"),
        *("--against", "fsdp2,fsdp1,ddp,zero1", "--zshard", "prefetch=0,zero2+reduce=fp32,trace"),
    )
    check_figures(report, printed)
    ours = ["zshard zero3 prefetch=0", "zshard zero2 reduce=fp32", "zshard zero3 trace"]
    cases = {result["case"]: result for result in report["results"]}
    assert {case: list(result["sides"]) for case, result in cases.items()} == {
        "tiny 8 tokens fp32 N=2": [*ours, "FSDP2", "FSDP1", "DDP", "DDP+ZeRO1", "compute"],
        "tiny 8 tokens bf16/bf16 N=2": [*ours, "FSDP2", "FSDP1", "compute"],
        "units 4 tokens fp32 N=2": [*ours, "FSDP2", "FSDP1", "plain"],
    }
    for case, result in cases.items():
        trained = [name for name in result["sides"] if name != "plain"]
        assert list(report["losses"][case]) == trained
        assert list(result["exposed_s"]) == ours
        counted = [name for name in trained if name != "compute"]
        assert (
            list(result["host_over_first" if "plain" in result["sides"] else "over_compute"])
            == counted
        )
    assert report["not_run"] == [
        "Not run, as not asked for: DeepSpeed ZeRO-3.",
        "DDP is not run in bf16: it has no precision policy.",
        "DDP is not run on the tiny units: it does not gather them.",
        "ZeroRedundancyOptimizer is not run in bf16: it has no precision policy.",
        "ZeroRedundancyOptimizer is not run on the tiny units: it does not gather them.",
    ]


def test_the_wheel_has_every_benchmark_and_what_it_compiles(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)],
        cwd=ROOT,
        check=True,
        timeout=DEADLINE,
    )
    built = {path.name for path in (tmp_path / "zshard" / "benchmarks").iterdir()}
    kept = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert built == kept | {"stream.cpp"}
    for name in bench.BENCHMARKS:
        assert f"bench_{name}.py" in built
