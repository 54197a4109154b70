"""Gradient accumulation, with communication held back by no_sync and without."""

from __future__ import annotations

import contextlib
import copy

import models
import pytest
import torch
from ranks import run_ranks
from torch import nn
from training import Plain, Record, Wrapped, adamw, assert_close, assert_same_bits, train

import zshard

MICRO = 3
BATCHES = 4 * MICRO


def both_sides(
    rank: int,
    world_size: int,
    name: str,
    no_sync: bool,
    options: dict[str, object],
    clip: tuple[float, float] | None = None,
) -> tuple[Record, Record]:
    data = models.batches(name, BATCHES, rank)
    records = []
    for is_wrapped in (True, False):
        model = models.build(name)
        if is_wrapped:
            side: Plain | Wrapped = Wrapped(zshard.wrap(model, **options))
        else:
            side = Plain(model, world_size, models.CASES[name].unused)
        records.append(
            train(side, adamw(model), data, accumulate=MICRO, no_sync=no_sync, clip=clip)
        )
    return records[0], records[1]


@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("name", ["blocks", "odd_parameters", "unused", "frozen", "gpt"])
def test_one_rank_accumulates_the_plain_models_bits(name: str, no_sync: bool) -> None:
    actual, expected = both_sides(0, 1, name, no_sync, {})
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("held", [(False, True, False), (True, False, True, True, False)])
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_one_rank_adds_micro_batches_to_what_is_reduced_as_the_plain_model_does(
    strategy: str, held: tuple[bool, ...]
) -> None:
    plain, model = models.build("blocks"), zshard.wrap(models.build("blocks"), strategy=strategy)
    for batch, inside in zip(models.batches("blocks", len(held)), held, strict=True):
        models.loss_of(plain, batch).backward()
        with zshard.no_sync(model) if inside else contextlib.nullcontext():
            models.loss_of(model, batch).backward()
    for name, param in plain.named_parameters():
        assert torch.equal(zshard.full_grad(model, name), param.grad), name


@pytest.mark.parametrize(
    "name", ["blocks", "odd_parameters", "tied_across_units", "called_twice", "unused", "frozen"]
)
def test_no_sync_on_two_ranks_accumulates_ddps_bits(name: str) -> None:
    for actual, expected in run_ranks(both_sides, 2, name, True, {}):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("units", ["model", "layer"])
def test_no_sync_gives_ddps_bits_whatever_the_units(units: str) -> None:
    for actual, expected in run_ranks(both_sides, 2, "gpt", True, {"units": units}):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("name", ["odd_parameters", "unused", "gpt"])
def test_accumulation_without_no_sync_is_within_tolerance_of_ddp(name: str) -> None:
    # DDP averages its accumulated gradient again each time; here each micro-batch's is added.
    for actual, expected in run_ranks(both_sides, 2, name, False, {}):
        assert_close(actual, expected, tolerance=1e-5)


def test_clipping_sees_the_accumulated_gradient() -> None:
    for actual, expected in run_ranks(both_sides, 2, "blocks", True, {}, (0.05, 2.0)):
        assert_close(actual, expected, tolerance=1e-5)
        assert expected.norms[0] > 0.05, "nothing was clipped"


def held_back(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of two micro-batches, the first under no_sync, and of both in one batch."""
    first, second = models.batches("blocks", 2, rank)
    model = zshard.wrap(models.build("blocks"))
    with zshard.no_sync(model):
        (models.loss_of(model, first) / 2).backward()
    (models.loss_of(model, second) / 2).backward()
    micro = zshard.full_grad(model, "blocks.1.up.weight").clone()
    model = zshard.wrap(models.build("blocks"))
    models.loss_of(model, torch.cat([first, second])).backward()
    return micro, zshard.full_grad(model, "blocks.1.up.weight").clone()


def test_a_backward_adds_to_the_gradients_that_a_clip_has_scaled() -> None:
    plain, model = models.build("blocks"), zshard.wrap(models.build("blocks"))
    for batch in models.batches("blocks", 2):
        models.loss_of(plain, batch).backward()
        models.loss_of(model, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        assert float(norm) > 0.05, "nothing was clipped"
        assert torch.allclose(zshard.clip_grad_norm_(model, 0.05), norm)


@pytest.mark.parametrize("world_size", [2, 3])
def test_micro_batches_add_up_to_the_whole_batch(world_size: int) -> None:
    for micro, whole in run_ranks(held_back, world_size):
        torch.testing.assert_close(micro, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("by_optimizer", [True, False])
def test_zero_grad_drops_what_no_sync_held_back(by_optimizer: bool, set_to_none: bool) -> None:
    model, plain = zshard.wrap(models.build("blocks")), models.build("blocks")
    optimizer = adamw(model)
    dropped, kept = models.batches("blocks", 2)
    with zshard.no_sync(model):
        models.loss_of(model, dropped).backward()
    (optimizer if by_optimizer else model).zero_grad(set_to_none=set_to_none)
    models.loss_of(model, kept).backward()
    models.loss_of(plain, kept).backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(zshard.full_grad(model, name), parameter.grad), name


@pytest.mark.parametrize("name", ["inlet.weight", "blocks.1.up.bias"])
def test_a_gradient_dropped_between_backwards_does_not_come_back(name: str) -> None:
    model, plain = zshard.wrap(models.build("blocks")), models.build("blocks")
    for batch in models.batches("blocks", 2):
        for side in (model, plain):
            side.get_parameter(name).grad = None
            models.loss_of(side, batch).backward()
    for key, parameter in plain.named_parameters():
        assert torch.equal(zshard.full_grad(model, key), parameter.grad), key


def bf16_accumulation(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """100 micro-gradients of 1 after one of 1024: lost in a bf16 sum, exact in an fp32 one."""
    model = torch.nn.Linear(1, 1, bias=False)
    model = zshard.wrap(model, precision=zshard.Precision.bf16(reduce=torch.float32))
    for step in range(101):
        value = 1024.0 if step == 0 else 1.0
        model(torch.full((1, 1), value)).sum().backward()
    synced = zshard.full_grad(model, "weight").clone()
    return synced, torch.full((1, 1), 1124.0)


def test_fp32_reduction_accumulates_bf16_gradients_in_fp32() -> None:
    for actual, expected in run_ranks(bf16_accumulation, 2):
        assert torch.equal(actual.float(), expected)


class Orders(nn.Module):
    """Parameters of several memory orders, one of them 0-d, one not used every time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.across = nn.Parameter(torch.randn(7, 45).T)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.seldom = nn.Parameter(torch.randn(3, 1, 2))

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        y = self.conv(x).flatten(1) @ self.across * self.gain
        return y * self.seldom.sum() if seldom else y


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("last", [False, True])
def test_16_bit_gradients_add_up_in_fp32_in_any_memory_order(strategy: str, last: bool) -> None:
    torch.manual_seed(0)
    plain = Orders()
    model = zshard.wrap(copy.deepcopy(plain), strategy=strategy, precision=zshard.Precision.bf16())
    plain.bfloat16()
    inputs = [torch.randn(2, 3, 5, 5).bfloat16() for _ in range(3)]
    uses = [True, False, last]
    for turn in range(2):  # the second adds up in the memory of the first
        sums: dict[str, torch.Tensor] = {}
        for i, (x, seldom) in enumerate(zip(inputs, uses, strict=True)):
            with zshard.no_sync(model) if i < 2 else contextlib.nullcontext():
                (model(x, seldom).float().sum() * (turn + 1)).backward()
            (plain(x, seldom).float().sum() * (turn + 1)).backward()
            for name, param in plain.named_parameters():
                if param.grad is not None:
                    sums[name] = sums.get(name, torch.zeros(())) + param.grad.float()
            plain.zero_grad()
        for name, expected in sums.items():
            torch.testing.assert_close(zshard.full_grad(model, name), expected, rtol=0, atol=0)
        model.zero_grad()


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.out(self.experts[expert](x))


def zeroed_on_one_rank(rank: int, world_size: int, strategy: str) -> torch.Tensor:
    torch.manual_seed(0)
    model = zshard.wrap(Routed(), strategy=strategy)
    optimizer = zshard.AdamW(model.parameters(), lr=0.1, weight_decay=1.0)
    with zshard.no_sync(model):
        model(torch.ones(2, 4), rank).sum().backward()  # expert 1 is for rank 1 alone
    optimizer.zero_grad(set_to_none=False)
    model(torch.ones(2, 4), 0).sum().backward()
    weight = model.get_parameter("experts.1.weight")
    assert weight.grad is not None  # of zeros, which AdamW decays the weight by
    assert torch.count_nonzero(zshard.full_grad(model, "experts.1.weight")) == 0
    before = zshard.full_param(model, "experts.1.weight")
    optimizer.step()
    state = optimizer.state[weight]
    assert int(state["step"]) == 1
    with zshard.full_params(model):  # ddp: this rank's own
        own = model.get_parameter("experts.1.weight").detach().clone()
    torch.testing.assert_close(own, before * 0.9)
    return own


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_zeroing_a_gradient_that_one_rank_holds_back_leaves_the_ranks_alike(strategy: str) -> None:
    one, other = run_ranks(zeroed_on_one_rank, 2, strategy)
    assert torch.equal(one, other)


def freed_sums(rank: int, world_size: int) -> list[int]:
    """Bytes of gradients behind steps with one micro-batch, two and one."""
    model = zshard.wrap(models.build("blocks"), precision=zshard.Precision.bf16())
    taken = []
    for held in (False, True, False):
        if held:
            with zshard.no_sync(model):
                models.loss_of(model, models.batches("blocks", 1, rank)[0]).backward()
        models.loss_of(model, models.batches("blocks", 1, rank)[0]).backward()
        model.zero_grad()
        taken.append(zshard.memory(model)["now"]["gradients"])
    return taken


def test_what_sums_of_micro_batches_take_is_given_back_in_a_step_without_them() -> None:
    for before, with_sums, after in run_ranks(freed_sums, 2):
        assert before == after < with_sums


def fail(*_: object) -> None:
    raise ValueError("user code")


def after_an_exception(rank: int, world_size: int, place: str, no_sync: bool) -> list[bool]:
    """The second of three micro-batches raises on rank 0; which ones the gradient then has."""
    model = models.build("blocks")
    zshard.wrap(model, comm="group" if world_size > 1 else "auto")
    data = models.batches("blocks", MICRO, rank)
    found = []
    for raises, before in ((True, True), (False, True), (False, False)):
        with zshard.no_sync(model) if no_sync else contextlib.nullcontext():
            if before:
                models.loss_of(model, data[0]).backward()
        if raises:
            hooks = contextlib.ExitStack()
            if rank == 0 and place == "forward":
                hooks.callback(model.blocks[1].register_forward_hook(fail).remove)
            if rank == 0 and place == "backward":
                hooks.callback(model.blocks[1].register_full_backward_hook(fail).remove)
            with hooks, pytest.raises((ValueError, zshard.Error)):
                loss = models.loss_of(model, data[1])
                if rank == 0 and place == "loss":
                    fail()
                loss.backward()
                zshard.full_grad(model, "inlet.weight")
            zshard.reset(model)
        models.loss_of(model, data[2]).backward()
        found.append(zshard.full_grad(model, "blocks.0.up.weight").clone())
        model.zero_grad()
    after, both, last = found
    return [torch.equal(after, both), torch.equal(after, last)]


@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("place", ["forward", "loss", "backward"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_accumulated_goes_with_a_backward_that_raises_and_stays_else(
    world_size: int, place: str, no_sync: bool
) -> None:
    if world_size == 1:
        ranks = [after_an_exception(0, 1, place, no_sync)]
    else:
        ranks = run_ranks(after_an_exception, 2, place, no_sync)
    in_backward = place == "backward"
    assert ranks == [[not in_backward, in_backward]] * world_size
