"""The copying kernels beside what torch does: packs, casts and reductions, and the plain copy.

Building a case checks every side before anything is timed. The sides of a case share operands and
outputs, so none has the better memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

# Importing FSDP2's collectives registers torch.ops.fsdp.
import torch.distributed.fsdp._fully_shard._fsdp_collectives
from protocol import Side
from torch import Tensor
from workloads import WORKLOADS, random_tensors

import zshard.reference as reference
from zshard import _C, ops

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_COPY_LIMIT = 2 << 30  # bytes moved by the copy measured beside a case


class Case(NamedTuple):
    """One comparison; ``build(device, sets)`` makes its sides, the one on trial first.

    Raises AssertionError (from build) if a side computes something wrong.
    """

    name: str
    nbytes: int  # the fewest bytes that a run of the side on trial moves
    build: Callable[[torch.device, int], list[Side]]


def same(actual: Tensor, expected: Tensor, what: str, *, rtol: float = 0.0) -> None:
    """Fail with the first differing coordinate unless the tensors agree."""
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=rtol, msg=lambda text: f"{what}: {text}"
    )


def copy_side(nbytes: int, device: torch.device, sets: int, *, by_kernel: bool = False) -> Side:
    """A plain copy that moves about ``nbytes``, half read and half written.

    Args:
        by_kernel: one that adds 0. What the driver makes of a copy in a CUDA graph took 1.56 times
            as long on an H200, and would flatter every share.
    """
    numel = max(1, min(nbytes, _COPY_LIMIT) // 8)
    sources = [torch.randn(numel, device=device) for _ in range(sets)]
    targets = [torch.empty_like(source) for source in sources]

    def run(index: int) -> None:
        if by_kernel:
            torch.add(sources[index], 0.0, out=targets[index])
        else:
            targets[index].copy_(sources[index])

    return Side("copy", run, lambda: poison(targets), 8 * numel)


def poison(tensors: Sequence[Tensor]) -> None:
    """Fill outputs with NaN, so that one that is not written cannot pass or be skipped unseen."""
    for tensor in tensors:
        tensor.fill_(float("nan"))


# --- pack -----------------------------------------------------------------------------------------


def pack_case(workload: str, source: torch.dtype, target: torch.dtype, ranks: int) -> Case:
    """Gradients into the reduce buffer: pack_ against FSDP2's chunk_cat."""
    shapes = WORKLOADS[workload]
    numels = [torch.Size(shape).numel() for shape in shapes]
    skewed = workload == "odd"
    if skewed:  # not the offsets that zshard's layout would choose
        offsets = [sum(numels[:i]) + i for i in range(len(numels))]
        total = sum(numels) + len(numels)
    else:
        layout = _C.flat_layout(numels, ranks)
        offsets, total = layout.offsets, layout.shard_size * ranks
    nbytes = sum(numels) * source.itemsize + total * target.itemsize
    padded = sum(-(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for shape in shapes)
    peer_bytes = sum(numels) * source.itemsize + padded * target.itemsize

    def build(device: torch.device, sets: int) -> list[Side]:
        grads = [random_tensors(shapes, source, device, skew=int(skewed)) for _ in range(sets)]
        memory = [torch.empty(max(total, padded), dtype=target, device=device) for _ in range(sets)]
        outs = [m[:total] for m in memory]
        peer_outs = [m[:padded].view(ranks, -1) for m in memory]

        def fresh(i: int) -> None:
            out = torch.empty(ranks, padded // ranks, dtype=target, device=device)
            torch.ops.fsdp.chunk_cat(grads[i], dim=0, num_chunks=ranks, out=out)

        sides = [
            Side("pack_", lambda i: ops.pack_(outs[i], grads[i], offsets), nbytes=nbytes),
            Side("chunk_cat", fresh, nbytes=peer_bytes, captures=False),
            Side(
                "chunk_cat, preallocated",
                lambda i: torch.ops.fsdp.chunk_cat(
                    grads[i], dim=0, num_chunks=ranks, out=peer_outs[i]
                ),
                nbytes=peer_bytes,
                captures=False,  # it asks for pinned memory
            ),
        ]
        sides = [side._replace(poison=lambda: poison(memory)) for side in sides]
        sides[0].poison()
        sides[0].run(0)
        expected = torch.empty_like(outs[0])
        reference.pack_(expected, grads[0], offsets)
        same(outs[0], expected, "pack_")
        del expected
        sides[2].poison()
        sides[2].run(0)
        rows = [_chunked(grad, ranks).to(target) for grad in grads[0]]
        same(peer_outs[0], torch.cat(rows, dim=1), "chunk_cat")
        return sides

    return Case(f"pack {_NAMES[source]}>{_NAMES[target]} {workload}", nbytes, build)


def _chunked(grad: Tensor, ranks: int) -> Tensor:
    """``grad`` padded along dimension 0 and cut into one row a rank: FSDP2's layout."""
    missing = -grad.shape[0] % ranks
    padding = grad.new_zeros((missing, *grad.shape[1:]))
    return torch.cat((grad, padding)).view(ranks, -1)


# --- cast -----------------------------------------------------------------------------------------


def cast_case(workload: str, source: torch.dtype, target: torch.dtype) -> Case:
    """A shard into its send buffer, or back: cast_ against Tensor.to and Tensor.copy_."""
    skew = int(workload == "odd")
    numel = sum(torch.Size(shape).numel() for shape in WORKLOADS[workload])
    nbytes = numel * (source.itemsize + target.itemsize)

    def build(device: torch.device, sets: int) -> list[Side]:
        shape = ((numel,),)
        sources = [random_tensors(shape, source, device, skew=skew)[0] for _ in range(sets)]
        outs = [random_tensors(shape, target, device, skew=skew)[0] for _ in range(sets)]
        sides = [
            Side("cast_", lambda i: ops.cast_(outs[i], sources[i])),
            Side("Tensor.to", lambda i: sources[i].to(target)),
            Side("Tensor.copy_", lambda i: outs[i].copy_(sources[i])),
        ]
        sides = [side._replace(poison=lambda: poison(outs), nbytes=nbytes) for side in sides]
        sides[0].poison()
        sides[0].run(0)
        expected = torch.empty_like(outs[0])
        reference.cast_(expected, sources[0])
        same(outs[0], expected, "cast_")
        return sides

    return Case(f"cast {_NAMES[source]}>{_NAMES[target]} {workload}", nbytes, build)


# --- gather-cast ----------------------------------------------------------------------------------


def gather_case(workload: str, source: torch.dtype, target: torch.dtype, ranks: int) -> Case:
    """Shards into a full buffer: gather_cast_ against a copy a shard. All memory is local here."""
    numel = sum(torch.Size(shape).numel() for shape in WORKLOADS[workload]) // ranks
    nbytes = ranks * numel * (source.itemsize + target.itemsize)

    def build(device: torch.device, sets: int) -> list[Side]:
        shapes = ((numel,),) * ranks
        shards = [random_tensors(shapes, source, device) for _ in range(sets)]
        fulls = [torch.empty(ranks * numel, dtype=target, device=device) for _ in range(sets)]
        parts = [full.chunk(ranks) for full in fulls]

        def copies(i: int) -> None:
            for part, shard in zip(parts[i], shards[i], strict=True):
                part.copy_(shard)

        sides = [
            Side("gather_cast_", lambda i: ops.gather_cast_(fulls[i], shards[i])),
            Side("Tensor.copy_ of each", copies),
            Side("_foreach_copy_", lambda i: torch._foreach_copy_(parts[i], shards[i])),
        ]
        sides = [side._replace(poison=lambda: poison(fulls), nbytes=nbytes) for side in sides]
        expected = torch.empty_like(fulls[0])
        reference.gather_cast_(expected, shards[0])
        for side in sides:
            side.poison()
            side.run(0)
            same(fulls[0], expected, side.name)
        return sides

    return Case(f"gather {ranks} x {_NAMES[source]}>{_NAMES[target]} {workload}", nbytes, build)


# --- reduce ---------------------------------------------------------------------------------------


def adder(
    numel: int, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor, Sequence[Tensor]], None]:
    """torch's fastest way to sum rows (numel,) of ``dtype`` into an fp32 tensor.

    On CPU torch.sum takes two to three times as long, and adding bf16 to fp32 up to twice as long
    as casting it first.
    """
    staged = dtype != torch.float32 and device.type == "cpu"
    wide = torch.empty(numel, device=device) if staged else None

    def add(out: Tensor, rows: Sequence[Tensor]) -> None:
        first, *others = rows
        if others and dtype == torch.float32:
            torch.add(first, others.pop(0), out=out)
        else:
            out.copy_(first)
        for row in others:
            out.add_(row if wide is None else wide.copy_(row))

    return add


def reduce_case(workload: str, dtype: torch.dtype, ranks: int, *, apart: bool = False) -> Case:
    """After the exchange: one pass of reduce_ against torch's sum, scale, norm and finite check.

    ``apart``: a tensor a rank, reduce_peers_ against sums of two. All memory is local here.
    """
    numel = sum(torch.Size(shape).numel() for shape in WORKLOADS[workload])
    nbytes = numel * (ranks * dtype.itemsize + 4)
    scale = 1.0 / ranks

    def build(device: torch.device, sets: int) -> list[Side]:
        chunks = [torch.randn(ranks, numel, device=device).to(dtype) for _ in range(sets)]
        peers = [[chunk.clone() for chunk in c] if apart else [] for c in chunks]
        accs = [torch.empty(numel, device=device) for _ in range(sets)]
        stats = torch.empty(2, dtype=torch.float64, device=device)
        add = adder(numel, dtype, device)
        found: list[Tensor] = []

        def torch_sequence(i: int) -> None:
            if apart or device.type == "cpu":
                add(accs[i], peers[i] if apart else list(chunks[i]))
            else:
                torch.sum(chunks[i], 0, dtype=torch.float32, out=accs[i])
            accs[i].mul_(scale)
            norm = torch.linalg.vector_norm(accs[i])
            found[:] = [norm, norm.isfinite()]

        def ours(i: int) -> None:
            if apart:
                ops.reduce_peers_(accs[i], peers[i], scale, stats=stats)
            else:
                ops.reduce_(accs[i], chunks[i], scale, stats=stats)

        op = "reduce_peers_" if apart else "reduce_"
        sides = [
            Side(op, ours),
            Side("sum, mul_, norm, isfinite", torch_sequence),
        ]
        sides = [side._replace(poison=lambda: poison(accs), nbytes=nbytes) for side in sides]
        sides[0].poison()
        sides[0].run(0)
        expected, expected_stats = torch.empty_like(accs[0]), torch.empty_like(stats)
        reference.reduce_(expected, chunks[0], scale, stats=expected_stats)
        same(accs[0], expected, op)
        same(stats, expected_stats, f"{op}'s stats")
        torch_sequence(0)
        same(accs[0], expected, "torch's sum", rtol=1e-5)
        # torch adds the squares in fp32: over 27M elements it is off by 0.15 %.
        same(found[0].double(), stats[0].sqrt(), "torch's norm", rtol=1e-2)
        return sides

    name = f"reduce {ranks} {'apart ' if apart else ''}x {_NAMES[dtype]} {workload}"
    return Case(name, nbytes, build)
