"""Which ranks of a group can read each other's memory, and whether they are still alive."""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING, NamedTuple, cast

from .processes import Life, Processes, close_all, descriptor_path

if TYPE_CHECKING:
    from .groups import Ranks


class _Identity(NamedTuple):
    """What a rank tells the others of itself."""

    host: str
    pid: int
    path: str  # of an open file that holds the proof
    proof: bytes  # that a process is the one meant: another host may have one of the same number
    problem: str  # why there is no such file; or ""


def find_each_other(ranks: Ranks) -> Processes | str:
    """The ranks' processes, or why one of them is out of reach. All ranks have to call."""
    host, made, proof = socket.gethostname(), -1, secrets.token_bytes(16)
    problem = _hindrance(ranks, host)
    if not problem:
        try:
            made = os.memfd_create("zshard", os.MFD_CLOEXEC)
            os.write(made, proof)
        except OSError as error:
            problem = str(error)  # too many open files, say
    mine = _Identity(host, os.getpid(), descriptor_path(made), proof, problem)
    lives: list[Life] = []
    for rank, told in enumerate(ranks.all_gather_object(mine)):
        if problem:
            break
        other = cast("_Identity", told)
        try:
            lives.append(Life(other.pid, os.pidfd_open(other.pid)))
            problem = other.problem or _check(other)
        except OSError as error:
            problem = str(error)
        if problem:
            problem = (
                f"on host {host}, the memory of {ranks.name(rank)} on host {other.host} is out of "
                f"reach ({problem})"
            )
    ranks.all_gather_object(None)  # all have looked
    close_all([made] if made >= 0 else [])
    if problem:
        close_all([life.fd for life in lives])
        return problem
    return Processes([ranks.name(rank) for rank in range(ranks.size)], lives)


def _hindrance(ranks: Ranks, host: str) -> str:
    """Why no rank's memory can be shared, whichever rank it is; "" if it can."""
    if ranks.backend == "fake":
        return f"on host {host}, simulated ranks cannot share it"
    linux = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    if not linux or ranks.device.type not in ("cpu", "cuda"):
        return f"on host {host}, ranks with memory of {ranks.device} cannot share it"
    return ""


def _check(other: _Identity) -> str:
    opened = os.open(other.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # whatever it is
    try:
        same = os.pread(opened, len(other.proof), 0) == other.proof
    finally:
        os.close(opened)
    return "" if same else f"process {other.pid} is another one here"
