"""What the benchmarks' command lines have in common: options, their checks, and the outputs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from environment import write_json

LOOK = "This is only a look (--quick): fewer cases and rounds than a claim needs."


_OPTIONS: dict[str, dict[str, Any]] = {
    "device": {"choices": ("cpu", "cuda"), "default": "cpu", "help": "default: cpu"},
    "quick": {"action": "store_true", "help": "under a minute: only a look"},
    "json": {"metavar": "FILE", "help": "write every figure to FILE"},
    "plot": {"metavar": "FILE.png", "help": "draw the figures into FILE.png"},
}


def make_parser(
    description: str, program: str | None, options: Iterable[str] = _OPTIONS
) -> argparse.ArgumentParser:
    """A parser with those of the benchmarks' common ``options`` that this one has."""
    # A usage of twenty options would hide the error below it.
    parser = argparse.ArgumentParser(program, "%(prog)s [options]", description)
    for option in options:
        parser.add_argument(f"--{option}", **_OPTIONS[option])
    return parser


def positive(text: str) -> int:
    """An argument's type: a whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: it has to be a whole number, 1 or more")
    return int(text)


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse, before anything is measured, what would fail afterwards."""
    if getattr(arguments, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here; use --device cpu")
    if getattr(arguments, "plot", None):
        if Path(arguments.plot).suffix != ".png":
            parser.error(f"--plot {arguments.plot}: the file's name has to end with .png")
        import matplotlib  # noqa: F401
    for option in ("json", "plot"):
        if path := getattr(arguments, option, None):
            folder = Path(path).parent
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                parser.error(f"--{option} {path}: {folder} cannot be made: {error.strerror}")
            if Path(path).is_dir() or not os.access(folder, os.W_OK):
                parser.error(f"--{option} {path}: name a file in a folder that can be written to")


def write(
    arguments: argparse.Namespace,
    report: dict[str, object],
    draw: Callable[[Path], None] | None = None,
) -> None:
    """Write the files that the command line asks for, and say so."""
    if arguments.json:
        write_json(arguments.json, report)
        print(f"every figure: {arguments.json}")
    if draw is not None and arguments.plot:
        draw(Path(arguments.plot))
        print(f"plot: {arguments.plot}")
