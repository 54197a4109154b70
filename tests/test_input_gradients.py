"""Gradients of inputs alone, as adversarial training and saliency maps take: nothing is reduced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import models
import pytest
import torch
from ranks import run_ranks
from steps import batch, build, one_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import FEW_STEPS

import zshard


def input_gradient(model: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    torch.autograd.grad(models.loss_of(model, x), x)


def reductions_of_inputs(rank: int, world_size: int, strategy: str, comm: str) -> list[int]:
    """Reductions of steps that also ask for the gradient of an input, as adversarial ones do."""
    model, counts = build(strategy=strategy, comm=comm), []
    for step in range(FEW_STEPS):
        before = zshard.stats(model).calls["reduce_scatter"]
        input_gradient(model, batch(rank, step))
        assert zshard.stats(model).calls["reduce_scatter"] == before
        one_step(model, rank, step)
        input_gradient(model, batch(rank, step))
        counts.append(zshard.stats(model).calls["reduce_scatter"] - before)
    return counts


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp"])
def test_a_gradient_of_inputs_alone_reduces_nothing(strategy: str, comm: str) -> None:
    assert run_ranks(reductions_of_inputs, 2, strategy, comm) == [[4] * FEW_STEPS] * 2


def some_ranks_alone(rank: int, world_size: int) -> tuple[Tensor | None, Tensor]:
    """Rank 0 asks for the gradient of its input, where the others run a backward."""
    model = build()
    for step in range(FEW_STEPS):
        model.zero_grad()
        if rank == 0 and step % 2:
            input_gradient(model, batch(rank, step))
        else:
            one_step(model, rank, step)
    return zshard.full_grad(model, "inlet.weight"), zshard.clip_grad_norm_(model, float("inf"))


def test_where_other_ranks_make_gradients_all_reduce_them() -> None:
    model = build()
    one_step(model, 1, FEW_STEPS - 1)
    expected = zshard.full_grad(model, "inlet.weight") / 2
    for grad, norm in run_ranks(some_ranks_alone, 2):
        assert torch.equal(grad, expected)
        torch.testing.assert_close(norm, zshard.clip_grad_norm_(model, float("inf")) / 2)


def norms_around(rank: int, world_size: int) -> list[float]:
    """Norms before and after gradients of inputs, of gradients that change meanwhile or go."""
    model, norms = build(), []

    def norm() -> None:
        norms.append(float(zshard.clip_grad_norm_(model, float("inf"))))

    for step in range(2):
        one_step(model, rank, step)
        input_gradient(model, batch(rank, step))
        norm()
        with torch.no_grad():
            for param in model.parameters():
                param.grad.mul_(2)
        input_gradient(model, batch(rank, step))
        norm()
        input_gradient(model, batch(rank, step))
        zshard.clip_grad_norm_(model, norms[-1] / 4)
        input_gradient(model, batch(rank, step))
        norm()
        model.zero_grad()
        input_gradient(model, batch(rank, step))
        norm()
    return norms


@pytest.mark.parametrize("world_size", [1, 2])
def test_norms_are_of_the_gradients_that_are_there(world_size: int) -> None:
    norms = norms_around(0, 1) if world_size == 1 else run_ranks(norms_around, 2)[0]
    for first, doubled, clipped, none in (norms[:4], norms[4:]):
        assert first > 0
        assert doubled == pytest.approx(2 * first, rel=1e-5)
        assert clipped == pytest.approx(first / 2, rel=1e-3)
        assert none == 0.0


def held_back(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    model = build()
    with zshard.no_sync(model):
        one_step(model, rank, 0)
    input_gradient(model, batch(rank, 0))
    with pytest.raises(zshard.StateError, match="held back"):
        zshard.full_grad(model, "inlet.weight")
    one_step(model, rank, 1)
    ours = zshard.full_grad(model, "inlet.weight")
    model.zero_grad()
    with zshard.no_sync(model):
        one_step(model, rank, 0)
    one_step(model, rank, 1)
    return ours, zshard.full_grad(model, "inlet.weight")


def test_a_gradient_of_inputs_leaves_what_no_sync_holds() -> None:
    for ours, expected in run_ranks(held_back, 2):
        assert torch.equal(ours, expected)


class Nested(torch.autograd.Function):
    """Runs a backward of its own inside its backward, as reversible blocks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Callable[[Tensor], Tensor] | None) -> Tensor:
        ctx.inner = inner
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        if ctx.inner is not None:
            with torch.enable_grad():
                ctx.inner(x.detach()).sum().backward()
        return grad, None


def nested(rank: int, world_size: int) -> tuple[Tensor | None, Tensor | None]:
    """A gradient of inputs, within which gradients of parameters are made, is not expected."""
    model = build(strategy="zero2")

    def once(inner: Callable[[Tensor], Tensor] | None) -> None:
        x = batch(rank, 0).requires_grad_()
        torch.autograd.grad(model(Nested.apply(x, inner)).sum(), x)

    for _ in range(2):
        kept = models.loss_of(model, batch(rank, 1))
        once(None)
    kept = models.loss_of(model, batch(rank, 1))
    once((lambda x: kept * 1) if rank == 0 else None)
    ours = zshard.full_grad(model, "inlet.weight")
    model.zero_grad()
    loss = models.loss_of(model, batch(rank, 1))
    (loss if rank == 0 else loss * 0).backward()
    return ours, zshard.full_grad(model, "inlet.weight")


def test_gradients_where_none_were_made_before_are_no_silent_loss() -> None:
    for ours, expected in run_ranks(nested, 2):
        assert torch.equal(ours, expected)


class Reentrant(nn.Sequential):
    """Checkpoints its layers while it trains: in backward their gradients cannot be foreseen."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=True) if self.training else layer(x)
        return x


def attacked(rank: int, world_size: int, wrapped: bool) -> list[Tensor | None]:
    """Gradients of steps behind attacks, which are made in eval mode, without checkpoints."""
    torch.manual_seed(0)
    model: nn.Module = Reentrant(nn.Linear(3, 5), nn.Linear(5, 1))
    if wrapped:
        model = zshard.wrap(model, units="model")
    found = []
    for step in range(FEW_STEPS):
        x = batch(0, step).requires_grad_()
        torch.autograd.grad(model.eval()(x).sum(), x)
        model.train()(x).square().mean().backward()
        grad = zshard.full_grad(model, "0.weight") if wrapped else model[0].weight.grad
        found.append(None if grad is None else grad.clone())
        model.zero_grad()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_under_reentrant_checkpoints_go_on_behind_gradients_of_inputs(
    world_size: int,
) -> None:
    expected = attacked(0, 1, False)
    sides = [attacked(0, 1, True)] if world_size == 1 else run_ranks(attacked, 2, True)
    for ours in sides:  # the same batches: an average is each one's
        assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_on_one_rank_gradients_where_none_were_made_before_are_reduced(strategy: str) -> None:
    torch.manual_seed(0)
    plain, model = models.Blocks(), build(strategy=strategy)
    for made in (False, False, True, True, False, True):
        for side in (plain, model):
            side.zero_grad()
            kept, x = models.loss_of(side, batch(0, 1)), batch(0, 0).requires_grad_()
            inner = partial(torch.mul, other=kept) if made else None
            torch.autograd.grad(side(Nested.apply(x, inner)).sum(), x)
        for name, param in plain.named_parameters():
            grad = zshard.full_grad(model, name)
            assert (grad is None) == (param.grad is None) == (not made), name
            assert grad is None or torch.equal(grad, param.grad), name


def scaled_steps(rank: int, world_size: int, between: bool) -> list[Tensor]:
    """Norms and values of steps whose small fp16 gradients are divided as the optimizer reads."""
    model = build(precision=zshard.Precision.fp16(reduce=torch.float16))
    optimizer = zshard.AdamW(model.parameters(), lr=0.1)
    scaler = zshard.GradScaler("cpu", init_scale=2.0**14)
    seen = []
    for step in range(FEW_STEPS):
        scaler.scale(1e-6 * model(batch(rank, step)).float().mean()).backward()
        scaler.unscale_(optimizer)
        for max_norm in (1e-8, float("inf")):
            if between:
                input_gradient(model, batch(rank, step))
            seen.append(zshard.clip_grad_norm_(model, max_norm))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(zshard.full_param(model, "inlet.weight"))
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_of_inputs_leaves_the_loss_scale_to_the_optimizer(world_size: int) -> None:
    def ranks(between: bool) -> list[list[Tensor]]:
        if world_size == 1:
            return [scaled_steps(0, 1, between)]
        return run_ranks(scaled_steps, 2, between)

    for ours, expected in zip(ranks(True), ranks(False), strict=True):
        assert all(map(torch.equal, ours, expected))
