"""What is kept beside a model: the states of schedulers, of several optimizers, and of numpy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zshard
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


def test_of_several_optimizers_each_has_a_folder(tmp_path: Path) -> None:
    model, optimizers = two()
    with pytest.raises(zshard.InputError, match=r"got a list.* folder of its own"):
        zshard.save(tmp_path / "a", model, optimizers)  # type: ignore[arg-type]
    step(model, optimizers)
    for i, optimizer in enumerate(optimizers):
        zshard.save(tmp_path / str(i), model, optimizer)
    other, again = two()
    for i, optimizer in enumerate(again):
        zshard.load(tmp_path / str(i), other, optimizer)
    step(model, optimizers)
    step(other, again)
    for name, value in zshard.state_dict(model).items():
        assert torch.equal(value, zshard.state_dict(other)[name]), name


def test_a_random_state_of_numpy_where_there_is_none_is_an_error_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numpy

    assert numpy.random  # so its state is saved
    saved = random_state(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(zshard.CheckpointError, match="pip install numpy"):
        set_random_state(saved, torch.device("cpu"))
