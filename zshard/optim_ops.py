"""The ops that take an optimizer's step; see zshard/ops.py, of which they are a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .op_call import call

_ops = torch.ops.zshard


def adamw_(
    masters: Sequence[Tensor],
    lows: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    grads: Sequence[Tensor],
    sends: Sequence[Tensor],
    segments: Tensor,
    hypers: Tensor,
    steps: Tensor,
    active: Tensor | None = None,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Take one AdamW (decoupled decay) or Adam (L2) step on segments of U shards, in one launch.

    The last column of hypers is 1.0 for decoupled decay, 0.0 for L2. For each active segment the
    step count t grows by one and, in float32 with factors computed in float64:

        g *= grad_scale
        p *= 1 - lr * weight_decay                                  (decoupled), or
        g += weight_decay * p                                       (L2, unless it is 0)
        m += (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    (Adam: Kingma & Ba 2015, algorithm 1; AdamW: Loshchilov & Hutter 2019, algorithm 2.) The new p
    is also stored, cast, in sends. Nothing outside the segments is written.

    Args:
        masters: U x (n_u,) float32; or bfloat16 upper planes where lows are given.
        lows: [] or U x (n_u,) int16, the lower planes of split_master_.
        exp_avgs, exp_avg_sqs: U x (n_u,) float32 each, m and v.
        grads: U x (n_u,) F, one dtype for all.
        sends: [] or U x (n_u,) bfloat16 or float16, one dtype for all; [] where lows are given.
        segments: (G, 3) int64 rows [u, begin, end): elements of shard u, disjoint.
        hypers: (G, 6) float64 rows [lr, beta1, beta2, eps, weight_decay, decoupled].
        steps: (G,) int64, steps taken so far.
        active: (G,) uint8; 0 leaves the segment and its step count alone.
        grad_scale: (1,) float32, multiplies every gradient.
        skip: (1,) float32; nonzero changes nothing at all.

    No two of the tensors may share memory, which is not checked. segments and what follows them
    are on the shards' device. On CUDA the host never reads them: a row outside its shard stops the
    kernel with a device trap.

    Raises:
        InputError: lists of different lengths, shards of different numels, wrong dtypes or devices;
            on CPU also segments that overlap or leave their shard.
    """
    shards = (masters, lows, exp_avgs, exp_avg_sqs, grads, sends)
    call(_ops.adamw_.default, *shards, segments, hypers, steps, active, grad_scale, skip)


def reduce_adamw_(
    master: Tensor,
    low: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    peers: Sequence[Tensor],
    send: Tensor | None,
    segments: Tensor,
    hypers: Tensor,
    steps: Tensor,
    scale: float = 1.0,
    stats: Tensor | None = None,
    active: Tensor | None = None,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Do as reduce_peers_ into a float32 gradient and adamw_ on it, which is nowhere stored.

    The bits of master, low, exp_avg, exp_avg_sq, send, steps and stats are those that the two
    leave, in one pass over memory. stats are of the whole gradient, before grad_scale, in segments
    or not: what they say of this gradient is known too late for its own step. A grad_scale that
    clips can be made of the norm of the step before.

    Args:
        master: (S,) float32; or the bfloat16 upper plane where low, (S,) int16, is given.
        exp_avg, exp_avg_sq: (S,) float32.
        peers: N x (S,) F, one dtype for all; N <= 128.
        send: (S,) bfloat16 or float16; None where low is given.
        segments: (G, 3) int64 rows [0, begin, end): elements of the shard, ascending.
        stats: (2,) float64, overwritten.
        hypers, steps, active, grad_scale, skip: as of adamw_; stats are written all the same.

    Raises:
        InputError: tensors that are not flat, of S elements, of these dtypes and on one device;
            peers that share memory with what is written; on CPU also segments that overlap, do not
            ascend or leave the shard (on CUDA a device trap, as in adamw_).
    """
    shard = (master, low, exp_avg, exp_avg_sq, list(peers), send)
    tables = (segments, hypers, steps)
    call(_ops.reduce_adamw_.default, *shard, *tables, scale, stats, active, grad_scale, skip)


def sgd_(
    masters: Sequence[Tensor],
    lows: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    sends: Sequence[Tensor],
    segments: Tensor,
    hypers: Tensor,
    steps: Tensor,
    active: Tensor | None = None,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> None:
    """Take one step of torch.optim.SGD on segments of U shards, in one launch.

    The last two columns of hypers are 0.0 or 1.0. For each active segment the step count grows by
    one and, in float32 with factors computed in float64:

        g *= grad_scale                                             (and -1, to maximize)
        g += weight_decay * p                                       (unless weight_decay is 0)
        buffer = g                                                  (on step 1), or
        buffer = momentum * buffer + (1 - dampening) * g
        g = g + momentum * buffer                                   (nesterov), or
        g = buffer
        p -= lr * g

    Without momentum the buffer is neither read nor written and g stays as it is. A step counts all
    the same: where momentum comes later, set the count back to 0 for torch's first step.

    The new p is also stored, cast, in sends. Nothing outside the segments is written. segments,
    hypers and the arguments behind them are on the shards' device. On CUDA the host never reads
    them: a row outside its shard, or with momentum but no buffer, stops the kernel with a device
    trap.

    Args:
        momentum_buffers: U x (n_u,) float32; [] where no segment has momentum.
        hypers: (G, 6) float64 rows [lr, momentum, dampening, weight_decay, nesterov, maximize].
        masters and the others: as of adamw_.

    Raises:
        InputError: lists of different lengths, shards of different numels, wrong dtypes or devices;
            on CPU also segments that overlap or leave their shard, and momentum without buffers.
    """
    shards = (masters, lows, momentum_buffers, grads, sends)
    call(_ops.sgd_.default, *shards, segments, hypers, steps, active, grad_scale, skip)
