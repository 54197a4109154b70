"""Over a mesh, a loop with a loss scaler has DDP's numbers, whichever blocks each rank runs.

Each seed draws how the model is sharded, unit by unit, and actions. In these ranks run blocks of
their own, in orders of their own; some accumulate, inside no_sync or outside, or clip; and some
give one rank a loss, or an input, that is not finite. Then two parts of the ranks train models of
their own at the same time, over process groups beside each other.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import models
import pytest
import test_fuzz_exceptions
import test_fuzz_refusals
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from training import Plain, Wrapped, together

import zshard

ACTIONS = 10
BLOCKS = 4
STRATEGIES = ("zero3", "zero2", "zero1", "ddp")
BITS = ("step", "read", "accumulate", "evaluate")  # what has DDP's bits on two ranks
KINDS = (*BITS, "clip", "clip a part", "add up")
MESHES = {"2 x 1": [[0], [1]], "1 x 2": [[0, 1]], "2 x 2": [[0, 1], [2, 3]]}
OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    functools.partial(zshard.AdamW, lr=1e-2, eps=1e-6),
    functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-6),
    functools.partial(zshard.SGD, lr=1e-3, momentum=0.9),
)


class Routed(nn.Module):
    """Runs the blocks that it is told, in that order; one parameter never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, models.WIDTH)
        self.blocks = nn.ModuleList(models.Block() for _ in range(BLOCKS))
        self.extra = nn.Parameter(torch.ones(3))
        self.outlet = nn.Linear(models.WIDTH, 1)
        self.order: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.outlet(x)


@dataclass(frozen=True)
class Action:
    """One thing that every rank does."""

    kind: str
    orders: tuple[tuple[int, ...], ...]  # of each rank's blocks
    bad: int | None  # the rank whose loss or input is not finite
    value: float
    in_input: bool
    norm_type: float


def draw(rng: random.Random, world_size: int) -> Action:
    kind = rng.choice(BITS if world_size == 2 else KINDS)
    drawn = [rng.sample(range(BLOCKS), rng.randint(0, BLOCKS)) for _ in range(world_size)]
    orders = rng.choice([drawn, [sorted(each) for each in drawn], [drawn[0]] * world_size])
    return Action(
        kind,
        tuple(tuple(each) for each in orders),
        bad=rng.randrange(world_size) if rng.random() < 0.35 else None,
        value=rng.choice([math.inf, -math.inf, math.nan]),
        in_input=rng.random() < 0.5,
        norm_type=rng.choice([1.0, 2.0, math.inf]),
    )


class Player:
    """Plays actions on one side and logs every number that the user could see."""

    def __init__(self, side: Plain | Wrapped, optimizer: Any, scaler: Any, rank: int) -> None:
        self._side, self._rank = side, rank
        self._optimizer, self._scaler = optimizer(side.module.parameters()), scaler
        self._rng = torch.Generator().manual_seed(rank)
        self.log: list[tuple[str, Tensor | None]] = []

    def play(self, action: Action) -> None:
        self._side.module.order = action.orders[self._rank]
        if action.kind == "evaluate":
            with torch.no_grad():
                self.log.append(("evaluation", self._side.module(self._inputs())))
            return
        if action.kind == "accumulate":
            with self._side.no_sync():
                self._backward(action, 0.5)
                self._backward(action, 0.25)
        elif action.kind == "add up":
            self._backward(action, 0.5)
        self._backward(action, 0.5, last=True)
        self._update(action)

    def _inputs(self) -> Tensor:
        return torch.randn(4, 3, generator=self._rng)

    def _backward(self, action: Action, weight: float, last: bool = False) -> None:
        x = self._inputs()
        is_bad = last and action.bad == self._rank
        if is_bad and action.in_input:
            x[1, 1] = action.value
        loss = models.loss_of(self._side.model, x) * weight
        self.log.append(("loss", loss.detach().clone()))
        factor = action.value if is_bad and not action.in_input else 1.0
        self._scaler.scale(loss * factor).backward()

    def _update(self, action: Action) -> None:
        if action.kind != "step":
            self._scaler.unscale_(self._optimizer)
            with together(self._side):
                for name, _ in self._side.module.named_parameters():
                    self.log.append((f"gradient {name}", self._side.gradient(name)))
        if action.kind == "clip":
            self.log.append(("norm", self._side.clip(0.1, action.norm_type)))
        elif action.kind == "clip a part":
            clip = zshard if isinstance(self._side, Wrapped) else nn.utils
            part = list(self._side.module.parameters())[::2]
            self.log.append(("norm", clip.clip_grad_norm_(part, 0.1, action.norm_type)))
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self.log.append(("scale", torch.tensor(self._scaler.get_scale())))

    def finish(self) -> list[tuple[str, Tensor | None]]:
        names = [name for name, _ in self._side.module.named_parameters()]
        with together(self._side):
            return self.log + [(name, self._side.parameter(name)) for name in names]


def play(rank: int, world_size: int, seed: int, rows: list[list[int]]) -> tuple[str, list, list]:
    """What was drawn, and the logs of the wrapped model and of DDP."""
    rng = random.Random(seed)
    key, optimizer = rng.random(), rng.choice(OPTIMIZERS)
    options: dict[str, Any] = {
        "strategy": lambda name, module: random.Random(f"{key} {name}").choice(STRATEGIES),
        "comm": rng.choice(["group", "peer", "auto"]),
        "prefetch": rng.choice([0, 1, 2]),
        "units": rng.choice([None, "layer", "model"]),
    }
    actions = [draw(rng, world_size) for _ in range(ACTIONS)]
    logs = []
    for wrapped in (True, False):
        torch.manual_seed(0)
        model = Routed()
        side: Plain | Wrapped
        if wrapped:
            side = Wrapped(zshard.wrap(model, mesh=DeviceMesh("cpu", rows), **options))
        else:
            side = Plain(model, world_size, unused=True)
        scaler: Any = zshard.GradScaler if wrapped else torch.amp.GradScaler
        player = Player(side, optimizer, scaler("cpu", 2.0**8, growth_interval=3), rank)
        for action in actions:
            player.play(action)
        logs.append(player.finish())
    return f"{options} {optimizer} {actions}", logs[0], logs[1]


@pytest.mark.parametrize(("seed", "mesh"), [(0, "2 x 1"), (1, "1 x 2"), (2, "2 x 2"), (4, "2 x 2")])
def test_a_loop_with_a_loss_scaler_has_the_numbers_of_ddp(seed: int, mesh: str) -> None:
    rows = MESHES[mesh]
    world_size = len(rows) * len(rows[0])
    for drawn, actual, expected in run_ranks(play, world_size, seed, rows):
        assert [what for what, _ in actual] == [what for what, _ in expected], drawn
        for index, ((what, ours), (_, theirs)) in enumerate(zip(actual, expected, strict=True)):
            where = f"{drawn}: entry {index}, {what}: {ours} and {theirs}"
            if ours is None or theirs is None:
                assert ours is theirs, where
            elif world_size == 2:
                assert torch.equal(ours.nan_to_num(), theirs.nan_to_num()), where
            else:
                finite = theirs.isfinite()
                assert torch.equal(ours.isfinite(), finite), where
                largest = float(theirs[finite].abs().max()) if finite.any() else 0.0
                difference = (ours - theirs)[finite].abs()
                assert (difference <= 3e-4 * max(largest, 1e-3)).all(), where


GAMES: dict[str, Callable[[int, int, int], tuple[Any, list, list]]] = {
    "exceptions": test_fuzz_exceptions.play,
    "refusals": test_fuzz_refusals.play,
}


def play_in_parts(
    rank: int, world_size: int, seed: int, games: tuple[str, ...]
) -> tuple[Any, list, list] | None:
    """Ranks 1 and 3 play the one, over a group of their own, and ranks 0 and 2 the other."""
    limit = timedelta(seconds=20)
    parts = [dist.new_group(ranks, timeout=limit) for ranks in ([1, 3], [0, 2])]
    dist.barrier()  # ranks that have no game end at once: while others of theirs connect still
    place = (rank + 1) % 2
    wrap = functools.partial(zshard.wrap, mesh=parts[place])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zshard, "wrap", wrap)
        return GAMES[games[place]](rank // 2, 2, seed + place) if place < len(games) else None


@pytest.mark.parametrize(("seed", "games"), [(0, ("exceptions", "refusals")), (1, ("refusals",))])
def test_parts_of_the_ranks_go_on_after_faults_of_their_own(
    seed: int, games: tuple[str, ...]
) -> None:
    found = run_ranks(play_in_parts, 4, seed, games)
    assert sum(each is not None for each in found) == 2 * len(games)
    for drawn, actual, expected in filter(None, found):
        assert [what for what, _ in actual] == [what for what, _ in expected], drawn
        for index, ((what, one), (_, other)) in enumerate(zip(actual, expected, strict=True)):
            assert torch.equal(one, other), f"{drawn}: entry {index}, {what}: {one} and {other}"
