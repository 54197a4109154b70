"""N = 3 and 4: within fp32 tolerance of DDP, and the same bits whatever the schedule."""

from __future__ import annotations

import time

import models
import pytest
import torch
from ranks import run_ranks
from steps import all_by_messages, build
from test_steps_ddp import assert_ranks_hold_the_same_model, both_sides
from training import STEPS, Record, Wrapped, adamw, assert_close, assert_same_bits, train

import zshard
from zshard.wrap import schedule_of

# A sum of three or four fp32 gradients in another order differs in its last bit or two (1e-7);
# ten steps of AdamW, which divides by their root mean square, amplify that some tenfold.
TOLERANCE = 2e-5


def wrapped_twice(
    rank: int, world_size: int, name: str, options: list[dict[str, object]]
) -> list[Record]:
    """Train the same case once for every set of wrap's options."""
    records = []
    for option in options:
        model = zshard.wrap(models.build(name), **option)
        records.append(train(Wrapped(model), adamw(model), models.batches(name, STEPS, rank)))
    return records


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize(
    "name", ["blocks", "odd_parameters", "channels_last", "tied_in_one_unit", "unused", "frozen"]
)
def test_ten_steps_are_within_tolerance_of_ddp(name: str, world_size: int) -> None:
    results = run_ranks(both_sides, world_size, name, {}, False)
    for actual, expected in results:
        assert_close(actual, expected, TOLERANCE)
    assert_ranks_hold_the_same_model([actual for actual, _ in results])


@pytest.mark.parametrize("world_size", [3, 4])
def test_repeated_runs_and_every_prefetch_depth_give_the_same_bits(world_size: int) -> None:
    options: list[dict[str, object]] = [{}, {}, {"prefetch": 0}, {"prefetch": 3}]
    for first, *others in run_ranks(wrapped_twice, world_size, "gpt", options):
        for other in others:
            assert_same_bits(other, first)


def full_gradients(rank: int, world_size: int, name: str) -> tuple[dict, dict]:
    """Return the reduced gradients, and this rank's own by the plain model."""
    batch = models.batches(name, 1, rank)[0]
    plain = models.build(name)
    models.loss_of(plain, batch).backward()
    model = zshard.wrap(models.build(name))
    models.loss_of(model, batch).backward()
    names = [name for name, _ in model.named_parameters()]
    reduced = {name: zshard.full_grad(model, name).clone() for name in names}
    return reduced, {name: plain.get_parameter(name).grad for name in names}


def test_four_ranks_gradients_are_summed_in_fp32_in_rank_order() -> None:
    # At N = 4 the division is exact wherever it is done, so the order of the sum fixes the bits.
    results = run_ranks(full_gradients, 4, "odd_parameters")
    for name in results[0][0]:
        own = [gradients[name] for _, gradients in results]
        expected = (((own[0] + own[1]) + own[2]) + own[3]) / 4
        for rank, (reduced, _) in enumerate(results):
            assert torch.equal(reduced[name], expected), f"{name} on rank {rank}"


def more_ranks_than_elements(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    model = zshard.wrap(model)
    optimizer = zshard.AdamW(model.parameters(), lr=0.1)
    model(torch.full((1, 2), float(rank))).sum().backward()
    gradient = zshard.full_grad(model, "weight").clone()
    optimizer.step()
    return gradient, zshard.full_param(model, "weight").clone()


def test_a_model_with_fewer_elements_than_ranks_trains() -> None:
    for gradient, weight in run_ranks(more_ranks_than_elements, 4):
        assert gradient.tolist() == [[1.5, 1.5]]
        torch.testing.assert_close(weight, torch.full((1, 2), 0.5 * (1 - 0.1 * 0.01) - 0.1))


def by_messages(rank: int, world_size: int, name: str, strategy: str) -> tuple[Record, Record]:
    """As ``both_sides``, with every gather and exchange as messages."""
    all_by_messages(rank)
    return both_sides(rank, world_size, name, {"strategy": strategy, "prefetch": 2}, False)


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "ddp"])
@pytest.mark.parametrize("name", ["odd_parameters", "unused", "gpt_around"])
def test_collectives_as_messages_change_no_bit(name: str, strategy: str) -> None:
    for actual, expected in run_ranks(by_messages, 2, name, strategy):
        assert_same_bits(actual, expected)


def test_messages_between_three_ranks_give_the_collectives_bits() -> None:
    options = {"strategy": "zero3", "prefetch": 2}
    expected = run_ranks(both_sides, 3, "gpt", options, False)
    for (actual, _), (other, _) in zip(
        run_ranks(by_messages, 3, "gpt", "zero3"), expected, strict=True
    ):
        assert_same_bits(actual, other)


def ends_behind_a_step(rank: int, world_size: int) -> None:
    """Rank 1 comes late to the gathers of what the step has updated, as rank 0 ends."""
    all_by_messages(rank)
    model = build(strategy="zero2", comm="group")
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    if rank == 1:
        schedule_of(model).comm.interpose = lambda op, tag: time.sleep(0.2 * (op == "all_gather"))
    optimizer.step()


def test_a_script_may_end_behind_a_step_whose_updates_others_still_gather() -> None:
    run_ranks(ends_behind_a_step, 2, timeout=20)
