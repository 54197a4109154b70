"""``zshard ckpt info`` and ``zshard ckpt verify``: what ``inspect`` finds, printed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from tabulate import tabulate
from tqdm import tqdm

from ..errors import CheckpointError
from ..words import counted
from . import inspect
from .catalogue import RUN_FOLDER
from .inspect import Listing, Summary

_EXTRA_CHARACTERS = 300


def add_ckpt(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    actions = parser.add_subparsers(dest="action", required=True)
    info = actions.add_parser(
        "info",
        help="what a checkpoint holds, and whether its files are there",
        description="What a checkpoint holds, and whether its files are there with their sizes "
        "and headers; or one line for each of a folder's checkpoints.",
    )
    what = "a checkpoint, a folder of checkpoints, or that of a run of zshard train"
    info.add_argument("path", metavar="PATH", help=what)
    info.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    verify = actions.add_parser(
        "verify",
        help="read all of a checkpoint and check it",
        description="Reads all of a checkpoint and checks every header and every checksum. Names "
        "what is damaged, and then ends with status 1. Of a folder, each of its checkpoints.",
    )
    verify.add_argument("path", metavar="PATH", help=what)


def run_ckpt(action: str, path: str, *, as_json: bool = False) -> int:
    """Run ``info`` or ``verify``; the exit status.

    Raises:
        CheckpointError: if there is no checkpoint at ``path``, or its manifest is damaged.
    """
    if not inspect.is_checkpoint(path) and os.path.isdir(path):
        inside = os.path.join(path, RUN_FOLDER)
        of_run = os.path.isdir(inside) and not inspect.is_checkpoint(inside)
        listing = inspect.list_folder(inside if of_run else path)
        if not listing.checkpoints and not listing.unreadable:
            raise CheckpointError(f"{path}: is not a checkpoint, and contains none")
        if action == "verify":
            return _verify_each(listing)
        print(json.dumps(listing.as_json(), indent=2) if as_json else _lines(listing))
        return 0
    if action == "verify":
        return _verify(path)
    summary = inspect.summarize(path)
    print(json.dumps(summary.as_json(), indent=2) if as_json else _page(summary))
    return 0


def _lines(listing: Listing) -> str:
    rows = []
    for summary in listing.checkpoints:
        health = "not whole: " + summary.problems[0] if summary.problems else "whole"
        if summary.path == listing.newest:
            health += ", newest"
        ranks, size = counted(summary.ranks, "rank"), _megabytes(summary.nbytes)
        rows.append((os.path.basename(summary.path), summary.saved, ranks, size, health))
    lines = tabulate(rows, tablefmt="plain", disable_numparse=True).splitlines()
    lines += [f"{os.path.basename(path)}  {why}" for path, why in listing.unreadable.items()]
    return "\n".join(lines)


def _page(summary: Summary) -> str:
    lines = [
        ("checkpoint", summary.path),
        ("saved", f"{summary.saved} by {counted(summary.ranks, 'rank')}, id {summary.id}"),
    ]
    if summary.exported:
        lines.append(("kind", "weights only, by zshard.export"))
    lines.append(("parameters", f"{summary.parameters:,}"))
    for name, kind in summary.kinds.items():
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in kind.dtypes.items())
        lines.append(
            (name, f"{_megabytes(kind.nbytes)} in {counted(kind.tensors, 'tensor')} ({dtypes})")
        )
    if summary.optimizer is not None:
        at = "" if summary.step is None else f", after {counted(summary.step, 'step')}"
        lines.append(("updated by", summary.optimizer + at))
    if summary.extra is not None:
        lines.append(("extra", _shortened(json.dumps(summary.extra))))
    for name, nbytes in summary.files.items():
        lines.append(("file", f"{name}, {_megabytes(nbytes)}"))
    whole = "whole, as far as names, sizes and headers tell (zshard ckpt verify reads the data)"
    lines += [("health", problem) for problem in summary.problems or [whole]]
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.2f} MB"


def _shortened(text: str) -> str:
    return text if len(text) <= _EXTRA_CHARACTERS else text[:_EXTRA_CHARACTERS] + "..."


def _verify_each(listing: Listing) -> int:
    for path, why in listing.unreadable.items():
        print(f"{path}: damaged\n  {why}", file=sys.stderr)
    statuses = [_verify_unless_removed(summary.path) for summary in listing.checkpoints]
    return max([*statuses, int(bool(listing.unreadable))])


def _verify_unless_removed(path: str) -> int:
    try:
        return _verify(path)
    except CheckpointError:
        if inspect.is_checkpoint(path):
            raise
        print(f"{path}: another job has removed it meanwhile")
        return 0


def _verify(path: str) -> int:
    total = sum(kind.nbytes for kind in inspect.summarize(path).kinds.values())
    began = time.perf_counter()
    # None: no bar where the output is not a terminal.
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        damages = inspect.verify(path, bar.update)
    seconds = time.perf_counter() - began
    if not damages:
        print(f"{path}: ok, {total:,} bytes of tensors in {seconds:.1f} s")
        return 0
    for damage in damages:
        print(f"{damage.path}: damaged", file=sys.stderr)
        for problem in [*damage.problems, *damage.tensors]:
            print(f"  {problem}", file=sys.stderr)
    return 1
