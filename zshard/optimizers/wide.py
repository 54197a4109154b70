"""The step of float64 masters, which the fused ops do not take: torch's operations, row by row.

For exactness, not for speed or memory: an operation makes a tensor as large as its row. The rules
are those of csrc/formulas.h in float64, one torch call for each operation, so that an element gets
the same bits wherever it lies. Those of roots and powers are the math library's, which may differ
between kinds of processors. Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .buckets import Bucket, Hyper

# Updates p, (n,), by its gradient g and a row of hypers at step t, 0-d float64, with its states.
Rule = Callable[..., None]  # (p, g, t, hyper, *states)


def wide_step(
    rule: Rule,
    bucket: Bucket,
    grads: Sequence[Tensor],
    active: Sequence[bool],
    hypers: Sequence[Hyper],
    grad_scale: Tensor | None,
) -> None:
    """Update the active rows of a bucket of float64 masters, and count their steps.

    Args:
        grads: by shard.
        active: by row.
        hypers: by group.
        grad_scale: (1,) float64, multiplies every gradient.
    """
    bucket.steps += bucket.active
    for index, (row, takes_part) in enumerate(zip(bucket.rows, active, strict=True)):
        if takes_part:
            part = slice(row.begin, row.end)
            states = [each[row.shard][part] for each in bucket.states.values()]
            grad = grads[row.shard][part]
            if grad_scale is not None:
                grad = grad * grad_scale
            master, count = bucket.masters[row.shard][part], bucket.steps[index].double()
            rule(master, grad, count, hypers[row.group], *states)


def wide_adamw(p: Tensor, g: Tensor, t: Tensor, hyper: Hyper, m: Tensor, v: Tensor) -> None:
    """AdamW or Adam; see ``zshard.ops.adamw_``."""
    lr, beta1, beta2, eps, weight_decay, decoupled = hyper
    if decoupled:
        p.mul_(1.0 - lr * weight_decay)
    elif weight_decay:
        g = g + p * weight_decay
    m.add_((g - m) * (1.0 - beta1))
    v.copy_(v * beta2 + (g * (1.0 - beta2)) * g)
    step_size, rescale = lr / (1.0 - beta1**t), 1.0 / (1.0 - beta2**t).sqrt()
    p.sub_((m * step_size) / (v.sqrt() * rescale + eps))


def wide_sgd(p: Tensor, g: Tensor, t: Tensor, hyper: Hyper, buffer: Tensor | None = None) -> None:
    """SGD; see ``zshard.ops.sgd_``."""
    lr, momentum, dampening, weight_decay, nesterov, maximize = hyper
    if maximize:
        g = -g
    if weight_decay:
        g = g + p * weight_decay
    if momentum and buffer is not None:
        buffer.copy_(torch.where(t == 1, g, buffer * momentum + g * (1.0 - dampening)))
        g = g + buffer * momentum if nesterov else buffer
    p.sub_(g * lr)
