"""A slow network on one machine: two namespaces joined by a veth pair, each end behind a tc tbf.

Needs root, and iproute2. Loopback moves gigabytes a second and so hides what a network shows:
whether the wire is busy while the cores compute, and how many bytes go over it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zshard.errors import InputError

_INTERFACE = "zshard0"
_CLONE_NEWNET = 0x40000000  # sched.h
# tbf's bucket and queue: 2 ms and 50 ms at 1 Gbit/s, so that TCP keeps the wire full.
_BURST, _LATENCY = "256k", "50ms"


class NetworkError(InputError):
    """The namespaces cannot be made; says why, in the words of the tool that failed."""


@contextmanager
def joined(rate: str | None) -> Iterator[tuple[str, ...]]:
    """Two network namespaces with a wire of ``rate`` (as tc spells it: 1gbit) between them.

    Yields their names; none where ``rate`` is None.

    Raises:
        NetworkError: without root, iproute2, or a kernel that has veth and tbf.
    """
    if rate is None:
        yield ()
        return
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise NetworkError("--network needs ip and tc (Debian: iproute2)")
    if os.geteuid() != 0:
        raise NetworkError("--network needs root, for its network namespaces")
    names = (f"zshard-{os.getpid()}-0", f"zshard-{os.getpid()}-1")
    try:
        for name in names:
            _call("ip", "netns", "add", name)
        ends = [["name", _INTERFACE, "netns", name] for name in names]
        _call("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for number, name in enumerate(names, 1):
            inside = ("ip", "-n", name)
            _call(*inside, "addr", "add", f"10.213.0.{number}/24", "dev", _INTERFACE)
            _call(*inside, "link", "set", _INTERFACE, "up")
            bucket = ("tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY)
            _call("tc", "-n", name, "qdisc", "add", "dev", _INTERFACE, "root", *bucket)
        yield names
    finally:
        for name in names:  # and with them the pair
            with suppress(NetworkError):
                _call("ip", "netns", "del", name)


def _call(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {result.stderr.strip()}")


def enter(namespace: str) -> None:
    """Have the sockets that this process opens from now on lie in ``namespace``; for gloo too."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise NetworkError(f"setns to {namespace}: {os.strerror(ctypes.get_errno())}")
    os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE


def entered() -> bool:
    """Whether this process is at an end of such a wire."""
    return os.environ.get("GLOO_SOCKET_IFNAME") == _INTERFACE


def sent_bytes() -> int:
    """Bytes that this process's end of the wire has sent, headers included; 0 without a wire."""
    if not entered():
        return 0
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, counts = line.partition(":")
        if interface.strip() == _INTERFACE:
            return int(counts.split()[8])
    raise NetworkError(f"this process's namespace has no interface {_INTERFACE}")
