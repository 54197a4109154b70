"""Activations in plans: what wrap casts of a model's inputs and outputs counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from live_bytes import peak_of
from torch import nn

import zshard


class Wide(nn.Module):
    """Its input and its output are most of what a step has alive."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(400, 8)
        self.outlet = nn.Linear(8, 300)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.outlet(self.inlet(x).relu())}


class Frozen(Wide):
    """Needs its input for nothing but forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet.requires_grad_(False)


class Within(Wide):
    """Calls itself, with an input that is not cast again and an output that is not, either."""

    deep = False

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.deep:
            return super().forward(x)
        self.deep = True
        found = self(x)["out"]
        self.deep = False
        return {"out": found * found}


class Hooked(Wide):
    """Its own hooks are given what has been cast, and return what has yet to be."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda _, args: (args[0] @ torch.eye(400).to(args[0]),))
        self.register_forward_hook(lambda _, __, output: {"out": output["out"] * 2})


POLICIES = {
    "bf16": zshard.Precision.bf16(),
    "inputs as they are": zshard.Precision.bf16(cast_inputs=False),
    "fp32 outputs": zshard.Precision.bf16(output=torch.float32),
    "wider outputs": zshard.Precision(output=torch.float64),
    "narrower outputs": zshard.Precision(output=torch.bfloat16),
}


def measured(build: Callable[[], nn.Module], precision: zshard.Precision, x: torch.Tensor) -> int:
    """The most bytes alive in a step, beside what zshard holds."""
    model = zshard.wrap(build(), precision=precision)

    def step() -> None:
        model(x)["out"].float().mean().backward()
        model.zero_grad()

    return peak_of(step)


@pytest.mark.parametrize("build", [Wide, Frozen, Within, Hooked])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_wrap_casts_is_counted_to_the_byte(build: type[nn.Module], policy: str) -> None:
    precision = POLICIES[policy]
    x = torch.ones(50, 400, dtype=None if precision.cast_inputs else torch.bfloat16)
    planned = zshard.plan(build(), 1, precision=precision, batch=x)
    assert planned.activations.bytes == measured(build, precision, x)


def test_a_plan_that_is_changed_to_other_outputs_counts_them() -> None:
    x = torch.ones(50, 400)
    planned = zshard.plan(Wide(), 1, precision=POLICIES["narrower outputs"], batch=x)
    changed = planned.changed(precision=POLICIES["wider outputs"])
    asked = zshard.plan(Wide(), 1, precision=POLICIES["wider outputs"], batch=x)
    assert changed.activations == asked.activations != planned.activations
