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
        units: whether it gathers the units that the model is cut into.
        low_precision: whether it has a policy of compute and reduce dtypes.
        fake: whether it runs over a group whose collectives leave what they find.
        alone: whether it does at one rank what it does at several.
    """

    title: str
    package: str | None = None
    units: bool = False
    low_precision: bool = False
    fake: bool = False
    alone: bool = True

    def unfit(self, setting: Setting, backend: str, ranks: int) -> str | None:
        """Why it cannot train ``setting``; None if it can."""
        if setting.model == "units" and not self.units:
            return f"{self.title} is not run on the tiny units: it does not gather them."
        if setting.compute is not None and not self.low_precision:
            return f"{self.title} is not run in bf16: it has no precision policy."
        if backend == "fake" and not self.fake:
            return f"{self.title} is not run over the fake group: it needs what it communicates."
        if ranks == 1 and not self.alone:
            return f"{self.title} is not run on one rank: there it shards nothing."
        return None


PEERS = {
    "fsdp2": Peer("FSDP2", units=True, low_precision=True, fake=True),
    "fsdp1": Peer("FSDP1", units=True, low_precision=True, alone=False),
    "ddp": Peer("DDP"),
    "zero1": Peer("ZeroRedundancyOptimizer"),
    # It keeps parameters below 100,000 elements whole, which all of the tiny units are.
    "deepspeed": Peer("DeepSpeed ZeRO-3", package="deepspeed", low_precision=True),
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
            raise ValueError(f"{name}: {reason} Leave it out, or install it.")
        else:
            missing.append(reason)
    if left := [peer.title for name, peer in PEERS.items() if name not in asked]:
        missing.append(f"Not run, as not asked for: {', '.join(left)}.")
    return Chosen(names, missing)


def _missing(peer: Peer) -> str | None:
    """Why the package cannot be used; None if it can."""
    if peer.package is None:
        return None
    if importlib.util.find_spec(peer.package) is None:
        return f"{peer.title} is not run: {peer.package} is not installed."
    try:
        importlib.import_module(peer.package)
    except Exception as error:  # whatever another package's import may raise
        return f"{peer.title} is not run: import {peer.package} raises {error!r}."
    return None
