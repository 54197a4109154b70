"""A model on the meta device and its plain twin: what the tests of init_fn share."""

from __future__ import annotations

from collections.abc import Callable

import models
import torch
from torch import Tensor, nn

import zshard

kSeed = 99


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return models.build(name)


def draw(module: nn.Module) -> None:
    """Random numbers into all that the module itself owns, in a way of its own for each kind."""
    if isinstance(module, nn.Linear | nn.LayerNorm):
        module.reset_parameters()
        if isinstance(module, nn.LayerNorm):
            module.weight.data.uniform_(0.5, 1.5)
    else:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.3)


class Logged:
    """An init_fn that notes the names of the modules it is called with."""

    def __init__(self, model: nn.Module, init_fn: Callable[[nn.Module], object] = draw) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.init_fn, self.calls = init_fn, []

    def __call__(self, module: nn.Module) -> None:
        self.calls.append(self.names[module])
        self.init_fn(module)


def plain(name: str, calls: list[str], device: str = "cpu") -> nn.Module:
    """The same model without zshard, drawn module after module as ``calls`` says."""
    model = models.build(name).to(device)
    torch.manual_seed(kSeed)
    for path in calls:
        draw(model.get_submodule(path))
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name: zshard.full_param(model, name) for name in names}


def assert_same_values(actual: dict[str, Tensor], expected: nn.Module, about: object = "") -> None:
    reference = dict(expected.named_parameters(remove_duplicate=False))
    assert actual.keys() == reference.keys()
    for name, parameter in reference.items():
        assert torch.equal(actual[name], parameter), f"{about} {name}"
        assert actual[name].stride() == parameter.stride(), f"{about} {name}"
