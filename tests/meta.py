"""A model on the meta device and its plain twin: what the tests of such models share."""

from __future__ import annotations

from collections.abc import Callable

import models
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import zshard

SEED = 99


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
    torch.manual_seed(SEED)
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


class Counted(TorchDispatchMode):
    """Counts the bytes of tensors made while it is entered, as they live and die."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.live, self.peak = least, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if type(tensor) is Tensor and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage.nbytes() >= self.least:
                    self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return result


class Large(nn.Module):
    """Units of unlike size: the last two are the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 8 * width), nn.Linear(8 * width, 64))
            for width in (17, 29, 64, 64)
        )


LARGEST = 4 * (64 * 512 + 512 + 512 * 64 + 64)
