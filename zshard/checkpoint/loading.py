"""How tensors of a checkpoint get into what a rank holds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

import torch

from ..digest import bytes_of
from ..errors import CheckpointError
from .files import File
from .held import Sink, in_file_order, places, positions
from .inventory import Inventory
from .manifest import Chunk, Stored, checksum


@dataclass
class Match:
    """What of a checkpoint goes where, and what does not fit.

    Attributes:
        pairs: of a stored tensor, by the name to be told, and where it goes.
        problems: what can never be loaded, such as another shape.
        copies: stored tensors that are one in the model, by name; the first of them is loaded.
    """

    pairs: list[tuple[str, Stored, Sink]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    copies: list[dict[str, Stored]] = field(default_factory=list)

    def add(self, name: str, stored: Stored, held: Sink, *, cast: bool = False) -> None:
        """Note that ``stored`` goes to ``held``, if it fits."""
        if held.obstacle:
            self.problems.append(f"{name}: {held.obstacle}")
        elif tuple(stored.shape) != tuple(held.shape):
            shapes = f"of shape {stored.shape}, and {tuple(held.shape)} in the model"
            self.problems.append(f"{name}: {shapes}")
        elif stored.torch_dtype != held.dtype and not cast:
            dtypes = f"of {stored.torch_dtype}, and {held.dtype} in the model"
            self.problems.append(f"{name}: {dtypes}")
        else:
            self.pairs.append((name, stored, held))

    def refuse(self, where: str, *, strict: bool, has_values: bool) -> None:
        """Refuse what does not fit.

        Args:
            has_values: whether what is missing may stay as it is.

        Raises:
            CheckpointError: listing all of it.
        """
        lines = list(self.problems)
        if strict or not has_values:
            lines += [f"{name}: missing there" for name in self.missing]
        if strict:
            lines += [f"{name}: not in the model" for name in self.unexpected]
        if lines:
            helps = strict and (self.missing or self.unexpected)
            remedy = " (strict=False allows what is missing or unexpected)" if helps else ""
            raise CheckpointError(
                f"{where} does not fit the model, and nothing was loaded{remedy}:\n  "
                + "\n  ".join(lines)
            )


def match_model(
    stored: Mapping[str, Stored],
    masters: Mapping[str, Stored],
    aliases: Mapping[str, str],
    inventory: Inventory,
    *,
    cast: bool = False,
) -> Match:
    """Find the place of every stored tensor of the model.

    Args:
        stored: by name; masters: likewise, in the dtypes of the masters.
        aliases: of the stored tensors: other name -> name.
        cast: take floating-point tensors of another dtype than the model's too.
    """
    match = Match()
    used: set[str] = set()
    for name, held in (inventory.parameters | inventory.buffers).items():
        keys = [aliases.get(each, each) for each in inventory.names_of(name)]
        there = [key for key in dict.fromkeys(keys) if key in stored]
        used.update(there)
        if not there:
            match.missing.append(name)
            continue
        if len(there) > 1 and cast:
            match.copies.append({each: stored[each] for each in there})
        elif len(there) > 1:
            match.problems.append(
                f"{name}: one tensor in the model, and several there: {sorted(there)}"
            )
        key, master = there[0], inventory.masters.get(name)
        of_master = masters.get(key)
        same_dtype = stored[key].torch_dtype == held.dtype
        if master is not None and of_master is not None and same_dtype:
            match.add(name, of_master, master)
        else:
            floating = stored[key].torch_dtype.is_floating_point and held.dtype.is_floating_point
            match.add(name, stored[key], held, cast=cast and floating)
    match.unexpected += [name for name in stored if name not in used]
    return match


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


def fill(folder: str, pairs: Sequence[tuple[str, Stored, Sink]], seed: int | None) -> None:
    """Read what this rank holds of every pair's tensor.

    Args:
        seed: of the checksums; None for files without.

    Raises:
        CheckpointError: naming the file, if it cannot be opened; also the tensor, if it cannot be
            read, or has another checksum than was saved.
    """
    by_file: dict[str, list[tuple[str, Stored, Sink]]] = {}
    for pair in pairs:
        if pair[2].here.numel:
            by_file.setdefault(pair[1].file, []).append(pair)
    for name, of_file in by_file.items():
        with File.to_read(os.path.join(folder, name)) as file:
            for tensor, stored, held in of_file:
                try:
                    with torch.no_grad():
                        _Reader(file, stored, seed).fill(held)
                except CheckpointError as error:
                    raise CheckpointError(f"tensor {tensor}: {error}") from error


class _Reader:
    """Reads one tensor, chunk by chunk."""

    def __init__(self, file: File, stored: Stored, seed: int | None) -> None:
        self._file, self._stored, self._seed = file, stored, seed
        self._dtype, self._itemsize = stored.torch_dtype, stored.torch_dtype.itemsize
        self._straight = in_file_order(stored.order, stored.shape)

    def fill(self, held: Sink) -> None:
        """Read the range that ``held`` has here."""
        aligned = in_file_order(held.order, held.shape) and self._straight
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
            if memory is not None and whole and self._straight:
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
            at, order = positions(self._stored.shape, self._stored.order, begin, end).sort()
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
        at = positions(stored.shape, stored.order, first, first + values.numel())
        place = places(tuple(held.shape), held.order, at)
        here = (place >= held.here.begin) & (place < held.here.end)
        held.scatter(place[here], values[here])


def runs(at: torch.Tensor) -> list[tuple[int, int]]:
    """The ranges of ``at`` (ascending) in which each number is one more than that before."""
    breaks = [int(i) + 1 for i in (at.diff() != 1).nonzero()]
    bounds = [0, *breaks, at.numel()]
    return [(a, b) for a, b in pairwise(bounds) if a < b]
