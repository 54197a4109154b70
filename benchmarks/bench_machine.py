"""A profile of this machine for zshard.plan, measured by ranks at work: zshard bench machine.

Every rate is what one rank reaches while the others do the same beside it: matrix products and
attention, the ops between them, passes over large buffers, zshard's own collectives, and by how
much these slow products that run under them. ``zshard plan --calibrate`` calls it.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from environment import describe, headline
from rank_group import run_ranks
from torch import nn
from tqdm import tqdm

from zshard.comm import Comm
from zshard.planning.machine import Link, Machine
from zshard.planning.rehearsal import Meter
from zshard.planning.work import Work
from zshard.tag import Tag
from zshard.transports.handle import Handle
from zshard.unitmap import UnitSpec

_Found = TypeVar("_Found")
_TAG = Tag(0, "gather", "calibration")
_WIDTH, _HEADS = 512, 8
_LAYERS = 8  # whose weights products go through in turn: more than a cache holds
_ROUNDS = 15
_REGION = 0.03  # seconds at least: what other processes take evens out
_LARGE = 1 << 24  # elements of a pass over memory, beyond every cache
_ROWS = (1 << 19, 1 << 23)  # bytes that each rank contributes to a collective


def timed(work: Callable[[], object]) -> float:
    """Seconds of ``work``, begun by all ranks together."""
    dist.barrier()
    _finish()
    began = time.perf_counter()
    work()
    _finish()
    return time.perf_counter() - began


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Bench:
    """Measures one rank of a group in step with the others.

    Args:
        tokens: rows of what is computed with, and the length of its sequence.
        rounds: of which the median is taken.
    """

    def __init__(self, device: torch.device, tokens: int, rounds: int) -> None:
        self.device, self.tokens, self.rounds = device, tokens, rounds
        self.comm = Comm(None, device, "group")

    def seconds(self, work: Callable[[], object]) -> float:
        """The median over rounds of the slowest rank's time: in a step the others wait for it."""
        work()
        repeats = math.ceil(_REGION / float(self._slowest([timed(work)])))

        def region() -> None:
            for _ in range(repeats):
                work()

        slowest = self._slowest([timed(region) for _ in range(self.rounds)])
        return float(slowest.median()) / repeats

    def _slowest(self, taken: list[float]) -> torch.Tensor:
        """Of every round, the longest that any rank has taken."""
        seconds = torch.tensor(taken, dtype=torch.float64, device=self.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds

    # --- computing -------------------------------------------------------------------------------

    def products(self, dtype: torch.dtype) -> Callable[[], object]:
        """The three products of linear layers' forward and backward."""
        x, g = (
            torch.randn(self.tokens, width, device=self.device).to(dtype)
            for width in (_WIDTH, 4 * _WIDTH)
        )
        layers = torch.randn(_LAYERS, 4 * _WIDTH, _WIDTH, device=self.device).to(dtype)

        def work() -> None:
            for w in layers:
                x @ w.t()  # dropped at once, as packed gradients are: memory is used again
                g @ w
                g.t() @ x

        return work

    def product_rate(self, dtype: torch.dtype) -> float:
        """Floating-point operations a second of ``products``."""
        each = 2 * self.tokens * _WIDTH * 4 * _WIDTH
        return _LAYERS * 3 * each / self.seconds(self.products(dtype))

    def attention_rate(self, dtype: torch.dtype) -> float:
        """Likewise, of causal attention, forward and backward."""
        shape = (1, _HEADS, self.tokens, _WIDTH // _HEADS)
        q, k, v = (torch.randn(shape, device=self.device).to(dtype) for _ in range(3))
        for tensor in (q, k, v):
            tensor.requires_grad_()

        def work() -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        return sum(call.flops * n for call, n in counted(work).items()) / self.seconds(work)

    def pointwise_rate(self) -> float:
        """Bytes a second of the ops between the products, fp32 and bf16."""
        norm = nn.RMSNorm(_WIDTH).to(self.device)
        x = torch.randn(self.tokens, _WIDTH, device=self.device, requires_grad=True)

        def work() -> None:
            wide = norm(x).repeat(1, 4)
            (F.gelu(wide) + F.gelu(wide.bfloat16()) * 2).sum().backward()

        return sum(call.bytes * n for call, n in counted(work).items()) / self.seconds(work)

    def call_seconds(self) -> float:
        """Time of an op that does nothing much, forward or backward."""
        x = torch.randn(8, device=self.device, requires_grad=True)

        def work() -> None:
            y = x
            for _ in range(50):
                y = (y * 2) + 1
            y.sum().backward()

        return self.seconds(work) / sum(counted(work).values())

    def memory_rate(self) -> float:
        """Bytes a second that passes over large buffers read and write."""
        a, b, c = (torch.ones(_LARGE, device=self.device) for _ in range(3))
        return 3 * a.nbytes / self.seconds(lambda: torch.add(a, b, out=c))

    # --- sending ---------------------------------------------------------------------------------

    def gather(self, row: int) -> Callable[[], object]:
        """An all-gather of ``row`` bytes of each rank."""
        full = torch.zeros(row * self.comm.size, dtype=torch.uint8, device=self.device)
        own = full[self.comm.rank * row :][:row]
        return lambda: self.comm.all_gather(full, own, _TAG)

    def exchange(self, row: int) -> Callable[[], object]:
        """The exchange of a reduction of ``row`` bytes of each rank and to each."""
        rows = self.comm.shards.row_count(torch.float32)
        sent = torch.zeros(row // 4 * self.comm.size, device=self.device)
        received = torch.zeros(row // 4 * rows, device=self.device)
        return lambda: self.comm.exchange(received, sent, _TAG, self.comm.shards)

    def link(self, make: Callable[[int], Callable[[], object]]) -> Link:
        """Bandwidth and latency of a collective, from two sizes."""
        small, large = (self.seconds(_waited(make(row))) for row in _ROWS)
        sent = [row * (self.comm.size - 1) for row in _ROWS]
        bandwidth = (sent[1] - sent[0]) / max(large - small, 1e-9)
        hops = max(self.comm.size - 1, 1).bit_length()
        return Link(bandwidth, max(small - sent[0] / bandwidth, 0.0) / hops)

    def shared(self) -> Link | None:
        """What reads the memory of ranks that share a host; None for GPUs."""
        if self.device.type != "cpu":
            return None
        comm = Comm(None, self.device, "peer")

        def make(row: int) -> Callable[[], object]:
            full = torch.zeros(row * comm.size, dtype=torch.uint8)
            lent = comm.shards.empty(row, torch.uint8)

            def work() -> Handle:
                comm.reclaim(lent, _TAG)  # as before an optimizer writes
                return comm.all_gather(full, lent, _TAG)

            return work

        return self.link(make)

    def interference(self) -> float:
        """Of a collective's time, the part by which products that run under it take longer."""
        starts = [self.gather(_ROWS[1]), self.exchange(_ROWS[1])]
        alone = sum(self.seconds(_waited(start)) for start in starts)
        products = self.products(torch.float32)
        repeats = max(1, round(2 * alone / self.seconds(products)))

        def compute() -> None:
            for _ in range(repeats):
                products()

        def twice() -> None:
            for _ in starts:
                compute()

        def under() -> None:
            for start in starts:
                handle = start()
                compute()
                handle.wait()  # type: ignore[attr-defined]

        under()
        # Differences within a round: a machine that others use changes between two medians.
        rounds = [(timed(twice), timed(under)) for _ in range(self.rounds)]
        without, beside = (self._slowest(list(each)) for each in zip(*rounds, strict=True))
        slowed = float((beside - without).median())
        return min(max(slowed / alone, 0.0), 1.0)


def counted(work: Callable[[], object]) -> Work:
    """The calls of ops that ``work`` makes."""
    with (meter := Meter([UnitSpec("", nn.Identity(), None, ())])):
        work()
    return meter.total


def _waited(start: Callable[[], object]) -> Callable[[], object]:
    return lambda: start().wait()  # type: ignore[attr-defined]


def rank_main(
    device: torch.device, tokens: int, facts: dict[str, object], rounds: int = _ROUNDS
) -> dict[str, object]:
    """Body of a rank: the profile."""
    torch.manual_seed(dist.get_rank())
    bench = Bench(device, tokens, rounds)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    several = bench.comm.size > 1
    hidden = None if dist.get_rank() == 0 else True
    bar = tqdm(total=11 if several else 7, unit="rate", disable=hidden)

    def rate(function: Callable[..., _Found], *arguments: object) -> _Found:
        found = function(*arguments)
        bar.update()
        return found

    flops = {name: rate(bench.product_rate, dtype) for name, dtype in dtypes.items()}
    for name, dtype in dtypes.items():
        flops[f"attention {name}"] = rate(bench.attention_rate, dtype)
    machine = Machine(
        name=str(facts["processor"]),
        flops=flops,
        memory=rate(bench.memory_rate),
        pointwise=rate(bench.pointwise_rate),
        call=rate(bench.call_seconds),
        gather=rate(bench.link, bench.gather) if several else None,
        reduce=rate(bench.link, bench.exchange) if several else None,
        shared=rate(bench.shared) if several else None,
        interference=rate(bench.interference) if several and device.type == "cpu" else 0.0,
        sums_on_host=device.type == "cpu",
        facts={**facts, "tokens": tokens},
    )
    bar.close()
    return asdict(machine)


def show(machine: Machine) -> str:
    """The profile, a line each."""
    lines = [f"{name} products" if " " not in name else name for name in machine.flops]
    text = [
        f"{line:24} {rate / 1e9:10,.1f}e9 operations/s"
        for line, rate in zip(lines, machine.flops.values(), strict=True)
    ]
    text.append(f"{'large passes':24} {machine.memory / 1e9:10,.1f} GB/s")
    text.append(f"{'other ops':24} {machine.pointwise / 1e9:10,.1f} GB/s")
    text.append(f"{'a call':24} {machine.call * 1e6:10,.1f} us")
    for name in ("gather", "reduce", "shared"):
        link = getattr(machine, name)
        if link is not None:
            rate, latency = link.bandwidth / 1e9, link.latency * 1e6
            text.append(f"{name:24} {rate:10,.2f} GB/s from others, {latency:,.0f} us")
    text.append(f"{'interference':24} {machine.interference:10.0%} of hidden communication")
    return "\n".join(text)


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    parser = argparse.ArgumentParser(program, description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, required=True, help="that share this machine")
    parser.add_argument("--output", metavar="FILE", required=True, help="the profile, JSON")
    parser.add_argument(
        "--tokens",
        type=int,
        default=256,
        help="of a rank's batch: small products are slower (default: 256)",
    )
    parser.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        default="nccl" if torch.cuda.is_available() else "gloo",
        help="nccl: a GPU a rank; gloo: the CPU (default here: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    if min(arguments.ranks, arguments.tokens) < 1:
        parser.error("--ranks and --tokens: whole numbers, 1 or more")
    output, folder = Path(arguments.output), Path(arguments.output).absolute().parent
    if output.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        parser.error(f"--output {output}: name a file in a folder that can be written to")
    if arguments.backend == "nccl" and torch.cuda.device_count() < arguments.ranks:
        parser.error(
            f"--backend nccl --ranks {arguments.ranks}: NCCL needs a GPU a rank, and there are "
            f"{torch.cuda.device_count()} here; --backend gloo measures the CPU"
        )
    device = torch.device("cuda" if arguments.backend == "nccl" else "cpu")
    torch.set_num_threads(1)
    facts = {**describe(device), "ranks": arguments.ranks, "backend": arguments.backend}
    print(f"{headline(facts)}, {arguments.ranks} {facts['backend']} rank(s)")
    found = run_ranks(
        rank_main,
        (device, arguments.tokens, facts, _ROUNDS),
        ranks=arguments.ranks,
        backend=arguments.backend,
        device=device,
    )
    machine = Machine.from_dict(found)
    print(show(machine))
    machine.save(output)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
