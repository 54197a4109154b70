"""States of optimizers in a checkpoint that lie otherwise in memory, or are of another kind now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn

import zshard


def trained(**options: float) -> tuple[nn.Module, zshard.SGD]:
    model = zshard.wrap(nn.Linear(4, 3))
    optimizer = zshard.SGD(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_momenta_are_neither_lost_nor_left_as_they_are(tmp_path: Path) -> None:
    with_momentum, without = trained(momentum=0.9), trained()
    zshard.save(tmp_path / "with", *with_momentum)
    zshard.save(tmp_path / "without", *without)
    for name, into in (("with", without), ("without", with_momentum)):
        with pytest.raises(zshard.CheckpointError, match=r"state of bias: .* were saved, and it"):
            zshard.load(tmp_path / name, *into)


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (torch.tensor(2.0), torch.ones(3)),
        (torch.ones(3), torch.tensor(2.0)),
        (torch.tensor(2.0), 2.0),
        (2.0, torch.tensor(2.0)),
    ],
)
def test_a_users_state_of_another_kind_is_refused(
    saved: Tensor | float, now: Tensor | float, tmp_path: Path
) -> None:
    model, optimizer = trained()
    optimizer.state[model.bias]["mine"] = saved
    zshard.save(tmp_path / "a", model, optimizer)
    optimizer.state[model.bias]["mine"] = now
    with pytest.raises(zshard.CheckpointError, match="'mine' of bias: a scalar was saved, or is"):
        zshard.load(tmp_path / "a", model, optimizer)


def test_a_users_state_whose_memory_has_gaps_is_filled(tmp_path: Path) -> None:
    model, optimizer = trained()
    optimizer.state[model.bias]["mine"] = torch.arange(3.0)
    zshard.save(tmp_path / "a", model, optimizer)
    around = torch.zeros(6)
    optimizer.state[model.bias]["mine"] = around[::2]
    zshard.load(tmp_path / "a", model, optimizer)
    assert around.tolist() == [0, 0, 1, 0, 2, 0]


def ignored(rank: int, size: int, folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    model.weight = nn.Parameter(torch.randn(4, 3).t())
    zshard.wrap(model, ignored=["weight"])
    optimizer = zshard.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (model(torch.eye(4)) * torch.arange(12.0).view(4, 3)).sum().backward()
    gradient = model.weight.grad.clone()
    optimizer.step()
    zshard.save(f"{folder}/a", model, optimizer)
    stored = load_file(f"{folder}/a/optimizer.safetensors")
    assert torch.equal(stored["weight.momentum_buffer"], gradient)


@pytest.mark.parametrize("size", [1, 2])
def test_states_of_an_ignored_parameter_are_stored_once_in_its_shape(
    size: int, tmp_path: Path
) -> None:
    run_ranks(ignored, size, str(tmp_path))


@pytest.mark.parametrize("length", [11, 13])
def test_a_users_state_of_another_length_is_refused(tmp_path: Path, length: int) -> None:
    model = zshard.wrap(nn.Linear(4, 3))
    optimizer = zshard.AdamW(model.parameters())
    optimizer.state[model.weight]["mine"] = torch.zeros(length)
    words = rf"'mine' of weight \(3, 4\) is a tensor of shape \({length},\).*cannot be saved"
    with pytest.raises(zshard.OptimizerError, match=words):
        zshard.save(tmp_path / "a", model, optimizer)


def test_an_option_that_is_more_than_a_number_is_refused(tmp_path: Path) -> None:
    model = zshard.wrap(nn.Linear(4, 3))
    optimizer = torch.optim.SGD([{"params": model.parameters(), "scale": torch.ones(1)}], lr=0.1)
    with pytest.raises(zshard.InputError, match=r"param_groups\[0\]\['scale'\] is a Tensor"):
        zshard.save(tmp_path / "a", model, optimizer)


def test_options_keep_their_types(tmp_path: Path) -> None:
    model = zshard.wrap(nn.Linear(4, 3))
    saved, into = (
        torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr), betas=(lr, 0.9), foreach=False)
        for lr in (0.25, 0.5)
    )
    zshard.save(tmp_path / "a", model, saved)
    zshard.load(tmp_path / "a", model, into)
    lr = into.param_groups[0]["lr"]
    assert isinstance(lr, Tensor) and lr == 0.25
    assert into.param_groups[0]["betas"] == (0.25, 0.9)


@pytest.mark.parametrize("kind", [zshard.AdamW, zshard.SGD, torch.optim.SGD])
def test_a_load_gives_groups_no_options_that_they_have_not(
    kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    model = zshard.wrap(nn.Linear(4, 3))
    optimizer = kind(model.parameters(), lr=0.1)
    before = dict(optimizer.param_groups[0])
    zshard.save(tmp_path / "a", model, optimizer)
    zshard.load(tmp_path / "a", model, optimizer)
    assert optimizer.param_groups[0] == before


def test_groups_keep_the_names_of_their_own_parameters(tmp_path: Path) -> None:
    model = zshard.wrap(nn.Linear(4, 3))
    zshard.save(tmp_path / "a", model, torch.optim.AdamW(model.named_parameters(), lr=0.25))
    into = torch.optim.AdamW([{"params": [each]} for each in model.named_parameters()], lr=0.5)
    zshard.load(tmp_path / "a", model, into)
    assert [group["param_names"] for group in into.param_groups] == [["weight"], ["bias"]]
    assert [group["lr"] for group in into.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize("kind", [zshard.AdamW, zshard.Adam])
def test_a_checkpoint_from_before_the_first_step_takes_it_all_back(
    kind: type[zshard.AdamW], tmp_path: Path
) -> None:
    model = zshard.wrap(nn.Linear(4, 3))
    optimizer = kind(model.parameters(), lr=0.1)

    def two_steps() -> list[float]:
        losses = []
        for _ in range(2):
            loss = (model(torch.ones(1, 4)) ** 2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return [*losses, *zshard.full_param(model, "weight").flatten().tolist()]

    zshard.save(tmp_path / "new", model, optimizer)
    first = two_steps()
    zshard.load(tmp_path / "new", model, optimizer)
    assert two_steps() == first


def test_torchs_adam_goes_on_from_zshards_with_its_own_decay(tmp_path: Path) -> None:
    model = zshard.wrap(nn.Linear(4, 3))
    for ours, theirs in ((zshard.Adam, torch.optim.Adam), (zshard.AdamW, torch.optim.AdamW)):
        zshard.save(tmp_path / "a", model, ours(model.parameters(), weight_decay=0.5))
        into = theirs(model.parameters(), amsgrad=True, maximize=True)
        zshard.load(tmp_path / "a", model, into)
        group = into.param_groups[0]
        assert group["decoupled_weight_decay"] is (ours is zshard.AdamW)
        assert (group["weight_decay"], group["amsgrad"], group["maximize"]) == (0.5, False, False)


@pytest.mark.parametrize("kept", [lambda inner: {"one": inner}, lambda inner: [3, inner]])
def test_an_optimizer_with_others_in_a_dict_or_a_list_is_refused(
    kept: Callable[[object], object], tmp_path: Path
) -> None:
    model, optimizer = trained(momentum=0.9)
    optimizer.itself = optimizer  # no other one
    zshard.save(tmp_path / "a", model, optimizer)
    optimizer.others = kept(torch.optim.AdamW(model.parameters()))
    with pytest.raises(zshard.OptimizerError, match=r"SGD keeps states outside .* of its \.others"):
        zshard.save(tmp_path / "a", model, optimizer)


def test_numbers_of_several_dtypes_are_exact(tmp_path: Path) -> None:
    model, optimizer = trained()
    mine = {
        "whole": torch.tensor(2**40 + 1),
        "half": torch.tensor(0.1, dtype=torch.bfloat16),
        "double": torch.tensor(0.1, dtype=torch.float64),
        "truth": torch.tensor(True),
        "none": torch.tensor(float("-inf")),
        "wave": torch.tensor(1 - 2j),
    }
    optimizer.state[model.bias].update(mine)
    zshard.save(tmp_path / "a", model, optimizer)
    again, into = trained()
    zshard.load(tmp_path / "a", again, into)
    for name, value in mine.items():
        found = into.state[again.bias][name]
        assert found.dtype == value.dtype and torch.equal(found, value), name


def test_a_buffer_of_one_row_is_loaded_whatever_the_stride_of_its_rows(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("row", torch.arange(3.0).as_strided((1, 3), (0, 1)))  # shares no memory
    model = zshard.wrap(model)
    zshard.save(tmp_path / "a", model)
    model.row.zero_()
    zshard.load(tmp_path / "a", model)
    assert model.row.tolist() == [[0, 1, 2]]
