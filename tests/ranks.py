"""Runs a test function on N rank processes, each case under a hard deadline.

Ranks are forked from the standard library's fork server, which imports torch once: a rank starts in
tens of milliseconds instead of seconds. The server runs no torch op and touches no CUDA, so a fork
of it is safe. A case ends in one of two ways: every rank returned, or `RankFailure` says what each
rank did (its traceback, the signal that killed it, or its stacks at the deadline).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

# What a rank would otherwise import itself; none of it starts a thread. pytest comes with the
# test's module, as the last three do; torch._dynamo (800 modules, a second) with the first step of
# any optimizer.
PRELOADED = [
    *("torch", "torch.distributed", "torch.utils.checkpoint", "torch._dynamo"),
    *("torch.nn.parallel", "pytest", "zshard", "ranks", "models", "training"),
]

# What comm="auto" stands for; the ranks get it from the test's process.
TRANSPORT = "ZSHARD_COMM"

# Once a rank has failed, the others get this long to tell their side before they are killed.
GRACE_SECONDS = 2.0

# Of either, one look at the ranks takes this at most: what it takes beyond, as a machine stands
# still, is no time that the ranks had.
LOOK_SECONDS = 0.1

# SIGUSR1 to SIGKILL: time for faulthandler to write the stacks.
STACK_SECONDS = 0.3

_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal at the parent's end

_context = multiprocessing.get_context("forkserver")


class RankFailure(AssertionError):
    """A rank raised, was killed by a signal, or was still running at the deadline."""

    def __init__(self, headline: str, ranks: Sequence[_Rank]) -> None:
        """Join the headline and what each rank left behind, the first rank to fail at the top."""
        super().__init__("\n".join([headline, *(rank.story() for rank in ranks)]))


@dataclass
class _Rank:
    """One rank process as the test process sees it."""

    rank: int
    folder: Path
    process: multiprocessing.process.BaseProcess
    at_deadline: bool = False
    reported: bool = False
    value: Any = field(default=None, repr=False)
    error: str | None = None  # the traceback of the exception it raised

    @property
    def output(self) -> Path:
        return self.folder / f"rank{self.rank}.out"

    def collect(self) -> None:
        """Read what the ended process left; a process killed by a signal leaves no report."""
        self.process.join()
        report = self.folder / f"rank{self.rank}.report"
        if report.exists():
            self.value, self.error = pickle.loads(report.read_bytes())
            self.reported = True

    @property
    def failed(self) -> bool:
        return not self.reported or self.error is not None or self.process.exitcode != 0

    def story(self) -> str:
        if self.error is not None:
            what = f"raised:\n{self.error.rstrip()}"
        elif self.at_deadline:
            what = "was still running and was killed; its stacks are in its output below"
        elif self.process.exitcode is not None and self.process.exitcode < 0:
            what = f"was killed by {signal.Signals(-self.process.exitcode).name}"
        elif not self.reported or self.process.exitcode:
            what = f"left no result and exited with status {self.process.exitcode}"
        else:
            return f"--- rank {self.rank} returned"
        text = self.output.read_text(errors="replace").strip() if self.output.exists() else ""
        return f"--- rank {self.rank} {what}" + (f"\n    its output:\n{text}" if text else "")


def start_server() -> None:
    """Start the fork server now, so that its import of torch is not charged to the first case."""
    _context.set_forkserver_preload(PRELOADED)
    # One thread a rank: the server must not start a pool before it forks, and the ranks of a case
    # share the cores of one machine.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(Path(__file__).parent), *([given] if given else [])])
    before = {name: os.environ.get(name) for name in (*threads, "PYTHONPATH")}
    os.environ.update(threads, PYTHONPATH=path)  # the server is told no other path
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    grace: float = GRACE_SECONDS,
    group: bool = True,
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on `world_size` ranks; return their results in rank order.

    Args:
        fn: a top-level function of an importable module; its result must pickle.
        world_size: the number of rank processes.
        args: picklable arguments, the same for every rank.
        timeout: seconds until every rank is killed and the case fails.
        grace: seconds for the others once a rank has failed.
        group: initialise a gloo process group (a FileStore) over the ranks before `fn`.

    Raises:
        RankFailure: a rank raised, was killed by a signal, or outlived the deadline.
    """
    start_server()
    with tempfile.TemporaryDirectory(prefix="zshard-ranks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # Plain pickle, not the process's own: that one would hand tensors over as shared memory.
        call = pickle.dumps((fn, args, os.environ.get(TRANSPORT)))
        ranks = []
        for rank in range(world_size):
            process = _context.Process(
                target=_rank_main, args=(rank, world_size, call, name, timeout, group), daemon=True
            )
            process.start()
            ranks.append(_Rank(rank, folder, process))
        order = _wait(ranks, timeout, grace)
        failed = [rank for rank in order if rank.failed]
        if failed:
            late = [rank.rank for rank in ranks if rank.at_deadline]
            first = failed[0]
            headline = (
                f"{fn.__name__} on {world_size} ranks: rank {first.rank} failed first"
                if not first.at_deadline
                else f"{fn.__name__} on {world_size} ranks: ranks {late} hung past {timeout:g} s"
            )
            raise RankFailure(headline, order)
        return [rank.value for rank in ranks]


def _wait(ranks: Sequence[_Rank], timeout: float, grace: float) -> list[_Rank]:
    """Wait for every rank, killing what outlives the deadline; returns them in order of ending."""
    running = {rank.process.sentinel: rank for rank in ranks}
    ended: list[_Rank] = []
    try:
        late = _wait_for(running, ended, timeout, grace)
    finally:  # also where the test itself is interrupted
        for rank in ranks:
            # The process group of every rank, of the ended ones too: what a rank started ends here.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.ident, signal.SIGKILL)
    for rank in late:
        rank.collect()
    return ended + late


def _wait_for(
    running: dict[int, _Rank], ended: list[_Rank], left: float, grace: float
) -> list[_Rank]:
    """Move ranks from `running` to `ended` for `left` seconds; returns those that are late."""
    while running and left > 0:
        began = time.monotonic()
        ready = connection.wait(list(running), timeout=LOOK_SECONDS)
        left -= min(time.monotonic() - began, LOOK_SECONDS)
        now_ended = [running.pop(sentinel) for sentinel in ready]
        for rank in now_ended:
            rank.collect()
            if rank.failed:
                left = min(left, grace)
        # Of two found ended at once, the one that failed explains the other.
        ended += sorted(now_ended, key=lambda rank: not rank.failed)
    late = list(running.values())
    for rank in late:
        rank.at_deadline = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.ident, signal.SIGUSR1)
    time.sleep(STACK_SECONDS if late else 0.0)
    return late


def _rank_main(
    rank: int, world_size: int, call: bytes, folder: str, timeout: float, group: bool
) -> None:
    """Body of a rank process: output to a file, a belt on the deadline, one report."""
    gc.freeze()  # what the server has imported: a collection that looks at it takes 0.2 s
    os.setsid()  # so that the deadline also kills what the rank itself started
    # The default action of SIGALRM ends the rank even where the test process was killed first, and
    # the end of the server does so at once: ranks at a barrier of a GPU spin. The alarm leaves time
    # for which a machine stands still, as the deadline does, or else its stacks would be lost.
    signal.alarm(2 * int(timeout) + 60)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(Path(folder, f"rank{rank}.out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    value, error = None, None
    try:
        fn, args, transport = pickle.loads(call)
        warnings.filterwarnings("error", "zshard:")  # which a test expects, or nothing does
        if transport is not None:
            os.environ[TRANSPORT] = transport
        with _process_group(rank, world_size, folder, timeout) if group else nullcontext():
            value = fn(rank, world_size, *args)
        payload = pickle.dumps((value, None))
    except BaseException:
        error = traceback.format_exc()
        payload = pickle.dumps((None, error))
    report = Path(folder, f"rank{rank}.report")
    report.with_suffix(".part").write_bytes(payload)
    report.with_suffix(".part").rename(report)
    os._exit(0 if error is None else 1)


@contextlib.contextmanager
def _process_group(rank: int, world_size: int, folder: str, timeout: float) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve costs seconds
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder, "store")), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    dist.barrier()  # one that ends at once would break the connections that others still make
    yield
    # Not on an exception: the report must not wait for peers that will never answer.
    dist.destroy_process_group()


@contextlib.contextmanager
def simulated(rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of many, over torch's fake process group, for a while."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
