"""Errors of the backends, by the names of the collective and of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import CommError, Error
from .standing import Missed

if TYPE_CHECKING:
    from ..comm import Comm
    from ..tag import Tag


class NamedErrors(NamedTuple):
    """Turns the backend's error into one that names the collective and the rank that saw it."""

    comm: Comm
    op: str
    tag: Tag

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is None:
            return
        if any(over.standing is not None and over.standing.failed for over in self.comm.axes):
            self.comm.broken = True
        if not isinstance(error, RuntimeError) or isinstance(error, Error):
            return
        self.comm.broken = True
        missed = isinstance(error, Missed)  # which names a rank already
        ended = "" if missed else "".join(over.ended() for over in self.comm.axes)
        if _says_out_of_memory(error):
            cause = "This rank is out of memory; the other ranks cannot go on without it."
        elif missed:
            cause = "The first error among the ranks' logs may say more."
        else:
            cause = (
                "Another rank has stopped, or runs a different model or order of units; look "
                "at the first error among the ranks' logs."
            )
        where = f"{self.tag.doing(self.op)}{self.tag.when} failed"
        if not missed:  # those that share memory with this rank would else wait for it
            why = f"{where}: {ended.strip().removesuffix('.') or error}"
            for over in self.comm.axes:
                if over.neighbours is not None:
                    over.neighbours.give_up(why)
        raise CommError(f"{self.comm.me}: {where}: {error}.{ended} {cause}") from error


def _says_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocation failed; torch's of a CPU's memory has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
