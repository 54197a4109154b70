"""How far zshard.plan's step times can be trusted: predicted over measured, zshard bench plan.

For each number of ranks and setting the machine is measured by the same ranks (zshard bench
machine) before, between and after the steps, and a step of every strategy is predicted from each
profile. The steps are run in rounds, all strategies in each, in a random order. Every turn has a
step that is not timed, and straight after it one that is: zero2's leave gathers under way, which
the next step waits for, and in a barrier between the two they would be over.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import bench_machine
import torch
import torch.distributed as dist
from command import LOOK, check, make_parser, positive, write
from contestants import make_zshard
from environment import describe, headline, stolen
from protocol import Effort, Ratio, median_ratio
from rank_group import run_ranks
from setting import TOLERANCE, Setting
from tabulate import tabulate
from tqdm import tqdm
from variant import Variant

import zshard
from zshard.gpt import SIZES

STRATEGIES = ("ddp", "zero2", "zero3")


@dataclass
class Case:
    """One strategy in one setting.

    Args:
        predicted: seconds; exposed: of them, waiting.
        seconds: of every round, of the slowest rank; waited: of it, the median over the rounds.
    """

    ranks: int
    comm: str
    setting: str
    strategy: str
    predicted: float
    exposed: float
    seconds: list[float]
    waited: float

    @property
    def ratio(self) -> Ratio:
        """Predicted over measured."""
        return median_ratio([self.predicted] * len(self.seconds), self.seconds)

    def as_json(self) -> dict[str, object]:
        """Every figure."""
        measured = statistics.median(self.seconds)
        return {**asdict(self), "measured": measured, "ratio": self.ratio._asdict()}


class Steps:
    """Steps of every strategy in rounds, in a random order each."""

    def __init__(self, setting: Setting, effort: Effort, comm: Literal["group", "peer"]) -> None:
        self._contestants = {
            name: make_zshard(setting, Variant(name, comm=comm)) for name in STRATEGIES
        }
        self._batches = setting.batches(dist.get_rank())
        self._shuffler = random.Random(0)
        self._rounds: list[list[tuple[float, float]]] = []
        for number in range(effort.warmups):
            self._round(number)

    def _round(self, number: int) -> dict[str, tuple[float, float]]:
        order = list(STRATEGIES)
        self._shuffler.shuffle(order)
        taken = {}
        for name in order:
            one, batch = self._contestants[name], self._batches[number % len(self._batches)]
            dist.barrier()
            one.step(*batch)
            waited, began = one.exposed_seconds(), time.perf_counter()
            one.step(*batch)
            taken[name] = time.perf_counter() - began, one.exposed_seconds() - waited
        return taken

    def run(self, rounds: int) -> None:
        """Run that many more rounds."""
        for number in range(rounds):
            taken = self._round(number)
            self._rounds.append([taken[name] for name in STRATEGIES])

    def seconds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The slowest rank's seconds, and the ranks' mean of waiting; (rounds, strategies) each."""
        found = torch.tensor(self._rounds, dtype=torch.float64)
        slowest, waited = found[..., 0].contiguous(), found[..., 1].contiguous()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(waited)
        return slowest, waited / dist.get_world_size()


def measure(
    setting: Setting, effort: Effort, comm: Literal["group", "peer"], facts: dict[str, object]
) -> tuple[list[Case], list[dict[str, object]]]:
    """Profile the machine before, between and after the steps; predict as the median profile does.

    A machine that others use changes within a minute, and may be busy for one of the three.
    """
    profile = partial(bench_machine.rank_main, setting.device, setting.tokens, facts)
    profiles = [profile()]
    steps = Steps(setting, effort, comm)
    for rounds in (effort.rounds // 2, effort.rounds - effort.rounds // 2):
        steps.run(rounds)
        profiles.append(profile())
    slowest, waited = steps.seconds()
    cases = []
    for index, name in enumerate(STRATEGIES):
        planned = [
            zshard.plan(
                setting.build(),
                dist.get_world_size(),
                strategy=name,
                precision=zshard.Precision(setting.compute, setting.reduce),
                batch=(1, setting.tokens),
                machine=zshard.Machine.from_dict(profile),
                comm=comm,
                backend="gloo",
            )
            for profile in profiles
        ]
        cases.append(
            Case(
                dist.get_world_size(),
                comm,
                f"{setting.model} {setting.tokens} tokens {setting.precision}",
                name,
                statistics.median(each.step_seconds or 0.0 for each in planned),
                statistics.median(each.exposed_seconds or 0.0 for each in planned),
                slowest[:, index].tolist(),
                float(waited[:, index].median()),
            )
        )
    return cases, profiles


def rank_main(
    settings: list[Setting],
    effort: Effort,
    comms: list[Literal["group", "peer"]],
    facts: dict[str, object],
) -> dict[str, object]:
    """Body of a rank: every setting in turn."""
    hidden = None if dist.get_rank() == 0 else True
    ways = [(setting, comm) for setting in settings for comm in comms]
    found = [
        measure(setting, effort, comm, facts)
        for setting, comm in tqdm(ways, unit="setting", disable=hidden)
    ]
    return {
        "machines": [profile for _, profiles in found for profile in profiles],
        "cases": [asdict(case) for cases, _ in found for case in cases],
    }


def table(cases: Sequence[Case]) -> str:
    """A line for each case."""
    rows = [
        (
            case.setting,
            case.ranks,
            case.comm,
            case.strategy,
            case.predicted * 1e3,
            statistics.median(case.seconds) * 1e3,
            case.ratio.median,
            case.ratio.interval,
            case.exposed * 1e3,
            case.waited * 1e3,
        )
        for case in cases
    ]
    heads = ["setting", "ranks", "comm", "strategy", "predicted ms", "measured", "ratio", "95 %"]
    return tabulate(rows, [*heads, "waiting predicted", "measured"], floatfmt=".2f")


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    parser = make_parser(__doc__.splitlines()[0], program, ("quick", "json"))
    parser.add_argument("--model", choices=SIZES, help="default: 25m", nargs="+")
    parser.add_argument("--tokens", type=positive, help="of a rank; default: 128", nargs="+")
    parser.add_argument("--precision", choices=TOLERANCE, help="default: fp32 bf16", nargs="+")
    parser.add_argument("--ranks", type=positive, help="default: 1 2 4", nargs="+")
    parser.add_argument("--comm", choices=["group", "peer"], nargs="+", help="default: both")
    arguments = parser.parse_args(argv)
    check(parser, arguments)
    effort, device = Effort.of(arguments.quick), torch.device("cpu")
    torch.set_num_threads(1)
    facts = {**describe(device), "backend": "gloo"}
    print(headline(facts))
    settings = [
        Setting(model, tokens, precision, device)
        for model in arguments.model or ["small" if arguments.quick else "25m"]
        for tokens in arguments.tokens or [128]
        for precision in arguments.precision or (["fp32"] if arguments.quick else ["fp32", "bf16"])
    ]
    cases: list[Case] = []
    machines: list[object] = []
    for ranks in arguments.ranks or ([2] if arguments.quick else [1, 2, 4]):
        comms = arguments.comm or (["peer"] if arguments.quick else ["group", "peer"])
        if ranks == 1:  # nothing is sent
            comms = ["group"]
        report = run_ranks(
            rank_main,
            (settings, effort, comms, {**facts, "ranks": ranks}),
            ranks=ranks,
            backend="gloo",
            device=device,
        )
        machines += report["machines"]  # type: ignore[operator]
        cases += [Case(**fields) for fields in report["cases"]]  # type: ignore[attr-defined]
    print(table(cases))
    if (share := stolen()) is not None:
        print(f"the host had {share:.0%} of the work wait for others")
    if arguments.quick:
        print(LOOK)
    report = {
        "benchmark": "plan",
        "environment": facts,
        "quick": arguments.quick,
        "machines": machines,
        "results": [case.as_json() for case in cases],
    }
    write(arguments, report)


if __name__ == "__main__":
    main()
