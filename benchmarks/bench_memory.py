"""Memory of a rank in training, zshard's zero3 beside FSDP2, FSDP1 and DDP: zshard bench memory.

Every contestant trains in fresh processes (2 gloo ranks with one thread each by default), because
what an allocator keeps of one would be found by the next. Peaks are those of resident memory as the
kernel counts it, beyond what the process has once torch is imported, the process group is up, and a
tiny plain model has taken a step (which loads what any training loads).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from command import check, make_parser, positive, write
from contestants import MAKERS
from environment import describe, headline
from rank_group import run_ranks
from setting import TOLERANCE, Setting
from torch.profiler import ProfilerActivity, profile

from zshard.gpt import SIZES

LARGE = 1 << 20  # bytes; what is smaller comes out of the allocator's lists, not from the kernel
_WARM_STEPS = 2  # after these a step is like any other
_STEPS = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, beyond those of its process before the model was built.

    Args:
        setup: at the peak of building the model, sharding it and making the optimizer.
        whole: at the peak of everything, set-up and first steps included.
        steady: at the peak of the steps after the first two.
        rest: between two steps.
        tensors: of all tensors that live as the optimizer begins its step.
        fresh: how many allocations of 1 MiB and more one step makes.
        fresh_bytes: theirs together.
    """

    setup: int
    whole: int
    steady: int
    rest: int
    tensors: int
    fresh: int
    fresh_bytes: int


PEERS = ("fsdp2", "fsdp1", "ddp")


def _resident() -> tuple[int, int]:
    """What the kernel counts as resident, in bytes: now, and at the peak.

    Both from one read: between two of them a page can come, and rest lie above its own peak.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    if not {"VmRSS", "VmHWM"} <= values.keys():
        raise RuntimeError("/proc/self/status has no VmRSS and VmHWM: this benchmark needs Linux")
    now, peak = (int(values[field].split()[0]) * 1024 for field in ("VmRSS", "VmHWM"))
    return now, peak


def _reset_peak() -> None:
    """Have VmHWM start anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _live_tensors(model: torch.nn.Module) -> int:
    """Bytes of the storages of all tensors that Python knows, and of the gradients."""
    grads = [param.grad for param in model.parameters()]  # of which DDP's are known to C++ alone
    storages = {}
    for tensor in [*gc.get_objects(), *grads]:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            if storage.device.type == "cpu":
                storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def allocations(work: Callable[[], object]) -> list[int]:
    """Bytes of every allocation that torch's allocator is asked for during ``work``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


def rank_main(name: str, setting: Setting, steps: int) -> dict[str, object]:
    """Body of a rank: one contestant; every rank's figures."""
    warm = Setting("units", 4, "fp32", setting.device)
    MAKERS["plain"](warm).step(*warm.batches(0)[0])
    dist.barrier()
    gc.collect()
    before, _ = _resident()
    _reset_peak()
    contestant = MAKERS[name](setting)
    batches = setting.batches(dist.get_rank())
    _, setup = _resident()
    for index in range(_WARM_STEPS):
        contestant.step(*batches[index])
    dist.barrier()
    _, whole = _resident()
    _reset_peak()
    for index in range(steps):
        contestant.step(*batches[index % len(batches)])
    rest, steady = _resident()
    found: list[int] = []
    optimizer = contestant.optimizer
    assert optimizer is not None
    look = optimizer.register_step_pre_hook(
        lambda *_: found.append(_live_tensors(contestant.model))
    )
    contestant.step(*batches[0])
    look.remove()
    large = [n for n in allocations(lambda: contestant.step(*batches[0])) if n >= LARGE]
    resident = (value - before for value in (setup, max(whole, steady), steady, rest))
    own = Memory(*resident, found[0], len(large), sum(large))
    everyone: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, asdict(own))
    parameters = sum(p.numel() for p in setting.build().parameters())
    return {"name": contestant.name, "parameters": parameters, "ranks": everyone}


def measure(setting: Setting, name: str, ranks: int, steps: int) -> dict[str, object]:
    """Train one contestant in processes of its own."""
    return run_ranks(
        rank_main, (name, setting, steps), ranks=ranks, backend="gloo", device=setting.device
    )


def largest(report: dict[str, object]) -> Memory:
    """Of each figure, that of the rank where it is largest."""
    ranks: Sequence[dict[str, int]] = report["ranks"]  # type: ignore[assignment]
    return Memory(**{field: max(rank[field] for rank in ranks) for field in ranks[0]})


def table(case: str, reports: Sequence[dict[str, object]]) -> str:
    """A line for each contestant: MB of the rank that takes most, and ratios to DDP's."""
    base = next((largest(report) for report in reports if report["name"] == "DDP"), None)
    lines = [
        f"{case:26} {'set-up':>15} {'with set-up':>15} {'steady peak':>15} {'at rest':>15} "
        f"{'tensors':>15} {'fresh':>6} {'MB':>7}"
    ]
    for report in reports:
        memory = largest(report)
        cells = []
        for field in ("setup", "whole", "steady", "rest", "tensors"):
            value = getattr(memory, field)
            ratio = f" ({value / getattr(base, field):.2f})" if base else ""
            cells.append(f"{value / 1e6:8.1f}{ratio:>7}")
        lines.append(
            f"{report['name']!s:26} {' '.join(cells)} {memory.fresh:6} "
            f"{memory.fresh_bytes / 1e6:7.1f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Measure, print the tables, write the file; ends the process with status 2 on bad input."""
    parser = make_parser(__doc__.splitlines()[0], program, ["json"])
    parser.add_argument(
        "--model", choices=SIZES, default=["25m", "100m"], help="default: 25m 100m", nargs="+"
    )
    parser.add_argument(
        "--tokens", type=positive, default=[128], help="of a rank; default: 128", nargs="+"
    )
    parser.add_argument(
        "--precision", choices=TOLERANCE, default=["fp32"], help="default: fp32", nargs="+"
    )
    parser.add_argument(
        "--against",
        metavar="PEER,...",
        default=",".join(PEERS),
        help=f"of {', '.join(PEERS)}; or none: zshard alone; default: all",
    )
    parser.add_argument("--ranks", type=positive, default=2, help="default: 2")
    parser.add_argument("--steps", type=positive, default=_STEPS, help=f"default: {_STEPS}")
    arguments = parser.parse_args(argv)
    check(parser, arguments)
    peers = [] if arguments.against == "none" else arguments.against.split(",")
    if unknown := [name for name in peers if name not in PEERS]:
        parser.error(f"--against {unknown[0]!r} is none of {', '.join(PEERS)}, none")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else a rank prints that it counts allocations
    torch.set_num_threads(1)
    device = torch.device("cpu")
    facts = {**describe(device), "ranks": arguments.ranks, "backend": "gloo"}
    facts["malloc"] = {k: v for k, v in os.environ.items() if k.startswith(("MALLOC", "LD_PRE"))}
    print(f"{headline(facts)}, {arguments.ranks} gloo rank(s)")
    print(
        "MB of a rank beyond its process before the model is built; in brackets over DDP's, which "
        "trains in fp32"
    )
    results = []
    for model, tokens, precision in product(arguments.model, arguments.tokens, arguments.precision):
        setting = Setting(model, tokens, precision, device)
        # DDP has no precision policy: where others compute in bf16, it trains in fp32.
        peer = Setting(model, tokens, "fp32", device)
        reports = [
            measure(peer if name == "ddp" else setting, name, arguments.ranks, arguments.steps)
            for name in ("zshard", *peers)
        ]
        case = f"{model} {tokens} tokens {precision}"
        print(table(case, reports), flush=True)
        results.append({"case": case, "contestants": reports})
    write(arguments, {"benchmark": "memory", "environment": facts, "results": results})


if __name__ == "__main__":
    main()
