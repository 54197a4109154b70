"""``zshard bench``: starts the benchmarks, which are scripts of their own in benchmarks/."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from .pictures import require_matplotlib

BENCHMARKS = {
    "ops": "kernels beside torch's",
    "step": "whole training steps beside FSDP2, FSDP1, DDP, ZeroRedundancyOptimizer, DeepSpeed",
    "collectives": "gathers and reductions, shared memory beside gloo",
    "memory": "peak resident memory of a rank, beside FSDP2, FSDP1 and DDP",
    "breakdown": "where the time of zshard's step goes",
    "bytes": "what a step moves in memory, counted, beside FSDP2",
    "machine": "how fast this machine computes, moves and sends, for zshard plan --machine",
    "plan": "step times that zshard plan predicts, over measured ones",
    "checkpoint": "saving and loading, beside torch.distributed.checkpoint and a plain copy",
}


def run(
    name: str,  # of BENCHMARKS
    arguments: Sequence[str],  # those of the benchmark itself
) -> None:
    """Run one benchmark.

    Raises:
        MissingPackage: naming the package and how to install it.
        SystemExit: with status 2, for arguments that cannot be used.
    """
    # The modules import each other by their bare names, as they do when started as scripts; the
    # ranks that they start inherit the path.
    sys.path.insert(0, str(_folder()))
    try:
        import_module(f"bench_{name}").main(arguments, f"zshard bench {name}")
    except ModuleNotFoundError as error:
        if error.name == "matplotlib":
            require_matplotlib(f"bench {name}")
        raise


def _folder() -> Path:
    """Where the benchmarks are: zshard/benchmarks in a wheel, beside zshard/ in a checkout."""
    package = Path(__file__).parent
    installed = package / "benchmarks"
    return installed if installed.is_dir() else package.parent / "benchmarks"
