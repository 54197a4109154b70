"""HSDP over a mesh whose ranks are not in ascending order, while torch's groups sort theirs."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import models
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zshard


def one_step(rank: int, world_size: int, rows: Sequence[Sequence[int]], comm: str) -> str:
    """The refusal; "" once a step has equalled the plain model's."""
    plain, model = models.build("odd_parameters"), models.build("odd_parameters")
    try:
        zshard.wrap(model, mesh=DeviceMesh("cpu", rows), comm=comm)
    except zshard.InputError as error:
        return str(error)
    for place in range(world_size):
        loss = plain(models.batches("odd_parameters", 1, place)[0]).square().mean()
        (loss / world_size).backward()
    model(models.batches("odd_parameters", 1, rank)[0]).square().mean().backward()
    for name, param in plain.named_parameters():
        grad = zshard.full_grad(model, name)
        assert (grad is None) == (param.grad is None), name
        if grad is not None:
            torch.testing.assert_close(grad, param.grad)
    return ""


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("rows", [[[0, 2], [1, 3]], [[3, 1], [2, 0]], [[1, 0], [3, 2]]])
def test_rows_and_columns_in_one_order_each_train_as_the_plain_model(
    rows: Sequence[Sequence[int]], comm: str
) -> None:
    assert run_ranks(one_step, 4, rows, comm) == [""] * 4


@pytest.mark.parametrize(
    ("rows", "said"),
    [([[0, 1], [3, 2]], "its rows have"), ([[0, 3], [1, 2]], "its columns have")],
)
def test_rows_or_columns_in_different_orders_are_refused_on_every_rank(
    rows: Sequence[Sequence[int]], said: str
) -> None:
    for refusal in run_ranks(one_step, 4, rows, "auto"):
        assert str(rows) in refusal and said in refusal


def outside(rank: int, world_size: int, ranks: Sequence[object]) -> None:
    mesh = DeviceMesh("cpu", ranks)
    if rank == 1:
        with pytest.raises(zshard.InputError, match=r"mesh=\[.*0.*\]: this rank is not in it"):
            zshard.wrap(nn.Linear(3, 2), mesh=mesh)


@pytest.mark.parametrize("ranks", [[0], [[0]]], ids=str)
def test_a_rank_that_is_not_in_the_mesh_is_told_so(ranks: Sequence[object]) -> None:
    run_ranks(outside, 2, ranks)


@pytest.mark.parametrize("mesh", [torch.tensor([0, 1]), [0, 1], 1], ids=str)
def test_what_is_no_mesh_is_refused(mesh: object) -> None:
    with pytest.raises(zshard.InputError, match=r"mesh=.*1.*: expected None, a ProcessGroup, or"):
        zshard.wrap(nn.Linear(3, 2), mesh=mesh)


def in_no_group(rank: int, world_size: int) -> None:
    group = torch.distributed.new_group([0])
    if rank == 1:
        with pytest.raises(zshard.InputError, match="mesh: this rank is not a member of the"):
            zshard.wrap(nn.Linear(3, 2), mesh=group)


def test_a_rank_that_is_not_in_the_group_is_told_so() -> None:
    run_ranks(in_no_group, 2)


def raises_on_one(rank: int, world_size: int) -> str:
    model, x = zshard.wrap(nn.Linear(3, 2), mesh=DeviceMesh("cpu", [[2, 3], [0, 1]])), torch.ones(3)
    with zshard.no_sync(model):
        out = model(x)
        if rank == 2:
            out.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError) if rank == 2 else nullcontext():
            out.sum().backward()
    model(x).sum().backward()
    with pytest.raises(zshard.StateError) as raised:
        zshard.clip_grad_norm_(model, 1.0)
    return str(raised.value)


def test_a_rank_whose_backward_has_raised_is_named_by_its_number_among_all() -> None:
    for said in run_ranks(raises_on_one, 4):
        assert said.startswith("on rank 2 a backward of this step"), said


def misfits(
    rank: int,
    world_size: int,
    rows: Sequence[int] | Sequence[Sequence[int]],
    misfit: int,
    comm: str,
) -> list[str]:
    """What a rank is told where process ``misfit`` does as the others do not."""
    mesh = DeviceMesh("cpu", rows)
    if mesh.get_coordinate() is None:
        return []
    said = []
    model = models.build("odd_parameters")
    if rank == misfit:
        with torch.no_grad():
            next(model.parameters()).add_(1)
    with pytest.raises(zshard.MismatchError) as values:
        zshard.wrap(model, mesh=mesh, comm=comm)
    said.append(str(values.value))
    kind, units = (ArithmeticError, one_fails) if rank == misfit else (zshard.WrapError, None)
    with pytest.raises(kind) as refused:
        zshard.wrap(nn.Linear(2, 2), mesh=mesh, comm=comm, units=units)
    said.append(str(refused.value))
    model = zshard.wrap(models.build("odd_parameters"), mesh=mesh, comm=comm)
    with pytest.raises(zshard.MismatchError) as begun:
        if rank == misfit:
            zshard.full_grad(model, next(name for name, _ in model.named_parameters()))
        else:
            model(models.batches("odd_parameters", 1, rank)[0])
    said.append(str(begun.value))
    return said


def one_fails(name: str, module: nn.Module) -> bool:
    raise ArithmeticError("no unit")


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize(
    ("rows", "misfit"), [([1, 3], 3), ([[0, 2], [1, 3]], 2), ([[2, 0], [3, 1]], 2)]
)
def test_errors_number_the_ranks_as_torch_does(
    rows: Sequence[int] | Sequence[Sequence[int]], misfit: int, comm: str
) -> None:
    first, *others = sorted(torch.tensor(rows).flatten().tolist())
    told = run_ranks(misfits, 4, rows, misfit, comm)
    for rank in (first, *others):
        values, refused, begun = told[rank]
        assert f"rank {first} and rank {misfit} have different values" in values
        whose = "" if rank == misfit else f"rank {misfit}: ArithmeticError: "
        assert refused == f"{whose}no unit"
        assert f"rank {misfit}: full_grad" in begun and f"rank {first}: a forward" in begun


def fails_to_save(rank: int, world_size: int, misfit: int, folder: str) -> str:
    model = zshard.wrap(models.build("odd_parameters"), mesh=DeviceMesh("cpu", [[2, 0], [3, 1]]))

    def refused(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken")

    with pytest.MonkeyPatch.context() as patch:
        if rank == misfit:
            patch.setattr(os, "fsync", refused)
        with pytest.raises(zshard.CheckpointError) as caught:
            zshard.save(f"{folder}/a", model, asynchronous=True).wait()
    return str(caught.value)


@pytest.mark.parametrize("misfit", [1, 2])
def test_a_failure_in_the_background_is_told_of_the_rank_that_it_was_on(
    misfit: int, tmp_path: Path
) -> None:
    for rank, said in enumerate(run_ranks(fails_to_save, 4, misfit, str(tmp_path))):
        assert "broken" in said and said.startswith(f"rank {misfit}: ") == (rank != misfit)
