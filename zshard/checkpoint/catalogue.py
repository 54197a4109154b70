"""Checkpoints in a folder: which are whole, which is the newest, and what killed saves leave.

[Note: how a checkpoint takes its place]
A save writes into FOLDER/.NAME.ID.saving and then renames that to FOLDER/NAME, which is atomic. It
holds a lock of the folder, by which other saves beside it see that it is alive; until it has that
the folder is called .NAME.ID.starting, which they leave alone.
There is no atomic exchange of two folders among the ordinary calls, so where NAME is a checkpoint
already, that is renamed to .NAME.replaced before, and removed after. Killed between the two
renames, a save leaves .NAME.replaced alone, and so that is what there is at NAME: for a load, for
``latest``, and for the next save, which first renames it back. What is to be removed is renamed
first, so that no checkpoint is ever there in part.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress

from ..errors import CheckpointError, InputError
from ..whole_files import StrPath
from . import files
from .manifest import NAME, Manifest
from .manifest_reading import check_files, read_manifest, read_sequence
from .paths import not_url

RUN_FOLDER = "checkpoints"  # in the folder of a run of ``zshard train``
_REPLACED = ".replaced"
_OWN = re.compile(
    r"(model|master|optimizer|rng)(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
    rf"|{re.escape(NAME)}|(generation_)?config\.json"
)
_LEFTOVER = re.compile(r"(?s)\.(?P<name>.+)\.[0-9a-f]{32}\.(?P<what>starting|saving|deleted)")


def replaced(target: str) -> str:
    """Where the checkpoint at ``target`` is while another takes its place."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}{_REPLACED}")


def saving(target: str, save_id: str) -> str:
    """Where a checkpoint is written."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.{save_id}.saving")


def _has_manifest(place: str) -> bool:
    return files.exists(os.path.join(place, NAME))


def find(target: str) -> str:
    """The folder that ``target``'s checkpoint is in; see [Note: how a checkpoint takes its place].

    Raises:
        CheckpointError: if there is none.
    """
    if _has_manifest(target):
        return target
    # Not behind a folder with files in it: that is a newer checkpoint, which has lost its manifest.
    vacant = not files.is_folder(target) or not files.names_in(target)
    if vacant and _has_manifest(replaced(target)):
        return replaced(target)
    if not files.exists(target):
        raise CheckpointError(f"{target}: there is no checkpoint: it does not exist")
    if not files.is_folder(target):
        raise CheckpointError(f"{target}: is a file; a checkpoint is a folder with {NAME}")
    raise CheckpointError(
        f"{target}: is not a zshard checkpoint: it has no {NAME}; of the checkpoints in a folder, "
        "zshard.latest names the newest"
    )


def targets_in(folder: str) -> list[str]:
    """The paths in ``folder`` at which there may be a checkpoint; no leftovers, no links."""
    # A link to one beside it would be counted for a second one by ``keep``, and have the first
    # deleted.
    names = {n for n in files.names_in(folder) if not files.is_link(os.path.join(folder, n))}
    names |= {home for name in names if (home := _home(name))}
    return [os.path.join(folder, name) for name in sorted(names) if not _is_temporary(name)]


def checkpoints_in(folder: str) -> list[tuple[int, str]]:
    """Sequence and path of the checkpoints in ``folder``, newest first; they may be damaged.

    Raises:
        CheckpointError: if the system refuses to read one: its place among the others is not known.
    """
    found: list[tuple[int, str]] = []
    for target in targets_in(folder):
        place = ""
        with files.passing_over(*files.NOT_ALLOWED):  # a folder of others, or lost+found
            place = find(target)
        if place and (sequence := read_sequence(place)):
            found.append((sequence, target))
    return sorted(found, reverse=True)


def whole_id(target: str) -> str | None:
    """The id of the checkpoint at ``target`` if manifest, names, sizes and headers are its own.

    Raises:
        CheckpointError: if the system refuses to read it.
    """
    with files.passing_over():
        place = find(target)
        manifest = read_manifest(place)
        check_files(manifest, place)
        return manifest.id
    return None


def next_sequence(folder: str) -> int:
    """Greater than that of every checkpoint in ``folder``."""
    return 1 + max((sequence for sequence, _ in checkpoints_in(folder)), default=0)


def latest(folder: StrPath) -> str | None:
    """The path of the newest whole checkpoint in ``folder``; None if it has none, or is not there.

    Links to checkpoints are passed over.

    Whole: the manifest is undamaged, and all files are there with their sizes and headers. (The
    data's checksums are looked at by ``zshard.load``, and by ``zshard ckpt verify``.)

    Raises:
        InputError: if it is no path.
        CheckpointError: if the folder cannot be read, or the system refuses to read a checkpoint.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> zshard.latest("run") is None
        True
        >>> zshard.save("run/step-10", model)
        >>> os.path.basename(zshard.latest("run"))
        'step-10'
    """
    if not isinstance(folder, str | os.PathLike):
        raise InputError(f"folder={folder!r}: expected the path of a folder")
    given = not_url(os.fsdecode(folder), "folder")
    if not files.exists(given):
        return None
    while True:
        before = files.inodes_in(given)
        for _, path in checkpoints_in(given):
            if whole_id(path):
                return path
        if files.inodes_in(given) == before:
            return None
        # Another job has replaced a checkpoint while this one looked at its files.


def check_target(target: str, *, exported: bool) -> None:
    """Make sure that a save to ``target`` overwrites nothing but a checkpoint, and will last.

    Args:
        exported: nor one to go on from.

    Raises:
        CheckpointError: if it would.
    """
    if _is_temporary(os.path.basename(target)):
        raise CheckpointError(
            f"{target}: a later save would take this for what a killed one has left, by its name; "
            "name another folder"
        )
    if not files.exists(target):
        return
    if _has_manifest(target):
        if others := _others_in(target):
            raise CheckpointError(
                f"{target}: is a checkpoint with other things in it, which would be deleted with "
                f"it: {', '.join(others[:3])}{', ...' if others[3:] else ''}; move them, or name a "
                "new folder"
            )
        if exported and read_sequence(target):
            raise CheckpointError(
                f"{target}: is a checkpoint to go on from, and would be replaced by weights alone; "
                "export to another folder"
            )
        return
    if not files.is_folder(target):
        raise CheckpointError(f"{target}: is a file, which a checkpoint cannot replace")
    if files.names_in(target):
        raise CheckpointError(
            f"{target}: is a folder with other things in it, and no checkpoint; name a new folder"
        )


def _others_in(place: str) -> list[str]:
    """What is in a checkpoint's folder and was not written by a save."""
    return sorted(name for name in files.names_in(place) if not _OWN.fullmatch(name))


def tidy(target: str) -> None:
    """Put right what killed saves have left in the target's folder; other live saves stay."""
    folder, own = os.path.split(target)
    names = files.names_in(folder)
    leftovers = [match for name in names if (match := _LEFTOVER.fullmatch(name))]
    dead = [
        m
        for m in leftovers
        # One that is starting is free for a moment.
        if m["name"] == own or (m["what"] != "starting" and _is_free(os.path.join(folder, m[0])))
    ]
    alive = {m["name"] for m in leftovers} - {m["name"] for m in dead}
    if dead or any(_home(name) for name in names):
        # The killed save may not have synced its renames: without them this would be removed from
        # under the names before.
        files.sync_folder(folder)
    for match in dead:
        with suppress(CheckpointError):  # it is in nobody's way
            files.remove(os.path.join(folder, match[0]))
    for name in names:
        if not (home := _home(name)) or home in alive:
            continue
        place, displaced = os.path.join(folder, home), os.path.join(folder, name)
        with nullcontext() if home == own else suppress(CheckpointError):  # not in its way
            whole = _has_manifest(displaced)  # or a save was killed removing it
            if whole and not _has_manifest(place):
                with suppress(CheckpointError):  # over something that is no checkpoint; it stays
                    files.rename(displaced, place)
            elif home == own or _is_free(place):
                files.remove(displaced)


def _home(name: str) -> str | None:
    """Whose place something with this name has, if it is a checkpoint being replaced."""
    is_replaced = name.startswith(".") and name.endswith(_REPLACED)
    return name[1 : -len(_REPLACED)] if is_replaced else None


def _is_temporary(name: str) -> bool:
    """Whether it is one of the names that saves give to what does not stay."""
    return bool(_LEFTOVER.fullmatch(name) or _home(name))


def commit(written: str, target: str) -> None:
    """Make the folder ``written`` the checkpoint at ``target``."""
    folder = os.path.dirname(target)
    displaced = replaced(target) if _has_manifest(target) else None
    if displaced:
        files.rename(target, displaced)
    try:
        files.rename(written, target)  # over an empty folder, too
        try:
            files.sync_folder(folder)
        except CheckpointError:
            files.rename(target, written)
            raise
    except CheckpointError:
        if displaced:
            files.rename(displaced, target)
        raise
    with _removal_errors(target):
        if files.exists(replaced(target)):
            files.remove(replaced(target))


def prune(target: str, mine: Manifest, keep: int) -> None:
    """Delete the whole checkpoints beside ``target`` before the newest ``keep``.

    Those with other things in them stay, and those that another job has saved after ``mine``, the
    one at ``target``.
    """
    folder = os.path.dirname(target)
    with _removal_errors(target):
        whole = [(mine.sequence, target, mine.id)]
        for sequence, path in checkpoints_in(folder):
            with suppress(CheckpointError):  # one that the system refuses to read stays
                if path != target and (id := whole_id(path)):
                    whole.append((sequence, path, id))
        old = [each for each in sorted(whole)[:-keep] if each < (mine.sequence, target)]
        gone = [
            name
            for _, path, id in old  # the oldest first
            if (name := _taken_away(path, id, f".{os.path.basename(path)}.{mine.id}.deleted"))
        ]
        if gone:
            files.sync_folder(folder)  # or a loss of power could leave a part under the old name
        for name in gone:
            files.remove(name)


def _taken_away(path: str, id: str, name: str) -> str | None:
    """Where the checkpoint ``id`` of ``path`` is, renamed to ``name``; None if it stays.

    Or if another job has deleted or replaced it meanwhile.
    """
    away = os.path.join(os.path.dirname(path), name)
    try:
        if _others_in(place := find(path)):
            return None
        files.rename(place, away)
    except CheckpointError:
        if whole_id(path) == id:
            raise
        return None
    if read_manifest(away).id != id:  # it was replaced just now
        with suppress(CheckpointError):  # and is being replaced again
            files.rename(away, path)
            return None
    return away


@contextmanager
def _removal_errors(target: str) -> Iterator[None]:
    """Have an error say that ``target`` is saved, and only a checkpoint before it stays."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{target} is saved, but a checkpoint before it cannot be removed: {error}"
        ) from error


@contextmanager
def claimed(path: str) -> Iterator[None]:
    """Make the folder ``path`` of a save, which for other saves beside it is alive at once."""
    starting = f"{os.path.splitext(path)[0]}.starting"
    files.make_folder(starting)
    try:
        with ExitStack() as until_renamed:
            folder = files.File(starting, os.O_RDONLY | os.O_DIRECTORY)
            until_renamed.callback(folder.close)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files.rename(starting, path)
            until_renamed.pop_all()
    except CheckpointError:
        with suppress(CheckpointError):
            files.remove(starting)
        raise
    try:
        yield
    finally:
        with suppress(CheckpointError):  # the ranks have agreed already on how the save ended
            folder.close()


def _is_free(path: str) -> bool:
    """Whether no save is alive in ``path``; also False where the system cannot tell."""
    try:
        with files.File(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
            fcntl.flock(folder.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, CheckpointError):
        return False
    return True
