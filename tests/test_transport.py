"""comm="auto" and "peer" at wrap: who can, who asks for what, and what one rank alone refuses."""

from __future__ import annotations

import gc
import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, simulated
from steps import transport_of
from torch.distributed.device_mesh import init_device_mesh

import zshard
from zshard.comm import Comm
from zshard.tag import Tag
from zshard.transports import discovery, transport
from zshard.wrap import schedule_of


def out_of_reach(rank: int, world_size: int, comm: str) -> str:
    """Rank 2 is on another host, as far as it can tell."""
    if rank == 2:
        discovery._check = lambda place: "no such process here"
    try:
        return transport_of(zshard.wrap(models.build("odd_parameters"), comm=comm))
    except zshard.WrapError as error:
        return str(error)


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment stands in for it."""
    monkeypatch.setenv("ZSHARD_COMM", "auto")


@pytest.mark.usefixtures("auto")
def test_a_rank_out_of_reach_is_named_on_every_rank_and_auto_takes_the_group() -> None:
    assert run_ranks(out_of_reach, 3, "auto") == ["group"] * 3
    for said in run_ranks(out_of_reach, 3, "peer"):
        assert "comm='peer': rank 2: " in said
        assert "no such process here" in said
        assert "comm='group'" in said


def out_of_reach_in_one_replica(rank: int, world_size: int) -> str:
    if rank == 3:
        discovery._check = lambda place: "no such process here"
    mesh = init_device_mesh("cpu", (2, 2))
    with pytest.raises(zshard.WrapError) as raised:
        zshard.wrap(models.build("odd_parameters"), comm="peer", mesh=mesh)
    dist.barrier()
    return str(raised.value)


def test_a_rank_out_of_reach_is_named_on_the_ranks_of_all_replicas() -> None:
    for said in run_ranks(out_of_reach_in_one_replica, 4, timeout=20):
        assert "comm='peer': rank 3: " in said
        assert "no such process here" in said


def chosen(rank: int, world_size: int, comm: str) -> str:
    return transport_of(zshard.wrap(models.build("odd_parameters"), comm=comm))


@pytest.mark.usefixtures("auto")
def test_auto_takes_shared_memory_where_every_rank_can() -> None:
    assert run_ranks(chosen, 3, "auto") == ["peer"] * 3
    assert run_ranks(chosen, 3, "group") == ["group"] * 3


def said_of(rank: int, world_size: int, variable: str, comm: str) -> str:
    if rank == 1:
        os.environ["ZSHARD_COMM"] = variable
    with pytest.raises(zshard.Error) as raised:
        chosen(rank, world_size, comm)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.usefixtures("auto")
def test_ranks_that_ask_for_different_transports_are_refused_on_every_rank() -> None:
    for said in run_ranks(said_of, 2, "group", "auto"):
        assert said.startswith("MismatchError: the ranks ask for different transports")
        assert "comm='auto' on ranks [0]; 'group' on ranks [1]." in said


def asks_in_a_part(rank: int, world_size: int) -> str:
    part = dist.new_group([1, 3])
    if rank not in (1, 3):
        return ""
    comm = "group" if rank == 1 else "peer"
    with pytest.raises(zshard.MismatchError) as raised:
        zshard.wrap(models.build("odd_parameters"), mesh=part, comm=comm)
    return str(raised.value)


def test_ranks_of_a_part_that_ask_for_different_transports_are_told_by_their_own_numbers() -> None:
    for said in run_ranks(asks_in_a_part, 4)[1::2]:
        assert "comm='group' on ranks [1]; 'peer' on ranks [3]." in said


def test_a_variable_that_names_no_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZSHARD_COMM", "pear")
    for said in run_ranks(said_of, 2, "pear", "auto"):
        assert said == "InputError: ZSHARD_COMM='pear': expected 'auto', 'group' or 'peer'"


def test_one_rank_needs_no_transport() -> None:
    assert chosen(0, 1, "peer") == "group"
    with pytest.raises(zshard.InputError, match="'auto', 'group' or 'peer'"):
        zshard.wrap(models.build("odd_parameters"), comm="pear")


def says_alone(rank: int, world_size: int, mesh_shape: tuple[int, ...]) -> str:
    """The last rank's environment names no transport, and it stands alone with it."""
    if rank == world_size - 1:
        os.environ["ZSHARD_COMM"] = "pear"
    mesh = init_device_mesh("cpu", mesh_shape)
    model = models.build("odd_parameters")
    with pytest.raises(zshard.Error) as raised:
        zshard.wrap(model, mesh=mesh)
    os.environ["ZSHARD_COMM"] = "peer"
    dist.barrier()
    assert transport_of(zshard.wrap(model, mesh=mesh)) == "peer", "the model was left as it was"
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.usefixtures("auto")
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_a_variable_that_is_wrong_on_one_rank_alone_is_refused_on_all(
    mesh_shape: tuple[int, ...],
) -> None:
    *others, own = run_ranks(says_alone, math.prod(mesh_shape), mesh_shape, timeout=30)
    wrong = "ZSHARD_COMM='pear': expected 'auto', 'group' or 'peer'"
    assert own == f"InputError: {wrong}"
    assert set(others) == {f"InputError: rank {len(others)}: {wrong}"}


def asks_in_one_replica(rank: int, world_size: int) -> str:
    if rank >= 2:
        os.environ["ZSHARD_COMM"] = "group"
    with pytest.raises(zshard.MismatchError) as raised:
        zshard.wrap(models.build("odd_parameters"), mesh=init_device_mesh("cpu", (2, 2)))
    return str(raised.value)


@pytest.mark.usefixtures("auto")
def test_replicas_that_ask_for_different_transports_are_refused_on_every_rank() -> None:
    for said in run_ranks(asks_in_one_replica, 4, timeout=30):
        assert "comm='auto' on ranks [0, 1]; 'group' on ranks [2, 3]." in said


MISTAKES = {
    "an option": {"prefetch": -1},
    "a unit": {"units": ["nobody"]},
    "a parameter": {"ignored": ["nobody"]},
    "a callable": {"strategy": lambda name, module: 1 // 0},
    "a parameter's dtype": {},
}


def mistakes_one(rank: int, world_size: int, comm: str, which: str) -> str:
    model = models.build("odd_parameters")
    if rank == 1 and which == "a parameter's dtype":
        model.odd = torch.nn.Parameter(torch.zeros(3, dtype=torch.int32), requires_grad=False)
    before = {name: id(param) for name, param in model.named_parameters()}
    with pytest.raises((zshard.Error, ZeroDivisionError)) as raised:
        zshard.wrap(model, comm=comm, **(MISTAKES[which] if rank == 1 else {}))
    assert {name: id(param) for name, param in model.named_parameters()} == before
    if rank == 1 and which == "a parameter's dtype":
        del model.odd
    zshard.wrap(model, comm=comm)(models.batches("odd_parameters", 1, rank)[0])
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("which", MISTAKES)
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_what_one_rank_finds_wrong_before_it_wraps_is_an_error_on_all(
    comm: str, which: str
) -> None:
    other, own = run_ranks(mistakes_one, 2, comm, which, timeout=30)
    kind, _, text = own.partition(": ")
    if kind == "ZeroDivisionError":
        kind, text = "WrapError", own
    assert other == f"{kind}: rank 1: {text}"


def let_go(rank: int, world_size: int) -> list[bool]:
    """Whether what is lent, and the group, are there; and whether they have gone."""
    gc.collect()
    gc.disable()
    group = dist.new_group(list(range(world_size)))
    shards = Comm(group, torch.device("cpu"), "peer").shards
    shards.empty(1 << 20, torch.float32)
    held = [weakref.ref(shards), weakref.ref(group)]
    before = [ref() is not None for ref in held]
    del shards
    dist.destroy_process_group(group)
    del group
    gc.enable()
    return before + [ref() is None for ref in held]


def test_what_is_lent_goes_at_once_and_no_cycle_keeps_the_group() -> None:
    assert run_ranks(let_go, 2) == [[True] * 4] * 2


def said_in_a_child(model: torch.nn.Module, x: torch.Tensor) -> str:
    """The error that the model gives in a forked process; "" for none."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            model(x)
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    said = os.read(reader, 4096).decode()
    os.close(reader)
    return said


def forked(rank: int, world_size: int, comm: str) -> tuple[str, float]:
    """A child of rank 0 calls the model."""
    model = zshard.wrap(torch.nn.Linear(4, 4), comm=comm)
    x = torch.ones(1, 4)
    return said_in_a_child(model, x) if rank == 0 else "", float(model(x).sum())


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_forked_child_is_refused_and_its_parent_goes_on(comm: str) -> None:
    (said, first), (_, second) = run_ranks(forked, 2, comm, timeout=30)
    assert said.startswith("CommError") and "this process was forked from a rank" in said
    assert first == second


def forked_alone(rank: int, world_size: int) -> list[str]:
    """What a child says that calls a model of one rank, and one of simulated ranks."""
    x = torch.ones(1, 4)
    said = [said_in_a_child(zshard.wrap(torch.nn.Linear(4, 4)), x)]
    with simulated(0, 4):
        said.append(said_in_a_child(zshard.wrap(torch.nn.Linear(4, 4)), x))
    return said


def test_a_forked_child_that_needs_nobody_computes() -> None:
    assert run_ranks(forked_alone, 1, group=False) == [["", ""]]


def more_than_most(rank: int, world_size: int) -> tuple[list[str], str]:
    chosen = []
    for transport._MOST_RANKS in (3, 2):
        chosen.append(transport_of(zshard.wrap(torch.nn.Linear(4, 4), comm="auto")))
    with pytest.raises(zshard.WrapError) as refused:
        zshard.wrap(torch.nn.Linear(4, 4), comm="peer")
    return chosen, str(refused.value)


@pytest.mark.usefixtures("auto")
def test_more_ranks_than_can_read_each_other_take_the_group() -> None:
    ops = (Path(__file__).parents[1] / "csrc" / "ops.h").read_text()
    assert f"kMaxPeers = {transport._MOST_RANKS};" in ops
    for chosen, refused in run_ranks(more_than_most, 3):
        assert chosen == ["peer", "group"]
        assert "3 ranks, where 2 is the most" in refused


def lack_of_a_device() -> None:
    raise torch.OutOfMemoryError("no room")


def lack_of_the_host() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("lack", [lack_of_a_device, lack_of_the_host])
def test_what_a_rank_lacks_is_not_put_down_to_other_ranks(lack: Callable[[], None]) -> None:
    comm = schedule_of(zshard.wrap(torch.nn.Linear(4, 4))).comm
    said = r"all_gather in gather of unit 'root'(.|\n)*This rank is out of memory"
    named = comm.named_errors("all_gather", Tag(0, "gather", "root"))
    with pytest.raises(zshard.CommError, match=said) as caught, named:
        lack()
    assert "Another rank" not in str(caught.value)


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        (Tag(3, "gather", "blocks.0"), "gather of unit 'blocks.0' in step 3"),
        (Tag(0, "reduce", "root", "norm"), "reduce of unit 'root' (norm) in step 0"),
        (
            Tag(2, "agree", "root", "a call"),
            "agree of unit 'root' (the meeting for a call) in step 2",
        ),
        (Tag(None, "wrap", "blocks.0"), "wrap of unit 'blocks.0'"),
        (Tag(None, "wrap", about="hosts"), "wrap (hosts)"),
        (Tag(None, "load(x)"), "load(x)"),
    ],
)
def test_errors_name_a_unit_and_a_step_only_where_there_is_one(tag: Tag, said: str) -> None:
    assert str(tag) == said


@pytest.mark.parametrize("size", ["1", "2"])
def test_one_of_several_ranks_without_a_group_is_warned_of_being_wrapped_alone(
    size: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    assert zshard.wrap(torch.nn.Linear(2, 2))(torch.ones(1, 2)).shape == (1, 2)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if size == "1":
        assert not warned
    else:
        assert len(warned) == 1 and "WORLD_SIZE=2" in warned[0]
        assert "init_process_group before zshard.wrap" in warned[0]
    monkeypatch.delenv("RANK")
    zshard.wrap(torch.nn.Linear(2, 2))
    assert len(caplog.records) == len(warned)
