"""Bytes of memory that a step moves besides what it computes and sends: zshard bench bytes.

A count, without a clock, of every op that a step of one rank calls, zshard's beside FSDP2's; see
[Note: how bytes are counted] in traffic.py. This process plays rank 0 of N over torch's fake
process group, so N can be anything, and the collectives, which are left out, stand for NCCL's. The
plain model's own forward and backward are counted too and subtracted, op by op: what remains is
what sharding, clipping and the optimizer move. It is given in bytes for each parameter.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from typing import NamedTuple, cast

import contestants
import torch
from command import check, make_parser, positive
from contestants import MAKERS, Contestant, make_zshard
from environment import describe, headline, write_json
from protocol import aligned
from rank_group import run_ranks
from setting import TOLERANCE, Setting
from traffic import Traffic
from variant import Variant

from zshard.gpt import SIZES
from zshard.transports.groups import chunk_rows
from zshard.transports.simulated import SimulatedRanks

_UNCOUNTED = 3  # steps before the one that is counted: what is made once is there
_SHOWN = 0.005  # bytes a parameter; ops that move less are one row
_PEER = "FSDP2"
_SIMULATED = ("start_gather", "start_exchange", "start_all_reduce")


class Moved(NamedTuple):
    """What a step of one contestant moves."""

    name: str
    read: dict[str, int]  # op -> bytes
    written: dict[str, int]


def count(contestant: Contestant, setting: Setting) -> Moved:
    """Count the ops of one step."""
    batches = setting.batches(0)
    for number in range(_UNCOUNTED):
        contestant.step(*batches[number])
    with ExitStack() as stack:
        traffic = Traffic()
        stack.enter_context(traffic.leaving_out(SimulatedRanks, _SIMULATED))
        stack.enter_context(traffic.leaving_out(contestants, ["repeat_rows"]))
        stack.enter_context(traffic)
        contestant.step(*batches[_UNCOUNTED])
    return Moved(contestant.name, dict(traffic.read), dict(traffic.written))


def rank_main(setting: Setting, variants: list[Variant], rows_of_gloo: bool) -> dict[str, object]:
    """Body of the rank that is there: a step of every contestant."""
    if not rows_of_gloo:  # on CPU the fake group stands for gloo, whose sums are not its own
        SimulatedRanks.row_count = lambda self, dtype: chunk_rows(self.size, dtype, nccl=True)  # type: ignore[method-assign]
    moved = []
    for make in (*variants, "fsdp2", "compute"):
        maker = MAKERS[make] if isinstance(make, str) else None
        contestant = maker(setting) if maker else make_zshard(setting, cast("Variant", make))
        moved.append(count(contestant, setting))
        del contestant
        gc.collect()
    numel = sum(param.numel() for param in setting.build().parameters())
    return {"parameters": numel, "moved": [m._asdict() for m in moved]}


def beyond_computing(moved: Moved, computing: Moved) -> Counter[str]:
    """Bytes by op, less those of the plain model's forward and backward."""
    total = Counter(moved.read)
    total.update(moved.written)
    total.subtract(computing.read)
    total.subtract(computing.written)
    return total


def table(sides: dict[str, Counter[str]], parameters: int) -> str:
    """A row for each op, a column for each contestant, bytes a parameter."""
    ops = sorted({op for side in sides.values() for op in side})
    shown = [op for op in ops if any(abs(s[op]) >= _SHOWN * parameters for s in sides.values())]
    rows = [[op, *(f"{side[op] / parameters:.2f}" for side in sides.values())] for op in shown]
    rest = [sum(n for op, n in side.items() if op not in shown) for side in sides.values()]
    rows.append(["others", *(f"{n / parameters:.2f}" for n in rest)])
    totals = {name: side.total() for name, side in sides.items()}
    rows.append(["in all", *(f"{n / parameters:.2f}" for n in totals.values())])
    rows.append([f"over {_PEER}'s", *(f"{n / totals[_PEER]:.3f}" for n in totals.values())])
    return aligned(["bytes a parameter", *sides], rows, texts=1)


def table_of(found: dict[str, object]) -> str:
    """The table of what ``rank_main`` has found."""
    *moved, computing = (
        Moved(**fields) for fields in cast("list[dict[str, object]]", found["moved"])
    )
    sides = {each.name: beyond_computing(each, computing) for each in moved}
    return table(sides, cast("int", found["parameters"]))


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Count, print the tables, write the file; ends the process with status 2 on bad input."""
    parser = make_parser(cast("str", __doc__).splitlines()[0], program, ("device", "json"))
    parser.add_argument("--model", choices=SIZES, default=["25m"], help="default: 25m", nargs="+")
    parser.add_argument("--tokens", type=positive, default=128, help="of a rank; default: 128")
    parser.add_argument(
        "--precision", choices=TOLERANCE, default=list(TOLERANCE), help="default: all", nargs="+"
    )
    parser.add_argument(
        "--ranks", type=positive, default=[8], help="N, simulated; default: 8", nargs="+"
    )
    parser.add_argument(
        "--zshard", metavar="VARIANT,...", default="zero3", help="as of zshard bench step"
    )
    parser.add_argument(
        "--gloo", action="store_true", help="count the sums that NCCL's reductions make as gloo's"
    )
    arguments = parser.parse_args(argv)
    check(parser, arguments)
    try:
        variants = Variant.parse_all(arguments.zshard)
    except ValueError as error:
        parser.error(f"--zshard {error}")
    device = torch.device(arguments.device)
    facts = describe(device)
    print(f"{headline(facts)}; counted, not timed")
    report = {"benchmark": "bytes", "environment": facts, "gloo": arguments.gloo}
    results = []
    for ranks, model, precision in product(arguments.ranks, arguments.model, arguments.precision):
        setting = Setting(model, arguments.tokens, precision, device)
        found = run_ranks(
            rank_main,
            (setting, variants, arguments.gloo),
            ranks=ranks,
            backend="fake",
            device=device,
        )
        case = f"{model} {arguments.tokens} tokens {precision} N={ranks}"
        print(f"\n{case}\n{table_of(found)}", flush=True)
        results.append({"case": case, **found})
        if arguments.json:  # each time: what has been counted stays, should one fail
            write_json(arguments.json, {**report, "results": results})
    if arguments.json:
        print(f"every figure: {arguments.json}")


if __name__ == "__main__":
    main()
