"""Steps that an exception ends leave nothing behind: the others have the bits of a run without it.

Each seed draws two models over one process group, how each is sharded, and actions, some of which
raise on some ranks: in a forward, between forward and backward, in a backward, inside no_sync, in
an evaluation, in a forward that calls the other model. Where a script has to call zshard.reset, as
the README says, this one does.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import models
import pytest
import slots
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zshard

ACTIONS = 16
STRATEGIES = ("zero3", "zero3", "zero2", "zero1", "ddp")
KINDS = ("step", "step", "accumulate", "joint", "teacher", "nested", "method", "evaluate", "read")
KINDS += ("alone", "freeze", "write")
PLACES = {  # where an action may raise
    "step": ("forward", "loss", "backward"),
    "teacher": ("forward", "loss", "backward"),
    "method": ("forward", "loss", "backward"),
    "accumulate": ("backward", "no_sync"),
    "evaluate": ("forward",),
    "joint": ("forward", "loss", "backward"),  # on every rank alike; README says what else happens
}


class Injected(Exception):
    """What the script's own code raises."""


class Bomb(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Injected


class Faulty(models.Routed):
    """Blocks in an order of each batch's own, before the `at`-th of which an exception may come."""

    place, at = "", 0
    recompute = False
    inner: Callable[[Tensor], Tensor] | None = None  # another model, called before the first block

    def forward(self, x: Tensor) -> Tensor:
        self.draw(x)
        given = x
        x = self.inlet(x)
        for turn, index in enumerate([*self.order, None]):
            if turn == min(self.at, len(self.order)):
                if self.place == "forward":
                    raise Injected
                x = Bomb.apply(x) if self.place == "backward" else x
            if turn == 0 and self.inner is not None:
                x = x + self.inner(given)
            if index is not None:
                block = self.blocks[index]
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.outlet(x)

    def encode(self, x: Tensor) -> Tensor:
        """Calls the model itself at times."""
        first = self.outlet(self.blocks[1](self.inlet(x)))
        if self.at > 0:
            return first + self(x)
        if self.place == "forward":
            raise Injected
        return Bomb.apply(first) if self.place == "backward" else first


@dataclass(frozen=True)
class Action:
    """One thing that every rank does."""

    kind: str
    model: int
    place: str = ""  # where it raises; "": nowhere
    at: int = 0  # before which block
    ranks: tuple[bool, ...] = ()  # on which it raises


def draw(rng: random.Random, world_size: int) -> Action:
    action = Action(rng.choice(KINDS), rng.randrange(2))
    places = PLACES.get(action.kind)
    if places is None or rng.random() < 0.5:
        return replace(action, at=rng.randrange(4))
    ranks = [rng.random() < 0.4 or action.kind == "joint" for _ in range(world_size)]
    ranks[rng.randrange(world_size)] = True
    # If all raise alike: before the first or behind the last of a batch's blocks, four at most.
    at = rng.choice((0, 4)) if action.kind == "joint" else rng.randrange(4)
    return replace(action, place=rng.choice(places), at=at, ranks=tuple(ranks))


class Player:
    """Plays actions, and logs what the user sees of those that end well."""

    def __init__(self, rank: int, rng: random.Random) -> None:
        self._rank = rank
        torch.manual_seed(0)
        self._models = [self._build(rng) for _ in range(2)]
        self._optimizers = [zshard.AdamW(each.parameters(), lr=1e-2) for each in self._models]
        self.log: list[tuple[str, Tensor]] = []

    def _build(self, rng: random.Random) -> nn.Module:
        model = Faulty()
        model.recompute = rng.random() < 0.3
        units = rng.choice([None, None, "model", "layer"])
        zshard.wrap(
            model,
            strategy=rng.choice(STRATEGIES),
            units=None if model.recompute else units,
            comm=rng.choice(["group", "peer"]),
            prefetch=rng.choice([0, 1, 2]),
        )
        zshard.method(model, "encode")
        return model

    def play(self, action: Action, data: list[Tensor]) -> None:
        """Do it, again where zshard says so; what raises on one rank is an error on every one."""
        for _ in range(3):
            self._data = iter(data)
            try:
                self.log += getattr(self, f"_{action.kind}")(action)
            except (Injected, zshard.Error) as error:
                for each in self._optimizers:
                    each.zero_grad()
                if action.place == "loss" and isinstance(error, Injected):
                    both = action.kind == "joint"
                    for model in self._models if both else [self._models[action.model]]:
                        zshard.reset(model)
                if action.place:
                    return
                if not (isinstance(error, zshard.StateError) and "epeat the step" in str(error)):
                    raise
            else:
                assert not action.place or action.kind == "evaluate", (
                    f"{action}: nothing was raised"
                )
                return
        raise AssertionError(f"{action}: three times in vain")

    @contextlib.contextmanager
    def _fault(self, action: Action) -> Iterator[nn.Module]:
        """The action's model, which raises if it is to."""
        model = self._models[action.model]
        raises = bool(action.ranks) and action.ranks[self._rank]
        model.place, model.at = (action.place if raises else ""), action.at
        try:
            yield model
        finally:
            model.place = ""

    def _loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        return models.loss_of(model, next(self._data))

    def _step(self, action: Action, forward: str = "__call__") -> list[tuple[str, Tensor]]:
        with self._fault(action) as model:
            loss = self._loss(getattr(model, forward))
            if model.place == "loss":
                raise Injected
            loss.backward()
        return [("loss", loss.detach()), *self._update(action.model)]

    def _accumulate(self, action: Action) -> list[tuple[str, Tensor]]:
        held_back = action.place == "no_sync"
        model = self._models[action.model]
        with zshard.no_sync(model):
            inside = replace(action, place="backward") if held_back else Action("", action.model)
            with self._fault(inside), contextlib.suppress(Injected):
                self._loss(model).backward()
        with self._fault(Action("", action.model) if held_back else action):
            loss = self._loss(model)
            loss.backward()
        return [("loss", loss.detach()), *self._update(action.model)]

    def _joint(self, action: Action) -> list[tuple[str, Tensor]]:
        with self._fault(action) as model:
            other = self._models[1 - action.model]
            loss = self._loss(model) + self._loss(other)
            if model.place == "loss":
                raise Injected
            loss.backward()
        return [("loss", loss.detach()), *self._update(0), *self._update(1)]

    def _teacher(self, action: Action) -> list[tuple[str, Tensor]]:
        with self._inside(action, torch.no_grad()(self._models[1 - action.model])):
            return self._step(action)

    def _nested(self, action: Action) -> list[tuple[str, Tensor]]:
        with self._inside(action, self._models[1 - action.model]):
            return [*self._step(action), *self._update(1 - action.model)]

    @contextlib.contextmanager
    def _inside(self, action: Action, inner: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """``inner`` is called in the forward of the action's model."""
        outer = self._models[action.model]
        outer.inner = lambda x: inner(x)  # which keeps it from becoming a part of the model
        try:
            yield
        finally:
            outer.inner = None

    def _method(self, action: Action) -> list[tuple[str, Tensor]]:
        return self._step(action, "encode")

    def _alone(self, action: Action) -> list[tuple[str, Tensor]]:
        block = self._models[action.model].blocks[action.at % 3]
        with torch.no_grad(), contextlib.suppress(zshard.ShardedAccessError):  # if in a larger unit
            block(torch.ones(2, models.WIDTH))
        return []

    def _write(self, action: Action) -> list[tuple[str, Tensor]]:
        with torch.no_grad():
            for param in self._models[action.model].parameters():
                param.mul_(0.99)
        return []

    def _freeze(self, action: Action) -> list[tuple[str, Tensor]]:
        _, *params, _ = self._models[action.model].parameters()
        for param in params[action.at :: 3]:
            param.requires_grad_(not param.requires_grad)
        return []

    def _evaluate(self, action: Action) -> list[tuple[str, Tensor]]:
        with torch.no_grad(), self._fault(action) as model:
            loss = self._loss(model)
        return [] if action.place else [("evaluation", loss)]

    def _read(self, action: Action) -> list[tuple[str, Tensor]]:
        return [("value", zshard.full_param(self._models[action.model], "blocks.1.up.weight"))]

    def _update(self, index: int) -> list[tuple[str, Tensor]]:
        norm = zshard.clip_grad_norm_(self._models[index], 0.1)
        self._optimizers[index].step()
        self._optimizers[index].zero_grad()
        return [("norm", norm)]

    def values(self) -> list[tuple[str, Tensor]]:
        for model in self._models:
            slots.assert_all_ours(model)
        states = [zshard.state_dict(each, all_ranks=True) for each in self._models]
        return [
            (f"{index}: {name}", value.clone())
            for index, state in enumerate(states)
            for name, value in state.items()
        ]


def play(
    rank: int, world_size: int, seed: int
) -> tuple[list[Action], list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """What was drawn, and the logs with and without the actions that raise."""
    rng = random.Random(seed)
    actions = [draw(rng, world_size) for _ in range(ACTIONS)] + [Action("step", 0)]
    data = models.batches("blocks", 2 * len(actions), rank)
    logs = []
    for with_faults in (True, False):
        player = Player(rank, rng)
        for number, action in enumerate(actions):
            if with_faults or not action.place:
                player.play(action, data[2 * number : 2 * number + 2])
        logs.append(player.log + player.values())
    return actions, logs[0], logs[1]


@pytest.mark.parametrize("seed", range(24))
def test_steps_that_an_exception_ends_change_no_bit_of_the_others(seed: int) -> None:
    for actions, actual, expected in run_ranks(play, (2, 3, 2, 4)[seed % 4], seed):
        assert [what for what, _ in actual] == [what for what, _ in expected], actions
        for index, ((what, one), (_, other)) in enumerate(zip(actual, expected, strict=True)):
            same = torch.equal(one, other)
            assert same, f"{actions}: entry {index}, {what}: {one} and {other}"


FAULTS = [(kind, place) for kind, places in PLACES.items() for place in places if kind != "joint"]


def play_one_fault(
    rank: int, world_size: int, kind: str, place: str
) -> tuple[list[str], list[int]]:
    """Whatever may come next, of the same model or the other, behind programs known or not.

    Returns what is wrong, and checksums of what the models are in the end.
    """
    data = models.batches("blocks", 2, rank)
    wrong, ends = [], []
    for seed, following in enumerate(dict.fromkeys(KINDS)):
        for known in (False, True):
            # Four seeds have all of these with each other.
            at, model = 2 * ((seed + known) % 2), (seed // 2 + known) % 2
            faulty = Action(kind, 0, place, at, ranks=(True, False))
            before = [Action(kind, 0, at=1), Action("step", 1)] if known else []
            after = [Action(following, model, at=1), Action("step", 0), Action("step", 1)]
            player = Player(rank, random.Random(seed))
            try:
                for action in [*before, *before, faulty, *after]:
                    player.play(action, data)
            except zshard.Error as error:
                wrong.append(f"{action}, {known=}: {error}")
                break
            ends += [zlib.crc32(value.numpy().tobytes()) for _, value in player.values()]
    return wrong, ends


@pytest.mark.parametrize(("kind", "place"), FAULTS)
def test_whatever_comes_next_finds_all_ranks(kind: str, place: str) -> None:
    (wrong, ends), (others_wrong, others_ends) = run_ranks(play_one_fault, 2, kind, place)
    assert not wrong + others_wrong
    assert ends and ends == others_ends
