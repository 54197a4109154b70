"""Random orders of what users do, under random delays of the collectives, equal DDP bit by bit.

Overlap bugs are ordering bugs: each seed draws a model, a unit map, a prefetch depth, a sequence of
actions and, for each rank, how late every collective starts. The same sequence runs under DDP.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress

import models
import pytest
import slots
import torch
from ranks import run_ranks
from steps import batch, build
from torch import Tensor
from training import Plain, Wrapped, adamw

import zshard
from zshard.wrap import schedule_of

ACTIONS = 25
MODELS = ["blocks", "odd_parameters", "called_twice", "tied_across_units", "frozen", "unused"]
MODELS += ["gpt", "gpt_inside", "gpt_around", "gpt_around_reentrant"]


class Planted(Exception):
    """Raised inside a forward, as user code might."""


def raise_planted(*_: object) -> None:
    raise Planted


class Player:
    """Plays actions on one side and logs every number that the user could see."""

    def __init__(self, side: Plain | Wrapped, name: str, rank: int) -> None:
        self.side, self.name = side, name
        self.optimizer = adamw(side.module)
        self.data = iter(models.batches(name, 4 * ACTIONS, rank))
        self.log: list[tuple[str, Tensor]] = []

    def _backward(self, weight: float = 1.0) -> None:
        loss = models.loss_of(self.side.model, next(self.data)) * weight
        loss.backward()
        self.log.append(("loss", loss.detach().clone()))

    def step(self) -> None:
        self._backward()
        self._step()

    def accumulate(self) -> None:
        with self.side.no_sync():
            self._backward(0.5)
            self._backward(0.25)
        self._backward(0.25)
        self._step()

    def _step(self) -> None:
        for name, _ in self.side.module.named_parameters():
            grad = self.side.gradient(name)
            if grad is not None:
                self.log.append((f"gradient {name}", grad))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def drop(self) -> None:
        with self.side.no_sync():
            self._backward()
        self.optimizer.zero_grad()

    def drop_reduced(self) -> None:
        self._backward()
        self.side.module.zero_grad()

    def evaluate(self) -> None:
        self.side.module.eval()
        with torch.no_grad():
            loss = models.loss_of(self.side.module, next(self.data))
        self.side.module.train()
        self.log.append(("evaluation", loss.clone()))

    def discard(self) -> None:
        loss = models.loss_of(self.side.module, next(self.data))
        self.log.append(("discarded loss", loss.detach().clone()))

    def fail_forward(self) -> None:
        def plant(module: torch.nn.Module, args: object) -> None:
            raise Planted

        hook = list(self.side.module.children())[-1].register_forward_pre_hook(plant)
        with pytest.raises(Planted):
            models.loss_of(self.side.module, next(self.data))
        hook.remove()

    def fail_backward(self) -> None:
        def plant(module: torch.nn.Module, args: object, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(raise_planted)

        # Late in backward: the units after this one have their gradients by then.
        hook = self.side.module.blocks[0].register_forward_hook(plant)
        loss = models.loss_of(self.side.module, next(self.data))
        if isinstance(self.side, Wrapped):  # DDP itself does not survive this
            with pytest.raises(Planted):
                loss.backward()
        hook.remove()
        self.side.module.zero_grad()

    def read(self) -> None:
        for name, _ in self.side.module.named_parameters():
            self.log.append((f"parameter {name}", self.side.parameter(name)))

    def write(self) -> None:
        wrapped = isinstance(self.side, Wrapped)
        with zshard.full_params(self.side.module, write=True) if wrapped else torch.no_grad():
            for parameter in self.side.module.parameters():
                parameter.data.mul_(0.75)

    def slow_down(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9


NAMES = ["accumulate", "drop", "drop_reduced", "evaluate", "discard", "fail_forward"]
NAMES += ["fail_backward", "read", "write", "slow_down", *["step"] * 5]


def delays(rng: random.Random) -> Callable[[str, object], None]:
    """Start one collective in four up to three milliseconds late."""
    return lambda op, tag: time.sleep(rng.choice([0, 0, 0, rng.uniform(0, 0.003)]))


def play(rank: int, world_size: int, seed: int) -> tuple[str, list, list]:
    """Play one seed under DDP and wrapped; returns what was drawn and the two logs."""
    rng = random.Random(seed)
    name = rng.choice(MODELS)
    options = {"units": rng.choice([None, "model", "layer"]), "prefetch": rng.choice([0, 1, 2, 5])}
    options["strategy"] = rng.choice(["zero1", "zero2", "ddp", "zero3", "zero3"])
    actions = ["step", *(rng.choice(NAMES) for _ in range(ACTIONS)), "step", "read"]
    logs = []
    for is_wrapped in (False, True):
        model = models.build(name)
        torch.manual_seed(rank)
        if is_wrapped:
            side: Plain | Wrapped = Wrapped(zshard.wrap(model, **options))
            late = random.Random(1000 * seed + rank)
            schedule_of(model).comm.interpose = delays(late)
        else:
            side = Plain(model, world_size, models.CASES[name].unused)
        player = Player(side, name, rank)
        for action in actions:
            getattr(player, action)()
        if is_wrapped:
            slots.assert_all_ours(model)
        logs.append(player.log)
    return f"{name} {options} {' '.join(actions)}", logs[1], logs[0]


@pytest.mark.parametrize("seed", range(12))
def test_a_random_sequence_of_actions_equals_ddp_bit_by_bit(seed: int) -> None:
    for drawn, actual, expected in run_ranks(play, 2, seed):
        assert [what for what, _ in actual] == [what for what, _ in expected], drawn
        for index, ((what, ours), (_, theirs)) in enumerate(zip(actual, expected, strict=True)):
            assert torch.equal(ours, theirs), f"{drawn}: entry {index}, {what}"


# --- exceptions ----------------------------------------------------------------------------------


def fall(rank: int, world_size: int, seed: int, options: dict[str, object]) -> tuple[int, list]:
    """A loop that goes on after every exception; each rank's steps that were made, and the end."""
    rng = random.Random(seed)  # the same on all ranks: what they do is known to all of them
    model = build(**options)
    optimizer, made = adamw(model), 0
    for index in range(12):
        falls = index < 10 and rng.random() < 0.5
        who = {each for each in range(world_size) if falls and rng.random() < 0.5}
        where = rng.choice(["before units", "in a unit", "loss", "backward"]) * (rank in who)
        held = rng.random() < 0.3
        inside = model.blocks[1].up
        handles = []
        if where == "in a unit":
            handles.append(inside.register_forward_hook(raise_planted))
        elif where == "backward":
            handles.append(inside.register_full_backward_hook(raise_planted))
        try:
            with zshard.no_sync(model) if held else nullcontext():
                out = model(batch(rank, index)[:, : 2 if where == "before units" else 3])
                if where == "loss":
                    raise_planted()
                out.square().sum().backward()
            if not held:
                zshard.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                made += 1
        except (RuntimeError, Planted, zshard.Error):
            zshard.reset(model)
            with suppress(zshard.Error):
                optimizer.zero_grad()
        finally:
            for handle in handles:
                handle.remove()
    slots.assert_all_ours(model)
    return made, [zshard.full_param(model, name) for name, _ in model.named_parameters()]


@pytest.mark.parametrize("seed", range(6))
def test_after_exceptions_of_any_ranks_anywhere_the_loops_are_in_step(seed: int) -> None:
    rng = random.Random(seed)
    options = {"comm": ("group", "peer")[seed % 2], "strategy": rng.choice(["zero3", "zero2"])}
    (made, ours), *others = run_ranks(fall, rng.choice([2, 3]), seed, options)
    assert made > 2
    for also, theirs in others:
        assert also == made
        assert all(map(torch.equal, theirs, ours))
