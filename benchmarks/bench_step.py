"""Whole training steps, zshard beside its peers and compute alone: zshard bench step [--quick].

Starts its own ranks (2 gloo ranks with one thread each by default). All contestants train in the
same processes, a step each a round, in random order; a step's time is that of its slowest rank.
Then the host's overhead: 48 tiny units, time per unit and step beyond the plain model's.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, cast

import network
import torch
import torch.distributed as dist
from command import LOOK, check, make_parser, positive, write
from contestants import MAKERS, Contestant, make_zshard
from environment import describe, headline
from peers import PEERS, choose
from protocol import NULL, Effort, Result, table
from rank_group import keep, run_ranks
from setting import TOLERANCE, Setting
from step_report import as_json, summary
from tqdm import tqdm
from variant import Variant

from zshard.gpt import SIZES

_CHECKED_STEPS = 3
_HOST_REPEATS = 5  # steps in one timed region of the host's overhead; 1 in a look
_LOOK = Effort(1, 5)  # --quick: a step takes long beside an op


def check_losses(contestants: Sequence[Contestant], setting: Setting) -> dict[str, list[float]]:
    """Train a few steps; fail where a contestant's losses are not those of the first.

    What computes alone does not train, so only its first loss counts.
    """
    batches = setting.batches(dist.get_rank())
    losses = {
        c.name: [float(c.step(*batches[i % len(batches)])) for i in range(_CHECKED_STEPS)]
        for c in contestants
    }
    wanted = losses[contestants[0].name]
    for contestant in contestants:
        counted = 1 if contestant.optimizer is None else _CHECKED_STEPS
        tolerance = max(
            TOLERANCE[setting.precision], contestant.tolerance, contestants[0].tolerance
        )
        pairs = zip(losses[contestant.name][:counted], wanted, strict=False)
        for step, (loss, want) in enumerate(pairs):
            if not abs(loss - want) <= tolerance * abs(want):
                raise AssertionError(
                    f"rank {dist.get_rank()}, {setting.model} {setting.precision}, step {step}: "
                    f"the loss is {loss} with {contestant.name} and {want} with "
                    f"{contestants[0].name}"
                )
    return losses


def measure_steps(
    case: str,
    contestants: Sequence[Contestant],
    setting: Setting,
    effort: Effort,
    repeats: int,
    ended: Callable[[], object] = lambda: None,
) -> Result:
    """Time every contestant once a round, the first one twice, in one random order on all ranks.

    Where one of them leaves communication under way after a step, every turn begins with a step
    that is not timed: it waits for what another has left, and leaves its own. In a barrier straight
    after it that would be over, so the ranks meet before.

    Args:
        repeats: steps in one timed region.
        ended: called after every round.
    """
    batches = setting.batches(dist.get_rank())
    order = [*((c.name, c) for c in contestants), (NULL, contestants[0])]
    seconds: dict[str, list[float]] = {name: [] for name, _ in order}
    exposed: dict[str, list[float]] = {name: [] for name, _ in order}
    sent: dict[str, list[float]] = {name: [] for name, _ in order}
    lead = any(contestant.trails for contestant in contestants)
    shuffler, step = random.Random(0), 0
    for number in range(effort.warmups + effort.rounds):
        shuffler.shuffle(order)
        for name, contestant in order:
            _meet(setting.device)
            if lead:
                contestant.step(*batches[step % len(batches)])
                _synchronize(setting.device)
            waited = contestant.exposed_seconds()
            sent_before = network.sent_bytes()
            start = time.perf_counter()
            for _ in range(repeats):
                contestant.step(*batches[step % len(batches)])
                step += 1
            _synchronize(setting.device)
            taken = time.perf_counter() - start
            if number >= effort.warmups:
                seconds[name].append(taken / repeats)
                exposed[name].append((contestant.exposed_seconds() - waited) / repeats)
                sent[name].append((network.sent_bytes() - sent_before) / repeats)
        ended()
    slowest = torch.tensor([seconds[name] for name in seconds], dtype=torch.float64)
    slowest = slowest.to(setting.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = dict(zip(seconds, slowest.tolist(), strict=True))
    again = seconds.pop(NULL)
    result = Result(case, seconds, again, dict.fromkeys(seconds, 0))
    if setting.device.type == "cpu":  # on CUDA the host does not wait for collectives
        medians = {name: float(torch.tensor(exposed[name]).median()) for name in seconds}
        result.extra["exposed_s"] = {n: s for n, s in medians.items() if not math.isnan(s)}
    if network.entered():
        result.extra["sent_bytes"] = {n: statistics.median(sent[n]) for n in seconds}
    return result


def _meet(device: torch.device) -> None:
    """Let all ranks start together."""
    _synchronize(device)
    dist.barrier()
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def rank_main(
    settings: list[Setting],
    variants: list[Variant],
    against: list[str],
    effort: Effort,
    check_only: bool,
) -> dict[str, object]:
    """Body of a rank: every setting in turn."""
    results: list[Result] = []
    checked: dict[str, dict[str, list[float]]] = {}
    backend, size = dist.get_backend(), dist.get_world_size()
    progress = tqdm(
        total=len(settings) * (0 if check_only else effort.warmups + effort.rounds) or None,
        unit="round",
        disable=None if dist.get_rank() == 0 else True,
    )
    for setting in settings:
        host = setting.model == "units"
        case = f"{setting.model} {setting.tokens} tokens {setting.precision} N={size}"
        progress.set_postfix_str(case)
        fit = [name for name in against if PEERS[name].unfit(setting, backend, size) is None]
        contestants = [make_zshard(setting, variant) for variant in variants]
        contestants += [MAKERS[name](setting) for name in (*fit, "plain" if host else "compute")]
        if backend != "fake":  # its collectives leave the results undefined
            trained = [c for c in contestants if c.name != "plain" or size == 1]
            checked[case] = check_losses(trained, setting)
        if not check_only:
            repeats = _HOST_REPEATS if host and effort != _LOOK else 1
            results.append(
                measure_steps(case, contestants, setting, effort, repeats, progress.update)
            )
        del contestants
        gc.collect()
        found: dict[str, object] = {"results": [asdict(r) for r in results], "losses": checked}
        keep({**found, "ended_after": case})
    progress.close()
    return found


def settings_of(arguments: argparse.Namespace) -> list[Setting]:
    """The cases that the command line asks for."""
    device = torch.device(arguments.device)
    found = [
        Setting(model, tokens, precision, device)
        for model in arguments.model
        for tokens in arguments.tokens
        for precision in arguments.precision
    ]
    return found if arguments.skip_host else [*found, Setting("units", 4, "fp32", device)]


class Asked(NamedTuple):
    """What the command line asks for."""

    arguments: argparse.Namespace
    variants: list[Variant]
    peers: list[str]  # keys of PEERS
    not_run: list[str]  # sentences about the others


def make_step_parser(program: str | None) -> argparse.ArgumentParser:
    """The options; those that --quick changes have no default yet."""
    parser = make_parser(__doc__.splitlines()[0], program)
    parser.add_argument("--model", choices=SIZES, help="default: 25m 100m", nargs="+")
    parser.add_argument("--tokens", type=positive, help="of a rank; default: 128 1024", nargs="+")
    parser.add_argument(
        "--precision",
        choices=list(TOLERANCE),
        help="default all: fp32; bf16, reduced in fp32; or bf16/bf16, reduced in bf16",
        nargs="+",
    )
    parser.add_argument(
        "--against",
        metavar="PEER,...",
        help=f"of {', '.join(PEERS)}; or none; default: all that are installed",
    )
    parser.add_argument(
        "--zshard",
        metavar="VARIANT,...",
        default="zero3",
        help="how zshard runs, the first compared with all others: zero3, zero2, zero1, ddp, "
        "prefetch=0, reduce=bf16, peer (comm='peer'), trace (record every step), split (the master "
        "as two planes, where bf16 computes), joined by + in one variant; default: zero3",
    )
    parser.add_argument("--ranks", type=positive, default=2, help="default: 2")
    parser.add_argument(
        "--backend",
        choices=("gloo", "nccl", "fake"),
        default="gloo",
        help="fake: one rank of many, simulated; default: gloo",
    )
    parser.add_argument(
        "--network",
        metavar="RATE",
        help="join 2 ranks by a wire of this rate, as tc spells it: 1gbit; needs root",
    )
    parser.add_argument("--skip-host", action="store_true", help="leave the 48 tiny units out")
    parser.add_argument("--check-only", action="store_true", help="compare losses, time nothing")
    return parser


def parse(argv: Sequence[str] | None, program: str | None) -> Asked:
    """Read and check the command line; ends the process with status 2 on bad input."""
    parser = make_step_parser(program)
    arguments = parser.parse_args(argv)
    check(parser, arguments)
    if arguments.backend == "nccl":
        gpus = torch.cuda.device_count() if arguments.device == "cuda" else 0
        if arguments.ranks > gpus:
            parser.error(
                f"--backend nccl --ranks {arguments.ranks}: NCCL needs --device cuda and a GPU a "
                f"rank, here are {torch.cuda.device_count()}; use gloo or fake"
            )
    wired = arguments.ranks == 2 and arguments.backend == "gloo" and arguments.device == "cpu"
    if arguments.network and not wired:
        parser.error("--network: for --ranks 2 --backend gloo --device cpu")
    if arguments.check_only and arguments.plot:
        parser.error("--plot with --check-only: nothing is timed, so there is nothing to draw")
    if arguments.check_only and arguments.backend == "fake":
        parser.error("--check-only --backend fake: its losses mean nothing; use gloo or nccl")
    quick = arguments.quick
    defaults = {
        "model": ["small"] if quick else ["25m", "100m"],
        "tokens": [128] if quick else [128, 1024],
        "precision": ["fp32"] if quick else list(TOLERANCE),
    }
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    try:
        option = "--zshard"
        variants = Variant.parse_all(arguments.zshard)
        option = "--against"
        peers, not_run = choose(arguments.against)
    except ValueError as error:
        parser.error(f"{option} {error}")
    if arguments.network and any(variant.comm == "peer" for variant in variants):
        parser.error("--network with --zshard peer: memory that the ranks share is no wire")
    reasons = {
        reason
        for name in peers
        for setting in settings_of(arguments)
        if (reason := PEERS[name].unfit(setting, arguments.backend, arguments.ranks))
    }
    return Asked(arguments, variants, peers, [*not_run, *sorted(reasons)])


def draw(results: list[Result], title: str, path: Path) -> None:
    """The stacked bars; matplotlib is needed for nothing else."""
    from plots import plot_steps

    plot_steps(results, path, title)


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Measure, print the tables, write the files; ends the process with status 2 on bad input."""
    arguments, variants, peers, not_run = parse(argv, program)
    effort, device = _LOOK if arguments.quick else Effort(), torch.device(arguments.device)
    torch.set_num_threads(1)
    facts = {**describe(device), "ranks": arguments.ranks, "backend": arguments.backend}
    facts["network"] = arguments.network or "this machine's own"
    facts |= {p: version(p) for name in peers if (p := PEERS[name].package)}
    title = f"{headline(facts)}, {arguments.ranks} {arguments.backend} rank(s)"
    print(title)
    with network.joined(arguments.network) as namespaces:
        found = run_ranks(
            rank_main,
            (settings_of(arguments), variants, peers, effort, arguments.check_only),
            ranks=arguments.ranks,
            backend=arguments.backend,
            device=device,
            namespaces=namespaces,
        )
    if "ended_after" in found:
        not_run = [*not_run, f"FAILED: ended {found['because']}; after {found['ended_after']}"]
    losses = cast("dict[str, dict[str, list[float]]]", found["losses"])
    results = [Result(**fields) for fields in cast("list[dict[str, object]]", found["results"])]  # type: ignore[arg-type]
    for case, by_name in losses.items():
        print(f"losses agree, {case}: {', '.join(by_name)}")
    if not arguments.check_only:
        print(table(results), summary(results), sep="\n\n")
        print(f"{effort.rounds} rounds after {effort.warmups} warm-ups.")
    print(*not_run, *([LOOK] if arguments.quick else []), sep="\n")
    report = {
        "benchmark": "step",
        "environment": facts,
        "quick": arguments.quick,
        "not_run": not_run,
        "losses": losses,
        "results": [as_json(result) for result in results],
    }
    write(arguments, report, partial(draw, results, title))
    if "ended_after" in found:
        sys.exit(1)


if __name__ == "__main__":
    main()
