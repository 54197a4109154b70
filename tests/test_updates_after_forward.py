"""Parameters that change behind a forward: a rank that is still in it sees what they were."""

from __future__ import annotations

import time
from collections.abc import Callable

import models
import pytest
import torch
from ranks import run_ranks
from steps import batch
from torch import Tensor, nn

import zshard

# Of three blocks, by rank: first what makes the program, then a way that leaves it on rank 1.
LEARNED = ((), (0,))
TAKEN = ((2,), (1, 2, 0))


class Late(models.Block):
    """A block that computes long after the other rank has gone on."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(x)


def by_slices(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def by_whole_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.full(param.shape, 0.25))


def by_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for local in zshard.local_shards(model).values():
        local.zero_()
    zshard.mark_updated(model)


CHANGES = {each.__name__: each for each in (by_slices, by_whole_values, by_a_step, by_hand)}


def evaluate(model: nn.Module, rank: int, order: tuple[int, ...]) -> Tensor:
    model.order = order
    with torch.no_grad():
        return model(batch(rank, 0))


def change_behind(
    rank: int, world_size: int, change: Callable[..., None], options: dict[str, object]
) -> tuple[Tensor, Tensor]:
    """What a rank's forward gave, and a plain model with the values from before the change."""
    torch.manual_seed(0)
    model = zshard.wrap(models.Blocks(block=Late), **options)
    optimizer = zshard.AdamW(model.parameters(), lr=0.1)
    plain = models.Blocks()
    model(batch(rank, 0)).sum().backward()
    plain.load_state_dict(zshard.state_dict(model, all_ranks=True))
    evaluate(model, rank, LEARNED[rank])
    got = evaluate(model, rank, TAKEN[rank])
    change(model, optimizer)
    return got, evaluate(plain, rank, TAKEN[rank])


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_rank_that_is_still_in_the_forward_computes_with_the_old_values(
    change: str, comm: str, strategy: str
) -> None:
    options = {"comm": comm, "strategy": strategy}
    for got, expected in run_ranks(change_behind, 2, CHANGES[change], options):
        assert torch.equal(got, expected)


def change_alone(rank: int, world_size: int) -> str:
    model = zshard.wrap(models.build("blocks"))
    evaluate(model, rank, (0,))
    evaluate(model, rank, (0,))
    try:
        if rank == 0:
            by_slices(model, zshard.SGD(model.parameters(), lr=0.1))
        evaluate(model, rank, (0,))
    except zshard.MismatchError as error:
        return str(error)
    return "nothing was said"


def test_a_change_behind_a_forward_on_one_rank_alone_is_refused_on_all() -> None:
    for said in run_ranks(change_alone, 2):
        assert "rank 0: a change of parameters" in said and "rank 1: " in said
