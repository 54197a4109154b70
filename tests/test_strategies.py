"""zero1, zero2, zero3, ddp, per unit, and HSDP: one result."""

from __future__ import annotations

from functools import cache

import models
import pytest
import torch
from ranks import run_ranks
from test_steps_ddp import assert_ranks_hold_the_same_model, both_sides, by_ddp, wrapped
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training import (
    FEW_STEPS,
    STEPS,
    Plain,
    Record,
    Wrapped,
    adamw,
    assert_close,
    assert_same_bits,
    train,
)

import zshard
from zshard.wrap import schedule_of

STRATEGIES = ["zero1", "zero2", "zero3", "ddp"]
ALIASES = {"full_shard": "zero3", "shard_grad_op": "zero2", "no_shard": "ddp"}


def by_block(name: str, module: nn.Module) -> str:
    """A strategy of its own for every unit."""
    return dict(zip(("blocks.0", "blocks.1", "blocks.2"), STRATEGIES, strict=False)).get(
        name, "ddp"
    )


def named(strategy: str) -> object:
    return by_block if strategy == "by_block" else strategy


def with_strategy(rank: int, world_size: int, name: str, strategy: str) -> Record:
    return wrapped(rank, world_size, name, {"strategy": named(strategy)}, False)


@cache  # the same beside every strategy
def expected_of(name: str) -> list[Record]:
    return run_ranks(by_ddp, 2, name, False)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "ddp", "by_block"])
@pytest.mark.parametrize("name", models.PLAIN_CASES)
def test_every_strategy_equals_ddp_bit_by_bit(name: str, strategy: str) -> None:
    results = run_ranks(with_strategy, 2, name, strategy)
    for actual, expected in zip(results, expected_of(name), strict=True):
        assert_same_bits(actual, expected)
    assert_ranks_hold_the_same_model(results)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "ddp"])
@pytest.mark.parametrize("name", ["gpt_dropout", "gpt_inside", "gpt_around_reentrant"])
def test_every_strategy_equals_ddp_with_dropout_and_recomputation(name: str, strategy: str) -> None:
    results = run_ranks(with_strategy, 2, name, strategy)
    for actual, expected in zip(results, expected_of(name), strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_equals_the_plain_model_on_one_rank(strategy: str) -> None:
    options = {"strategy": named(strategy)}
    actual, expected = both_sides(0, 1, "odd_parameters", options, False)
    assert_same_bits(actual, expected)


def trained(
    rank: int,
    world_size: int,
    strategy: str,
    precision: zshard.Precision | None,
    accumulate: int,
    no_sync: bool,
) -> Record:
    model = models.build("odd_parameters")
    model = zshard.wrap(model, strategy=named(strategy), precision=precision)
    data = models.batches("odd_parameters", FEW_STEPS * accumulate, rank)
    if precision is not None:
        data = [batch.to(precision.compute) for batch in data]
    return train(
        Wrapped(model), adamw(model), data, clip=(0.1, 2.0), accumulate=accumulate, no_sync=no_sync
    )


PRECISIONS = [None, zshard.Precision.bf16(), zshard.Precision.bf16(reduce=torch.bfloat16)]


@pytest.mark.parametrize(
    ("precision", "accumulate", "no_sync"),
    [(p, *how) for p in PRECISIONS for how in ((1, False), (3, False), (3, True))],
)
def test_all_strategies_have_the_same_bits_on_three_ranks(
    precision: zshard.Precision | None, accumulate: int, no_sync: bool
) -> None:
    expected = run_ranks(trained, 3, "zero3", precision, accumulate, no_sync)
    for strategy in ("zero1", "zero2", "ddp", "by_block"):
        for actual, other in zip(
            run_ranks(trained, 3, strategy, precision, accumulate, no_sync), expected, strict=True
        ):
            as_fp32(actual)
            as_fp32(other)
            assert_same_bits(actual, other)


def as_fp32(record: Record) -> None:
    """Widen bf16 gradients, which assert_same_bits would refuse; no bit is lost."""
    record.gradients = [
        {name: None if grad is None else grad.float() for name, grad in gradients.items()}
        for gradients in record.gradients
    ]
    record.norms = [norm.float() for norm in record.norms]


CLIP = (0.1, 2.0)


def hybrid(
    rank: int,
    world_size: int,
    shape: tuple[int, int],
    strategy: str,
    clip: tuple[float, float] | None,
) -> Record:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = zshard.wrap(models.build("odd_parameters"), mesh=mesh, strategy=named(strategy))
    data = models.batches("odd_parameters", STEPS * 2, rank)
    return train(Wrapped(model), adamw(model), data, clip=clip, accumulate=2, no_sync=True)


def ddp(rank: int, world_size: int, clip: tuple[float, float] | None) -> Record:
    side = Plain(models.build("odd_parameters"), world_size)
    data = models.batches("odd_parameters", STEPS * 2, rank)
    return train(side, adamw(side.module), data, clip=clip, accumulate=2, no_sync=True)


@cache  # the same beside every strategy
def expected_of_two_backwards(world_size: int, clip: tuple[float, float] | None) -> list[Record]:
    return run_ranks(ddp, world_size, clip)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "ddp", "by_block"])
def test_hsdp_on_a_two_by_two_mesh_is_within_tolerance_of_ddp(strategy: str) -> None:
    actual = run_ranks(hybrid, 4, (2, 2), strategy, CLIP)
    assert_ranks_hold_the_same_model(actual)
    for ours, theirs in zip(actual, expected_of_two_backwards(4, CLIP), strict=True):
        assert_close(ours, theirs, tolerance=2e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_hsdp_with_one_rank_along_an_axis_has_ddps_bits(
    shape: tuple[int, int], strategy: str
) -> None:
    actual = run_ranks(hybrid, 2, shape, strategy, None)
    for ours, theirs in zip(actual, expected_of_two_backwards(2, None), strict=True):
        assert_same_bits(ours, theirs)


def norms(rank: int, world_size: int, strategy: str, shape: tuple[int, int]) -> list[float]:
    """Norms of all gradients and of some, of every kind, each clipped by its own limit."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = models.build("odd_parameters")
    model = zshard.wrap(model, strategy=named(strategy), mesh=mesh)
    models.loss_of(model, models.batches("odd_parameters", 1, rank)[0]).backward()
    some = [p for name, p in model.named_parameters() if "blocks.1" in name or "mix" in name]
    seen = []
    for part in (model, some):
        for kind in (1.0, 2.0, 3.0, float("inf")):
            seen.append(float(zshard.clip_grad_norm_(part, 1e-3, kind)))
    return seen


def test_every_norm_is_the_same_under_every_strategy() -> None:
    expected = run_ranks(norms, 2, "zero3", (1, 2))
    assert expected[0] == expected[1] and expected[0][0] > 1e-3 > expected[0][1] > 0
    for strategy in ("zero1", "zero2", "ddp", "by_block"):
        for shape in ((1, 2), (2, 1)):
            for actual, other in zip(run_ranks(norms, 2, strategy, shape), expected, strict=True):
                assert actual == pytest.approx(other, rel=1e-6), (strategy, shape)


def held_after_reduced(rank: int, world_size: int, strategy: str) -> list[Tensor]:
    """Gradients of a backward, one inside no_sync and one more, with no look in between."""
    model = zshard.wrap(models.build("odd_parameters"), strategy=named(strategy))
    first, second, third = models.batches("odd_parameters", 3, rank)
    models.loss_of(model, first).backward()
    with zshard.no_sync(model):
        models.loss_of(model, second).backward()
    models.loss_of(model, third).backward()
    return [zshard.full_grad(model, name) for name, _ in model.named_parameters()]


def test_gradients_held_back_after_reduced_ones_add_up_under_every_strategy() -> None:
    expected = run_ranks(held_after_reduced, 2, "zero3")
    for strategy in ("zero1", "zero2", "ddp"):
        for actual, other in zip(run_ranks(held_after_reduced, 2, strategy), expected, strict=True):
            assert all(map(torch.equal, actual, other)), strategy


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ALIASES)
def test_fsdps_names_are_the_same_strategies(alias: str) -> None:
    unit = schedule_of(zshard.wrap(models.Blocks(), strategy=alias)).units[1]
    assert unit.strategy.name == ALIASES[alias]


def test_a_callable_chooses_by_unit_and_is_asked_once_for_each() -> None:
    asked: list[tuple[str, type]] = []

    def choose(name: str, module: nn.Module) -> str:
        asked.append((name, type(module)))
        return "zero3" if name else "zero1"

    units = schedule_of(zshard.wrap(models.Blocks(), strategy=choose)).units
    assert [unit.strategy.name for unit in units] == ["zero1", "zero3", "zero3", "zero3"]
    assert asked == [("", models.Blocks), *((f"blocks.{i}", models.Block) for i in range(3))]


def one_that_is_freed(rank: int, world_size: int) -> tuple[int, int, int]:
    """Bytes of the full buffers, planned and held, and of the one unit that is freed."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    options = {
        "units": ["0", "1", "2", "3"],
        "strategy": lambda name, _: "zero3" if name == "2" else "zero2",
    }
    planned = zshard.plan(model, world_size, **options, backend="gloo").to_dict()
    zshard.wrap(model, **options)
    model(torch.ones(1, 8)).sum().backward()
    freed = next(unit for unit in schedule_of(model).units if unit.name == "2")
    held = zshard.memory(model)["now"]["full_buffers"]
    return planned["per_rank"]["full_buffers"], held, freed.full_bytes


def test_units_that_stay_whole_neither_take_slots_nor_decide_of_their_number_and_size() -> None:
    for planned, held, freed in run_ranks(one_that_is_freed, 2):
        assert planned == held == freed > 0


@pytest.mark.parametrize("strategy", ["zero4", None, 3, lambda name, module: "zero9"])
def test_an_unknown_strategy_is_refused_and_leaves_the_model_plain(strategy: object) -> None:
    model = models.Blocks()
    with pytest.raises(zshard.InputError, match=r"strategy=.*zero1"):
        zshard.wrap(model, strategy=strategy)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    zshard.wrap(model)


def unlike(rank: int, world_size: int) -> str:
    with pytest.raises(zshard.MismatchError) as caught:
        zshard.wrap(models.build("blocks"), strategy="zero2" if rank else "zero3")
    return str(caught.value)


def test_ranks_with_different_strategies_are_refused_on_every_rank() -> None:
    for message in run_ranks(unlike, 2):
        assert "strategy" in message and "zero2" in message and "zero3" in message
