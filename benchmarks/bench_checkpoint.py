"""Saving and loading checkpoints, beside torch.distributed.checkpoint: zshard bench checkpoint.

Both save a model of the same size with the states of its AdamW, sharded over the ranks (2 gloo
ranks with one thread each by default): zshard's zero3 by ``zshard.save``, FSDP2's by
``torch.distributed.checkpoint.save``. Beside them a plain copy: every rank writes as many bytes to
a file of its own and syncs it, or reads them. Every save is to a new path; what is there from the
round before is removed untimed. Loads read what the system has cached. Times are those of the
slowest rank.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from command import LOOK, check, make_parser, positive, write
from contestants import MAKERS, Contestant
from environment import describe, headline
from protocol import NULL, Effort, Result, table
from rank_group import run_ranks
from setting import Setting
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from tqdm import tqdm

import zshard
from zshard.gpt import SIZES

_PIECE = 1 << 22  # bytes of one write or read of the plain copy
_COPY = "plain copy"


class Way(NamedTuple):
    """One way of saving and loading; ``save`` and ``load`` take a folder."""

    name: str
    save: Callable[[str], object]
    load: Callable[[str], object]
    # An asynchronous save, up to where training goes on; returns what waits for its end.
    begin: Callable[[str], Callable[[], object]] | None


def _zshard(contestant: Contestant) -> Way:
    model, optimizer = contestant.model, contestant.optimizer

    def begin(folder: str) -> Callable[[], None]:
        handle = zshard.save(folder, model, optimizer, asynchronous=True)
        assert handle is not None
        return handle.wait

    return Way(
        "zshard",
        lambda folder: zshard.save(folder, model, optimizer),
        lambda folder: zshard.load(folder, model, optimizer),
        begin,
    )


def _dcp(contestant: Contestant) -> Way:
    model, optimizer = contestant.model, contestant.optimizer
    assert optimizer is not None

    def state() -> dict[str, object]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def load(folder: str) -> None:
        found = state()
        dcp.load(found, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],  # type: ignore[arg-type]
            optim_state_dict=found["optimizer"],  # type: ignore[arg-type]
        )

    def begin(folder: str) -> Callable[[], object]:
        future = dcp.async_save(state(), checkpoint_id=folder, process_group=_beside())
        return future.result  # type: ignore[union-attr]

    return Way(
        "torch.distributed.checkpoint",
        lambda folder: dcp.save(state(), checkpoint_id=folder),
        load,
        begin,
    )


_GROUPS: list[dist.ProcessGroup] = []


def _beside() -> dist.ProcessGroup:
    """A gloo group for what runs beside training."""
    if not _GROUPS:
        _GROUPS.append(dist.new_group(backend="gloo"))
    return _GROUPS[0]


def _copy(nbytes: int) -> Way:
    memory = torch.randint(256, (nbytes,), dtype=torch.uint8)
    view = memoryview(memory.numpy())

    def file(folder: str) -> str:
        return os.path.join(folder, f"copy-{dist.get_rank()}")

    def save(folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(file(folder), os.O_WRONLY | os.O_CREAT)
        for begin in range(0, nbytes, _PIECE):
            os.pwrite(descriptor, view[begin : begin + _PIECE], begin)
        os.fsync(descriptor)
        os.close(descriptor)

    def load(folder: str) -> None:
        descriptor = os.open(file(folder), os.O_RDONLY)
        for begin in range(0, nbytes, _PIECE):
            os.preadv(descriptor, [view[begin : begin + _PIECE]], begin)
        os.close(descriptor)

    return Way(_COPY, save, load, None)


def _whole(model: torch.nn.Module) -> list[torch.Tensor]:
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]
    return [zshard.full_param(model, name) for name, _ in model.named_parameters()]


def check_way(way: Way, contestant: Contestant, folder: str) -> None:
    """Save, change the parameters, load, and make sure that they are what they were."""
    before = _whole(contestant.model)
    way.save(folder)
    with torch.no_grad():
        for param in contestant.model.parameters():
            param.add_(1)
    way.load(folder)
    for one, other in zip(_whole(contestant.model), before, strict=True):
        if not torch.equal(one, other):
            raise AssertionError(f"{way.name} does not load what it has saved")
    _clear(folder)


def _clear(folder: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()  # or the next one waits for what this one has left to the system
    dist.barrier()


def _measure(
    case: str,
    ways: Sequence[Way],
    run: Callable[[Way], object],
    after: Callable[[Way], object],
    nbytes: int,
    effort: Effort,
    progress: tqdm[None],
) -> Result:
    order = [*((way.name, way) for way in ways), (NULL, ways[0])]
    seconds: dict[str, list[float]] = {name: [] for name, _ in order}
    shuffler = random.Random(0)
    for number in range(effort.warmups + effort.rounds):
        shuffler.shuffle(order)
        for name, way in order:
            dist.barrier()
            start = time.perf_counter()
            run(way)
            taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= effort.warmups:
                seconds[name].append(taken.item())
            after(way)
        progress.update()
    again = seconds.pop(NULL)
    return Result(case, seconds, again, dict.fromkeys(seconds, nbytes))


def measure_size(size: str, root: str, effort: Effort, progress: tqdm[None]) -> list[Result]:
    """Check and time all ways on one model."""
    setting = Setting(size, 128, "fp32", torch.device("cpu"))
    contestants = MAKERS["zshard"](setting), MAKERS["fsdp2"](setting)
    for contestant in contestants:  # so that there are states
        contestant.step(*setting.batches(dist.get_rank())[0])
    nbytes = 12 * sum(p.numel() for p in setting.build().parameters())
    ours, theirs, _ = ways = (
        _zshard(contestants[0]),
        _dcp(contestants[1]),
        _copy(nbytes // dist.get_world_size()),
    )
    folder = os.path.join(root, size)
    for way, contestant in zip((ours, theirs), contestants, strict=True):
        check_way(way, contestant, folder)
    pending: list[Callable[[], object]] = []

    def begin(way: Way) -> None:
        assert way.begin is not None
        pending.append(way.begin(folder))

    def end(way: Way) -> None:
        pending.pop()()
        _clear(folder)

    def measure(
        case: str,
        those: Sequence[Way],
        run: Callable[[Way], object],
        after: Callable[[Way], object] = lambda way: None,
    ) -> Result:
        return _measure(f"{case} {size}", those, run, after, nbytes, effort, progress)

    results = [
        measure("save", ways, lambda way: way.save(folder), lambda way: _clear(folder)),
        measure("asynchronous save, until training goes on,", (ours, theirs), begin, end),
    ]
    for way in ways:
        way.save(f"{folder}-{way.name}")
    results.append(measure("load", ways, lambda way: way.load(f"{folder}-{way.name}")))
    for way in ways:
        _clear(f"{folder}-{way.name}")
    return results


def rank_main(sizes: list[str], root: str, effort: Effort) -> dict[str, object]:
    """Body of a rank: every model in turn."""
    results: list[Result] = []
    progress = tqdm(
        total=3 * len(sizes) * (effort.warmups + effort.rounds),
        unit="round",
        disable=None if dist.get_rank() == 0 else True,
    )
    for size in sizes:
        progress.set_postfix_str(size)
        results += measure_size(size, root, effort, progress)
    progress.close()
    return {"results": [asdict(result) for result in results]}


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Measure, print the table, write the file; ends the process with status 2 on bad input."""
    parser = make_parser(__doc__.splitlines()[0], program, ("quick", "json"))
    parser.add_argument("--model", choices=SIZES, help="default: 25m 100m", nargs="+")
    parser.add_argument("--ranks", type=positive, default=2, help="default: 2")
    parser.add_argument("--folder", help="on the file system to measure; default: a temporary one")
    arguments = parser.parse_args(argv)
    check(parser, arguments)
    sizes = arguments.model or (["small"] if arguments.quick else ["25m", "100m"])
    effort = Effort.of(arguments.quick)
    torch.set_num_threads(1)
    facts = {**describe(torch.device("cpu")), "ranks": arguments.ranks, "backend": "gloo"}
    try:
        temporary = tempfile.TemporaryDirectory(prefix="zshard-bench-", dir=arguments.folder)
    except OSError as error:
        parser.error(f"--folder {arguments.folder}: none can be made in it: {error.strerror}")
    with temporary as root:
        facts["file system"] = _file_system(root)
        print(f"{headline(facts)}, {arguments.ranks} gloo rank(s), {facts['file system']}")
        found = run_ranks(
            rank_main,
            (sizes, root, effort),
            ranks=arguments.ranks,
            backend="gloo",
            device=torch.device("cpu"),
        )
    results = [Result(**fields) for fields in cast("list[dict[str, object]]", found["results"])]  # type: ignore[arg-type]
    print(table(results))
    print(f"{effort.rounds} rounds after {effort.warmups} warm-ups.")
    print(*([LOOK] if arguments.quick else []), sep="\n")
    report = {
        "benchmark": "checkpoint",
        "environment": facts,
        "quick": arguments.quick,
        "results": [result.as_json() for result in results],
    }
    write(arguments, report)


def _file_system(folder: str) -> str:
    """The kind of the file system that ``folder`` is on."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, name, *_ = line.split()
        if os.path.realpath(folder).startswith(point) and len(point) >= len(best):
            best, kind = point, name
    return kind


if __name__ == "__main__":
    main()
