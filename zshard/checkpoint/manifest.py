"""``checkpoint.json``: what a checkpoint holds, where, and the checksums by which to tell.

A tensor is checked in chunks: elements [begin, end) in the memory order of the parameter that was
saved, which for contiguous ones is that of the file. A chunk's checksum is the XXH3 (64 bits) of
its bytes, seeded by the save's id, so data of another save does not pass, not even where it lies in
the same place. The headers of files have checksums of their own, and so has this file's content.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
import xxhash

from .tensorfile import DTYPES

NAME = "checkpoint.json"
FORMAT = 1
CHUNK_BYTES = 1 << 22  # what a rank holds beside its shard while it saves or loads

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


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
        optimizer: the one that was saved, or the list of them.
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
    optimizer: OptimizerRecord | list[OptimizerRecord] | None = None
    extra: Json = None

    @property
    def optimizers(self) -> list[OptimizerRecord]:
        """Those that were saved, in their order."""
        if self.optimizer is None:
            return []
        return self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]

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
