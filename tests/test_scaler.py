"""GradScaler: steps, skips and scales equal torch.amp.GradScaler's on the plain model or DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import models
import pytest
import torch
from ranks import run_ranks
from test_precision import Masters, mean_in_rank_order
from torch import Tensor, nn
from training import (
    STEPS,
    Plain,
    Record,
    Wrapped,
    adamw,
    assert_close,
    assert_same_bits,
    torch_adamw,
)

import zshard

NA_N = float("nan")


class Run(NamedTuple):
    """What one rank saw of a scaled run."""

    record: Record
    scales: list[float]  # after each step


class Settings(NamedTuple):
    """How a run is made, the same on both sides."""

    model: str = "odd_parameters"
    optimizer: str = "zshard"
    planted: tuple[int, ...] = (2, 5)  # micro-batches whose loss is NaN on the last rank
    clip: float | None = None
    accumulate: int = 1
    no_sync: bool = True
    set_to_none: bool = True


def in_two(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The first half of the parameters in one optimizer, the rest in another."""
    params = list(model.parameters())
    half = len(params) // 2
    return [zshard.AdamW(part, lr=1e-2, eps=1e-6) for part in (params[:half], params[half:])]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "zshard": lambda m: [adamw(m)],
    "adam": lambda m: [zshard.Adam(m.parameters(), lr=1e-2, eps=1e-6)],
    "in_two": in_two,
    "foreach": lambda m: [torch_adamw(m)],
    "fused": lambda m: [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-6, fused=True)],
    "sgd_fused": lambda m: [torch.optim.SGD(m.parameters(), lr=5e-2, momentum=0.9, fused=True)],
}


def train_scaled(
    side: Plain | Wrapped,
    scaler: torch.amp.GradScaler,
    batches: Sequence[Tensor],
    how: Settings,
    plants: bool,
) -> Run:
    """Train with the scaler, and clipping between unscale_ and step where `how` says so."""
    optimizers = OPTIMIZERS[how.optimizer](side.module)
    run = Run(Record(), [])
    for start in range(0, len(batches), how.accumulate):
        micro = range(start, start + how.accumulate)
        for index in micro:
            hold = how.no_sync and index != micro[-1]
            with side.no_sync() if hold else nullcontext():
                loss = models.loss_of(side.model, batches[index]) / how.accumulate
                run.record.losses.append(loss.detach().clone())
                scaler.scale(loss * NA_N if plants and index in how.planted else loss).backward()
        if how.clip is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            run.record.norms.append(side.clip(how.clip, 2.0).nan_to_num(nan=-1.0))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(how.set_to_none)
        run.scales.append(scaler.get_scale())
    run.record.parameters = {n: side.parameter(n) for n, _ in side.module.named_parameters()}
    return run


def both_sides(rank: int, world_size: int, how: Settings) -> tuple[Run, Run]:
    """The wrapped run with zshard's scaler, and the plain one with torch's."""
    data = models.batches(how.model, STEPS // how.accumulate * how.accumulate, rank)
    runs = []
    for is_wrapped in (True, False):
        model = models.build(how.model)
        if is_wrapped:
            side: Plain | Wrapped = Wrapped(zshard.wrap(model))
        else:
            side = Plain(model, world_size, models.CASES[how.model].unused)
        scaler_type = zshard.GradScaler if is_wrapped else torch.amp.GradScaler
        scaler = scaler_type("cpu", growth_interval=2)
        runs.append(train_scaled(side, scaler, data, how, rank == world_size - 1))
    return runs[0], runs[1]


def on_ranks(fn: Callable[..., tuple[Run, Run]], world_size: int, *args: object) -> list:
    return [fn(0, 1, *args)] if world_size == 1 else run_ranks(fn, world_size, *args)


def assert_alike(runs: list[tuple[Run, Run]], tolerance: float = 0.0) -> None:
    """The same scales on all ranks and on both sides, up and down; and the same training."""
    for actual, expected in runs:
        assert actual.scales == expected.scales == runs[0][0].scales
        changes = [b / a for a, b in zip(actual.scales, actual.scales[1:], strict=False)]
        assert min(changes) == 0.5, "no step was skipped"
        assert max(changes) == 2.0, "the scale has not grown"
        if tolerance:
            assert_close(actual.record, expected.record, tolerance)
        else:
            assert_same_bits(actual.record, expected.record)


EXACT = {
    "whole": Settings(),
    "adam": Settings(optimizer="adam"),
    "in_two": Settings(optimizer="in_two"),
    "unused": Settings("unused"),
    "no_sync": Settings("gpt", accumulate=2),
    "zeroed": Settings(set_to_none=False),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", EXACT.values(), ids=EXACT)
def test_steps_and_scales_have_the_bits_of_torchs_scaler(how: Settings, world_size: int) -> None:
    assert_alike(on_ranks(both_sides, world_size, how))


# torch's kernels round by position, norms are summed shard by shard, and without no_sync each
# micro-batch is averaged before it is added: last bits differ, and ten steps carry them on.
CLOSE = {
    "clipped": Settings(clip=0.05),
    "clipped_zeroed": Settings(clip=0.05, set_to_none=False),
    "clipped_in_two": Settings(optimizer="in_two", clip=0.05),
    "synced": Settings("gpt", accumulate=2, no_sync=False),
    "foreach": Settings(optimizer="foreach"),
    "foreach_clipped": Settings(optimizer="foreach", clip=0.05),
    "fused": Settings(optimizer="fused"),
    "fused_clipped": Settings(optimizer="fused", clip=0.05),
    "sgd_fused": Settings(optimizer="sgd_fused"),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", CLOSE.values(), ids=CLOSE)
def test_clipped_accumulated_and_torchs_own_steps_follow_torchs_scaler(
    how: Settings, world_size: int
) -> None:
    assert_alike(on_ranks(both_sides, world_size, how), tolerance=2e-5)


# --- fp16 compute --------------------------------------------------------------------------------


def fp16_reference(rank: int, world_size: int, reduce: torch.dtype) -> Run:
    """fp16 compute as it is defined, every rank's part in this process; torch's scaler."""
    masters = Masters(models.build("odd_parameters"))
    optimizer = adamw(masters)
    model = models.build("odd_parameters").half()
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    data = [models.batches("odd_parameters", STEPS, other) for other in range(world_size)]
    run = Run(Record(), [])
    for step in range(STEPS):
        sent: dict[str, list[Tensor | None]] = {key: [] for key in masters.named}
        with torch.no_grad():
            for key, master in masters.named.items():
                model.get_parameter(key).copy_(master)
        for other in range(world_size):
            loss = models.loss_of(model, data[other][step].half())
            scaler.scale(loss).backward()
            if other == rank:
                run.record.losses.append(loss.detach())
            for key, gradients in sent.items():
                gradients.append(model.get_parameter(key).grad)
            model.zero_grad(set_to_none=True)
        for key, master in masters.named.items():
            master.grad = mean_in_rank_order(sent[key], reduce)
        scaler.step(optimizer)
        scaler.update()
        run.scales.append(scaler.get_scale())
    run.record.parameters = {key: p.detach().clone() for key, p in masters.named.items()}
    return run


def fp16_sides(rank: int, world_size: int, reduce: torch.dtype) -> tuple[Run, Run]:
    precision = zshard.Precision.fp16(reduce=reduce)
    side = Wrapped(zshard.wrap(models.build("odd_parameters"), precision=precision))
    scaler = zshard.GradScaler("cpu", growth_interval=2)
    data = models.batches("odd_parameters", STEPS, rank)
    run = train_scaled(side, scaler, data, Settings(planted=()), plants=False)
    return run, fp16_reference(rank, world_size, reduce)


@pytest.mark.parametrize("reduce", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_fp16_compute_skips_and_steps_as_its_reference(
    world_size: int, reduce: torch.dtype
) -> None:
    # A third is not exact, so at N = 3 an fp16 rounding may fall the other way (2^-11).
    tolerance = {1: 0.0, 2: 0.0, 3: 2e-3}[world_size]
    assert_alike(on_ranks(fp16_sides, world_size, reduce), tolerance)


def wire(rank: int, world_size: int, reduce: torch.dtype) -> tuple[float, bool]:
    """A gradient of 1e5 on rank 0 alone, fine in fp32 and too large for fp16."""
    model = zshard.wrap(nn.Linear(3, 7), precision=zshard.Precision(reduce=reduce))
    before = zshard.full_param(model, "weight")
    optimizer, scaler = adamw(model), zshard.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 3)).sum() * (2.5e4 if rank == 0 else 0.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), torch.equal(before, zshard.full_param(model, "weight"))


def test_an_overflow_on_the_wire_alone_skips_the_step_on_every_rank() -> None:
    assert run_ranks(wire, 3, torch.float16) == [(2.0, True)] * 3
    assert run_ranks(wire, 3, torch.float32) == [(4.0, False)] * 3


def tiny(rank: int, world_size: int, norm_type: float | None) -> tuple[Tensor, Tensor | None]:
    """One step on gradients of 1e-9, nothing in fp16 once they are divided by the scale."""
    model = zshard.wrap(nn.Linear(1, 7, bias=False), precision=zshard.Precision.fp16(torch.float16))
    before, norm = zshard.full_param(model, "weight"), None
    optimizer = zshard.Adam(model.parameters(), lr=1.0, eps=1e-20)
    scaler = zshard.GradScaler("cpu", init_scale=2.0**20)
    scaler.scale(model(torch.ones(1, 1)).float().sum() * 1e-9).backward()
    if norm_type is not None:
        scaler.unscale_(optimizer)
        norm = zshard.clip_grad_norm_(model, 1.0, norm_type)
    scaler.step(optimizer)
    return before - zshard.full_param(model, "weight"), norm


@pytest.mark.parametrize("norm_type", [None, 1.0, 2.0, float("inf")])
def test_zshards_optimizers_divide_fp16_gradients_in_fp32(norm_type: float | None) -> None:
    for moved, norm in run_ranks(tiny, 2, norm_type):
        torch.testing.assert_close(moved, torch.ones(7, 1))  # Adam's first step is lr
        if norm_type is not None:
            expected = torch.tensor(1e-9 * 7 ** (1 / norm_type))
            torch.testing.assert_close(norm, expected, rtol=2**-10, atol=0)


def backward(model: nn.Module, scaler: zshard.GradScaler) -> None:
    scaler.scale(models.loss_of(model, models.batches("blocks", 1)[0])).backward()


def fp16_gradients() -> tuple[nn.Module, zshard.GradScaler]:
    model = zshard.wrap(
        models.build("blocks"), precision=zshard.Precision.fp16(reduce=torch.float16)
    )
    scaler = zshard.GradScaler("cpu", init_scale=2.0**10)
    backward(model, scaler)
    return model, scaler


def test_fp16_gradients_are_refused_where_they_would_be_divided_in_place() -> None:
    model, scaler = fp16_gradients()
    part = zshard.AdamW(list(model.parameters())[:3])
    with pytest.raises(ValueError, match=r"inlet\.weight.*float16") as caught:
        scaler.unscale_(part)
    assert isinstance(caught.value, zshard.InputError)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(zshard.StateError, match="float16"):
        scaler.step(sgd)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_fp16_gradients_cannot_be_read_between_unscale_and_zero_grad(set_to_none: bool) -> None:
    model, scaler = fp16_gradients()
    optimizer = adamw(model)
    assert zshard.full_grad(model, "inlet.weight").abs().max() > 0
    scaler.unscale_(optimizer)
    for look in (
        lambda: zshard.full_grad(model, "inlet.weight"),
        lambda: model.inlet.weight.grad.abs(),
        lambda: setattr(model.inlet.weight, "grad", torch.ones(7, 3)),  # the others stay scaled
        lambda: zshard.clip_grad_norm_(list(model.parameters())[:2], 1e-3),
    ):
        with pytest.raises(zshard.StateError, match="float16"):
            look()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none)
    model.inlet.weight.grad = torch.ones(7, 3)
    assert torch.equal(zshard.full_grad(model, "inlet.weight"), torch.ones(7, 3))
    optimizer.zero_grad(set_to_none)
    backward(model, scaler)
    assert zshard.full_grad(model, "inlet.weight").abs().max() > 0


def test_fp16_gradients_stay_what_they_are_where_another_is_zeroed() -> None:
    moved = []
    for zeroes in (False, True):
        model, scaler = fp16_gradients()
        optimizer, before = (
            zshard.SGD(model.parameters(), 1.0),
            zshard.full_param(model, "inlet.weight"),
        )
        scaler.unscale_(optimizer)
        optimizer.zero_grad(set_to_none=False)
        scaler.step(optimizer)  # by zeros
        scaler.update()
        backward(model, scaler)
        scaler.unscale_(optimizer)
        zshard.clip_grad_norm_(model, 1e-6)
        if zeroes:
            model.outlet.bias.grad.zero_()
        scaler.step(optimizer)
        moved.append(zshard.full_param(model, "inlet.weight") - before)
    assert moved[0].abs().max() > 0 and torch.equal(*moved)


def test_fp16_gradients_that_are_all_zeroed_leave_nothing_of_a_norm_that_was_nan() -> None:
    model, scaler = fp16_gradients()
    optimizer = zshard.SGD(model.parameters(), 1.0)
    (models.loss_of(model, models.batches("blocks", 1)[0]) * torch.nan).backward()
    scaler.unscale_(optimizer)
    assert zshard.clip_grad_norm_(model, 1.0).isnan()
    scaler.step(optimizer)  # skipped
    optimizer.zero_grad(set_to_none=False)
    backward(model, scaler)
    assert zshard.full_grad(model, "inlet.weight").isfinite().all()
