"""One order of collectives on every rank; see [Note: an example of one order] in program.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..awaited import awaited
from ..comm import Comm
from ..tag import Tag
from ..training_state import TrainingState
from ..unit import State, Unit
from .debts import settle
from .executor import Executor
from .meeting import Intent, Message, checksum, meetings_of, refuse_trained, trained_names
from .misplaced import refuse_other_way
from .outcome import Ending
from .prefetched import Prefetched
from .program import Key, Op, Pass, Programs, Turn, leads_to
from .updates import NOTHING, Tally


class Agreement:
    """Decides what is issued when.

    Args:
        prefetch: how many gathers are issued ahead.
        executor: carries the turns out.
        drop_backward: ends a backward that cannot go on, on every rank: ``Schedule.reset``.

    Attributes:
        prefetched: what was gathered ahead and not needed yet.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Comm,
        prefetch: int,
        executor: Executor,
        drop_backward: Callable[[Ending], None],
    ) -> None:
        self._units, self._comm = tuple(units), comm
        self._executor, self._prefetch, self._drop_backward = executor, prefetch, drop_backward
        self.prefetched = Prefetched(executor, prefetch)
        self.before_meeting: Callable[[], None] = lambda: None  # set by the backward
        self._names = ""  # of all that is trained, once a backward has asked
        self._programs, self._pass = Programs(), Pass()
        self._cut: list[Pass] = []  # of a forward, inside of which this model's backward is
        self._backward: Key = ()  # of the last one
        self._loose = False  # whether ranks have left a program, and meet at passes' ends as well
        self._meetings = meetings_of(comm)
        self.number = self._meetings.add(self)

    @awaited("the beginning of a pass")
    def begin(
        self,
        intent: Intent,
        about: str,
        label: str,
        *,
        unit: int = 0,
        gathers: bool = True,
        tally: Tally = NOTHING,
        buffers: bool = False,
    ) -> list[Message]:
        """Begin a pass together with all other ranks.

        Args:
            about: what its program depends on; may differ between ranks.
            label: what errors call it.
            unit: index of the one whose forward it is, where that is called alone.
            gathers: whether it consists of any gathers or reductions; else it is a meeting alone.
            tally, buffers: what to tell the other ranks besides; see ``Message``.

        Returns:
            What all ranks have told.

        Raises:
            MismatchError: on every rank, if another begins something else.
        """
        self.before_meeting()
        settle()
        under_way = self._pass.is_forward and not self._pass.ended
        if under_way and self._executor.state is TrainingState.IDLE:
            self.finish()  # of a unit called alone, inside of which this begins
        self._meetings.pause(self)
        names = ""
        if intent is Intent.BACKWARD:
            names = self._names = self._names or trained_names(self._units)
        mine = Message(self.number, intent, unit, checksum(about), checksum(names))
        mine = mine._replace(changes=tally.changes, checksum=tally.checksum, torn=tally.torn)
        mine = mine._replace(buffers=int(buffers), inside=len(self._cut))
        messages = self._meetings.begin(self, self._comm, mine, label, self._executor.step)
        if self._pass.to_be_learned:
            self._learn()
        if len({message.trained for message in messages}) > 1:
            refuse_trained(self._comm, names)
        self._pass = self._begun(mine, messages, gathers)
        if not gathers:
            self._pass.end()
            self._meetings.go_on(self)
        elif intent.is_forward:
            self._meetings.enter_forward(self)
        return messages

    def _begun(self, mine: Message, messages: Sequence[Message], gathers: bool) -> Pass:
        """The pass that the ranks begin, by what they have told each other."""
        key = (mine.intent, mine.unit, mine.trained, *(message.about for message in messages))
        begun = self._programs.begin(key, self._loose) if gathers else Pass(key)
        if mine.intent is Intent.BACKWARD:
            # It meets units in about the reverse of the unit map's order.
            begun.reduce([unit.index for unit in reversed(self._units) if unit.trained_count])
            self._backward = key
        return begun

    @awaited("the end of a pass")
    def finish(self) -> None:
        """End a pass: take part in what is left of the program, and meet where that is due."""
        if self._pass.paused:  # by another model's backward, if that has raised
            self.before_meeting()
        if not (self._pass.paused or self._pass.ended):  # as an exception may have left it
            self._finish_part()
        if not self._cut:  # else a forward is under way around it
            self._meetings.leave_forward(self)
            self._meetings.go_on(self)

    def pause(self) -> None:
        """Cut a forward, for another model's pass to begin inside of it."""
        if not self._pass.paused and not self._cut:  # else a backward is under way, and goes on
            self._finish_part()
            self._pass.paused = True

    def cut(self) -> None:
        """Cut a forward, for a backward of this model to begin inside of it."""
        self.pause()
        self._cut = [self._pass]

    def resume(self) -> None:
        """Go on behind that cut."""
        self._go_on(self._cut.pop())

    def go_on(self) -> None:
        """Begin the part of a forward behind the cut, if it was cut."""
        if self._pass.paused:
            self._go_on(self._pass)

    def _go_on(self, cut: Pass) -> None:
        cuts, needed = cut.cuts + 1, cut.needed_before + cut.needed
        about = f"{cuts};{self._executor.gathered_units}"
        self.begin(Intent.GO_ON, about, "the rest of a forward")
        self._pass.cuts, self._pass.needed_before = cuts, needed

    def _finish_part(self) -> None:
        self._take_part_in_the_rest()
        current = self._pass
        # A backward that reduces all has its own way to learn that a rank has left the program.
        if current.meets_at_end and not (current.reduces and current.follows):
            asked = current.asks(self._executor.has_new_gradients, self._executor.has_old_gradients)
            messages = self._meet(Intent.END, "the end of a forward or backward", about=asked)
            for unit in current.left_to_reduce(message.about for message in messages):
                self._reduce(unit)
            if current.to_be_learned:
                self._learn()
        elif not current.reduces and current.intent is not Intent.RENEW:
            self._meetings.others_may_be_inside = True
        current.end()

    @awaited("the meeting before a change")
    def meet_before_change(self) -> None:
        """Before parameters change: meet ranks that may still need them as they were."""
        if self._meetings.others_may_be_inside and self._executor.has_peers:
            mine, label = Message(self.number, Intent.END), "a change of parameters"
            self._meetings.begin(self, self._comm, mine, label, self._executor.step)

    def make_way(self) -> None:
        """Let another model's pass begin inside this one, where ranks may need unlike things.

        One that has gone past its own part of the program would not be found there by the others.
        """
        self._pass.interrupted = True
        if self._pass.program is not None and not self._is_in_step:
            self._take_part_in_the_rest()

    def go_beside(self, others: Sequence[Agreement]) -> None:
        """This pass has begun inside those of ``others``; all ranks are at this same place."""
        every = (self, *others)
        if others and not all(each._is_in_step for each in every):
            for each in every:
                if each._pass.program is not None:
                    each._pass.leave_program(range(self._comm.world_size))
                    each._pass.meets_at_end = True

    @property
    def _is_in_step(self) -> bool:
        # Whether every rank needs all of the program that this pass follows.
        return self._pass.program is not None and self._programs.is_alike(self._pass.key)

    def abort(self, *, in_forward: bool = False) -> None:
        """An exception leaves the pass, or a forward; see [Note: after an exception]."""
        self._pass.aborted = True
        if in_forward or self._cut or self._pass.is_forward:
            self._meetings.left = True

    def abandon(self) -> None:
        """Forget what is left of an aborted pass."""
        self._pass.end()
        self._cut.clear()
        self._meetings.leave_forward(self)
        self.prefetched.clear()

    def forget(self) -> None:
        """Learn everything anew, as all ranks do."""
        self.abandon()
        self._programs.forget()
        self._pass.to_be_learned, self._loose = False, False

    @property
    def may_be_last(self) -> bool:
        """Whether nothing is known to come after what this rank has needed."""
        return self._pass.next is None and not self.prefetched

    @property
    def needed(self) -> str:
        """What this rank has needed in this pass, as text."""
        return " ".join(str(turn.unit) for turn in self._pass.needed_before + self._pass.needed)

    def expect_other_ways(self) -> None:
        """From now on, have no backward like the last one follow a program."""
        self._programs.distrust(self._backward)

    @awaited("the gather of a unit")
    def need(self, unit: Unit) -> None:
        """Issue the gather of ``unit``, or take the one that was issued ahead."""
        if self._pass.paused:  # by another model's backward that has raised
            self.before_meeting()
        turn, ended = Turn(Op.GATHER, unit.index), self._pass.ended
        self._pass.needed.append(turn)
        if self.prefetched.take(unit):
            return
        self.prefetched.discard()
        # What others reduce this rank has to, too, ready or not; alone, it has time.
        peers, known = self._executor.has_peers, self._pass.program is not None
        if known and not leads_to(turn, self._pass.rest, past_reductions=peers):
            self._leave_program(unit)
        if self._pass.program is None:
            self._meet(Intent.GATHER, f"a gather of unit {unit.label!r}", unit.index, int(ended))
            return
        while self._pass.next != turn:
            self._take_part()
        self._pass.take()
        self._executor.gather(unit)
        self._advance()

    @awaited("the gather of a unit")
    def look_ahead(self) -> None:
        """Start the next gathers, as many as may be under way beside the unit that computes."""
        while (turn := self._pass.next) is not None:
            unit = self._units[turn.unit]
            if turn.op is Op.REDUCE or not self.prefetched.has_room(unit):
                return
            self._pass.take()
            self.prefetched.gather(unit)

    @awaited("the reduction of a unit")
    def ready(self, unit: Unit) -> None:
        """Note that all gradients of ``unit`` are there on this rank."""
        self._pass.needed.append(Turn(Op.REDUCE, unit.index))
        self._pass.ready.add(unit.index)
        if self._pass.program is not None:
            self._advance()  # no gather into its memory yet: a node may read a detached weight
            return
        self._meet(Intent.READY, f"the reduction of unit {unit.label!r}", unit.index)

    def note_gradient(self, unit: Unit) -> bool:
        """Note that a gradient of ``unit`` has arrived; if it is still to be reduced."""
        self._pass.makes_gradients = True
        return unit.index not in self._pass.reduced

    def _advance(self) -> None:
        """Reduce what the program has next, as far as it is ready."""
        while (turn := self._pass.next) and turn.op is Op.REDUCE and turn.unit in self._pass.ready:
            self._reduce(self._pass.take().unit)

    def _take_part(self) -> None:
        """Carry out a turn that comes before what this rank needs."""
        op, index = self._pass.take()
        if op is Op.REDUCE:
            self._reduce(index)  # what of the gradients is there; autograd has gone past
        else:
            self._executor.join(self._units[index])

    def _take_part_in_the_rest(self) -> None:
        self.prefetched.discard()
        while self._pass.next is not None:
            self._take_part()

    def _reduce(self, index: int) -> None:
        self._pass.reduced.add(index)
        self._executor.reduce(self._units[index])

    def _leave_program(self, unit: Unit) -> None:
        current = self._pass
        if current.reduces and self._executor.has_peers:
            # They are not to be met before they have reduced without this rank's gradients.
            self._drop_backward(Ending.STRAYED)
            refuse_other_way(unit, self._comm.name(self._comm.world_rank))
        if not current.reduces:
            self._take_part_in_the_rest()
        current.leave_program([self._comm.world_rank])

    def _meet(self, intent: Intent, label: str, unit: int = 0, about: int = 0) -> list[Message]:
        mine, step = Message(self.number, intent, unit, about), self._executor.step
        return self._meetings.meet(self._comm, mine, label, step)

    def serve(self, mine: Message, messages: Sequence[Message]) -> None:
        """Carry out what ranks ask for of this model in a meeting; see ``Meetings.meet``."""
        current = self._pass
        own = [(rank, m) for rank, m in enumerate(messages) if m.model == self.number]
        if any(m.needs_in_pass for _, m in own):
            current.to_be_learned = True
            self._loose = self._loose or current.follows
        ready = [(message.unit, rank) for rank, message in own if message.intent is Intent.READY]
        ended = {rank for rank, message in own if message.intent is Intent.END}
        for index in current.complete(ready, ended, len(messages)):
            self._reduce(index)
        for index in dict.fromkeys(m.unit for _, m in own if m.intent is Intent.GATHER):
            unit = self._units[index]
            wanted = (mine.model, mine.intent, mine.unit) == (self.number, Intent.GATHER, index)
            if wanted and unit.state is State.SHARDED:
                self._executor.gather(unit)
            else:
                self._executor.join(unit)

    def forgo_learning(self) -> None:
        """Learn nothing of the last pass; see ``meeting.forgo_learning``."""
        self._pass.to_be_learned = False

    def _learn(self) -> None:
        """Make the program of the pass that every rank has ended; none if one has aborted it."""
        current = self._pass
        current.to_be_learned = False
        mine = None if current.aborted else (current.needed, current.late)
        gathered = self._comm.all_gather_object(mine, Tag(None, "agree", about="program"))
        if None in gathered:
            return
        self._programs.learn(current, gathered, self._prefetch)  # type: ignore[arg-type]

    def forget_trained(self) -> None:
        """Parameters were frozen or unfrozen."""
        self._names = ""
