"""What ``zshard train`` keeps in its checkpoints beside the tensors, and where a run resumes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint import latest
from ..checkpoint.catalogue import RUN_FOLDER
from ..checkpoint.inspect import is_checkpoint, list_folder, summarize
from ..checkpoint.manifest import Json
from ..errors import InputError

_PROGRAM = "zshard train"


@dataclass(frozen=True)
class Progress:
    """How far a run has come, and what it has to go on with: a checkpoint's ``extra``.

    Attributes:
        step: steps taken.
        ranks: that took the last of them.
        text_crc32: of the text, ``Corpus.checksum``.
        options: ``TrainOptions.as_json()``.
    """

    step: int
    ranks: int
    text_crc32: int
    options: dict[str, object]

    def as_extra(self) -> dict[str, object]:
        """What to save."""
        return {"program": _PROGRAM, **vars(self)}


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run resumes from.

    Attributes:
        passed_over: checkpoints of the same run that are damaged: path -> what is wrong.
    """

    path: Path
    progress: Progress
    passed_over: dict[str, str] = field(default_factory=dict)

    @property
    def run(self) -> str | None:
        """The output folder of the run that saved it; None if it lies elsewhere now."""
        folder = Path(os.path.abspath(self.path)).parent
        return str(folder.parent) if folder.name == RUN_FOLDER else None


def find_origin(path: Path) -> Origin:
    """The checkpoint that ``path`` names: itself, or the newest whole one of a run or a folder.

    Raises:
        InputError: when there is none, or it is not one of ``zshard train``.
        CheckpointError: when it is damaged.
    """
    passed_over: dict[str, str] = {}
    if not is_checkpoint(str(path)):
        if not path.is_dir():
            raise InputError(f"--resume {path}: there is no such folder")
        inside = path / RUN_FOLDER
        folder = inside if inside.is_dir() else path
        newest = latest(folder)
        passed_over = list_folder(str(folder)).broken
        if newest is None:
            why = "".join(f"\n  {problem}" for problem in passed_over.values())
            raise InputError(f"--resume {path}: it contains no whole checkpoint{why}")
        path = Path(newest)
    return Origin(path, _progress(path, summarize(str(path)).extra), passed_over)


def _progress(path: Path, extra: Json) -> Progress:
    if not isinstance(extra, dict) or extra.get("program") != _PROGRAM:
        raise InputError(
            f"--resume {path}: not a checkpoint of {_PROGRAM}; load it with zshard.load"
        )
    fields = {key: value for key, value in extra.items() if key != "program"}
    try:
        return Progress(**fields)  # type: ignore[arg-type]
    except TypeError as error:
        raise InputError(
            f"--resume {path}: saved by another version of zshard, which noted "
            f"{json.dumps(sorted(fields))}: resume it with that one"
        ) from error
