"""Exceptions of signals' handlers in the middle of a collective over the process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..comm import Comm


class Meanwhile(NamedTuple):
    """A context in which Ctrl-C leaves a collective; see ``Comm.meanwhile``.

    Over the process group nobody can tell how far the rank has come, so it takes part in nothing
    more. Exceptions but Ctrl-C are those of all ranks alike (memory), or are told to the others.
    """

    comm: Comm
    what: str
    unit: str

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if error is None or isinstance(error, Exception):
            return
        if any(not over.in_memory and over.neighbours is None for over in self.comm.axes):
            of = f" of unit {self.unit!r}" if self.unit else ""
            self.comm.leave(error, self.what + of)
