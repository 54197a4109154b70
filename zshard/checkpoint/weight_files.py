"""Where the tensors of safetensors files lie: those of Hugging Face's models, and zshard's own."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from math import prod
from typing import NamedTuple

from ..errors import CheckpointError
from . import catalogue, files
from .manifest import CHUNK_BYTES, NAME, Manifest, Stored
from .manifest_reading import read_manifest
from .tensorfile import CODES, Slab, read_header

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class WeightFiles(NamedTuple):
    """Some safetensors files of one folder."""

    folder: str
    tensors: dict[str, Stored]
    saves: dict[str, str | None]  # name of a file -> id of the save that wrote it
    seed: int | None = None  # of the checksums of all files that a save wrote; None: unchecked


def find_weights(path: str) -> WeightFiles:
    """The files that ``path`` names, and the tensors in them.

    Raises:
        CheckpointError: if there are none, or they are damaged, or of two saves.
    """
    with suppress(CheckpointError):
        path = catalogue.find(path)  # a checkpoint may be elsewhere while another takes its place
    found = _find(path)
    ids = {save for save in found.saves.values() if save is not None}
    if len(ids) > 1:
        raise CheckpointError(f"{path}: its files are of {len(ids)} saves, mixed: {found.saves}")
    if not ids or not files.exists(os.path.join(found.folder, NAME)):
        return found
    manifest = read_manifest(found.folder)
    return _checked(found, manifest) if ids == {manifest.id} else found


def _checked(found: WeightFiles, manifest: Manifest) -> WeightFiles:
    """``found`` with the checksums of the save that wrote it."""
    saved = {
        (stored.file, name): stored
        for of_kind in manifest.tensors.values()
        for name, stored in of_kind.items()
    }
    tensors = dict(found.tensors)
    for name, there in found.tensors.items():
        if found.saves[there.file] is None:
            continue
        stored = saved.get((there.file, name))
        if stored is None or _place_of(stored) != _place_of(there):
            raise CheckpointError(
                f"{os.path.join(found.folder, there.file)}: {name} is not where {NAME} beside it "
                f"says: the file is damaged, or was changed. Without {NAME} it is not checked."
            )
        tensors[name] = stored
    return found._replace(tensors=tensors, seed=manifest.seed)


def _place_of(stored: Stored) -> tuple[object, ...]:
    """What a file's header says of a tensor."""
    return stored.offset, stored.dtype, stored.shape


def _find(path: str) -> WeightFiles:
    if not files.exists(path):
        raise CheckpointError(f"{path}: does not exist")
    if files.is_folder(path):
        for name in (_SINGLE, _INDEX):  # as transformers choose where both are there
            if files.exists(os.path.join(path, name)):
                return _find(os.path.join(path, name))
        raise CheckpointError(f"{path}: has neither {_INDEX} nor {_SINGLE}")
    folder, name = os.path.split(path)
    if not name.endswith(".json"):
        return _read_file(folder, name)
    weight_map = _read_index(path)
    found = WeightFiles(folder, {}, {})
    for file in sorted(set(weight_map.values())):
        there = _read_file(folder, file)
        wanted = [tensor for tensor, of in weight_map.items() if of == file]
        if lost := sorted(set(wanted) - set(there.tensors)):
            raise CheckpointError(
                f"{os.path.join(folder, file)}: {path} says that {', '.join(lost)} are in it, and "
                "they are not"
            )
        found.tensors.update((tensor, there.tensors[tensor]) for tensor in wanted)
        found.saves.update(there.saves)
    return found


def _read_index(path: str) -> dict[str, str]:
    try:
        weight_map = json.loads(files.read_whole(path))["weight_map"]
        pairs = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: no index of safetensors files: {error!r}") from error
    for tensor, file in pairs:
        if not isinstance(file, str) or os.path.basename(file) != file or not file:
            raise CheckpointError(f"{path}: {tensor} in {file!r}, which is not the name of a file")
    return dict(pairs)


def _read_file(folder: str, name: str) -> WeightFiles:
    with files.File.to_read(os.path.join(folder, name)) as file:
        header = read_header(file)
    tensors = {tensor: _unchecked(name, slab) for tensor, slab in header.slabs.items()}
    return WeightFiles(folder, tensors, {name: header.save})


def _unchecked(file: str, slab: Slab) -> Stored:
    (dtype, shape), offset = slab
    numel, step = prod(shape), CHUNK_BYTES // dtype.itemsize
    ends = tuple(min(begin + step, numel) for begin in range(0, numel, step))
    order = tuple(range(len(shape)))
    return Stored(file, offset, CODES[dtype], shape, order, ends, ("",) * len(ends))
