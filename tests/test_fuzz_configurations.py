"""One sequence of actions gives the same bits under any two ways to shard the model.

Each seed draws a model, an optimizer, a precision, a mesh, actions, and two configurations:
strategy of each unit, transport, prefetch. A reload goes on in a new model, of either of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import models
import pytest
import slots
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zshard

ACTIONS = 14
STRATEGIES = ("zero3", "zero2", "zero1", "ddp")


class ThreeDtypes(models.Block):
    """A block with parameters of other dtypes than its input's."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.rand(models.WIDTH, 3).half())
        self.wide = nn.Parameter(torch.rand(models.WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.wide.to(x.dtype) + self.short.sum(1).to(x.dtype)


OWN: dict[str, Callable[[], nn.Module]] = {
    "routed": models.Routed,
    "three_dtypes": lambda: models.Blocks(block=ThreeDtypes),
}

Precision = zshard.Precision
PRECISIONS = [
    *[Precision(), Precision(), Precision.bf16(), Precision.bf16(reduce=torch.bfloat16)],
    *[Precision.bf16(master="split"), Precision.bf16(reduce=torch.bfloat16, master="split")],
    Precision.fp16(),
]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "zshard.AdamW": zshard.AdamW,
    "zshard.Adam": zshard.Adam,
    "zshard.SGD": lambda groups: zshard.SGD(groups, momentum=0.9, nesterov=True),
    "torch AdamW": lambda groups: torch.optim.AdamW(groups, fused=True),
    "torch Adam": lambda groups: torch.optim.Adam(groups, foreach=True),
    "torch SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9),
}


@dataclass
class Setting:
    """What both configurations have in common."""

    name: str
    precision: Precision
    optimizer: str
    units: str | None
    rows: list[list[int]] | None  # of a 2-D mesh
    actions: list[str]

    def build(self, options: dict[str, object]) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1234)
        model = OWN[self.name]() if self.name in OWN else models.build(self.name)
        mesh = None if self.rows is None else DeviceMesh("cpu", self.rows)
        zshard.wrap(model, units=self.units, precision=self.precision, mesh=mesh, **options)
        params = list(model.parameters())
        half = len(params) // 2
        groups = [{"params": params[:half]}, {"params": params[half:], "weight_decay": 0.0}]
        return model, OPTIMIZERS[self.optimizer]([{**each, "lr": 1e-2} for each in groups])


class Player:
    """Plays the actions, and logs every number that the user could see."""

    def __init__(
        self,
        setting: Setting,
        configurations: list[dict[str, object]],
        rank: int,
        seed: int,
        run: Path,
    ) -> None:
        self._setting, self._configurations, self._run = setting, configurations, run
        self._rng = random.Random(seed)
        self._rank, self._saved = rank, 0
        self._model, self._optimizer = setting.build(configurations[0])
        data = models.batches("blocks" if setting.name in OWN else setting.name, 100, rank)
        self._data = iter(data)
        fp16 = setting.precision.compute == torch.float16
        self._scaler = zshard.GradScaler(init_scale=2.0**10, growth_interval=3) if fp16 else None
        torch.manual_seed(rank)
        self.log: list[tuple[str, Tensor]] = []

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Those that there are; with a loss scale their values are not looked at."""
        if self._scaler is None:
            for name, param in self._model.named_parameters():
                if param.grad is not None:
                    yield name, param.grad

    def _backward(self, weight: float = 1.0) -> None:
        loss = models.loss_of(self._model, next(self._data)) * weight
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        self.log.append(("loss", loss.detach().clone()))

    def _update(self, clip: float = math.inf, norm_type: float = 2.0, every: int = 1) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if clip < math.inf:
            target = self._model if every == 1 else list(self._model.parameters())[::every]
            self.log.append(("norm", zshard.clip_grad_norm_(target, clip, norm_type)))
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self.log.append(("scale", torch.tensor(self._scaler.get_scale())))
        self._optimizer.zero_grad()

    def step(self) -> None:
        self._backward()
        self._update()

    def clip(self) -> None:
        self._backward()
        self._update(0.05, self._rng.choice([1.0, 2.0, 2.0, math.inf]))

    def clip_part(self) -> None:
        self._backward()
        self._update(0.05, every=2)

    def accumulate(self) -> None:
        with zshard.no_sync(self._model):
            self._backward(0.5)
            self._backward(0.25)
        self._backward(0.25)
        self._update(0.1)

    def one_rank_alone(self) -> None:
        self._backward(float(self._rank == 0))
        self._update()

    def evaluate(self) -> None:
        with torch.no_grad():
            loss = models.loss_of(self._model.eval(), next(self._data))
        self._model.train()
        self.log.append(("evaluation", loss.clone()))

    def freeze(self) -> None:
        *params, last = self._model.parameters()
        for param in self._rng.sample(params, len(params) // 3):
            param.requires_grad_(not param.requires_grad)
        last.requires_grad_(True)  # so that there is something to train

    def write(self) -> None:
        with zshard.full_params(self._model, write=True), torch.no_grad():
            for param in self._model.parameters():
                param.mul_(0.9)

    def write_slices(self) -> None:
        if self._setting.precision.master != "split":
            with torch.no_grad():
                for param in self._model.parameters():
                    param.mul_(0.99).clamp_(-0.5, 0.5)

    def slow_down(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] *= 0.7

    def zero_in_place(self) -> None:
        self._backward()
        self._optimizer.zero_grad(set_to_none=False)
        self.step()

    def look_on_one_rank(self) -> None:
        self._backward()
        for _, grad in self._gradients() if self._rank == 0 else ():
            grad.abs()
        self._update(0.1)

    def change_gradients(self) -> None:
        self._backward()
        self._change()
        self._update(0.1)

    def change_clipped_gradients(self) -> None:
        self._backward()
        zshard.clip_grad_norm_(self._model, 0.1)
        self._change()
        self._update()

    def _change(self) -> None:
        for _, grad in self._gradients():
            grad.mul_(0.5)

    def add_up(self) -> None:
        self._backward()
        for param in list(self._model.parameters())[::3]:
            param.grad = None
        self._backward()
        self._update(0.1)

    def read_gradients(self) -> None:
        self._backward()
        for name, _ in self._gradients():
            self.log.append((f"gradient {name}", zshard.full_grad(self._model, name)))
        self._update()

    def reload(self) -> None:
        path = self._run / str(self._saved)
        self._saved += 1
        zshard.save(path, self._model, self._optimizer)
        trained = [param.requires_grad for param in self._model.parameters()]
        self._model, self._optimizer = self._setting.build(self._rng.choice(self._configurations))
        for param, value in zip(self._model.parameters(), trained, strict=True):
            param.requires_grad_(value)
        zshard.load(path, self._model, self._optimizer)

    def finish(self) -> list[tuple[str, Tensor]]:
        slots.assert_all_ours(self._model)
        state = zshard.state_dict(self._model, all_ranks=True)
        return self.log + [(name, value.clone()) for name, value in state.items()]


NAMES = [name for name, value in vars(Player).items() if callable(value) and name[0] != "_"]
NAMES = ["step", "step", *(name for name in NAMES if name != "finish")]


def draw(rng: random.Random, world_size: int) -> Setting:
    name = rng.choice([*models.PLAIN_CASES, "gpt_inside", "gpt_around", *OWN, *OWN])
    precision, optimizer = rng.choice(PRECISIONS), rng.choice(list(OPTIMIZERS))
    if name == "three_dtypes":  # fp64 does not take fp16
        precision = rng.choice(PRECISIONS[:3])
    if precision.master == "split":
        optimizer = rng.choice(list(OPTIMIZERS)[:3])
    rows = {2: [[0], [1]], 4: [[0, 1], [2, 3]]}.get(world_size)
    actions = ["step", *rng.choices(NAMES, k=ACTIONS), "step"]
    units = rng.choice([None, None, "model", "layer"])
    return Setting(name, precision, optimizer, units, rng.choice([None, rows]), actions)


def draw_options(rng: random.Random) -> dict[str, object]:
    key = rng.random()
    mixed = lambda name, module: random.Random(f"{key} {name}").choice(STRATEGIES)  # noqa: E731
    return {
        "strategy": rng.choice([*STRATEGIES, "zero3", mixed]),
        "comm": rng.choice(["group", "peer"]),
        "prefetch": rng.choice([0, 1, 2]),
    }


def play(rank: int, world_size: int, seed: int, folder: Path) -> tuple[str, list, list]:
    """What was drawn, and the two logs."""
    rng = random.Random(seed)
    setting = draw(rng, world_size)
    configurations = [draw_options(rng), draw_options(rng)]
    if setting.name == "three_dtypes":  # an fp64 norm shows in which order a transport sums
        configurations[1]["comm"] = configurations[0]["comm"]
    logs = []
    for first in (0, 1):
        run = folder / str(first)
        player = Player(setting, configurations[first:] + configurations[:first], rank, seed, run)
        for action in setting.actions:
            getattr(player, action)()
        logs.append(player.finish())
    return f"{setting} {configurations}", logs[0], logs[1]


@pytest.mark.parametrize("seed", range(12))
def test_a_sequence_of_actions_has_the_same_bits_however_the_model_is_sharded(
    seed: int, tmp_path: Path
) -> None:
    for first in ("0", "1"):
        (tmp_path / first).mkdir()
    for drawn, actual, expected in run_ranks(play, (2, 3, 4, 2)[seed % 4], seed, tmp_path):
        assert [what for what, _ in actual] == [what for what, _ in expected], drawn
        for index, ((what, one), (_, other)) in enumerate(zip(actual, expected, strict=True)):
            same = torch.equal(one.nan_to_num(), other.nan_to_num())
            assert same, f"{drawn}: entry {index}, {what}: {one} and {other}"
