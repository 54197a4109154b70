"""Paths of checkpoints as callers give them."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from ..errors import InputError


def absolute(path: object, *, resolve: bool = True) -> str:
    """The path, made absolute, links resolved.

    Args:
        resolve: False leaves the last part as it is: a file's name, which says what it is.

    Raises:
        InputError: if it is no path.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        hint = "; zshard.latest gives None where it finds none" if path is None else ""
        raise InputError(f"path={path!r}: expected the path of a checkpoint{hint}")
    name = os.fspath(path)
    if not isinstance(name, str) or "\0" in name:
        raise InputError(f"path={path!r}: expected text without NUL")
    try:
        folder, last = os.path.split(not_url(name, "path"))
        whole = resolve or last in ("", ".", "..")
        found = os.path.realpath(name) if whole else os.path.join(os.path.realpath(folder), last)
    except OSError as error:  # the current folder was deleted
        raise InputError(f"path={path!r}: there is no current folder ({error})") from error
    except UnicodeEncodeError as error:
        raise InputError(f"path={path!r}: {error}") from error
    if not os.path.basename(found):
        raise InputError(f"path={path!r}: a file system's root cannot be a checkpoint")
    return found


def not_url(name: str, what: str) -> str:
    """``name``, as it is.

    Raises:
        InputError: for a URL, which would be taken for a folder of that name on this machine.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", name):  # pathlib makes one slash of two
        raise InputError(
            f"{what}={name!r}: is a URL, and checkpoints are in file systems; mount what it names, "
            "or copy them there"
        )
    return name


def shown(path: object) -> str:
    """The path as errors tell it, and as ranks compare it."""
    if not isinstance(path, str | os.PathLike):
        return repr(path)
    name = os.fsdecode(path)
    with suppress(OSError):  # the current folder was deleted
        name = os.path.abspath(name)
    return name.encode(errors="backslashreplace").decode()
