"""What one rank refuses, all refuse: its error is told to the others before they go on together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from .. import errors
from ..errors import Error, WrapError
from .shared import NoSharedMemory

if TYPE_CHECKING:
    from ..comm import Comm
    from ..tag import Tag

T = TypeVar("T")


class Refusal(NamedTuple):
    """An error as one rank tells it to the others."""

    kind: str  # name of the class of zshard's errors that it is of
    text: str
    lack: bool = False  # only memory to share is lacking; ``text`` says already on which rank

    @classmethod
    def of(cls, failure: Exception | None, other: type[Error] = WrapError) -> Refusal | None:
        """None if there is none.

        Args:
            other: what an error is told as that is not one of zshard's.
        """
        if failure is None:
            return None
        if not isinstance(failure, Error):
            return cls(other.__name__, f"{type(failure).__name__}: {failure}")
        kinds = [kind.__name__ for kind in type(failure).__mro__]
        kind = next(kind for kind in kinds if hasattr(errors, kind))
        return cls(kind, str(failure), lack=isinstance(failure, NoSharedMemory))


def attempt(
    action: Callable[[], object], comm: Comm, tag: Tag, other: type[Error] = WrapError
) -> tuple[Exception | None, list[Refusal | None]]:
    """Run ``action`` on every rank, and have all learn whether it failed on any.

    Args:
        other: what an error is told as that is not one of zshard's.

    Returns:
        This rank's error; what all ranks refuse, by ``Comm.world_rank``, [] if none does.
    """
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    words = comm.all_gather_words([failure is not None], tag)
    if not any(refuses for (refuses,) in words):
        return None, []
    told = comm.all_gather_object(Refusal.of(failure, other), tag)
    return failure, cast("list[Refusal | None]", told)


def together(
    action: Callable[[], T], comm: Comm, tag: Tag, other: type[Error] = WrapError, at: str = ""
) -> T:
    """The result of ``action`` on this rank; an error on every rank if it failed on any.

    Args:
        other: see ``attempt``; at: see ``raise_together``.
    """
    made: list[T] = []
    failure, told = attempt(lambda: made.append(action()), comm, tag, other)
    raise_together(failure, told, comm.global_ranks, at)
    return made[0]


def raise_together(
    failure: Exception | None,
    everyone: Sequence[Refusal | None],
    global_ranks: Sequence[int],
    at: str = "",
) -> None:
    """Raise if any rank has refused: this rank's own error, or one that names another rank.

    Args:
        failure: this rank's error.
        everyone: what all ranks have told; global_ranks: see ``Comm``.
        at: what the rank could not do, where its error alone does not say so.

    Raises:
        Error: of the kind that the first of these ranks has raised.
    """
    if failure is not None:
        raise failure
    for rank, refusal in zip(global_ranks, everyone, strict=False):  # [] if none has
        if refusal is not None:
            who = f"rank {rank}" + (f" could not {at}" if at else "")
            text = refusal.text if refusal.lack else f"{who}: {refusal.text}"
            raise getattr(errors, refusal.kind)(text)
