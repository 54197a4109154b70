"""How zshard is measured: paired rounds in random order, ratios within a round, a null beside them.

Machines are shared and noisy, so only ratios from one run count. Every round runs each side once,
in a random order; a ratio is taken within a round, and the median of the rounds' ratios is reported
with a bootstrap interval. The first side runs twice a round under two names: the ratio of the two
(the null) is what noise alone looks like. Minima are reported too, because noise only adds time.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from tabulate import tabulate

NULL = "again"  # the name under which the first side runs a second time
_CPU_REGION = 2e-3  # seconds of work in a timed region, so that the clock's own cost is nothing
_CUDA_REGION = 200e-6
_RESAMPLES = 4000


class NotCapturable(RuntimeError):
    """The side on trial cannot be captured into a CUDA graph; the message says why."""


class Effort(NamedTuple):
    """How often a side is run."""

    warmups: int = 5
    rounds: int = 21

    @classmethod
    def of(cls, quick: bool) -> Effort:
        """What the protocol asks for, or less for a look."""
        return cls(2, 7) if quick else cls()


class Side(NamedTuple):
    """One contestant of a case.

    Args:
        run: does the work once, on the buffer set of that number.
        poison: makes stale outputs visible; called before every timed region, never timed.
        nbytes: the fewest bytes that the work has to move, each operand once; 0 where that is
            not what is measured.
        captures: whether it can be captured into a CUDA graph. A capture that fails may leave
            torch's allocator unusable, so what asks for pinned memory, say, is not tried.
    """

    name: str
    run: Callable[[int], object]
    poison: Callable[[], object] = lambda: None
    nbytes: int = 0
    captures: bool = True


class Ratio(NamedTuple):
    """A median over rounds, and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """How far the interval reaches from 1."""
        return max(abs(self.low - 1.0), abs(self.high - 1.0))

    @property
    def interval(self) -> str:
        """The interval in a table's width."""
        return f"{self.low:.2f}-{self.high:.2f}"

    def verdict(self, null: Ratio) -> str:
        """ "ahead" or "behind" where the interval excludes 1 by more than the null's spread."""
        if self.low > 1.0 + null.spread:
            return "ahead"
        return "behind" if self.high < 1.0 - null.spread else "level"


def median_ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """The median of ``over[i] / under[i]`` over the rounds i."""
    return _median_ratio(tuple(over), tuple(under))


@functools.lru_cache(maxsize=4096)  # tables and files ask for the same ones several times
def _median_ratio(over: tuple[float, ...], under: tuple[float, ...]) -> Ratio:
    ratios = torch.tensor(over, dtype=torch.float64) / torch.tensor(under, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(ratios), (_RESAMPLES, len(ratios)), generator=generator)
    medians = ratios[picks].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Ratio(float(ratios.quantile(0.5)), low, high)


@dataclass
class Result:
    """The seconds of every side and round of one case; the first side is the one on trial."""

    case: str
    seconds: dict[str, list[float]]  # without the null
    again: list[float]
    nbytes: dict[str, int]
    notes: list[str] = field(default_factory=list)
    extra: dict[str, object] = field(default_factory=dict)  # figures of this case alone

    @property
    def first(self) -> str:
        """The side on trial."""
        return next(iter(self.seconds))

    @property
    def null(self) -> Ratio:
        """The side on trial against itself."""
        return median_ratio(self.again, self.seconds[self.first])

    def ratio(self, side: str) -> Ratio:
        """The time of ``side`` over that of the side on trial."""
        return median_ratio(self.seconds[side], self.seconds[self.first])

    def share(self, of: str) -> Ratio | None:
        """The rate at which the side on trial moves its bytes, as a share of the rate of ``of``."""
        if of not in self.seconds or not self.nbytes[self.first]:
            return None
        factor = self.nbytes[self.first] / self.nbytes[of]
        ratio = self.ratio(of)
        return Ratio(*(factor * value for value in ratio))

    def as_json(self) -> dict[str, object]:
        """Every figure, the rounds' own too."""
        sides = {}
        for name, seconds in self.seconds.items():
            least = min(seconds)
            sides[name] = {
                "median_s": statistics.median(seconds),
                "min_s": least,
                "bytes": self.nbytes[name],
                "gb_per_s_at_min": self.nbytes[name] / least / 1e9,
                "rounds_s": seconds,
            }
        ratios = {
            name: {**self.ratio(name)._asdict(), "verdict": self.ratio(name).verdict(self.null)}
            for name in list(self.seconds)[1:]
        }
        shares = {name: share._asdict() for name in self.seconds if (share := self.share(name))}
        return {
            "case": self.case,
            "sides": sides,
            "again_rounds_s": self.again,
            "time_over_first": ratios,
            "null": self.null._asdict(),
            "share_of_rate": shares,
            "notes": self.notes,
            **self.extra,
        }


def _timed_cpu(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _timed_cuda(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(
    case: str,
    sides: Sequence[Side],  # the first is the one on trial
    device: torch.device,
    effort: Effort,
    *,
    sets: int = 1,
    replay: bool = False,
) -> Result:
    """Run every side once a round, the first one twice, in random order.

    Args:
        sets: buffer sets that a side takes in turn, so that no cache holds what it reads.
        replay: on CUDA, capture each side into a graph and time the replays.
    """
    contestants = [*sides, sides[0]._replace(name=NULL)]
    notes: list[str] = []
    runners = {}
    for side in contestants:
        if replay and not side.captures:
            notes.append(f"{side.name} is not replayed: it cannot be captured")
            continue
        try:
            runners[side.name] = _Runner(side, device, sets, replay)
        except RuntimeError as error:
            if not replay:
                raise
            reason = f"{side.name} cannot be captured: {str(error).splitlines()[0]}"
            if side is contestants[0]:
                raise NotCapturable(reason) from error
            notes.append(reason)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    order, shuffler = list(runners), random.Random(0)
    for number in range(effort.warmups + effort.rounds):
        shuffler.shuffle(order)
        for name in order:
            taken = runners[name].sample()
            if number >= effort.warmups:
                seconds[name].append(taken)
    again = seconds.pop(NULL)
    nbytes = {side.name: side.nbytes for side in sides if side.name in seconds}
    return Result(case, seconds, again, nbytes, notes)


class _Runner:
    """Times one side in regions long enough for the clock."""

    def __init__(self, side: Side, device: torch.device, sets: int, replay: bool) -> None:
        self._side, self._sets, self._next = side, sets, 0
        self._clock = _timed_cuda if device.type == "cuda" else _timed_cpu
        side.run(0)  # what happens once (compilation, first touch) is no part of the estimate
        once = min(self._clock(lambda: side.run(0)) for _ in range(2))
        region = _CUDA_REGION if device.type == "cuda" else _CPU_REGION
        self._repeats = max(1, math.ceil(region / max(once, 1e-7)))
        if sets > 1:  # a whole number of turns through the sets
            self._repeats = math.ceil(self._repeats / sets) * sets
        self._work: Callable[[], object] = self._eager
        self._replays = 1
        if replay:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._eager()
            self._work = graph.replay
            # Without the launches' own time, which `once` has in it, the same work is shorter.
            self._replays = math.ceil(region / max(self._clock(graph.replay), 1e-7))

    def _eager(self) -> None:
        for _ in range(self._repeats):
            self._side.run(self._next)
            self._next = (self._next + 1) % self._sets

    def sample(self) -> float:
        self._side.poison()
        taken = self._clock(lambda: [self._work() for _ in range(self._replays)])
        return taken / (self._repeats * self._replays)


def table(results: Iterable[Result]) -> str:
    """A line for each case and peer: times, the ratio with its interval, the verdict."""
    columns = ["case", "against", "ours ms", "min", "theirs ms", "min"]
    rows, notes = [], []
    for result in results:
        own = result.seconds[result.first]
        for name in list(result.seconds)[1:]:
            theirs, ratio = result.seconds[name], result.ratio(name)
            times = (statistics.median(own), min(own), statistics.median(theirs), min(theirs))
            rows.append(
                [
                    result.case,
                    name,
                    *(f"{time * 1e3:.3f}" for time in times),
                    f"{ratio.median:.2f}",
                    ratio.interval,
                    f"{result.null.spread:.3f}",
                    ratio.verdict(result.null),
                ]
            )
        notes += [f"{result.case}: {note}" for note in result.notes]
    columns += ["ratio", "95 %", "null +-", "verdict"]
    return "\n".join([aligned(columns, rows), *notes])


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 2) -> str:
    """A plain table: the first ``texts`` columns and the last to the left, figures to the right."""
    sides = ["left" if i < texts or i == len(columns) - 1 else "right" for i in range(len(columns))]
    return tabulate(rows, columns, disable_numparse=True, colalign=sides if rows else None)
