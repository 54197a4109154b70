"""All access to checkpoint files: ordinary calls, each able to fail, each failure with its path.

Nothing here is mapped into memory: a file that is cut short is an error, not a signal.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from ..errors import CheckpointError

MAX_NBYTES = 1 << 30  # of a manifest, or a header: more is no checkpoint, but an attack on memory


@contextmanager
def _names(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # the latter: a NUL, or no Unicode
        raise CheckpointError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


# Of a name behind which is no file to be read, or none any more (on NFS: a stale handle).
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EISDIR, errno.ELOOP, errno.ENXIO}
NOT_ALLOWED = (errno.EACCES, errno.EPERM)


@contextmanager
def passing_over(*also: int) -> Iterator[None]:
    """Pass over what is damaged or missing, but not what the system refuses to read.

    Args:
        also: reasons of the system, by errno, that are passed over as well.
    """
    try:
        yield
    except CheckpointError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno not in _NO_FILE.union(also):
            raise


class File:
    """An open file, read and written at offsets (bytes); closed at the end of a ``with``."""

    def __init__(self, path: str, flags: int) -> None:
        self.path = path
        with _names(path):
            self.descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)

    @classmethod
    def create(cls, path: str) -> File:
        """A new file, which must not exist."""
        return cls(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    @classmethod
    def to_write(cls, path: str) -> File:
        """A file that exists."""
        return cls(path, os.O_WRONLY)

    @classmethod
    def to_read(cls, path: str) -> File:
        """A file that exists."""
        # A pipe in its place would make a plain open wait forever.
        return cls(path, os.O_RDONLY | os.O_NONBLOCK)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of ``data``.

        Raises:
            CheckpointError: if the system does not take all of it.
        """
        rest = memoryview(data)
        while rest.nbytes:
            with _names(self.path):
                count = os.pwrite(self.descriptor, rest, offset)
            if count == 0:
                raise CheckpointError(f"{self.path}: nothing was written at byte {offset}")
            rest, offset = rest[count:], offset + count

    def read(self, into: bytearray | memoryview, offset: int) -> None:
        """Fill ``into``.

        Raises:
            CheckpointError: if the file ends before.
        """
        rest = memoryview(into)
        while rest.nbytes:
            with _names(self.path):
                count = os.preadv(self.descriptor, [rest], offset)
            if count == 0:
                raise CheckpointError(f"{self.path}: ends at byte {self.size()}; it was cut short")
            rest, offset = rest[count:], offset + count

    def size(self) -> int:
        """Bytes."""
        with _names(self.path):
            return os.fstat(self.descriptor).st_size

    def sync(self) -> None:
        """Sync what was written, so that it survives a loss of power."""
        with _names(self.path):
            os.fsync(self.descriptor)

    def close(self) -> None:
        """Close it, once."""
        with _names(self.path):
            os.close(self.descriptor)

    def __enter__(self) -> File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with suppress(CheckpointError):
                self.close()


def write_synced(path: str, data: bytes) -> None:
    """Make a new file of ``data``, and have it survive a loss of power."""
    with File.create(path) as file:
        file.write(data, 0)
        file.sync()


def read_whole(path: str) -> bytes:
    """All of a file, of at most ``MAX_NBYTES``."""
    with File.to_read(path) as file:
        if (size := file.size()) > MAX_NBYTES:
            raise CheckpointError(f"{path}: has {size} bytes, more than the limit of {MAX_NBYTES}")
        data = bytearray(size)
        file.read(data, 0)
    return bytes(data)


def make_folder(path: str) -> None:
    """Make the folder ``path``, which must not exist."""
    with _names(path):
        os.mkdir(path)


def make_parents(path: str) -> None:
    """Make the folder ``path``, and those around it, where they do not exist."""
    missing = []
    while not exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with _names(folder), suppress(FileExistsError):  # another job makes the same one
            os.mkdir(folder)
        sync_folder(os.path.dirname(folder))


def sync_folder(path: str) -> None:
    """Sync a folder, so that the names in it survive a loss of power."""
    with File(path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        folder.sync()


def rename(old: str, new: str) -> None:
    """Give a folder another name; atomic."""
    with _names(new):
        os.rename(old, new)


def exists(path: str) -> bool:
    """Whether there is anything at ``path``."""
    with _names(path), suppress(FileNotFoundError, NotADirectoryError):
        os.lstat(path)
        return True
    return False


def is_folder(path: str) -> bool:
    """Whether there is a folder at ``path``."""
    with _names(path), suppress(FileNotFoundError, NotADirectoryError):
        return stat.S_ISDIR(os.stat(path).st_mode)
    return False


def is_link(path: str) -> bool:
    """Whether there is a symbolic link at ``path``."""
    return os.path.islink(path)


def names_in(folder: str) -> list[str]:
    """The names in a folder, sorted."""
    with _names(folder):
        return sorted(os.listdir(folder))


def inodes_in(folder: str) -> dict[str, int]:
    """The entries of a folder, and what tells one from another that takes its name."""
    with _names(folder), os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries}


def remove(path: str) -> None:
    """Remove a folder with all that is in it, or a file; what is not there (any more) is well."""
    with _names(path), suppress(FileNotFoundError):  # another job tidies the same folder
        if is_folder(path) and not is_link(path):
            for name in sorted(os.listdir(path)):
                remove(os.path.join(path, name))
            os.rmdir(path)
        else:
            os.unlink(path)
