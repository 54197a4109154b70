"""The ops of zshard.ops in plain torch, one torch call for each rounding, for tests and benchmarks.

Same names, arguments and effects. On CPU the ops give the same bits as these functions (which NaN
an operation yields is left open), because every product, sum, quotient and root here is rounded by
itself, as csrc/formulas.h does it: no fused torch call (addcmul, lerp, add with alpha) may be used.
Nothing is checked here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# reduce_ sums squares by position, so that the sum does not depend on threads: [Note: sum of
# squares] in csrc/formulas.h.
SQUARE_ROWS, SQUARE_COLUMNS, SQUARE_GROUP = 4, 256, 4
SQUARE_LANES = 1024


def _scaled(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return x in dtype, multiplied in fp32 (fp64 for fp64); scale 1 only converts."""
    if scale == 1.0:
        return x.to(dtype)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(wide) * torch.tensor(scale, dtype=wide, device=x.device)).to(dtype)


def pack_(
    out: Tensor, sources: Sequence[Tensor | None], offsets: Sequence[int], scale: float = 1.0
) -> None:
    """See zshard.ops.pack_."""
    out.zero_()
    for source, offset in zip(sources, offsets, strict=True):
        if source is not None:
            out[offset : offset + source.numel()] = _scaled(source.flatten(), out.dtype, scale)


def unpack_(
    targets: Sequence[Tensor | None], flat: Tensor, offsets: Sequence[int], scale: float = 1.0
) -> None:
    """See zshard.ops.unpack_."""
    for target, offset in zip(targets, offsets, strict=True):
        if target is not None:
            values = flat[offset : offset + target.numel()]
            target.copy_(_scaled(values, target.dtype, scale).view(target.shape))


def cast_(out: Tensor, src: Tensor) -> None:
    """See zshard.ops.cast_."""
    out.copy_(src)


def gather_cast_(full: Tensor, shards: Sequence[Tensor]) -> None:
    """See zshard.ops.gather_cast_."""
    for part, shard in zip(full.view(len(shards), shards[0].numel()), shards, strict=True):
        part.copy_(shard)


def split_master_(hi: Tensor, lo: Tensor, src: Tensor) -> None:
    """See zshard.ops.split_master_."""
    bits = src.view(torch.int32).long() & 0xFFFFFFFF
    magnitude = bits & 0x7FFFFFFF
    quiet = magnitude >= 0x7F810000
    swapped = (magnitude >= 0x7F808000) & ~quiet
    bits = torch.where(quiet, bits - 0x8000, torch.where(swapped, bits + 0x7F0000, bits))
    high = (bits + 0x8000) >> 16
    lo.copy_(bits - (high << 16))
    hi.copy_(high.to(torch.int16).view(torch.bfloat16))


def join_master_(out: Tensor, hi: Tensor, lo: Tensor) -> None:
    """See zshard.ops.join_master_."""
    bits = ((hi.view(torch.int16).long() << 16) + lo.long()) & 0xFFFFFFFF
    magnitude = bits & 0x7FFFFFFF
    swapped = magnitude >= 0x7FFF8000
    quiet = (magnitude >= 0x7F808000) & ~swapped
    bits = torch.where(quiet, bits + 0x8000, torch.where(swapped, bits - 0x7F0000, bits))
    out.copy_(bits.to(torch.int32).view(torch.float32))


def _halve(x: Tensor) -> Tensor:
    """Sum a last dimension of 2^k by adding its upper half to its lower half k times."""
    while x.shape[-1] > 1:
        lower, upper = x.chunk(2, dim=-1)
        x = lower + upper
    return x.squeeze(-1)


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the fp64 sum of squares of flat x, added in the fixed order that reduce_ pins down."""
    squares = x.double() * x.double()
    block = SQUARE_ROWS * SQUARE_COLUMNS * SQUARE_GROUP
    squares = torch.nn.functional.pad(squares, (0, -len(squares) % block))
    rows = squares.view(-1, SQUARE_ROWS, SQUARE_COLUMNS, SQUARE_GROUP)
    blocks = _halve(_halve(sum(rows.unbind(1)[1:], rows[:, 0])))
    blocks = torch.nn.functional.pad(blocks, (0, -len(blocks) % SQUARE_LANES))
    lanes = torch.zeros(SQUARE_LANES, dtype=torch.float64, device=x.device)
    for row in blocks.view(-1, SQUARE_LANES):
        lanes = lanes + row
    return _halve(lanes)


def reduce_(
    acc: Tensor,
    chunks: Tensor,
    scale: float = 1.0,
    accumulate: bool = False,
    stats: Tensor | None = None,
) -> None:
    """See zshard.ops.reduce_."""
    wide = torch.float64 if acc.dtype == torch.float64 else torch.float32
    total = chunks[0].to(wide)
    for chunk in chunks[1:]:
        total = total + chunk.to(wide)
    total = total * torch.tensor(scale, dtype=wide, device=acc.device)
    acc.copy_(acc.to(wide) + total if accumulate else total)
    if stats is not None:
        stats[0] = sum_of_squares(acc)
        stats[1] = 0.0 if bool(acc.isfinite().all()) else 1.0


def reduce_peers_(
    acc: Tensor,
    peers: Sequence[Tensor],
    scale: float = 1.0,
    accumulate: bool = False,
    stats: Tensor | None = None,
) -> None:
    """See zshard.ops.reduce_peers_."""
    reduce_(acc, torch.stack(list(peers)), scale, accumulate, stats)


def clip_factor_(
    factor: Tensor, norm: Tensor, squares: Tensor, max_norm: float, scale: Tensor | None = None
) -> None:
    """See zshard.ops.clip_factor_."""
    by = 1.0 if scale is None else scale.item()
    root = math.sqrt(squares.item() * (by * by))  # torch's fp64 sqrt is at times off, too (MKL)
    norm.copy_(torch.tensor([root], dtype=torch.float64))
    factor.copy_(((norm + 1e-6).reciprocal() * max_norm).clamp(max=1.0))


def power(base: float, exponent: int) -> float:
    """Return base**exponent by squaring: the same bits everywhere, which no libm promises."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


class Factors(NamedTuple):
    """One segment's AdamW factors, 0-d fp32 tensors: computed in fp64, then rounded once."""

    beta2: Tensor
    one_minus_beta1: Tensor
    one_minus_beta2: Tensor
    eps: Tensor
    decay: Tensor  # decoupled: 1 - lr * weight_decay; L2: weight_decay
    step_size: Tensor  # lr / (1 - beta1^t)
    rescale: Tensor  # 1 / sqrt(1 - beta2^t)


def adamw_factors(hyper: Sequence[float], step: int) -> Factors:
    """Return the factors of step number `step` (the first is 1) for a row of hypers."""
    lr, beta1, beta2, eps, weight_decay, decoupled = hyper
    values = (
        beta2,
        1.0 - beta1,
        1.0 - beta2,
        eps,
        1.0 - lr * weight_decay if decoupled else weight_decay,
        lr / (1.0 - power(beta1, step)),
        1.0 / math.sqrt(1.0 - power(beta2, step)),
    )
    return Factors(*(torch.tensor(value, dtype=torch.float32) for value in values))


def _adamw_update(
    p: Tensor, g: Tensor, hyper: Sequence[float], step: int, m: Tensor, v: Tensor
) -> None:
    """Take one AdamW (decoupled) or Adam (L2) step on fp32 p, m and v in place."""
    c = adamw_factors(hyper, step)
    if hyper[5]:
        p.mul_(c.decay)
    elif hyper[4]:
        g = g + p * c.decay
    m.add_((g - m) * c.one_minus_beta1)
    v.copy_(v * c.beta2 + (g * c.one_minus_beta2) * g)
    root = v.double().sqrt().float()  # torch's fp32 sqrt is at times off by one unit on CPU (MKL)
    p.sub_((m * c.step_size) / (root * c.rescale + c.eps))


def _sgd_update(
    p: Tensor, g: Tensor, hyper: Sequence[float], step: int, buffer: Tensor | None = None
) -> None:
    """Take one SGD step on fp32 p and its momentum buffer in place."""
    lr, momentum, undamped, decay = (
        torch.tensor(value, dtype=torch.float32)
        for value in (hyper[0], hyper[1], 1.0 - hyper[2], hyper[3])
    )
    if hyper[5]:
        g = -g
    if hyper[3]:
        g = g + p * decay
    if hyper[1]:
        assert buffer is not None
        buffer.copy_(g if step == 1 else buffer * momentum + g * undamped)
        g = g + buffer * momentum if hyper[4] else buffer
    p.sub_(g * lr)


def _optim_step(
    update: Callable[..., None],  # (p, g, hyper, step, *states)
    states: Sequence[Sequence[Tensor]],
    masters: Sequence[Tensor],
    lows: Sequence[Tensor],
    grads: Sequence[Tensor],
    sends: Sequence[Tensor],
    segments: Tensor,
    hypers: Tensor,
    steps: Tensor,
    active: Tensor | None,
    grad_scale: Tensor | None,
    skip: Tensor | None,
) -> None:
    """Update each active segment's elements and count its step."""
    if skip is not None and skip.item() != 0:
        return
    for row, (shard, begin, end) in enumerate(segments.tolist()):
        if active is not None and not active[row]:
            continue
        steps[row] += 1
        part = slice(begin, end)
        grad = grads[shard][part].float()
        if grad_scale is not None:
            grad = grad * grad_scale
        master = masters[shard][part]
        value = master
        if lows:
            value = torch.empty_like(master, dtype=torch.float32)
            join_master_(value, master, lows[shard][part])
        parts = [state[shard][part] for state in states if state]
        update(value, grad, hypers[row].tolist(), int(steps[row]), *parts)
        if lows:
            split_master_(master, lows[shard][part], value)
        if sends:
            sends[shard][part] = value


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
    """See zshard.ops.adamw_."""
    step = (grads, sends, segments, hypers, steps, active, grad_scale, skip)
    _optim_step(_adamw_update, [exp_avgs, exp_avg_sqs], masters, lows, *step)


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
    """See zshard.ops.reduce_adamw_."""
    grad = torch.empty_like(exp_avg)
    reduce_peers_(grad, peers, scale, stats=stats)
    lows, sends = ([each for each in [plane] if each is not None] for plane in (low, send))
    tables = (segments, hypers, steps, active, grad_scale, skip)
    adamw_([master], lows, [exp_avg], [exp_avg_sq], [grad], sends, *tables)


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
    """See zshard.ops.sgd_."""
    step = (grads, sends, segments, hypers, steps, active, grad_scale, skip)
    _optim_step(_sgd_update, [momentum_buffers], masters, lows, *step)
