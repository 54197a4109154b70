"""``zshard plan``: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import get_args

import torch

from .. import bench
from ..errors import InputError
from ..precision import Precision
from ..strategy import zero_name
from ..transports.transport import Transport
from .fit import STRATEGIES
from .footprint import OPTIMIZERS
from .machine import MACHINES, Link
from .planner import plan
from .plot import plot as draw
from .report import report

_PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision.bf16(),
    "bf16/bf16": Precision.bf16(reduce=torch.bfloat16),
    "split": Precision.bf16(reduce=torch.bfloat16, master="split"),
}
_UNITS = {"GB": 1e9, "GiB": 2.0**30, "TB": 1e12, "MB": 1e6, "MiB": 2.0**20}
_DIGITS = 30  # more are no size of anything, and some are no float


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="gpt:7b and other sizes; the config.json of a transformers model, or its folder",
    )
    parser.add_argument(
        "--world", "--ranks", type=int, required=True, metavar="N", help="ranks to shard over"
    )
    parser.add_argument(
        "--strategy",
        type=zero_name,
        choices=STRATEGIES,
        default="zero3",
        help="the one whose bytes, traffic and time are printed, beside all others' (default: "
        "zero3; FSDP's names are taken, too)",
    )
    parser.add_argument(
        "--units", choices=("model", "layer"), help="default: the repeated blocks, as in wrap"
    )
    parser.add_argument(
        "--precision",
        choices=_PRECISIONS,
        default="bf16",
        help="fp32; bf16 (reduced in fp32), bf16/bf16, or split: that with a split master "
        "(default: bf16)",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: adamw")
    parser.add_argument("--prefetch", type=int, default=1, help="default: 1")
    parser.add_argument(
        "--batch",
        type=batch,
        metavar="BxT",
        help="sequences times tokens of a rank, 1x2048 for instance: measures the activations on "
        "fake tensors, and predicts the time of a step",
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="recompute every unit in backward"
    )
    parser.add_argument(
        "--activations", type=size, metavar="SIZE", help="of a rank, where there is no --batch"
    )
    parser.add_argument("--hbm", type=size, metavar="SIZE", help="of a device: 80GB or 80GiB")
    parser.add_argument(
        "--machine",
        default="h100",
        metavar="NAME",
        help=f"{', '.join(MACHINES)} (by their datasheets), or a file of --calibrate "
        "(default: h100)",
    )
    parser.add_argument(
        "--network",
        type=network,
        metavar="RATE",
        help="between all ranks, in place of the machine's: 400Gbit (a second) or 50GB",
    )
    parser.add_argument(
        "--comm",
        choices=get_args(Transport),
        default="auto",
        help="as zshard.wrap takes it; auto: shared memory where --calibrate has measured it",
    )
    parser.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        help="whose buffers reductions take, and what --calibrate measures (default: nccl where "
        "this process sees a GPU and the machine has one, else gloo)",
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw memory by strategy, and the step's timeline (PNG)"
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        nargs="?",
        const="machine.json",
        help="measure this machine while N ranks work on it, write FILE (machine.json if none is "
        "named) for --machine, and plan with it",
    )


def size(text: str) -> int:
    """An argument's type: bytes, as 80GB (8e10) or 80GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS or len(match[1]) > _DIGITS:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of {', '.join(_UNITS)}")
    return round(float(match[1]) * _UNITS[match[2]])


def batch(text: str) -> tuple[int, int]:
    """An argument's type: sequences times tokens, as 4x2048."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text}: expected sequences x tokens, 4x2048 for instance"
        )
    return int(match[1]), int(match[2])


def network(text: str) -> Link:
    """An argument's type: a rate, as 400Gbit or 50GB a second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*Gbit", text)
    try:
        rate = float(match[1]) * 1e9 / 8 if match else float(size(text))
    except argparse.ArgumentTypeError:
        rate = 0.0
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a rate above 0, 400Gbit or 50GB")
    return Link(rate)


def run_plan(
    model: str | None,
    *,
    world: int,
    strategy: str,
    units: str | None,
    precision: str,
    optimizer: str,
    prefetch: int,
    batch: tuple[int, int] | None,
    checkpointing: bool,
    activations: int | None,
    hbm: int | None,
    machine: str,
    network: Link | None,
    comm: Transport,
    backend: str | None,
    as_json: bool,
    plot: str | None,
    calibrate: str | None,
) -> None:
    """Print the plan.

    Raises:
        InputError: for what cannot be planned.
    """
    if calibrate is not None:
        with redirect_stdout(sys.stderr if as_json else sys.stdout):  # the plan alone is JSON
            _calibrate(calibrate, world, batch, backend)
        machine = calibrate
        if model is None:
            return
    if model is None:
        raise InputError("zshard plan: MODEL is missing: gpt:7b, or the path of a config.json")
    made = plan(
        model,
        world,
        strategy=strategy,
        units=units,
        precision=_PRECISIONS[precision],
        optimizer=optimizer,
        prefetch=prefetch,
        batch=batch,
        checkpointing=checkpointing,
        activations=activations,
        hbm=hbm,
        machine=machine,
        network=network,
        comm=comm,
        backend=backend,
    )
    fit = None if hbm is None else made.fit()
    if plot is not None:
        draw(made, Path(plot))
    if as_json:
        found = made.to_dict()
        found["alternatives"] = [each.to_dict() for each in made.alternatives()]
        if fit is not None:
            found["fit"] = fit.to_dict()
        print(json.dumps(found))
        return
    print(report(made, fit, title=f"{model}: {precision}, {optimizer}"))


def _calibrate(file: str, ranks: int, batch: tuple[int, int] | None, backend: str | None) -> None:
    path, folder = Path(file), Path(file).absolute().parent
    if path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise InputError(f"--calibrate {file}: name a file in a folder that can be written to")
    given = ["--ranks", str(ranks), "--output", file]
    if batch is not None:
        given += ["--tokens", str(math.prod(batch))]
    if backend is not None:
        given += ["--backend", backend]
    bench.run("machine", given)
