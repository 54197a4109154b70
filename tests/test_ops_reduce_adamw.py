"""reduce_adamw_: the bits of reduce_peers_ and then adamw_, without a gradient in between."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from ops_check import F, Twins, assert_same, check, devices, peers_of, refuses, stats
from optim_calls import make
from torch import Tensor

from zshard import ops

RANKS = [1, 2, 3, 5]
SIZES = [0, 1, 7, 33, 4095, 4096, 4097, 12_305]
FORMS = [(None, False), (torch.bfloat16, False), (torch.float16, False), (None, True)]
SCALE = 1 / 3

every_peer_dtype = pytest.mark.parametrize("peer_dtype", F)
every_form = pytest.mark.parametrize(("send_dtype", "split"), FORMS)


def segments_of(numel: int) -> list[list[int]]:
    """Segments with gaps: small ones, empty ones, some that end and begin inside a block."""
    cuts = [1, 3, 3, 3, 17, 20, 33, 4001, 4096, 4096, 4100, 8190, 8200, 12_305]
    cuts = [min(cut, numel) for cut in cuts]
    return [[0, begin, end] for begin, end in zip(cuts[::2], cuts[1::2], strict=True)]


def arguments(
    numel: int,
    peers: list[Tensor],
    segments: list[list[int]] | None = None,
    send_dtype: torch.dtype | None = None,
    split: bool = False,
    start: int = 0,
    **tables: Tensor,
) -> dict[str, object]:
    """The arguments of a call on a random shard that lies `start` elements off alignment."""
    call = make("adamw_", [numel], segments, send_dtype=send_dtype, split=split, start=start)
    return {
        "master": call.masters[0],
        "low": call.lows[0] if split else None,
        **{name[:-1]: state[0] for name, state in call.states.items()},
        "peers": peers,
        "send": call.sends[0] if send_dtype else None,
        "segments": call.segments,
        "hypers": call.hypers,
        "steps": call.steps,
        "scale": SCALE,
        "stats": stats(),
        **tables,
    }


def in_two_calls(call: dict[str, object]) -> None:
    """Do what reduce_adamw_ does, by way of a gradient in memory."""
    rest = dict(call)
    grad = torch.empty_like(rest["exp_avg"])
    ops.reduce_peers_(grad, rest.pop("peers"), rest.pop("scale"), stats=rest.pop("stats"))
    lists = [rest.pop(name) for name in ("master", "low", "exp_avg", "exp_avg_sq")]
    send = rest.pop("send")
    shards = [[] if each is None else [each] for each in (*lists, grad, send)]
    ops.adamw_(*shards, **rest)


@devices
@every_form
@every_peer_dtype
def test_a_step_updates_its_segments_and_nothing_else(
    device: str, peer_dtype: torch.dtype, send_dtype: torch.dtype | None, split: bool
) -> None:
    for world_size in RANKS:
        for numel in SIZES:
            for start, *starts in ([0, 0], [3, 0, 1], [0, 0, 5, 8]):
                peers = peers_of(world_size, numel, peer_dtype, *starts)
                for segments in (segments_of(numel), None):
                    call = arguments(numel, peers, segments, send_dtype, split, start)
                    check("reduce_adamw_", device, **call)


@devices
@every_form
@every_peer_dtype
def test_the_bits_are_those_of_reduce_peers_and_adamw(
    device: str, peer_dtype: torch.dtype, send_dtype: torch.dtype | None, split: bool
) -> None:
    for world_size, numel in ((1, 70_003), (2, 12_305), (3, 2_400_001)):
        peers = peers_of(world_size, numel, peer_dtype, 0)
        segments = [*segments_of(numel), [0, 12_305, numel]]
        active = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.uint8)
        factor = torch.tensor([0.37])
        call = arguments(numel, peers, segments, send_dtype, split, active=active)
        call["grad_scale"] = factor
        twins = [Twins(device) for _ in range(2)]
        ops.reduce_adamw_(**{name: twins[0].of(each) for name, each in call.items()})
        in_two_calls({name: twins[1].of(each) for name, each in call.items()})
        for address, (_, ours) in twins[0].storages.items():
            assert_same(ours.cpu(), twins[1].storages[address][1].cpu())


@devices
@pytest.mark.parametrize("start", [0, 1, 32])
def test_a_large_send_buffer(device: str, start: int) -> None:
    numel = 2_400_001
    peers = peers_of(2, numel, torch.bfloat16, start, 0)
    call = arguments(numel, peers, [[0, 5, 2_400_000]], torch.bfloat16, start=start)
    check("reduce_adamw_", device, **call)


@devices
def test_more_segments_than_a_block_has_threads(device: str) -> None:
    numel = 50_000
    cuts = sorted(torch.randint(0, numel + 1, (4001,)).tolist())
    segments = [[0, begin, end] for begin, end in pairwise(cuts)]
    active = (torch.arange(4000) % 3 > 0).to(torch.uint8)
    peers = peers_of(2, numel, torch.bfloat16, 0)
    check("reduce_adamw_", device, **arguments(numel, peers, segments, active=active))


@devices
@pytest.mark.parametrize("skip", [1.0, -2.0, float("nan"), 0.0])
def test_a_nonzero_skip_changes_nothing_but_the_statistics(device: str, skip: float) -> None:
    call = arguments(5001, peers_of(3, 5001, torch.float32, 0), skip=torch.tensor([skip]))
    before = copy.deepcopy(call)
    check("reduce_adamw_", device, **call)
    assert torch.equal(call["steps"], before["steps"]) == (skip != 0.0)
    assert torch.equal(call["master"], before["master"]) == (skip != 0.0)
    assert call["stats"][0] > 0


@devices
@pytest.mark.parametrize("rank", [0, 1, 4])
def test_the_statistics_are_of_what_is_in_no_segment_too(device: str, rank: int) -> None:
    peers = peers_of(5, 5000, torch.float32, 0)
    peers[rank][4096] = math.inf
    for segments in ([[0, 0, 100]], []):
        call = arguments(5000, peers, segments)
        check("reduce_adamw_", device, **call)
        assert call["stats"].tolist() == [math.inf, 1.0]


@devices
def test_without_statistics(device: str) -> None:
    for segments in ([], None):
        call = arguments(9001, peers_of(2, 9001, torch.float16, 0), segments)
        check("reduce_adamw_", device, **call | {"stats": None})


@devices
@pytest.mark.parametrize("split", [False, True])
def test_infinities_and_nan_go_through(device: str, split: bool) -> None:
    peers = peers_of(2, 64, torch.float32, 0)
    call = arguments(64, peers, split=split)
    for at, buffer in enumerate([peers[0], call["master"], call["exp_avg"], call["exp_avg_sq"]]):
        for i, value in enumerate([math.nan, math.inf, -math.inf, 1e38, 1e-45]):
            buffer[8 * at + i] = value
    planes = [(call["master"], call["low"])] if split else []
    check("reduce_adamw_", device, planes=planes, **call)


def test_128_ranks_are_not_too_many() -> None:
    check("reduce_adamw_", "cpu", **arguments(9, peers_of(128, 9, torch.float32, 0)))


def test_errors_give_values_and_remedy() -> None:
    good = arguments(8, peers_of(2, 8, torch.float32, 0))
    half, low = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int16)
    peers = good["peers"]

    def broken(match: list[str], **changes: object) -> None:
        refuses("reduce_adamw_", **good | changes, match=match)

    broken(["peers has 0 tensors", "from 1 to 128"], peers=[])
    broken(["peers has 130 tensors", "from 1 to 128"], peers=peers * 65)
    broken(["peers[1] has 7 elements", "must have 8"], peers=[peers[0], peers[1][:7]])
    broken(["peers[1] is bfloat16", "be float32"], peers=[peers[0], half])
    broken(["peers[0] is int16", "float16"], peers=[low])
    broken(["peers are float64", "cast them"], peers=[p.double() for p in peers])
    broken(["cpu and meta", "one device"], peers=[peers[0], peers[1].to("meta")])
    broken(["master is bfloat16", "must be float32"], master=half)
    broken(["master is float32", "must be bfloat16"], low=low)
    broken(["master is", "1-D"], master=torch.zeros(2, 4))
    broken(["low is bfloat16", "int16"], master=half, low=half)
    broken(["exp_avg has 7 elements", "must have 8"], exp_avg=torch.zeros(7))
    broken(["exp_avg_sq is bfloat16", "float32"], exp_avg_sq=half)
    broken(["low and send are both given", "send=None"], master=half, low=low, send=half.clone())
    broken(["send is float32", "send=None"], send=torch.zeros(8))
    broken(["send has 7 elements"], send=half[:7])
    for name in ("master", "exp_avg", "exp_avg_sq"):
        broken([f"peers[1] and {name} share memory", "copy"], peers=[peers[0], good[name]])
    broken(["peers[0] and send share memory"], peers=[half], send=half)
    broken(["peers[0] and low share memory"], peers=[low.view(half.dtype)], master=half, low=low)
    broken(["peers[0] and master share memory"], peers=[half], master=half, low=low)
    broken(["stats is", "must be float64"], stats=torch.zeros(2))
    broken(["hypers is", "shape (1, 6)"], hypers=torch.zeros(1, 5, dtype=torch.float64))
    broken(["segments is int32"], segments=torch.zeros(1, 3, dtype=torch.int32))
    broken(["steps has 3 elements"], steps=torch.zeros(3, dtype=torch.int64))
    broken(["active is float32", "uint8"], active=torch.ones(1))
    broken(["grad_scale has 2 elements"], grad_scale=torch.ones(2))
    broken(["skip is float64", "float32"], skip=torch.ones(1).double())
    for rows, texts in [
        ([[1, 0, 1]], ["[1, 0, 1]", "outside [0, 1)"]),
        ([[0, 3, 9]], ["[0, 3, 9]", "8 elements"]),
        ([[0, 5, 4]], ["[0, 5, 4]", "8 elements"]),
        ([[0, 0, 5], [0, 4, 6]], ["[0, 0, 5] and [0, 4, 6] overlap"]),
        ([[0, 4, 6], [0, 0, 4]], ["[0, 0, 4] is behind [0, 4, 6]", "in the order"]),
    ]:
        table = {"segments": torch.tensor(rows), "hypers": good["hypers"].repeat(len(rows), 1)}
        broken(texts, **table, steps=torch.zeros(len(rows), dtype=torch.int64))
