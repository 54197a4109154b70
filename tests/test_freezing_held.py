"""Freezing what no_sync holds a gradient of, and between a forward and its backward."""

from __future__ import annotations

import copy

import models
import pytest
import torch
from ranks import run_ranks
from steps import batch
from torch import nn

import zshard


def freeze_held_back(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    zshard.wrap(model)
    with zshard.no_sync(model):
        model(batch(0, 0)).sum().backward()
    with pytest.raises(zshard.StateError, match=r"1\.weight.*held back by zshard\.no_sync"):
        model[1].weight.requires_grad_(False)
    assert model[1].weight.requires_grad
    model(batch(0, 1)).sum().backward()  # what was held back is not lost
    for step in range(2):
        plain(batch(0, step)).sum().backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(zshard.full_grad(model, name), param.grad)
    model[1].weight.requires_grad_(False)


def test_a_parameter_is_not_frozen_while_its_gradient_is_held_back() -> None:
    run_ranks(freeze_held_back, 2)


def freeze_behind_a_forward(rank: int, world_size: int, strategy: str, frozen: list[str]) -> None:
    torch.manual_seed(0)
    plain = models.Blocks()
    model = zshard.wrap(copy.deepcopy(plain), strategy=strategy)
    for step in range(3):
        for each in (model, plain):
            each.requires_grad_(True)
            each.zero_grad()
            loss = models.loss_of(each, batch(0, step))
            for name in frozen if step < 2 else []:
                each.get_parameter(name).requires_grad_(False)
            loss.backward()
        for name, param in plain.named_parameters():
            grad = zshard.full_grad(model, name)
            assert (grad is None) == (param.grad is None) == (name in frozen and step < 2), name
            assert grad is None or torch.equal(grad, param.grad), name


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize(
    "frozen",
    [
        ["blocks.1.up.weight"],
        ["blocks.0.norm.bias", "blocks.2.down.weight", "outlet.bias"],
        [f"blocks.1.{name}" for name, _ in models.Block().named_parameters()],
    ],
)
def test_what_is_frozen_between_forward_and_backward_gets_no_gradient(
    frozen: list[str], strategy: str
) -> None:
    run_ranks(freeze_behind_a_forward, 2, strategy, frozen)
