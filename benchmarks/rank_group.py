"""Starts the ranks of a step benchmark on this machine, and ends all of them if one fails."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import cast

import network
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from zshard.errors import InputError
from zshard.training.job import PR_SET_PDEATHSIG

_DEADLINE = timedelta(minutes=5)  # of one collective
_KEPT, _REFUSED = "kept.json", "refused.txt"
_FAILED = (mp.ProcessRaisedException, mp.ProcessExitedException)  # a rank has
_FOLDER: list[Path] = []  # of a rank: where its reports go

RankMain = Callable[..., dict[str, object]]


def run_ranks(
    main: RankMain,  # a top-level function: (*arguments) -> rank 0's report
    arguments: tuple[object, ...],
    *,
    ranks: int,
    backend: str,
    device: torch.device,
    namespaces: Sequence[str] = (),
) -> dict[str, object]:
    """Call ``main`` on every rank of a process group; return what rank 0 returned.

    Ended by SIGTERM or Ctrl-C, or where a rank fails, it returns what rank 0 has given ``keep``
    last, if it has, with "because": why that is not all.

    Raises:
        InputError: if a rank has raised it.

    Args:
        backend: "gloo", "nccl", or "fake": one process that plays rank 0 of ``ranks``, whose
            collectives do nothing.
        namespaces: the network namespace of each rank; none: all in this process's own.
    """
    # One thread a rank, as the protocol asks. The environment is read when torch is imported.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="zshard-bench-") as folder:
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the ranks: they are ended
        try:
            context = mp.start_processes(
                _rank,
                args=(os.getpid(), main, arguments, ranks, backend, device, namespaces, folder),
                nprocs=1 if backend == "fake" else ranks,
                join=False,
                start_method="spawn",
            )
        finally:
            signal.signal(signal.SIGINT, interrupt)
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            while not context.join():
                pass
        except (SystemExit, KeyboardInterrupt, *_FAILED) as error:
            _end(context)
            if not (kept := Path(folder, _KEPT)).exists():
                if (refused := Path(folder, _REFUSED)).exists():
                    raise InputError(refused.read_text()) from None
                raise
            because = "by SIGTERM" if isinstance(error, SystemExit) else "by SIGINT"
            if isinstance(error, _FAILED):
                print(error, file=sys.stderr)
                because = f"by an error: {str(error).rstrip().splitlines()[-1]}"
            return {**cast("dict[str, object]", json.loads(kept.read_text())), "because": because}
        finally:
            _end(context)
            signal.signal(signal.SIGTERM, before)
        return cast("dict[str, object]", json.loads(Path(folder, "report.json").read_text()))


def _end(context: mp.ProcessContext) -> None:
    """End all ranks, those of which nobody has heard that they have ended."""
    for process in context.processes:
        process.kill()
        process.join()
    for path in context.error_files:  # torch removes those of ranks that it has joined
        Path(path).unlink(missing_ok=True)


def keep(report: dict[str, object]) -> None:
    """Keep what has been measured so far, whatever becomes of the rest; rank 0's counts."""
    if dist.get_rank() == 0:
        part = _FOLDER[0] / f"{_KEPT}.part"
        part.write_text(json.dumps(report))
        part.rename(_FOLDER[0] / _KEPT)


def _rank(
    rank: int,
    launcher: int,  # its process id
    main: RankMain,
    arguments: tuple[object, ...],
    ranks: int,
    backend: str,
    device: torch.device,
    namespaces: Sequence[str],
    folder: str,
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # as the launcher dies, however
    if os.getppid() != launcher:  # it has, while this rank imported
        os._exit(1)
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed rank would leave
    _FOLDER.append(Path(folder))
    if namespaces:
        network.enter(namespaces[rank])
    if device.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store: dist.Store = FakeStore()
    else:
        if Path("/sys/class/net/lo").exists():  # else gloo looks the host's name up
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(str(Path(folder, "store")), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=_DEADLINE)
    if backend == "gloo":
        dist.barrier()  # one that ends at once would break the connections that others still make
    try:
        report = main(*arguments)
    except InputError as error:
        Path(folder, _REFUSED).write_text(str(error))
        raise
    if rank == 0:
        Path(folder, "report.json").write_text(json.dumps(report))
    with suppress(RuntimeError):  # the report is written; a peer may be gone already
        dist.destroy_process_group()
    # gloo's threads may still drop the tensors of the last collective, for which they need the
    # interpreter: a thread that finds it shutting down aborts the process. So it stays up, and this
    # ends the process after all else that multiprocessing has to clean up.
    with suppress(OSError):  # nobody reads any more what it has printed
        sys.stdout.flush()
        sys.stderr.flush()
    Finalize(None, os._exit, args=(0,), exitpriority=-1)
