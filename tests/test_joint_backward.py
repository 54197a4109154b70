"""One backward through several models, whose ranks take different units."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from steps import mean_gradient
from test_fuzz_exceptions import Bomb, Injected
from torch import Tensor, nn

import zshard

Loss = Callable[[nn.Module, nn.Module, Tensor], Tensor]


class Routed(nn.Module):
    """Runs the units that `order` says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x).tanh()
        return x


LOSSES: dict[str, Loss] = {
    "sum": lambda a, b, x: a(x).square().mean() + b(x).square().mean(),
    "sum_reversed": lambda a, b, x: b(x).square().mean() + a(x).square().mean(),
    "chain": lambda a, b, x: b(a(x)).square().mean(),
    "chain_reversed": lambda a, b, x: a(b(x)).square().mean(),
    "interleaved": lambda a, b, x: a(b(a(x))).square().mean(),
    "interleaved_reversed": lambda a, b, x: b(a(b(x))).square().mean(),
    "to_and_fro": lambda a, b, x: b(a(b(a(x)))).square().mean(),
}


def wrong_gradients(model: nn.Module, plain: nn.Module, world_size: int) -> list[str]:
    """Parameters whose gradient is not the mean of the plain model's, which may be missing."""
    wrong = []
    for name, param in plain.named_parameters():
        mean, got = mean_gradient(param, world_size), zshard.full_grad(model, name)
        same = got is mean if mean is None or got is None else torch.allclose(got, mean, atol=1e-6)
        if not same:
            wrong.append(name)
    return wrong


def jointly(
    rank: int, world_size: int, comm: str, losses: list[str], routed: str
) -> list[tuple[int, str]]:
    """What is wrong, in steps of which all but the first two draw their losses and their units.

    Args:
        routed: those of the two models, "a" and "b", whose units each rank draws for itself.
    """
    common, own = random.Random(3), random.Random(rank)
    torch.manual_seed(0)
    plain = {"a": Routed(), "b": Routed()}
    wrapped = {name: zshard.wrap(copy.deepcopy(each), comm=comm) for name, each in plain.items()}
    wrong = []
    for step in range(16 if routed else 8):
        loss = LOSSES[common.choice(losses)]
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        for name in plain:
            drawn = own.choice([(0, 1, 2), (1,), (2, 0)])  # few, so that they come again
            order = drawn if name in routed and step > 1 else (0, 1, 2)
            plain[name].order = wrapped[name].order = order
        with zshard.no_sync(wrapped["a"]), zshard.no_sync(wrapped["b"]):
            if step % 3 == 2:  # a micro-batch of the same kind goes before
                loss(wrapped["a"], wrapped["b"], x).backward()
                loss(plain["a"], plain["b"], x).backward()
                dist.all_reduce(torch.zeros(1))  # the script's own finds every rank outside
        for models in (plain, wrapped):
            loss(models["a"], models["b"], x).backward()
        for name in plain:
            wrong += [
                (step, bad) for bad in wrong_gradients(wrapped[name], plain[name], world_size)
            ]
            plain[name].zero_grad()
            wrapped[name].zero_grad()
    return wrong


# With one model routed or none, a reversed loss is the other one, but for the models' numbers.
JOINT = [
    (loss, routed)
    for loss in LOSSES
    for routed in (["ab"] if "reversed" in loss else ["", "a", "b", "ab"])
]


@pytest.mark.parametrize(("loss", "routed"), JOINT)
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_ranks_may_take_different_units_of_models_in_one_backward(
    loss: str, comm: str, routed: str
) -> None:
    assert run_ranks(jointly, 2, comm, [loss], routed) == [[], []]


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_losses_may_change_from_step_to_step(comm: str) -> None:
    assert run_ranks(jointly, 3, comm, list(LOSSES), "ab") == [[], [], []]


class Raising(Routed):
    """Raises in the midst of its backward, if it is to."""

    raises = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](Bomb.apply(x) if self.raises else x)


def raised_jointly(rank: int, world_size: int, then: str) -> tuple[list[Tensor], list[Tensor]]:
    """Losses before and after a joint backward that raised, and ``then`` one of b on rank 0."""
    torch.manual_seed(0)
    a, b = zshard.wrap(Raising()), zshard.wrap(Raising())
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))

    def losses() -> list[Tensor]:
        found = []
        for model in (a, b):
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.detach())
            model.zero_grad()
        return found

    before = losses()
    b.raises = True
    with pytest.raises(Injected):  # behind all of a's backward
        (b(x) + a(x)).sum().backward()
    b.zero_grad()
    b.raises = then == "backward" and rank == 0
    if b.raises:
        with pytest.raises(Injected):
            b(x).sum().backward()
    elif rank == 0:
        b(x)
        zshard.reset(b)
    else:
        with pytest.raises((zshard.StateError, zshard.MismatchError)):
            b(x).sum().backward()
            zshard.clip_grad_norm_(b, 1.0)
    b.raises = False
    a.zero_grad()
    b.zero_grad()
    return before, losses()


@pytest.mark.parametrize("then", ["backward", "forward"])
def test_one_that_raised_on_all_ranks_leaves_no_model_behind(then: str) -> None:
    for before, after in run_ranks(raised_jointly, 2, then):
        assert all(map(torch.equal, before, after)), (before, after)
