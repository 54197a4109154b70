"""An exception on one rank in the middle of what the others wait for: they are told, or it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import Blocks
from ranks import run_ranks
from steps import batch, training_step, transport_of
from torch import nn

import zshard
from zshard import ops
from zshard.comm import Comm
from zshard.optimizers.buckets import Bucket
from zshard.step.agreement import Agreement
from zshard.step.executor import Executor
from zshard.units.pool import Pool
from zshard.wrapping.sharding import Sharder

ERRORS = {
    "Ctrl-C": KeyboardInterrupt,
    "a handler's": TimeoutError,
    "a lack of memory": torch.OutOfMemoryError,
}


def raising(owner: Any, name: str, at: int, kind: type[BaseException]) -> pytest.MonkeyPatch:
    """Have the ``at``-th call raise instead of returning; where ``at`` is negative, of beginning.

    Returns what undoes it.
    """
    patch, plain, calls = pytest.MonkeyPatch(), getattr(owner, name), []

    def raises(*args: object, **kwargs: object) -> object:
        calls.append(name)
        if len(calls) == -at:
            raise kind("the test's")
        found = plain(*args, **kwargs)
        if len(calls) == at:
            raise kind("the test's")
        return found

    patch.setattr(owner, name, raises)
    return patch


def read_whole(model: nn.Module) -> None:
    with zshard.full_params(model):
        pass


def follow(model: nn.Module) -> None:
    other = zshard.wrap(Blocks(), units="model", comm=transport_of(model), init="broadcast")
    with torch.no_grad():  # of parameters that are cut in different places
        model.blocks[0].down.weight.lerp_(other.blocks[0].down.weight, 0.5)


def clip_by_another_norm(model: nn.Module) -> None:
    zshard.clip_grad_norm_(model, 1.0, norm_type=3.0)


def unscale_a_part(model: nn.Module) -> None:
    scaler = zshard.GradScaler("cpu")
    scaler.scale(models.loss_of(model, batch(0, 0))).backward()
    scaler.unscale_(torch.optim.SGD([model.inlet.bias]))


# What rank 0 is in the middle of: strategy, steps before, action, and where it is raised.
Action = Callable[[nn.Module], object]
READS: dict[str, Action] = {
    "full_param": lambda model: zshard.full_param(model, "inlet.weight"),
    "full_params": read_whole,
    "state_dict": zshard.state_dict,
}
PLACES: dict[str, tuple[str, int, Action | None, Any, str, int]] = {
    **{name: ("zero3", 2, read, Comm, "all_gather", -1) for name, read in READS.items()},
    "an average": ("zero3", 0, follow, Comm, "all_gather", -1),
    "a norm": ("zero3", 0, clip_by_another_norm, Comm, "all_reduce", -1),
    "unscale_": ("zero3", 0, unscale_a_part, Comm, "all_reduce", -2),
    "a turn of a gather": ("zero3", 2, None, Executor, "gather", -2),
    "a turn of a reduction": ("zero3", 2, None, Executor, "reduce", -1),
    "a meeting for a gather": ("zero3", 0, None, Agreement, "serve", -2),
    "the meeting at an end": ("zero3", 0, None, Agreement, "_learn", -1),
    "a gather": ("zero3", 2, None, Comm, "all_gather", 2),
    "a gather of updates": ("zero2", 2, None, Comm, "all_gather", 1),
}


def in_the_middle(rank: int, world_size: int, comm: str, place: str, error: str) -> list[str]:
    """What is said of one exception on rank 0, and then of the same step again."""
    strategy, before, action, owner, name, at = PLACES[place]
    model = zshard.wrap(models.build("blocks"), strategy=strategy, comm=comm)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    for number in range(before):
        training_step(model, optimizer, batch(rank, number))
    said = []
    for _ in range(2):
        patch = raising(owner, name, at, ERRORS[error]) if rank == 0 and not said else None
        try:
            if action is not None:
                action(model)
            else:
                training_step(model, optimizer, batch(rank, before))
        except (zshard.Error, *ERRORS.values()) as caught:
            said.append(f"{type(caught).__name__}: {caught}")
            if patch is not None:
                patch.undo()
            if comm == "group" and (rank == 1 or len(said) == 2):
                return said
            zshard.reset(model)
            optimizer.zero_grad()
        else:
            said.append("done")
    return said


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_over_shared_memory_the_others_are_told_and_all_come_back(place: str, error: str) -> None:
    own, other = run_ranks(in_the_middle, 2, "peer", place, error, timeout=30)
    kind = ERRORS[error].__name__
    assert own == [f"{kind}: the test's", "done"]
    assert f"has left the collectives: {kind} was raised in it during" in other[0]
    assert other[1] == "done"


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_over_the_group_the_rank_takes_part_in_nothing_more(place: str, error: str) -> None:
    """Else gloo takes its next collective for this one: the process ends, or garbage comes."""
    own, other = run_ranks(in_the_middle, 2, "group", place, error, timeout=30)
    kind = ERRORS[error].__name__
    assert own[0] == f"{kind}: the test's"
    assert f"{kind} was raised in it during" in own[1] and "start the processes anew" in own[1]
    assert any(said.startswith("CommError: rank 1 of 2") for said in other)


def wrapping(rank: int, world_size: int) -> list[str]:
    """With a model there already, rank 0 is interrupted in another one's wrap; all wrap again."""
    first = zshard.wrap(Blocks(), comm="peer")
    said = []
    for _ in range(2):
        patch = raising(Sharder, "shard", -2, KeyboardInterrupt) if rank == 0 and not said else None
        try:
            second = zshard.wrap(Blocks(), comm="peer", init="broadcast")
            said.append("done")
        except (KeyboardInterrupt, zshard.CommError) as caught:
            said.append(type(caught).__name__)
            zshard.reset(first)
        finally:
            if patch is not None:
                patch.undo()
    for model in (first, second):
        models.loss_of(model, batch(rank, 0)).backward()
    return said


def test_a_wrap_that_one_rank_has_left_is_made_again() -> None:
    assert run_ranks(wrapping, 2, timeout=30) == [
        ["KeyboardInterrupt", "done"],
        ["CommError", "done"],
    ]


def built_on_one(rank: int, world_size: int, comm: str) -> list[str]:
    """Rank 0 is interrupted behind the last exchange of a wrap, which returns on the others."""
    said = []
    for _ in range(2):
        patch = raising(Pool, "reserve", -1, KeyboardInterrupt) if rank == 0 and not said else None
        try:
            model = zshard.wrap(Blocks(), comm=comm, init="broadcast")
            said.append("done")
        except KeyboardInterrupt as caught:
            said.append(type(caught).__name__)
        finally:
            if patch is not None:
                patch.undo()
    training_step(model, zshard.AdamW(model.parameters()), batch(rank, 0))
    return said


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_model_has_one_number_where_a_rank_has_left_the_wrap_of_an_earlier_one(comm) -> None:
    said = run_ranks(built_on_one, 2, comm, timeout=30)
    assert said == [["KeyboardInterrupt", "done"], ["done", "done"]]


# --- steps of the optimizer ----------------------------------------------------------------------


def stepping(rank: int, world_size: int, comm: str, where: str, ranks: tuple[int, ...]) -> str:
    """What the next read says of a step that raises on ``ranks``, before anything is written."""
    model = zshard.wrap(Blocks(), comm=comm, init="broadcast")
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    models.loss_of(model, batch(rank, 0)).backward()
    owner, name = {"arguments": (Bucket, "grads"), "op": (ops, "adamw_")}[where]
    patch = raising(owner, name, -1, KeyboardInterrupt) if rank in ranks else None
    with pytest.raises(KeyboardInterrupt) if patch is not None else nullcontext():
        optimizer.step()
    if patch is not None:
        patch.undo()
    try:
        zshard.reset(model)
        zshard.full_param(model, "inlet.weight")
    except zshard.MismatchError as error:
        return str(error)
    return "as before"


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("where", ["arguments", "op"])
def test_a_step_that_one_rank_has_not_made_is_an_error_on_all(where: str, comm: str) -> None:
    for said in run_ranks(stepping, 2, comm, where, (1,), timeout=30):
        assert "since they last met the ranks have changed" in said and "is torn" in said


def test_a_step_that_no_rank_has_begun_is_none_and_one_that_all_have_left_is_an_error() -> None:
    assert run_ranks(stepping, 2, "group", "arguments", (0, 1)) == ["as before"] * 2
    for said in run_ranks(stepping, 2, "group", "op", (0, 1)):
        assert "a step that an exception has ended: on rank 0 of 2 on rank 0; on rank 1" in said


# --- loads ---------------------------------------------------------------------------------------


class Stateful(nn.Linear):
    """Has a state of its own, which one rank cannot take."""

    refuses = False

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise ValueError("user code")


def loading(rank: int, world_size: int, comm: str, folder: str) -> list[str]:
    model = zshard.wrap(Stateful(4, 4), comm=comm, init="broadcast")
    zshard.save(folder, model)
    said = []
    for refuses in (rank == 0, False):
        model.refuses = refuses
        try:
            zshard.load(folder, model)
            said.append("loaded")
        except (ValueError, zshard.CheckpointError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_load_that_user_code_ends_on_one_rank_ends_on_all(comm: str, tmp_path: Path) -> None:
    own, other = run_ranks(loading, 2, comm, str(tmp_path / "saved"), timeout=30)
    assert own == ["ValueError: user code", "loaded"]
    assert other[0].startswith("CheckpointError: ") and "ValueError: user code" in other[0]
    assert other[1] == "loaded"
