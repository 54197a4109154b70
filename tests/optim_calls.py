"""Calls of the optimizers' ops, adamw_ and sgd_, which differ in their states and their hypers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ops_check import odd, refuses
from torch import Tensor

from zshard import reference

# Rows of hypers that a call's segments take in turn.
HYPERS = {
    "adamw_": [
        [1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0],
        [1e-2, 0.8, 0.99, 1e-6, 0.1, 0.0],
    ],
    "sgd_": [
        [1e-2, 0.9, 0.1, 0.01, 0.0, 0.0],
        [1e-1, 0.0, 0.5, 0.0, 0.0, 1.0],
        [1e-2, 0.8, 0.0, 0.1, 1.0, 1.0],
        [1e-3, 0.9, 0.0, 0.0, 0.0, 0.0],
    ],
}
STATES = {"adamw_": ["exp_avgs", "exp_avg_sqs"], "sgd_": ["momentum_buffers"]}
SIZES = [5001, 70_003, 0, 1]


@dataclass
class Call:
    """The arguments of one of the ops, by name."""

    op: str
    masters: list[Tensor]
    lows: list[Tensor]
    states: dict[str, list[Tensor]]
    grads: list[Tensor]
    sends: list[Tensor]
    segments: Tensor
    hypers: Tensor
    steps: Tensor
    active: Tensor | None = None
    grad_scale: Tensor | None = None
    skip: Tensor | None = None

    def arguments(self) -> list[object]:
        tables = [self.segments, self.hypers, self.steps, self.active, self.grad_scale, self.skip]
        states = self.states.values()
        return [self.masters, self.lows, *states, self.grads, self.sends, *tables]


def make(
    op: str,
    sizes: list[int] = SIZES,
    segments: list[list[int]] | None = None,
    grad_dtype: torch.dtype = torch.float32,
    send_dtype: torch.dtype | None = None,
    split: bool = False,
    start: int = 0,
    hypers: list[list[float]] | None = None,
) -> Call:
    """Random shards, `start` elements off alignment; one segment a shard unless given."""

    def shards(dtype: torch.dtype) -> list[Tensor]:
        return [odd(size, dtype, start) for size in sizes]

    masters = shards(torch.float32)
    lows: list[Tensor] = []
    if split:
        values, masters = masters, shards(torch.bfloat16)
        lows = [torch.zeros(size + start, dtype=torch.int16)[start:] for size in sizes]
        for hi, lo, value in zip(masters, lows, values, strict=True):
            reference.split_master_(hi, lo, value)
    states = {name: shards(torch.float32) for name in STATES[op]}
    for square in states.get("exp_avg_sqs", []):
        square.square_()
    rows = segments if segments is not None else [[u, 0, size] for u, size in enumerate(sizes)]
    cycle = hypers or HYPERS[op]
    return Call(
        op=op,
        masters=masters,
        lows=lows,
        states=states,
        grads=shards(grad_dtype),
        sends=shards(send_dtype) if send_dtype else [],
        segments=torch.tensor(rows, dtype=torch.int64).view(-1, 3),
        hypers=torch.tensor(
            [cycle[g % len(cycle)] for g in range(len(rows))], dtype=torch.float64
        ).view(-1, 6),
        steps=torch.tensor([(0, 5, 1000)[g % 3] for g in range(len(rows))], dtype=torch.int64),
    )


def refuses_change(op: str, match: Sequence[str], **changes: object) -> None:
    """Require InputError for a good call on shards of 8 and 9 elements after `changes`."""
    call = make(op, [8, 9])
    for name, value in changes.items():
        if name in call.states:
            call.states[name] = value
        else:
            setattr(call, name, value)
    refuses(op, *call.arguments(), match=match)
