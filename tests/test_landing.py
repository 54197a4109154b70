"""Gradients that arrive as one row: written where they stay, not beside it and then copied."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from steps import build, one_step
from torch import Tensor, nn

import zshard
from zshard import ops
from zshard.step import pending_reduction
from zshard.transports import groups
from zshard.wrap import schedule_of

STRATEGIES = ["zero3", "zero2", "zero1", "ddp"]


# --- what is moved -------------------------------------------------------------------------------


@contextlib.contextmanager
def sums_seen(seen: list[tuple[bool, bool]]) -> Iterator[None]:
    """Note of every last sum of gradients: whether its row is its result; whether it adds."""
    plain = ops.reduce_

    def noting(
        acc: Tensor, chunks: Tensor, scale: float, accumulate: bool, stats: Tensor | None
    ) -> None:
        seen.append((chunks.data_ptr() == acc.data_ptr(), accumulate))
        plain(acc, chunks, scale, accumulate, stats)

    pending_reduction.ops.reduce_ = noting
    try:
        yield
    finally:
        pending_reduction.ops.reduce_ = plain


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_one_rank_gradients_are_packed_where_they_stay(strategy: str) -> None:
    model, seen = build(strategy=strategy), []
    with sums_seen(seen):
        one_step(model, 0, 0)
    assert set(seen) == {(True, False)} and len(seen) == len(schedule_of(model).units)


def test_gradients_that_are_there_are_added_to() -> None:
    model, seen = build(), []
    one_step(model, 0, 0)
    with sums_seen(seen):
        one_step(model, 0, 1)
    assert set(seen) == {(False, True)}
    torch.manual_seed(0)
    plain = models.Blocks()
    for step in range(2):
        one_step(plain, 0, step)
    for name, param in plain.named_parameters():
        assert torch.equal(zshard.full_grad(model, name), param.grad), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_no_sync_holds_in_the_same_memory_is_not_packed_over(strategy: str) -> None:
    expected, model, seen = build(), build(strategy=strategy), []
    for step in range(2):
        one_step(expected, 0, step)
    with zshard.no_sync(model):
        one_step(model, 0, 0)
    with sums_seen(seen):
        one_step(model, 0, 1)
    assert (True, False) not in seen
    for name, _ in model.named_parameters():
        assert torch.equal(zshard.full_grad(model, name), zshard.full_grad(expected, name)), name


def test_a_gradient_that_is_kept_is_not_written_by_the_next_backward() -> None:
    model = build()
    one_step(model, 0, 0)
    kept = {name: p.grad for name, p in model.named_parameters()}
    values = {name: zshard.full_grad(model, name).clone() for name in kept}
    model.zero_grad()
    one_step(model, 0, 1)
    for name, grad in kept.items():
        assert torch.equal(grad._local.view(-1), values[name].view(-1)), name
        assert not torch.equal(zshard.full_grad(model, name), values[name]), name


# --- one row of several ranks, as NCCL gives it ---------------------------------------------------


def one_row() -> None:
    """Have gloo sum fp32, as NCCL does, so that one row arrives."""
    groups.Ranks.row_count = lambda self, dtype: groups.chunk_rows(self.size, dtype, nccl=True)

    def reduce_scatter(out: Tensor, packed: Tensor, *, group: dist.ProcessGroup) -> None:
        dist.reduce_scatter_tensor(out, packed, group=group)

    groups._reduce_scatter = reduce_scatter


def train(
    rank: int, world_size: int, strategy: str, replicas: int, prepare: Callable[[], None] | None
) -> tuple[dict[str, Tensor], float, set[tuple[bool, bool]]]:
    """Train with and without accumulation; returns values, the last norm, and the sums seen."""
    if prepare is not None:
        prepare()
    mesh = None
    if replicas > 1:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (replicas, world_size // replicas))
    model = build(strategy=strategy, mesh=mesh, comm="group")
    optimizer = zshard.AdamW(model.parameters(), lr=0.1)
    seen: list[tuple[bool, bool]] = []
    with sums_seen(seen):
        for step in range(4):
            if step == 2:
                one_step(model, rank, 10)  # added to
            if step == 3:
                with zshard.no_sync(model):
                    one_step(model, rank, 11)
            one_step(model, rank, step)
            norm = zshard.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    with zshard.full_params(model):
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return values, float(norm), set(seen)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_that_another_summed_lands_in_the_shard(strategy: str) -> None:
    rows = run_ranks(train, 2, strategy, 1, None)
    landed = run_ranks(train, 2, strategy, 1, one_row)
    for (values, norm, seen), (expected, expected_norm, seen_there) in zip(
        landed, rows, strict=True
    ):
        assert (True, False) in seen and (True, True) not in seen
        assert {apart for apart, _ in seen_there} == {False}
        assert norm == expected_norm
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name


def test_with_replicas_the_sum_of_the_shards_goes_on() -> None:
    alone = run_ranks(train, 4, "zero3", 1, one_row)
    landed = run_ranks(train, 4, "zero3", 2, one_row)
    for (values, norm, seen), (expected, expected_norm, _) in zip(landed, alone, strict=True):
        assert (True, False) not in seen
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        for name, value in values.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_what_was_frozen_and_thawed_lands_in_its_new_memory() -> None:
    torch.manual_seed(0)
    plain, model = models.Blocks(), build()
    for trains in (True, False, True):
        seen: list[tuple[bool, bool]] = []
        with sums_seen(seen):
            for each in (plain, model):
                each.zero_grad()
                each.blocks.requires_grad_(trains)
                one_step(each, 0, 0)
        assert set(seen) == {(True, False)}, "of the old memory, which stays, it is copied"
        for name, param in plain.named_parameters():
            grad = zshard.full_grad(model, name)
            assert (grad is None) == (param.grad is None), (trains, name)
            assert grad is None or torch.equal(grad, param.grad), (trains, name)


# --- which reductions are landed before a buffer is packed again ---------------------------------


class Empty(nn.Module):
    """A unit whose only trained parameter has no element."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


def behind_an_empty_one(rank: int, world_size: int, comm: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), Empty(), nn.Linear(6, 6))
    wrapped = zshard.wrap(copy.deepcopy(plain), units="layer", comm=comm)
    x = torch.randn(4, 6) + rank
    for model in (plain, wrapped):
        model(x).square().mean().backward()
    for name, param in plain.named_parameters():
        dist.all_reduce(param.grad)
        assert torch.equal(zshard.full_grad(wrapped, name), param.grad / world_size), name


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_reductions_behind_an_empty_one_are_landed_too(comm: str) -> None:
    """It is in no buffer's way, and stays under way; those after it are in the next one's."""
    run_ranks(behind_an_empty_one, 2, comm, timeout=20)
