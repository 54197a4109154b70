"""Steps inside ``zshard.trace``, and what must hold of every trace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import torch
from steps import build, one_step
from torch import nn

import zshard
from zshard.tracing.path import critical_path, pieces
from zshard.tracing.trace import Trace


def trained(**options: object) -> tuple[nn.Module, Callable[[int, int], None]]:
    """A model that has taken two steps, and what takes one more, given rank and step."""
    model = build(**options)
    optimizer = zshard.AdamW(model.parameters())

    def step(rank: int, number: int) -> None:
        one_step(model, rank, number)
        zshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(2):
        step(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0, number)
    return model, step


def check(trace: Trace) -> None:
    """Assert what holds of every trace: times in order, a nested row, sums that add up."""
    assert trace.ended and trace.seconds > 0
    for event in (*trace.events, *trace.spans):
        assert event.issued <= event.began <= event.ended, (event, vars(event))
    for transfer in trace.transfers:
        issued, began, ended = transfer.issued, transfer.began, transfer.ended
        assert 0 <= issued <= began <= ended < math.inf, vars(transfer)
        assert issued <= transfer.returned
    for stall in trace.stalls:
        assert 0 <= stall.began <= stall.ended <= trace.seconds
        assert stall.transfer is None or stall.transfer in trace.transfers
    row = pieces(trace)
    assert_adds_up(row, trace.seconds)
    path = critical_path(trace, row)
    assert_adds_up(path, trace.seconds)
    summary = trace.summary()
    assert math.isclose(sum(leg.seconds for leg in summary.path), trace.seconds, abs_tol=1e-9)
    assert math.isclose(sum(leg.share for leg in summary.path), 1.0)
    for each in (*summary.units, summary.total):
        assert 0 <= each.exposed <= each.seconds + 1e-12
        assert math.isclose(each.exposed + each.hidden, each.seconds, abs_tol=1e-12)
        assert each.exposed <= summary.total.stalled + 1e-9
    assert sum(each.bytes for each in summary.units) == summary.total.bytes
    total = sum(each.compute for each in summary.units)
    assert math.isclose(total, summary.total.compute, abs_tol=1e-9)
    assert math.isclose(total + summary.total.stalled, trace.seconds, abs_tol=1e-9)
    assert "critical path" in str(summary) and "nan" not in str(summary)


def assert_adds_up(row: list, seconds: float) -> None:
    """No gap, no overlap, from the beginning to the end."""
    assert row[0].began == 0 and row[-1].ended == seconds
    for before, after in pairwise(row):
        assert before.ended == after.began and before.seconds > 0


def bytes_by_op(trace: Trace) -> Counter[str]:
    """What the transfers say was sent."""
    sent: Counter[str] = Counter()
    for transfer in trace.transfers:
        sent[transfer.op] += transfer.bytes
    return sent


def calls_by_op(trace: Trace) -> Counter[str]:
    """How many transfers there were."""
    return Counter(transfer.op for transfer in trace.transfers)
