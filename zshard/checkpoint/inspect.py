"""What a checkpoint holds and whether it is whole; for people, without a model or other ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from math import prod

import torch

from ..errors import CheckpointError
from ..layout import Range
from . import catalogue
from .held import Sink
from .manifest import Json, Manifest, Stored
from .manifest_reading import check_files, read_manifest
from .paths import absolute
from .reader import Pair, fill

# Another job may replace the checkpoint while it is looked at: what is there then counts.
_ATTEMPTS = 5


@dataclass(frozen=True)
class Totals:
    """Of the tensors of one kind: "model", "master", "optimizer", "rng"."""

    tensors: int
    elements: int
    nbytes: int
    dtypes: dict[str, int]  # safetensors' name of a dtype -> tensors


@dataclass(frozen=True)
class Summary:
    """What a checkpoint holds.

    Attributes:
        sequence: greater for a later one in the same folder.
        saved: when, UTC, ISO 8601; ranks: that saved it.
        exported: by ``zshard.export``: only weights.
        parameters: elements of the model's tensors that are no buffers.
        optimizer: its class, or theirs; step: how many it has taken, by its states.
        files: bytes, by name; problems: what is wrong with them, as far as names, sizes and headers
            tell. Empty for a whole checkpoint.
    """

    path: str
    id: str
    sequence: int
    saved: str
    ranks: int
    exported: bool
    parameters: int
    kinds: dict[str, Totals]
    optimizer: str | None
    step: int | None
    extra: Json
    files: dict[str, int]
    problems: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(self.files.values())

    def as_json(self) -> dict[str, object]:
        """All of it, for ``--json``."""
        return {**asdict(self), "bytes": self.nbytes}


@dataclass
class Damage:
    """What is wrong with one file: with itself, and with tensors in it."""

    path: str
    problems: list[str] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)


def is_checkpoint(path: str) -> bool:
    """Whether there is a checkpoint, whole or not, at ``path``."""
    try:
        catalogue.find(absolute(path))
    except CheckpointError:
        return False
    return True


@dataclass
class Listing:
    """The checkpoints in a folder.

    Attributes:
        checkpoints: from the oldest to the newest.
        unreadable: those whose manifest is damaged: path -> what is wrong.
    """

    checkpoints: list[Summary] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> str | None:
        """The path that ``zshard.latest`` gives."""
        whole = [s.path for s in self.checkpoints if not s.problems and not s.exported]
        return whole[-1] if whole else None

    @property
    def broken(self) -> dict[str, str]:
        """Those that are not whole: path -> the first thing that is wrong."""
        return {s.path: s.problems[0] for s in self.checkpoints if s.problems} | self.unreadable

    def as_json(self) -> dict[str, object]:
        """All of it, for ``--json``."""
        checkpoints = [summary.as_json() for summary in self.checkpoints]
        return {"newest": self.newest, "checkpoints": checkpoints, "unreadable": self.unreadable}


def list_folder(folder: str) -> Listing:
    """The checkpoints in ``folder``, whole or not.

    Raises:
        CheckpointError: if the folder cannot be read.
    """
    found = Listing()
    for path in catalogue.targets_in(folder):
        if not is_checkpoint(path):
            continue
        try:
            found.checkpoints.append(summarize(path))
        except CheckpointError as error:
            found.unreadable[path] = str(error)
    # Two jobs may have given one number: ``latest`` goes by the path, then. Exports have none.
    found.checkpoints.sort(key=lambda s: (s.sequence, s.saved if s.exported else "", s.path))
    return found


def summarize(path: str) -> Summary:
    """What the checkpoint at ``path`` holds.

    Raises:
        CheckpointError: if there is none, or its manifest is damaged.
    """
    manifest, damages = _looked_at(path, _check_each)
    model = manifest.tensors.get("model", {})
    buffers = set(manifest.buffers)
    return Summary(
        path=path,
        id=manifest.id,
        sequence=manifest.sequence,
        saved=manifest.saved,
        ranks=manifest.ranks,
        exported=manifest.sequence == 0,
        parameters=sum(prod(t.shape) for name, t in model.items() if name not in buffers),
        kinds={kind: _totals(tensors) for kind, tensors in manifest.tensors.items() if tensors},
        optimizer=", ".join(record.kind for record in manifest.optimizers) or None,
        step=_step(manifest),
        extra=manifest.extra,
        files={name: file.nbytes for name, file in manifest.files.items()},
        problems=[problem for found in damages for problem in found.problems],
    )


def verify(path: str, progress: Callable[[int], object]) -> list[Damage]:
    """Read all of the checkpoint at ``path``: every header, and every chunk against its checksum.

    Args:
        progress: told the bytes of tensors as they are read.

    Returns:
        The files that are damaged.

    Raises:
        CheckpointError: if there is no checkpoint, or its manifest is damaged.
    """

    def read_all(manifest: Manifest, place: str) -> list[Damage]:
        found = {damage.path: damage for damage in _check_each(manifest, place)}
        for tensors in manifest.tensors.values():
            for name, stored in tensors.items():
                try:
                    fill(place, [Pair(name, stored, _Nowhere(stored, progress))], manifest.seed)
                except CheckpointError as error:
                    file = os.path.join(place, stored.file)
                    why = str(error).removeprefix(f"tensor {name}: ")  # absent if it did not open
                    found.setdefault(file, Damage(file)).tensors.append(f"tensor {name}: {why}")
        return list(found.values())

    return _looked_at(path, read_all)[1]


def _looked_at(
    path: str, look: Callable[[Manifest, str], list[Damage]]
) -> tuple[Manifest, list[Damage]]:
    """The manifest of the checkpoint at ``path``, and what ``look`` has found of it and its place.

    Raises:
        CheckpointError: if there is none, its manifest is damaged, or others come too fast.
    """
    for _ in range(_ATTEMPTS):
        manifest, place = _manifest_at(path)
        damages = look(manifest, place)
        if not damages:
            return manifest, []
        now, there = _manifest_at(path)
        if (now.id, there) == (manifest.id, place):
            return manifest, damages
    raise CheckpointError(f"{path}: was replaced each of the {_ATTEMPTS} times that it was read")


def _manifest_at(path: str) -> tuple[Manifest, str]:
    place = catalogue.find(absolute(path))
    return read_manifest(place), place


def _check_each(manifest: Manifest, place: str) -> list[Damage]:
    damages = []
    for name, file in manifest.files.items():
        try:
            check_files(replace(manifest, files={name: file}), place)
        except CheckpointError as error:
            damages.append(Damage(os.path.join(place, name), [str(error)]))
    return damages


def _totals(tensors: dict[str, Stored]) -> Totals:
    return Totals(
        tensors=len(tensors),
        elements=sum(prod(stored.shape) for stored in tensors.values()),
        nbytes=sum(stored.nbytes for stored in tensors.values()),
        dtypes=dict(Counter(stored.dtype for stored in tensors.values())),
    )


def _step(manifest: Manifest) -> int | None:
    """Of the parameters that took most steps (others were frozen for some); None without states."""
    states = [state for record in manifest.optimizers for state in record.state.values()]
    counts = [state["step"].get("value") for state in states if "step" in state]
    whole = [n for n in counts if isinstance(n, int) or (isinstance(n, float) and n.is_integer())]
    return max(map(int, whole), default=None)


class _Nowhere(Sink):
    """Where tensors are read to only for their checksums."""

    def __init__(self, stored: Stored, progress: Callable[[int], object]) -> None:
        here = Range(0, prod(stored.shape))
        super().__init__(
            torch.Size(stored.shape), stored.torch_dtype, stored.order, here, Range(0, 0)
        )
        self._progress = progress

    def store(self, begin: int, values: torch.Tensor) -> None:
        """Only count them."""
        self._progress(values.nbytes)

    def scatter(self, at: torch.Tensor, values: torch.Tensor) -> None:
        """Only count them."""
        self._progress(values.nbytes)
