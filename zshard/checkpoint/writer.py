"""How a checkpoint is written.

[Note: the stages of a save]
All ranks take stock of the same tensors, and so know every file's layout. The first makes the
folder and the files' headers; each writes the elements that it owns where they belong, and syncs;
the first collects the checksums, writes the manifest, and renames the folder. After every stage all
ranks learn whether one has failed: then all raise, and what was written is removed.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import groupby
from typing import NamedTuple

import torch

from ..digest import bytes_of
from ..errors import CheckpointError, MismatchError
from ..schedule import Schedule
from . import catalogue, files
from .files import MAX_NBYTES, File
from .held import Source, snapshot
from .inventory import Inventory, inventory_of
from .manifest import (
    CHUNK_BYTES,
    NAME,
    Chunk,
    DataFile,
    Json,
    Manifest,
    OptimizerRecord,
    Stored,
    checksum,
    seed_of,
)
from .memory_order import file_positions, in_file_order, runs
from .paths import absolute
from .peers import Peers
from .tensorfile import CODES, SAVE, Planned, Slab, TensorSpec, index_of, plan_files

FILE_BYTES = 5 * 10**9  # of tensors a file, as Hugging Face's tools have it


@dataclass(frozen=True)
class Contents:
    """What is to be saved.

    Attributes:
        id: of the save.
        tensors: kind ("model", "master", "optimizer", "rng") -> name -> tensor.
        ignored: parameters that every rank has whole -> checksum of their values there.
        exported: the sequence is 0; see ``Manifest``.
        texts: further files, by name.
    """

    id: str
    target: str
    tensors: dict[str, dict[str, Source]]
    aliases: dict[str, str]
    buffers: list[str]
    extra_state: dict[str, Json]
    ignored: dict[str, str]
    optimizer: OptimizerRecord | list[OptimizerRecord] | None = None
    extra: Json = None
    keep: int | None = None
    exported: bool = False
    texts: dict[str, bytes] = field(default_factory=dict)

    def digests(self) -> dict[str, str]:
        """Of what has to be the same on every rank, by what it is."""
        tensors = [
            [kind, name, str(held.dtype), list(held.shape), list(held.order)]
            for kind, of_kind in self.tensors.items()
            for name, held in of_kind.items()
        ]
        facts = {
            "names, shapes or dtypes of tensors": tensors,
            "state of the optimizer": self.optimizer,
            "extra=": self.extra,
            "keep=": self.keep,
            **{name: text.decode() for name, text in self.texts.items()},
        }
        return {
            what: checksum(json.dumps(fact, sort_keys=True, default=vars).encode())
            for what, fact in facts.items()
        }


def agree_on(peers: Peers, take: Callable[[], Contents]) -> Contents:
    """Take stock on every rank, and make sure that all are to save the same.

    Raises:
        Error: what ``take`` raised on any rank.
        MismatchError: if the ranks are to save different things.
    """
    contents = peers.together(take)
    outcomes = peers.gather(lambda: (contents.id, contents.digests(), contents.ignored))
    if differing := [r for r, (_, found, _) in enumerate(outcomes) if found != outcomes[0][1]]:
        here, there = outcomes[0][1].items(), outcomes[differing[0]][1].items()
        raise MismatchError(
            f"{peers.what}: {peers.comm.names(differing)} were given other arguments than "
            f"{peers.comm.name(0)}, or hold another model or optimizer. What differs: "
            f"{'; '.join(sorted({what for what, _ in here ^ there}))}. Make it the same on every "
            "rank; a number such as a loss gather first (torch.distributed.all_gather_object)."
        )
    for name, checksum_there in outcomes[0][2].items():
        if differing := [r for r, each in enumerate(outcomes) if each[2][name] != checksum_there]:
            raise MismatchError(
                f"{peers.what}: the ignored parameter {name!r} has other values on "
                f"{peers.comm.names(differing)} than on {peers.comm.name(0)}, and a checkpoint "
                "holds one of each. Make them alike first, with torch.distributed.broadcast."
            )
    return replace(contents, id=outcomes[0][0])


def contents_of_model(schedule: Schedule, path: object) -> tuple[Contents, Inventory]:
    """The parameters and buffers of a wrapped model, to be saved at ``path``."""
    found = inventory_of(schedule)
    contents = Contents(
        id=secrets.token_hex(16),
        target=absolute(path),
        tensors={"model": {**found.parameters, **found.buffers}, "master": {**found.masters}},
        aliases=found.aliases,
        buffers=list(found.buffers),
        extra_state=found.extra_state,
        ignored={name: held.digest() for name, held in found.ignored.items()},
    )
    return contents, found


class Task(NamedTuple):
    """A tensor to be written."""

    kind: str
    name: str
    file: str
    slab: Slab
    held: Source


class Writer:
    """One save on one rank; see [Note: the stages of a save].

    Attributes:
        total_bytes: of tensors that this rank writes; written_bytes: of those it has written.
    """

    def __init__(self, peers: Peers, contents: Contents) -> None:
        self._peers, self._contents = peers, contents
        self._place = catalogue.saving(contents.target, contents.id)
        self._seed = seed_of(contents.id)
        self._files: list[Planned] = []
        self._tasks: list[Task] = []
        self._texts = dict(contents.texts)
        metadata = {"format": "pt", SAVE: contents.id}
        for kind, of_kind in contents.tensors.items():
            if not of_kind:
                continue
            specs = {n: TensorSpec(held.dtype, tuple(held.shape)) for n, held in of_kind.items()}
            planned = plan_files(kind, specs, metadata, FILE_BYTES)
            if len(planned) > 1:
                self._texts[f"{kind}.safetensors.index.json"] = index_of(planned)
            for file in planned:
                self._files.append(file)
                for name, slab in file.slabs.items():
                    self._tasks.append(Task(kind, name, file.name, slab, of_kind[name]))
        self.total_bytes = sum(t.held.mine.numel * t.held.dtype.itemsize for t in self._tasks)
        self.written_bytes = 0

    @property
    def target(self) -> str:
        """The path of the checkpoint."""
        return self._contents.target

    def take_snapshot(self) -> None:
        """Copy what this rank is to write, so that training may go on."""
        self._tasks = [task._replace(held=snapshot(task.held)) for task in self._tasks]
        kinds: dict[str, dict[str, Source]] = {kind: {} for kind in self._contents.tensors}
        self._contents = replace(self._contents, tensors=kinds)  # the model may go

    def run(self) -> None:
        """Write the checkpoint.

        Raises:
            Error: on every rank, if it failed on one.
        """
        first = self._peers.world_rank == 0
        with ExitStack() as claim:
            try:
                self._peers.gather(lambda: self._begin(claim) if first else None)
                checksums = self._peers.gather(self._write)
                self._peers.gather(lambda: self._complete(checksums) if first else None)
            except BaseException:
                if first:
                    with suppress(CheckpointError):
                        files.remove(self._place)
                raise
            finally:
                self._tasks = []  # a handle outlives the copies

    def _begin(self, claim: ExitStack) -> None:
        """Make the folder and the files, with their headers."""
        files.make_parents(os.path.dirname(self.target))
        catalogue.tidy(self.target)
        catalogue.check_target(self.target, exported=self._contents.exported)
        claim.enter_context(catalogue.claimed(self._place))
        for planned in self._files:
            with File.create(os.path.join(self._place, planned.name)) as file:
                file.write(planned.header, 0)
        for name, text in self._texts.items():
            files.write_synced(os.path.join(self._place, name), text)

    def _write(self) -> list[tuple[int, Chunk]]:
        """Write what this rank saves; the chunks, by number of the task."""
        written: list[tuple[int, Chunk]] = []
        # The first has written every file's header, which is to be synced too.
        first = self._peers.world_rank == 0
        # One open at a time: a large model has more files than a process may have open.
        for name, tasks in groupby(enumerate(self._tasks), key=lambda numbered: numbered[1].file):
            mine = [(number, task) for number, task in tasks if task.held.mine.numel]
            if not mine and not first:
                continue
            with File.to_write(os.path.join(self._place, name)) as file:
                for number, task in mine:
                    written += [(number, chunk) for chunk in self._write_tensor(file, task)]
                file.sync()
        return written

    def _write_tensor(self, file: File, task: Task) -> Iterator[Chunk]:
        held, itemsize = task.held, task.held.dtype.itemsize
        straight = in_file_order(held.shape, held.order)
        for begin in range(*held.mine, CHUNK_BYTES // itemsize):
            end = min(begin + CHUNK_BYTES // itemsize, held.mine.end)
            with torch.no_grad():
                values = held.read(begin, end).to("cpu").contiguous()
            data = bytes_of(values)
            if straight:
                file.write(data, task.slab.offset + begin * itemsize)
            else:
                _scatter(file, task, values, begin, end)
            self.written_bytes += len(data)
            yield Chunk(begin, end, checksum(data, self._seed))

    def _complete(self, checksums: list[list[tuple[int, Chunk]]]) -> None:
        """Write the manifest, and make the folder the checkpoint."""
        contents = self._contents
        chunks: list[list[Chunk]] = [[] for _ in self._tasks]
        for of_rank in checksums:
            for number, chunk in of_rank:
                chunks[number].append(chunk)
        tensors: dict[str, dict[str, Stored]] = {kind: {} for kind in contents.tensors}
        for task, unsorted in zip(self._tasks, chunks, strict=True):
            parts = sorted(unsorted)
            ends = [0, *(part.end for part in parts)]
            if ends != [*(part.begin for part in parts), math.prod(task.slab.spec.shape)]:
                raise CheckpointError(
                    f"{self.target}: no rank has some of the elements of {task.name}"
                )
            tensors[task.kind][task.name] = Stored(
                file=task.file,
                offset=task.slab.offset,
                dtype=CODES[task.held.dtype],
                shape=tuple(task.held.shape),
                order=task.held.order,
                ends=tuple(part.end for part in parts),
                xxh3=tuple(part.xxh3 for part in parts),
            )
        folder = os.path.dirname(self.target)
        manifest = Manifest(
            id=contents.id,
            sequence=0 if contents.exported else catalogue.next_sequence(folder),
            saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            ranks=self._peers.world_size,
            files=self._data_files(),
            tensors=tensors,
            aliases=contents.aliases,
            buffers=contents.buffers,
            extra_state=contents.extra_state,
            optimizer=contents.optimizer,
            extra=contents.extra,
        )
        encoded = manifest.encode()
        if len(encoded) > MAX_NBYTES:
            raise CheckpointError(
                f"{self.target}: {NAME} would have {len(encoded)} bytes, more than the limit of "
                f"{MAX_NBYTES}; store less in extra="
            )
        files.write_synced(os.path.join(self._place, NAME), encoded)
        files.sync_folder(self._place)
        catalogue.commit(self._place, self.target)
        if contents.keep is not None:
            catalogue.prune(self.target, manifest, contents.keep)

    def _data_files(self) -> dict[str, DataFile]:
        found = {
            file.name: DataFile(file.nbytes, len(file.header), checksum(file.header))
            for file in self._files
        }
        for name, text in self._texts.items():
            found[name] = DataFile(len(text), len(text), checksum(text))
        return found


def _scatter(file: File, task: Task, values: torch.Tensor, begin: int, end: int) -> None:
    """Write elements whose memory order is not the file's, in runs that are contiguous there."""
    itemsize = values.element_size()
    at, order = file_positions(task.slab.spec.shape, task.held.order, begin, end).sort()
    data = bytes_of(values := values[order])
    for start, stop in runs(at):
        offset = task.slab.offset + int(at[start]) * itemsize
        file.write(data[start * itemsize : stop * itemsize], offset)
