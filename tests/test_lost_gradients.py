"""Gradients that an exception, a loss scale or a zeroing elsewhere must not change unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress

import pytest
import torch
from ranks import run_ranks
from steps import batch, build
from torch import Tensor, nn

import zshard


class Two(nn.Module):
    """Two parameters in one unit; the loss is 4 * x * (a + b)."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, dtype=dtype))
        self.b = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.float() * x).sum() + (self.b * x).sum()


def fail(*_: object) -> None:
    raise ValueError("user code")


def one_of_three(rank: int, world_size: int, failing: tuple[int, ...]) -> tuple[str, list[float]]:
    """The second micro-batch raises on some ranks, which catch that and go on."""
    model = zshard.wrap(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)))
    x = torch.ones(4)
    with zshard.no_sync(model):
        model(x).sum().backward()
        out = model(x)
        if rank in failing:
            out.register_hook(fail)
            with pytest.raises(ValueError, match="user code"):
                out.sum().backward()
        else:
            out.sum().backward()
    model(x).sum().backward()
    said = ""
    try:
        zshard.clip_grad_norm_(model, 1.0)
    except zshard.StateError as error:
        said = str(error)
    assert zshard.full_grad(model, "1.weight") is None
    model(x).sum().backward()  # the next step is whole
    return said, [
        float(zshard.full_grad(model, name).sum()) for name, _ in model.named_parameters()
    ]


@pytest.mark.parametrize("failing", [(1,), (0, 1)])
def test_a_micro_batch_that_raised_inside_no_sync_drops_the_step_on_all_ranks(
    failing: tuple[int, ...],
) -> None:
    results = run_ranks(one_of_three, 2, failing)
    who = "rank 1" if failing == (1,) else "2 ranks"
    for said, grads in results:
        assert f"on {who} a backward of this step (the last one, or one inside no_sync)" in said
        assert all(grad != 0.0 for grad in grads)


def test_reset_drops_what_no_sync_holds() -> None:
    model = zshard.wrap(Two())
    x = torch.ones(4)
    with zshard.no_sync(model):
        model(x).backward()
        out = model(x)
        out.register_hook(fail)
        with pytest.raises(ValueError, match="user code"):
            out.backward()
    zshard.reset(model)
    model(x).backward()
    assert torch.equal(zshard.full_grad(model, "a"), torch.ones(4))


def multiplied(model: nn.Module) -> None:
    model.b.grad.mul_(2.0)


@pytest.mark.parametrize(
    "touch", [multiplied, lambda model: zshard.clip_grad_norm_([model.b], 1.0)]
)
def test_a_change_beside_fp16_gradients_that_are_still_scaled_is_refused(
    touch: Callable[[nn.Module], object],
) -> None:
    model = zshard.wrap(Two(torch.float16))
    optimizer = zshard.AdamW(model.parameters(), lr=1.0, weight_decay=0.0, eps=1e-12)
    scaler = zshard.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(model(torch.full((4,), 1e-9))).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(zshard.StateError, match=r"^a: its gradient is float16"):
        touch(model)
    scaler.step(optimizer)
    assert float(zshard.full_param(model, "a").max()) < 1.0, "it is trained"


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_zeroing_one_gradient_leaves_what_no_sync_holds_of_the_others(strategy: str) -> None:
    model = zshard.wrap(Two(), strategy=strategy)
    optimizer = zshard.SGD(model.parameters(), lr=0.0)
    x = torch.ones(4)
    (100 * model(x)).backward()
    zshard.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with zshard.no_sync(model):
        model(x).backward()
    model.a.grad.zero_()
    model(x).backward()
    assert torch.equal(zshard.full_grad(model, "a"), torch.ones(4))
    assert torch.equal(zshard.full_grad(model, "b"), torch.full((4,), 2.0))


def freezes(rank: int, world_size: int) -> Tensor:
    model = zshard.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    x = torch.ones(4)
    out = model(x)
    if rank == 1:
        out.register_hook(fail)
        with pytest.raises(ValueError, match="user code"):
            out.sum().backward()
        zshard.reset(model)
    else:
        out.sum().backward()
    model[0].weight.requires_grad_(False)
    if rank == 0:
        with pytest.raises(zshard.StateError, match="on rank 1 a backward of this step"):
            model(x)
    model(x).sum().backward()
    assert model[0].weight.grad is None
    return zshard.full_grad(model, "1.weight")


def test_freezing_after_a_failed_backward_is_taken_in_on_all_ranks() -> None:
    first, second = run_ranks(freezes, 2)
    assert torch.equal(first, second)


def test_the_norm_of_gradients_that_were_dropped_is_zero() -> None:
    model = zshard.wrap(Two())
    model(torch.ones(4)).backward()
    assert float(zshard.clip_grad_norm_(model, 100.0)) > 0.0
    out = model(torch.ones(4))
    out.register_hook(fail)
    with pytest.raises(ValueError, match="user code"):
        out.backward()
    zshard.reset(model)
    assert model.a.grad is None
    assert float(zshard.clip_grad_norm_(model, 100.0)) == 0.0


def read_after(rank: int, world_size: int) -> bool:
    model = zshard.wrap(Two())
    model(torch.ones(4)).backward()
    out = model(torch.ones(4))
    out.register_hook(fail)
    with pytest.raises(ValueError, match="user code"):
        out.backward()
    return zshard.full_grad(model, "a") is None


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_read_behind_a_backward_that_raised_finds_no_earlier_gradient(world_size: int) -> None:
    assert all(run_ranks(read_after, world_size))


@pytest.mark.parametrize(
    "precision",
    [zshard.Precision(reduce=torch.float64), zshard.Precision(compute=torch.float64)],
)
def test_float64_on_one_side_alone_is_refused_at_wrap(precision: zshard.Precision) -> None:
    with pytest.raises(zshard.InputError, match=r"float64.* for torch.float32 parameters.*both"):
        zshard.wrap(Two(), precision=precision)
    zshard.wrap(Two().double(), precision=zshard.Precision(reduce=torch.float64))


def raises_twice(rank: int, world_size: int) -> list[str]:
    """A micro-batch, then the step's last backward; the step after them is a good one."""
    model = zshard.wrap(nn.Linear(4, 1, bias=False))
    said = []
    for step in range(2):
        with zshard.no_sync(model):
            attempt(model, rank == 1 and step == 0)
        attempt(model, rank == 1 and step == 0)
        try:
            zshard.clip_grad_norm_(model, 1.0)
            said.append("")
        except zshard.StateError as error:
            said.append(str(error))
        model.zero_grad()
    return said


def attempt(model: nn.Module, failing: bool) -> None:
    out = model(torch.ones(4))
    if failing:
        out.register_hook(fail)
        with pytest.raises(ValueError, match="user code"):
            out.sum().backward()
    else:
        out.sum().backward()


def reset_by_all(rank: int, world_size: int) -> list[bool]:
    torch.manual_seed(0)
    model = zshard.wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = zshard.AdamW(model.parameters())
    dropped = []
    for step in range(2):
        attempt(model, failing=rank == 1 and step == 0)
        if step == 0:
            zshard.reset(model)  # on every rank, also where nothing has been heard of it yet
            dropped.append(all(param.grad is None for param in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return dropped


def test_a_reset_on_all_ranks_says_nothing_more_of_the_exception() -> None:
    assert run_ranks(reset_by_all, 2) == [[True], [True]]


def test_a_step_is_dropped_once() -> None:
    for said in run_ranks(raises_twice, 2):
        assert "raised an exception" in said[0]
        assert said[1] == ""


def goes_on(
    rank: int, world_size: int, held: tuple[bool, ...], wrong: int, failing: tuple[int, ...]
) -> list[str]:
    """Steps of several micro-batches, one of which raises once; how each of them ends.

    Args:
        held: which of them are inside no_sync.
        wrong: the one that raises.
        failing: the ranks where it does.
    """
    model = zshard.wrap(nn.Linear(4, 1))
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    ends = []
    for step in range(8):
        try:
            for micro, inside in enumerate(held):
                out = model(torch.ones(4))
                if step == 1 and micro == wrong and rank in failing:
                    out.register_hook(fail)
                with zshard.no_sync(model) if inside else nullcontext():
                    out.sum().backward()
            optimizer.step()
            ends.append("made")
        except (ValueError, zshard.Error) as error:
            ends.append(type(error).__name__)
        with suppress(zshard.StateError):
            optimizer.zero_grad()
    return ends


def test_steps_with_and_without_sync_succeed_again_after_one_that_raised_everywhere() -> None:
    ends = ["made", "ValueError", "StateError", *["made"] * 5]
    assert run_ranks(goes_on, 2, (False, True, False), 1, (0, 1)) == [ends] * 2


@pytest.mark.parametrize("wrong", [0, 1])
def test_synced_micro_batches_succeed_again_after_one_that_raised_on_one_rank(wrong: int) -> None:
    """The others are told between backwards: in one, that would be another failure to tell of."""
    own, others = run_ranks(goes_on, 2, (False, False), wrong, (0,))
    assert own == ["made", "ValueError", *["made"] * 6]
    assert others == ["made", "StateError", *["made"] * 6]


def zeroed_after_a_failure(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model.register_parameter("gain", nn.Parameter(torch.ones(4)))  # of the root
    model.register_forward_pre_hook(lambda module, args: (args[0] * module.gain,))
    model = zshard.wrap(model)
    x = torch.ones(4)
    model(x).sum().backward()
    once = {name: zshard.full_grad(model, name).clone() for name, _ in model.named_parameters()}
    held = list(model.parameters())
    hook = model[0].register_forward_hook(lambda *about: about[2].register_hook(fail) and None)
    out = model(x)
    hook.remove()
    # Among several ranks a failure inside no_sync is told of after the next backward.
    syncs = nullcontext() if world_size > 1 else zshard.no_sync(model)
    with syncs, pytest.raises(ValueError, match="user code"):
        out.sum().backward()
    assert [*map(id, model.parameters())] == [*map(id, held)]
    model.zero_grad()
    model(x).sum().backward()
    for name, grad in once.items():
        assert torch.equal(zshard.full_grad(model, name), grad)


@pytest.mark.parametrize("world_size", [1, 2])
def test_after_a_backward_that_raised_user_code_meets_the_sharded_parameters(
    world_size: int,
) -> None:
    run_ranks(zeroed_after_a_failure, world_size)


def loop_with_a_bad_batch(
    rank: int, world_size: int, where: str, held: bool
) -> tuple[list[str], list[Tensor]]:
    """A loop that goes on after any exception; rank 1's fourth forward raises, or its loss.

    Or, where ``where`` is nowhere, all leave that batch out.
    """
    model = build()
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for index in range(8) if where else (0, 1, 2, 4, 5, 6, 7):
        try:
            bad = rank == 1 and index == 3
            width = 99 if bad and where == "forward" else 3
            with zshard.no_sync(model) if held and index % 2 else nullcontext():
                out = model(batch(rank, index)[:, :1].expand(-1, width))
                if bad:
                    fail()
                out.sum().backward()
            if not held or index % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            seen.append("")
        except (RuntimeError, ValueError) as error:
            seen.append(type(error).__name__)
            if where == "loss":
                zshard.reset(model)
    return seen, [zshard.full_param(model, name) for name, _ in model.named_parameters()]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("where", "own"), [("forward", "RuntimeError"), ("loss", "ValueError")])
def test_an_exception_before_backward_costs_every_rank_one_step(
    where: str, own: str, held: bool
) -> None:
    """And the loops are in step afterwards."""
    (first, ours), (second, _) = run_ranks(loop_with_a_bad_batch, 2, where, held)
    (_, without), _ = run_ranks(loop_with_a_bad_batch, 2, "", held)
    assert first == ["", "", "", "MismatchError", "", "", "", ""]
    assert second == ["", "", "", own, "", "", "", ""]
    assert all(map(torch.equal, ours, without))
