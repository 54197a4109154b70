"""In steady state a step takes no new memory of its own, beyond what the plain model's takes."""

from __future__ import annotations

import contextlib
import math
import resource
import statistics
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from heap import TRIM_THRESHOLD, give_back_what_is_freed
from ranks import run_ranks
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zshard
from zshard.wrapping.malloc import keep_freed

STRATEGIES = ["zero1", "zero2", "zero3", "ddp"]
LARGE = 1 << 20  # bytes: of every unit's shards, whole parameters and gradients, but of no output
WARM_STEPS = 3  # the first learn the order of units; buffers are there after the second


class Layer(nn.Module):
    """One weight of more than 1 MiB even in bf16, and an odd bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(387, 1531)
        self.down = nn.Linear(1531, 387)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Large(nn.Module):
    """Two units, and a root that is large too."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(1531, 387)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x


PRECISIONS = {
    "fp32": zshard.Precision(),
    "bf16": zshard.Precision.bf16(),
    "bf16/bf16": zshard.Precision.bf16(reduce=torch.bfloat16),
    "split": zshard.Precision.bf16(reduce=torch.bfloat16, master="split"),
}


def large_allocations(work: Callable[[], object]) -> Counter[int]:
    """How often ``work`` has torch's allocator make a block, by the block's bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert sizes, "the profiler tells of the small ones, at least"
    return Counter(size for size in sizes if size >= LARGE)


def in_a_step(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, micro_batches: int
) -> Counter[int]:
    """What is allocated in a step like any other, after a few."""
    dtype = torch.float32 if optimizer else next(model.parameters()).dtype

    def step() -> None:
        for index in range(micro_batches):
            held = optimizer is not None and index + 1 < micro_batches
            with zshard.no_sync(model) if held else contextlib.nullcontext():
                model(torch.ones(3, 1531, dtype=dtype)).float().square().mean().backward()
        if optimizer is None:
            model.zero_grad()
            return
        zshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_STEPS):
        step()
    return large_allocations(step)


def beyond_plain(rank: int, world_size: int, strategy: str, precision: str) -> dict[int, str]:
    """Number of micro-batches -> what is allocated that the plain model's step does not."""
    found = {}
    for micro_batches in (1, 3):
        torch.manual_seed(0)
        policy = PRECISIONS[precision]
        model = zshard.wrap(Large(), strategy=strategy, precision=policy)
        optimizer = zshard.AdamW(model.parameters())
        own = in_a_step(model, optimizer, micro_batches)
        plain = in_a_step(Large().to(policy.compute or torch.float32), None, micro_batches)
        assert plain, "the plain model allocates its gradients"
        found[micro_batches] = str(dict(own - plain))
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_allocates_nothing_large_that_the_plain_model_does_not(
    strategy: str, precision: str
) -> None:
    for found in run_ranks(beyond_plain, 2, strategy, precision):
        assert found == {1: "{}", 3: "{}"}


@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_a_norm_copies_one_gradient_at_a_time_and_the_largest_magnitude_none(
    norm_type: float,
) -> None:
    model = zshard.wrap(nn.Sequential(*(nn.Linear(601, 601, bias=False) for _ in range(3))))
    model(torch.ones(3, 601)).square().mean().backward()
    zshard.clip_grad_norm_(model, 1e-3)  # whose factor the next norm takes in
    made = large_allocations(lambda: zshard.clip_grad_norm_(model, 1e-3, norm_type))
    assert made == ({} if norm_type == math.inf else {8 * 601 * 601: 3})


class Several(nn.Module):
    """Units of several weights: gradients of a unit are more than any block that wrap frees."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(601, 601) for _ in range(13))) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def page_faults(rank: int, world_size: int) -> list[int]:
    """Pages that the kernel had to map during each of a few steps."""
    give_back_what_is_freed()  # until wrap says otherwise
    model = zshard.wrap(Several(), units=[f"blocks.{i}" for i in range(3)])
    optimizer = zshard.AdamW(model.parameters())
    found = []
    for _ in range(9):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        model(torch.ones(3, 601)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    return found


def test_memory_of_gradients_stays_with_the_process_from_step_to_step() -> None:
    unit = 13 * 4 * 601 * 601 / resource.getpagesize()
    for found in run_ranks(page_faults, 2):
        assert max(found[:2]) > unit, "the first steps map what the others use"
        assert statistics.median(found[WARM_STEPS:]) < unit / 4


def gradient_bytes(rank: int, world_size: int) -> tuple[list[int], int]:
    """Bytes of gradients inside two steps with micro-batches, and after a step without."""
    model = zshard.wrap(Large(), precision=zshard.Precision.bf16())
    seen = []
    for hold in (True, True, False):
        for held in (True, False) if hold else (False,):
            with zshard.no_sync(model) if held else contextlib.nullcontext():
                model(torch.ones(3, 1531)).float().square().mean().backward()
            if held:
                seen.append(zshard.memory(model)["now"]["gradients"])
        model.zero_grad()
    return seen, zshard.memory(model)["now"]["gradients"]


def test_room_for_micro_batches_is_given_back_after_a_step_without_them() -> None:
    count = sum(p.numel() for p in Large().parameters())
    for inside, after in run_ranks(gradient_bytes, 2):
        assert after == pytest.approx(4 * count / 2, rel=0.01), "the reduced shard, in fp32"
        first, second = inside
        assert first == pytest.approx(4 * count, rel=0.01), "the sums; nothing is reduced yet"
        assert second == pytest.approx(4 * count + after, rel=0.01), "the same ones once more"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What glibc is asked for, in a process that has wrapped no model yet."""
    calls: list[tuple[int, int]] = []
    libc = SimpleNamespace(mallopt=lambda name, value: calls.append((name, value)))
    monkeypatch.setattr("zshard.wrapping.malloc.ctypes.CDLL", lambda _: libc)
    monkeypatch.setattr("zshard.wrapping.malloc._kept", 0)
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_a_smaller_model_takes_nothing_back_of_what_the_heap_keeps(
    asked: list[tuple[int, int]],
) -> None:
    for nbytes in (1, 100 << 20, 50 << 20, 1 << 40):
        keep_freed(nbytes)
    kept = [value for name, value in asked if name == TRIM_THRESHOLD]
    assert kept == [64 << 20, 200 << 20, (1 << 31) - 1]


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_thresholds_that_the_user_has_set_stay(
    name: str, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "glibc.malloc.trim_threshold=131072")
    keep_freed(100 << 20)
    assert asked == []
