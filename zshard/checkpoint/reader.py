"""How a rank reads tensors of a checkpoint: chunk by chunk, each against its checksum."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from ..digest import bytes_of
from ..errors import CheckpointError
from .files import File
from .held import Sink
from .manifest import Chunk, Stored, checksum
from .memory_order import file_positions, in_file_order, memory_positions, runs


class Pair(NamedTuple):
    """A stored tensor, and where it goes."""

    name: str  # to be told
    stored: Stored
    sink: Sink


def compare_copies(
    folder: str, copies: Sequence[Mapping[str, Stored]], rank: int, world_size: int
) -> None:
    """Make sure that stored tensors that are one in the model are alike, in this rank's part.

    Raises:
        CheckpointError: with the names of two that differ, or for a file that cannot be read.
    """
    for named in copies:
        # As the files have them: in memory they may lie in another order each.
        (first, one), *others = (
            (name, replace(stored, order=tuple(range(len(stored.shape)))))
            for name, stored in named.items()
        )
        share = -(-prod(one.shape) // world_size)
        parts = [
            (max(begin, rank * share), min(end, (rank + 1) * share))
            for begin, end, _ in one.chunks()
        ]
        for other, stored in others:
            if (stored.dtype, stored.shape) != (one.dtype, one.shape) or not all(
                torch.equal(_bytes_at(folder, one, *part), _bytes_at(folder, stored, *part))
                for part in parts
                if part[0] < part[1]
            ):
                raise CheckpointError(
                    f"{first} and {other} are one tensor in the model, and differ there; leave one "
                    "of them out (rename=)"
                )


def _bytes_at(folder: str, stored: Stored, begin: int, end: int) -> torch.Tensor:
    with File.to_read(os.path.join(folder, stored.file)) as file:
        return _Reader(file, stored, None).read(begin, end).view(torch.uint8)


def fill(folder: str, pairs: Sequence[Pair], seed: int | None) -> None:
    """Read what this rank holds of every pair's tensor.

    Args:
        seed: of the checksums; None for files without.

    Raises:
        CheckpointError: naming the file, if it cannot be opened; also the tensor, if it cannot be
            read, or has another checksum than was saved.
    """
    by_file: dict[str, list[Pair]] = {}
    for pair in pairs:
        if pair.sink.here.numel:
            by_file.setdefault(pair.stored.file, []).append(pair)
    for name, of_file in by_file.items():
        with File.to_read(os.path.join(folder, name)) as file:
            for pair in of_file:
                try:
                    with torch.no_grad():
                        _Reader(file, pair.stored, seed).fill(pair.sink)
                except CheckpointError as error:
                    raise CheckpointError(f"tensor {pair.name}: {error}") from error


class _Reader:
    """Reads one tensor, chunk by chunk."""

    def __init__(self, file: File, stored: Stored, seed: int | None) -> None:
        self._file, self._stored, self._seed = file, stored, seed
        self._dtype, self._itemsize = stored.torch_dtype, stored.torch_dtype.itemsize
        self._straight = in_file_order(stored.shape, stored.order)

    def fill(self, held: Sink) -> None:
        """Read the range that ``held`` has here."""
        aligned = in_file_order(held.shape, held.order) and self._straight
        aligned = aligned or held.order == self._stored.order
        memory = held.memory() if aligned and held.dtype == self._dtype else None
        for chunk in self._stored.chunks():
            if not aligned:
                self._pick(chunk.begin, self.read(*chunk), held)
                continue
            begin, end = max(chunk.begin, held.here.begin), min(chunk.end, held.here.end)
            if begin >= end:
                continue
            if self._seed is None:  # nothing to check: no need to read more
                chunk = Chunk(begin, end, "")
            whole = (begin, end) == (chunk.begin, chunk.end)
            if memory is not None and whole:
                into = memory[begin - held.here.begin : end - held.here.begin]
                self._read_into(into, *chunk)
            else:
                values = self.read(*chunk)
                held.store(begin, values[begin - chunk.begin : end - chunk.begin])

    def read(self, begin: int, end: int, xxh3: str = "") -> torch.Tensor:
        """Elements [begin, end) in the memory order that was saved."""
        values = torch.empty(end - begin, dtype=self._dtype, device="cpu")
        self._read_into(values, begin, end, xxh3)
        return values

    def _read_into(self, values: torch.Tensor, begin: int, end: int, xxh3: str) -> None:
        data, offset = bytes_of(values), self._stored.offset
        if self._straight:
            self._file.read(data, offset + begin * self._itemsize)
        else:
            at, order = file_positions(self._stored.shape, self._stored.order, begin, end).sort()
            gathered = torch.empty_like(values)
            for start, stop in runs(at):
                part = bytes_of(gathered[start:stop])
                self._file.read(part, offset + int(at[start]) * self._itemsize)
            values[order] = gathered
        if self._seed is not None and checksum(data, self._seed) != xxh3:
            raise CheckpointError(
                f"{self._file.path}: elements {begin} to {end} are damaged (their checksum is "
                "not the one that was saved)"
            )

    def _pick(self, first: int, values: torch.Tensor, held: Sink) -> None:
        """Store those of ``values`` that are here, though memory is in another order there."""
        stored = self._stored
        at = file_positions(stored.shape, stored.order, first, first + values.numel())
        place = memory_positions(tuple(held.shape), held.order, at)
        here = (place >= held.here.begin) & (place < held.here.end)
        held.scatter(place[here], values[here])
