"""Where the time of zshard's step goes beyond computing: zshard bench breakdown.

A table of one whole step (forward, backward, clip, AdamW): compute, exposed communication, pack,
reduce, optimizer, copies, and the host's own work. The parts are timed by wrapping the seam's
functions and the ops from outside while a step runs, each without what it calls of the others, so
that they add up. Compute is the plain model's forward and backward, in the same rounds and
processes. What is left of a step is the host's: hooks and bookkeeping, pages that the allocator has
given back, and what the collectives' threads take away from computing; their processor time is
given beside it.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from command import LOOK, check, make_parser, positive, write
from contestants import MAKERS, Contestant, make_zshard
from environment import describe, headline
from protocol import Effort, Ratio, median_ratio
from rank_group import run_ranks
from setting import TOLERANCE, Setting
from tqdm import tqdm
from variant import Variant

from zshard import ops
from zshard.comm import Comm
from zshard.gpt import SIZES
from zshard.transports.handle import Handle

# part of a step -> (where its functions are looked up, their names)
_SEAM: dict[str, tuple[tuple[object, str], ...]] = {
    "wait": ((Handle, "wait"), (Comm, "reclaim")),
    "meet": ((Comm, "all_gather_words"),),
    "issue": tuple((Comm, name) for name in ("all_gather", "exchange", "all_reduce", "broadcast")),
    "copy": (
        (torch.Tensor, "copy_"),
        *((ops, n) for n in ("gather_cast_", "cast_", "split_master_", "join_master_", "unpack_")),
    ),
    "pack": ((ops, "pack_"),),
    "reduce": ((ops, "reduce_"), (ops, "reduce_peers_")),
    "optimizer": ((ops, "adamw_"), (ops, "sgd_")),
}
_MEANING = {
    "compute": "the plain model's forward and backward",
    "wait": "exposed communication: for gathers and reductions",
    "meet": "exposed communication: the ranks agree on what comes next",
    "issue": "collectives are started",
    "copy": "this rank's own part of a gather, or over shared memory all of it; casts",
    "pack": "gradients into the reduce buffer",
    "reduce": "the sum over the ranks, and what follows it",
    "optimizer": "the fused update",
    "host": "the rest: hooks and bookkeeping, and what slows computing",
}


_MEASURED = ("step", "unprobed", "threads", "compute", *_SEAM)


class Clock:
    """Shares time out among the parts of a step: to the innermost function that is running.

    Attributes:
        seconds: of each part; processor: likewise, only while the host's thread was running.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("host", *_SEAM), 0.0)
        self.processor = dict(self.seconds)
        self._parts: list[str] = []
        self._since = self._run_since = 0.0

    @property
    def run(self) -> float:
        """Processor time of the host's thread, all parts together."""
        return sum(self.processor.values())

    def enter(self, part: str) -> None:
        self._turn()
        self._parts.append(part)

    def leave(self) -> None:
        self._turn()
        self._parts.pop()

    def _turn(self) -> None:
        now, run = time.perf_counter(), time.thread_time()
        if self._parts:
            part = self._parts[-1]
            self.seconds[part] += now - self._since
            self.processor[part] += run - self._run_since
        self._since, self._run_since = now, run


@contextmanager
def probed() -> Iterator[Clock]:
    """Time every part for the length of the context; "host" is what belongs to no other."""
    clock = Clock()
    kept = [(owner, name, getattr(owner, name)) for seam in _SEAM.values() for owner, name in seam]
    parts = [part for part, seam in _SEAM.items() for _ in seam]
    for part, (owner, name, function) in zip(parts, kept, strict=True):
        setattr(owner, name, _timed(clock, part, function))
    clock.enter("host")
    try:
        yield clock
    finally:
        clock.leave()
        for owner, name, function in kept:
            setattr(owner, name, function)


def _timed(clock: Clock, part: str, function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def timed(*args: object, **kwargs: object) -> object:
        clock.enter(part)
        try:
            return function(*args, **kwargs)
        finally:
            clock.leave()

    return timed


Rounds = dict[str, list[float]]  # "step" or a part of it, "host" excepted -> of every round


@dataclass
class Breakdown:
    """Seconds of every round, the mean of the ranks.

    Args:
        wall: on the clock. processor: likewise, only while the host's thread was running: on a
            machine that others use too, the steadier figure.
        unprobed: of a step whose parts are not timed, on the clock.
        threads: processor time of the collectives' threads in a step.
    """

    case: str
    wall: Rounds
    processor: Rounds
    unprobed: list[float]
    threads: list[float]

    @property
    def probes(self) -> Ratio:
        """What timing the parts costs: the step with it over the step without."""
        return median_ratio(self.wall["step"], self.unprobed)

    def table(self) -> str:
        """A line for each part, and their sum."""
        wall, processor = _medians(self.wall), _medians(self.processor)
        lines = [f"{self.case:36} {'ms':>9} {'of step':>8} {'processor ms':>13} {'of compute':>11}"]
        for part in (*_MEANING, "step"):
            lines.append(
                f"{part:36} {wall[part] * 1e3:9.2f} {wall[part] / wall['step']:8.1%} "
                f"{processor[part] * 1e3:13.2f} {processor[part] / processor['compute']:11.1%}  "
                f"{_MEANING.get(part, 'the sum')}"
            )
        ratio = self.probes
        lines.append(
            f"threads of the collectives: {statistics.median(self.threads) * 1e3:.2f} ms of "
            f"processor time. The step over one whose parts are not timed: {ratio.median:.3f} "
            f"({ratio.low:.3f}-{ratio.high:.3f})"
        )
        return "\n".join(lines)

    def as_json(self) -> dict[str, object]:
        """Every figure, the rounds' own too."""
        medians = {"wall": _medians(self.wall), "processor": _medians(self.processor)}
        return {**asdict(self), "median_s": medians, "step_over_unprobed": self.probes._asdict()}


def _medians(rounds: Rounds) -> dict[str, float]:
    """The median of each part and of the step; "host" is what the others leave of the step."""
    found = {part: statistics.median(seconds) for part, seconds in rounds.items()}
    return {**found, "host": 2 * found["step"] - sum(found.values())}


def _run(contestant: Contestant, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """Take a step; seconds on the clock, and of the processor in the host's thread."""
    dist.barrier()
    start, run = time.perf_counter(), time.thread_time()
    contestant.step(*batch)
    return time.perf_counter() - start, time.thread_time() - run


def measure(case: str, setting: Setting, effort: Effort, variant: Variant) -> Breakdown:
    """Run the step with its parts timed, the step without, and compute, once a round each."""
    trained, alone = make_zshard(setting, variant), MAKERS["compute"](setting)
    batches = setting.batches(dist.get_rank())
    order, shuffler = ["step", "unprobed", "compute"], random.Random(0)
    rounds: list[list[tuple[float, float]]] = []
    for number in range(effort.warmups + effort.rounds):
        shuffler.shuffle(order)
        found: dict[str, tuple[float, float]] = {}
        for name in order:
            batch = batches[number % len(batches)]
            if name == "step":
                process = time.process_time()
                with probed() as clock:
                    found[name] = _run(trained, batch)
                found["threads"] = time.process_time() - process - clock.run, 0.0
                for part in _SEAM:
                    found[part] = clock.seconds[part], clock.processor[part]
            else:
                found[name] = _run(alone if name == "compute" else trained, batch)
        if number >= effort.warmups:
            rounds.append([found[name] for name in _MEASURED])
    means = torch.tensor(rounds, dtype=torch.float64)  # (rounds, measured, 2)
    dist.all_reduce(means)
    wall, processor = (
        dict(zip(_MEASURED, column, strict=True))
        for column in (means / dist.get_world_size()).permute(2, 1, 0).tolist()
    )
    unprobed, threads = wall.pop("unprobed"), wall.pop("threads")
    del processor["unprobed"], processor["threads"]
    return Breakdown(case, wall, processor, unprobed, threads)


def rank_main(settings: list[Setting], effort: Effort, variant: Variant) -> dict[str, object]:
    """Body of a rank: every setting in turn."""
    found = []
    size = dist.get_world_size()
    for setting in tqdm(settings, unit="case", disable=None if dist.get_rank() == 0 else True):
        case = f"{setting.model} {setting.tokens} tokens {setting.precision} N={size}"
        found.append(asdict(measure(f"{case} {variant.comm}", setting, effort, variant)))
    return {"results": found}


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    parser = make_parser(__doc__.splitlines()[0], program, ("quick", "json"))
    parser.add_argument("--model", choices=SIZES, help="default: 25m 100m", nargs="+")
    parser.add_argument("--tokens", type=positive, help="of a rank; default: 128 1024", nargs="+")
    parser.add_argument("--precision", choices=TOLERANCE, help="default: fp32 bf16/bf16", nargs="+")
    parser.add_argument("--ranks", type=positive, default=2, help="default: 2")
    parser.add_argument("--comm", choices=["group", "peer"], default="group", help="default: group")
    arguments = parser.parse_args(argv)
    check(parser, arguments)
    effort = Effort.of(arguments.quick)
    device = torch.device("cpu")  # on CUDA the host does not wait for what it starts
    torch.set_num_threads(1)
    facts = {**describe(device), "ranks": arguments.ranks, "backend": "gloo"}
    print(f"{headline(facts)}, {arguments.ranks} gloo rank(s)")
    settings = [
        Setting(model, tokens, precision, device)
        for model in arguments.model or (["small"] if arguments.quick else ["25m", "100m"])
        for tokens in arguments.tokens or ([128] if arguments.quick else [128, 1024])
        for precision in arguments.precision or ["fp32", "bf16/bf16"]
    ]
    report = run_ranks(
        rank_main,
        (settings, effort, Variant(comm=arguments.comm)),
        ranks=arguments.ranks,
        backend="gloo",
        device=device,
    )
    results = [Breakdown(**fields) for fields in report["results"]]  # type: ignore[attr-defined]
    print("\n\n".join(result.table() for result in results))
    print(f"medians of {effort.rounds} rounds after {effort.warmups} warm-ups, means of the ranks")
    if arguments.quick:
        print(LOOK)
    report = {"benchmark": "breakdown", "environment": facts, "quick": arguments.quick}
    write(arguments, {**report, "results": [result.as_json() for result in results]})


if __name__ == "__main__":
    main()
