"""A run goes on bit for bit from a checkpoint, whatever model, optimizer and moment a seed draws.

Each seed draws a model of odd parameters and buffers, an optimizer with its groups or one for each
group, what happens before the save, and how the model that loads it is made: another strategy,
transport and prefetch, on the meta device, with states of its own, at another number of ranks. What
is loaded is saved again and compared by the safetensors package; at the same number of ranks, so
are later steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import models
import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_same, content
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import zshard

WIDTH = models.WIDTH
Precision = zshard.Precision

# What a block may have beside its two layers: a parameter, made so, and how it counts.
PARAMETERS: dict[str, Callable[[], Tensor]] = {
    "scalar": lambda: torch.rand(()),
    "one": lambda: torch.rand(1),
    "nothing": lambda: torch.empty(0, 3),
    "wide": lambda: torch.rand(WIDTH).double(),
    "short": lambda: torch.rand(WIDTH, 3).bfloat16(),
    "turned": lambda: torch.randn(5, WIDTH).t(),
    "frozen": lambda: torch.rand(WIDTH, 2).bfloat16(),
}
OTHERS = ["unused", "weight_norm", "buffers", "extra_state", "batch_norm"]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "zshard.AdamW": zshard.AdamW,
    "zshard.Adam": zshard.Adam,
    "zshard.SGD": lambda groups: zshard.SGD(groups, momentum=0.9, nesterov=True),
    "torch AdamW": lambda groups: torch.optim.AdamW(groups, fused=True),
    "torch Adam": lambda groups: torch.optim.Adam(groups, foreach=True, amsgrad=True),
    "torch SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "torch RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.9, centered=True),
    "torch NAdam": torch.optim.NAdam,
    "torch ASGD": torch.optim.ASGD,
    "torch Rprop": torch.optim.Rprop,
}

CONTEXTS: list[Callable[[], AbstractContextManager[object]]] = [
    *(nullcontext, torch.no_grad, torch.inference_mode),
    lambda: torch.autocast("cpu", torch.bfloat16),
]


class Block(nn.Module):
    """Two layers and what is drawn."""

    def __init__(self, has: frozenset[str]) -> None:
        super().__init__()
        self.has, self.calls = has, 0
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False)
        self.odd = nn.ParameterDict(
            {k: nn.Parameter(make(), k != "frozen") for k, make in PARAMETERS.items() if k in has}
        )
        if "unused" in has:
            self.unused = nn.Parameter(torch.randn(3, 2))
        if "weight_norm" in has:
            weight_norm(self.down)
        if "buffers" in has:
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("turned_mean", torch.zeros(2, WIDTH).t())
        if "batch_norm" in has:
            self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (B, 7)
        self.calls += 1
        y = x + self.down(F.gelu(self.up(x)))
        for param in self.odd.values():
            y = y + 0.1 * (param if param.ndim < 2 else param.sum(-1)).sum().to(y.dtype)
        if "buffers" in self.has:
            with torch.no_grad():
                self.count += 1
                self.turned_mean.mul_(0.9).add_(0.1)
            y = y + self.turned_mean.sum(1).to(y.dtype)
        if "extra_state" in self.has:
            y = y + 0.01 * self.calls
        return self.norm(y) if "batch_norm" in self.has else y

    def get_extra_state(self) -> int:
        return self.calls if "extra_state" in self.has else 0

    def set_extra_state(self, state: int) -> None:
        self.calls = state


@dataclass
class Setting:
    """What the run that is saved and those that go on have in common."""

    blocks: list[frozenset[str]]
    tied: bool
    twice: bool  # the first block has two names, and runs twice
    precision: Precision
    optimizers: list[str]  # one, or one for each group
    groups: int
    units: str | None
    late: bool  # the head's group comes by add_param_group
    frozen: bool  # half of the parameters, after some steps
    steps: int  # before the save

    def model(self) -> nn.Module:
        model = nn.Module()
        model.inner = nn.ModuleList([Block(has) for has in self.blocks])
        if self.tied:
            model.inner[-1].up.weight = model.inner[0].up.weight
        if self.twice:
            model.again = model.inner[0]
        model.head = nn.Linear(WIDTH, 3)

        def forward(x: Tensor) -> Tensor:
            for block in [*model.inner, *([model.again] if self.twice else [])]:
                x = block(x)
            return model.head(x)

        model.forward = forward
        return model


class Run:
    """One model in training; the seed is of its values and learning rates."""

    def __init__(self, setting: Setting, rank: int, seed: int, meta: bool, **options: object):
        self._setting, self._rank = setting, rank
        torch.manual_seed(seed)
        with torch.device("meta") if meta else nullcontext():
            self.model = setting.model()
        zshard.wrap(self.model, precision=setting.precision, **options)
        self._head = list(self.model.head.parameters())
        params = list(self.model.parameters())
        params = params[: -len(self._head)] if setting.late else params
        ends = [len(params) * i // setting.groups for i in range(setting.groups + 1)]
        parts = [params[ends[i] : ends[i + 1]] for i in range(setting.groups)]
        groups = [{"params": part, "lr": 0.01 * (i + seed)} for i, part in enumerate(parts)]
        if len(setting.optimizers) == 1:
            self.optimizers = [OPTIMIZERS[setting.optimizers[0]](groups)]
        else:
            self.optimizers = [
                OPTIMIZERS[name]([group])
                for name, group in zip(setting.optimizers, groups, strict=True)
            ]
        self.saved = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]

    def change(self) -> None:
        """Freeze some parameters and unfreeze others, and add the late group."""
        if self._setting.frozen:
            for param in list(self.model.parameters())[:-1:2]:
                param.requires_grad_(not param.requires_grad)
        if self._setting.late:
            self.optimizers[-1].add_param_group({"params": self._head, "lr": 0.02})

    def step(self, number: int) -> float:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(9 * number + self._rank))
        loss = self.model(x).float().square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        return loss.item()


def draw(rng: random.Random) -> Setting:
    has = [frozenset(rng.sample([*PARAMETERS, *OTHERS], rng.randint(0, 7))) for _ in range(3)]
    twice = rng.random() < 0.3
    precision = rng.choice([Precision(), Precision.bf16(), Precision.bf16(master="split")])
    names = list(OPTIMIZERS)[: 3 if precision.master == "split" else None]
    groups = rng.choice([1, 2, 3])
    return Setting(
        blocks=has if rng.random() < 0.5 else [has[0]] * 3,
        tied=rng.random() < 0.4,
        twice=twice,
        precision=precision,
        optimizers=rng.choices(names, k=groups if rng.random() < 0.4 else 1),
        groups=groups,
        units=rng.choice([None, "model"]),
        late=rng.random() < 0.4,
        frozen=rng.random() < 0.5,
        steps=rng.choice([0, 1, 2]),
    )


def draw_options(rng: random.Random) -> dict[str, object]:
    strategy = rng.choice(["zero3", "zero3", "zero2", "zero1", "ddp"])
    comm = rng.choice(["group", "peer"])
    return {"strategy": strategy, "comm": comm, "prefetch": rng.choice([0, 1, 2])}


def reload(rank: int, rng: random.Random, setting: Setting, path: Path, units: str | None) -> Run:
    """A new run from the checkpoint, which is then saved again and compared."""
    meta, before = rng.random() < 0.3, rng.choice([0, 1])
    run = Run(setting, rank, 2, meta, units=units, **draw_options(rng))
    if before and not meta:  # there are states to be replaced
        run.step(99)
    run.change()
    with rng.choice(CONTEXTS)():
        zshard.load(path, run.model, run.saved)
    zshard.save(path.parent / "again", run.model, run.saved)
    if rank == 0:
        assert_same(content(path.parent / "again"), content(path), str(setting))
    return run


def save_and_go_on(rank: int, world_size: int, seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    setting = draw(rng)
    run = Run(setting, rank, 1, False, units=setting.units, **draw_options(rng))
    for number in range(setting.steps):
        run.step(number)
    run.change()
    run.step(10)
    handle = zshard.save(folder / "saved", run.model, run.saved, asynchronous=True)
    expected = [run.step(number) for number in (11, 12)]
    assert handle is not None
    handle.wait()
    zshard.save(folder / "end", run.model, run.saved)
    run = reload(rank, rng, setting, folder / "saved", setting.units)
    assert [run.step(number) for number in (11, 12)] == expected, setting
    zshard.save(folder / "again", run.model, run.saved)
    if rank == 0:
        assert_same(content(folder / "again"), content(folder / "end"), str(setting))


def load_elsewhere(rank: int, world_size: int, seed: int, folder: Path) -> None:
    setting = draw(random.Random(seed))
    rng = random.Random(seed + world_size)
    run = reload(rank, rng, setting, folder / "saved", rng.choice([None, "model"]))
    run.step(11)


@pytest.mark.parametrize("seed", range(10))
def test_a_run_goes_on_bit_for_bit_from_what_it_has_saved(seed: int, tmp_path: Path) -> None:
    run_ranks(save_and_go_on, (2, 3, 1, 4)[seed % 4], seed, tmp_path)
    run_ranks(load_elsewhere, (3, 1, 2, 2)[seed % 4], seed, tmp_path)
