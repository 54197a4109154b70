"""master="split": two 16-bit planes hold every bit of the fp32 master; only zshard updates them."""

from __future__ import annotations

import models
import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from training import STEPS, Wrapped, adamw, train

import zshard
from zshard import ops
from zshard.units.master import Master
from zshard.wrap import schedule_of

SPLIT = zshard.Precision.bf16(master="split")


@pytest.mark.parametrize("decoupled", [1.0, 0.0])
def test_ten_thousand_steps_keep_the_planes_equal_to_an_fp32_master(decoupled: float) -> None:
    n = 157
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(n, generator=generator)
    hi, lo = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16)
    ops.split_master_(hi, lo, master)
    states = [torch.zeros(n) for _ in range(4)]
    segments = torch.tensor([[0, 0, n]])
    hypers = torch.tensor([[3e-3, 0.9, 0.95, 1e-8, 0.1, decoupled]], dtype=torch.float64)
    steps = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    joined = torch.empty(n)
    for step in range(10_000):
        grad = [torch.randn(n, generator=generator).bfloat16()]
        ops.adamw_([master], [], states[:1], states[1:2], grad, [], segments, hypers, steps[0])
        ops.adamw_([hi], [lo], states[2:3], states[3:], grad, [], segments, hypers, steps[1])
        ops.join_master_(joined, hi, lo)
        assert torch.equal(joined, master), f"step {step}"
    assert int(steps[1]) == 10_000 and float(master.abs().max()) > 0


def with_given_gradients(
    rank: int, world_size: int, strategy: str, precision: zshard.Precision | None
) -> dict[str, Tensor]:
    """Masters after steps on gradients that do not depend on the model."""
    model = zshard.wrap(models.build("odd_parameters"), strategy=strategy, precision=precision)
    optimizer = adamw(model)
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return {name: zshard.full_param(model, name) for name, _ in model.named_parameters()}


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "ddp"])
def test_updates_are_the_fp32_masters_bit_by_bit(strategy: str) -> None:
    expected = with_given_gradients(0, 1, "zero3", None)
    for actual in [
        with_given_gradients(0, 1, strategy, SPLIT),
        *run_ranks(with_given_gradients, 2, strategy, SPLIT),
    ]:
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name


def losses(rank: int, world_size: int, precision: zshard.Precision) -> list[float]:
    model = zshard.wrap(models.build("blocks"), precision=precision)
    record = train(Wrapped(model), adamw(model), models.batches("blocks", STEPS, rank))
    return [float(loss) for loss in record.losses]


def test_training_is_that_of_an_fp32_master_but_for_how_ties_round() -> None:
    for ours, theirs in zip(
        run_ranks(losses, 2, SPLIT),
        run_ranks(losses, 2, zshard.Precision.bf16()),
        strict=True,
    ):
        # One bf16 weight in 2^16 is a tie; ten steps see a handful, of half a unit (2^-9) each.
        assert ours == pytest.approx(theirs, rel=2e-3)
        assert ours[-1] < 0.9 * ours[0]


def test_nothing_is_copied_what_is_sent_is_the_upper_plane() -> None:
    model = zshard.wrap(models.build("blocks"), precision=SPLIT)
    for unit in schedule_of(model).units:
        for flat in unit.flats:
            assert flat.master.values is None
            assert flat.master.send.dtype == torch.bfloat16
            assert flat.master.low is not None and flat.master.low.dtype == torch.int16


def test_whole_values_are_written_and_read_back_exactly() -> None:
    model = zshard.wrap(models.build("blocks"), precision=SPLIT)
    value = torch.randn(13, 7)
    with zshard.full_params(model, write=True), torch.no_grad():
        model.blocks[1].up.weight.copy_(value)
    assert torch.equal(zshard.full_param(model, "blocks.1.up.weight"), value)
    model.get_parameter("blocks.0.up.weight").data.copy_(value)
    assert torch.equal(zshard.full_param(model, "blocks.0.up.weight"), value)
    batch = models.batches("blocks", 1)[0]
    plain = models.build("blocks")
    with torch.no_grad():
        plain.blocks[0].up.weight.copy_(value)
        plain.blocks[1].up.weight.copy_(value)
        assert torch.equal(model(batch), plain.bfloat16()(batch.bfloat16()))


def test_reading_elementwise_sees_the_joined_values() -> None:
    model = zshard.wrap(models.build("blocks"), precision=SPLIT)
    parameter = model.get_parameter("blocks.0.up.weight")
    before = zshard.full_param(model, "blocks.0.up.weight")
    average = torch.zeros_like(parameter)
    average.lerp_(parameter.detach(), 0.5)
    assert torch.equal(average.local[: before.numel()], (0.5 * before).flatten())


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_another_optimizer_is_refused_by_name_and_changes_nothing(
    optimizer: type[torch.optim.Optimizer], foreach: bool
) -> None:
    model = zshard.wrap(models.build("blocks"), precision=SPLIT)
    before = zshard.full_param(model, "blocks.0.up.weight")
    models.loss_of(model, models.batches("blocks", 1)[0]).backward()
    with pytest.raises(zshard.OptimizerError, match=r"split.*zshard\.AdamW"):
        optimizer(model.parameters(), lr=0.1, foreach=foreach).step()
    assert torch.equal(zshard.full_param(model, "blocks.0.up.weight"), before)
    with pytest.raises(zshard.OptimizerError, match="split"), torch.no_grad():
        model.get_parameter("blocks.0.up.weight").data.mul_(2)


@pytest.mark.parametrize("compute", [torch.float16, torch.float32])
def test_a_split_master_needs_bf16_compute(compute: torch.dtype) -> None:
    with pytest.raises(zshard.InputError, match=r"split.*bf16"):
        zshard.Precision(compute=compute, master="split")


def test_a_split_master_has_no_slices_to_write_to() -> None:
    with pytest.raises(zshard.StateError, match="split master is two planes"):
        zshard.local_shards(zshard.wrap(models.build("blocks"), precision=SPLIT))


def test_a_model_in_which_nothing_can_be_split_is_refused_before_it_is_touched() -> None:
    model = models.build("blocks")
    with pytest.raises(zshard.InputError, match=r"split.*float32"):
        zshard.wrap(model, precision=zshard.Precision(master="split"))
    zshard.wrap(model)


def test_bf16_parameters_split_without_a_compute_dtype() -> None:
    model = models.build("blocks").bfloat16()
    model.outlet.float()
    zshard.wrap(model, precision=zshard.Precision(master="split"))
    split = {flat.dtypes.param: flat.dtypes.split for flat in schedule_of(model).units[0].flats}
    assert split == {torch.bfloat16: True, torch.float32: False}


def test_values_that_a_load_scatters_keep_every_bit() -> None:
    dtypes = SPLIT.resolve(torch.float32)
    master = Master(torch.zeros(96), torch.empty(96, dtype=dtypes.compute), dtypes)
    at, values = torch.randperm(96)[:40], torch.randn(40)
    master.scatter(at, values)
    assert torch.equal(master.read(), torch.zeros(96).index_put((at,), values))
