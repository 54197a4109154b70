"""A rank that waits in gloo for one that has ended is told so, also where gloo forgets a send."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks
from test_symmetric import Double, take

import zshard
from zshard.comm import Comm
from zshard.tag import Tag
from zshard.transports import discovery, groups, processes
from zshard.transports.groups import Ranks
from zshard.transports.messages import Together
from zshard.transports.processes import Life, Processes

_CPU = torch.device("cpu")
_TAG = Tag(3, "gather", "blocks.0")
_GRACE_LOOKS = 2


def forgets(rank: int, world_size: int, op: str, folder: str) -> None:
    """Rank 1 is killed; rank 0's collective never ends, as it needs rank 2, which does not come."""
    comm = Comm(None, _CPU, "group")
    pair = dist.new_group([0, 2])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        processes._GRACE_LOOKS = _GRACE_LOOKS
        stuck = Ranks(pair, _CPU).start_all_reduce(torch.ones(3), maximum=False)
        for name in ("all_to_all_single", "broadcast", "all_gather"):
            setattr(dist, name, lambda *_, **__: stuck)
        full = torch.zeros(192, dtype=torch.uint8)
        calls = {
            "agree": lambda: comm.all_gather_words([1, 2], _TAG),
            "all_gather": lambda: comm.all_gather(full, full[:64], _TAG).wait(),
            "broadcast": lambda: comm.broadcast(full, _TAG),
            "all_gather_object": lambda: comm.all_gather_object("x", _TAG),
        }
        began = time.monotonic()
        with pytest.raises(zshard.CommError) as raised:
            calls[op]()
        took = time.monotonic() - began
        Path(folder, "said").write_text(f"{took} {raised.value}")
    time.sleep(0 if rank == 0 else 30)
    os._exit(0)


@pytest.mark.parametrize("op", ["agree", "all_gather", "broadcast", "all_gather_object"])
def test_a_wait_that_gloo_would_not_end_ends_with_the_name_of_the_rank_that_ended(
    op: str, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL"):
        run_ranks(forgets, 3, op, str(tmp_path), grace=8)
    took, said = (tmp_path / "said").read_text().split(" ", 1)
    assert float(took) >= _GRACE_LOOKS * processes._SLICE.total_seconds()
    assert f"rank 0 of 3: {op} in gather of unit 'blocks.0' in step 3 failed: not complete" in said
    assert "rank 1 (process " in said
    assert "has ended" in said


def outlasts(rank: int, world_size: int) -> float:
    """Rank 1 has ended; rank 2 comes later than a look at the processes, and is waited for."""
    over = Comm(None, _CPU, "group").shards
    pair = dist.new_group([0, 2])
    if rank == 1:
        return 0.0
    if rank == 2:
        time.sleep(2.0)
    value = torch.ones(3)
    over.wait(Ranks(pair, _CPU).start_all_reduce(value, maximum=False))
    return float(value.sum())


def test_a_rank_that_goes_early_ends_no_collective_of_the_others() -> None:
    assert run_ranks(outlasts, 3, timeout=30) == [6.0, 0.0, 6.0]


def tells_something_else(rank: int, world_size: int) -> bool:
    """Rank 0 tells many words, where rank 1 tells an object, of fewer bytes."""
    over = Ranks(dist.new_group(timeout=timedelta(seconds=2)), _CPU)
    try:
        if rank == 0:
            over.all_gather_words(torch.zeros(99, dtype=torch.int64))
        else:
            over.all_gather_object("")
    except RuntimeError:
        return True
    return False


def test_words_and_objects_are_not_taken_for_each_other() -> None:
    """In one collective gloo would end the process that gets more bytes than it expects."""
    assert run_ranks(tells_something_else, 2) == [True, True]


def fails(rank: int, world_size: int, over: str) -> str:
    if over == "nccl":  # beside which the hosts talk over gloo
        groups._backend_name = lambda group, device: "nccl"
    if over == "symmetric memory":
        take(Double())
    comm = Comm(None, _CPU, "peer" if over == "symmetric memory" else "group")
    if rank == 1:
        return ""
    with pytest.raises(zshard.CommError) as raised:
        for _ in range(2):  # the first may be complete before the connection is closed
            comm.all_gather_words([1], _TAG)
    return str(raised.value)


@pytest.mark.parametrize("over", ["gloo", "nccl", "symmetric memory"])
def test_an_error_of_gloo_names_the_rank_that_ended(over: str) -> None:
    said = run_ranks(fails, 2, over, timeout=30)[0]
    assert "agree in gather of unit 'blocks.0' in step 3 failed: " in said
    assert "rank 1 (process " in said
    assert "has ended" in said
    assert "not complete" not in said  # gloo's own error, at once


def hosts(rank: int, world_size: int) -> list[bool]:
    """On two hosts, as far as the ranks can tell, nobody looks for processes."""
    groups._host = lambda: f"host {rank % 2}"
    over = Ranks(dist.group.WORLD, _CPU)
    over.find_hosts()
    apart = over.found is None
    groups._host = lambda: "host"
    over.find_hosts()
    return [apart, isinstance(over.found, processes.Processes)]


def test_processes_are_looked_for_on_one_host() -> None:
    assert run_ranks(hosts, 2) == [[True, True]] * 2


class Looked(dist.Work):
    """A collective that is complete at a look, or never; it notes how it was waited for."""

    def __init__(self, complete_at: float) -> None:
        super().__init__()
        self.complete_at, self.looks = complete_at, 0
        self.slept_after: list[int] = []

    def is_completed(self) -> bool:
        """Another look."""
        self.looks += 1
        return self.looks >= self.complete_at

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Sleep until it is complete."""
        self.slept_after.append(self.looks)
        return True


def test_a_wait_looks_for_half_a_millisecond_before_it_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(processes.time, "perf_counter", lambda: next(now) * 1e-4)
    soon, late = Looked(complete_at=3), Looked(complete_at=float("inf"))
    Processes([], []).wait(Together([soon, late]))
    assert soon.slept_after == [3]  # when there was nothing left to sleep for
    assert late.slept_after == [5]


def watched(*children: subprocess.Popen[bytes]) -> tuple[Processes, list[Life]]:
    lives = [Life(child.pid, os.pidfd_open(child.pid)) for child in children]
    return Processes([f"rank {rank}" for rank in range(len(lives))], lives), lives


class CompleteAfter(Looked):
    """A collective for which a wait of no time at all, as it seems, is over several times."""

    def __init__(self, waits: int) -> None:
        super().__init__(complete_at=float("inf"))
        self.waits = waits

    def wait(self, timeout: timedelta | None = None) -> bool:
        """It is not complete in time at first."""
        self.waits -= 1
        if self.waits >= 0:
            raise RuntimeError("Operation timed out!")
        return True


def test_time_for_which_this_process_was_stopped_is_none_that_gloo_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that stands still for an hour between two looks, as the clocks have it."""
    with subprocess.Popen(["true"]) as child:
        found, _ = watched(child)
        child.wait()
        now = iter(range(0, 10**6, 3600))
        monkeypatch.setattr(processes.time, "monotonic", lambda: next(now))
        for _ in range(2):  # as a save's thread waits, too: each has its own time
            found.wait(CompleteAfter(processes._GRACE_LOOKS))
        with pytest.raises(RuntimeError, match=r"not complete 10 times 0\.5 s after"):
            found.wait(CompleteAfter(processes._GRACE_LOOKS + 1))
        found.wait(CompleteAfter(1))  # a later one, too, may be stopped in its first wait
        with pytest.raises(RuntimeError, match="not complete"):
            found.wait(CompleteAfter(2))


def test_after_an_error_the_rank_that_ends_now_is_found_beside_one_that_had_ended() -> None:
    with subprocess.Popen(["true"]) as early, subprocess.Popen(["sleep", "20"]) as late:
        found, _ = watched(early, late)
        early.wait()
        assert found.ended() == [0]
        threading.Timer(0.1, late.kill).start()
        assert found.ended(after_error=True) == [0, 1]


def test_after_an_error_a_rank_is_found_that_ends_once_a_stopped_machine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["sleep", "0.2"]) as child:
        found, _ = watched(child)
        now = iter(range(0, 10**6, 3600))
        monkeypatch.setattr(processes.time, "monotonic", lambda: next(now))
        assert found.ended(after_error=True) == [0]


def test_a_descriptor_that_a_script_has_closed_is_no_end_of_a_rank() -> None:
    with subprocess.Popen(["sleep", "20"]) as child:
        found, lives = watched(child)
        os.close(lives[0].fd)
        assert found.ended() == []
        os.dup2(os.pidfd_open(child.pid), lives[0].fd)  # which the end of `found` closes
        child.kill()


_AT_EXIT = """
import atexit, os
atexit.register(lambda: print(found.ended(), os.fstat(fd).st_nlink))
from zshard.transports.processes import Life, Processes
fd = os.pidfd_open(os.getppid())
found = Processes(["rank 0"], [Life(os.getppid(), fd)])
"""


def test_processes_are_watched_as_long_as_a_script_may_communicate() -> None:
    done = subprocess.run([sys.executable, "-c", _AT_EXIT], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[] 1\n", "")


def meets_late(rank: int, world_size: int) -> list[list[int]]:
    processes._GRACE_LOOKS = 1
    comm = Comm(None, _CPU, "group")
    time.sleep(1.5 * rank)
    return comm.all_gather_words([rank], _TAG)


def test_a_rank_that_is_late_is_not_taken_for_one_that_has_ended() -> None:
    assert run_ranks(meets_late, 2) == [[[0], [1]]] * 2


def descriptors(rank: int, world_size: int, out_of_reach: bool) -> int:
    """How many more files are open after models have come and gone."""
    before = None
    if out_of_reach:
        discovery._check = lambda _: "another one"
    for _ in range(4):
        zshard.wrap(torch.nn.Linear(2, 2))
        gc.collect()
        before = before or len(os.listdir("/proc/self/fd"))
    return len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize("reach", ["group", "auto", "none"])
def test_models_that_are_gone_leave_no_files_open(
    reach: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZSHARD_COMM", "group" if reach == "group" else "auto")
    assert max(run_ranks(descriptors, 2, reach == "none")) <= 0


def meets_another_one(rank: int, world_size: int, path: str) -> str:
    """What has rank 1's number on this host, and its file there, is not rank 1."""
    if rank == 1:
        discovery.descriptor_path = lambda _: path
    with pytest.raises(zshard.WrapError) as raised:
        zshard.wrap(torch.nn.Linear(2, 2), comm="peer")
    return str(raised.value)


@pytest.mark.parametrize("what", ["file", "pipe"])
def test_a_process_that_has_a_ranks_number_here_is_not_taken_for_it(
    what: str, tmp_path: Path
) -> None:
    path, why = tmp_path / what, "process [0-9]+ is another one here"
    if what == "pipe":
        os.mkfifo(path)  # opening it would never end
        why = "Illegal seek"
    else:
        path.write_bytes(b"another proof")
    for said in run_ranks(meets_another_one, 2, str(path), timeout=20):
        assert re.search(rf"rank 0: on host .* the memory of rank 1 .* out of reach .*{why}", said)


def cannot_prove_itself(rank: int, world_size: int) -> str:
    if rank == 1:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))
    with pytest.raises(zshard.WrapError) as raised:
        zshard.wrap(torch.nn.Linear(2, 2), comm="peer")
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    return str(raised.value)


def test_what_a_rank_lacks_to_be_found_is_told_by_the_others() -> None:
    for said in run_ranks(cannot_prove_itself, 2):
        assert re.search(r"rank 0: .* the memory of rank 1 .* \(\[.*Too many open files\)", said)
