"""What ranks tell each other when they meet; see [Note: one agreed order] in program.py."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn, Protocol, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist

from ..comm import Comm
from ..errors import MismatchError
from ..tag import Tag
from ..unit import Unit
from .updates import Tally


class Intent(enum.IntEnum):
    """What a rank brings to a meeting."""

    FORWARD = 0  # from here on: about to begin
    BACKWARD = 1  # one that reduces every unit
    HOLD = 2  # a backward inside no_sync
    RENEW = 3
    CALL = 4  # what a script calls between steps
    ALONE = 5  # a forward of one unit
    METHOD = 6  # the rest of a method that has called the model, or its end
    CALLED = 7  # a forward that a method has called
    GO_ON = 8  # with a forward, inside of which another model's pass has ended
    END = 9  # of a pass without a program, or of one that ranks have left before
    GATHER = 10  # from here on: needed now
    READY = 11

    @property
    def is_forward(self) -> bool:
        """Whether it is a forward, or a part of one."""
        return self in _FORWARDS

    @property
    def same_about(self) -> bool:
        """Whether what it is about is the same on every rank."""
        return self in _SAME_ABOUT


_FORWARDS = frozenset((Intent.FORWARD, Intent.ALONE, Intent.METHOD, Intent.CALLED, Intent.GO_ON))
_SAME_ABOUT = frozenset((Intent.CALL, Intent.METHOD))
_NEEDS = frozenset((Intent.GATHER, Intent.READY))
_OF_A_STEP = _FORWARDS | {Intent.BACKWARD, Intent.HOLD, Intent.RENEW}

_EVALUATION = (
    " What some ranks evaluate alone belongs inside `with zshard.full_params(model), "
    "torch.no_grad():`, which all ranks enter."
)


def checksum(text: str) -> int:
    """What a message carries of ``text``."""
    return zlib.crc32(text.encode())


class Message(NamedTuple):
    """One rank's part of a meeting; whole numbers all, 0 where the intent says nothing of them."""

    model: int  # number of the wrapped model
    intent: Intent
    unit: int = 0  # index of the one that is called alone, needed or ready
    about: int = 0  # checksum of what the pass depends on; at its end see ``Pass.asks``; of a need
    # 1: it is not a part of the pass that this rank was in last
    trained: int = 0  # checksum of the parameters that a backward trains
    changes: int = 0  # see ``Tally``
    checksum: int = 0
    torn: int = 0
    buffers: int = 0  # 1: the rank's buffers may have changed
    left: int = 0  # 1: the rank has left a forward by an exception, and begun nothing since
    inside: int = 0  # how many forwards it begins inside of: other models', or a backward its own
    there: int = 0  # checksum of the numbers of the models that the rank has not deleted
    over: int = 0  # checksum of the ranks along each axis of the mesh; models number from 0 in each

    @property
    def tally(self) -> Tally:
        """What the rank has changed since the ranks last compared it."""
        return Tally(self.changes, self.checksum, torn=self.torn)

    @property
    def needs_in_pass(self) -> bool:
        """Whether it is a need that belongs into the program of its pass."""
        return self.intent in _NEEDS and self.about == 0

    @property
    def begins(self) -> tuple[int, ...]:
        """What it is about to begin, which is the same on every rank."""
        about = self.about if self.intent.same_about else 0
        return self.model, self.intent, self.unit, self.inside, about


class Member(Protocol):
    """A model's part in the meetings: its agreement."""

    def serve(self, mine: Message, messages: Sequence[Message]) -> None:
        """Carry out what ``messages``, one of each rank, ask for of this model."""

    def forgo_learning(self) -> None:
        """Learn nothing of the last pass."""

    def pause(self) -> None:
        """Let another model's pass begin inside a forward."""

    def go_on(self) -> None:
        """Go on with a forward that was paused."""


class Meetings:
    """Where the ranks of all models that are wrapped over the same ones meet.

    A rank may be asked to take part in the gather of one model when it is about to begin a pass of
    another.

    Args:
        mesh: see ``Comm``.

    Attributes:
        left: whether this rank has left a forward by an exception, and begun nothing since.
        others_may_be_inside: whether other ranks may be in a pass that this one has ended, and
            need more of it.
    """

    def __init__(self, mesh: str = "") -> None:
        self._over = checksum(mesh)
        self.left = self.others_may_be_inside = False
        self._forwards: list[Member] = []  # in which one is under way, the outermost first
        self._members: WeakValueDictionary[int, Member] = WeakValueDictionary()
        self._added = 0

    def count_alike(self, comm: Comm) -> None:
        """Number the next member behind all that any rank has; every rank comes here.

        A rank that an exception has ended a wrap on, behind its last exchange, has one less.
        """
        self._added = max(comm.all_gather_words([self._added], Tag(None, "wrap")))[0]

    def add(self, member: Member) -> int:
        """Let ``member`` be asked; its number, which it has on every rank."""
        number = self._added
        self._added += 1
        self._members[number] = member
        return number

    def enter_forward(self, member: Member) -> None:
        """A forward of ``member`` begins, inside of those that are under way."""
        self.leave_forward(member)  # which an exception may not have
        self._forwards.append(member)

    def leave_forward(self, member: Member) -> None:
        """The forward of ``member`` has ended, if one was under way."""
        if member in self._forwards:
            self._forwards.remove(member)

    def pause(self, member: Member) -> None:
        """A pass of ``member`` is about to begin, maybe inside of another model's forward."""
        if self._forwards and self._forwards[-1] is not member:
            self._forwards[-1].pause()

    def go_on(self, member: Member) -> None:
        """That pass has ended."""
        if self._forwards and self._forwards[-1] is not member:
            self._forwards[-1].go_on()

    def begin(
        self, member: Member, comm: Comm, mine: Message, label: str, step: int
    ) -> list[Message]:
        """Bring ``mine``, with where this rank begins it; return as ``meet``.

        Raises:
            MismatchError: as ``meet``; also if some ranks are inside of more forwards than others.
        """
        left = self.left and mine.intent is not Intent.METHOD  # which tells of it itself
        inside = mine.inside + sum(each is not member for each in self._forwards)
        messages = self.meet(comm, mine._replace(left=int(left), inside=inside), label, step)
        self.left = False
        return messages

    def meet(self, comm: Comm, mine: Message, label: str, step: int) -> list[Message]:
        """Bring ``mine``; return when it is served, or all ranks are about to begin something.

        Args:
            comm: of the model that ``mine`` is about.
            label: what errors call ``mine``; step: in which it is.

        Returns:
            What each rank has brought.

        Raises:
            MismatchError: as ``refuse_but_who_left`` and ``refuse_deleted``; also if another rank
                brings something of a model over another mesh.
        """
        tag = Tag(step, "agree", "root", label)
        while True:
            self.others_may_be_inside = False
            members = dict(self._members.items())  # none goes before it has served
            there = checksum(str(sorted(members)))
            mine = mine._replace(there=there, over=self._over)
            words = comm.all_gather_words(mine, tag)
            if mine.intent not in _NEEDS and words.count([*mine]) == len(words):
                return [mine] * len(words)  # the rule, in no more time for hundreds of ranks
            messages = [Message(model, Intent(intent), *rest) for model, intent, *rest in words]
            if len({message.over for message in messages}) > 1:  # groups may be of several meshes
                forgo_learning(members)
                refuse(comm, f"{label}, of a model over {comm.mesh_name}")
            asking = [message for message in messages if message.intent in _NEEDS]
            if asking:
                asked = sorted({message.model for message in asking})
                if len({message.there for message in messages}) > 1:
                    refuse_deleted(comm, asked, members)
                for model in asked:
                    members[model].serve(mine, messages)
                if mine in asking:
                    return messages
            elif len({each.begins for each in messages}) == 1:
                return messages
            else:
                forgo_learning(members)
                # Who has left may be at a change of parameters, and waits for the others there.
                self.others_may_be_inside = any(
                    each.left and each.intent is Intent.END for each in messages
                )
                refuse_but_who_left(comm, label, mine, messages)


# By ``Comm.mesh``, as long as the default group lives: in the next one a process that takes the
# place of another has wrapped fewer models.
_MEETINGS: WeakKeyDictionary[dist.ProcessGroup, dict[str, Meetings]] = WeakKeyDictionary()


def meetings_of(comm: Comm) -> Meetings:
    """The meetings of all models that are wrapped over the ranks of ``comm``, by now.

    On one rank there is nobody to meet, and threads may train a model each: each has its own.
    """
    if comm.world_size == 1:
        return Meetings()
    assert dist.group.WORLD is not None
    there = _MEETINGS.setdefault(dist.group.WORLD, {})
    return there.setdefault(comm.mesh, Meetings(comm.mesh))


def forgo_learning(members: Mapping[int, Member]) -> None:
    """Forget what every model's last pass was, as the ranks go on from different ones."""
    for member in members.values():
        member.forgo_learning()


def refuse_deleted(comm: Comm, asked: Sequence[int], members: Mapping[int, Member]) -> None:
    """Refuse to go on where a rank has deleted a model that is ``asked`` for; all come here.

    Args:
        members: the models that this rank has.

    Raises:
        MismatchError: on every rank.
    """
    everyone = comm.all_gather_object(set(members), Tag(None, "agree", about="models"))
    rows = [(rank, cast("set[int]", each)) for rank, each in enumerate(everyone)]
    for number in asked:
        if ranks := [rank for rank, there in rows if number not in there]:
            forgo_learning(members)
            raise MismatchError(
                f"wrapped model {number} has been deleted on {comm.names(ranks)}, while others "
                "still need a unit of it. Delete a model only behind a later forward of another, "
                "or a later call of zshard that all ranks make."
            )


def tell(comm: Comm, label: str) -> str:
    """What each rank was about to do; every rank comes here.

    Args:
        label: what this one was.
    """
    everyone = comm.all_gather_object(label, Tag(None, "agree", about=label))
    return "; ".join(f"{comm.name(rank)}: {what}" for rank, what in enumerate(everyone))


def refuse(comm: Comm, label: str, remedy: str = "") -> NoReturn:
    """Say what each rank was about to do; see ``tell``.

    Raises:
        MismatchError: always.
    """
    seen = tell(comm, label)
    raise MismatchError(
        f"the ranks are about to do different things: {seen}. Every rank has to run the same "
        "forwards, backwards, steps and calls of zshard, of the same models, in the same order."
        f"{remedy}"
    )


def refuse_but_who_left(comm: Comm, label: str, mine: Message, messages: Sequence[Message]) -> None:
    """Raise where ranks begin different things, but not on one whose forward has raised before.

    Its exception has ended the step there, and this error ends it on the others: they all come to
    the same next thing, at which the rank that returns from here meets them.

    Raises:
        MismatchError: on the others; on all, if no such exception explains the difference.
    """
    if len({message.model for message in messages}) > 1:
        label = f"{label}, of wrapped model {mine.model}"
    if len({message.inside for message in messages}) > 1:
        label = f"{label}, {'inside a' if mine.inside else 'outside any'} forward under way"
    of_a_step = all(message.intent in _OF_A_STEP for message in messages if not message.left)
    if not (mine.left and of_a_step) or all(message.left for message in messages):
        nothing_raised = not any(message.left for message in messages)
        evaluates = nothing_raised and any(message.intent.is_forward for message in messages)
        refuse(comm, label, _EVALUATION if evaluates else "")
    tell(comm, f"{label}, after one that raised an exception")


def trained_names(units: Sequence[Unit]) -> str:
    """The parameters that require a gradient, one a line."""
    flats = [flat for unit in units for flat in unit.flats]
    pairs = [pair for flat in flats for pair in zip(flat.names, flat.trained, strict=True)]
    return "\n".join(name for name, trained in pairs if trained)


def refuse_trained(comm: Comm, names: str) -> NoReturn:
    """Say which parameter is trained on some ranks alone; every rank comes here.

    Args:
        names: of this rank; see ``trained_names``.

    Raises:
        MismatchError: always.
    """
    everyone = comm.all_gather_object(names, Tag(None, "agree", about="requires_grad"))
    sets: list[set[str]] = [set(str(each).split("\n")) for each in everyone]
    name = min(set[str]().union(*sets) - sets[0].intersection(*sets))
    ranks = [rank for rank, each in enumerate(sets) if name in each]
    raise MismatchError(
        f"{name} requires a gradient on {comm.names(ranks)} alone; freeze and unfreeze parameters "
        "on every rank"
    )
