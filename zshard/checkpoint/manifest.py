"""``checkpoint.json``: what a checkpoint holds, where, and the checksums by which to tell.

[Note: chunks and checksums]
A tensor is checked in chunks: elements [begin, end) in the memory order of the parameter that was
saved, which for contiguous ones is that of the file. A chunk's checksum is the XXH3 (64 bits) of
its bytes, seeded by the save's id, so data of another save does not pass, not even where it lies in
the same place. The headers of files have checksums of their own, and so has this file's content.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash

from ..errors import CheckpointError
from .files import File, read_whole
from .tensorfile import CODES, DTYPES

NAME = "checkpoint.json"
FORMAT = 1
CHUNK_BYTES = 1 << 22  # what a rank holds beside its shard while it saves or loads

T = TypeVar("T")
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MAX_NBYTES = 1 << 30  # of a manifest, or a header: more is no checkpoint, but an attack on memory

_PREFIX_NBYTES = 128
_PREFIX = re.compile(
    rb'\{"format": (\d{1,9}), "sequence": (\d{1,18}), "xxh3": "([0-9a-f]{16})", "checkpoint": '
)


class Chunk(NamedTuple):
    """Elements [begin, end) of a tensor in memory order, and the checksum of their bytes."""

    begin: int
    end: int
    xxh3: str


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: str
    offset: int  # bytes, from the start of the file
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions from the slowest to the fastest in the memory saved
    ends: tuple[int, ...]  # of the chunks, elements
    xxh3: tuple[str, ...]  # of the chunks, 16 hexadecimal digits each

    def chunks(self) -> Iterator[Chunk]:
        """The tensor's chunks, in order; none of an empty one."""
        begin = 0
        for end, xxh3 in zip(self.ends, self.xxh3, strict=True):
            yield Chunk(begin, end, xxh3)
            begin = end

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class DataFile:
    """A file beside the manifest."""

    nbytes: int
    header: int  # bytes at the start that ``xxh3`` is of: the header, or the whole of other files
    xxh3: str


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer without its tensors.

    Attributes:
        kind: the class, by name.
        groups: the param_groups, with the parameters' names under "params".
        state: parameter -> state -> the key of a tensor, or a value; see ``optimizer_state.py``.
    """

    kind: str
    groups: list[dict[str, Json]]
    state: dict[str, dict[str, dict[str, Json]]]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's content.

    Attributes:
        id: of the save, 32 hexadecimal digits.
        sequence: greater than those of the checkpoints that were in the folder at the save; 0 for
            what ``zshard.export`` wrote, which is nothing to go on from.
        saved: when, UTC, ISO 8601.
        ranks: that saved it.
        aliases: other names of a tied weight or a shared buffer -> the name it is stored under.
        buffers: those names among the model's tensors that are buffers.
        tensors: "model", "master", "optimizer", "rng" -> name -> tensor. "master" has the values of
            parameters whose own dtype is not the master's, in the master's.
    """

    id: str
    sequence: int
    saved: str
    ranks: int
    files: dict[str, DataFile]
    tensors: dict[str, dict[str, Stored]]
    aliases: dict[str, str] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    extra_state: dict[str, Json] = field(default_factory=dict)
    optimizer: OptimizerRecord | None = None
    extra: Json = None

    @property
    def seed(self) -> int:
        """What the checksums of this save start from."""
        return seed_of(self.id)

    def encode(self) -> bytes:
        """The text of the file."""
        content = json.dumps(vars(self), allow_nan=False, default=vars).encode()
        # At the front, so that a folder of checkpoints can be put in order without reading them.
        facts = f'"format": {FORMAT}, "sequence": {self.sequence}'
        xxh3 = checksum(content, self.sequence)
        return f'{{{facts}, "xxh3": "{xxh3}", "checkpoint": '.encode() + content + b"}\n"


def seed_of(save_id: str) -> int:
    """What the checksums of a save start from."""
    return int(save_id[:16], 16)


def checksum(data: bytes | bytearray | memoryview, seed: int = 0) -> str:
    """The XXH3 of ``data``, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data, seed)


def read_sequence(folder: str) -> int | None:
    """The sequence that a manifest says; None if there is none. Nothing else is looked at."""
    try:
        with File.to_read(os.path.join(folder, NAME)) as file:
            head = bytearray(min(file.size(), _PREFIX_NBYTES))
            file.read(head, 0)
    except CheckpointError:
        return None
    prefix = _PREFIX.match(head)
    return None if prefix is None else int(prefix[2])


def read_manifest(folder: str) -> Manifest:
    """The manifest of the checkpoint in ``folder``.

    Raises:
        CheckpointError: if there is none, or it is damaged or of another format.
    """
    path = os.path.join(folder, NAME)
    text = read_whole(path, limit=MAX_NBYTES)
    prefix = _PREFIX.match(text)
    if prefix is None:
        raise CheckpointError(f"{path}: damaged, or not written by zshard")
    if int(prefix[1]) != FORMAT:
        raise CheckpointError(f"{path}: of format {int(prefix[1])}; this zshard reads {FORMAT}")
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
    if manifest.optimizer is not None:
        _check_optimizer(manifest.optimizer, manifest.tensors.get("optimizer", {}))
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


_DTYPE_NAMES = [str(dtype).removeprefix("torch.") for dtype in CODES]


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
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.200} for a number, 0 or more")
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
    "OptimizerRecord | None": lambda value: (
        None if value is None else _record(OptimizerRecord, value)
    ),
}


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
    """See that every file is there, of its size, and that its header is the one written.

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
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if names[3:] else "")
