"""comm="peer" and "auto" with too little memory to share: on all ranks the same, nothing lost."""

from __future__ import annotations

import errno
import gc
import logging
import math
import os
import re
import resource
import signal
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_peer_interrupt import VICTIM, Interrupt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from training import Record, Wrapped, adamw, assert_same_bits, train

import zshard
from zshard.transports import shared
from zshard.units.pool import Pool
from zshard.wrap import schedule_of

PRECISIONS = {
    "fp32": None,
    "bf16": zshard.Precision.bf16(),
    "split": zshard.Precision.bf16(master="split"),
}


def shared_bytes() -> int:
    """Bytes of shared memory that are mapped here, and files of it that are open."""
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if "memfd:zshard" in line]
    return opened("memfd:zshard") + sum(int(end, 16) - int(begin, 16) for begin, end in spans)


def opened(what: str) -> int:
    """Descriptors of it."""
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(what in os.readlink(path) for path in paths if os.path.islink(path))


class Lack:
    """From the ``first`` request of this process on, there are no pages left."""

    def __init__(self, first: int) -> None:
        self.left, self.reserve, self.refused = first, os.posix_fallocate, 0
        os.posix_fallocate = self.ask

    def ask(self, opened: int, begin: int, nbytes: int) -> None:
        self.left -= 1
        if self.left < 0:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.reserve(opened, begin, nbytes)


def wide() -> nn.Module:
    """Three units, each of more than a small extent, and an empty root."""
    torch.manual_seed(0)
    sizes = (900, 901, 902, 900)
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))


class Found(NamedTuple):
    record: Record
    warnings: list[str]
    in_memory: bool
    shared: int  # bytes, after wrap
    processes: int  # that are watched, then
    refused: int  # requests for memory of this rank


def trained(comm: str, strategy: str, precision: str, mesh: object, lack: Lack | None) -> Found:
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zshard").addHandler(handler)
    policy = PRECISIONS[precision]
    gc.disable()  # what is let go is let go at once
    model = zshard.wrap(
        wide(), comm=comm, strategy=strategy, precision=policy, units="layer", mesh=mesh
    )
    shared, processes = shared_bytes(), opened("pidfd")
    gc.enable()
    torch.manual_seed(dist.get_rank())
    data = list(torch.randn(2, 2, 900, dtype=torch.float32 if policy is None else torch.bfloat16))
    optimizer = adamw(model) if precision != "split" else zshard.AdamW(model.parameters(), lr=1e-2)
    record = train(Wrapped(model), optimizer, data)
    in_memory = schedule_of(model).comm.shards.in_memory
    refused = 0 if lack is None else lack.refused
    return Found(record, warnings, in_memory, shared, processes, refused)


def falls_back(
    rank: int, world_size: int, strategy: str, precision: str, shape: tuple[int, ...], first: int
) -> list[Found]:
    """The last rank has memory for ``first`` extents."""
    os.environ["ZSHARD_COMM"] = "auto"
    mesh = init_device_mesh("cpu", shape)
    group = trained("group", strategy, precision, mesh, None)
    gc.collect()
    lack = Lack(first) if rank == world_size - 1 else None
    return [group, trained("auto", strategy, precision, mesh, lack)]


# What is asked for, in this order: the mailbox, small things, each unit, two reduce buffers.
@pytest.mark.parametrize(
    ("strategy", "precision", "shape", "first"),
    [
        *(("zero3", "fp32", (2,), first) for first in (0, 1, 2, 4, 6)),
        *(("zero2", precision, (2,), 4) for precision in PRECISIONS),
        *(("zero3", precision, (2,), 3) for precision in ("bf16", "split")),
        ("ddp", "fp32", (2,), 3),
        *(("zero3", "fp32", (2, 2), first) for first in (0, 3, 6)),
    ],
)
def test_auto_takes_the_group_on_all_ranks_where_one_lacks_memory(
    strategy: str, precision: str, shape: tuple[int, ...], first: int
) -> None:
    world_size = math.prod(shape)
    found = run_ranks(falls_back, world_size, strategy, precision, shape, first)
    assert found[-1][1].refused == 1
    for group, auto in found:
        assert_same_bits(auto.record, group.record)
        assert not auto.in_memory
        assert auto.shared == group.shared == 0
        assert auto.processes == group.processes == 2 * len(shape), "by axis, none of them twice"
    (said,) = [text for _, auto in found for text in auto.warnings]
    assert f"comm='group', because of rank {world_size - 1}:" in said
    assert os.strerror(errno.ENOSPC) in said
    assert re.search(r"Each of the 2 ranks needs \d+ bytes more", said)


def with_little_memory(rank: int, world_size: int, where: str) -> tuple[str, int]:
    """Files, those in memory too, may grow to 4 MiB; or the last rank's node has no pages left."""
    if where == "file" and rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
    if where == "pages" and rank == 1:

        def reserve(opened: int, begin: int, nbytes: int) -> None:
            if nbytes >= 4 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.posix_fallocate = reserve
    with pytest.raises(zshard.WrapError) as raised:
        zshard.wrap(torch.nn.Linear(2048, 2048), comm="peer")
    return str(raised.value), opened("memfd:zshard")


@pytest.mark.parametrize(("where", "rank", "error"), [("file", 0, "EFBIG"), ("pages", 1, "ENOSPC")])
def test_too_little_memory_is_an_error_on_every_rank_that_says_how_much_is_needed(
    where: str, rank: int, error: str
) -> None:
    shard = 4 * (2048 * 2048 + 2048) // 2
    for said, left_open in run_ranks(with_little_memory, 2, where):
        assert f"rank {rank}: no shared memory" in said
        assert os.strerror(getattr(errno, error)) in said
        needed = int(said.split("needs ")[1].split()[0])
        assert shard <= needed < shard + 16384, "in whole pages"
        assert left_open == 0


def reserved(rank: int, world_size: int) -> list[tuple[int, int]]:
    asked = list[tuple[int, int]]()
    reserve = os.posix_fallocate

    def ask(opened: int, begin: int, nbytes: int) -> None:
        asked.append((begin, nbytes))
        reserve(opened, begin, nbytes)

    os.posix_fallocate = ask
    zshard.wrap(torch.nn.Linear(2048, 2048), comm="peer")
    return asked


def test_memory_is_reserved_in_pieces_that_a_timer_leaves_time_for() -> None:
    for rank, asked in enumerate(run_ranks(reserved, 2)):
        assert max(nbytes for _, nbytes in asked) == shared._PIECE
        first = asked.index(next(each for each in asked if each[1] == shared._PIECE))
        begins, sizes = zip(*asked[first : first + 3], strict=True)  # of the shard
        shard = 4 * (2048 * 2048 + 2048) // 2
        assert shard <= sum(sizes) < shard + 16384, "in whole pages"
        assert [begin - rank * sum(sizes) for begin in begins] == [0, sizes[0], 2 * sizes[0]]


def refused(rank: int, world_size: int, shape: tuple[int, ...], first: int) -> str:
    """The last rank has memory for ``first`` extents; the model is wrapped again afterwards."""
    mesh = init_device_mesh("cpu", shape)
    model, x = wide(), torch.ones(1, 900)
    before = {name: (id(param), param.detach().clone()) for name, param in model.named_parameters()}
    wanted = model(x).detach()
    gc.disable()
    lack = Lack(first) if rank == world_size - 1 else None
    try:
        zshard.wrap(model, comm="peer", units="layer", mesh=mesh)
    except zshard.WrapError as error:
        said = str(error)
    assert shared_bytes() == 0
    gc.enable()
    gc.collect()
    assert opened("pidfd") == 0
    for name, param in model.named_parameters():
        assert (type(param), id(param)) == (nn.Parameter, before[name][0])
        assert torch.equal(param, before[name][1])
    assert torch.equal(model(x), wanted)
    if lack is not None:
        lack.left = 100
    wrapped = zshard.wrap(model, comm="peer", units="layer", mesh=mesh)
    assert schedule_of(wrapped).comm.shards.in_memory
    assert torch.equal(wrapped(x), wanted)
    return said


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("first", [0, 2, 4, 6])
def test_peer_is_refused_on_all_ranks_where_one_lacks_memory_and_nothing_is_left(
    shape: tuple[int, ...], first: int
) -> None:
    world_size = math.prod(shape)
    for said in run_ranks(refused, world_size, shape, first, timeout=40):
        assert said.startswith(f"rank {world_size - 1}: no shared memory for comm='peer'")


def thawed(rank: int, world_size: int, shape: tuple[int, ...]) -> list[list[float]]:
    """The largest unit is trained later, when the last rank has no memory for its gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(40, 600), nn.Linear(600, 900), nn.Linear(900, 2))
    plain[1].requires_grad_(False)
    model = zshard.wrap(
        plain, comm="peer", units="layer", mesh=init_device_mesh("cpu", shape), init="trust"
    )
    optimizer = zshard.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    lack = Lack(1) if rank == world_size - 1 else None
    model[1].requires_grad_(True)
    said = []
    for _ in range(2):
        with pytest.raises(zshard.WrapError) as raised:
            step()
        said.append(str(raised.value))
        del raised
        gc.collect()  # the graph, so that the next backward is of the same kind
        zshard.full_param(model, "0.bias")  # where the ranks learn what one of that kind gathers
        zshard.reset(model)
    assert said[0] == said[1]
    assert "no shared memory for comm='peer'" in said[0]
    if lack is not None:
        lack.left = 100
    model.zero_grad()
    step()
    step()
    memory = zshard.memory(model)["now"]["reduce_buffers"]
    assert memory == schedule_of(model).pool.scratch_bytes
    return [zshard.full_param(model, name).flatten()[:5].tolist() for name in ("0.bias", "1.bias")]


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_a_lack_of_memory_after_wrap_is_an_error_on_all_ranks_and_all_go_on(
    shape: tuple[int, ...],
) -> None:
    first, *others = run_ranks(thawed, math.prod(shape), shape, timeout=40)
    assert all(other == first for other in others)


def thaws_interrupted(
    rank: int, world_size: int, sizes: list[int], waits: range
) -> list[tuple[str, float]]:
    """Interrupted in a wait as reduce buffers grow: how it ended, and a gradient after a reset."""
    found = []
    for at in waits:
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))
        plain[1].requires_grad_(False)
        model = zshard.wrap(plain, comm="peer", units="layer", init="trust")
        model(torch.ones(2, sizes[0])).square().mean().backward()
        model[1].requires_grad_(True)
        interrupt, end = Interrupt(), ""
        interrupt.at = at if rank == VICTIM else -1
        try:
            model(torch.ones(2, sizes[0])).square().mean().backward()
        except (KeyboardInterrupt, zshard.CommError) as error:
            end = type(error).__name__
        interrupt.end()
        zshard.reset(model)
        model(torch.ones(2, sizes[0])).square().mean().backward()
        grad = zshard.full_grad(model, "1.bias")
        assert grad is not None
        found.append((end, float(grad.sum())))
    return found


@pytest.mark.parametrize(
    ("sizes", "waits"), [([40, 5, 40, 2], range(4, 8)), ([40, 600, 900, 2], range(9, 17))]
)
def test_buffers_that_one_rank_alone_has_made_larger_are_made_by_all_after_a_reset(
    sizes: list[int], waits: range
) -> None:
    for rank, found in enumerate(run_ranks(thaws_interrupted, 2, sizes, waits, timeout=60)):
        ends, grads = zip(*found, strict=True)
        assert {*ends} == {"KeyboardInterrupt" if rank == VICTIM else "CommError"}
        assert len({*grads}) == 1


def no_room_beside(rank: int, world_size: int) -> list[float]:
    """The last rank lacks memory that is not shared, in the first backward of a larger unit."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 9))
    plain[1].requires_grad_(False)
    model, make = zshard.wrap(plain, comm="peer", units="layer"), Pool.make_scratch
    model[1].requires_grad_(True)

    def fails(pool: Pool) -> None:
        Pool.make_scratch = make
        make(pool)
        if rank == world_size - 1:
            raise torch.OutOfMemoryError

    Pool.make_scratch = fails
    with pytest.raises((torch.OutOfMemoryError, zshard.WrapError), match=r"OutOfMemory|^$"):
        model(torch.ones(2, 4)).sum().backward()
    model(torch.ones(2, 4)).sum().backward()
    grad = zshard.full_grad(model, "1.bias")
    return [] if grad is None else grad.tolist()


def test_another_lack_of_memory_after_wrap_is_told_to_all_ranks_and_all_go_on() -> None:
    assert run_ranks(no_room_beside, 2, timeout=20) == [[2.0] * 9] * 2
