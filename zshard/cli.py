"""The command line: ``zshard train``, ``plan``, ``ckpt``, ``bench`` and ``info``."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from . import _C, __version__, bench
from .checkpoint.command import add_ckpt, run_ckpt
from .errors import CommError, Error, InputError
from .gpt import SIZES
from .pictures import require_matplotlib
from .planning.command import add_plan, run_plan
from .strategy import zero_name
from .training.data import check_size, find_files
from .training.job import Place, choose_device
from .training.launch import BAD_INPUT, LOST_PEER, InterruptedJob, choose_ranks, launch
from .training.options import TrainOptions, resolve
from .training.output import check_output
from .training.steptrace import make_folder
from .training.train import train
from .training.trainplan import plan_of
from .words import counted

_FAILED = 1  # exit status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0; 1 failed; 2 bad input; 130 interrupted; 143 stopped by SIGTERM.
    """
    _make_output_sure()
    arguments = list(sys.argv[1:] if argv is None else argv)
    given = vars(_parser().parse_args(arguments))
    command = given.pop("command")
    alone: dict[str, Callable[[], int | None]] = {  # those that start no ranks
        "info": lambda: print(_info()),
        "bench": lambda: bench.run(given["benchmark"], given["arguments"]),
        "ckpt": lambda: run_ckpt(**given),
        "plan": lambda: run_plan(**given),
    }
    if command in alone:
        return _report(alone[command], "zshard")
    try:
        place = Place.from_environment()
    except InputError as error:
        _say(f"zshard: error: {error}")
        return BAD_INPUT
    name = "zshard" if place is None else f"zshard: rank {place.rank}"
    status = _report(lambda: _train(given, arguments, place), name, prints=False)
    if place is not None:
        # gloo's threads may still drop the tensors of the last collective, for which they need the
        # interpreter: a thread that finds it shutting down aborts the process. So it stays up.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    return status


def _report(command: Callable[[], int | None], name: str, *, prints: bool = True) -> int:
    """Run a command, report an error in one line, and return the exit status.

    Args:
        prints: whether the command is for what it prints; else it does not matter who reads that.
    """
    status = _status_of(command, name)
    try:
        sys.stdout.flush()
    except OSError as error:
        _drop_output()
        if prints and status == 0:
            return _refused_output(error, name)
    return status


def _status_of(command: Callable[[], int | None], name: str) -> int:
    try:
        return command() or 0
    except KeyboardInterrupt:
        return _interrupted(InterruptedJob(signal.SIGINT))
    except InterruptedJob as interruption:
        return _interrupted(interruption)
    except Error as error:
        _say(f"{name}: error: {error}")
        if isinstance(error, CommError):
            return LOST_PEER
        return BAD_INPUT if isinstance(error, InputError) else _FAILED
    except OSError as error:  # as it printed, or of a file
        return _refused_output(error, name)


def _refused_output(error: OSError, name: str) -> int:
    if isinstance(error, BrokenPipeError):  # who reads the output has read enough
        return 128 + signal.SIGPIPE
    _say(f"{name}: error: {error}")
    return _FAILED


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


def _make_output_sure() -> None:
    """Let no print fail for a character, or because the output is closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Let the interpreter's end not fail over what could not be written."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupted(job: InterruptedJob) -> int:
    _say(f"\nzshard: {job}; all ranks have ended")
    return job.status


def _train(given: dict[str, object], arguments: Sequence[str], place: Place | None) -> int:
    if "data" in given:
        given["data"] = tuple(cast("list[str]", given["data"]))
    options = resolve(given)
    if place is None:
        # Here what cannot be used is reported once, and before any process starts.
        ranks = choose_ranks(options.ranks, options.device)
        files = find_files(options.data)
        check_size(sum(file.stat().st_size for file in files), len(files), options.seq)
        if options.trace:
            make_folder(options.trace)
        if options.plan:
            plan_of(options, ranks, choose_device(options.device))
        check_output(options.out)
        require_matplotlib("zshard train")  # its plot comes last
        if ranks > 1:
            return launch(ranks, arguments)
        place = Place()
    elif given.get("ranks", place.world_size) != place.world_size:
        raise InputError(
            f"--ranks {given['ranks']}: this job was started with "
            f"{counted(place.world_size, 'rank')}"
        )
    return train(options, place)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zshard", description="Trains models that do not fit on one device."
    )
    parser.add_argument("--version", action="version", version=f"zshard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_train(
        commands.add_parser(
            "train",
            help="train a byte-level GPT on text",
            description="Trains a byte-level GPT on text, sharded over this machine's ranks.",
            # Only what is given explicitly: a resumed run takes the rest from its checkpoint.
            argument_default=argparse.SUPPRESS,
        )
    )
    add_plan(
        commands.add_parser(
            "plan",
            help="predict a model's memory, traffic and time",
            description="What a model takes on every rank, and sends, for every strategy; by "
            "arithmetic, without a GPU or its memory.",
        )
    )
    add_ckpt(
        commands.add_parser(
            "ckpt",
            help="look into checkpoints, and check them",
            description="Looks into checkpoints, without a model or other ranks, and checks them.",
        )
    )
    _add_bench(
        commands.add_parser(
            "bench",
            help="measure zshard beside torch and other libraries",
            description="Measures zshard beside torch and other libraries, all in one run.",
            epilog="zshard bench NAME --help lists the options of one of them.",
            formatter_class=argparse.RawTextHelpFormatter,
        )
    )
    commands.add_parser(
        "info",
        help="versions, how zshard was built, devices and backends",
        description="Prints versions, how zshard was built, devices and backends.",
    )
    return parser


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "benchmark",
        choices=bench.BENCHMARKS,
        help="\n".join(f"{name}: {text}" for name, text in bench.BENCHMARKS.items()),
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="the benchmark's own options"
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    defaults = TrainOptions()

    def add(group: argparse._ArgumentGroup, name: str, kind: type, text: str) -> None:
        value = getattr(defaults, name.replace("-", "_"))
        shown = "" if value is None else f" (default: {value})"
        group.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=text + shown)

    model = parser.add_argument_group("model")
    model.add_argument("--size", choices=SIZES, help=f"preset (default: {defaults.size})")
    add(model, "layers", int, "transformer blocks, in place of the preset's")
    add(model, "width", int, "embedding width, in place of the preset's")
    add(model, "heads", int, "attention heads, in place of the preset's")
    model.add_argument(
        "--tied-head", action="store_true", help="use the embedding's weights as the output layer"
    )
    model.add_argument(
        "--activation-checkpointing",
        action="store_true",
        help="recompute each block in the backward pass: less memory, more time",
    )

    sharding = parser.add_argument_group("sharding")
    add(sharding, "ranks", int, "processes (default: one a GPU, or 2 on a machine without)")
    sharding.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="default: cuda where there is a GPU"
    )
    sharding.add_argument(
        "--strategy",
        type=zero_name,
        choices=("zero3", "zero2", "zero1", "ddp"),
        help="what is sharded; FSDP's names full_shard, shard_grad_op and no_shard are taken, too "
        f"(default: {defaults.strategy})",
    )
    sharding.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        help=f"of the computation; the master is always fp32 (default: {defaults.precision})",
    )

    training = parser.add_argument_group("training")
    training.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help="files, or folders, in which links to other folders are not followed (default: the "
        "source of Python's standard library)",
    )
    add(training, "steps", int, "optimizer steps")
    add(training, "batch", int, "sequences a rank and micro-step")
    add(training, "seq", int, "bytes a sequence")
    add(training, "accumulate", int, "micro-steps whose gradients make one step")
    add(training, "lr", float, "highest learning rate")
    add(training, "weight-decay", float, "of the matrices")
    add(training, "seed", int, "of the weights, the batches and the sample")

    output = parser.add_argument_group("output")
    add(output, "out", str, "folder for metrics, plot and checkpoints (default: runs/DATE-TIME)")
    add(
        output,
        "resume",
        str,
        "go on from this checkpoint, or from the newest whole one of this run's folder",
    )
    add(output, "eval-every", int, "steps between two validations")
    add(output, "save-every", int, "steps between two checkpoints")
    add(output, "keep", int, "checkpoints that stay, the newest")
    add(output, "sample", int, "bytes of text to generate at the end")
    output.add_argument(
        "--trace",
        metavar="FOLDER",
        nargs="?",
        const="",
        help="trace steps 3 to 7 after the start on every rank: a file a rank, and trace.json with "
        "all of them, for ui.perfetto.dev (default: in trace/ of --out); prints what rank 0 waited "
        "for",
    )
    output.add_argument(
        "--plan",
        action="store_true",
        help="print first what a rank will take, and in the end what it took",
    )
    output.add_argument(
        "--machine",
        metavar="NAME",
        help="with --plan, predict the time of a step: see zshard plan --machine and --calibrate",
    )


def _listed(value: object) -> object:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else value


def _info() -> str:
    build = _C.build_info()
    facts: dict[str, object] = {
        "zshard": f"{__version__}, {Path(__file__).parent}",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda or "none: a CPU build",
        "threads": torch.get_num_threads(),
        **{f"build: {key}": _listed(value) for key, value in build.items()},
        "backends": ", ".join(
            name
            for name, there in {
                "gloo": dist.is_gloo_available(),
                "nccl": dist.is_nccl_available(),
                "mpi": dist.is_mpi_available(),
            }.items()
            if there
        ),
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        facts[f"GPU {index}"] = (
            f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, "
            f"sm_{properties.major}{properties.minor}"
        )
    width = max(map(len, facts))
    return "\n".join(f"{key.ljust(width)}  {value}" for key, value in facts.items())
