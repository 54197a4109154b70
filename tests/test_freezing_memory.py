"""Memory that changes sides as units are frozen, or trained later than others."""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zshard
from zshard.param import Sharded


def alive() -> int:
    """Bytes of all tensors that Python can see."""
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():
        storages = [
            each.untyped_storage()
            for each in gc.get_objects()
            if issubclass(type(each), torch.Tensor) and not isinstance(each, Sharded)
        ]
        return sum({each._cdata: each.nbytes() for each in storages}.values())


def turned(rank: int, world_size: int, freezes: bool) -> None:
    """Hold what is alive against what ``zshard.memory`` says, as the larger unit changes sides."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 512))
    model[1].requires_grad_(freezes)
    zshard.wrap(model, units="layer", comm="group", init="broadcast")
    seen = []
    for step in range(4):
        if step == 2:
            model[1].requires_grad_(not freezes)
        model(torch.ones(2, 8)).square().sum().backward()
        model.zero_grad()
        now = zshard.memory(model)["now"]
        seen.append(alive() - now["gradients"] - now["reduce_buffers"])
    # Beside what the ranks are telling each other, which comes and goes; of gradients it is 9 kB.
    assert max(seen[1:]) - min(seen[1:]) < 1024, seen


@pytest.mark.parametrize("freezes", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_of_gradients_that_is_given_back_is_free(world_size: int, freezes: bool) -> None:
    run_ranks(turned, world_size, freezes)


def test_sums_of_micro_batches_are_given_back_as_their_unit_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 512))
    zshard.wrap(model, units="layer", precision=zshard.Precision.bf16())
    held = []
    for frozen in (False, True):
        model[1].requires_grad_(not frozen)
        with zshard.no_sync(model):
            model(torch.ones(2, 8)).square().sum().backward()
        model(torch.ones(2, 8)).square().sum().backward()
        model.zero_grad()
        held.append(zshard.memory(model)["now"]["gradients"])
    assert held[1] < 4 * 9 * 512 < held[0] / 2


def unfrozen(rank: int, world_size: int, comm: str) -> None:
    """A larger unit is trained later, for which reduce buffers above a megabyte are made anew."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 900))
    plain[1].requires_grad_(False)
    model = zshard.wrap(copy.deepcopy(plain), units="layer", comm=comm)
    for step in range(4):
        for each in (model, plain):
            each[1].requires_grad_(step > 1)
            each(torch.full((2, 600), step + 1.0)).square().sum().backward()
        for name, param in plain.named_parameters():
            if param.requires_grad:
                torch.testing.assert_close(zshard.full_grad(model, name), param.grad)
        for each in (model, plain):
            each.zero_grad()


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_gradients_are_reduced_in_the_buffers_that_unfreezing_has_made_larger(comm: str) -> None:
    run_ranks(unfrozen, 2, comm)


@pytest.mark.parametrize("by_file", [True, False])
def test_states_that_a_load_gives_a_frozen_unit_are_counted(by_file: bool, tmp_path: Path) -> None:
    counted = []
    for frozen in (False, True):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 512))
        model[1].requires_grad_(not frozen)
        zshard.wrap(model, units="layer")
        optimizer = zshard.AdamW(model.parameters())
        if not frozen:
            model(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            zshard.save(tmp_path / "a", model, optimizer)
            states = optimizer.state_dict()
        elif by_file:
            zshard.load(tmp_path / "a", model, optimizer)
        else:
            optimizer.load_state_dict(states)
        memory = zshard.memory(model)
        counted.append((memory["now"]["optimizer"], memory["peak"]["optimizer"]))
    assert counted[0] == counted[1] and min(counted[1]) > 8 * 9 * 512
