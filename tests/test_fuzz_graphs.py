"""Random graphs of units of which losses take parts, equal plain models' mean bit by bit.

Each seed draws which unit reads what, which are run by a checkpoint together, which are detached,
frozen, nested or run twice, and which outputs each step's losses leave out.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import slots
import torch
from ranks import run_ranks
from steps import mean_gradient
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zshard

STEPS = 6
WIDTH = 5


class Nested(nn.Module):
    """A unit around another one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](x * self.gain).tanh() + self.gain


class Region(nn.Module):
    """Units run by one checkpoint, or by none; returns all their outputs.

    Args:
        reads: of each unit, the earlier value that it reads: 0 is the input. The last one is what
            the next region reads.
        detached: values whose gradient is not to reach the unit that made them.
        reentrant: of the checkpoint; None for none.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        reads: Sequence[int],
        detached: set[int],
        reentrant: bool | None,
    ) -> None:
        super().__init__()
        self.blocks, self._reads = nn.ModuleList(blocks), reads[:-1]
        self.read = reads[-1]
        self._detached, self._reentrant = detached, reentrant

    def _run(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        for index, (block, read) in enumerate(zip(self.blocks, self._reads, strict=True), 1):
            value = block(values[read])
            values.append(value.detach() if index in self._detached else value)
        return tuple(values[1:])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self._reentrant is None:
            return self._run(x)
        return checkpoint(self._run, x, use_reentrant=self._reentrant)


class Graph(nn.Module):
    """Regions one after another; returns every unit's output."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, WIDTH)
        self.regions = nn.ModuleList(draw_region(rng) for _ in range(rng.randint(1, 3)))
        if rng.random() < 0.3:  # a unit that runs once more, in another region
            self.regions.append(Region([self.regions[0].blocks[0]], [0, 0], set(), None))

    def forward(self, x: Tensor) -> list[Tensor]:
        value, outputs = self.inlet(x), []
        for region in self.regions:
            found = region(value)
            outputs += found
            value = value + found[region.read % len(found)]
        return [*outputs, value]


def draw_region(rng: random.Random) -> Region:
    linear, norm = partial(nn.Linear, WIDTH, WIDTH), partial(nn.LayerNorm, WIDTH)
    kinds = [Nested, norm, linear, linear, linear]
    blocks = [rng.choice(kinds)() for _ in range(rng.randint(1, 6))]
    for block in blocks:
        block.requires_grad_(rng.random() < 0.8)
    reads = [rng.choice([0, rng.randint(0, index)]) for index in range(len(blocks) + 1)]
    detached = {index for index in range(1, len(blocks) + 1) if rng.random() < 0.25}
    reentrant = rng.choice([None, False, False, True])
    if reentrant:  # which refuses a region without an output that needs a gradient
        reads[-2] = 0
        detached.discard(len(blocks))
    return Region(blocks, reads, detached, reentrant)


def is_unit(name: str, module: nn.Module) -> bool:
    """The finest map: many units to a region, and units inside units."""
    return isinstance(module, (nn.Linear, nn.LayerNorm, Nested))


def losses_of(outputs: Sequence[Tensor], parts: Sequence[float]) -> Iterator[Tensor]:
    """One loss for each of `parts`, which say what it takes of the outputs."""
    for part in parts:
        rng = random.Random(part)
        chosen = [each for each in outputs[:-1] if rng.random() < 0.2]
        loss = sum(each.square().mean() for each in chosen)
        if not chosen or not loss.requires_grad:
            loss = loss + outputs[-1].square().mean()
        yield loss


def means_of_gradients(
    model: nn.Module, x: Tensor, parts: Sequence[float], world_size: int
) -> dict[str, Tensor]:
    """The sum over the backwards of the mean over the ranks, where any rank has a gradient."""
    found: dict[str, Tensor] = {}
    for loss in losses_of(model(x), parts):
        loss.backward(retain_graph=True)
        for name, param in model.named_parameters():
            if (mean := mean_gradient(param, world_size)) is not None:
                found[name] = found[name] + mean if name in found else mean
            param.grad = None
    return found


def backward(model: nn.Module, x: Tensor, parts: Sequence[float]) -> None:
    """The wrapped model's backwards, again where it asks for that."""
    for attempts_left in (2, 1, 0):
        try:
            for loss in losses_of(model(x), parts):
                loss.backward(retain_graph=True)
            return
        except zshard.StateError as error:
            if not attempts_left or "Repeat the step" not in str(error):
                raise
            model.zero_grad()


def play(rank: int, world_size: int, seed: int) -> tuple[str, list[str]]:
    """What was drawn, and what differs from the plain model."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plain = Graph(rng)
    options = {"comm": rng.choice(["group", "peer"]), "prefetch": rng.choice([0, 1, 2, 5])}
    options["strategy"] = rng.choice(["zero3", "zero3", "zero2", "zero1", "ddp"])
    options["units"] = rng.choice([is_unit, is_unit, is_unit, None, "model", "layer"])
    model = zshard.wrap(copy.deepcopy(plain), **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    unlike = rng.random() < 0.3  # whether each rank's losses leave out other outputs
    wrong: list[str] = []
    parts: list[float] = []
    for step in range(STEPS):
        drawn = [rng.random() + unlike * rank for _ in range(rng.choice([1, 1, 2]))]
        if rng.random() < 0.6 or not parts:  # else the same backward once more
            parts = drawn
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        expected = means_of_gradients(plain, x, parts, world_size)
        backward(model, x, parts)
        for name, param in plain.named_parameters():
            param.grad, got = expected.get(name), zshard.full_grad(model, name)
            same = got is None if param.grad is None else torch.equal(got, param.grad)
            if not same:
                wrong.append(f"step {step}: {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        slots.assert_all_ours(model)
    return f"{options} {unlike=} {plain}", wrong


@pytest.mark.parametrize("seed", range(20))
def test_losses_of_parts_of_a_graph_give_the_plain_models_gradients(seed: int) -> None:
    for drawn, wrong in run_ranks(play, 2, seed):
        assert not wrong, drawn
