"""The forwards since the last backward: what the next one may go through, and so has to gather.

A program belongs to one kind of backward, and what kind it is follows from the forwards before it;
see [Note: one agreed order].
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..training_state import inside_backward
from ..unit import Unit


class Forward:
    """Stands for a forward. The hooks on its graph hold it, so it lives as long as that does.

    Attributes:
        holds: keeps a model alive that nobody else holds, for a backward; None once one has ended.
            A model may keep its own output, and what autograd holds the garbage collector cannot
            see, so hooks that hold the model keep it for ever.
    """

    def __init__(self) -> None:
        self.holds: object = None


class _Noted(NamedTuple):
    """A forward that a backward may go through."""

    forward: weakref.ref[Forward]
    digest: int  # of what decides the turns of a backward through it


class ForwardLog:
    """The forwards since the last backward of one model.

    Attributes:
        current: the forward under way, or the last one.
        reached: those that the backward under way has come to.
    """

    def __init__(self) -> None:
        self.current = Forward()
        self.reached: set[Forward] = set()
        self._noted: list[_Noted] = []
        self._backwards = 0  # that have begun since those

    def begin(self) -> None:
        """Note that a forward begins."""
        self.current = Forward()

    def note(self, needed: str, gathered: str, order: Sequence[Unit] = ()) -> None:
        """Note that it has ended, or is cut by a backward, if one may go through it.

        Args:
            needed: the gathers that it needed; gathered: what is there after it; order: its calls.
        """
        if self._backwards > 0:
            self._noted, self._backwards = [], 0
        # Or if the forward has enabled gradients for itself: its outputs have hooks then.
        if torch.is_grad_enabled() or inside_backward() or self.current.holds is not None:
            # Without those that nobody can go through any more.
            self._noted = [each for each in self._noted if each.forward() is not None]
            calls = " ".join(str(unit.index) for unit in order)
            digest = zlib.crc32(f"{needed};{gathered};{calls}".encode())
            self._noted.append(_Noted(weakref.ref(self.current), digest))

    def begin_backward(self) -> None:
        """Note that a backward begins."""
        self._backwards += 1

    def about(self, came_from: Forward | None) -> str:
        """What kind of backward one is that begins now, as text.

        Args:
            came_from: the forward whose output the gradient has reached first, if it is known.
        """
        alive = [(each.forward(), each.digest) for each in self._noted]
        forwards = [(each is came_from, digest) for each, digest in alive if each is not None]
        return f"{forwards};{self._backwards}"

    def end_backward(self) -> None:
        """Note that the backward has ended, and what it has reached need hold the model no more."""
        while self.reached:
            self.reached.pop().holds = None

    def forget(self) -> None:
        """Begin anew."""
        self.end_backward()
        self._noted, self._backwards = [], 0
