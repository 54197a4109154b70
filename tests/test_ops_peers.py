"""gather_cast_ and reduce_peers_: the same bits as the ops on one tensor, wherever the rows lie."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from ops_check import F, assert_same, check, devices, odd, peers_of, refuses, stats
from torch import Tensor

from zshard import ops

RANKS = [1, 2, 3, 5]
SIZES = [0, 1, 7, 33, 4096, 10_007]


# --- gather_cast_ ---


@devices
@pytest.mark.parametrize("shard_dtype", F)
@pytest.mark.parametrize("full_dtype", F)
def test_every_shard_comes_to_its_part_of_full(
    device: str, full_dtype: torch.dtype, shard_dtype: torch.dtype
) -> None:
    for world_size in RANKS:
        for numel in SIZES:
            for start, *starts in ([0, 0], [1, 0], [0, 3, 8], [5, 5, 0, 1]):
                full = odd(world_size * numel, full_dtype, start)
                shards = peers_of(world_size, numel, shard_dtype, *starts)
                check("gather_cast_", device, full, shards)


@devices
@pytest.mark.parametrize("shard_dtype", F)
@pytest.mark.parametrize("full_dtype", F)
def test_gather_into_a_large_buffer(
    device: str, full_dtype: torch.dtype, shard_dtype: torch.dtype
) -> None:
    for start, *starts in ([0, 0], [3, 1, 0]):
        full = odd(3 * 1_000_001, full_dtype, start)
        check("gather_cast_", device, full, peers_of(3, 1_000_001, shard_dtype, *starts))


@devices
def test_gather_float64(device: str) -> None:
    wide = [torch.randn(5001, dtype=torch.float64) for _ in range(3)]
    check("gather_cast_", device, torch.empty(3 * 5001), wide)
    check("gather_cast_", device, torch.empty(3 * 5001, dtype=torch.float64), wide)
    narrow = peers_of(3, 5001, torch.float32, 1)
    check("gather_cast_", device, torch.empty(3 * 5001, dtype=torch.float64), narrow)


@devices
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_shard_that_is_its_part_of_full_stays(device: str, rank: int) -> None:
    for numel in (0, 5, 40_000, 1_000_001):
        full = odd(3 * numel, torch.bfloat16)
        shards = peers_of(3, numel, torch.bfloat16, 0, 3)
        shards[rank] = full[rank * numel : (rank + 1) * numel]
        check("gather_cast_", device, full, shards)


def test_the_part_in_place_is_neither_read_nor_written() -> None:
    # Its page is closed to the process, which any access would end.
    script = """
import ctypes, mmap, torch
from zshard import ops
memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
full = torch.frombuffer(memory, dtype=torch.bfloat16)
shards = list(full.chunk(3))
shards[0] = shards[2] = torch.ones(len(shards[1]), dtype=torch.bfloat16)
at = ctypes.c_void_p(shards[1].data_ptr())
assert ctypes.CDLL(None).mprotect(at, mmap.PAGESIZE, 0) == 0
ops.gather_cast_(full, shards)
print((full.chunk(3)[0] == 1).all().item(), (full.chunk(3)[2] == 1).all().item())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


def test_gather_errors_give_values_and_remedy() -> None:
    full, shards = torch.zeros(12), [torch.randn(6), torch.randn(6)]
    half = [shard.bfloat16() for shard in shards]

    def gather_refuses(full: Tensor, *shards: Tensor, match: list[str]) -> None:
        refuses("gather_cast_", full, list(shards), match=match)

    gather_refuses(full, match=["shards has 0 tensors", "from 1 to 128"])
    gather_refuses(full, *shards * 65, match=["shards has 130 tensors", "from 1 to 128"])
    gather_refuses(full, *shards[:1], match=["full has 12 elements", "1 shards of 6 fill 6"])
    gather_refuses(full[1:], *shards, match=["full has 11 elements", "2 shards of 6 fill 12"])
    gather_refuses(full, shards[0], shards[1][1:], match=["shards[1] has 5 elements", "have 6"])
    gather_refuses(full.view(2, 6), *shards, match=["full is", "shape (2, 6)", "1-D"])
    gather_refuses(full, shards[0], full[::2], match=["shards[1] is", "strides (2,)", "contiguous"])
    gather_refuses(full, shards[0], half[1], match=["shards[1] is bfloat16", "must be float32"])
    gather_refuses(full, *(s.int() for s in shards), match=["shards[0] is int32", "float16"])
    gather_refuses(full.int(), *shards, match=["full is int32", "float16"])
    gather_refuses(full.double(), *half, match=["full is float64", "shards is bfloat16", "through"])
    gather_refuses(full.half(), *(s.double() for s in shards), match=["shards is float64"])
    gather_refuses(full, shards[0], shards[1].to("meta"), match=["cpu and meta", "one device"])
    # A part of full in the wrong place, beside its place, or of another dtype.
    for wrong in (full[6:], full[1:7], full.view(torch.int32).view(torch.float32)[3:9]):
        gather_refuses(full, wrong, shards[1], match=["shards[0] and full share memory", "copy"])
    same_place = half[0].new_zeros(12)
    gather_refuses(same_place, same_place.view(torch.float16)[:6], half[1].half(), match=["share"])


def test_128_ranks_are_not_too_many() -> None:
    check("gather_cast_", "cpu", torch.zeros(128 * 3), peers_of(128, 3, torch.float32, 0))
    check("reduce_peers_", "cpu", torch.zeros(9), peers_of(128, 9, torch.float32, 0))


# --- reduce_peers_ ---


@devices
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("peer_dtype", F)
@pytest.mark.parametrize("acc_dtype", F)
def test_peers_are_summed_in_rank_order(
    device: str, acc_dtype: torch.dtype, peer_dtype: torch.dtype, accumulate: bool
) -> None:
    for world_size in RANKS:
        for numel in SIZES:
            for start, *starts in ([0, 0], [3, 0, 1], [0, 0, 5, 8]):
                acc = odd(numel, acc_dtype, start)
                peers = peers_of(world_size, numel, peer_dtype, *starts)
                check("reduce_peers_", device, acc, peers, 1 / 3, accumulate, stats())
                check("reduce_peers_", device, acc, peers, 1.0, accumulate)


@devices
@pytest.mark.parametrize("dtype", [*F, torch.float64])
def test_peers_give_the_bits_of_reduce(device: str, dtype: torch.dtype) -> None:
    for world_size in RANKS:
        for numel in (*SIZES, 2_200_003):
            chunks = torch.randn(world_size, numel).to(device, dtype)
            acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
            acc = torch.randn(numel).to(device, acc_dtype)
            for accumulate in (False, True):
                found = [(acc.clone(), stats().to(device)) for _ in range(2)]
                ops.reduce_(found[0][0], chunks, 1 / 3, accumulate, found[0][1])
                rows = [chunk.clone() for chunk in chunks]
                ops.reduce_peers_(found[1][0], rows, 1 / 3, accumulate, found[1][1])
                assert_same(found[1][0].cpu(), found[0][0].cpu())
                assert_same(found[1][1].cpu(), found[0][1].cpu())


@devices
@pytest.mark.parametrize("rank", [0, 1, 4])
def test_a_value_of_any_peer_that_is_not_finite_raises_the_flag(device: str, rank: int) -> None:
    peers = [torch.randn(5000, device=device) for _ in range(5)]
    peers[rank][4096] = math.inf
    found = stats().to(device)
    ops.reduce_peers_(torch.empty(5000, device=device), peers, stats=found)
    assert found.tolist() == [math.inf, 1.0]


@devices
def test_the_rows_of_one_tensor_may_be_more_than_peers(device: str) -> None:
    check("reduce_", device, torch.zeros(5), torch.randn(300, 5), 0.5, False, stats())
    check("reduce_", device, torch.zeros(0), torch.randn(300, 0), 0.5, False, stats())


def test_reduce_errors_give_values_and_remedy() -> None:
    acc, peers = torch.empty(6), [torch.randn(6), torch.randn(6)]

    def reduce_refuses(acc: Tensor, *peers: Tensor, match: list[str], **kwargs: object) -> None:
        refuses("reduce_peers_", acc, list(peers), match=match, **kwargs)

    reduce_refuses(acc, match=["peers has 0 tensors", "from 1 to 128"])
    reduce_refuses(acc, *peers * 65, match=["peers has 130 tensors", "from 1 to 128"])
    reduce_refuses(acc, peers[0], peers[1][:5], match=["peers[1] has 5 elements", "must have 6"])
    reduce_refuses(acc[:5], *peers, match=["peers[0] has 6 elements", "must have 5"])
    reduce_refuses(acc.view(2, 3), *peers, match=["acc is", "shape (2, 3)", "1-D"])
    reduce_refuses(acc, torch.randn(2, 6), match=["peers[0] is", "shape (2, 6)", "1-D"])
    reduce_refuses(acc, peers[0], peers[1].half(), match=["peers[1] is float16", "be float32"])
    reduce_refuses(acc, *(p.int() for p in peers), match=["peers[0] is int32", "float16"])
    reduce_refuses(acc.int(), *peers, match=["acc is int32", "float16"])
    reduce_refuses(acc.double(), *peers, match=["acc is float64", "peers is float32", "only into"])
    reduce_refuses(acc, *(p.double() for p in peers), match=["peers is float64", "only into"])
    reduce_refuses(acc, peers[0], peers[1].to("meta"), match=["cpu and meta", "one device"])
    reduce_refuses(acc, peers[0], acc, match=["peers[1] and acc share memory", "copy"])
    both = torch.empty(7)
    reduce_refuses(both[:6], both[1:], match=["peers[0] and acc share memory"])
    reduce_refuses(acc, *peers, stats=torch.zeros(2), match=["stats is", "must be float64"])
    reduce_refuses(acc, *peers, stats=stats()[:1], match=["stats has 1 elements", "2"])
