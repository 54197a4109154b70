"""Freezing what no_sync holds a gradient of."""

from __future__ import annotations

import copy

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
