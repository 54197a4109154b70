"""Random orders of what users do with experts, of which each rank runs its own, in every strategy.

Each seed draws them. The reference is a plain model on each rank, with the mean of the ranks'
gradients where any rank has one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from experts import BLOCKS, DETACHED, Experts
from ranks import run_ranks
from steps import batch, mean_gradient
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zshard

LR = 0.05


class Planted(Exception):
    """Raised inside a backward, as user code might."""


def raise_planted(_: Tensor) -> None:
    raise Planted


def mixed(name: str, _: nn.Module) -> str:
    return ["zero3", "zero2", "ddp"][int(name[-1:] or 0) % 3]


class Player:
    """Does the same to a wrapped and to a plain model; every rank draws the same."""

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self.rank, self.world_size, self.rng = rank, world_size, random.Random(seed)
        reentrant, frozen, spare = (self.rng.random() < share for share in (0.3, 0.5, 0.4))
        # Under zero3 gathers tell that a reentrant checkpoint takes another way; the step is lost.
        strategies = ["zero2", "zero1", "ddp", *([] if reentrant else ["zero3", "zero3", mixed])]
        options = {"strategy": self.rng.choice(strategies), "prefetch": self.rng.randrange(3)}
        options["comm"] = self.rng.choice(["group", "peer"])
        if world_size == 4:
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        torch.manual_seed(0)
        self.plain, self.model = (Experts(reentrant, frozen, spare) for _ in range(2))
        self.model.load_state_dict(self.plain.state_dict())
        zshard.wrap(self.model, **options)
        self.optimizer = zshard.SGD(self.model.parameters(), lr=LR)
        self.of_plain = dict(self.plain.named_parameters())
        self.sums: dict[str, Tensor] = {}  # the reduced gradients
        self.ways = [self._way(3) for _ in range(4)]
        self.count = 0

    def _way(self, most: int) -> list[int]:
        return self.rng.sample([DETACHED, *range(BLOCKS)], self.rng.randrange(most + 1))

    def _paths(self) -> list[list[int]]:
        """One for each rank, some of which come again and again."""
        rng = self.rng
        paths = [
            rng.choice(self.ways) if rng.random() < 0.7 else self._way(4)
            for _ in range(self.world_size)
        ]
        return paths[:1] * self.world_size if rng.random() < 0.3 else paths

    def _loss(self, side: nn.Module, path: list[int], *, raises: bool = False) -> Tensor:
        side.path = path
        out = side(batch(self.rank, self.count).requires_grad_())  # for the checkpoint
        if raises:
            out.register_hook(raise_planted)
        return (out - 1.0).square().mean()

    def backward(self, *, sync: bool) -> None:
        paths = self._paths()
        if sync and not any(path and path[-1] != DETACHED for path in paths):
            paths[self.rng.randrange(self.world_size)] = [self.rng.randrange(BLOCKS)]
        self.count += 1
        self._loss(self.plain, paths[self.rank]).backward()
        with nullcontext() if sync else zshard.no_sync(self.model):
            self._loss(self.model, paths[self.rank]).backward()
        if sync:
            for name, param in self.of_plain.items():
                if (mean := mean_gradient(param, self.world_size)) is not None:
                    self.sums[name] = mean + self.sums.get(name, 0.0)
                param.grad = None

    def check(self) -> None:
        for name in self.of_plain:
            torch.testing.assert_close(zshard.full_grad(self.model, name), self.sums.get(name))

    def clip(self) -> None:
        expected = nn.utils.get_total_norm(self.sums.values())
        norm = zshard.clip_grad_norm_(self.model, 0.5)
        torch.testing.assert_close(norm.float(), expected)
        for name, grad in self.sums.items():
            self.sums[name] = grad * min(1.0, 0.5 / (float(expected) + 1e-6))

    def step(self) -> None:
        self.optimizer.step()
        for name, grad in self.sums.items():
            self.of_plain[name].data.add_(grad, alpha=-LR)
        self.zero_grad()

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.sums.clear()

    def drop_some(self) -> None:
        for name in [name for name in self.of_plain if self.rng.random() < 0.5]:
            self.model.get_parameter(name).grad = None
            self.sums.pop(name, None)

    def set_some(self) -> None:
        trained = [name for name, param in self.of_plain.items() if param.requires_grad]
        for name in [name for name in trained if self.rng.random() < 0.3]:
            self.sums[name] = torch.full_like(self.of_plain[name], 0.01)
            self.model.get_parameter(name).grad = self.sums[name].clone()

    def freeze_or_not(self) -> None:
        name = self.rng.choice([name for name in self.of_plain if "blocks" in name])
        trained = not self.of_plain[name].requires_grad
        for side in (self.plain, self.model):
            side.get_parameter(name).requires_grad_(trained)

    def raise_on_one(self) -> None:
        path, raises = self._paths()[self.rank], self.rng.randrange(self.world_size) == self.rank
        loss = self._loss(self.model, path, raises=raises)
        with pytest.raises((Planted, zshard.StateError)):
            loss.backward()
            zshard.clip_grad_norm_(self.model, 1.0)
        zshard.reset(self.model)
        self.zero_grad()


def play(rank: int, world_size: int, seed: int) -> None:
    player = Player(rank, world_size, seed)
    rng = player.rng
    some: list[Callable[[], None]] = [player.zero_grad, player.drop_some, player.set_some]
    some += [player.freeze_or_not, player.raise_on_one, *[player.step] * 5]
    for _ in range(14):
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            player.backward(sync=False)
        player.backward(sync=True)
        player.check()
        if rng.random() < 0.5:
            player.clip()
        rng.choice(some)()
    for name, param in player.of_plain.items():
        torch.testing.assert_close(zshard.full_param(player.model, name), param.detach())


@pytest.mark.parametrize("seed", range(12))
def test_experts_of_each_ranks_own_are_trained_as_plain_models_are(seed: int) -> None:
    run_ranks(play, 4 if seed % 6 == 5 else 3 if seed % 6 == 2 else 2, seed)
