"""The gradients of one flat buffer as objects: what ``p.grad`` is, and what becomes of one kept.

The gradients of every step lie in the same memory. ``p.grad`` is one object for as long as the
gradient accumulates; once that is dropped the next one is another, as with plain tensors, so
whoever still has the first has to keep its values. From then on nobody can get it through
``p.grad``, so it is enough to ask as it is dropped whether anybody has it. Its count of references
says so for nothing, where a new object for every step would cost time.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from ..errors import StateError
from ..param import Sharded, ShardedGrad

if TYPE_CHECKING:
    from .flat import Flat


class Aliases:
    """Sharded tensors over the memory of others, as ``detach`` and ``.data`` make them."""

    def __init__(self, count: int) -> None:
        self._known: list[list[weakref.ref[Sharded]]] = [[] for _ in range(count)]

    def note(self, alias: Sharded) -> None:
        """Note that the user was given ``alias``."""
        known = self._known[alias.segment]
        known[:] = [each for each in known if each() is not None] + [weakref.ref(alias)]

    def of(self, index: int) -> list[Sharded]:
        """Those of segment ``index`` that somebody still has."""
        return [alias for each in self._known[index] if (alias := each()) is not None]

    def take(self, index: int) -> list[Sharded]:
        """As ``of``; they are forgotten."""
        found, self._known[index] = self.of(index), []
        return found

    def drop(self, alias: Sharded) -> None:
        """Forget ``alias``, if it is one: it has memory of its own from here on."""
        known = self._known[alias.segment]
        known[:] = [each for each in known if each() is not alias]


class LostGrad(Sharded):
    """A gradient that was dropped before it was reduced, and kept by the user."""

    @property
    def local(self) -> NoReturn:
        """No rank has it."""
        raise StateError(
            f"{self.fqn}: this gradient was dropped while zshard.no_sync held it back, and was "
            "never reduced"
        )


class GradObjects:
    """What the user was given of the gradients of ``flat``."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._objects: list[ShardedGrad | None] = [None] * len(flat.names)
        self.aliases = Aliases(len(flat.names))

    def get(self, index: int) -> ShardedGrad | None:
        """The object that stands for the gradient of parameter ``index``, if there is one."""
        return self._objects[index]

    def make(self, index: int, owned: torch.Tensor) -> ShardedGrad:
        """A new one; ``owned`` (O,) has the values."""
        local = self._flat.local(index).at.of(owned)
        with torch.inference_mode(False):  # it outlives what it was asked for in
            made = self._objects[index] = ShardedGrad(local, self._flat, index)
        return made

    def alias(self, of: ShardedGrad) -> ShardedGrad:
        """Another object for what ``of`` stands for, which sees and changes the same values."""
        with torch.inference_mode(False):
            alias = ShardedGrad(of._local, self._flat, of.segment)
        self.aliases.note(alias)
        return alias

    def leave(self, index: int, *, held_back: bool) -> None:
        """Leave gradient ``index``, which is dropped, to those who keep it.

        Args:
            held_back: by no_sync, so that nobody has it whole.
        """
        kept = self.aliases.take(index)
        if _is_kept(self._objects, index):
            left, self._objects[index] = self._objects[index], None
            assert left is not None
            kept.append(left)
        for each in kept:
            each.__class__ = LostGrad if held_back else Sharded
            self._give_memory(each)

    def leave_data(self, of: ShardedGrad) -> None:
        """Before ``of.data = ...``: part its aliases from ``p.grad``, or ``of`` if it is one.

        Raises:
            StateError: if the gradient cannot be written or read, as ``Gradients`` says.
        """
        if of is self._objects[of.segment]:
            self._flat.grads.before_access(of.segment)
            parted = self.aliases.take(of.segment)
        else:
            self._flat.grads.before_look(of.segment)
            self.aliases.drop(of)
            parted = [of]
        for each in parted:
            each.__class__ = Sharded
            self._give_memory(each)

    def _give_memory(self, kept: Sharded) -> None:
        """Give what was a gradient memory of its own, with the values that a reader sees."""
        assert kept._local is not None
        scale = self._flat.schedule.totals.grad_scale
        own = kept._local.to(self._flat.dtypes.master, copy=True)
        kept._local = own if scale is None else own.mul_(scale)

    def clear(self) -> None:
        """Drop every gradient's object; the memory is freed."""
        self._objects = [None] * len(self._objects)


def _references(items: Sequence[object], index: int) -> int:
    return sys.getrefcount(items[index])


_ALONE = _references([object()], 0)  # where there is none but the list's


def _is_kept(items: Sequence[object], index: int) -> bool:
    """Whether anybody but the list refers to an item."""
    return items[index] is not None and _references(items, index) > _ALONE
