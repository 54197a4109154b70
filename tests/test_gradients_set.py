"""Gradients that a script assigns or drops between backward and step: what is clipped and used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import models
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import zshard

CHANGED = "blocks.1.up.weight"


def behind_a_backward(rank: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """A wrapped model, and its whole gradients."""
    model = zshard.wrap(models.build("blocks"))
    models.loss_of(model, models.batches("blocks", 1, rank)[0]).backward()
    grads = {name: zshard.full_grad(model, name) for name, _ in model.named_parameters()}
    return model, {name: grad for name, grad in grads.items() if grad is not None}


def norm_of(grads: dict[str, Tensor]) -> float:
    return float(torch.stack([grad.norm() for grad in grads.values()]).norm())


def clip_what_is_left(rank: int, world_size: int, assigned: bool, clipped: bool) -> None:
    model, grads = behind_a_backward(rank)
    if clipped:
        zshard.clip_grad_norm_(model, factor := 0.25 * norm_of(grads))
        grads = {name: 0.25 * grad for name, grad in grads.items()}
        assert norm_of(grads) == pytest.approx(factor, rel=1e-5)
    if assigned:
        grads[CHANGED] = torch.full_like(grads[CHANGED], 3.0)
        model.get_parameter(CHANGED).grad = grads[CHANGED]
    else:
        del grads[CHANGED]
        model.get_parameter(CHANGED).grad = None
    assert float(zshard.clip_grad_norm_(model, 1e9)) == pytest.approx(norm_of(grads), rel=1e-4)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_norm_is_of_the_gradients_that_are_there_after_one_was_dropped_or_assigned(
    world_size: int, assigned: bool, clipped: bool
) -> None:
    run_ranks(clip_what_is_left, world_size, assigned, clipped)


@pytest.mark.parametrize("kind", [zshard.SGD, torch.optim.SGD])
def test_a_gradient_assigned_after_a_clip_is_used_as_it_is_and_the_others_stay_clipped(
    kind: type[torch.optim.Optimizer],
) -> None:
    model, grads = behind_a_backward()
    optimizer = kind(model.parameters(), lr=1.0)
    before = zshard.state_dict(model)
    zshard.clip_grad_norm_(model, 0.25 * norm_of(grads))
    expected = {name: 0.25 * grad for name, grad in grads.items()}
    expected[CHANGED] = torch.full_like(grads[CHANGED], 3.0)
    model.get_parameter(CHANGED).grad = expected[CHANGED]
    optimizer.step()
    for name, after in zshard.state_dict(model).items():
        torch.testing.assert_close(before[name] - after, expected[name], rtol=1e-3, atol=1e-6)


def assign_what_is_there(rank: int, world_size: int, strategy: str, held: bool) -> None:
    """Two backwards, the first inside no_sync if ``held``; behind it each gradient is assigned."""

    def gradients(assigned: Callable[[Tensor], Tensor] | None) -> list[Tensor | None]:
        model = zshard.wrap(models.build("blocks"), strategy=strategy)
        for syncs in (zshard.no_sync(model) if held else nullcontext(), nullcontext()):
            with syncs:
                models.loss_of(model, models.batches("blocks", 1, rank)[0]).backward()
            for parameter in model.parameters():
                if assigned is not None and parameter.grad is not None:
                    parameter.grad = assigned(parameter.grad)
        return [zshard.full_grad(model, name) for name, _ in model.named_parameters()]

    expected = gradients(None)
    for assigned in (Tensor.contiguous, Tensor.detach):
        for grad, due in zip(gradients(assigned), expected, strict=True):
            assert (grad is None) == (due is None)
            assert due is None or torch.equal(grad, due)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_to_assign_the_gradient_that_is_there_or_an_alias_of_it_changes_nothing(
    strategy: str, held: bool
) -> None:
    run_ranks(assign_what_is_there, 2, strategy, held)


def set_data(rank: int, world_size: int, precision: zshard.Precision | None) -> None:
    model = zshard.wrap(nn.Linear(3, 2), precision=precision)
    model(torch.ones(1, 3)).sum().backward()
    zshard.clip_grad_norm_([model.weight], 6**0.5 / 2)  # a factor of a half, which waits
    grad, before = model.weight.grad, model.weight.grad.data
    grad.data = torch.full((2, 3), 5.0)
    after = grad.detach()
    assert model.weight.grad is grad
    after.data = torch.full((2, 3), 7.0)
    assert torch.equal(zshard.full_grad(model, "weight"), torch.full((2, 3), 5.0))
    with zshard.no_sync(model):
        model(torch.ones(1, 3)).sum().backward()
    model.zero_grad()  # on several ranks, of what is held back
    for parted, value in ((before, 0.5), (after, 7.0)):
        expected = torch.full_like(parted.local, value)
        torch.testing.assert_close(parted.local, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", [None, zshard.Precision.bf16(reduce=torch.bfloat16)])
def test_data_of_a_gradient_or_of_an_alias_of_it_is_set_without_a_change_of_the_other(
    precision: zshard.Precision | None, world_size: int
) -> None:
    run_ranks(set_data, world_size, precision)


def test_data_of_a_gradient_that_no_sync_holds_back_is_refused_and_parts_nothing() -> None:
    model = zshard.wrap(nn.Linear(3, 2))
    with zshard.no_sync(model):
        model(torch.ones(1, 3)).sum().backward()
    grad, alias = model.weight.grad, model.weight.grad.data
    for each in (grad, alias):
        with pytest.raises(zshard.StateError, match=r"weight: its gradient is held back"):
            each.data = torch.zeros(2, 3)
    model(torch.ones(1, 3)).sum().backward()
    assert grad.local.tolist() == alias.local.tolist() == [2.0] * 6
