"""What is kept beside a model: the states of schedulers, of several optimizers, and of numpy."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from test_checkpoint_hostile import write_manifest
from torch import nn
from torch.optim import lr_scheduler

import zshard
from zshard.checkpoint.command import run_ckpt
from zshard.checkpoint.rng import random_state, set_random_state


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, and an optimizer of its first layer."""
    torch.manual_seed(0)
    model = zshard.wrap(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    return model, zshard.AdamW(model[0].parameters())


def multi_step(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)


def plateau(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


@pytest.mark.parametrize(
    ("make", "set_anew", "said"),
    [
        (multi_step, "milestones", r"has the key 2; .* leave extra\['milestones'\] out"),
        (plateau, "mode_worse", r"extra\['mode_worse'\] is inf, .* leave it out"),
    ],
    ids=["MultiStepLR", "ReduceLROnPlateau"],
)
def test_a_schedulers_state_is_kept_without_what_its_constructor_sets(
    tmp_path: Path,
    make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler],
    set_anew: str,
    said: str,
) -> None:
    rates: list[float] = []
    model, optimizer = made()
    scheduler = make(optimizer)
    for epoch in range(6):
        if epoch == 3:
            state = scheduler.state_dict()
            with pytest.raises(zshard.InputError, match=said):
                zshard.save(tmp_path / "a", model, optimizer, extra=state)
            del state[set_anew]
            zshard.save(tmp_path / "a", model, optimizer, extra=state)
        optimizer.step()
        scheduler.step(*([1.0] if make is plateau else []))
        rates += [group["lr"] for group in optimizer.param_groups]
    model, optimizer = made()
    scheduler = make(optimizer)
    scheduler.load_state_dict(zshard.load(tmp_path / "a", model, optimizer).extra)
    for epoch in range(3, 6):
        optimizer.step()
        scheduler.step(*([1.0] if make is plateau else []))
        assert optimizer.param_groups[0]["lr"] == rates[epoch]
    assert len(set(rates)) > 2


def two() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model, adamw = made()
    return model, [adamw, zshard.SGD(model[1].parameters(), momentum=0.9)]


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def assert_alike(model: nn.Module, other: nn.Module) -> None:
    for name, value in zshard.state_dict(model).items():
        assert torch.equal(value, zshard.state_dict(other)[name]), name


@pytest.mark.parametrize("together", [True, False])
def test_several_optimizers_go_on_from_one_folder_or_from_one_each(
    tmp_path: Path, together: bool
) -> None:
    model, optimizers = two()
    step(model, optimizers)
    for i, optimizer in enumerate(optimizers):
        optimizer.param_groups[0]["lr"] = 0.1 * (i + 1)
        optimizer.state["seen"]["numbers"] = [i]  # beside the parameters
    for i, part in enumerate([optimizers] if together else optimizers):
        zshard.save(tmp_path / str(i), model, part)
    other, again = two()
    for i, part in enumerate([tuple(again)] if together else again):
        zshard.load(tmp_path / str(i), other, part)
    for i, optimizer in enumerate(again):
        assert optimizer.param_groups[0]["lr"] == 0.1 * (i + 1)
        assert optimizer.state["seen"] == {"numbers": [i]}
    step(model, optimizers)
    step(other, again)
    assert_alike(model, other)


def test_several_optimizers_are_given_as_they_were_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, (adamw, sgd) = two()
    step(model, [adamw, sgd])
    adamw.step()
    for wrong, said in [
        ({"a": adamw}, r"^optimizer: expected a torch.optim.Optimizer, or a list .* got a dict"),
        ([adamw, model], r"^optimizer\[1\]: expected .* got a Sequential"),
        (
            [adamw, sgd, adamw],
            r"optimizer\[0\] and optimizer\[2\] both have the parameter 0.weight",
        ),
        ([adamw, made()[1]], r"^optimizer\[1\] has a parameter of shape .* model does not have"),
    ]:
        for call in (zshard.save, zshard.load):
            zshard.save(tmp_path / "a", model, [adamw, sgd])
            with pytest.raises(zshard.InputError, match=said):
                call(tmp_path / "a", model, wrong)
    for other in ([sgd, adamw], [adamw], sgd, [adamw, sgd, zshard.AdamW([model[1].bias])][::2]):
        with pytest.raises(zshard.CheckpointError, match="optimizer: AdamW, SGD was saved, and it"):
            zshard.load(tmp_path / "a", model, other, strict=False)
    assert run_ckpt("info", str(tmp_path / "a")) == 0
    assert "AdamW, SGD, after 2 steps" in capsys.readouterr().out
    zshard.save(tmp_path / "b", model, [sgd])
    zshard.load(tmp_path / "b", model, sgd)
    zshard.load(tmp_path / "b", model, [])


def test_several_optimizers_that_a_failed_load_has_torn_are_loaded_too(tmp_path: Path) -> None:
    model, optimizers = two()
    step(model, optimizers)
    zshard.save(tmp_path / "a", model, optimizers)
    zshard.save(tmp_path / "b", model, optimizers)
    zshard.save(tmp_path / "sgd", model, optimizers[1])
    zshard.save(tmp_path / "adamw", model, optimizers[0])
    file = tmp_path / "b/optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(zshard.CheckpointError, match="are damaged"):
        zshard.load(tmp_path / "b", model, optimizers)
    with pytest.raises(zshard.StateError, match="states of the AdamW"):
        zshard.load(tmp_path / "sgd", model, optimizers[1])
    with pytest.raises(zshard.StateError, match="states of the SGD"):
        zshard.load(tmp_path / "adamw", model, optimizers[0])
    new = zshard.AdamW(model[0].parameters())
    with pytest.raises(zshard.StateError, match=r"states of another AdamW .* load with it, too"):
        zshard.load(tmp_path / "a", model, [new, optimizers[1]])
    zshard.load(tmp_path / "a", model, optimizers)
    step(model, optimizers)


def load_otherwise(rank: int, world_size: int, folder: Path) -> str:
    model, optimizers = two()
    zshard.save(folder / "a", model, optimizers)
    with pytest.raises(zshard.MismatchError) as error:
        zshard.load(folder / "a", model, optimizers[:: -1 if rank else 1])
    zshard.load(folder / "a", model, optimizers)
    return str(error.value)


def test_ranks_that_load_other_lists_of_optimizers_are_told(tmp_path: Path) -> None:
    said = run_ranks(load_otherwise, 2, tmp_path)
    assert said[0] == said[1] and "AdamW, SGD" in said[0] and "SGD, AdamW" in said[0]


def load_in_another_order(rank: int, world_size: int, folder: Path) -> str:
    model, adamw = made()
    optimizers = [adamw, zshard.AdamW(model[1].parameters())]
    zshard.save(folder / "a", model, optimizers)
    adamw.param_groups[0]["lr"] = 0.5
    with pytest.raises(zshard.MismatchError) as error:
        zshard.load(folder / "a", model, optimizers[:: -1 if rank else 1], strict=False)
    assert adamw.param_groups[0]["lr"] == 0.5
    zshard.load(folder / "a", model, optimizers[::-1], strict=False)
    return str(error.value)


def test_optimizers_of_one_class_in_another_order_on_a_rank_are_not_left_as_they_are_there_alone(
    tmp_path: Path,
) -> None:
    said = run_ranks(load_in_another_order, 2, tmp_path)
    assert said[0] == said[1]
    assert re.search(r"\[1\] would leave out .* than rank 0 \(.* state of 0\.bias\)", said[0])


def load_of_some(rank: int, world_size: int, folder: Path, saved: int) -> str:
    """Parameters of the first layer, or of both, are in the optimizer, on rank 1 of others."""
    model, few = made()
    optimizers = [few, zshard.AdamW(model.parameters())]
    zshard.save(folder / "a", model, optimizers[saved])
    with pytest.raises(zshard.MismatchError) as error:
        zshard.load(folder / "a", model, optimizers[rank != saved], strict=False)
    return str(error.value)


@pytest.mark.parametrize("saved", [0, 1], ids=["missing", "unexpected"])
def test_states_that_are_left_out_on_one_rank_alone_are_told_of(saved: int, tmp_path: Path) -> None:
    for said in run_ranks(load_of_some, 2, tmp_path, saved):
        assert "ranks [1] would leave out" in said and "state of 1.bias" in said


def test_of_which_of_several_optimizers_a_group_does_not_fit_is_told(tmp_path: Path) -> None:
    model, adamw = made()
    sgd = zshard.SGD([{"params": [param]} for param in model[1].parameters()])
    zshard.save(tmp_path / "a", model, [adamw, sgd])
    one_group = zshard.SGD(model[1].parameters())
    with pytest.raises(zshard.CheckpointError, match=r"\[0\] \(with 1\.weight\): .* \[0, 1\]"):
        zshard.load(tmp_path / "a", model, [adamw, one_group])


def test_of_which_of_several_optimizers_json_does_not_have_a_setting_is_told(
    tmp_path: Path,
) -> None:
    model, (adamw, sgd) = two()
    sgd.param_groups[0]["tag"] = {1}
    with pytest.raises(zshard.InputError, match=r"^SGD\.param_groups\[0\]\['tag'\] is a set"):
        zshard.save(tmp_path / "a", model, [adamw, sgd])


def test_the_record_of_each_optimizer_is_checked(tmp_path: Path) -> None:
    model, optimizers = two()
    step(model, optimizers)
    zshard.save(tmp_path / "a", model, optimizers)
    content = json.loads((tmp_path / "a/checkpoint.json").read_bytes())["checkpoint"]
    content["optimizer"][1]["state"]["1.bias"]["momentum_buffer"] = {"tensor": "another"}
    write_manifest(tmp_path / "a/checkpoint.json", json.dumps(content).encode())
    with pytest.raises(zshard.CheckpointError, match=r"cannot be understood.*momentum_buffer"):
        zshard.load(tmp_path / "a", model, optimizers)


def test_a_random_state_of_numpy_where_there_is_none_is_an_error_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numpy

    assert numpy.random  # so its state is saved
    saved = random_state(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(zshard.CheckpointError, match=r"^the checkpoint .*pip install numpy"):
        set_random_state(saved, torch.device("cpu"))


def test_a_generator_of_numpys_that_rng_does_not_save_is_refused(tmp_path: Path) -> None:
    import numpy

    model, usual = zshard.wrap(nn.Linear(2, 2)), numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        with pytest.raises(zshard.InputError, match=r"another generator \(PCG64, .* than MT19937"):
            zshard.save(tmp_path / "a", model, rng=True)
    finally:
        numpy.random.set_bit_generator(usual)
