"""The tensor ops of zshard's C++/CUDA extension, in place: each is one pass over its memory.

F below is float32, bfloat16 or float16. A *flat* tensor is 1-D and contiguous. All tensors of a
call are on one device, CPU or CUDA; on CUDA the work goes on the current stream and nothing waits
for it. Conversions round to nearest even and a NaN stays a NaN. CPU (any instruction set) and CUDA
give the same bits for every element, wherever it lies; zshard.reference holds the same functions in
plain torch.

Every function raises zshard.errors.InputError for a wrong shape, dtype, device, offset or count,
with the values and what to do. The ops are registered as torch.ops.zshard.*, with fake
implementations for tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import _C  # noqa: F401  # loading it registers torch.ops.zshard
from .errors import InputError

__all__ = [
    "adamw_",
    "cast_",
    "gather_cast_",
    "join_master_",
    "pack_",
    "reduce_",
    "reduce_adamw_",
    "reduce_peers_",
    "sgd_",
    "split_master_",
    "unpack_",
]

_ops = torch.ops.zshard


def _call(op: Callable[..., None], *args: object) -> None:
    try:
        op(*args)
    except RuntimeError as error:
        message = str(error)
        if "zshard::" not in message:  # not an argument's fault: a CUDA error, memory, a bug
            raise
        raise InputError(message) from None


def pack_(
    out: Tensor,  # (n,) F or float64
    sources: Sequence[Tensor | None],  # any shape, any strides; F each, or all float64 where out is
    offsets: Sequence[int],  # elements; ascending, offsets[i] + numel(i) <= offsets[i + 1] and <= n
    scale: float = 1.0,
) -> None:
    """Copy tensors into a flat buffer, cast and scaled, and zero everything between them.

    out[offsets[i] + k] = cast(float32(sources[i].flatten()[k]) * float32(scale)). What no source
    covers, a missing source (None) or padding, becomes 0. With scale 1 and equal dtypes it is an
    exact copy, NaN bits included.

    Raises:
        InputError: an offset that does not fit, float64 mixed with F, or a source that shares
        memory with out.
    """
    if len(sources) != len(offsets):
        raise InputError(
            f"zshard::pack_: {len(sources)} sources but {len(offsets)} offsets: "
            "give one offset for each source"
        )
    present = [source for source in sources if source is not None]
    if len(present) != len(sources):
        offsets = [at for source, at in zip(sources, offsets, strict=True) if source is not None]
    _call(_ops.pack_.default, out, present, offsets, scale)


def unpack_(
    targets: Sequence[
        Tensor | None
    ],  # any shape, any strides without overlap; F each, or all float64 where flat is
    flat: Tensor,  # (n,) F or float64
    offsets: Sequence[int],  # elements; ascending, offsets[i] + numel(i) <= offsets[i + 1] and <= n
    scale: float = 1.0,
) -> None:
    """Copy the ranges of a flat buffer into tensors, cast and scaled: the reverse of pack_.

    A missing target (None) skips its range.

    Raises:
        InputError: an offset that does not fit, float64 mixed with F, a target that overlaps itself
        or shares
            memory with flat.
    """
    if len(targets) != len(offsets):
        raise InputError(
            f"zshard::unpack_: {len(targets)} targets but {len(offsets)} offsets: "
            "give one offset for each target"
        )
    present = [target for target in targets if target is not None]
    if len(present) != len(targets):
        offsets = [at for target, at in zip(targets, offsets, strict=True) if target is not None]
    _call(_ops.unpack_.default, present, flat, offsets, scale)


def cast_(
    out: Tensor,  # (n,) F; or float32 or float64
    src: Tensor,  # (n,) F; or float32 or float64
) -> None:
    """Convert a flat buffer to another dtype. F to any F; float64 only from and to float32.

    Raises:
        InputError: numels or devices that differ, a tensor that is not flat, float64 with a 16-bit
            dtype, tensors that share memory (but for one and the same, which is left as it is).
    """
    _call(_ops.cast_.default, out, src)


def gather_cast_(
    full: Tensor,  # (N * S,) F; or float32 or float64
    shards: Sequence[Tensor],  # N x (S,) of one dtype, F; or float32 or float64; N <= 128
) -> None:
    """Gather the shards of N ranks, each wherever it lies, into a full buffer, cast as by cast_.

    full[i * S : (i + 1) * S] = cast(shards[i]). A shard that is that very part of full already, in
    full's dtype, is left as it is: neither read nor written.

    Raises:
        InputError: shards of different numels or dtypes, numels that do not add up to full's,
            float64 with a 16-bit dtype, or a shard that shares memory with full otherwise.
    """
    _call(_ops.gather_cast_.default, full, shards)


def split_master_(
    hi: Tensor,  # (n,) bfloat16
    lo: Tensor,  # (n,) int16
    src: Tensor,  # (n,) float32
) -> None:
    """Split fp32 values into two 16-bit planes from which join_master_ restores every bit.

    hi is src rounded half up (not to even) to bfloat16, lo the signed rest of the bits: bits = (hi
    << 16) + lo. Infinities and zeros are exact in hi. A quiet NaN is a NaN in hi; NaN patterns are
    permuted first, so that only signalling NaNs with upper half 0x7F80, which no arithmetic yields,
    look like another value there.

    Raises:
        InputError: numels, dtypes or devices that do not match, tensors that share memory.
    """
    _call(_ops.split_master_.default, hi, lo, src)


def join_master_(
    out: Tensor,  # (n,) float32
    hi: Tensor,  # (n,) bfloat16
    lo: Tensor,  # (n,) int16
) -> None:
    """Join the planes of split_master_ to the fp32 values they came from, bit for bit.

    Raises:
        InputError: numels, dtypes or devices that do not match, tensors that share memory.
    """
    _call(_ops.join_master_.default, out, hi, lo)


def reduce_(
    acc: Tensor,  # (S,) F, or float64
    chunks: Tensor,  # (W, S) F, or float64 where acc is; stride(1) == 1, stride(0) >= S
    scale: float = 1.0,
    accumulate: bool = False,
    stats: Tensor | None = None,  # (2,) float64, overwritten
) -> None:
    """Sum W chunks in rank order, scale, store or accumulate, and measure the result.

    v = (((c0 + c1) + c2) + ...) * scale in float32 (float64 for float64); acc = cast(v), or
    cast(acc + v) with accumulate. stats[0] becomes the sum of squares of the stored values, in
    float64 and in an order that depends on positions alone (the same bits for any number of
    threads, on CPU and CUDA); stats[1] becomes 1.0 if a stored value is not finite, else 0.0.

    A row of chunks may be acc itself. Where it is the only one, with scale 1 and nothing to
    accumulate, acc is measured as it lies: it is read once and not written.

    Raises:
        InputError: chunks that are not W dense rows of S, that share memory with acc otherwise, or
            dtypes or devices that do not match.
    """
    _call(_ops.reduce_.default, acc, chunks, scale, accumulate, stats)


def reduce_peers_(
    acc: Tensor,  # (S,) F, or float64
    peers: Sequence[Tensor],  # N x (S,) of one dtype, F, or float64 where acc is; N <= 128
    scale: float = 1.0,
    accumulate: bool = False,
    stats: Tensor | None = None,  # (2,) float64, overwritten
) -> None:
    """Do as reduce_, with the same bits, on chunks that lie in N tensors: peers[i] is rank i's.

    Raises:
        InputError: peers that are not flat tensors of S elements and one dtype, that share memory
            with acc, or dtypes or devices that do not match.
    """
    _call(_ops.reduce_peers_.default, acc, peers, scale, accumulate, stats)


def adamw_(
    masters: Sequence[Tensor],  # U x (n_u,) float32; or bfloat16 upper planes where lows are given
    lows: Sequence[Tensor],  # [] or U x (n_u,) int16, the lower planes of split_master_
    exp_avgs: Sequence[Tensor],  # U x (n_u,) float32
    exp_avg_sqs: Sequence[Tensor],  # U x (n_u,) float32
    grads: Sequence[Tensor],  # U x (n_u,) F, one dtype for all
    sends: Sequence[Tensor],  # [] or U x (n_u,) bfloat16 or float16, one dtype for all
    segments: Tensor,  # (G, 3) int64 rows [u, begin, end): elements of shard u, disjoint
    hypers: Tensor,  # (G, 6) float64 rows [lr, beta1, beta2, eps, weight_decay, decoupled]
    steps: Tensor,  # (G,) int64, steps taken so far
    active: Tensor | None = None,  # (G,) uint8; 0 = leave the segment and its step count alone
    grad_scale: Tensor | None = None,  # (1,) float32, multiplies every gradient
    skip: Tensor | None = None,  # (1,) float32; nonzero = change nothing at all
) -> None:
    """Take one AdamW (decoupled decay) or Adam (L2) step on segments of U shards, in one launch.

    The last column of hypers is 1.0 for decoupled decay, 0.0 for L2. For each active segment the
    step count t grows by one and, in float32 with factors computed in float64:

        g *= grad_scale
        p *= 1 - lr * weight_decay                                  (decoupled), or
        g += weight_decay * p                                       (L2)
        m += (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    (Adam: Kingma & Ba 2015, algorithm 1; AdamW: Loshchilov & Hutter 2019, algorithm 2.) The new p
    is also stored, cast, in sends. Nothing outside the segments is written.

    segments, hypers, steps, active, grad_scale and skip are on the shards' device. On CUDA the host
    never reads them: a row outside its shard stops the kernel with a device trap.

    Raises:
        InputError: lists of different lengths, shards of different numels, wrong dtypes or devices;
            on CPU also segments that overlap or leave their shard.
    """
    shards = (masters, lows, exp_avgs, exp_avg_sqs, grads, sends)
    _call(_ops.adamw_.default, *shards, segments, hypers, steps, active, grad_scale, skip)


def reduce_adamw_(
    master: Tensor,  # (S,) float32; or the bfloat16 upper plane where low is given
    low: Tensor | None,  # (S,) int16, the lower plane of split_master_
    exp_avg: Tensor,  # (S,) float32
    exp_avg_sq: Tensor,  # (S,) float32
    peers: Sequence[Tensor],  # N x (S,) F, one dtype for all; N <= 128
    send: Tensor | None,  # (S,) bfloat16 or float16
    segments: Tensor,  # (G, 3) int64 rows [0, begin, end): elements of the shard, ascending
    hypers: Tensor,  # (G, 6) float64, as adamw_ takes them
    steps: Tensor,  # (G,) int64, steps taken so far
    scale: float = 1.0,
    stats: Tensor | None = None,  # (2,) float64, overwritten
    active: Tensor | None = None,  # (G,) uint8; 0 = leave the segment and its step count alone
    grad_scale: Tensor | None = None,  # (1,) float32, multiplies every gradient
    skip: Tensor | None = None,  # (1,) float32; nonzero = change nothing but stats
) -> None:
    """Do as reduce_peers_ into a float32 gradient and adamw_ on it, which is nowhere stored.

    The bits of master, low, exp_avg, exp_avg_sq, send, steps and stats are those that the two
    leave, in one pass over memory. stats are of the whole gradient, before grad_scale, in segments
    or not: what they say of this gradient is known too late for its own step. A grad_scale that
    clips can be made of the norm of the step before.

    Raises:
        InputError: tensors that are not flat, of S elements, of these dtypes and on one device;
            peers that share memory with what is written; on CPU also segments that overlap, do not
            ascend or leave the shard (on CUDA a device trap, as in adamw_).
    """
    shard = (master, low, exp_avg, exp_avg_sq, list(peers), send)
    tables = (segments, hypers, steps)
    _call(_ops.reduce_adamw_.default, *shard, *tables, scale, stats, active, grad_scale, skip)


def sgd_(
    masters: Sequence[Tensor],  # U x (n_u,) float32; or bfloat16 upper planes where lows are given
    lows: Sequence[Tensor],  # [] or U x (n_u,) int16, the lower planes of split_master_
    momentum_buffers: Sequence[Tensor],  # U x (n_u,) float32; [] where no segment has momentum
    grads: Sequence[Tensor],  # U x (n_u,) F, one dtype for all
    sends: Sequence[Tensor],  # [] or U x (n_u,) bfloat16 or float16, one dtype for all
    segments: Tensor,  # (G, 3) int64 rows [u, begin, end): elements of shard u, disjoint
    hypers: Tensor,  # (G, 6) float64 [lr, momentum, dampening, weight_decay, nesterov, maximize]
    steps: Tensor,  # (G,) int64, steps taken so far
    active: Tensor | None = None,  # (G,) uint8; 0 = leave the segment and its step count alone
    grad_scale: Tensor | None = None,  # (1,) float32, multiplies every gradient
    skip: Tensor | None = None,  # (1,) float32; nonzero = change nothing at all
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

    Raises:
        InputError: lists of different lengths, shards of different numels, wrong dtypes or devices;
            on CPU also segments that overlap or leave their shard, and momentum without buffers.
    """
    shards = (masters, lows, momentum_buffers, grads, sends)
    _call(_ops.sgd_.default, *shards, segments, hypers, steps, active, grad_scale, skip)


def _fake(*args: object) -> None:
    """Return nothing, as in-place ops do; but refuse a real tensor beside a meta tensor.

    Such a call is dispatched here as well, and would otherwise be silently without effect.
    """
    devices: set[torch.device] = set()
    for arg in args:
        tensors = arg if isinstance(arg, list | tuple) else [arg]
        devices.update(item.device for item in tensors if isinstance(item, Tensor))
    if len(devices) > 1:
        names = " and ".join(sorted(str(device) for device in devices))
        raise InputError(f"zshard::ops: a call's tensors are on {names}: move all to one device")


for _name in __all__:
    torch.library.register_fake(f"zshard::{_name}", _fake)
