"""Gradients that an exception, a loss scale or a zeroing elsewhere must not change unnoticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
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
        assert f"raised an exception on {who} (or one before it, inside no_sync)" in said
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
    out = model(x)
    if rank == 0:
        with pytest.raises(zshard.StateError, match="raised an exception on rank 1"):
            out.sum().backward()
    out.sum().backward()
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


def test_a_step_is_dropped_once() -> None:
    for said in run_ranks(raises_twice, 2):
        assert "raised an exception" in said[0]
        assert said[1] == ""
