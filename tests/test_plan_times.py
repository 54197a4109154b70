"""Step times in plans: the real schedule's order, and sums that can be done by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import models
import pytest
import torch
from ranks import run_ranks
from steps import batch, build, one_step

import zshard
from zshard.layout import Layout
from zshard.planning.footprint import FlatPlan
from zshard.planning.timeline import Durations, Timeline, timeline
from zshard.planning.work import Call, Work
from zshard.strategy import Strategy

PHASES = ("gather", "forward", "backward", "pack", "reduce", "step")


def hand(prefetch: int = 1, *, in_memory: bool = False, **units: float) -> Timeline:
    """Return the timeline of a root and three units whose phases take whole seconds."""
    each = {
        "forward": 10.0,
        "backward": 20.0,
        "gather": 4.0,
        "reduce": 6.0,
        "pack": 1.0,
        "sum": 2.0,
    }
    each |= units
    made = [Durations(name, False, **each) for name in ("root", "a", "b", "c")]
    return timeline(
        made,
        range(4),
        prefetch,
        step=5.0,
        meeting=0.0,
        interference=0.0,
        sums_on_host=True,
        in_memory=in_memory,
    )


def test_gathers_and_reductions_hide_under_computing() -> None:
    line = hand()
    # Exposed: the root's gather, before anything can hide it; the last two reductions, after which
    # there is no backward left.
    assert line.exposed == 4 + 6 + 6
    computing = 4 * (10 + 20 + 1 + 2) + 5
    assert line.seconds == computing + line.exposed


def test_communication_adds_up() -> None:
    gathers = 1 + 3 + 2  # the root once, every unit before forward, all but the last for backward
    assert hand().communication == gathers * 4 + 4 * 6


def test_without_prefetch_every_gather_is_exposed() -> None:
    assert hand(prefetch=0).exposed == 6 * 4 + 6 + 6


def test_a_slow_link_bounds_the_step() -> None:
    line = hand(gather=100.0)
    assert line.seconds > 6 * 100
    assert line.exposed > 6 * 100 - 4 * 30


def test_sums_of_a_gpu_are_beside_computing() -> None:
    units = [Durations(n, False, 10.0, 20.0, 4.0, 1.0, 6.0, 2.0) for n in ("root", "a", "b", "c")]
    arguments = {"step": 5.0, "meeting": 0.0, "interference": 0.0, "in_memory": False}
    host = timeline(units, range(4), 1, sums_on_host=True, **arguments)
    gpu = timeline(units, range(4), 1, sums_on_host=False, **arguments)
    # Two of the four hide under backward; the others are waited for.
    assert host.seconds - gpu.seconds == 2 * 2


def test_hidden_communication_slows_computing_by_the_interference() -> None:
    units = [Durations(n, False, 10.0, 20.0, gather=4.0, reduce=6.0) for n in ("root", "a")]
    arguments = {"step": 0.0, "meeting": 0.0, "sums_on_host": True, "in_memory": False}
    free = timeline(units, range(2), 1, interference=0.0, **arguments)
    half = timeline(units, range(2), 1, interference=0.5, **arguments)
    assert free.communication > free.exposed
    assert half.seconds == free.seconds + 0.5 * (free.communication - free.exposed)


def test_whole_parameters_are_gathered_under_the_next_forward() -> None:
    units = [Durations(n, True, 10.0, 20.0, gather=4.0) for n in ("root", "a", "b")]
    arguments = {"step": 5.0, "meeting": 0.0, "interference": 0.0, "sums_on_host": True}
    line = timeline(units, range(3), 1, in_memory=False, **arguments)
    assert [s.unit for s in line.spans if s.phase == "gather"] == ["root", "a", "b"]
    assert line.exposed == 4.0


def recorded(rank: int, size: int, prefetch: int) -> list[tuple[str, str]]:
    """Return the real events of a steady step, those that take time."""
    model = build(prefetch=prefetch)
    optimizer = zshard.AdamW(model.parameters())
    one_step(model, rank, 0)
    with zshard.trace(model) as trace:
        one_step(model, rank, 1)
        optimizer.step()
    return [(e.phase, e.unit) for e in trace.events if e.phase in PHASES]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_predicted_order_is_the_real_schedules(prefetch: int) -> None:
    planned = zshard.plan(
        models.Blocks(), 2, prefetch=prefetch, batch=batch(0, 0), machine=machine()
    )
    order = [(s.phase, s.unit) for s in planned.timeline.spans if s.phase in PHASES]
    for real in run_ranks(recorded, 2, prefetch):
        assert order == real


def machine(**fields: object) -> zshard.Machine:
    link = zshard.Link(1e9, 1e-5)
    return replace(
        zshard.Machine(
            "made up",
            {"float32": 1e12, "bfloat16": 4e12, "attention float32": 5e11},
            memory=1e11,
            pointwise=5e10,
            call=1e-6,
            gather=link,
            reduce=link,
        ),
        **fields,
    )


def test_a_call_takes_what_bounds_it() -> None:
    on = machine()
    assert on.seconds(Work({Call("product", 2_000_000_000, 10, "float32"): 3})) == 3 * 2e-3
    assert on.seconds(Work({Call("product", 2_000_000_000, 10, "bfloat16"): 1})) == 5e-4
    assert on.seconds(Work({Call("attention", 10**9, 10, "float32"): 1})) == 2e-3
    assert on.seconds(Work({Call("product", 10, 10**9, "float32"): 1})) == 1e-2
    assert on.seconds(Work({Call("pointwise", 0, 10**9, "float32"): 1})) == 2e-2
    assert on.seconds(Work({Call("pointwise", 0, 8, "float32"): 5})) == pytest.approx(5e-6)


def test_a_link_takes_its_latency_for_every_doubling_of_ranks() -> None:
    assert zshard.Link(1e9, 1e-3).seconds(10**9, 8) == pytest.approx(1.003)


def spans_of(planned: zshard.Plan, phase: str) -> list[tuple[str, float]]:
    return [(s.unit, s.ended - s.began) for s in planned.timeline.spans if s.phase == phase]


def test_what_moves_is_charged_to_memory() -> None:
    precision = zshard.Precision.bf16()
    planned = zshard.plan(
        torch.nn.Linear(640, 480, bias=False),
        2,
        precision=precision,
        batch=torch.empty(1, 640),
        machine=machine(sums_on_host=True),
    )
    numel, rate = 640 * 480, 1e11
    expected = {
        "pack": numel * (2 + 4),
        "sum": numel // 2 * 4 * 3,  # two ranks' rows in, one out
        "step": numel // 2 * (4 + 2 * 4 + 4 * 4 + 2),
    }
    for phase, nbytes in expected.items():
        assert spans_of(planned, phase) == [("root", pytest.approx(nbytes / rate))], phase


def test_ddp_shares_reduced_gradients_and_gathers_nothing() -> None:
    planned = gpt_plan(strategy="ddp")
    assert not spans_of(planned, "gather")
    assert [unit for unit, _ in spans_of(planned, "reduce")].count("blocks.1") == 2


def test_the_unit_that_forward_ends_with_is_gathered_once() -> None:
    backwards = models.Blocks(order=(2, 1, 0))
    found = {
        each.unit: each.count
        for each in zshard.plan(backwards, 2, batch=batch(0, 0)).collectives
        if each.op == "all_gather"
    }
    assert found == {"root": 1, "blocks.0": 1, "blocks.1": 2, "blocks.2": 2}


def gpt_plan(**options: object) -> zshard.Plan:
    given = {"batch": (1, 64), "machine": machine(), "backend": "gloo", **options}
    return zshard.plan("gpt:tiny", 8, **given)


def test_a_slower_network_takes_longer_and_changes_nothing_else() -> None:
    fast, slow = (gpt_plan(network=rate) for rate in (100e9, 1e8))
    assert slow.step_seconds > fast.step_seconds
    assert slow.exposed_seconds > fast.exposed_seconds
    assert slow.peak == fast.peak


def test_one_rank_waits_for_nothing() -> None:
    alone = gpt_plan().with_world_size(1)
    assert alone.exposed_seconds == alone.timeline.communication == 0
    assert alone.step_seconds > 0


def test_beyond_a_host_the_network_carries_collectives() -> None:
    on = machine(network=zshard.Link(1e7), host=8)
    assert gpt_plan(machine=on).step_seconds == gpt_plan().step_seconds
    across = gpt_plan(machine=on).with_world_size(9)
    assert across.step_seconds > 5 * gpt_plan().with_world_size(9).step_seconds


def test_without_a_batch_no_time_is_predicted() -> None:
    planned = zshard.plan("gpt:tiny", 8).to_dict()
    assert planned["step_seconds"] is planned["exposed_seconds"] is planned["timeline"] is None
    assert planned["activations_source"] == "not counted"


def test_datasheets_are_there_by_name() -> None:
    times = [gpt_plan(machine=name).step_seconds for name in ("a100", "h100", "h200")]
    assert times[0] > times[1] >= times[2]


def test_a_machine_is_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    on = machine(network=zshard.Link(5.0), shared=zshard.Link(1e10, 1e-5), facts={"ranks": 2})
    on.save(path)
    assert zshard.Machine.of(path) == on
    assert gpt_plan(machine=path).step_seconds == gpt_plan(machine=on).step_seconds


@pytest.mark.parametrize("text", ["", "{}", '{"name": 3}', "[1]"])
def test_a_file_that_is_no_machine_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(zshard.InputError, match="expected one of a100, h100, h200, or a file"):
        gpt_plan(machine=path)


def test_a_machine_measured_with_one_rank_says_nothing_of_more() -> None:
    alone = machine(gather=None, reduce=None)
    assert gpt_plan(machine=alone, network=1e9).step_seconds > 0
    with pytest.raises(zshard.InputError, match="measured with one rank"):
        gpt_plan(machine=alone)


@pytest.mark.parametrize("value", [None, -1, math.nan, math.inf, 1e31, "1", [], True])
@pytest.mark.parametrize(
    "field",
    ["memory", "pointwise", "call", "interference", "hbm", "host", "flops", "facts", "gather"],
)
def test_a_machine_with_a_field_that_means_nothing_is_refused(
    tmp_path: Path, field: str, value: object
) -> None:
    path = tmp_path / "machine.json"
    machine().save(path)
    found = json.loads(path.read_text())
    for changed in (
        {field: value},
        {"flops": {"float32": value}},
        {"gather": {"bandwidth": value}},
    ):
        if changed != {"gather": None}:  # one that was measured with one rank
            path.write_text(json.dumps({**found, **changed}))
            with pytest.raises(zshard.InputError, match="expected one of a100, h100, h200, or a"):
                gpt_plan(machine=path)


@pytest.mark.parametrize(("rate", "latency"), [(0, 0), (1, -1), (1, math.nan), ("1", 0)])
def test_a_link_that_carries_nothing_is_refused(rate: float, latency: float) -> None:
    with pytest.raises(zshard.InputError, match="expected a"):
        zshard.Link(rate, latency)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan")])
def test_a_network_without_a_rate_is_refused(rate: float) -> None:
    with pytest.raises(zshard.InputError, match="network="):
        gpt_plan(network=rate)


# --- what would change it -------------------------------------------------------------------------


def test_alternatives_are_what_plans_with_those_options_come_to() -> None:
    bf16 = zshard.Precision.bf16()
    planned = gpt_plan(precision=bf16)
    found = {each.change: each for each in planned.alternatives()}
    assert set(found) == {
        *("strategy ddp", "strategy zero1", "strategy zero2"),
        *("bf16 reduction", "split master", "prefetch 0", "prefetch 2"),
        "activation checkpointing",
    }
    split = replace(bf16, master="split")
    for change, other in {
        "strategy zero2": gpt_plan(precision=bf16, strategy="zero2"),
        "prefetch 0": gpt_plan(precision=bf16, prefetch=0),
        "split master": gpt_plan(precision=split),
        "activation checkpointing": gpt_plan(precision=bf16, checkpointing=True),
    }.items():
        assert found[change].saves == planned.peak - other.peak
        assert found[change].faster == planned.step_seconds - other.step_seconds
    assert found["split master"].saves > 0 > found["strategy ddp"].saves
    assert found["activation checkpointing"].saves > 0 > found["activation checkpointing"].faster


def test_what_makes_it_fit_comes_first() -> None:
    planned = gpt_plan(strategy="ddp")
    short = gpt_plan(strategy="ddp", hbm=planned.peak - 1)
    fitting = [each.fits for each in short.alternatives()]
    assert True in fitting and fitting == sorted(fitting, reverse=True)
    tight = gpt_plan(strategy="ddp", hbm=1.0).alternatives()
    assert [each.saves for each in tight] == sorted((e.saves for e in tight), reverse=True)


def test_recomputation_is_the_last_resort() -> None:
    planned = gpt_plan()
    least = planned.changed(checkpointing=True).peak
    fit = planned.fit(least)
    assert least < min(each.peak for each in fit.plans.values())
    assert (fit.strategy, fit.checkpointing) == ("zero3", True)
    roomy = planned.fit(planned.with_strategy("ddp").peak)
    assert (roomy.strategy, roomy.checkpointing) == ("ddp", False)
    json.dumps(fit.to_dict())


def test_plans_are_json_with_times() -> None:
    found = json.loads(json.dumps(gpt_plan().to_dict()))
    assert found["step_seconds"] > found["exposed_seconds"] > 0
    spans = found["timeline"]
    assert {span["stream"] for span in spans} == {"compute", "gather", "reduce"}
    assert max(span["ended"] for span in spans) == pytest.approx(found["step_seconds"])


@pytest.mark.parametrize(
    ("size", "nccl", "reduce", "passes"),
    [
        (1, False, torch.float32, 1),  # read where it lies
        (4, True, torch.float32, 1),
        (4, True, torch.bfloat16, 5),  # every rank's row, and the sum
        (4, False, torch.float32, 5),
    ],
)
def test_a_single_row_is_read_and_not_written(
    size: int, nccl: bool, reduce: torch.dtype, passes: int
) -> None:
    dtypes = zshard.Precision(reduce=reduce).resolve(torch.float32)
    flat = FlatPlan(Layout.of([torch.empty(64, 16)], size), dtypes, Strategy("zero3"), True)
    assert flat.sum_bytes(nccl=nccl) == passes * 64 * 16 // size * reduce.itemsize
