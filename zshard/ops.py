"""The tensor ops of zshard's C++/CUDA extension, in place: each is one pass over its memory.

F below is float32, bfloat16 or float16. A *flat* tensor is 1-D and contiguous. All tensors of a
call are on one device, CPU or CUDA; on CUDA the work goes on the current stream and nothing waits
for it. Conversions round to nearest even and a NaN stays a NaN. CPU (any instruction set) and CUDA
give the same bits for every element, wherever it lies; zshard.reference holds the same functions in
plain torch.

Every function raises zshard.errors.InputError for a wrong shape, dtype, device, offset or count,
with the values and what to do. The ops are registered as torch.ops.zshard.*, with fake
implementations for tracing. Autograd records none of them: nothing gets a gradient, and the version
counter of what is written stays, so they are for tensors that no graph has saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import InputError
from .op_call import call, fake
from .optim_ops import adamw_, reduce_adamw_, sgd_

__all__ = [
    "adamw_",
    "cast_",
    "clip_factor_",
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


def pack_(
    out: Tensor, sources: Sequence[Tensor | None], offsets: Sequence[int], scale: float = 1.0
) -> None:
    """Copy tensors into a flat buffer, cast and scaled, and zero everything between them.

    out[offsets[i] + k] = cast(float32(sources[i].flatten()[k]) * float32(scale)). What no source
    covers, a missing source (None) or padding, becomes 0. With scale 1 and equal dtypes it is an
    exact copy, NaN bits included.

    Args:
        out: (n,) F or float64.
        sources: of any shape and strides; F each, or all float64 where out is.
        offsets: in elements; ascending, offsets[i] + numel(i) <= offsets[i + 1] and <= n.

    Raises:
        InputError: an offset that does not fit, float64 mixed with F, or a source that shares
            memory with out.
    """
    call(_ops.pack_.default, out, *_present("pack_", "sources", sources, offsets), scale)


def unpack_(
    targets: Sequence[Tensor | None], flat: Tensor, offsets: Sequence[int], scale: float = 1.0
) -> None:
    """Copy the ranges of a flat buffer into tensors, cast and scaled: the reverse of pack_.

    A missing target (None) skips its range.

    Args:
        targets: of any shape, and strides without overlap; F each, or all float64 where flat is.
        flat: (n,) F or float64.
        offsets: as of pack_.

    Raises:
        InputError: an offset that does not fit, float64 mixed with F, a target that overlaps itself
            or shares memory with flat.
    """
    present, offsets = _present("unpack_", "targets", targets, offsets)
    call(_ops.unpack_.default, present, flat, offsets, scale)


def _present(
    op: str, name: str, tensors: Sequence[Tensor | None], offsets: Sequence[int]
) -> tuple[list[Tensor], Sequence[int]]:
    """The tensors that are there, and their offsets."""
    if len(tensors) != len(offsets):
        raise InputError(
            f"zshard::{op}: {len(tensors)} {name} but {len(offsets)} offsets: give one offset for "
            f"each of the {name}"
        )
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) != len(tensors):
        offsets = [at for tensor, at in zip(tensors, offsets, strict=True) if tensor is not None]
    return present, offsets


def cast_(out: Tensor, src: Tensor) -> None:
    """Convert a flat buffer to another dtype. F to any F; float64 only from and to float32.

    Both are flat, (n,).

    Raises:
        InputError: numels or devices that differ, a tensor that is not flat, float64 with a 16-bit
            dtype, tensors that share memory (but for one and the same, which is left as it is).
    """
    call(_ops.cast_.default, out, src)


def gather_cast_(full: Tensor, shards: Sequence[Tensor]) -> None:
    """Gather the shards of N ranks, each wherever it lies, into a full buffer, cast as by cast_.

    full[i * S : (i + 1) * S] = cast(shards[i]). A shard that is that very part of full already, in
    full's dtype, is left as it is: neither read nor written.

    Args:
        full: (N * S,) F or float64.
        shards: N x (S,) of one dtype, F or float64; N <= 128.

    Raises:
        InputError: shards of different numels or dtypes, numels that do not add up to full's,
            float64 with a 16-bit dtype, or a shard that shares memory with full otherwise.
    """
    call(_ops.gather_cast_.default, full, shards)


def split_master_(hi: Tensor, lo: Tensor, src: Tensor) -> None:
    """Split fp32 values into two 16-bit planes from which join_master_ restores every bit.

    hi is src rounded half up (not to even) to bfloat16, lo the signed rest of the bits: bits = (hi
    << 16) + lo. Infinities and zeros are exact in hi. A quiet NaN is a NaN in hi; NaN patterns are
    permuted first, so that only signalling NaNs with upper half 0x7F80 or 0xFF80, which no
    arithmetic yields, look like another value there.

    Args:
        hi: (n,) bfloat16; lo: (n,) int16; src: (n,) float32.

    Raises:
        InputError: numels, dtypes or devices that do not match, tensors that share memory.
    """
    call(_ops.split_master_.default, hi, lo, src)


def join_master_(out: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Join the planes of split_master_ to the fp32 values they came from, bit for bit.

    Args:
        out: (n,) float32; hi: (n,) bfloat16; lo: (n,) int16.

    Raises:
        InputError: numels, dtypes or devices that do not match, tensors that share memory.
    """
    call(_ops.join_master_.default, out, hi, lo)


def reduce_(
    acc: Tensor,
    chunks: Tensor,
    scale: float = 1.0,
    accumulate: bool = False,
    stats: Tensor | None = None,
) -> None:
    """Sum W chunks in rank order, scale, store or accumulate, and measure the result.

    v = (((c0 + c1) + c2) + ...) * scale in float32 (float64 for float64); acc = cast(v), or
    cast(acc + v) with accumulate. stats[0] becomes the sum of squares of the stored values, in
    float64 and in an order that depends on positions alone (the same bits for any number of
    threads, on CPU and CUDA); stats[1] becomes 1.0 if a stored value is not finite, else 0.0.

    A row of chunks may be acc itself. Where it is the only one, with scale 1 and nothing to
    accumulate, acc is measured as it lies: it is read once and not written.

    Args:
        acc: (S,) F or float64.
        chunks: (W, S) F, but float64 where acc is; stride(1) == 1, stride(0) >= S.
        stats: (2,) float64, overwritten.

    Raises:
        InputError: chunks that are not W dense rows of S, that share memory with acc otherwise, or
            dtypes or devices that do not match.
    """
    call(_ops.reduce_.default, acc, chunks, scale, accumulate, stats)


def reduce_peers_(
    acc: Tensor,
    peers: Sequence[Tensor],
    scale: float = 1.0,
    accumulate: bool = False,
    stats: Tensor | None = None,
) -> None:
    """Do as reduce_, with the same bits, on chunks that lie in N tensors: peers[i] is rank i's.

    Args:
        acc: (S,) F or float64.
        peers: N x (S,) of one dtype, F, but float64 where acc is; N <= 128.
        stats: (2,) float64, overwritten.

    Raises:
        InputError: peers that are not flat tensors of S elements and one dtype, that share memory
            with acc, or dtypes or devices that do not match.
    """
    call(_ops.reduce_peers_.default, acc, peers, scale, accumulate, stats)


def clip_factor_(
    factor: Tensor, norm: Tensor, squares: Tensor, max_norm: float, scale: Tensor | None = None
) -> None:
    """Take a norm from its square, and the factor that clips to max_norm, in one launch.

    norm = cast(sqrt(squares * scale^2)), in float64; factor = min(max_norm / (norm + 1e-6), 1),
    rounded as by torch.nn.utils.clip_grads_with_norm_. A norm that is NaN gives a factor that is.

    Args:
        factor, norm: (1,) float32 both, or float64, in which the factor is computed then.
        squares: (1,) float64, the sum of the gradients' squares.
        scale: (1,) of factor's dtype, by which the gradients are still to be multiplied.

    Raises:
        InputError: other shapes, dtypes or devices, or tensors that share memory.
    """
    call(_ops.clip_factor_.default, factor, norm, squares, max_norm, scale)


for _name in __all__:
    torch.library.register_fake(f"zshard::{_name}", fake)
