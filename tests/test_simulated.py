"""Simulated N: one of 1,024 ranks, alone, has the layout, bytes and events of a real one."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, simulated
from steps import build, one_step
from test_plan import POLICIES, STRATEGIES
from test_schedule import BACKWARD, FORWARD, events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import zshard
from zshard.checkpoint.dcp import chunks_to_read, write_items
from zshard.layout import Layout
from zshard.transports.simulated import SimulatedRanks
from zshard.wrap import schedule_of

RANKS = 1024
ALIGN = 32  # elements, at which segments and shards begin


class Square(nn.Module):
    """32,761 parameters: the last of 1,024 ranks has 25 of them, and 7 elements of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(181, 181, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x).relu()


class Gained(Square):
    """Parameters of every odd shape, the first of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.25), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 7))
        self.down = nn.Linear(181, 181)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain + self.down(x) + self.nothing.sum()


class Odd(nn.Module):
    """Blocks whose parameters end in the middle of one shard or another."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, 181)
        self.blocks = nn.ModuleList([Square(), Gained(), Square()])
        self.outlet = nn.Linear(181, 1)

    def forward(self, x: Tensor) -> Tensor:  # x (B, 3)
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


UNITS = ["blocks.0", "blocks.1", "blocks.2"]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    loss = models.loss_of(model, models.batches("blocks", 1)[0])
    loss.backward()
    zshard.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# --- layout --------------------------------------------------------------------------------------


def up(count: int, to: int = ALIGN) -> int:
    return math.ceil(count / to) * to


@pytest.mark.parametrize("rank", [0, 511, 1023])
def test_every_segment_lies_where_plain_arithmetic_puts_it(rank: int) -> None:
    plain = Odd()
    values = {name: param.detach().clone() for name, param in plain.named_parameters()}
    unit_of = {name: name[:8] if name.startswith("blocks") else "root" for name in values}
    frozen = {name for name, param in plain.named_parameters() if not param.requires_grad}
    with simulated(rank, RANKS):
        flats = [f for u in schedule_of(zshard.wrap(plain, units=UNITS)).units for f in u.flats]
    assert sorted(name for flat in flats for name in flat.names) == sorted(values)
    for flat in flats:
        first = flat.names[0]
        alike = [
            name
            for name in values
            if unit_of[name] == unit_of[first] and (name in frozen) == (first in frozen)
        ]
        assert list(flat.names) == alike
        end, offsets = 0, []
        for name in alike:
            offsets.append(up(end))
            end = offsets[-1] + values[name].numel()
        size = up(math.ceil(end / RANKS))
        assert flat.layout.shard_size == size
        assert [segment.offset for segment in flat.layout.segments] == offsets
        full = torch.zeros(size * RANKS)
        for name, offset in zip(alike, offsets, strict=True):
            full[offset : offset + values[name].numel()] = values[name].view(-1)
        assert torch.equal(flat.master.read(), full[rank * size : (rank + 1) * size])
        for param, name, offset in zip(flat.params, alike, offsets, strict=True):
            begin = min(max(offset, rank * size), (rank + 1) * size)
            last = max(min(offset + values[name].numel(), (rank + 1) * size), begin)
            assert torch.equal(param.local, full[begin:last])
            assert param.shape == values[name].shape
        segments = len(alike)
        assert flat.layout.padding < ALIGN * (segments + RANKS)


def test_of_a_large_model_a_rank_takes_less_than_a_thousandth_more_than_its_share() -> None:
    alone, shared = (
        zshard.plan("gpt:7b", size).to_dict()["per_rank"]["states"] for size in (1, RANKS)
    )
    assert 1 <= shared / (alone / RANKS) < 1.001
    layout = Layout.of([torch.empty(4099, 4099, device="meta") for _ in range(3)], RANKS)
    assert 0 < layout.padding < 1e-3 * layout.numel


# --- memory and bytes ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 511, 1023])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_and_bytes_are_the_plans(strategy: str, rank: int) -> None:
    for policy, precision in POLICIES.items():
        options = {"strategy": strategy, "units": UNITS, "precision": precision}
        planned = zshard.plan(Odd(), RANKS, **options, backend="gloo").to_dict()
        with simulated(rank, RANKS):
            model = zshard.wrap(Odd(), **options)
            optimizer = zshard.AdamW(model.parameters())
            step(model, optimizer)
            stats = zshard.stats(model)
            stats.reset()
            assert step(model, optimizer).isfinite()
        measured = zshard.memory(model)["now"]
        expected = {key: planned["per_rank"][key] for key in measured}
        if rank < RANKS - 1:  # the plan's padding is that of the last rank, which has most
            assert measured.pop("padding") <= expected.pop("padding")
        assert measured == expected, policy
        for op in ("all_gather", "reduce_scatter"):
            alike = [each for each in planned["collectives"] if each["op"] == op]
            assert stats.calls[op] == sum(each["count"] for each in alike), policy
            sent = sum(each["bytes"] * each["count"] for each in alike)
            assert stats.sent_bytes[op] == sent, policy


def test_on_cuda_the_fake_group_stands_for_nccl_and_on_the_host_for_gloo() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    with simulated(1, RANKS):
        for device, rows in (("cuda", [1, 1, RANKS]), ("cpu", [RANKS] * 3)):
            ranks = SimulatedRanks(dist.group.WORLD, torch.device(device))
            assert ranks.nccl == (device == "cuda")
            assert [ranks.row_count(dtype) for dtype in dtypes] == rows


# --- events --------------------------------------------------------------------------------------


def recorded(rank: int, world_size: int) -> tuple[list[tuple[str, str]], dict[str, dict[str, int]]]:
    """Events and counters of the second step."""
    model = build()
    optimizer = zshard.AdamW(model.parameters())
    one_step(model, rank, 0)
    stats = zshard.stats(model)
    stats.reset()
    with zshard.trace(model) as trace:
        one_step(model, rank, 1)
        optimizer.step()
    counted = {"calls": dict(stats.calls), "bytes": dict(stats.sent_bytes)}
    return [(event.phase, event.unit) for event in trace.events], counted


@pytest.mark.parametrize("rank", [0, 511, 1023])
def test_a_step_of_one_of_1024_ranks_is_the_list_of_events_of_real_ones(rank: int) -> None:
    with simulated(rank, RANKS):
        assert recorded(rank, RANKS)[0] == events(FORWARD + "," + BACKWARD)


def test_two_real_ranks_and_simulated_ones_record_the_same_events_and_bytes() -> None:
    for rank, real in enumerate(run_ranks(recorded, 2)):
        with simulated(rank, 2):
            assert recorded(rank, 2) == real


class Ops(TorchDispatchMode):
    """Counts the ops that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def ops_of_a_step(world_size: int, strategy: str) -> Counter[str]:
    with simulated(1, world_size):
        model = build(strategy=strategy)
        optimizer = zshard.AdamW(model.parameters())
        for _ in range(2):
            step(model, optimizer)
        with Ops() as ops:
            step(model, optimizer)
    return ops.counts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_host_runs_no_more_ops_for_1024_ranks_than_for_two(strategy: str) -> None:
    few, many = (ops_of_a_step(size, strategy) for size in (2, RANKS))
    assert sum(few.values()) > 0 and few == many


# --- what a simulated rank computes --------------------------------------------------------------


def test_every_other_rank_is_taken_to_be_this_one() -> None:
    with simulated(2, 5):
        ranks = SimulatedRanks(dist.group.WORLD, torch.device("cpu"))
        full = torch.zeros(15, dtype=torch.uint8)
        full[6:9] = torch.tensor([1, 2, 3])  # in its place, as units that stay whole have it
        ranks.start_gather(full, full[6:9], lasting=False).wait()
        assert full.tolist() == [1, 2, 3] * 5
        packed, chunks = torch.arange(10.0), torch.full((10,), math.nan)
        ranks.start_exchange(chunks, packed).wait()
        assert chunks.tolist() == [4.0, 5.0] * 5
        ranks.nccl = True
        ranks.start_exchange(chunks[:2], packed)
        assert chunks[:2].tolist() == [20.0, 25.0], "their sum"
        ranks.nccl = False
        for maximum, expected in ((False, 15.0), (True, 3.0)):
            value = torch.tensor([3.0])
            ranks.start_all_reduce(value, maximum=maximum).wait()
            assert value.item() == expected
        ranks.broadcast(value)
        assert value.item() == 3.0
        assert ranks.all_gather_words(torch.tensor([7, 8])).tolist() == [7, 8] * 5
        assert ranks.all_gather_object("word") == ["word"] * 5


class WithStatistics(models.Blocks):
    """Blocks with persistent buffers, which are broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(self.inlet(x)) @ self.inlet.weight)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", ["flat", "hsdp"])
def test_whatever_a_script_does_between_wrap_and_step_works(strategy: str, mesh: str) -> None:
    with simulated(5, 16):
        model = zshard.wrap(
            WithStatistics(),
            strategy=strategy,
            mesh=init_device_mesh("cpu", (4, 4)) if mesh == "hsdp" else dist.group.WORLD,
        )
        schedule = schedule_of(model)
        assert schedule.comm.size == (4 if mesh == "hsdp" else 16) and schedule.comm.world_rank == 5
        optimizer = zshard.AdamW(model.parameters())
        scaler = zshard.GradScaler("cpu", init_scale=8.0)
        batch = models.batches("blocks", 1)[0]
        with zshard.no_sync(model):
            models.loss_of(model, batch).backward()
        scaler.scale(models.loss_of(model, batch)).backward()
        scaler.unscale_(optimizer)
        for kind in (2.0, math.inf):
            zshard.clip_grad_norm_(model, 0.5, kind, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 8.0
        with zshard.full_params(model):
            assert model.inlet.weight.shape == (7, 3) and model.inlet.weight.isfinite().all()
        assert zshard.full_grad(model, "inlet.weight").isfinite().all()
        optimizer.zero_grad()
        assert step(model, optimizer).isfinite()
        with torch.no_grad():
            assert model(batch).isfinite().all()


def test_a_model_on_the_meta_device_is_made_shard_by_shard() -> None:
    with torch.device("meta"):
        meta = models.Blocks()
    with simulated(0, RANKS):
        model = zshard.wrap(meta, init_fn=lambda module: module.reset_parameters())
        optimizer = zshard.AdamW(model.parameters())
        step(model, optimizer)
    assert zshard.memory(model)["now"]["states"] == 4 * ALIGN * 16


REFUSED = [
    *("save", "export", "load", "load_weights", "state_dict"),
    *("checkpoint.save", "checkpoint.load"),  # torch.distributed's
]


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_leave_the_process_or_come_into_it_is_refused(what: str, tmp_path: Path) -> None:
    with simulated(3, 8):
        model = build()
        path = tmp_path / "checkpoint"
        calls = {
            "save": lambda: zshard.save(path, model),
            "export": lambda: zshard.export(path, model),
            "load": lambda: zshard.load(path, model),
            "load_weights": lambda: zshard.load_weights(model, path),
            "state_dict": lambda: zshard.state_dict(model),
            "checkpoint.save": lambda: write_items(model.inlet.weight, "inlet.weight"),
            "checkpoint.load": lambda: chunks_to_read(model.inlet.weight),
        }
        with pytest.raises(zshard.StateError, match=rf"{what}.*simulates rank 3 of 8"):
            calls[what]()
        assert not path.exists()


def test_a_fake_group_of_one_rank_is_one_rank(tmp_path: Path) -> None:
    with simulated(0, 1):
        model = build()
        assert torch.equal(one_step(model, 0, 0), one_step(build(), 0, 0))
        zshard.save(tmp_path / "checkpoint", model)
