"""``checkpoint.json``: what a checkpoint holds, where, and the checksums by which to tell.

[Note: chunks and checksums]
A tensor is checked in chunks: elements [begin, end) in the memory order of the parameter that was
saved, which for contiguous ones is that of the file. A chunk's CRC-32 is taken over the save's id
and then its bytes, so data of another save does not pass, not even where it lies in the same
place. The headers of files have checksums of their own, and so has this file's content.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from .files import File, read_whole
from .tensorfile import DTYPES

NAME = "checkpoint.json"
FORMAT = 1
CHUNK_BYTES = 1 << 22  # what a rank holds beside its shard while it saves or loads

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_PREFIX = re.compile(rb'\{"format": (\d+), "crc32": "([0-9a-f]{8})", "checkpoint": ')


class Chunk(NamedTuple):
    """Elements [begin, end) of a tensor in memory order, and the checksum of their bytes."""

    begin: int
    end: int
    crc32: int


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: str
    offset: int  # bytes, from the start of the file
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions from the slowest to the fastest in the memory saved
    ends: tuple[int, ...]  # of the chunks, elements
    crc32: tuple[int, ...]  # of the chunks

    def chunks(self) -> Iterator[Chunk]:
        """The tensor's chunks, in order; none of an empty one."""
        begin = 0
        for end, crc32 in zip(self.ends, self.crc32, strict=True):
            yield Chunk(begin, end, crc32)
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
    header: int  # bytes at the start that ``crc32`` is of: the header, or the whole of other files
    crc32: int


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
        sequence: greater than those of the checkpoints that were in the folder at the save.
        saved: when, UTC, ISO 8601.
        ranks: that saved it.
        aliases: other names of a tied weight or a shared buffer -> the name it is stored under.
        buffers: those names among the model's tensors that are buffers.
        tensors: "model", "master", "optimizer", "rng" -> name -> tensor. "master" has the values of
            parameters whose own dtype is not the master's, in the master's.
        exported: by ``zshard.export``: weights for others, not a checkpoint to go on from.
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
    exported: bool = False

    @property
    def seed(self) -> int:
        """What the checksums of this save start from."""
        return zlib.crc32(self.id.encode())

    def encode(self) -> bytes:
        """The text of the file."""
        content = json.dumps(asdict(self), allow_nan=False, indent=None).encode()
        crc32 = f"{zlib.crc32(content):08x}"
        prefix = f'{{"format": {FORMAT}, "crc32": "{crc32}", "checkpoint": '
        return prefix.encode() + content + b"}\n"


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
        raise CheckpointError(f"{path}: of format {int(prefix[1])}; this zshard reads {FORMAT}")
    content = text[prefix.end() : -2]
    if text[-2:] != b"}\n" or f"{zlib.crc32(content):08x}".encode() != prefix[2]:
        raise CheckpointError(f"{path}: damaged (its CRC-32 is not the one it says)")
    try:
        return _decode(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be understood: {error!r}") from error


def _decode(content: dict[str, object]) -> Manifest:
    fields: dict[str, object] = dict(content)
    files, tensors = fields["files"], fields["tensors"]
    assert isinstance(files, dict) and isinstance(tensors, dict)
    fields["files"] = {name: DataFile(**entry) for name, entry in files.items()}
    fields["tensors"] = {
        kind: {name: _stored(entry) for name, entry in of_kind.items()}
        for kind, of_kind in tensors.items()
    }
    if (record := fields["optimizer"]) is not None:
        assert isinstance(record, dict)
        fields["optimizer"] = OptimizerRecord(**record)
    manifest = Manifest(**fields)  # type: ignore[arg-type]
    for kind, of_kind in manifest.tensors.items():
        for name, stored in of_kind.items():
            if problem := _problem(stored, manifest.files):
                raise ValueError(f"{kind} tensor {name!r}: {problem}")
    return manifest


def _stored(entry: Mapping[str, object]) -> Stored:
    lists = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    return Stored(**lists)  # type: ignore[arg-type]


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
    if begin != numel or len(stored.ends) != len(stored.crc32):
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
            if zlib.crc32(header) != expected.crc32:
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
