"""Which peers a step benchmark runs: those asked for, or all that are installed and apply."""

from __future__ import annotations

import importlib
import importlib.util
from typing import NamedTuple

from setting import Setting


class Peer(NamedTuple):
    """What a contestant of MAKERS needs in order to run.

    Args:
        package: what it comes in, where that is not torch.
        low_precision: whether it has a policy of compute and reduce dtypes.
        fake: whether it runs over a group whose collectives leave what they find.
    """

    title: str
    package: str | None = None
    low_precision: bool = True
    fake: bool = False

    def unfit(self, setting: Setting, backend: str) -> str | None:
        """Why it cannot train ``setting``; None if it can."""
        if setting.compute is not None and not self.low_precision:
            return f"{self.title} is not run in bf16: it has no precision policy."
        if backend == "fake" and not self.fake:
            return f"{self.title} is not run over the fake group: it needs what it communicates."
        return None


PEERS = {
    "fsdp2": Peer("FSDP2", fake=True),
    "fsdp1": Peer("FSDP1"),
    "ddp": Peer("DDP", low_precision=False),
    "zero1": Peer("ZeroRedundancyOptimizer", low_precision=False),
    "deepspeed": Peer("DeepSpeed ZeRO-3", package="deepspeed"),
}


class Chosen(NamedTuple):
    """The peers that run, and a sentence about each that does not."""

    names: list[str]
    not_run: list[str]


def choose(against: str | None) -> Chosen:
    """Read ``--against``: names joined by commas, "none", or None for everything installed.

    Raises:
        ValueError: for a name that is none, or a peer that is not installed.
    """
    asked = list(PEERS) if against is None else [] if against == "none" else against.split(",")
    if unknown := [name for name in asked if name not in PEERS]:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(PEERS)}, none")
    names = []
    missing: list[str] = []
    for name in dict.fromkeys(asked):
        reason = _missing(PEERS[name])
        if reason is None:
            names.append(name)
        elif against is not None:
            raise ValueError(reason)
        else:
            missing.append(reason)
    left = [
        f"{peer.title} is not run: not asked for." for n, peer in PEERS.items() if n not in asked
    ]
    return Chosen(names, missing + left)


def _missing(peer: Peer) -> str | None:
    """Why the package cannot be used; None if it can."""
    if peer.package is None:
        return None
    if importlib.util.find_spec(peer.package) is None:
        return f"{peer.title} is not run: not installed; pip install {peer.package}"
    try:
        importlib.import_module(peer.package)
    except Exception as error:  # whatever another package's import may raise
        return f"{peer.title} is not run: import {peer.package} raises {error!r}."
    return None
