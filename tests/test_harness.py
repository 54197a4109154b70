"""The harness reports a rank that raises, hangs or dies, and its ranks are separate processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks

COUNTER = [0]


def sum_of_ranks(rank: int, world_size: int, start: torch.Tensor) -> torch.Tensor:
    total = start + rank
    dist.all_reduce(total)
    return total


def identity(rank: int, world_size: int) -> tuple[int, int, int]:
    COUNTER[0] += 1
    return os.getpid(), COUNTER[0], torch.get_num_threads()


def server_and_imports(rank: int, world_size: int) -> tuple[int, bool]:
    # Nothing that this module imports brings these: only the server's own import does.
    return os.getppid(), {"torch._dynamo", "training"} <= sys.modules.keys()


def raise_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"planted on {rank}")
    time.sleep(25)  # in no collective: only the harness can end it


def hang_on(rank: int, world_size: int, culprit: int, lock_path: str) -> None:
    if rank == culprit:
        # The lock is held until the last process with this open file has ended.
        with open(lock_path, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            subprocess.Popen(["sleep", "60"], pass_fds=[lock.fileno()])
            print("hangs", file=lock, flush=True)
            time.sleep(60)


def kill_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def leave_on(rank: int, world_size: int, culprit: int) -> None:
    print("said before leaving", flush=True)
    if rank == culprit:
        os._exit(0)


def unpicklable(rank: int, world_size: int) -> object:
    return lambda: None


def assert_released(lock_path: Path) -> None:
    """Assert that every process that `hang_on` started has ended."""
    with open(lock_path) as lock:
        for _ in range(100):  # the kernel closes a killed process's files a moment later
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.01)
    pytest.fail("a process that a rank has started goes on")


def test_results_come_back_in_rank_order_over_one_group() -> None:
    start = torch.arange(3.0)
    results = run_ranks(sum_of_ranks, 3, start)
    assert [result.tolist() for result in results] == [[3.0, 6.0, 9.0]] * 3


def test_ranks_are_separate_processes_and_a_case_leaves_nothing_to_the_next() -> None:
    first, second = run_ranks(identity, 2), run_ranks(identity, 2)
    pids = {pid for pid, _, _ in [*first, *second]}
    assert len(pids) == 4 and os.getpid() not in pids
    assert [count for _, count, _ in [*first, *second]] == [1] * 4
    assert [threads for _, _, threads in first] == [1, 1]


def test_every_rank_is_forked_from_one_server_that_has_imported_torch() -> None:
    seen = run_ranks(server_and_imports, 2) + run_ranks(server_and_imports, 1, group=False)
    assert len({server for server, _ in seen}) == 1 and seen[0][0] != os.getpid()
    assert all(preloaded for _, preloaded in seen)


def test_an_interrupted_case_leaves_no_rank_behind(tmp_path: Path) -> None:
    lock_path = tmp_path / "lock"

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    def interrupt_once_it_hangs() -> None:
        while not (lock_path.exists() and lock_path.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        Thread(target=interrupt_once_it_hangs, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            run_ranks(hang_on, 2, 1, str(lock_path))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert_released(lock_path)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_raises_is_reported_first_with_its_traceback(culprit: int) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(raise_on, 2, culprit, grace=0.2)
    text = str(failure.value)
    assert f"--- rank {1 - culprit} returned" not in text, "the other rank was waited for"
    assert f"rank {culprit} failed first" in text.splitlines()[0]
    assert f"--- rank {culprit} raised" in text.splitlines()[1]
    assert f"ValueError: planted on {culprit}" in text and "in raise_on" in text


def tells_late(rank: int, world_size: int) -> None:
    time.sleep(0.5 * rank)
    raise ValueError(f"planted on {rank}")


def test_a_machine_that_stands_still_takes_no_time_from_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter(range(0, 10**6, 3600))
    monkeypatch.setattr(ranks.time, "monotonic", lambda: next(now))
    with pytest.raises(RankFailure, match=r"(?s)planted on 0.*planted on 1"):
        run_ranks(tells_late, 2)


def seconds_to_the_alarm(rank: int, world_size: int) -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


def test_the_alarm_of_a_rank_leaves_a_machine_time_to_stand_still() -> None:
    assert all(left > 90 for left in run_ranks(seconds_to_the_alarm, 2, timeout=30))


def test_a_hang_is_killed_at_the_deadline_with_its_stack_and_its_children(
    tmp_path: Path,
) -> None:
    lock_path = tmp_path / "lock"
    started = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(hang_on, 2, 1, str(lock_path), timeout=3.0)
    assert time.monotonic() - started >= 3.0
    text = str(failure.value)
    assert "ranks [1] hung past 3 s" in text.splitlines()[0]
    assert "--- rank 0 returned" in text
    assert "in hang_on" in text, "the stack of the rank that hung is missing"
    assert_released(lock_path)


def test_a_rank_killed_by_a_signal_is_a_failure_that_names_it() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(kill_on, 2, 1)
    assert "--- rank 1 was killed by SIGSEGV" in str(failure.value)
    assert "in kill_on" in str(failure.value), "faulthandler's stack is missing"


def test_a_rank_that_exits_without_a_result_is_a_failure() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(leave_on, 2, 0)
    assert "--- rank 0 left no result" in str(failure.value)
    assert "said before leaving" in str(failure.value)


def test_a_result_that_does_not_pickle_is_reported_by_its_rank() -> None:
    with pytest.raises(RankFailure, match="rank 0 raised"):
        run_ranks(unpicklable, 1)


def test_the_gpu_script_finds_every_file_with_cuda_tests() -> None:
    root = Path(__file__).parent.parent
    script = (root / "benchmarks" / "gpu.sh").read_text()
    found = re.search(r"mapfile -t cuda_tests < <\((.*)\)$", script, re.MULTILINE)
    assert found is not None
    listed = subprocess.run(
        ["bash", "-c", found[1]], cwd=root, capture_output=True, text=True, check=True
    )
    as_with_a_gpu = (
        "import pytest, sys, torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "sys.exit(pytest.main(['--collect-only', '-qm', 'cuda', '-p', 'no:cacheprovider']))\n"
    )
    collected = subprocess.run(
        [sys.executable, "-c", as_with_a_gpu],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert collected.returncode == 0, collected.stdout
    with_tests = {line.split("::")[0] for line in collected.stdout.splitlines() if "::" in line}
    assert set(listed.stdout.split()) == with_tests
