"""Gathers and reductions alone, shared memory beside gloo: zshard bench collectives [--quick].

Starts its own ranks (2 with one thread each by default). A gather makes every rank's shard of a
unit whole on every rank; a reduction packs a unit's gradients and sums the ranks' slices. The time
is that of the slowest rank, from a common start; outputs are poisoned before, and checked once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from command import LOOK, check, make_parser, positive, write
from environment import describe, headline
from protocol import NULL, Effort, Result, table
from rank_group import run_ranks
from torch import Tensor
from tqdm import tqdm

from zshard import ops
from zshard.comm import Comm, Transport
from zshard.tag import Tag

_TAG = Tag(0, "bench", "unit")
_GRADIENTS = 8  # tensors that are packed
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass
class Way:
    """One way of a collective.

    Args:
        run: does it once. out: what it writes, to be poisoned and checked.
    """

    name: str
    run: Callable[[], object]
    out: Tensor


def gathers(shard: Tensor, size: int, comms: dict[Transport, Comm]) -> list[Way]:
    """zshard's over both transports, gloo's own, and a copy of as many bytes."""
    ways = []
    for transport, comm in comms.items():
        full = torch.empty(size * shard.numel(), dtype=shard.dtype)
        lent = comm.shards.empty(shard.numel(), shard.dtype)
        lent.copy_(shard)

        def run(comm: Comm = comm, full: Tensor = full, lent: Tensor = lent) -> None:
            comm.reclaim(lent, _TAG)  # as before an optimizer writes
            comm.all_gather(full.view(torch.uint8), lent.view(torch.uint8), _TAG).wait()

        ways.append(Way(f"zshard {transport}", run, full))
    full, source = (torch.empty(size * shard.numel(), dtype=shard.dtype) for _ in range(2))
    ways.append(Way("gloo all_gather", lambda: _all_gather(full, shard), full))
    _all_gather(source, shard)  # pages that nothing has written would all be read from one
    copied = torch.empty_like(source)
    return [*ways, Way("copy", lambda: copied.copy_(source), copied)]


def reductions(whole: Tensor, size: int, comms: dict[Transport, Comm]) -> list[Way]:
    """zshard's over both transports, packing included, and gloo's own of what is packed already."""
    numel = whole.numel() // size
    step = whole.numel() // _GRADIENTS
    offsets = list(range(0, whole.numel(), step))
    gradients: list[Tensor | None] = [whole[at : at + step].clone() for at in offsets]
    ways = []
    for transport, comm in comms.items():
        packed = comm.shards.empty(whole.numel(), whole.dtype)
        rows = comm.shards.rows_for_me(packed)
        chunks = torch.empty(size, numel, dtype=whole.dtype) if rows is None else rows
        out, stats = torch.empty(numel), torch.zeros(2, dtype=torch.float64)

        def run(
            comm: Comm = comm,
            packed: Tensor = packed,
            chunks: Tensor = chunks,
            out: Tensor = out,
            stats: Tensor = stats,
        ) -> None:
            comm.reclaim(packed, _TAG)
            ops.pack_(packed, gradients, offsets)
            comm.exchange(chunks, packed, _TAG, comm.shards).wait()
            ops.reduce_(out, chunks, 1.0, False, stats)
            comm.shards.release(packed)

        ways.append(Way(f"zshard {transport}", run, out))
    out = torch.empty(numel, dtype=whole.dtype)
    ways.append(Way("gloo reduce_scatter", lambda: _reduce_scatter(out, whole), out))
    return ways


def check_ways(case: str, ways: Sequence[Way], tolerance: float) -> None:
    """Fail where a way's result is not the first one's."""
    for way in ways:
        way.out.fill_(float("nan"))
        way.run()
        found, wanted = way.out.float(), ways[0].out.float()
        if not torch.allclose(found, wanted, rtol=tolerance, atol=tolerance):
            raise AssertionError(f"{case}: {way.name} and {ways[0].name} differ")


def measure(case: str, ways: Sequence[Way], nbytes: int, effort: Effort) -> Result:
    """Run every way once a round, the first one twice, in one random order on all ranks."""
    order = [*((way.name, way) for way in ways), (NULL, ways[0])]
    seconds: dict[str, list[float]] = {name: [] for name, _ in order}
    shuffler = random.Random(0)
    for number in range(effort.warmups + effort.rounds):
        shuffler.shuffle(order)
        for name, way in order:
            way.out.fill_(float("nan"))
            dist.barrier()
            start = time.perf_counter()
            way.run()
            if number >= effort.warmups:
                seconds[name].append(time.perf_counter() - start)
    slowest = torch.tensor([seconds[name] for name in seconds], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = dict(zip(seconds, slowest.tolist(), strict=True))
    again = seconds.pop(NULL)
    return Result(case, seconds, again, dict.fromkeys(seconds, nbytes))


def rank_main(millions: list[int], effort: Effort) -> dict[str, object]:
    """Body of a rank: every size and dtype in turn."""
    size, rank = dist.get_world_size(), dist.get_rank()
    transports: tuple[Transport, ...] = ("peer", "group")
    comms = {name: Comm(None, torch.device("cpu"), name) for name in transports}
    results = []
    cases = [(count, dtype) for count in millions for dtype in (torch.float32, torch.bfloat16)]
    generator = torch.Generator().manual_seed(rank)
    for count, dtype in tqdm(cases, unit="case", disable=None if rank == 0 else True):
        numel = count * 1_000_000 // (64 * size * _GRADIENTS) * 64 * size * _GRADIENTS
        whole = torch.randn(numel, generator=generator).to(dtype)
        name = f"{count}M {str(dtype).removeprefix('torch.')} N={size}"
        kinds = {
            "gather": gathers(whole[: numel // size].clone(), size, comms),
            "pack and reduce": reductions(whole, size, comms),
        }
        for kind, ways in kinds.items():
            check_ways(kind, ways, 1e-5 if dtype == torch.float32 else 1e-1)
            results.append(asdict(measure(f"{kind} {name}", ways, whole.nbytes, effort)))
    return {"results": results}


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Measure, print the table, write the file; ends the process with status 2 on bad input."""
    parser = make_parser(__doc__.splitlines()[0], program, ("quick", "json"))
    parser.add_argument("--millions", type=positive, nargs="+", help="of elements; default: 16 25")
    parser.add_argument("--ranks", type=positive, default=2, help="default: 2")
    arguments = parser.parse_args(argv)
    check(parser, arguments)
    if arguments.ranks < 2:
        parser.error("--ranks: a collective takes 2 or more")
    millions = arguments.millions or ([4] if arguments.quick else [16, 25])
    effort, device = Effort.of(arguments.quick), torch.device("cpu")
    torch.set_num_threads(1)
    facts = {**describe(device), "ranks": arguments.ranks, "backend": "gloo"}
    print(f"{headline(facts)}, {arguments.ranks} rank(s)")
    found = run_ranks(
        rank_main, (millions, effort), ranks=arguments.ranks, backend="gloo", device=device
    )
    results = [Result(**fields) for fields in found["results"]]  # type: ignore[attr-defined]
    print(table(results))
    print(f"{effort.rounds} rounds after {effort.warmups} warm-ups.")
    if arguments.quick:
        print(LOOK)
    report = {"benchmark": "collectives", "environment": facts, "quick": arguments.quick}
    write(arguments, {**report, "results": [result.as_json() for result in results]})


if __name__ == "__main__":
    main()
