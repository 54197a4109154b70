"""The ranks of one host as one rank sees them: who is missing, and what small things they say.

There is one `Neighbours` for a process group, however many models are wrapped over it: a rank that
is in a meeting of one model finds there a rank that is in a meeting of another.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.distributed as dist

from ..tag import Tag
from .control import timeout_of
from .groups import Ranks, gather_objects
from .processes import Processes
from .shared import SharedArena, SharedWindow
from .standing import Missed, Standing

_SLICE_SECONDS = 0.05  # of a wait, between looks at whether the others are alive
_MAILBOX_BYTES = 1 << 20  # of each rank
_NOTE_BYTES = 256
_SMALL_SUM = 1 << 16  # bytes: sums below have a window of their own, to be waited for later
_FAILED = "!"  # starts the note of a rank that has given up
_LOST = _FAILED + "!"  # of one that has left a reset, in it a collective of the group half done
_TEXTS = 1024  # kept at a time: each save has a path of its own


class Neighbours(Standing):
    """What the ranks of ``ranks`` share; a rank that gives up tells the others.

    Args:
        processes: those of the ranks.

    Attributes:
        token: the same on all of them, and only there.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup, processes: Processes) -> None:
        self.token = str(ranks.all_gather_object(secrets.token_hex(8))[0])
        super().__init__("call zshard.reset(model) on every rank, or start anew")
        self._ranks, self._processes = ranks, processes
        self._seconds = timeout_of(group, ranks.device).total_seconds()
        self._arena = SharedArena(ranks)
        self._mailbox = self._arena.window(_MAILBOX_BYTES + 8)
        # (N,) int64: behind what a rank has put in there, how many bytes it is to pass in all.
        self._sizes = self._mailbox.rows[:, _MAILBOX_BYTES:].view(torch.int64)[:, 0].numpy()
        self._size = self._mailbox.own[_MAILBOX_BYTES:].view(torch.int64).numpy()
        self._sums: dict[int, SharedWindow] = {}  # by bytes
        self._summing: dict[int, _Sum] = {}  # the last of each
        notes = self._arena.window(_NOTE_BYTES)
        self._arena.settle()
        self._notes = notes.rows.numpy()
        self._note = memoryview(notes.own.numpy())  # type: ignore[arg-type]
        self._texts: dict[tuple[str, ...], bytes] = {}

    # --- who is missing --------------------------------------------------------------------------

    def note(self, op: str, tag: Tag) -> None:
        """Publish what this rank is at, for the others' errors."""
        key = op, tag.phase, tag.unit, tag.about
        text = self._texts.get(key)
        if text is None:
            text = tag.doing(op).encode()[: _NOTE_BYTES - 32]
            if len(self._texts) == _TEXTS:
                self._texts.clear()
            self._texts[key] = text
        self._write_note(text + tag.when.encode())

    def _write_note(self, text: bytes) -> None:
        if not self.failed:
            text = text[: _NOTE_BYTES - 1] + b"\0"
            self._note[: len(text)] = text

    def _note_anew(self, text: str) -> None:
        """Publish that this rank has given up, as ``text`` says, or with "" that it has not."""
        self.failed = ""
        self._write_note(text.encode())
        self.failed = text.lstrip(_FAILED)

    def give_up(self, why: str) -> None:
        """Tell the others, from now on, that this rank takes part no longer."""
        self._write_note((_FAILED + why).encode())
        super().give_up(why)

    def _noted(self, rank: int) -> str:
        text: bytes = self._notes[rank].tobytes()
        return text.partition(b"\0")[0].decode(errors="replace")

    def wait(self, wait: Callable[[float], int]) -> None:
        """Wait in slices, as long as the rank that is late is alive and the deadline far.

        Args:
            wait: of a Rendezvous.

        Raises:
            Missed: that names the rank; ``Comm`` says in which collective of which unit.
        """
        with self:
            deadline = time.monotonic() + self._seconds
            while (late := wait(_SLICE_SECONDS)) >= 0:
                problem = self._problem(late, out_of_time=time.monotonic() >= deadline)
                # It may have come, and gone, since it was late: who is stopped looks later.
                if problem and wait(0.0) == late:
                    # So that one who waits for this rank learns which one this rank waits for.
                    self.give_up(problem)
                    raise Missed(problem)

    def _problem(self, late: int, *, out_of_time: bool = False) -> str:
        """Why it makes no sense to wait for rank ``late`` any longer; "" if it does."""
        noted = self._noted(late)
        name = self._processes.name(late)
        if noted.startswith(_FAILED):
            return f"{name} has left the collectives: {noted.lstrip(_FAILED)}"
        seen = f"It was seen last at {noted}" if noted else "It has not been seen yet"
        ended = self._processes.ended()
        if late in ended:
            return f"{name} has ended. {seen}"
        if out_of_time:
            also = f", and these ranks have ended: {ended}" if ended else ""
            return f"{name} is alive but has not come for {self._seconds:g} s{also}. {seen}"
        return ""

    def ended(self) -> str:
        """Which ranks have ended, and what they were at, for an error that names none; or ""."""
        found = self._processes.ended(after_error=True)
        return "".join(f" {self._problem(rank)}." for rank in found)

    # --- what is small ---------------------------------------------------------------------------

    def swap(self, mine: torch.Tensor, take: Callable[[int, torch.Tensor], object]) -> None:
        """Pass ``mine`` (n,) uint8 through the mailbox.

        Args:
            take: called with the begin of each piece, and (N, piece) of all ranks.

        Raises:
            Missed: if another rank passes something else.
        """
        box = self._mailbox
        for begin in range(0, mine.numel(), _MAILBOX_BYTES):
            piece = mine[begin : begin + _MAILBOX_BYTES]
            self.wait(box.presence.await_departures)
            with self:
                box.own[: piece.numel()].copy_(piece)
                self._size[0] = mine.numel()
                box.presence.arrive()
                self.wait(box.presence.await_arrivals)
                if (self._sizes != mine.numel()).any():
                    self.give_up(problem := self._other_collective(mine.numel()))
                    raise Missed(problem)
                take(begin, box.rows[:, : piece.numel()])
                box.presence.depart()

    def _other_collective(self, nbytes: int) -> str:
        """What to say where not all ranks pass ``nbytes``."""
        rank = int((self._sizes != nbytes).argmax())
        return (
            f"{self._processes.name(rank)} passes {self._sizes[rank]} bytes where this rank passes "
            f"{nbytes}, so it is in another collective"
        )

    def words(self, mine: torch.Tensor) -> torch.Tensor:
        """Every rank's ``mine`` (n,), one behind the other."""
        everyone = mine.new_empty(self._ranks.size, mine.numel())

        def take(begin: int, rows: torch.Tensor) -> None:
            first, words = begin // mine.itemsize, rows.view(mine.dtype)
            everyone[:, first : first + words.shape[1]] = words

        self.swap(mine.view(torch.uint8), take)
        return everyone.view(-1)

    def objects(self, value: object) -> list[object]:
        """Every rank's ``value``, pickled on the way."""
        # Not through the process group, where those meet that have given up; see recovery.py.
        return gather_objects(value, self._ranks.size, self.words)

    def start_sum(self, value: torch.Tensor, *, maximum: bool) -> _Sum | None:
        """Start summing ``value`` in rank order (or taking its maximum), in place."""
        nbytes = value.nbytes
        # No memory is asked for after wrap: what has no room goes through the mailbox.
        room = nbytes in self._sums or (nbytes <= _SMALL_SUM and self._arena.has_room(nbytes))
        if not room:
            flat = value.view(-1)

            def take(begin: int, rows: torch.Tensor) -> None:
                first, parts = begin // value.itemsize, rows.view(value.dtype)
                flat[first : first + parts.shape[1]] = _sum(parts, maximum)

            self.swap(flat.view(torch.uint8), take)
            return None
        window = self._sums.get(nbytes)
        if window is None:
            window = self._sums[nbytes] = self._arena.window(nbytes)
        elif (before := self._summing.pop(nbytes, None)) is not None:
            before.wait()  # its memory is used again
        self.wait(window.presence.await_departures)
        with self:
            window.own.view(value.dtype).copy_(value.view(-1))
            window.presence.arrive()
            work = self._summing[nbytes] = _Sum(self, window, value, maximum)
        return work

    # --- after an exception ----------------------------------------------------------------------

    def given_up(self) -> bool:
        """Whether any rank has, as far as can be seen here."""
        return any(self._noted(rank).startswith(_FAILED) for rank in range(self._ranks.size))

    def recover(self, arenas: Iterable[SharedArena], mine: object) -> list[object]:
        """Begin anew where ranks have given up; all come here, through the process group.

        Args:
            arenas: of the models that share memory; mine: to be told to the others.

        Returns:
            What each rank has told.
        """
        lost = [rank for rank in range(self._ranks.size) if self._noted(rank).startswith(_LOST)]
        if lost:
            raise Missed(
                f"{self._processes.name(lost[0])} has left a reset half done, and with it the "
                "process group; start the processes anew, from the last checkpoint"
            )
        mark = "reset", self.token
        everyone = self._tell_in_reset((mark, mine))
        if any(not isinstance(each, tuple) or each[0] != mark for each in everyone):
            raise Missed("a rank is in another collective of the process group, not in a reset")
        # From here on nobody waits for anybody.
        for arena in (self._arena, *arenas):
            arena.rewind()
        self._sums.clear()
        self._summing.clear()
        self._note_anew("")
        self._tell_in_reset(None)
        return [told for _, told in cast("list[tuple[object, object]]", everyone)]

    def _tell_in_reset(self, mine: object) -> list[object]:
        """Every rank's ``mine``, by the process group, which has no place for who comes again."""
        try:
            return self._ranks.all_gather_object(mine)
        except RuntimeError:
            raise  # the group's own, as another rank has ended
        except BaseException as error:
            self._note_anew(f"{_LOST}{type(error).__name__} was raised in a reset")
            raise


class _Sum:
    def __init__(
        self, over: Neighbours, window: SharedWindow, value: torch.Tensor, maximum: bool
    ) -> None:
        self._over, self._window, self._maximum = over, window, maximum
        self._value: torch.Tensor | None = value  # until it is complete

    def wait(self) -> bool:
        if self._value is not None:
            with self._over:
                self._over.wait(self._window.presence.await_arrivals)
                total = _sum(self._window.rows.view(self._value.dtype), self._maximum)
                self._value.copy_(total.view_as(self._value))
                self._window.presence.depart()
                self._value = None
        return True


def _sum(rows: torch.Tensor, maximum: bool) -> torch.Tensor:
    """(n,): the sum, in rank order, or the maximum of ``rows`` (N, n)."""
    if maximum:
        return rows.amax(0)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
