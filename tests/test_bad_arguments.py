"""Arguments of the wrong kind or out of range, calls past the module: an error that shows it."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import models
import numpy as np
import pytest
import torch
from ranks import run_ranks
from steps import build, one_step
from torch import Tensor, nn

import zshard
from zshard.wrap import schedule_of


class Buffers(nn.Module):
    """A model without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.eye(3).to_sparse())


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: torch.jit.script(nn.Linear(2, 2)), {}, "the plain module that this Recursive"),
        (Sparse, {}, "table is sparse"),
        (lambda: nn.Linear(2, 2), {"precision": "bf16"}, r"such as zshard.Precision.bf16\(\)"),
        (lambda: nn.Linear(2, 2), {"device": 2**70}, "device=1180591620717411303424"),
        (lambda: nn.Linear(2, 2), {"ignored": [nn.Linear(2, 2)]}, "no parameter or module Linear"),
    ],
)
def test_wrap_names_what_it_does_not_take(
    make: Callable[[], nn.Module], options: dict[str, object], message: str
) -> None:
    with pytest.raises(zshard.Error, match=message):
        zshard.wrap(make(), **options)


def test_wrap_onto_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(zshard.InputError, match="device='cuda:2': torch finds 2 GPUs here"):
        zshard.wrap(nn.Linear(2, 2), device="cuda:2")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (zshard.AdamW, {"lr": "x"}, "lr='x': expected a number"),
        (zshard.AdamW, {"lr": None}, "lr=None: expected a number"),
        (zshard.AdamW, {"lr": "1e-3"}, "lr='1e-3': expected a number"),  # as PyYAML reads it
        (zshard.AdamW, {"lr": -1.0}, "none may be negative"),
        (zshard.AdamW, {"eps": "x"}, "eps='x': expected a number"),
        (zshard.AdamW, {"betas": 0.9}, "betas=0.9: expected two numbers"),
        (zshard.AdamW, {"betas": (0.9,)}, r"betas=\(0.9,\): expected two numbers"),
        (zshard.AdamW, {"betas": (0.9, 0.9, 0.9)}, "expected two numbers"),
        (zshard.Adam, {"betas": ("x", 0.9)}, "betas='x': expected a number"),
        (zshard.Adam, {"betas": (0.9, 1.0)}, r"both must lie in \[0, 1\)"),
        (zshard.SGD, {"lr": float("nan")}, "none may be negative"),
        (zshard.SGD, {"dampening": "x"}, "dampening='x': expected a number"),
        (zshard.SGD, {"nesterov": True}, "it takes a momentum and no dampening"),
    ],
)
def test_settings_of_an_optimizer_are_looked_at_when_it_and_its_groups_are_made(
    kind: type[torch.optim.Optimizer], settings: dict[str, object], message: str
) -> None:
    model = build()
    first, *others = model.parameters()
    with pytest.raises(zshard.InputError, match=message):
        kind(model.parameters(), **{"lr": 0.1, **settings})
    optimizer = kind([first], lr=0.1)
    with pytest.raises(zshard.InputError, match=message):
        optimizer.add_param_group({"params": others, **settings})
    assert len(optimizer.param_groups) == 1


def test_a_setting_that_becomes_no_number_is_refused_at_the_step() -> None:
    model = build()
    for kind in (zshard.AdamW, zshard.SGD):
        optimizer = kind(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["lr"] = "fast"
        one_step(model, 0, 0)
        with pytest.raises(zshard.InputError, match="lr='fast': expected a number"):
            optimizer.step()


def test_a_sharded_tensor_has_no_memory_that_others_could_be_given() -> None:
    weight = next(build().parameters()).detach()
    for export in (torch.utils.dlpack.to_dlpack, torch.from_dlpack, torch.Tensor.numpy):
        with pytest.raises((RuntimeError, zshard.Error)):
            export(weight)


def test_forward_past_the_module_is_told_how_to_be_called() -> None:
    with pytest.raises(zshard.ShardedAccessError, match=r"model\(\.\.\.\), not model\.forward"):
        build().forward(torch.ones(2, 3))


class Outside(models.Blocks):
    """Uses a parameter of a block in its own forward, while that block's unit is sharded."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.blocks[1].up.bias.sum()


class Past(models.Blocks):
    """Calls its blocks' forward, and so none of their hooks, as transformers' SqueezeBERT does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block.forward(x)
        return x


def used_outside_its_unit(rank: int, world_size: int, kind: type[nn.Module]) -> tuple[str, bool]:
    """What a parameter used outside its unit's forward raises, and whether one unit runs it."""
    model = zshard.wrap(kind(), init="broadcast")
    batch = torch.ones(1, 3)
    try:
        model(batch)
        message = "no error"
    except zshard.ShardedAccessError as error:
        message = str(error)
    one_unit = zshard.wrap(kind(), units="model", init="broadcast")
    return message, bool(torch.isfinite(one_unit(batch)).all())


@pytest.mark.parametrize(
    ("kind", "name", "user"),
    [
        (Outside, "blocks.1.up.bias", "the module that uses it"),
        (Past, "blocks.0.norm.weight", "'blocks.0.norm'"),
    ],
)
def test_a_parameter_used_outside_its_units_forward_is_refused_by_name(
    kind: type[nn.Module], name: str, user: str
) -> None:
    for message, runs_as_one_unit in run_ranks(used_outside_its_unit, 2, kind):
        assert name in message and "outside the module of its unit" in message
        assert f": make {user} a unit" in message
        assert "module(...), not module.forward(...)" in message
        assert "other methods work where it is no unit" in message
        assert "values, as a hook, can do so between steps, with zshard.full_param" in message
        assert runs_as_one_unit


@pytest.mark.parametrize(
    "max_norm", [-1.0, float("nan"), "x", None, torch.ones(2), torch.tensor(-1.0)]
)
def test_a_norm_that_nothing_can_be_clipped_to_changes_nothing(max_norm: object) -> None:
    model = build()
    one_step(model, 0, 0)
    before = zshard.full_grad(model, "inlet.weight")
    with pytest.raises(zshard.InputError, match="max_norm="):
        zshard.clip_grad_norm_(model, max_norm)
    norm = zshard.clip_grad_norm_(model, torch.tensor([float("inf")]))
    assert norm.shape == () and norm > 0
    assert torch.equal(zshard.full_grad(model, "inlet.weight"), before)


@pytest.mark.parametrize("given", [None, nn.Linear(2, 2).named_parameters(), ["weight"]])
def test_what_is_no_model_cannot_be_clipped(given: object) -> None:
    with pytest.raises(zshard.InputError, match=r"expected (a wrapped model|tensors, as of model)"):
        zshard.clip_grad_norm_(given, 1.0)


def test_a_model_without_parameters_is_described_and_clipped() -> None:
    model = zshard.wrap(Buffers())
    assert "Buffers: 0 parameters" in zshard.describe(model)
    for norm_type in (1.0, 2.0, float("inf")):
        assert zshard.clip_grad_norm_(model, 1.0, norm_type) == 0.0


def test_no_parameters_have_the_norm_0_as_torch_says() -> None:
    assert torch.equal(zshard.clip_grad_norm_([], 1.0), nn.utils.clip_grad_norm_([], 1.0))


@pytest.mark.parametrize("kind", [zshard.AdamW, zshard.Adam, zshard.SGD])
def test_an_optimizer_says_as_it_is_made_what_it_cannot_update(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    with pytest.raises(zshard.InputError, match=f"{kind.__name__}: .* empty parameter list"):
        kind([])
    with pytest.raises(zshard.InputError, match=f"{kind.__name__}: .* not iterable"):
        kind(3)
    optimizer = kind(zshard.wrap(nn.Linear(2, 2)).parameters())
    narrow = kind(nn.Linear(2, 2).half().parameters())  # wrapped before a step it has masters
    with pytest.raises(zshard.OptimizerError, match=r"shape \(2, 2\) is torch\.float16; .* update"):
        narrow.step()
    frozen = zshard.wrap(nn.Linear(2, 2).double().requires_grad_(False))
    optimizer.add_param_group({"params": frozen.parameters()})
    optimizer.step()


def test_the_gradient_of_another_parameter_is_told_from_ones_own() -> None:
    one, other = zshard.wrap(nn.Linear(2, 2)), zshard.wrap(nn.Linear(2, 2))
    one(torch.ones(1, 2)).sum().backward()
    with pytest.raises(zshard.InputError, match=r"the gradient of bias of another model, or"):
        other.bias.grad = one.bias.grad
    with pytest.raises(zshard.InputError, match=r"the gradient of weight, or what is made of it"):
        one.bias.grad = one.weight.grad
    other.bias.grad = torch.zeros_like(other.bias)
    other.bias.grad.copy_(one.bias.grad)
    assert torch.equal(zshard.full_grad(other, "bias"), zshard.full_grad(one, "bias"))


def test_a_name_that_the_model_does_not_have_is_told_where_to_look() -> None:
    model = zshard.wrap(nn.Linear(2, 2))
    for read in (zshard.full_param, zshard.full_grad):
        with pytest.raises(zshard.InputError, match=r"'wieght'; model\.named_parameters\(\) lists"):
            read(model, "wieght")


def test_a_parameter_that_is_ignored_is_said_to_be_whole() -> None:
    model = zshard.wrap(nn.Linear(2, 2), ignored=["bias"])
    for read in (zshard.full_param, zshard.full_grad):
        with pytest.raises(zshard.InputError, match=r"'bias' is not sharded \(ignored=\)"):
            read(model, "bias")


def test_a_module_is_no_method() -> None:
    model = build()
    with pytest.raises(zshard.InputError, match="has no method 'inlet'"):
        zshard.method(model, "inlet")


def test_a_mask_may_be_written_through() -> None:
    model = build()
    name, param = next((n, p) for n, p in model.named_parameters() if p.ndim == 2)
    with torch.no_grad():
        param.masked_fill_(param > 0, 0.0)
    assert (zshard.full_param(model, name) <= 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_scale": "x"}, "init_scale='x': expected a number between 0 and inf"),
        ({"init_scale": -1.0}, "init_scale=-1.0: expected a number between"),
        ({"growth_factor": 1.0}, "growth_factor=1.0: expected a number between 1 and inf"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0: expected a number between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval=0: expected a number of steps"),
        ({"growth_interval": 0.5}, "growth_interval=0.5: expected a number of steps"),
    ],
)
def test_settings_of_a_scaler_are_looked_at_when_it_is_made(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(zshard.InputError, match=message):
        zshard.GradScaler("cpu", **settings)
    assert not zshard.GradScaler("cpu", **settings, enabled=False).is_enabled()  # as torch's
    zshard.GradScaler("cpu", np.float32(2.0), growth_interval=np.int64(3))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scales[0]


@pytest.mark.parametrize("units", [["blocks"], [nn.ModuleList], ["blocks.0", "scales"]])
def test_a_container_that_is_never_called_is_no_unit(units: list[object]) -> None:
    model = Lists()
    with pytest.raises(zshard.InputError, match=r"units: '\w+' is a \w+List, which has no forward"):
        zshard.wrap(model, units=units)
    zshard.wrap(model, units=lambda name, _: name != "scales")  # "blocks" owns nothing then
    assert model(torch.ones(2)).shape == (2,)


class ListsOfLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        lists = [[nn.Parameter(torch.ones(2))] for _ in range(2)]
        self.scales = nn.ModuleList(map(nn.ParameterList, lists))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales[0][0] * self.scales[1][0]


def test_containers_that_are_never_called_are_no_units_by_default() -> None:
    model = zshard.wrap(ListsOfLists())
    assert len(schedule_of(model).units) == 1
    model(torch.ones(2)).sum().backward()


CALLS: dict[str, Callable[[nn.Module], object]] = {
    "clip_grad_norm_": lambda model: zshard.clip_grad_norm_(model, 1.0),
    "describe": zshard.describe,
    "export": lambda model: zshard.export("nowhere", model),
    "full_grad": lambda model: zshard.full_grad(model, "weight"),
    "full_param": lambda model: zshard.full_param(model, "weight"),
    "full_params": lambda model: zshard.full_params(model).__enter__(),
    "load": lambda model: zshard.load("nowhere", model),
    "load_weights": lambda model: zshard.load_weights(model, "nowhere"),
    "local_shards": zshard.local_shards,
    "mark_updated": zshard.mark_updated,
    "memory": zshard.memory,
    "method": lambda model: zshard.method(model, "extra_repr"),
    "no_sync": lambda model: zshard.no_sync(model).__enter__(),
    "reset": zshard.reset,
    "save": lambda model: zshard.save("nowhere", model),
    "state_dict": zshard.state_dict,
    "stats": zshard.stats,
    "trace": lambda model: zshard.trace(model).__enter__(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plain_model_is_refused_as_the_docstring_says(name: str) -> None:
    with pytest.raises(zshard.WrapError, match=r"this Linear is not wrapped; pass zshard\.wrap's"):
        CALLS[name](nn.Linear(2, 2))
    said = getattr(zshard, name).__doc__
    assert "WrapError: if the model is not wrapped." in said.partition("Raises:")[2]


def test_every_call_of_a_model_is_tried_with_a_plain_one() -> None:
    takes_a_model = {
        name
        for name in zshard.__all__
        if inspect.isfunction(call := getattr(zshard, name))
        and {"model", "model_or_params"} & inspect.signature(call).parameters.keys()
    }
    assert takes_a_model - {"wrap", "plan"} == CALLS.keys()


def test_a_part_of_a_wrapped_model_is_called_so_with_what_to_pass_instead() -> None:
    model = zshard.wrap(models.Blocks())
    said = r"this Block is a part of a wrapped model; pass zshard\.wrap's result"
    with pytest.raises(zshard.WrapError, match=said + "$"):
        zshard.memory(model.blocks[0])
    with pytest.raises(zshard.WrapError, match=said + r", or the part's parameters\(\)$"):
        zshard.clip_grad_norm_(model.blocks[0], 1.0)
