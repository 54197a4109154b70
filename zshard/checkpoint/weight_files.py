"""Where the tensors of safetensors files lie: those of Hugging Face's models, and zshard's own."""

from __future__ import annotations

import json
import os
from math import prod
from typing import NamedTuple

from ..errors import CheckpointError
from . import files
from .manifest import CHUNK_BYTES, MAX_NBYTES, NAME, Stored
from .manifest_reading import read_manifest
from .tensorfile import CODES, Slab, read_header

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class WeightFiles(NamedTuple):
    """Some safetensors files of one folder."""

    folder: str
    tensors: dict[str, Stored]
    seed: int | None  # of the tensors' checksums; None: they have none


def find_weights(path: str) -> WeightFiles:
    """The files that ``path`` names, and the tensors in them.

    Raises:
        CheckpointError: if there are none, or they are damaged.
    """
    saves: set[str | None] = set()
    folder, found = _find(path, saves)
    save = saves.pop() if len(saves) == 1 else None
    if save is None or not files.exists(os.path.join(folder, NAME)):
        return WeightFiles(folder, found, None)
    manifest = read_manifest(folder)
    if manifest.id != save:
        return WeightFiles(folder, found, None)
    checked = {
        (stored.file, name): stored
        for of_kind in manifest.tensors.values()
        for name, stored in of_kind.items()
    }
    tensors = {name: checked.get((each.file, name), each) for name, each in found.items()}
    return WeightFiles(folder, tensors, manifest.seed)


def _find(path: str, saves: set[str | None]) -> tuple[str, dict[str, Stored]]:
    """The folder and the tensors; ``saves`` takes the ids of the saves that wrote the files."""
    if not files.exists(path):
        raise CheckpointError(f"{path}: does not exist")
    if files.is_folder(path):
        for name in (_INDEX, _SINGLE):
            if files.exists(os.path.join(path, name)):
                return _find(os.path.join(path, name), saves)
        raise CheckpointError(f"{path}: has neither {_INDEX} nor {_SINGLE}")
    folder, name = os.path.split(path)
    if not name.endswith(".json"):
        return folder, _stored_in(folder, name, saves)
    weight_map = _read_index(path)
    found: dict[str, Stored] = {}
    for file in sorted(set(weight_map.values())):
        there = _stored_in(folder, file, saves)
        wanted = [tensor for tensor, of in weight_map.items() if of == file]
        if lost := sorted(set(wanted) - set(there)):
            raise CheckpointError(
                f"{os.path.join(folder, file)}: {path} says that {', '.join(lost)} are in it, and "
                "they are not"
            )
        found.update((tensor, there[tensor]) for tensor in wanted)
    return folder, found


def _read_index(path: str) -> dict[str, str]:
    try:
        weight_map = json.loads(files.read_whole(path, limit=MAX_NBYTES))["weight_map"]
        pairs = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: no index of safetensors files: {error!r}") from error
    for tensor, file in pairs:
        if not isinstance(file, str) or os.path.basename(file) != file or not file:
            raise CheckpointError(f"{path}: {tensor} in {file!r}, which is not the name of a file")
    return dict(pairs)


def _stored_in(folder: str, name: str, saves: set[str | None]) -> dict[str, Stored]:
    with files.File.to_read(os.path.join(folder, name)) as file:
        header = read_header(file)
    saves.add(header.save)
    return {tensor: _unchecked(name, slab) for tensor, slab in header.slabs.items()}


def _unchecked(file: str, slab: Slab) -> Stored:
    numel, step = prod(slab.shape), CHUNK_BYTES // slab.dtype.itemsize
    ends = tuple(min(begin + step, numel) for begin in range(0, numel, step))
    order = tuple(range(len(slab.shape)))
    return Stored(file, slab.offset, CODES[slab.dtype], slab.shape, order, ends, ("",) * len(ends))
