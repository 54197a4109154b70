"""Models that wrap refuses, with what is wrong and where; tests/test_bad_input.py has the rest."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from models import Blocks
from ranks import run_ranks
from steps import batch
from torch import nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import zshard


def goes_on(model: nn.Module) -> None:
    models.loss_of(model, batch(0, 1)).backward()


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (
            nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False),
            "odd has dtype.*int32",
        ),
        (nn.Parameter(torch.ones(2, dtype=torch.complex64)), "odd has dtype.*complex64"),
        (nn.UninitializedParameter(), "odd has no shape yet"),
    ],
)
def test_parameters_that_cannot_be_sharded_are_refused_by_name_before_anything_is(
    parameter: nn.Parameter, message: str
) -> None:
    model = Blocks()
    model.odd = parameter
    with pytest.raises(zshard.WrapError, match=message):
        zshard.wrap(model)
    assert type(model.inlet.weight) is nn.Parameter
    del model.odd
    goes_on(zshard.wrap(model))


def test_a_parameter_that_asks_for_gradients_of_another_dtype_is_refused_by_name() -> None:
    model = Blocks()
    for asked in (torch.bfloat16, None):  # None: of whatever dtype they come in
        model.inlet.weight.grad_dtype = asked
        match = rf"inlet\.weight has \.grad_dtype = {asked}.*Precision\(reduce="
        with pytest.raises(zshard.WrapError, match=match):
            zshard.wrap(model)
    assert type(model.inlet.weight) is nn.Parameter
    model.inlet.weight.grad_dtype = torch.float32
    goes_on(zshard.wrap(model))
    for asked in (torch.bfloat16, None):
        match = rf"inlet\.weight: \.grad_dtype = {asked}.*Precision\(reduce="
        with pytest.raises(zshard.StateError, match=match):
            model.inlet.weight.grad_dtype = asked
    model.inlet.weight.grad_dtype = torch.float32
    assert model.inlet.weight.grad_dtype == torch.float32


def test_a_model_with_gradients_is_refused_until_they_are_dropped() -> None:
    model = Blocks()
    goes_on(model)
    with pytest.raises(zshard.WrapError, match=r"inlet\.weight has a gradient already.*zero_grad"):
        zshard.wrap(model)
    model.zero_grad()
    goes_on(zshard.wrap(model))


def test_a_parameter_whose_name_leads_to_no_module_is_refused_by_name() -> None:
    model = Blocks()
    model.taken = nn.Module()  # as torchrl's losses keep the parameters of their networks
    model.taken._parameters["up.weight"] = model.blocks[0].up.weight
    with pytest.raises(zshard.WrapError, match=r"'taken\.up\.weight' leads to no module"):
        zshard.wrap(model)


@pytest.mark.filterwarnings("ignore:.*jit.script.*deprecated:DeprecationWarning")
def test_a_module_of_torchscript_inside_a_model_is_refused_and_may_be_ignored() -> None:
    scripted = torch.jit.script(nn.Linear(3, 3))
    model = nn.Sequential(nn.Linear(3, 3), scripted)
    with pytest.raises(zshard.WrapError, match=r"1\.weight cannot .* TorchScript.*in ignored="):
        zshard.wrap(model)
    goes_on(zshard.wrap(model, ignored=["1"]))
    assert scripted.weight.grad is not None


@pytest.mark.parametrize("name", ["again", "again.bias"])
def test_what_is_ignored_lies_in_the_model_under_any_of_its_names(name: str) -> None:
    model = Blocks()
    model.again = model.outlet
    with pytest.raises(zshard.InputError, match=r"the model has no parameter or module Linear"):
        zshard.wrap(model, ignored=[nn.Linear(2, 2)])
    zshard.wrap(model, ignored=[name])
    assert type(model.outlet.bias) is nn.Parameter


def on_two_devices(rank: int, world_size: int) -> None:
    _setup_privateuseone_for_python_backend("other")  # of this process, for good
    model = Blocks()
    there = torch._C._acc.create_empty_tensor((7,), torch.float32)
    model.inlet.bias = nn.Parameter(there)
    with pytest.raises(zshard.WrapError, match=r"inlet\.weight on cpu, inlet\.bias on other:0"):
        zshard.wrap(model)
    assert type(model.inlet.weight) is nn.Parameter


def test_parameters_on_several_devices_are_refused_by_name() -> None:
    run_ranks(on_two_devices, 1, group=False)


def without_a_backend(rank: int, world_size: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=world_size)
    model = Blocks()
    with pytest.raises(zshard.WrapError, match=r"'cuda:gloo'\) has no backend for cpu"):
        zshard.wrap(model)
    dist.destroy_process_group()
    goes_on(zshard.wrap(model))


def test_a_process_group_without_a_backend_for_the_parameters_is_refused(tmp_path: Path) -> None:
    run_ranks(without_a_backend, 1, str(tmp_path), group=False)


def on_a_device_of_its_own(rank: int, world_size: int) -> str:
    """Rank 1's model is where the process group has no backend."""
    model = nn.Linear(7, 1, bias=False)
    if rank == 1:
        _setup_privateuseone_for_python_backend("other")
        model.weight = nn.Parameter(torch._C._acc.create_empty_tensor((1, 7), torch.float32))
    with pytest.raises(zshard.WrapError) as caught:
        zshard.wrap(model)
    assert type(model.weight) is nn.Parameter
    return str(caught.value)


def test_all_ranks_hear_of_one_whose_device_the_process_group_has_no_backend_for() -> None:
    others, own = run_ranks(on_a_device_of_its_own, 2)
    assert "has no backend for other:0, where the parameters are" in own
    assert others == f"rank 1: {own}"


def test_classes_of_units_may_come_twice_and_what_is_no_class_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    for wrong in (["0"], {}, 5):
        with pytest.raises(zshard.InputError, match="expected module classes or names of modules"):
            zshard.wrap(model, units=[wrong])
    held = zshard.memory(zshard.wrap(model, units=[type(model[0]), type(model[2])]))
    assert [unit["name"] for unit in held["units"]] == ["root", "0", "2"]
