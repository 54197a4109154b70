"""Models over one another's process groups, by different meshes: ranks in them meet or are told."""

from __future__ import annotations

import gc
import re
from datetime import timedelta

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, simulated
from steps import build
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zshard
from zshard.wrap import schedule_of

# Of two ranks; torch takes the default group for each axis of more than one.
MESHES = {"default": None, "shards": [[0, 1]], "replicas": [[0], [1]]}


def pair(rank: int, meshes: tuple[object, object], comm: str) -> list[nn.Module]:
    """Two models with other values each, which a gather of the wrong one would show."""
    both = []
    for value, mesh in enumerate(meshes):
        model = nn.Linear(64, 64, bias=False)
        nn.init.constant_(model.weight, value + 1.0)
        both.append(zshard.wrap(model, mesh=mesh, comm=comm))
    return both


def call(model: nn.Module) -> list[float]:
    with torch.no_grad():
        values: Tensor = model(torch.ones(1, 64)).unique()
    return values.tolist()


def in_different_models(
    rank: int, world_size: int, first: str, second: str, comm: str
) -> tuple[str, list[list[float]]]:
    meshes = [rows and DeviceMesh("cpu", rows) for rows in (MESHES[first], MESHES[second])]
    both = pair(rank, (meshes[0], meshes[1]), comm)
    with pytest.raises(zshard.MismatchError) as raised:
        call(both[rank])
    return str(raised.value), [call(model) for model in both]


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize(
    ("first", "second"),
    [("default", "shards"), ("shards", "replicas"), ("replicas", "default")],
)
def test_ranks_that_call_models_over_different_meshes_of_one_group_are_told(
    first: str, second: str, comm: str
) -> None:
    for message, values in run_ranks(in_different_models, 2, first, second, comm):
        assert "rank 0: a forward, of wrapped model 0; rank 1: a forward, of wrapped" in message
        assert values == [[64.0], [128.0]]


def in_a_row(rank: int, world_size: int, comm: str) -> tuple[str, list[list[float]]]:
    """One model is over all ranks, the other over each row of its mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for dim in range(2):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=20), mesh.get_group(dim))
    both = pair(rank, (mesh, mesh["shard"]), comm)
    with pytest.raises(zshard.MismatchError) as raised:
        call(both[rank % 2])
    return str(raised.value), [call(model) for model in both]


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_ranks_that_call_a_model_over_the_mesh_and_one_over_its_rows_are_told(comm: str) -> None:
    for message, values in run_ranks(in_a_row, 4, comm):
        assert "a forward, of a model over ranks [[0, 1], [2, 3]]; rank " in message
        assert re.search(r"a forward, of a model over ranks \[(0, 1|2, 3)\][.;]", message)
        assert values == [[64.0], [128.0]]


class Own(Exception):
    """A script's own."""


def one_raises(rank: int, world_size: int, second: str, comm: str, then: str) -> list[Tensor]:
    """The first model raises on rank 1; then all ranks go on with the second."""
    meshes = (None, DeviceMesh("cpu", MESHES[second]))
    both = [build(mesh=mesh, comm=comm) for mesh in meshes]
    data = models.batches("blocks", 3, rank)
    for model in both:  # programs are known
        models.loss_of(model, data[0]).backward()
        model.zero_grad()
    hook = both[0].blocks[1].register_forward_pre_hook(lambda *_: raise_own(rank))
    with pytest.raises(Own if rank == 1 else zshard.Error):
        loss = models.loss_of(both[0], data[1])
        loss.backward()
    hook.remove()
    with torch.no_grad():
        if then == "evaluate":
            both[1](data[1])
        else:
            both[1].blocks[0](torch.ones(2, models.WIDTH))
    for model in both:
        model.zero_grad()
        models.loss_of(model, data[2]).backward()
    return [zshard.full_grad(model, "inlet.weight") for model in both]


def raise_own(rank: int) -> None:
    if rank == 1:
        raise Own


@pytest.mark.parametrize("then", ["evaluate", "block"])
@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("second", ["shards", "replicas"])
def test_an_exception_in_one_leaves_the_ranks_in_step_in_the_other(
    second: str, comm: str, then: str
) -> None:
    for gradients in run_ranks(one_raises, 2, second, comm, then):
        torch.testing.assert_close(gradients[0], gradients[1])


def wraps_by_rank(rank: int, world_size: int, comm: str) -> str:
    meshes = [DeviceMesh("cpu", MESHES[name]) for name in ("shards", "replicas")]
    with pytest.raises(zshard.MismatchError) as raised:
        zshard.wrap(nn.Linear(64, 64), mesh=meshes[rank], comm=comm)
    return str(raised.value)


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_ranks_that_wrap_over_different_meshes_of_one_group_are_told(comm: str) -> None:
    for said in run_ranks(wraps_by_rank, 2, comm, timeout=20):
        assert "(replicate, shard): (1, 2) on ranks [0]; (2, 1) on ranks [1]. Pass" in said


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def leaves(rank: int, world_size: int, first: bool) -> tuple[list[str], str]:
    """Both ranks leave a collective of one; then they try to bring back either, and to wrap."""
    both = pair(rank, (None, DeviceMesh("cpu", MESHES["replicas"])), "peer")
    schedule_of(both[not first]).comm.interpose = interrupted
    with pytest.raises(KeyboardInterrupt):
        call(both[not first])
    said = []
    for model in both[::-1]:
        with pytest.raises(zshard.CommError) as raised:
            zshard.reset(model)
        said.append(str(raised.value))
    both.clear()
    del model, raised
    gc.collect()
    try:
        zshard.wrap(nn.Linear(64, 64), comm="group")
    except zshard.CommError as error:
        return said, str(error)
    return said, ""


@pytest.mark.parametrize("first", [True, False])
def test_memory_that_replicas_meet_in_is_not_brought_back(first: bool) -> None:
    for said, again in run_ranks(leaves, 2, first, timeout=20):
        assert all("cannot be brought back" in each for each in said)
        # Only what shares memory has nothing half done in the group.
        assert ("start the processes anew" in again) == (not first)


def over_hundreds(rank: int, world_size: int) -> tuple[str, str]:
    with simulated(0, 512):
        model = zshard.wrap(nn.Linear(8, 8))
        shape = init_device_mesh("cpu", (64, 8))
        replicated = zshard.wrap(nn.Linear(8, 8), mesh=shape)
        return tuple(schedule_of(each).comm.mesh_name for each in (model, replicated))


def test_the_name_of_a_mesh_of_hundreds_is_short() -> None:
    names = run_ranks(over_hundreds, 1, group=False)[0]
    assert names[0].startswith("ranks [0, 1, 2, ") and names[0].endswith(" ... (1 x 512)")
    assert names[1].startswith("ranks [[0, 1, 2, ") and names[1].endswith(" ... (64 x 8)")
    assert all(len(name) < 110 for name in names)
