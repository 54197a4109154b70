"""zshard's kernels beside torch's, on CPU or CUDA: zshard bench ops [--quick].

Ratios are the peer's time over zshard's, measured in one run; see protocol.py. "of copy" is the
rate at which zshard moves the fewest possible bytes, over the rate of a plain copy beside it.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from command import LOOK, check, make_parser, positive, write
from environment import describe, headline
from op_cases import (
    Case,
    cast_case,
    copy_side,
    gather_case,
    pack_case,
    reduce_case,
)
from optim_cases import PATTERNS, adamw_case, fused_case, phase_case
from protocol import Effort, NotCapturable, Result, aligned, measure, table
from stream import compile_stream
from tqdm import tqdm
from workloads import QUICK, WORKLOADS

_FP32, _BF16 = torch.float32, torch.bfloat16
_CEILING_BYTES = 2 << 30
_CHECKED_BYTES = 80  # of each parameter, as two ways to update it and the reference are compared
_ENDINGS = (signal.SIGINT, signal.SIGTERM)
_NOT_RUN = "DeepSpeed's and apex's kernels are not run: torch's own are the peers here."


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Every comparison, in the order of the tables."""
    ranks = 8 if device.type == "cuda" else 2
    stream = compile_stream() if device.type == "cpu" else None
    names = list(QUICK if quick else WORKLOADS)
    copied = [name for name in names if name != "Llama-8B / 64"]
    dense = [name for name in copied if name != "1,000 small"]
    big = [name for name in dense if name not in ("218M (8B layer)", "odd")]
    large = too_large(device)
    updated = [name for name in names if name not in large]
    phased = [name for name in updated if name not in ("odd", "1,000 small")]
    found = [
        pack_case(name, source, target, ranks)
        for source, target in ((_BF16, _FP32), (_BF16, _BF16), (_FP32, _FP32))
        for name in copied
    ]
    found += [cast_case(n, a, b) for a, b in ((_FP32, _BF16), (_BF16, _FP32)) for n in dense]
    found += [gather_case(n, a, _BF16, ranks) for a in (_FP32, _BF16) for n in big]
    found += [reduce_case(name, dtype, ranks) for dtype in (_BF16, _FP32) for name in big]
    found += [reduce_case(name, _BF16, ranks, apart=True) for name in big]
    if device.type == "cuda" and not quick:  # the kernels over peer memory, for fewer ranks
        name = "27M (8B layer / 8)"
        for n in (1, 2, 4):
            found += [gather_case(name, dtype, _BF16, n) for dtype in (_FP32, _BF16)]
            found += [reduce_case(name, dtype, n, apart=True) for dtype in (_BF16, _FP32)]
    found += [adamw_case(name, stream=stream, apart=name == "odd") for name in updated]
    found.append(adamw_case("1,000 small", stream=stream, apart=True))
    found += [adamw_case(name, stream=stream, grad=_BF16) for name in phased]
    found += [fused_case(name, dtype, ranks) for dtype in (_BF16, _FP32) for name in phased]
    found += [
        phase_case(name, grad, norm=norm)
        for norm in (False, True)
        for grad in (_BF16, _FP32)
        for name in phased
    ]
    return found


def too_large(device: torch.device) -> list[str]:
    """Workloads whose optimizer step this machine has not the memory to check."""
    if device.type == "cuda":
        return []
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    numels = {name: sum(math.prod(s) for s in shapes) for name, shapes in WORKLOADS.items()}
    return [name for name, numel in numels.items() if numel * _CHECKED_BYTES > memory]


def run(case: Case, device: torch.device, effort: Effort, replay: bool) -> Result:
    """Build, check and measure one case, a copy of as many bytes beside it."""
    sets = _sets(case.nbytes, device)
    copy = copy_side(case.nbytes, device, sets, by_kernel=replay)
    sides = [*case.build(device, sets), copy]
    name = f"{case.name} (replayed)" if replay else case.name
    try:
        return measure(name, sides, device, effort, sets=sets, replay=replay)
    finally:
        sides.clear()
        gc.collect()
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # after a capture that failed
                torch.cuda.empty_cache()


def run_all(
    todo: Sequence[tuple[Case, bool]],  # and whether it is replayed from a graph
    device: torch.device,
    effort: Effort,
    results: list[Result],
    refused: list[str],
) -> bool:
    """Measure ``todo``; whether none failed. SIGINT and SIGTERM end it, and are ignored from then.

    What has been measured is in ``results``, whatever becomes of the rest, which ``refused`` names.
    """
    whole = True
    for ending in _ENDINGS:
        signal.signal(ending, lambda number, _: sys.exit(signal.Signals(number).name))
    try:
        progress = tqdm(todo, unit="case", disable=None)
        for case, replay in progress:
            progress.set_postfix_str(case.name)
            try:
                results.append(run(case, device, effort, replay))
            except NotCapturable as error:
                refused.append(f"{case.name}: not replayed: {error}")
            except Exception as error:
                whole = False
                refused.append(f"FAILED: {case.name}: {type(error).__name__}: {error}")
    except SystemExit as ended:
        whole = False
        refused.append(f"FAILED: ended by {ended} in {case.name}; what follows it was not run")
    for ending in _ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    return whole


def _sets(nbytes: int, device: torch.device) -> int:
    """Buffer sets that a side takes in turn: on CUDA, so many that no cache holds one's."""
    if device.type == "cpu":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(4, math.ceil(4 * cache / nbytes))


def ceiling(device: torch.device, effort: Effort, replay: bool) -> Result:
    """The plain copy alone, of 2 GiB moved (a quarter of that on CPU).

    On CUDA beside one by a kernel; see ``copy_side``.
    """
    nbytes = _CEILING_BYTES if device.type == "cuda" else _CEILING_BYTES // 4
    sides = [copy_side(nbytes, device, 1)]
    if device.type == "cuda":
        copy = copy_side(nbytes, device, 1, by_kernel=True)
        sides.append(copy._replace(name="copy by a kernel"))
    return measure(
        f"copy ceiling{' (replayed)' if replay else ''}", sides, device, effort, replay=replay
    )


def shares(results: list[Result]) -> str:
    """GB/s of the fewest bytes, and the share of the copy and of the bare pattern beside it."""
    rows = []
    for result in results:
        rate = result.nbytes[result.first] / min(result.seconds[result.first]) / 1e9
        copied = result.share("copy")
        pattern = next(filter(None, map(result.share, PATTERNS.values())), None)
        cells = [f"{copied.median:.2f}", copied.interval] if copied else ["", ""]
        rows.append(
            [result.case, f"{rate:.1f}", *cells, f"{pattern.median:.2f}" if pattern else ""]
        )
    return aligned(["case", "GB/s", "of copy", "95 %", "of pattern"], rows, texts=1)


def draw(results: list[Result], facts: dict[str, object], path: Path) -> None:
    """The roofline bars; matplotlib is needed for nothing else."""
    from plots import plot_ops

    plot_ops(results, path, headline(facts))


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Measure, print the tables, write the files; ends the process with status 2 on bad input."""
    parser = make_parser(__doc__.splitlines()[0], program)
    parser.add_argument("--threads", type=positive, default=1, help="of torch and zshard, on CPU")
    parser.add_argument("--only", default="", help="only cases whose name holds this text")
    arguments = parser.parse_args(argv)
    check(parser, arguments)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    device, effort = torch.device(arguments.device), Effort.of(arguments.quick)
    found = cases(device, arguments.quick)
    chosen = [case for case in found if arguments.only in case.name]
    if not chosen:
        begin = ", ".join(sorted({case.name.split()[0] for case in found}))
        parser.error(f"--only {arguments.only!r}: no case's name holds it; names begin {begin}")
    facts = describe(device)
    print(headline(facts))
    refused = [f"{name}: no optimizer step, for want of memory" for name in too_large(device)]
    # Replays last: a capture that fails may take what comes after it with it.
    modes = (False, True) if device.type == "cuda" else (False,)
    results = [ceiling(device, effort, mode) for mode in modes]
    todo = [(case, mode) for mode in modes for case in chosen]
    whole = run_all(todo, device, effort, results, refused)
    print(table(results), shares(results), *refused, sep="\n\n")
    print(f"{effort.rounds} rounds after {effort.warmups} warm-ups. {_NOT_RUN}")
    if arguments.quick:
        print(LOOK)
    report = {
        "benchmark": "ops",
        "environment": facts,
        "quick": arguments.quick,
        "not_run": [_NOT_RUN, *refused],
        "results": [result.as_json() for result in results],
    }
    write(arguments, report, partial(draw, results, facts))
    if not whole:
        sys.exit(1)


if __name__ == "__main__":
    main()
