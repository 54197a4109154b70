"""The text that ``zshard train`` trains on, and which bytes of it each rank sees at each step."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.catalogue import RUN_FOLDER
from ..errors import InputError
from ..words import counted

_VALIDATION_SHARE = 0.05
_NOT_LIBRARY_CODE = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class MicroBatch(NamedTuple):
    """One micro-batch of one rank."""

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, the byte after each token


def find_files(paths: Sequence[str]) -> list[Path]:
    """The files to train on, in an order that does not depend on the machine's directory order.

    Args:
        paths: files, and folders of which every file is taken that is not hidden, nor in the folder
            of a run, nor behind a link to another folder; none at all means the source files of
            Python's own standard library.

    Raises:
        InputError: for a path that does not exist, a folder that cannot be read, or no file.
    """
    if not paths:
        return _standard_library()
    files: list[Path] = []
    for text in paths:
        path = Path(text)
        if path.is_dir():
            files += _walk(path)
        elif path.exists():
            files.append(path)
        else:
            raise InputError(f"--data {text}: no such file or folder")
    if not files:
        raise InputError(f"--data {' '.join(paths)}: no files found")
    return files


def _standard_library() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = [f for f in _walk(folder, skip=_NOT_LIBRARY_CODE) if f.suffix == ".py"]
    if not files:
        raise InputError(
            f"no Python source under {folder} (this Python comes without its library's source): "
            "name some text with --data"
        )
    return files


def _walk(folder: Path, skip: Collection[str] = ()) -> list[Path]:
    files: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=_refuse):
        if "metrics.jsonl" in names and RUN_FOLDER in folders:
            folders.clear()  # a run's, whose text would be another when it is resumed
            continue
        folders[:] = sorted(f for f in folders if f not in skip and not f.startswith("."))
        files += [Path(root, name) for name in sorted(names) if not name.startswith(".")]
    return [f for f in files if f.is_file()]


def _refuse(error: OSError) -> None:
    """Leave no text out without a word."""
    raise InputError(f"cannot read {error.filename}: {error.strerror}") from error


def check_size(
    size: int,  # bytes
    files: int,  # number of them
    sequence: int,  # bytes per training sequence
) -> None:
    """Refuses a text that cannot be split into one for training and one for validation.

    Raises:
        InputError: when it is too short.
    """
    least = 2 * (sequence + 1)  # each a sequence and the target after its last byte
    if size < least:
        raise InputError(
            f"too little text, {counted(size, 'byte')} in {counted(files, 'file')}: with --seq "
            f"{sequence}, training and validation need {least} bytes; name more text with --data "
            "or lower --seq"
        )


@dataclass(frozen=True)
class Corpus:
    """A text split into what is trained on and what is only measured.

    Args:
        train: (n,) uint8, the first 95 % of the text.
        validation: (m,) uint8, the rest.
        files: number of files the text was read from.
        checksum: CRC-32 of the whole text; a resumed run compares it.
    """

    train: Tensor
    validation: Tensor
    files: int
    checksum: int

    @classmethod
    def read(cls, files: Sequence[Path], sequence: int) -> Corpus:
        """Read the files, one after the other.

        Args:
            files: what ``find_files`` returned.
            sequence: bytes per training sequence; both parts hold more than that.

        Raises:
            InputError: for a file that cannot be read, or too little text.
        """
        text = bytearray()
        for file in files:
            try:
                text += file.read_bytes()
            except OSError as error:
                raise InputError(f"cannot read {file}: {error.strerror}") from error
        check_size(len(text), len(files), sequence)
        held_out = max(int(len(text) * _VALIDATION_SHARE), sequence + 1)
        whole = torch.frombuffer(text, dtype=torch.uint8)
        return cls(whole[:-held_out], whole[-held_out:], len(files), zlib.crc32(text))

    def train_batch(
        self,
        batch: int,  # sequences a rank and micro-step
        sequence: int,  # bytes a sequence
        *,
        seed: int,
        step: int,
        micro_step: int,
        rank: int,
    ) -> MicroBatch:
        """A random micro-batch, a function of the arguments alone: a resumed run draws the same."""
        # Hashed, not added up: seed 0's step 1 and seed 1's step 0 are different draws.
        key = f"{seed} {step} {micro_step} {rank}".encode()
        generator = torch.Generator().manual_seed(zlib.crc32(key))
        last = len(self.train) - sequence - 1
        starts = torch.randint(0, last + 1, (batch,), generator=generator)
        return _windows(self.train, starts, sequence)

    def validation_batch(
        self,
        batch: int,  # sequences a rank
        sequence: int,  # bytes a sequence
        *,
        index: int,
        count: int,
    ) -> MicroBatch:
        """Batch ``index`` of ``count`` that together lie evenly over the validation text."""
        last = len(self.validation) - sequence - 1
        total = batch * count
        starts = torch.tensor(
            [last * (index * batch + i) // max(total - 1, 1) for i in range(batch)]
        )
        return _windows(self.validation, starts, sequence)


def _windows(
    text: Tensor,  # (n,) uint8
    starts: Tensor,  # (B,) int64, each below n - sequence
    sequence: int,
) -> MicroBatch:
    windows = text[starts[:, None] + torch.arange(sequence + 1)].long()  # (B, T + 1)
    return MicroBatch(windows[:, :-1], windows[:, 1:])
