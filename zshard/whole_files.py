"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .errors import InputError

StrPath = str | os.PathLike[str]


def write_whole(path: StrPath, write: Callable[[Path], object]) -> None:
    """Write a file beside ``path`` by ``write``; it then takes that one's place.

    A link stays one. A device or a pipe, whose place nothing may take, is written to.

    Raises:
        InputError: for a path that cannot be written; nothing is left of it in a file's place.
    """
    try:
        whole = Path(path)
        whole.with_name("name")
    except (TypeError, ValueError) as error:  # "" and "/" have no name
        raise InputError(f"{path!r} is no file's name") from error
    part: Path | None = None
    try:
        if whole.exists() and not whole.is_file() and not whole.is_dir():
            write(whole)
            return
        whole = Path(os.path.realpath(whole))
        part = whole.with_name(f".{whole.name}.{os.getpid()}.part")
        write(part)
        if whole.exists():
            shutil.copymode(whole, part)
        os.replace(part, whole)
    except (OSError, ValueError) as error:  # the latter: a NUL
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{whole} cannot be written: {reason}") from error
    finally:
        if part is not None:
            with contextlib.suppress(OSError, ValueError):
                part.unlink()
