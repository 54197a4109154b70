"""What a plan's table, its alternatives and its JSON say: the numbers of the plans behind them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import zshard
from zshard.planning.fit import STRATEGIES
from zshard.planning.report import report

COLUMNS = {  # of the table: of to_dict()["per_rank"]
    **{name: name for name in ("parameters", "gradients", "master", "optimizer", "states")},
    "full buffers": "full_buffers",
    "reduce buffers": "reduce_buffers",
    **{name: name for name in ("activations", "peak")},
}


def tiny(world_size: int = 5, **options: object) -> zshard.Plan:
    """Return a plan with times: over a slow network, so that these are some milliseconds."""
    given = {"batch": (2, 64), "machine": "h100", "network": zshard.Link(1e9), "backend": "gloo"}
    return zshard.plan("gpt:tiny", world_size, **(given | options))


def cells(line: str) -> list[str]:
    return re.split(" {2,}", line.strip())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_report_has_the_numbers_of_every_strategys_plan(strategy: str) -> None:
    made = tiny(strategy=strategy)
    made = replace(made, hbm=sorted(made.with_strategy(name).peak for name in STRATEGIES)[1])
    fit = made.fit()
    heads, *rows = report(made, fit, title="It").splitlines()[1:6]
    assert heads.startswith("MB (1e6) a rank")
    for name, line in zip(STRATEGIES, rows, strict=True):
        row = made.with_strategy(name)
        found = dict(zip(cells(heads), cells(line), strict=True))
        assert found.pop("MB (1e6) a rank") == name + " *" * (name == strategy)
        held = row.to_dict()["per_rank"]
        expected = {shown: f"{held[kind] / 1e6:,.3f}" for shown, kind in COLUMNS.items()}
        expected["step ms"] = f"{row.step_seconds * 1e3:,.1f}"
        expected["exposed ms"] = f"{row.exposed_seconds * 1e3:,.1f}"
        expected["fits"] = "yes" if row.peak <= made.hbm else "no"
        expected["fewest devices"] = str(fit.devices[name] or "none will do")
        assert found == expected, name
    assert [cells(line)[-2] for line in rows].count("yes") == 2


def test_a_report_tells_what_is_sent_how_long_it_takes_and_what_would_change_it() -> None:
    made = tiny()
    made = tiny(hbm=made.peak)
    lines = report(made, made.fit(), title="It").splitlines()
    sent = sum(each.bytes * each.count for each in made.collectives)
    count = sum(each.count for each in made.collectives)
    assert count > len(made.collectives)
    assert f"A rank sends {sent / 1e6:,.3f} MB a step in {count} collectives (zero3)." in lines
    line = made.timeline
    assert 0 < line.exposed < line.communication != 2 * line.exposed
    said = (
        f"communication {line.communication * 1e3:,.1f} ms, of which {line.exposed * 1e3:,.1f} ms "
        f"are exposed ({1 - line.exposed / line.communication:.0%} hidden)."
    )
    assert next(each for each in lines if each.startswith("A step")).endswith(said)
    begin = lines.index("What would change it, against the strategy marked *:") + 1
    line_of = re.compile(r"  (.+): (\w+) ([\d.]+) MB, ([\d.]+) ms (\w+), (.*)")
    shown = [line_of.fullmatch(each) for each in lines[begin : begin + 6]]
    for match, each in zip(shown, made.alternatives()[:6], strict=True):
        saves = each.saves / 1e6 * (1 if match[2] == "saves" else -1)
        faster = each.faster * 1e3 * (1 if match[5] == "faster" else -1)
        assert match[1] == each.change
        assert (match[3], match[4]) == (f"{saves:.3f}", f"{faster:.1f}"), each
        assert match[6] == ("fits" if each.fits else "does not fit")
    assert {match[5] for match in shown} == {"faster", "slower"}
    assert {match[6] for match in shown} == {"fits", "does not fit"}
    assert lines[-1] == f"Into {made.hbm / 1e9:,.4g} GB over 5 ranks: zero3 fits."


def test_a_report_tells_where_its_activations_are_from() -> None:
    given = zshard.plan("gpt:tiny", 2, activations=3_000_000)
    assert "Activations are as given: 3.000 MB." in str(given)
    assert "--batch BxT measures and predicts" in str(zshard.plan("gpt:tiny", 2))
    again = tiny(checkpointing=True)
    assert "fake tensors, every unit recomputed; the peak" in str(again)
    assert "recomputed" not in str(tiny())
    least = tiny().fit(again.peak)
    assert str(least).endswith("zero3 fits with activation checkpointing.")


def test_alternatives_and_what_fits_are_json_of_the_plans_that_they_are() -> None:
    made = tiny(hbm=tiny(strategy="zero2").peak)
    found = {each.change: each for each in made.alternatives()}
    assert found["strategy zero2"].fits  # to the byte
    for each in found.values():
        told = {name: getattr(each, name) for name in ("change", "saves", "faster", "fits")}
        told |= {"peak": each.plan.peak, "step_seconds": each.plan.step_seconds}
        assert each.to_dict() == told
        assert (each.saves, each.fits) == (made.peak - each.plan.peak, each.plan.peak <= made.hbm)
    told = made.fit().to_dict()
    assert told["peak"] == {name: made.with_strategy(name).peak for name in STRATEGIES}
    recomputed = made.changed(checkpointing=True)
    assert told["peak_with_checkpointing"] == {
        name: recomputed.with_strategy(name).peak for name in STRATEGIES
    }
    assert recomputed.fit().recomputed == {}  # it has that already


def test_no_alternative_is_what_the_plan_has_already() -> None:
    low = zshard.Precision.bf16(reduce=torch.bfloat16)
    plain = {each.change: each.plan for each in tiny().alternatives()}
    assert plain["bf16 compute"].setup.precision == zshard.Precision.bf16()
    offered = {
        name: {each.change for each in tiny(**options).alternatives()}
        for name, options in {
            "bf16": {"precision": zshard.Precision.bf16()},
            "low": {"precision": low},
            "split": {"precision": replace(low, master="split")},
            "ddp": {"strategy": "ddp"},
            "one": {"world_size": 1},
        }.items()
    }
    assert {"bf16 reduction", "split master"} <= offered["bf16"]
    assert {"bf16 reduction", "split master"} & offered["low"] == {"split master"}
    assert {"bf16 reduction", "split master", "bf16 compute"} & offered["split"] == set()
    assert not {each for each in offered["ddp"] if each.startswith("prefetch")}
    assert {"prefetch 0", "prefetch 2", "strategy zero2"} <= set(plain)
    assert not {each for each in offered["one"] if each.startswith("strategy")}


@pytest.mark.parametrize("devices", [3, 5, 8])
def test_the_fewest_devices_are_those_over_which_it_just_fits(devices: int) -> None:
    made = zshard.plan("gpt:tiny", 2)
    assert made.peak_over(devices) < made.peak_over(devices - 1)
    assert made.fit(made.peak_over(devices)).devices["zero3"] == devices


def test_a_datasheets_machine_is_in_bytes_and_operations_a_second() -> None:
    h100, h200 = zshard.Machine.of("h100"), zshard.Machine.of("h200")
    assert (h100.hbm, h200.hbm) == (80e9, 141e9)
    rates = ("bfloat16", "float16", "float32", "float64")
    assert [h100.flops[each] / 0.6 for each in rates] == pytest.approx(
        [989e12, 989e12, 494e12, 494e12 / 8]
    )
    assert h100.gather == h100.reduce == zshard.Link(0.8 * 450e9, 5e-6)
    assert h100.network.bandwidth == 0.8 * 400e9 / 8
    assert zshard.Link(1e9, 1.0).seconds(0, 5) == 3  # of a tree, two ranks at a time


def test_one_rank_needs_no_shared_memory() -> None:
    assert tiny(1, comm="peer", network=None).comm == "group"
