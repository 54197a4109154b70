"""Starts the ranks of a job on this machine, with torch's elastic agent underneath.

Each rank is a process of its own: the same command line again, with RANK and WORLD_SIZE in its
environment. So a job that ``torchrun -m zshard train`` starts takes the same path.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..errors import Error, InputError
from ..words import counted
from .job import PR_SET_PDEATHSIG, STOPPED, choose_device

# Exit statuses of a rank.
BAD_INPUT = 2
LOST_PEER = 3  # it only noticed another one's end
_CPU_RANKS = 2
_POLL_SECONDS = 0.1
_TELL_SECONDS = 1.0

# What a rank runs, once it has the launcher's sys.path, with its process id as the first argument.
# `python -m zshard` would look for zshard in the current folder first, and in a checkout find the
# one without the extension. The ranks import what the launcher does, zshard and torch, from where
# it does; that takes seconds, so before it they see to it that they end with the launcher, and end
# if it has ended already.
_BOOTSTRAP = f"""
import ctypes, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit({LOST_PEER})
from zshard.cli import main
sys.exit(main())
"""


class LaunchError(Error):
    """A rank ended the job; the message names it and says how it ended."""


class InterruptedJob(Error):
    """A signal ended the job; ``status`` is the exit status a shell expects for it."""

    def __init__(self, received: signal.Signals) -> None:
        self.status = 128 + received
        by_hand = received != signal.SIGTERM
        super().__init__("interrupted" if by_hand else "ended by SIGTERM, and nothing was saved")


def choose_ranks(ranks: int | None, device: str) -> int:
    """How many ranks to start: as asked, or one a GPU, or two on a machine without one.

    Raises:
        InputError: for more ranks than GPUs, or GPUs asked for where there are none.
    """
    gpus = torch.cuda.device_count() if choose_device(device) == "cuda" else 0
    if ranks is None:
        return gpus or _CPU_RANKS
    if gpus and ranks > gpus:
        raise InputError(
            f"--ranks {ranks}: this machine has {counted(gpus, 'GPU')} and NCCL takes one rank on "
            f"each; use --ranks {gpus}, or --device cpu"
        )
    return ranks


def launch(
    ranks: int,
    arguments: Sequence[str],  # of the command line, after the program's name
) -> int:
    """Run the command line on ``ranks`` processes and return when all have ended well.

    Returns:
        0, or STOPPED if SIGTERM, to this process or to a rank, had them save and stop.

    Raises:
        LaunchError: when a rank failed; the others have been ended.
        InputError: likewise, if it was for bad input.
        InterruptedJob: after Ctrl-C or SIGHUP (but not under nohup), or SIGTERM before there was
            anything to save; all ranks have ended.
    """
    told, ended = False, threading.Event()

    def tell_ranks() -> None:
        # Again and again: some may not have been started yet, and a second SIGTERM asks no more
        # than the first.
        while not ended.is_set():
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            ended.wait(_TELL_SECONDS)

    def on_sigterm(*_: object) -> None:
        nonlocal told
        if not told:
            told = True
            threading.Thread(target=tell_ranks, daemon=True).start()

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        statuses = _run_agent(ranks, arguments)
    finally:
        ended.set()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the ranks have ended: so does this process
    how = set(statuses.values())
    if not how:
        return 0
    if STOPPED in how and how <= {STOPPED, -signal.SIGTERM}:
        return STOPPED
    # The agent ends ranks by SIGTERM too, but only once another has ended in a way of its own.
    by_sigterm = {-signal.SIGTERM, LOST_PEER} if told else {-signal.SIGTERM}
    if -signal.SIGTERM in how and how <= by_sigterm:
        raise InterruptedJob(signal.SIGTERM)
    raise (InputError if BAD_INPUT in how else LaunchError)(describe_failure(statuses))


def _run_agent(ranks: int, arguments: Sequence[str]) -> dict[int, int]:
    """Run the ranks to their ends; the exit statuses other than 0, by rank."""
    # Importing the agent takes a second, and only the process that launches needs it.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"zshard-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=_POLL_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        # Not SIGTERM: the agent would kill the ranks 30 s after it, saved or not. How long a job
        # has is the scheduler's to say, whose SIGKILL ends this process and with it the ranks.
        signals_to_handle=",".join(_signals_that_end()),
    )
    # Before anything else is imported, and as a list: a folder may have a colon in its name.
    on_path = f"import sys; sys.path[:] = {[*map(str, sys.path)]!a}"
    command = ("-u", "-c", on_path + _BOOTSTRAP, str(os.getpid()), *arguments)
    # The agent's loggers tell how it ends the ranks; the error raised here says why, in one line.
    logging.disable(logging.ERROR)
    try:
        elastic_launch(config, sys.executable)(*command)
    except SignalException as error:
        raise InterruptedJob(error.sigval) from None
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    finally:
        logging.disable(logging.NOTSET)
    return {}


def _signals_that_end() -> list[str]:
    """Names of the signals at which the agent ends the job, unsaved."""
    # The agent would handle SIGHUP even under nohup, which has the ranks ignore it like this
    # process: so that a job goes on when its terminal is closed.
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ["SIGHUP"]
    return ["SIGINT", *hangup, "SIGQUIT"]


def _children() -> list[int]:
    """Process ids of the ranks that run."""
    own = os.getpid()
    return [int(p) for p in Path(f"/proc/{own}/task/{own}/children").read_text().split()]


def describe_failure(
    statuses: Mapping[int, int],  # rank -> exit status, negative for a signal
) -> str:
    """Names the rank that ended the job, and not one that only noticed."""

    def suspicion(rank: int) -> int:
        status = statuses[rank]
        if status == -signal.SIGTERM:  # how the agent ends the others
            return 3
        return 2 if status == LOST_PEER else int(status > 0)

    rank = min(statuses, key=suspicion)
    status = statuses[rank]
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    else:
        how = f"ended with exit status {status}; its error is above"
    return f"rank {rank} {how}. The other ranks have been ended."
