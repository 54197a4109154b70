"""Bytes that a step moves: how they are counted, and that there are no more than promised."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

import zshard
from zshard import cli, ops

if TYPE_CHECKING:
    from traffic import Traffic

BENCHMARKS = Path(zshard.__file__).parents[1] / "benchmarks"
RANKS = 8


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """A counter, which the test enters."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from traffic import Traffic

    yield Traffic()


def adamw(a: Tensor, b: Tensor) -> None:
    step = [torch.zeros(())]
    torch._fused_adamw_(
        [a],
        [b],
        [torch.zeros_like(a)],
        [torch.zeros_like(a)],
        [],
        step,
        lr=0.1,
        beta1=0.9,
        beta2=0.9,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


# What is done with a and b, (6, 100) fp32 -> bytes read and written, in times 4 * 600.
CASES: dict[str, tuple[Callable[[Tensor, Tensor], object], float, float]] = {
    "add": (lambda a, b: a + b, 2, 1),
    "add in place": (lambda a, b: a.add_(b), 2, 1),
    "copy": (lambda a, b: a.copy_(b), 1, 1),
    "copy of a row": (lambda a, b: a.copy_(b[:1].expand(6, 100)), 1 / 6, 1),
    "zero": (lambda a, b: a.zero_(), 0, 1),
    "empty": (lambda a, b: torch.empty_like(a), 0, 0),
    "views": (lambda a, b: a.view(-1)[3:].detach().unsqueeze(0), 0, 0),
    "unsafe view": (lambda a, b: torch.ops.aten._unsafe_view(a, [600]), 0, 0),
    "product": (lambda a, b: torch.mm(a, b.t()), 0, 0),
    "norm": (lambda a, b: torch._foreach_norm([a, b]), 2, 2 / 600),
    "cast": (lambda a, b: a.to(torch.bfloat16), 1, 0.5),
    "cat, out": (lambda a, b: torch.cat([a[:3], b[:3]], out=b.new_empty(6, 100)), 1, 1),
    "pack": (lambda a, b: ops.pack_(a.view(-1), [b], [0]), 1, 1),
    "reduce": (lambda a, b: ops.reduce_(a.view(-1)[:100], b), 1, 1 / 6),
    "reduce, added": (lambda a, b: ops.reduce_(a.view(-1)[:100], b, 1.0, True), 7 / 6, 1 / 6),
    "reduce, in place": (lambda a, b: ops.reduce_(a.view(-1), a.view(1, -1)), 1, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_an_op_moves_its_operands_once(case: str, traffic: Traffic) -> None:
    run, read, written = CASES[case]
    a, b = torch.ones(6, 100), torch.ones(6, 100)
    with traffic:
        run(a, b)
    assert sum(traffic.read.values()) == pytest.approx(read * a.nbytes)
    assert sum(traffic.written.values()) == pytest.approx(written * a.nbytes)


def test_a_fused_adamw_reads_four_and_writes_three(traffic: Traffic) -> None:
    a, b = torch.ones(600), torch.ones(600)
    with traffic:
        adamw(a, b)
    op = "aten::_fused_adamw_"
    assert traffic.read[op] == pytest.approx(4 * a.nbytes, abs=4)
    assert traffic.written[op] == pytest.approx(3 * a.nbytes, abs=4)


@pytest.mark.parametrize(
    ("dtype", "reads"),
    [
        (torch.float32, {"aten::add": 2, "aten::add_": 2}),
        (torch.bfloat16, {"aten::copy_": 3 / 2, "aten::add_": 4}),
    ],
)
def test_torch_adds_what_is_fp32_and_two_such_rows_at_once(
    dtype: torch.dtype, reads: dict[str, float], traffic: Traffic
) -> None:
    from op_cases import adder

    rows, out = list(torch.randn(3, 600).to(dtype)), torch.empty(600)
    add = adder(600, dtype, torch.device("cpu"))
    with traffic:
        add(out, rows)
    assert torch.equal(out, rows[0].float() + rows[1] + rows[2])
    assert {op: n / out.nbytes for op, n in traffic.read.items()} == reads


def test_what_is_left_out_is_not_counted(traffic: Traffic) -> None:
    class Seam:
        def move(self, a: Tensor) -> Tensor:
            return a + 1

    a = torch.ones(600)
    with traffic.leaving_out(Seam, ["move"]), traffic:
        Seam().move(a)
        assert not traffic.read
        a.add_(1)
    assert dict(traffic.read) == {"aten::add_": a.nbytes}
    with traffic:
        Seam().move(a)
    assert traffic.read["aten::add"] == a.nbytes


# What a step moves beyond computing, bytes a parameter; the sums are in benchmarks/README.md.
PROMISED = {
    "fp32": {"pack_": 4 + 4, "reduce_": 4 / RANKS, "adamw_": 28 / RANKS},
    "bf16": {"pack_": 2 + 4, "reduce_": 4 / RANKS, "adamw_": 30 / RANKS},
    # 16-bit sums are zshard's own, in fp32: of N rows.
    "bf16/bf16": {"pack_": 2 + 2, "reduce_": 2 + 2 / RANKS, "adamw_": 28 / RANKS},
}


def test_a_step_moves_what_is_promised_and_nothing_around_its_gathers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    path = tmp_path / "bytes.json"
    line = f"bench bytes --model small --tokens 8 --ranks {RANKS} --json {path}"
    assert not cli.main(line.split())
    from bench_bytes import Moved, beyond_computing

    report = json.loads(path.read_text())
    assert len(report["results"]) == len(PROMISED)
    for result, (precision, promised) in zip(report["results"], PROMISED.items(), strict=True):
        assert f" {precision} N={RANKS}" in result["case"]
        parameters = result["parameters"]
        ours, theirs, computing = (Moved(**fields) for fields in result["moved"])
        moved = {op: n / parameters for op, n in beyond_computing(ours, computing).items()}
        for op, nbytes in promised.items():
            assert moved.pop(f"zshard::{op}") == pytest.approx(nbytes, rel=0.02), (precision, op)
        assert sum(map(abs, moved.values())) < 0.02, moved
        assert theirs.name == "FSDP2"
        assert (
            sum(promised.values()) < 0.52 * beyond_computing(theirs, computing).total() / parameters
        )
