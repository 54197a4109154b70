"""Whole training steps, zshard beside FSDP2, DDP and compute alone: bench_step.py [--quick].

Starts its own ranks (2 gloo ranks with one thread each by default). All contestants train in the
same processes, a step each a round, in random order; a step's time is that of its slowest rank.
Then the host's overhead: 48 tiny units, time per unit and step beyond the plain model's.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from contestants import MAKERS, UNITS, Contestant, Setting
from environment import describe, headline, write_json
from protocol import NULL, Effort, Ratio, Result, median_ratio, table
from rank_group import run_ranks
from tqdm import tqdm

_CHECKED_STEPS = 3
_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "bf16/bf16": 2e-2}  # relative, of the losses
_HOST_REPEATS = 5  # steps in one timed region of the host's overhead
_NOT_RUN = "FSDP1, ZeroRedundancyOptimizer and DeepSpeed are not run."


def check(contestants: Sequence[Contestant], setting: Setting) -> dict[str, list[float]]:
    """Train a few steps; fail where a contestant's losses are not those of the first.

    What computes alone does not train, so only its first loss counts.
    """
    batches = setting.batches(dist.get_rank())
    losses = {
        c.name: [float(c.step(*batches[i % len(batches)])) for i in range(_CHECKED_STEPS)]
        for c in contestants
    }
    tolerance = _TOLERANCE[setting.precision]
    wanted = losses[contestants[0].name]
    for contestant in contestants:
        counted = 1 if contestant.optimizer is None else _CHECKED_STEPS
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
    case: str, contestants: Sequence[Contestant], setting: Setting, effort: Effort, repeats: int
) -> Result:
    """Time every contestant once a round, the first one twice, in one random order on all ranks."""
    batches = setting.batches(dist.get_rank())
    order = [*((c.name, c) for c in contestants), (NULL, contestants[0])]
    seconds: dict[str, list[float]] = {name: [] for name, _ in order}
    exposed: list[float] = []
    first, shuffler, step = contestants[0].name, random.Random(0), 0
    for number in range(effort.warmups + effort.rounds):
        shuffler.shuffle(order)
        for name, contestant in order:
            waited = contestant.exposed_seconds()
            _meet(setting.device)
            start = time.perf_counter()
            for _ in range(repeats):
                contestant.step(*batches[step % len(batches)])
                step += 1
            _synchronize(setting.device)
            taken = time.perf_counter() - start
            if number >= effort.warmups:
                seconds[name].append(taken / repeats)
                if name == first:
                    exposed.append((contestant.exposed_seconds() - waited) / repeats)
    slowest = torch.tensor([seconds[name] for name in seconds], dtype=torch.float64)
    slowest = slowest.to(setting.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = dict(zip(seconds, slowest.tolist(), strict=True))
    again = seconds.pop(NULL)
    result = Result(case, seconds, again, dict.fromkeys(seconds, 0))
    if setting.device.type == "cpu":  # on CUDA the host does not wait for collectives
        result.extra["exposed_s"] = float(torch.tensor(exposed).median())
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
    settings: list[Setting], names: list[str], effort: Effort, check_only: bool
) -> dict[str, object]:
    """Body of a rank: every setting in turn."""
    results: list[Result] = []
    checked: dict[str, dict[str, list[float]]] = {}
    fake = dist.get_backend() == "fake"
    size = dist.get_world_size()
    progress = tqdm(settings, unit="case", disable=None if dist.get_rank() == 0 else True)
    for setting in progress:
        host = setting.model == "units"
        case = f"{setting.model} {setting.tokens} tokens {setting.precision} N={size}"
        progress.set_postfix_str(case)
        wanted = ["zshard", "fsdp2", "plain"] if host else names
        wanted = [n for n in wanted if n != "ddp" or (setting.compute is None and not fake)]
        contestants = [MAKERS[name](setting) for name in wanted]
        if not fake:  # its collectives leave the results undefined
            trained = [c for c in contestants if c.name != "plain" or size == 1]
            checked[case] = check(trained, setting)
        if not check_only:
            repeats = _HOST_REPEATS if host else 1
            results.append(measure_steps(case, contestants, setting, effort, repeats))
        del contestants
        gc.collect()
    return {"results": [asdict(result) for result in results], "losses": checked}


def overheads(result: Result) -> tuple[dict[str, float], Ratio]:
    """Microseconds per unit and step beyond the plain model's; FSDP2's over zshard's."""
    plain = result.seconds["plain"]
    beyond = {
        name: [(s - p) / UNITS for s, p in zip(seconds, plain, strict=True)]
        for name, seconds in result.seconds.items()
        if name != "plain"
    }
    medians = {name: float(torch.tensor(v).median()) * 1e6 for name, v in beyond.items()}
    return medians, median_ratio(beyond["FSDP2"], beyond[result.first])


def summary(results: Sequence[Result]) -> str:
    """Overhead over compute of every contestant, exposed communication, and the host's overhead."""
    lines = []
    for result in results:
        if "compute" in result.seconds:
            parts = [
                f"{name} {median_ratio(seconds, result.seconds['compute']).median - 1:+.0%}"
                for name, seconds in result.seconds.items()
                if name != "compute"
            ]
            lines.append(f"{result.case}: over compute: {', '.join(parts)}")
        if "plain" in result.seconds:
            medians, ratio = overheads(result)
            parts = [f"{name} {value:.1f} us" for name, value in medians.items()]
            lines.append(
                f"{result.case}: host, per unit and step: {', '.join(parts)}; ratio "
                f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
            )
        if "exposed_s" in result.extra:
            lines.append(f"{result.case}: zshard waits {result.extra['exposed_s'] * 1e3:.2f} ms")
    return "\n".join(lines)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    several = {"nargs": "*"}
    parser.add_argument("--model", help="default 25m 100m", **several)
    parser.add_argument("--tokens", type=int, help="of a rank; default 128 1024", **several)
    parser.add_argument(
        "--precision",
        choices=list(_TOLERANCE),
        help="default all: fp32; bf16, reduced in fp32; or bf16/bf16, reduced in bf16",
        **several,
    )
    parser.add_argument("--against", choices=["fsdp2", "ddp"], default=["fsdp2", "ddp"], **several)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=("gloo", "nccl", "fake"), default="gloo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--skip-host", action="store_true", help="leave the 48 tiny units out")
    parser.add_argument("--check-only", action="store_true", help="compare losses, time nothing")
    parser.add_argument("--quick", action="store_true", help="small defaults, fewer rounds")
    parser.add_argument("--json", metavar="FILE", help="write every figure to FILE")
    arguments = parser.parse_args()
    quick = arguments.quick
    defaults = {
        "model": ["25m"] if quick else ["25m", "100m"],
        "tokens": [128] if quick else [128, 1024],
        "precision": ["fp32", "bf16/bf16"] if quick else list(_TOLERANCE),
    }
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    effort = Effort.of(arguments.quick)
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    facts = {**describe(device), "ranks": arguments.ranks, "backend": arguments.backend}
    print(f"{headline(facts)}, {arguments.ranks} {arguments.backend} rank(s)")
    names = ["zshard", *arguments.against, "compute"]
    report = run_ranks(
        rank_main,
        (settings_of(arguments), names, effort, arguments.check_only),
        ranks=arguments.ranks,
        backend=arguments.backend,
        device=device,
    )
    results = [Result(**fields) for fields in report["results"]]  # type: ignore[attr-defined]
    if arguments.check_only:
        print("losses agree:", *report["losses"], sep="\n  ")  # type: ignore[misc]
    else:
        print(table(results))
        print(summary(results))
        print(f"{effort.rounds} rounds after {effort.warmups} warm-ups. {_NOT_RUN}")
    if arguments.json:
        figures = [result.as_json() for result in results]
        for figure, result in zip(figures, results, strict=True):
            if "plain" in result.seconds:
                medians, ratio = overheads(result)
                figure["host_us_per_unit"] = medians
                figure["host_ratio"] = ratio._asdict()
        write_json(
            arguments.json,
            {
                "benchmark": "step",
                "environment": facts,
                "quick": arguments.quick,
                "not_run": _NOT_RUN,
                "losses": report["losses"],
                "results": figures,
            },
        )


if __name__ == "__main__":
    main()
