"""How a manifest is read: strictly, because nobody knows who has written it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

from ..errors import CheckpointError
from ..words import counted
from .files import MAX_NBYTES, File, passing_over, read_whole
from .manifest import (
    FORMAT,
    NAME,
    DataFile,
    Manifest,
    OptimizerRecord,
    Stored,
    checksum,
)
from .tensorfile import CODES, DTYPES

T = TypeVar("T")

_DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in CODES]
_PREFIX_NBYTES = 128
_PREFIX = re.compile(
    rb'\{"format": (\d{1,9}), "sequence": (\d{1,18}), "xxh3": "([0-9a-f]{16})", "checkpoint": '
)


def read_sequence(folder: str) -> int | None:
    """The sequence that a manifest says; None if there is none. Nothing else is looked at.

    Raises:
        CheckpointError: if the system refuses to read it.
    """
    head = bytearray()
    with passing_over(), File.to_read(os.path.join(folder, NAME)) as file:
        head = bytearray(min(file.size(), _PREFIX_NBYTES))
        file.read(head, 0)
    prefix = _PREFIX.match(head)
    return None if prefix is None else int(prefix[2])


def read_manifest(folder: str) -> Manifest:
    """The manifest of the checkpoint in ``folder``.

    Raises:
        CheckpointError: if there is none, or it is damaged or of another format.
    """
    path = os.path.join(folder, NAME)
    text = read_whole(path)
    prefix = _PREFIX.match(text)
    if prefix is None:
        raise CheckpointError(f"{path}: damaged, or not written by zshard")
    if int(prefix[1]) != FORMAT:
        raise CheckpointError(
            f"{path}: of format {int(prefix[1])}; this version of zshard reads format {FORMAT}"
        )
    content = text[prefix.end() : -2]
    if text[-2:] != b"}\n" or checksum(content, int(prefix[2])) != prefix[3].decode():
        raise CheckpointError(f"{path}: damaged (its checksum is not the one it says)")
    try:
        manifest = _decode(json.loads(content))
        if manifest.sequence != int(prefix[2]):
            raise ValueError(f"sequence {manifest.sequence}, and {int(prefix[2])} at the front")
        return manifest
    except (ValueError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be understood: {error!r}") from error


def _decode(content: object) -> Manifest:
    """The manifest, every part of it of the type that it says: who wrote it is not known.

    Raises:
        ValueError: if it is not.
    """
    manifest = _record(Manifest, content)
    if not re.fullmatch("[0-9a-f]{32}", manifest.id):
        raise ValueError(f"id {manifest.id!r}")
    if not {"model", "master"} <= manifest.tensors.keys():
        raise ValueError(f"tensors of the kinds {sorted(manifest.tensors)}")
    for name, file in manifest.files.items():
        # Plain names: nothing outside the folder is opened.
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
            raise ValueError(f"file name {name!r}")
        if not file.header <= min(file.nbytes, MAX_NBYTES):
            raise ValueError(f"a header of {file.header} bytes in {name!r}")
    places: dict[str, list[tuple[int, int, str]]] = {}
    for kind, of_kind in manifest.tensors.items():
        for name, stored in of_kind.items():
            if problem := _problem(stored, manifest.files):
                raise ValueError(f"{kind} tensor {name!r}: {problem}")
            place = (stored.offset, stored.offset + stored.nbytes, name)
            places.setdefault(stored.file, []).append(place)
    for in_file in places.values():
        for (_, end, name), (begin, _, other) in pairwise(sorted(in_file)):
            if begin < end:
                raise ValueError(f"{name!r} and {other!r} overlap")
    for record in manifest.optimizers:
        _check_optimizer(record, manifest.tensors.get("optimizer", {}))
    return manifest


def _check_optimizer(record: OptimizerRecord, tensors: Mapping[str, Stored]) -> None:
    for group in record.groups:
        _list_of(_text)(group["params"])
    for name, states in record.state.items():
        for state, entry in states.items():
            if "tensor" in entry:
                known = entry.keys() == {"tensor"} and _text(entry["tensor"]) in tensors
            else:
                known = entry.keys() == {"value"} or (
                    entry.keys() == {"value", "dtype", "on"}
                    and entry["dtype"] in _DTYPE_NAMES
                    and entry["on"] in ("host", "device")
                    and type(entry["value"]) in (bool, int, float, str)
                )
            if not known:
                raise ValueError(f"state {state!r} of {name!r}: {entry!r:.200}")


def _record(kind: type[T], content: object) -> T:
    entries = _dict_of(_any)(content)
    types = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    if entries.keys() != types.keys():
        raise ValueError(f"{kind.__name__} with the keys {list(entries)!r:.200}")
    return kind(**{name: _READERS[types[name]](value) for name, value in entries.items()})


def _any(value: object) -> Any:
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.200} for a text")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.200} for a number, 0 or more, of 63 bits")
    return value


def _list_of(item: Callable[[object], T]) -> Callable[[object], list[T]]:
    def read(value: object) -> list[T]:
        if not isinstance(value, list):
            raise ValueError(f"{value!r:.200} for a list")
        return [item(each) for each in value]

    return read


def _dict_of(item: Callable[[object], T]) -> Callable[[object], dict[str, T]]:
    def read(value: object) -> dict[str, T]:
        if not isinstance(value, dict):
            raise ValueError(f"{value!r:.200} for a dict")
        return {key: item(each) for key, each in value.items()}

    return read


# By the annotations of the classes above.
_READERS: Mapping[str, Callable[[object], Any]] = {
    "str": _text,
    "int": _count,
    "Json": _any,
    "list[str]": _list_of(_text),
    "tuple[int, ...]": lambda value: tuple(_list_of(_count)(value)),
    "tuple[str, ...]": lambda value: tuple(_list_of(_text)(value)),
    "dict[str, str]": _dict_of(_text),
    "dict[str, Json]": _dict_of(_any),
    "list[dict[str, Json]]": _list_of(_dict_of(_any)),
    "dict[str, dict[str, dict[str, Json]]]": _dict_of(_dict_of(_dict_of(_any))),
    "dict[str, DataFile]": _dict_of(lambda value: _record(DataFile, value)),
    "dict[str, dict[str, Stored]]": _dict_of(_dict_of(lambda value: _record(Stored, value))),
    "OptimizerRecord | list[OptimizerRecord] | None": lambda value: _optimizer(value),
}


def _optimizer(value: object) -> OptimizerRecord | list[OptimizerRecord] | None:
    if isinstance(value, list):
        return [_record(OptimizerRecord, each) for each in value]
    return None if value is None else _record(OptimizerRecord, value)


def _problem(stored: Stored, files: Mapping[str, DataFile]) -> str:
    """What is impossible about a tensor's place; "" if nothing is."""
    if stored.dtype not in DTYPES:
        return f"dtype {stored.dtype!r}"
    if sorted(stored.order) != list(range(len(stored.shape))):
        return f"memory order {stored.order} of shape {stored.shape}"
    numel, begin = prod(stored.shape), 0
    for end in stored.ends:
        if not begin < end <= numel:
            return f"a chunk that ends at {end}"
        begin = end
    if begin != numel or len(stored.ends) != len(stored.xxh3):
        return f"{begin} of {numel} elements are there"
    file = files.get(stored.file)
    if file is None or not 0 <= file.header <= stored.offset <= file.nbytes - stored.nbytes:
        return f"no place in file {stored.file!r}"
    return ""


def check_files(manifest: Manifest, folder: str) -> None:
    """Check that every file is there, of its size, and that its header is the one written.

    Raises:
        CheckpointError: naming the first file that is not.
    """
    for name, expected in manifest.files.items():
        path = os.path.join(folder, name)
        with File.to_read(path) as file:
            if (size := file.size()) != expected.nbytes:
                raise CheckpointError(
                    f"{path}: has {size} bytes, and {expected.nbytes} were saved; it holds "
                    f"{_some_tensors(manifest, name)}"
                )
            header = bytearray(expected.header)
            file.read(header, 0)
            if checksum(header) != expected.xxh3:
                raise CheckpointError(
                    f"{path}: its header is not the one that was saved; it holds "
                    f"{_some_tensors(manifest, name)}"
                )


def _some_tensors(manifest: Manifest, file: str) -> str:
    names = [
        name for kind in manifest.tensors.values() for name, s in kind.items() if s.file == file
    ]
    if not names:
        return "no tensor"
    more = f" and {counted(len(names) - 3, 'more tensor')}" if names[3:] else ""
    return ", ".join(names[:3]) + more
