"""Whether all ranks have changed the parameters alike, or one has left out a step."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ..comm import Comm
from ..digest import digest
from ..errors import MismatchError
from ..param import Sharded
from ..tag import Tag
from ..unitmap import state_key
from ..units.flat import Flat

if TYPE_CHECKING:
    from ..schedule import Schedule

_BITS = 30  # of a checksum
_MEND = (
    "The model is torn. Every rank has to make the same changes; to mend it, write whole values "
    "inside zshard.full_params(model, write=True) (again, if this came as it began), or load a "
    "checkpoint."
)


class Tally(NamedTuple):
    """What a rank has changed over some time.

    Args:
        changes: how often it has changed the master of a flat buffer.
        checksum: of what every rank has to give alike, in any order; ``_BITS`` bits.
        of_gradients: as ``checksum``, of what changes gradients alone.
        torn: 1 if it has found the model torn before, and not mended it.
    """

    changes: int
    checksum: int
    of_gradients: int = 0
    torn: int = 0

    def since(self, before: Tally) -> Tally:
        """What has come after ``before``."""
        changes, *sums, _ = (now - then for now, then in zip(self, before, strict=True))
        checksum, of_gradients = (each % (1 << _BITS) for each in sums)
        return Tally(changes, checksum, of_gradients, self.torn)


NOTHING = Tally(0, 0)


class Tallies(NamedTuple):
    """What a rank has changed, where some ranks have come to the last ``check`` and some not.

    Without what changed gradients alone, which are gone.
    """

    checks: int  # that it has come to
    last: Tally  # since the last of them
    both: Tally  # since the one before that


@dataclass
class Change:
    """A change of masters under way; ``begun``: some may have new values."""

    begun: bool = False


class Updates:
    """Tallies the changes of the masters of ``flats`` from one meeting of the ranks to the next."""

    def __init__(self, flats: Sequence[Flat], comm: Comm) -> None:
        self._flats, self._comm = flats, comm
        self._checksum = self._of_gradients = 0  # of all that was noted
        self._not_made = 0  # changes that the flat buffers' versions count, and that were not made
        # Since the last check, for errors: all, and what was of gradients alone.
        self._noted: dict[str, object] = {}
        self._noted_of_gradients: set[str] = set()
        self._written: dict[str, int] = {}  # what of the checksum is of ``note_written``, by name
        self._agreed = self._before = NOTHING  # up to the last check and the one before
        self._checks = 0
        self._torn: set[tuple[Flat, int]] = set()  # of which ranks hold different versions

    def note(self, what: str, value: object, *, of_gradients: bool = False) -> None:
        """Note a value that changes parameters or gradients, and that all ranks have to give alike.

        Args:
            what: what it is, for errors.
            value: numbers, which errors show.
            of_gradients: it changes these alone.
        """
        if self._comm.world_size > 1:
            self._noted[what] = value
            checksum = zlib.crc32(f"{what}: {value}".encode())
            if of_gradients:
                self._of_gradients += checksum
                self._noted_of_gradients.add(what)
            else:
                self._checksum += checksum

    @contextmanager
    def change(self) -> Iterator[Change]:
        """A context in which the masters' versions are counted up, and then the masters changed.

        After an exception before that it is no change. After one behind it nobody can say how much
        of it there is, and no other rank's changes equal this one's.
        """
        before, change = self._now().changes, Change()
        try:
            yield change
        except BaseException:
            if change.begun:
                self.note("a step that an exception has ended", f"on {self._comm.me}")
            else:
                self._not_made += self._now().changes - before
            raise

    def note_many(self, what: str, values: object, *, of_gradients: bool = False) -> None:
        """As ``note``, of what is too much for errors to show: they give its checksum."""
        if self._comm.world_size > 1:
            checksum = f"{zlib.crc32(repr(values).encode()):08x}"
            self.note(f"{what} (by checksum)", checksum, of_gradients=of_gradients)

    def note_value(self, flat: Flat, index: int, whole: torch.Tensor) -> None:
        """Note that parameter ``index`` of ``flat`` got its part of ``whole``.

        What was noted of a forward's write there is taken back, as nobody could use that. Values
        that were loaded before still count: an average may have taken them in.
        """
        if self._comm.world_size > 1:
            what, seen = _value(flat, index, whole)
            self._checksum -= self._written.pop(what, 0)
            self.note(what, seen)
            self.replaced(flat, index)

    def note_written(self, flat: Flat, index: int, whole: torch.Tensor) -> None:
        """As ``note_value``, of what a forward or backward has written there, to be refused."""
        if self._comm.world_size > 1:
            what, seen = _value(flat, index, whole)
            before = self._checksum
            self.note(what, seen)
            self._written[what] = self._written.get(what, 0) + self._checksum - before

    def note_gradient(self, flat: Flat, index: int, whole: torch.Tensor) -> None:
        """As ``note_value``, of its gradient."""
        if self._comm.world_size > 1:
            seen = digest(whole.to(flat.dtypes.reduce))
            what = f"the gradient of {flat.names[index]} (by checksum)"
            self.note(what, seen, of_gradients=True)

    def _now(self) -> Tally:
        changes = sum(flat.version for flat in self._flats) - self._not_made
        return Tally(changes, self._checksum, self._of_gradients, int(self.torn))

    def tally(self) -> Tally:
        """What was changed since ``check`` was called last, for the others."""
        changes, checksum, of_gradients, torn = self._now().since(self._agreed)
        return Tally(changes, (checksum + of_gradients) % (1 << _BITS), torn=torn)

    def loaded(self, missing: Collection[str]) -> None:
        """Note that all ranks have taken the same values of what is not ``missing``, by keys.

        If that is every parameter, forget all changes so far.
        """
        left = {
            (flat, index)
            for flat in self._flats
            for index, names in enumerate(flat.all_names)
            if not {*map(state_key, names)}.isdisjoint(missing)
        }
        self._torn &= left
        if not left:
            self._begin_anew()

    def replaced(self, flat: Flat, index: int) -> None:
        """Note that all ranks take the same values of parameter ``index`` of ``flat``."""
        self._torn.discard((flat, index))

    def mended(self) -> None:
        """Note that all ranks have taken the same values, of every parameter."""
        self._torn.clear()

    @property
    def torn(self) -> bool:
        """Whether a parameter is of different versions on the ranks, as all found in ``check``."""
        return bool(self._torn)

    def require_whole(self, what: str) -> None:
        """Raise MismatchError, on every rank, if ``what`` would take parts of several versions."""
        if self.torn:
            raise MismatchError(f"{what} is refused. {_MEND}")

    def _begin_anew(self) -> None:
        self._before, self._agreed = self._agreed, self._now()
        self._checks += 1
        self._noted.clear()
        self._noted_of_gradients.clear()
        self._written.clear()

    def forget_gradients(self) -> None:
        """Forget what was noted of gradients alone since the last check: all ranks drop them."""
        self._of_gradients = self._agreed.of_gradients
        for what in self._noted_of_gradients:
            self._noted.pop(what, None)
        self._noted_of_gradients.clear()

    def tallies(self) -> Tallies:
        """What was changed since the last two checks."""
        now, thens = self._now(), (self._agreed, self._before)
        last, both = (now.since(then)._replace(of_gradients=0) for then in thens)
        return Tallies(self._checks, last, both)

    def catch_up(self, everyone: Sequence[Tallies]) -> None:
        """As ``check``, where ranks may have come to the last one or not: from the one before.

        Args:
            everyone: the ranks' ``tallies``.
        """
        first = min(each.checks for each in everyone)
        self._checks = first
        self._noted.clear()  # the ranks' are of different times
        self.check([each.last if each.checks == first else each.both for each in everyone])

    def check(self, everyone: Sequence[Tally]) -> None:
        """Compare the ranks' tallies, and begin anew. All ranks come here.

        Args:
            everyone: the ranks' ``tally``.

        Raises:
            MismatchError: on every rank, if they differ.
        """
        alike, changed = len(set(everyone)) == 1, [tally.changes for tally in everyone]
        # If nothing was changed, what differs has not come to the parameters.
        if not alike and (any(changed) or any(tally.torn for tally in everyone)):
            self._torn = {(flat, index) for flat in self._flats for index in range(len(flat.names))}
        noted = dict(self._noted)
        self._begin_anew()
        if alike:
            return
        told = self._comm.all_gather_object(noted, Tag(None, "agree", about="a change"))
        found = _first_difference(cast("list[dict[str, object]]", told), self._comm)
        if len(set(changed)) > 1:
            raise MismatchError(
                "an optimizer's step, or another change of parameters, was left out on some ranks: "
                f"since they last met the ranks have changed {changed} flat "
                f"buffers{f' ({found})' if found else ''}. {_MEND}"
            )
        raise MismatchError(
            "since they last met the ranks have changed the parameters differently: "
            f"{found or 'by a value that has been replaced since'}. {_MEND}"
        )


def note_step(name: str, groups: Sequence[Mapping[str, Any]], settings: object) -> None:
    """Note, of each wrapped model, what a step of an optimizer is about to do with it.

    Args:
        name: the optimizer's; groups: its param_groups; settings: their numbers.
    """
    members: dict[Schedule, list[tuple[int, str]]] = {}
    for index, group in enumerate(groups):
        for param in group["params"]:
            if isinstance(param, Sharded) and param.flat.schedule.comm.world_size > 1:
                members.setdefault(param.flat.schedule, []).append((index, param.fqn))
    for schedule, names in members.items():
        if schedule.totals.has_gradients:
            present = [flat.grads.present for flat in schedule.flats]
            note, note_many = schedule.updates.note, schedule.updates.note_many
            note(f"the settings of {name}'s groups", settings)
            note_many(f"which parameters are in {name}'s groups", names)
            note_many(f"which parameters have gradients in {name}'s step", present)


def note_states(
    name: str, param: torch.Tensor, states: Mapping[str, object], names: Iterable[str]
) -> None:
    """Note whole states of ``param`` that an optimizer is given, the step and those of ``names``.

    Those of one dimension may be this rank's slice, and are not compared.

    Args:
        name: the optimizer's.
    """
    if isinstance(param, Sharded) and param.flat.schedule.comm.world_size > 1:
        for state in ("step", *names):
            value = states.get(state)
            if isinstance(value, Sharded) or not isinstance(value, torch.Tensor):
                continue
            if value.ndim != 1:
                what = f"{state} of {param.fqn}, loaded into {name},"
                param.flat.schedule.updates.note_many(what, digest(value))


def _value(flat: Flat, index: int, whole: torch.Tensor) -> tuple[str, object]:
    """What errors call the value ``whole`` of a parameter, and what they show of it."""
    seen = digest(whole.to(flat.dtypes.master))
    return f"the values of {flat.names[index]} (by checksum)", seen


def _first_difference(noted: Sequence[dict[str, object]], comm: Comm) -> str:
    """Which of the values that the ranks have noted differs, rank by rank; or ""."""
    for what in dict.fromkeys(what for each in noted for what in each):
        values = [each.get(what) for each in noted]
        if len(set(map(str, values))) > 1:
            shown = "; ".join(f"{value} on {comm.name(rank)}" for rank, value in enumerate(values))
            return f"{what}: {shown}"
    return ""
