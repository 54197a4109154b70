"""Contestants of `zshard bench step`: they train alike, and none does what the others need not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

ROOT = Path(__file__).parent.parent


def check_one_that_reduces_nothing(
    rank: int, world_size: int, model: str, tokens: int, precision: str
) -> str:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from bench_step import check_losses
    from contestants import MAKERS, Setting

    setting = Setting(model, tokens, precision, torch.device("cpu"))
    try:
        check_losses([MAKERS[name](setting) for name in ("zshard", "fsdp2", "plain")], setting)
    except AssertionError as error:
        return str(error)
    return "the losses agree"


@pytest.mark.parametrize(
    ("model", "tokens", "precision"), [("tiny", 5, "fp32"), ("small", 128, "bf16/bf16")]
)
def test_a_contestant_that_trains_otherwise_is_found_before_anything_is_timed(
    model: str, tokens: int, precision: str
) -> None:
    given = (model, tokens, precision)
    for rank, message in enumerate(run_ranks(check_one_that_reduces_nothing, 2, *given)):
        # The first losses are those of one model; updates tell them apart.
        where = f"rank {rank}, {model} {precision}, step [12]"
        assert re.match(f"{where}: the loss is .* with plain and ", message), message


def collectives_of_ddp(rank: int, world_size: int) -> set[str]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from contestants import MAKERS, Setting

    setting = Setting("tiny", 5, "fp32", torch.device("cpu"))
    ddp = MAKERS["ddp"](setting)
    with torch.profiler.profile() as profile:
        ddp.step(*setting.batches(rank)[0])
    return {event.name for event in profile.events() if event.name.startswith("c10d::")}


def test_ddp_sends_gradients_and_nothing_else() -> None:
    assert run_ranks(collectives_of_ddp, 2) == [{"c10d::allreduce_"}] * 2


def test_what_computes_alone_keeps_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from contestants import MAKERS, Setting

    setting = Setting("tiny", 5, "fp32", torch.device("cpu"))
    compute = MAKERS["compute"](setting)
    found = []
    first = next(compute.model.parameters())  # the last to get its gradient
    first.register_post_accumulate_grad_hook(
        lambda _: found.append([p.grad for p in compute.model.parameters()])
    )
    compute.step(*setting.batches(0)[0])
    assert found and not any(grad is not None for grads in found for grad in grads)
