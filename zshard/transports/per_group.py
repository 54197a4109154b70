"""What the models over one process group have in common; it goes with the group."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet, ref

import torch.distributed as dist

from .standing import Standing

if TYPE_CHECKING:
    from .groups import Ranks
    from .neighbours import Neighbours


class PerGroup:
    """Of one process group.

    Attributes:
        standing: this rank's, where ranks tell each other nothing but by the group's collectives.
        models: what the group is to each, whichever way it communicates: shards or replicas.
    """

    def __init__(self) -> None:
        self.standing = Standing("start the processes anew, from the last checkpoint")
        self.models: WeakSet[Ranks] = WeakSet()
        self._neighbours: ref[Neighbours] | None = None

    @property
    def neighbours(self) -> Neighbours | None:
        """Where the ranks meet that share memory, as long as a model does."""
        return None if self._neighbours is None else self._neighbours()

    @neighbours.setter
    def neighbours(self, neighbours: Neighbours) -> None:
        self._neighbours = ref(neighbours)


_OF_GROUPS: WeakKeyDictionary[dist.ProcessGroup, PerGroup] = WeakKeyDictionary()


def per_group(group: dist.ProcessGroup) -> PerGroup:
    """What there is of ``group``."""
    if group not in _OF_GROUPS:
        _OF_GROUPS[group] = PerGroup()
    return _OF_GROUPS[group]
