"""What a benchmark has measured stays, whatever becomes of the rest."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
DEADLINE = 240  # seconds, most of them the start of Python


@pytest.mark.parametrize(
    ("ends", "because"),
    [
        ("os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)", "by SIGTERM"),
        ("os.killpg(os.getpgid(0), signal.SIGINT); time.sleep(600)", "by SIGINT"),
        ("raise MemoryError('none')", "by an error: MemoryError: none"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "by an error: process "),
    ],
)
def test_what_ranks_have_kept_outlives_a_benchmark_that_is_ended(
    ends: str, because: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, time, torch, rank_group\n"
        "import torch.distributed as dist\n"
        "cpu = torch.device('cpu')\n"
        "def main():\n"
        "    for step in range(2):\n"
        "        rank_group.keep({'step': step})\n"
        "    if dist.get_rank() == 0:\n"
        f"        {ends}\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored under nohup\n"
        "    print(rank_group.run_ranks(main, (), ranks=2, backend='gloo', device=cpu))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    line = [sys.executable, str(program)]
    done = subprocess.run(  # a session of its own, whose processes Ctrl-C goes to
        line, capture_output=True, text=True, timeout=DEADLINE, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{{'step': 1, 'because': '{because}")


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        ("os.killpg(os.getpgid(0), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("os.kill(os.getppid(), signal.SIGTERM)", 128 + signal.SIGTERM, ""),
        ("os.kill(os.getppid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("raise InputError('this is wrong')", 1, "zshard.errors.InputError: this is wrong\n"),
    ],
)
def test_ranks_end_with_what_started_them(
    ends: str, status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, time, torch, tqdm, rank_group\n"
        "import torch.distributed as dist\n"
        "from zshard.errors import InputError\n"
        "cpu = torch.device('cpu')\n"
        "def main():\n"
        f"    open(f'{tmp_path}/{{os.getpid()}}.pid', 'w').close()\n"
        "    bar = tqdm.tqdm(total=1, file=open(os.devnull, 'w'))\n"
        "    dist.barrier()\n"
        "    if dist.get_rank() == 0:\n"
        f"        {ends}\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored under nohup\n"
        "    rank_group.run_ranks(main, (), ranks=2, backend='gloo', device=cpu)\n"
    )
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    line = [sys.executable, str(program)]
    done = subprocess.run(  # a session of its own, whose processes Ctrl-C goes to
        line, capture_output=True, text=True, timeout=DEADLINE, start_new_session=True
    )
    assert done.returncode == status and done.stderr.endswith(said), done.stderr
    if status != -signal.SIGKILL:
        assert not list((tmp_path / "temporary").iterdir())
        assert "leaked" not in done.stderr
    ranks = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(ranks) == 2
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{rank}/exe").exists() for rank in ranks):
        assert time.monotonic() < deadline, "a rank goes on"
        time.sleep(0.05)


def test_counts_are_in_the_file_before_the_next_setting_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import bench_bytes

    names = ("zshard zero3", "FSDP2", "compute")
    moved = [{"name": name, "read": {"aten::add": 8}, "written": {}} for name in names]
    moved[1]["read"] = {"aten::add": 16}
    counted = iter([{"parameters": 1, "moved": moved}])

    def run_ranks(*_: object, **__: object) -> dict[str, object]:
        if (found := next(counted, None)) is None:
            raise MemoryError
        return found

    monkeypatch.setattr(bench_bytes, "run_ranks", run_ranks)
    path = tmp_path / "bytes.json"
    with pytest.raises(MemoryError):
        bench_bytes.main(["--precision", "fp32", "bf16", "--json", str(path)])
    assert [each["case"] for each in json.loads(path.read_text())["results"]] == [
        "25m 128 tokens fp32 N=8"
    ]
