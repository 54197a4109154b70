"""The checkpoint of ``zshard train``: each rank's shards as they are, for a run with as many ranks.

A snapshot is a folder ``step-00000050`` with one safetensors file a rank and one ``run.json``. It
is written under another name and renamed when it is whole: a folder with that name can be trusted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .errors import InputError

_FORMAT = 1
_HEADER = "run.json"
_KEPT = 2  # newest snapshots that stay; older ones are deleted after a new one is whole


class OptimizerState(TypedDict):
    """torch's ``Optimizer.state_dict()``: states by parameter number, and the groups."""

    state: dict[int, dict[str, object]]
    param_groups: list[dict[str, object]]


class _Skeleton(TypedDict):
    """An OptimizerState without its tensors, as JSON has it."""

    state: dict[str, dict[str, object]]
    param_groups: list[dict[str, object]]


@dataclass(frozen=True)
class Header:
    """What ``run.json`` holds: all that is the same on every rank."""

    step: int  # steps taken
    ranks: int
    checksum: int  # of the text, Corpus.checksum
    options: dict[str, object]  # TrainOptions.as_json()
    format: int = _FORMAT


@dataclass(frozen=True)
class RankState:
    """What one rank's file holds."""

    master: dict[str, Tensor]  # parameter name -> 1-D fp32, the part this rank owns
    optimizer: OptimizerState  # of the same parts


def find_snapshot(path: Path) -> Path:
    """The snapshot that ``path`` names: itself, or the newest of a run's output folder.

    Raises:
        InputError: when there is none.
    """
    if (path / _HEADER).exists():
        return path
    found = _whole(path / "checkpoints")
    if not found:
        raise InputError(f"--resume {path}: there is no checkpoint in there")
    return found[-1]


def _whole(folder: Path) -> list[Path]:
    return sorted(header.parent for header in folder.glob(f"step-*/{_HEADER}"))


def read_header(snapshot: Path) -> Header:
    """Reads ``run.json``.

    Raises:
        InputError: when it is not one this version can read.
    """
    file = snapshot / _HEADER
    try:
        header = Header(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    if header.format != _FORMAT:
        raise InputError(f"{file} has format {header.format}; this zshard reads {_FORMAT}")
    return header


def save_snapshot(
    folder: Path,  # the run's checkpoints
    header: Header,
    state: RankState,
    *,
    rank: int,
    barrier: Callable[[], None],  # returns when every rank has called it
) -> Path:
    """Writes a snapshot; every rank calls this. Returns its path, the same on each."""
    final = folder / f"step-{header.step:08d}"
    partial = folder / f".{final.name}.partial"
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    _write_rank(partial / _rank_file(rank, header.ranks), state)
    barrier()
    if rank == 0:
        _write_durably(partial / _HEADER, json.dumps(asdict(header), indent=1).encode())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync(folder)
        for old in _whole(folder)[:-_KEPT]:
            shutil.rmtree(old)
    barrier()
    return final


def load_rank(
    snapshot: Path,
    *,
    rank: int,
    ranks: int,
) -> RankState:
    """Reads the state of one rank.

    Raises:
        InputError: for another number of ranks than the snapshot's, or a damaged file.
    """
    header = read_header(snapshot)
    if header.ranks != ranks:
        raise InputError(
            f"the checkpoint {snapshot} holds the shards of {header.ranks} ranks and this job "
            f"has {ranks}: resume it with --ranks {header.ranks}"
        )
    file = snapshot / _rank_file(rank, ranks)
    master: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            skeleton = json.loads(opened.metadata()["optimizer"])
            for key in opened.keys():  # noqa: SIM118 (a safe_open is not a mapping)
                kind, name = key.split(":", 1)
                (master if kind == "master" else tensors)[name] = opened.get_tensor(key)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    return RankState(master, _join(skeleton, tensors))


def _rank_file(rank: int, ranks: int) -> str:
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def _write_rank(file: Path, state: RankState) -> None:
    skeleton, tensors = _split(state.optimizer)
    stored = {f"master:{name}": part for name, part in state.master.items()}
    stored |= {f"optimizer:{name}": part for name, part in tensors.items()}
    stored = {name: part.detach().cpu() for name, part in stored.items()}
    save_file(stored, file, metadata={"optimizer": json.dumps(skeleton)})
    with file.open("rb") as written:
        os.fsync(written.fileno())


def _write_durably(file: Path, content: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _split(optimizer: OptimizerState) -> tuple[_Skeleton, dict[str, Tensor]]:
    """Takes the tensors out of an optimizer's state; what is left fits into JSON."""
    tensors: dict[str, Tensor] = {}
    states: dict[str, dict[str, object]] = {}
    for number, state in optimizer["state"].items():
        plain: dict[str, object] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{number}.{key}"] = value
            else:
                plain[key] = value
        states[str(number)] = plain
    return {"state": states, "param_groups": optimizer["param_groups"]}, tensors


def _join(skeleton: _Skeleton, tensors: dict[str, Tensor]) -> OptimizerState:
    """The reverse of ``_split``."""
    states = {int(number): dict(plain) for number, plain in skeleton["state"].items()}
    for name, tensor in tensors.items():
        number, key = name.split(".", 1)
        states[int(number)][key] = tensor
    groups: list[dict[str, object]] = [
        # The one list in a group is its parameters' numbers; JSON made lists of the tuples.
        {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in group.items()}
        for group in skeleton["param_groups"]
    ]
    return {"state": states, "param_groups": groups}
