"""A backward inside a forward, where a wrapped model is called in another one's forward."""

from __future__ import annotations

import pytest
from odd import assert_same_grads, pair
from ranks import run_ranks
from test_backward_inside import RANKS, STRATEGIES, Surface, one_step
from torch import Tensor, nn

import zshard


class Scene(nn.Module):
    """A model of its own around another wrapped one."""

    adapts = False

    def __init__(self, surface: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.surface = nn.Linear(3, 3), nn.Linear(2, 2), [surface]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        distance, colour = self.surface[0](x)
        if self.adapts:  # through both models
            loss = self.second(colour).square().mean() + distance.square().mean()
            loss.backward(retain_graph=True)
        return distance, self.second(colour)


def scene(rank: int, world_size: int, strategy: str, comm: str, adapts: bool) -> int:
    inner, outer = pair(Surface, strategy=strategy, comm=comm), pair(lambda: Scene(nn.Identity()))
    for side, model in zip(outer, inner, strict=True):
        side.surface[0], side.adapts = model, adapts
    for step in range(4):
        for model in (*inner, *outer):
            model.zero_grad()
        before = sum(zshard.stats(model).calls["agree"] for model in (inner[1], outer[1]))
        for model in outer:
            one_step(model, step)
        met = sum(zshard.stats(model).calls["agree"] for model in (inner[1], outer[1])) - before
        assert_same_grads(*inner)
        assert_same_grads(*outer)
    return met


@pytest.mark.parametrize(("world_size", "comm"), RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("adapts", [False, True])
def test_it_may_be_in_a_model_inside_another(
    adapts: bool, strategy: str, world_size: int, comm: str
) -> None:
    met = run_ranks(scene, world_size, strategy, comm, adapts)
    assert adapts or met == ([0] if world_size == 1 else [8] * world_size), met
