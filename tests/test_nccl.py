"""What the seam asks of a backend, asked directly: of NCCL where there is a GPU, else of gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ops_check import devices
from ranks import run_ranks
from test_peer import STRATEGIES, trained
from test_symmetric import in_the_group
from torch import Tensor
from training import Record, assert_close, assert_same_bits

from zshard.streams import Lane, compute_waits
from zshard.transports.groups import Ranks
from zshard.transports.messages import Work


def on_lane(rank: int, world_size: int, device_type: str) -> dict[str, Tensor]:
    """Run every collective of a step on a lane; the host waits where the backend says so."""
    nccl = device_type == "cuda"
    device = torch.device(device_type, rank) if nccl else torch.device(device_type)
    group = dist.new_group(backend="nccl" if nccl else "gloo")
    ranks, lane = Ranks(group, device), Lane(device)

    def wait(work: Work | None) -> None:
        assert (work is None) == nccl
        if work is not None:
            work.wait()

    found: dict[str, Tensor] = {}
    shard = torch.arange(64, dtype=torch.uint8, device=device) + rank
    found["gather"] = shard.new_zeros(64 * world_size)
    with lane.after_compute():
        wait(ranks.start_gather(found["gather"], shard, lasting=False))
    compute_waits(lane.mark())
    for dtype in (torch.float32, torch.bfloat16):
        packed = torch.arange(16 * world_size, device=device).to(dtype) + rank
        rows = packed.new_zeros(ranks.row_count(dtype), 16)
        with lane.after_compute():
            wait(ranks.start_exchange(rows, packed))
        compute_waits(lane.mark())
        found[f"exchange of {dtype}"] = rows.sum(0)
    for maximum in (False, True):
        value = torch.tensor([1.0 + rank, -2.0], dtype=torch.float64, device=device)
        with lane.after_compute():
            wait(ranks.start_all_reduce(value, maximum=maximum))
        compute_waits(lane.mark())
        found[f"all_reduce, {maximum=}"] = value
    found["broadcast"] = torch.full((3,), float(rank + 1), device=device)
    ranks.broadcast(found["broadcast"])
    return {what: tensor.cpu() for what, tensor in found.items()}


@devices
def test_collectives_on_a_lane(device: str) -> None:
    size = torch.cuda.device_count() if device == "cuda" else 3
    for rank, found in enumerate(run_ranks(on_lane, size, device)):
        shards = [torch.arange(64, dtype=torch.uint8) + each for each in range(size)]
        assert torch.equal(found["gather"], torch.cat(shards))
        row = torch.arange(16) + 16 * rank
        for dtype in (torch.float32, torch.bfloat16):
            expected = (size * row + sum(range(size))).to(dtype)
            assert torch.equal(found[f"exchange of {dtype}"], expected)
        assert found["all_reduce, maximum=False"].tolist() == [sum(range(1, size + 1)), -2.0 * size]
        assert found["all_reduce, maximum=True"].tolist() == [size, -2.0]
        assert found["broadcast"].tolist() == [1.0] * 3


def steps(rank: int, world_size: int, device: str, precision: str) -> list[list[Record]]:
    """Of every strategy, by transport; on GPUs that are not the current one, but on rank 0."""
    group = dist.new_group(backend="nccl" if device == "cuda" else "gloo")
    here = f"cuda:{rank}" if device == "cuda" else "cpu"
    return [
        [
            trained(rank, comm, strategy, precision, group, device=here)[0].cpu()
            for strategy in STRATEGIES
        ]
        for comm in ("group", "peer")[:world_size]
    ]


@devices
@pytest.mark.parametrize("precision", ["fp32", "bf16/bf16"])
def test_steps_of_all_gpus_are_alike_in_every_strategy_and_over_both_transports(
    device: str, precision: str
) -> None:
    size = torch.cuda.device_count() if device == "cuda" else 2
    expected = run_ranks(in_the_group, size, precision)
    found = run_ranks(steps, size, device, precision, timeout=120)
    for by_transport, cpu in zip(found, expected, strict=True):
        for records in by_transport:
            for other in records[1:]:
                assert_same_bits(other, records[0])
            if size == 2 or precision != "fp32":  # else NCCL sums in an order of its own
                assert_same_bits(records[0], by_transport[0][0])
        if precision == "fp32":
            assert_close(by_transport[0][0], cpu, 1e-3)
        else:  # later steps may lead elsewhere: see test_symmetric.py
            assert_close(by_transport[0][0].before_any_step(), cpu.before_any_step(), 0.1)
