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


def by_slices(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
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


def change_alone(rank: int, world_size: int, change: str) -> str:
    model = zshard.wrap(models.build("blocks"))
    whole = zshard.state_dict(model, all_ranks=True)
    evaluate(model, rank, (0,))
    evaluate(model, rank, (0,))
    try:
        if rank == 0:
            by_slices(model) if change == "slices" else model.load_state_dict(whole)
        evaluate(model, rank, (0,))
    except zshard.MismatchError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("change", ["slices", "load_state_dict"])
def test_a_change_behind_a_forward_on_one_rank_alone_is_refused_on_all(change: str) -> None:
    for said in run_ranks(change_alone, 2, change):
        assert "rank 0: a change of parameters" in said and "rank 1: " in said


def meetings_of_changes(rank: int, world_size: int, strategy: str) -> list[int]:
    """How often the ranks meet for a change behind a backward, and behind an evaluation."""
    model = zshard.wrap(models.build("blocks"), strategy=strategy)
    counts = []
    for step in range(3):
        for trains in (True, False):
            if trains:
                models.loss_of(model, batch(rank, step)).backward()
            else:
                evaluate(model, rank, (0, 1, 2))
            before = zshard.stats(model).calls["agree"]
            by_slices(model)
            by_slices(model)
            counts.append(zshard.stats(model).calls["agree"] - before)
    return counts[2:]  # the first of each kind has no program


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_only_a_change_behind_an_evaluation_takes_a_meeting_and_only_one(strategy: str) -> None:
    assert run_ranks(meetings_of_changes, 2, strategy) == [[0, 1, 0, 1]] * 2


def renew_and_change(rank: int, world_size: int) -> int:
    """Meetings of a change that comes right behind an optimizer's step, which has had its own."""
    model = zshard.wrap(models.build("blocks"), strategy="zero2")
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        models.loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        before = zshard.stats(model).calls["agree"]
        by_slices(model)
        taken = zshard.stats(model).calls["agree"] - before
    return taken


def test_a_change_behind_a_step_takes_no_meeting() -> None:
    assert run_ranks(renew_and_change, 2) == [0, 0]


def change_after_an_exception(rank: int, world_size: int, comm: str, trains: bool) -> bool:
    """Whether ranks, of which one has left a forward, make a change and go on alike."""
    model, plain = zshard.wrap(models.build("blocks"), comm=comm), models.build("blocks")
    order = (0, 1, 2)
    for _ in range(2):
        evaluate(model, rank, order)

    def fail(*_: object) -> None:
        raise ValueError("user code")

    hook = model.blocks[1].up.register_forward_hook(fail)
    if rank == 0:
        hook.remove()
        if trains:  # the exception ends the step here as well
            with pytest.raises(zshard.MismatchError, match="after one that raised an exception"):
                models.loss_of(model, batch(rank, 0)).backward()
        else:
            evaluate(model, rank, order)
    else:
        with pytest.raises(ValueError, match="user code"):
            evaluate(model, rank, order)
        hook.remove()
    for each in (model, plain):
        by_slices(each)
    return torch.equal(evaluate(model, rank, order), evaluate(plain, rank, order))


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_rank_that_has_left_the_forward_by_an_exception_makes_the_change_too(
    comm: str, trains: bool
) -> None:
    assert run_ranks(change_after_an_exception, 2, comm, trains) == [True, True]
