"""One rank's place in a job, and the few things that all ranks of ``zshard train`` do together.

[Note: save and stop]
SIGTERM, to the launcher (which hands it on) or to any rank, asks for a stop. A rank only notes it:
all have to leave at the same step. What it noted travels with the next mean loss, so all ranks
learn of it at the same step, which they end, save, and leave with STOPPED. Before the first loss is
under way there is nothing to save, and SIGTERM ends a rank as it ends any process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ..errors import CommError, InputError
from ..words import counted

# Exit status of a job that SIGTERM stopped and that has saved all it did: 128 + 15, as of a process
# that SIGTERM ended. To Slurm and Kubernetes the job is not complete, and may be started again.
STOPPED = 128 + signal.SIGTERM
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_DEADLINE = timedelta(minutes=5)  # of one collective; ranks wait for one another no longer
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Place:
    """Where a process stands in its job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # number of the GPU, where there are GPUs

    @classmethod
    def from_environment(cls) -> Place | None:
        """What the launcher or torchrun told this process; None when neither started it.

        Raises:
            InputError: for what is no place in a job.
        """
        told = {name: os.environ[name] for name in _PLACE if name in os.environ}
        if "RANK" not in told or "WORLD_SIZE" not in told:
            return None
        try:
            rank, size, *local = map(int, told.values())
        except ValueError:
            rank = size = 0
        if not 0 <= rank < size:
            raise InputError(
                f"{' '.join(f'{name}={text}' for name, text in told.items())}, in the environment, "
                "is no rank of a job: unset them, or start the ranks with torchrun"
            )
        return cls(rank, size, *(local or [rank]))


def choose_device(device: str) -> str:
    """The kind of device to use, "cuda" or "cpu": as asked, or by what the machine has ("auto").

    Raises:
        InputError: for "cuda" where torch sees no GPU.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InputError(
            f"--device cuda: torch {torch.__version__} sees no GPU here; use --device cpu"
        )
    return ("cuda" if available else "cpu") if device == "auto" else device


class Job:
    """The ranks of a job, seen from one of them.

    Attributes:
        stopping: whether, at the last ``mean``, any rank had been asked to stop; the same on all.
    """

    def __init__(self, place: Place, device: str) -> None:
        """Take the rank's device; join the process group where there are several ranks.

        Raises:
            InputError: for a rank that has no GPU of its own, or is not told where the others are.
            CommError: if the others do not come.
        """
        self.rank = place.rank
        self.world_size = place.world_size
        self.device = torch.device(device)
        if device == "cuda":
            if place.local_rank not in range(gpus := torch.cuda.device_count()):
                raise InputError(
                    f"rank {place.rank} is number {place.local_rank} on this machine (LOCAL_RANK, "
                    f"or RANK where that is missing), which has {counted(gpus, 'GPU')}: "
                    "start as many ranks on each machine as it has, or use --device cpu"
                )
            self.device = torch.device("cuda", place.local_rank)
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            _follow_parent()
            backend = "nccl" if device == "cuda" else "gloo"
            try:
                dist.init_process_group(backend, timeout=_DEADLINE)
            except ValueError as error:
                raise InputError(
                    f"rank {self.rank} of {self.world_size} cannot join the others: {error}. Set "
                    "MASTER_ADDR and MASTER_PORT, unset RANK and WORLD_SIZE, or start the ranks "
                    "with torchrun"
                ) from error
            except RuntimeError as error:
                raise CommError(
                    f"rank {self.rank} of {self.world_size} cannot join the others: {error}"
                ) from error
        self.stopping = False
        self._asked_to_stop = False

    def mean(self, loss: Tensor) -> float:
        """The mean over ranks of a 0-d fp32 tensor, the same bits on every rank.

        With it travels whether a rank was asked to stop; ``stopping`` says so on all ranks then.
        """
        pair = loss.new_zeros(2)  # filled on the device, to be read back at once
        pair[0] = loss
        if self._asked_to_stop:
            pair[1] = 1
        if self.world_size > 1:
            with self._named_errors("the mean loss"):
                dist.all_reduce(pair)
            pair[0] /= self.world_size
        mean, asked = pair.tolist()
        self.stopping = asked > 0
        return float(mean)

    @contextlib.contextmanager
    def stopped_by_sigterm(self) -> Iterator[None]:
        """Have SIGTERM ask for a stop, at the next ``mean``; see [Note: save and stop].

        A second one asks for the same: Slurm sends it to ranks that the launcher tells as well.
        """

        def ask(*_: object) -> None:
            self._asked_to_stop = True

        signal.signal(signal.SIGTERM, ask)
        try:
            yield
        finally:
            # Nothing is left to be done, and the process's exit status says how it was done.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def gather(self, item: object) -> list[object]:
        """Every rank's item, in rank order."""
        if self.world_size == 1:
            return [item]
        items: list[object] = [None] * self.world_size
        with self._named_errors("a report"):
            dist.all_gather_object(items, item)
        return items

    def leave(self) -> None:
        """Leave the process group; for a rank that has done all its work."""
        if self.world_size > 1:
            dist.destroy_process_group()

    def say(self, text: str) -> None:
        """Print on rank 0, above the progress bar.

        Nobody may read any more what it prints, or a disk be full: no reason to end a job.
        """
        if self.rank == 0:
            with contextlib.suppress(OSError):
                tqdm.write(text)

    @contextlib.contextmanager
    def _named_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CommError(
                f"rank {self.rank} of {self.world_size} lost another rank at {what}: {error}"
            ) from error


def _follow_parent() -> None:
    """Let this rank be killed when the process that launched it dies, however it dies.

    What zshard launches has done so before its imports; what torchrun launches comes here first.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
