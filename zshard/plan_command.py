"""``zshard plan``: a plan for every strategy, as a table or JSON."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence

import torch

from .errors import InputError
from .footprint import STATES
from .plan import STRATEGIES, Fit, Plan, plan
from .precision import Precision

_PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision.bf16(),
    "bf16/bf16": Precision.bf16(reduce=torch.bfloat16),
    "split": Precision.bf16(reduce=torch.bfloat16, master="split"),
}
_UNITS = {"": 1.0, "GB": 1e9, "GiB": 2.0**30, "TB": 1e12, "MB": 1e6, "MiB": 2.0**20}


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="gpt:7b and other sizes; the config.json of a transformers model, or its folder",
    )
    parser.add_argument("--world", type=int, required=True, metavar="N", help="ranks to shard over")
    parser.add_argument("--strategy", choices=STRATEGIES, default="zero3", help="default: zero3")
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
    parser.add_argument("--optimizer", choices=STATES, default="adamw", help="default: adamw")
    parser.add_argument("--prefetch", type=int, default=1, help="default: 1")
    parser.add_argument(
        "--activations", type=size, default=0, metavar="SIZE", help="of a rank, to be added"
    )
    parser.add_argument("--hbm", type=size, metavar="SIZE", help="of a device: 80GB or 80GiB")
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="default: by this machine")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")


def size(text: str) -> int:
    """An argument's type: bytes, as 80GB (8e10) or 80GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS:
        units = ", ".join(filter(None, _UNITS))
        raise argparse.ArgumentTypeError(f"{text}: expected a number of bytes, or of {units}")
    return round(float(match[1]) * _UNITS[match[2]])


def run_plan(
    model: str,
    *,
    world: int,
    strategy: str,
    units: str | None,
    precision: str,
    optimizer: str,
    prefetch: int,
    activations: int,
    hbm: int | None,
    backend: str | None,
    as_json: bool,
) -> None:
    """Print the plan.

    Raises:
        InputError: for what cannot be planned.
    """
    if hbm == 0:
        raise InputError("--hbm 0: expected the bytes of a device, 80GB for instance")
    made = plan(
        model,
        world,
        strategy=strategy,
        units=units,
        precision=_PRECISIONS[precision],
        optimizer=optimizer,
        prefetch=prefetch,
        activations=activations,
        backend=backend,
    )
    fit = None if hbm is None else made.fit(hbm)
    if as_json:
        print(json.dumps({**made.to_dict(), **({} if fit is None else _fit_as_dict(fit))}))
        return
    print(
        f"{model}: {made.parameters / 1e9:,.2f}e9 parameters in {len(made.units)} units, "
        f"{precision}, {optimizer}, over {world} ranks"
    )
    print(_table(made, fit))
    sent = sum(each.bytes * each.count for each in made.collectives)
    count = sum(each.count for each in made.collectives)
    print(f"A rank sends {sent / 1e9:,.3f} GB a step in {count} collectives ({strategy}).")
    if not activations:
        print("Activations are not counted: --activations adds a rank's.")
    if fit is not None:
        best = "none of the strategies fits" if fit.strategy is None else f"{fit.strategy} fits"
        print(f"Into {fit.hbm / 1e9:,.1f} GB over {world} ranks: {best}.")


def _fit_as_dict(fit: Fit) -> dict[str, object]:
    peaks = {name: row.peak for name, row in fit.plans.items()}
    found = {"hbm": fit.hbm, "strategy": fit.strategy, "peak": peaks, "devices": fit.devices}
    return {"fit": found}


def _table(made: Plan, fit: Fit | None) -> str:
    """A line for each strategy, in GB."""
    columns = ["parameters", "gradients", "master", "optimizer", "states"]
    heads = ["GB (1e9) a rank", *columns, "full buffers", "reduce buffers", "peak"]
    if fit is not None:
        heads += ["fits", "fewest devices"]
    lines: list[Sequence[str]] = [heads]
    for name in STRATEGIES:
        row = made.with_strategy(name)
        held = [getattr(row.holding, column) for column in columns]
        figures = [*held, row.buffers.full, row.buffers.reduce, row.peak]
        line = [
            name + (" *" if name == made.strategy else ""),
            *(f"{n / 1e9:,.3f}" for n in figures),
        ]
        if fit is not None:
            devices = fit.devices[name]
            fewest = "none will do" if devices is None else str(devices)
            line += ["yes" if row.peak <= fit.hbm else "no", fewest]
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )
