"""Whether this rank still takes part in the collectives over a process group.

[Note: half done]
An exception out of the middle of a collective, a signal's handler's say, leaves it half done, and
nobody can tell how far. The other ranks would take this rank's next collective, whichever model's
it is, for the rest of that one: so it begins none any more. Where ranks share memory it tells them,
and all of them begin anew together: [Note: giving up].
"""

from __future__ import annotations

import os
from weakref import WeakSet

_OF_RANKS: WeakSet[Standing] = WeakSet()  # all there are


class Missed(RuntimeError):
    """A rank will not come to a collective any more; says which one, and why."""


class Standing:
    """This rank's part in what runs over a process group; one for all models over it.

    As a context it is the middle of a collective.

    Attributes:
        failed: why this rank has given up, "" as long as it has not.
        remedy: what then helps.
    """

    def __init__(self, remedy: str) -> None:
        self.failed = ""
        self.remedy = remedy
        _OF_RANKS.add(self)

    def give_up(self, why: str) -> None:
        """Take part no longer."""
        self.failed = self.failed or why

    def leave(self, kind: type[BaseException], where: str) -> None:
        """Give up because an exception has come out of the middle of something."""
        self.give_up(f"{kind.__name__} was raised in it during {where}")

    def require(self) -> None:
        """Make sure that this rank takes part.

        Raises:
            Missed: if it has given up.
        """
        if self.failed:
            raise Missed(f"this rank has left the collectives ({self.failed}); {self.remedy}")

    def __enter__(self) -> None:
        self.require()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is not None:
            self.leave(kind, "a collective")


def _leave_in_child() -> None:
    """A forked process has its parent's connections and memory, but counts as no rank."""
    for standing in list(_OF_RANKS):  # nothing is told to anybody
        standing.failed = "this process was forked from a rank"
        standing.remedy = "call the model in the rank"


os.register_at_fork(after_in_child=_leave_in_child)
