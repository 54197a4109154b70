"""The options of ``zshard train``: their defaults, their checks, and what a resumed run keeps."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import cast

from ..checkpoint.catalogue import RUN_FOLDER
from ..checkpoint.inventory import as_json
from ..errors import InputError
from ..gpt import SIZES, GPTConfig
from ..precision import Precision
from ..words import counted
from .data import find_files
from .resume import Origin, find_origin

_WARMUP_SHARE, _FINAL_LR_SHARE = 0.05, 0.1
_LARGEST = 2**63 - 1  # of torch's numbers, and seeds

# What a resumed run may change: how it goes on, not what is trained on what; another model, text,
# batch, rate or seed is another run. Some of it changes the losses, and the run says how.
_FREE_ON_RESUME = {
    **dict.fromkeys(("out", "resume", "device", "eval_every", "save_every", "keep", "sample"), ""),
    **dict.fromkeys(("activation_checkpointing", "trace", "plan", "machine"), ""),
    "data": "",  # where the text lies: that it is the same one, its checksum tells
    "steps": "other learning rates",
    "ranks": "other batches",
    "accumulate": "other batches",
    "strategy": "the same batches",
    "precision": "the same batches, rounded otherwise",
}


@dataclass(frozen=True)
class TrainOptions:
    """One training run. The command line's help explains each field."""

    data: tuple[str, ...] = ()
    size: str = "tiny"
    layers: int | None = None  # None: from size
    width: int | None = None
    heads: int | None = None
    tied_head: bool = False
    activation_checkpointing: bool = False
    ranks: int | None = None  # None: the launcher's choice
    device: str = "auto"
    strategy: str = "zero3"
    precision: str = "fp32"
    steps: int = 400
    batch: int = 8  # sequences a rank and micro-step
    seq: int = 128  # bytes a sequence
    accumulate: int = 1
    lr: float = 3e-3
    weight_decay: float = 0.1
    seed: int = 0
    eval_every: int = 50
    save_every: int = 100
    keep: int = 2  # checkpoints
    sample: int = 200  # bytes of generated text
    out: str | None = None  # None: a new folder
    resume: str | None = None
    trace: str | None = None  # None: no trace; "": in the run's folder
    plan: bool = False
    machine: str | None = None  # that times are planned for; None: no times

    def __post_init__(self) -> None:
        for name, least in {
            "steps": 1,
            "batch": 1,
            "seq": 1,
            "accumulate": 1,
            "eval_every": 1,
            "save_every": 1,
            "keep": 1,
            "seed": 0,
            "sample": 0,
        }.items():
            flag, value = name.replace("_", "-"), getattr(self, name)
            if value < least:
                raise InputError(f"--{flag} {value}: it has to be {least} or more")
            if value > _LARGEST:
                raise InputError(f"--{flag} {value}: it has to be {_LARGEST} or less")
        if not 0 < self.lr < math.inf:
            raise InputError(f"--lr {self.lr}: it has to be above 0, and finite")
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(f"--weight-decay {self.weight_decay}: it has to be 0 or more")
        if self.ranks is not None and self.ranks < 1:
            raise InputError(f"--ranks {self.ranks}: it has to be 1 or more")
        if self.size not in SIZES:
            raise InputError(f"--size {self.size}: expected one of {', '.join(SIZES)}")
        if self.machine is not None and not self.plan:
            raise InputError("--machine is what --plan predicts times for: give both")
        for name, value in self.as_json().items():  # which checkpoints record
            as_json(value, f"--{name.replace('_', '-')}")
        self.model_config()

    def model_config(self) -> GPTConfig:
        """The model's shape: that of ``size``, with what is given explicitly in its place."""
        layers, width, heads = SIZES[self.size]
        return GPTConfig(
            layers=layers if self.layers is None else self.layers,
            width=width if self.width is None else self.width,
            heads=heads if self.heads is None else self.heads,
            context=self.seq,
            tied_head=self.tied_head,
            activation_checkpointing=self.activation_checkpointing,
        )

    def policy(self) -> Precision:
        """The precision policy of the wrapped model."""
        return Precision.bf16() if self.precision == "bf16" else Precision()

    def learning_rate(
        self,
        step: int,  # 0 is the first
    ) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        warmup = max(1, round(_WARMUP_SHARE * self.steps))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        share = _FINAL_LR_SHARE + (1 - _FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr * share

    def as_json(self) -> dict[str, object]:
        """What a checkpoint records."""
        return asdict(self)


def resolve(given: Mapping[str, object]) -> TrainOptions:
    """The run that the command line asks for.

    Args:
        given: the options given explicitly. With ``resume`` among them, the checkpoint's options
            are the others.

    Raises:
        InputError: for a bad value, an option that contradicts the checkpoint, or an output
            folder that already holds another run.
    """
    if "resume" not in given:
        options = TrainOptions(**given)  # type: ignore[arg-type]
        if options.out:
            _refuse_used(options.out, options.data)
        _refuse_traces_in_text(options)
        return options
    origin = find_origin(Path(str(given["resume"])))
    saved = options_of(origin)
    for name, value in given.items():
        if name not in _FREE_ON_RESUME and value != getattr(saved, name):
            flag, was = name.replace("_", "-"), getattr(saved, name)
            raise InputError(
                f"--{flag} {value}: the checkpoint {origin.path} was trained "
                f"{'without it' if was is None else f'with --{flag} {was}'}; leave the option out, "
                "or start a new run"
            )
    home = origin.run
    out = given.get("out", home)
    if out is None:
        raise InputError(
            f"--resume {origin.path} is in no run's folder: say with --out where the run goes on"
        )
    if home is None or Path(str(out)).resolve() != Path(home).resolve():
        _refuse_used(str(out), cast("tuple[str, ...]", given.get("data", saved.data)))
    # What is traced and planned is for a run to say, each time.
    anew = {"trace": None, "plan": False, "machine": None}
    options = replace(saved, **{**anew, **given, "out": out})  # type: ignore[arg-type]
    if options.steps <= origin.progress.step:
        raise InputError(
            f"the checkpoint {origin.path} is from after {counted(origin.progress.step, 'step')}: "
            "--steps has to be more"
        )
    _refuse_traces_in_text(options)
    return options


def _refuse_used(out: str, data: tuple[str, ...]) -> None:
    # os.path's: a path that cannot be is no run's folder, and not an OSError either.
    if os.path.exists(Path(out, "metrics.jsonl")) or os.path.isdir(Path(out, RUN_FOLDER)):
        raise InputError(
            f"--out {out} holds a run already: name another folder, or go on with "
            f"--resume {shlex.quote(out)}"
        )
    inside = os.path.join(os.path.realpath(out), "")
    for folder in map(os.path.realpath, data):
        if inside.startswith(os.path.join(folder, "")) and any(
            str(file).startswith(inside) for file in find_files([folder])
        ):
            raise InputError(
                f"--out {out}: --data takes text from this folder, and from no folder of a run, so "
                f"that none could be resumed: name another one, {Path(out, 'run')} for instance"
            )


def _refuse_traces_in_text(options: TrainOptions) -> None:
    place = os.path.realpath(options.trace or "")
    if not options.trace or (options.out and _parts_below(options.out, place) is not None):
        return
    for folder in filter(os.path.isdir, options.data):
        below = _parts_below(folder, place)
        if below is not None and not any(part.startswith(".") for part in below):
            raise InputError(
                f"--trace {options.trace}: --data takes text from this folder, so that the run "
                "could not be resumed: name a folder elsewhere, or none, for one in the run's own"
            )


def _parts_below(folder: str, path: str) -> list[str] | None:
    """What leads from ``folder`` to ``path``, a real one; None if that is not inside."""
    parts = os.path.relpath(path, os.path.realpath(folder)).split(os.sep)
    return None if parts[0] == os.pardir else [part for part in parts if part != os.curdir]


def options_of(origin: Origin) -> TrainOptions:
    """The options of the run that saved a checkpoint, with the ranks that it had."""
    return replace(_from_json(origin.progress.options), ranks=origin.progress.ranks)


def changes_on_resume(saved: TrainOptions, now: TrainOptions) -> str:
    """What of a resumed run differs from the one that saved, and what follows; "" for nothing."""
    changes = [
        f"{name} {getattr(saved, name)} -> {getattr(now, name)} ({effect})"
        for name, effect in _FREE_ON_RESUME.items()
        if effect and getattr(saved, name) != getattr(now, name)
    ]
    return ", ".join(changes)


def _from_json(recorded: Mapping[str, object]) -> TrainOptions:
    known = {field.name for field in fields(TrainOptions)}
    if unknown := sorted(set(recorded) - known):
        raise InputError(
            f"the checkpoint has options this zshard does not know: {', '.join(unknown)}; "
            "resume it with the version that wrote it"
        )
    data = cast("list[str]", recorded["data"])  # JSON has no tuples
    return TrainOptions(**{**recorded, "data": tuple(data)})  # type: ignore[arg-type]
