"""N = 2: ten AdamW steps of every odd model equal DDP's over gloo bit by bit, in fp32."""

from __future__ import annotations

import models
import pytest
import torch
from ranks import run_ranks
from training import (
    STEPS,
    Plain,
    Record,
    Wrapped,
    adamw,
    assert_close,
    assert_same_bits,
    torch_adamw,
    train,
)

import zshard


def both_sides(
    rank: int, world_size: int, name: str, options: dict[str, object], torchs_optimizer: bool
) -> tuple[Record, Record]:
    """Train the same case under DDP, then wrapped; returns (wrapped, DDP)."""
    expected = by_ddp(rank, world_size, name, torchs_optimizer)
    return wrapped(rank, world_size, name, options, torchs_optimizer), expected


def by_ddp(rank: int, world_size: int, name: str, torchs_optimizer: bool) -> Record:
    plain = Plain(models.build(name), world_size, models.CASES[name].unused)
    torch.manual_seed(5 + rank)  # dropout's numbers, other ones on every rank
    optimizer = (torch_adamw if torchs_optimizer else adamw)(plain.module)
    return train(plain, optimizer, models.batches(name, STEPS, rank))


def wrapped(
    rank: int, world_size: int, name: str, options: dict[str, object], torchs_optimizer: bool
) -> Record:
    model = models.build(name)
    torch.manual_seed(5 + rank)
    model = zshard.wrap(model, **options)
    optimizer = (torch_adamw if torchs_optimizer else adamw)(model)
    return train(Wrapped(model), optimizer, models.batches(name, STEPS, rank))


def assert_ranks_hold_the_same_model(records: list[Record]) -> None:
    for other in records[1:]:
        for name, value in records[0].parameters.items():
            assert torch.equal(other.parameters[name], value), name
    losses = {float(record.losses[0]) for record in records}
    assert len(losses) == len(records), "the ranks trained on one batch: reduction was not tested"


@pytest.mark.parametrize("name", models.CASES)
def test_ten_steps_equal_ddps_bit_by_bit(name: str) -> None:
    results = run_ranks(both_sides, 2, name, {}, False)
    for actual, expected in results:
        assert_same_bits(actual, expected)
    assert_ranks_hold_the_same_model([actual for actual, _ in results])


@pytest.mark.parametrize("units", ["model", "layer"])
@pytest.mark.parametrize("name", ["odd_parameters", "tied_across_units", "unused", "frozen", "gpt"])
def test_every_unit_map_equals_ddp_bit_by_bit(name: str, units: str) -> None:
    for actual, expected in run_ranks(both_sides, 2, name, {"units": units}, False):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_prefetch_depth_does_not_change_a_bit(prefetch: int) -> None:
    for actual, expected in run_ranks(both_sides, 2, "gpt", {"prefetch": prefetch}, False):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("name", ["odd_parameters", "gpt"])
def test_torchs_adamw_on_shards_is_within_tolerance_of_ddp(name: str) -> None:
    # torch's vectorised kernels round by position in the tensor, and a shard starts elsewhere.
    for actual, expected in run_ranks(both_sides, 2, name, {}, True):
        assert_close(actual, expected, tolerance=1e-5)


def discarded_forward(rank: int, world_size: int, is_wrapped: bool) -> list[float]:
    """Losses of steps with a forward between backward and step that no backward follows."""
    if is_wrapped:
        model = trained = zshard.wrap(models.build("gpt"))
    else:
        trained = models.build("gpt")
        model = torch.nn.parallel.DistributedDataParallel(trained)
    optimizer = adamw(trained)
    losses = []
    for batch in models.batches("gpt", 5, rank):
        loss = models.loss_of(model, batch)
        loss.backward()
        # What this forward leaves gathered is out of date after the step.
        losses += [float(loss.detach()), float(models.loss_of(trained, batch.flip(0)).detach())]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_forward_without_backward_before_the_step_leaves_no_stale_weights() -> None:
    assert run_ranks(discarded_forward, 2, True) == run_ranks(discarded_forward, 2, False)


def backward_after_step(rank: int, world_size: int) -> str:
    model = zshard.wrap(models.build("blocks"))
    optimizer = adamw(model)
    first, second = (models.loss_of(model, b) for b in models.batches("blocks", 2, rank))
    second.backward()
    optimizer.step()
    try:
        first.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_backward_through_weights_that_a_step_has_changed_is_refused_as_in_plain_torch() -> None:
    messages = run_ranks(backward_after_step, 2)
    assert all("modified" in message for message in messages), messages
