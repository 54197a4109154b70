"""zshard.plan: its figures are those that wrapped models come to, and the textbook's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import models
import pytest
import torch
from ranks import run_ranks
from torch import nn

import zshard

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
POLICIES = {
    "fp32": zshard.Precision(),
    "bf16": zshard.Precision.bf16(),
    "bf16/bf16": zshard.Precision.bf16(reduce=torch.bfloat16),
    "split": zshard.Precision.bf16(reduce=torch.bfloat16, master="split"),
}
MOMENTUM = partial(zshard.SGD, momentum=0.9)
OPTIMIZERS = {"adamw": zshard.AdamW, "sgd": zshard.SGD, "momentum": MOMENTUM}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, rank: int) -> None:
    models.loss_of(model, models.batches(name, 1, rank)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def compare(rank: int, size: int) -> int:
    """Hold plans against what models of every kind come to; returns how many."""
    cases = [
        *(("blocks", None, s, p, "adamw", 1) for s in STRATEGIES for p in POLICIES),
        *(
            (name, None, "zero3", "bf16", "adamw", 1)
            for name in ("odd_parameters", "frozen", "gpt")
        ),
        *(("blocks", units, "zero2", "fp32", "sgd", 1) for units in ("model", "layer")),
        *(("gpt", None, "zero3", "fp32", "momentum", prefetch) for prefetch in (0, 2)),
        ("blocks", None, "by unit", "split", "adamw", 1),
    ]
    for case in cases:
        name, units, chosen, precision, rule, prefetch = case
        strategy = (
            (lambda n, _: "zero2" if n == "blocks.1" else "zero3") if " " in chosen else chosen
        )
        options = {"strategy": strategy, "units": units, "precision": POLICIES[precision]}
        planned = zshard.plan(
            models.build(name), size, **options, optimizer=rule, prefetch=prefetch, backend="gloo"
        ).to_dict()
        model = zshard.wrap(models.build(name), **options, prefetch=prefetch)
        optimizer = OPTIMIZERS[rule](model.parameters())
        step(model, optimizer, name, rank)
        stats = zshard.stats(model)
        stats.reset()
        step(model, optimizer, name, rank)
        measured = zshard.memory(model)["now"]
        figures = planned["per_rank"]
        if rank < size - 1:  # the last one has the padding at the end
            del measured["padding"]
        assert {key: figures[key] for key in measured} == measured, case
        assert figures["peak"] == sum(
            measured[key] for key in ("states", "full_buffers", "reduce_buffers")
        )
        for op in ("all_gather", "reduce_scatter"):
            alike = [each for each in planned["collectives"] if each["op"] == op]
            sent = sum(each["bytes"] * each["count"] for each in alike)
            assert sent == stats.sent_bytes[op], (case, op)
            assert sum(each["count"] for each in alike) == stats.calls[op], (case, op)
    return len(cases)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_plan_and_measurement_agree_to_the_byte(size: int) -> None:
    assert set(run_ranks(compare, size, timeout=120)) == {24}


def whole(numel: float) -> nn.Module:
    """Build a model of that many parameters, in one matrix, on the meta device."""
    with torch.device("meta"):
        return nn.Linear(int(numel) // 1000, 1000, bias=False)


@pytest.mark.parametrize(
    ("numel", "world_size", "strategy", "policy", "expected"),
    [
        (7e9, 1, "ddp", "bf16/bf16", 112e9),
        (7e9, 8, "zero3", "bf16/bf16", 14e9),
        (7e9, 8, "zero3", "split", 14 * 7e9 / 8),
        (7e9, 1, "zero3", "fp32", 112e9),
        (7e9, 8, "zero1", "fp32", 63e9),
        (7e9, 8, "zero2", "fp32", 38.5e9),
        (7e9, 8, "zero3", "fp32", 14e9),
        (175e9, 1, "ddp", "bf16/bf16", 2.8e12),
        (175e9, 64, "zero3", "bf16/bf16", 43.75e9),
    ],
)
def test_states_are_the_textbooks(
    numel: float, world_size: int, strategy: str, policy: str, expected: float
) -> None:
    planned = zshard.plan(
        whole(numel), world_size, strategy=strategy, precision=POLICIES[policy]
    ).to_dict()
    assert planned["per_rank"]["states"] == pytest.approx(expected, rel=1e-6)
    assert sum(unit["states"] for unit in planned["units"]) == planned["per_rank"]["states"]


def test_a_trillion_parameters_over_4096_ranks_take_less_than_a_gibibyte() -> None:
    # VmHWM is this process's own; ru_maxrss begins at what the parent held as it forked.
    code = (
        "import zshard; print(zshard.plan('gpt:1t', 4096).peak); "
        "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    peak, resident = map(int, done.stdout.split())
    assert peak > 16e12 / 4096
    assert resident < 1 << 20, "KiB"


def test_fit_finds_the_least_sharding_and_the_fewest_devices() -> None:
    plan = zshard.plan(whole(7e9), 8, precision=POLICIES["bf16/bf16"])
    fit = plan.fit(80e9)
    assert fit.strategy == "zero1"
    assert [name for name, row in fit.plans.items() if row.peak <= 80e9] == STRATEGIES[1:]
    assert fit.devices["ddp"] is None
    for name, devices in fit.devices.items():
        if devices is not None:
            row = plan.with_strategy(name)
            assert row.with_world_size(devices).peak <= 80e9
            assert devices == 1 or row.with_world_size(devices - 1).peak > 80e9
    lines = str(fit).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == STRATEGIES
    assert [line.split()[1] == "*" for line in lines[1:5]] == [False, True, False, False]
    assert lines[0].endswith("fits    fewest devices")
    assert lines[2].split()[-2:] == ["yes", str(fit.devices["zero1"])]
    assert lines[5:] == ["Into 80 GB over 8 ranks: zero1 fits."]
    assert plan.fit(1e9).strategy is None and "*" not in str(plan.fit(1e9))
    for hbm in (0, -1.0, float("nan")):
        with pytest.raises(zshard.InputError, match="hbm="):
            plan.fit(hbm)


def test_activations_count_towards_the_peak() -> None:
    bare, full = (zshard.plan(whole(1e6), 2, activations=n) for n in (0, 1000))
    assert full.peak == bare.peak + 1000
    assert full.to_dict()["per_rank"]["activations"] == 1000


def test_configurations_of_transformers_are_planned_without_their_memory(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"])  # of 7B parameters
    config.save_pretrained(tmp_path)
    plans = [zshard.plan(each, 8) for each in (config, tmp_path, tmp_path / "config.json")]
    assert {plan.parameters for plan in plans} == {6_738_415_616}
    assert len(plans[0].units) == 33
    stated = json.loads(json.dumps(plans[0].to_dict()))
    assert (stated["world_size"], stated["optimizer"], stated["prefetch"]) == (8, "adamw", 1)
    split = plans[0].changed(precision=zshard.Precision.bf16(master="split")).to_dict()
    of_split = {"compute": "bfloat16", "reduce": "float32", "master": "split"}
    assert split["precision"] == {**stated["precision"], **of_split}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpt:8b", 8), "gpt: and one of tiny"),
        (("/nowhere/config.json", 8), "no such file"),
        ((3, 8), "expected a module or.*got a int"),
        (("gpt:7b", 0), "world_size=0"),
        (("gpt:7b", True), "world_size=True"),
        (("gpt:7b", 1 << 70), "world_size=1180591620717411303424"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple[object, int], words: str) -> None:
    with pytest.raises(zshard.InputError, match=words):
        zshard.plan(*arguments)


@pytest.mark.parametrize(
    "option",
    [
        {"optimizer": "lion"},
        {"prefetch": -1},
        {"checkpointing": "never", "batch": torch.ones(2, 3)},
        {"activations": -2},
        {"backend": "mpi"},
        {"strategy": "zero4"},
        {"optimizer": ["lion"]},
        {"hbm": "80GB"},
        {"hbm": float("inf")},
        {"hbm": True},
        {"precision": "bf16"},
        {"machine": 5},
        {"machine": ["h100"]},
        {"network": "400Gbit"},
        {"network": True},
    ],
)
def test_options_that_mean_nothing_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(zshard.InputError, match=re.escape(str(next(iter(option.values()))))):
        zshard.plan(nn.Linear(3, 3), 2, **option)


@pytest.mark.parametrize(
    "change",
    [{"precision": "bf16"}, {"precision": None}, {"optimizer": "lion"}, {"checkpointing": True}],
)
def test_no_plan_is_changed_to_one_that_would_be_refused(change: dict[str, object]) -> None:
    with pytest.raises(zshard.InputError, match=next(iter(change))):
        zshard.plan(nn.Linear(3, 3), 2).changed(**change)


def test_a_wrapped_model_is_refused() -> None:
    with pytest.raises(zshard.InputError, match=r"zshard\.memory"):
        zshard.plan(zshard.wrap(nn.Linear(3, 3)), 2)


# --- plans held against models --------------------------------------------------------------------


def checked(rank: int, size: int, strategy: str) -> list[str]:
    """Return what plan.check says before a step, after one, and of other plans."""
    options = {"strategy": strategy, "precision": POLICIES["bf16"]}
    planned = zshard.plan(models.build("blocks"), size, **options, backend="gloo")
    model = zshard.wrap(models.build("blocks"), **options)
    optimizer = zshard.AdamW(model.parameters())
    others = {
        "world": planned.with_world_size(size + 1),
        "units": zshard.plan(models.build("blocks"), size, units="model", backend="gloo"),
        "precision": planned.changed(precision=POLICIES["split"]),
        "optimizer": planned.changed(optimizer="sgd"),
    }
    said = [said_of(planned, model)]
    step(model, optimizer, "blocks", rank)
    return [*said, said_of(planned, model), *(said_of(each, model) for each in others.values())]


def said_of(planned: zshard.Plan, model: nn.Module) -> str:
    try:
        planned.check(model)
    except zshard.PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_checks_the_model_that_it_was_made_for_and_no_other(strategy: str) -> None:
    for early, now, world, units, precision, optimizer in run_ranks(checked, 2, strategy):
        assert "gradients of the model: 0 bytes" in early and "after a step" in early
        assert now == ""
        assert "for 3 ranks, and the model is sharded over 2" in world
        assert "the plan has 1 unit," in units
        assert "master of unit 'root'" in precision
        assert "optimizer of the model" in optimizer and "planned 0" in optimizer


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_accumulation_keeps_besides_is_not_held_against_a_plan(strategy: str) -> None:
    options = {"strategy": strategy, "precision": POLICIES["bf16"]}
    planned = zshard.plan(models.build("blocks"), 1, **options)
    model = zshard.wrap(models.build("blocks"), **options)
    optimizer = zshard.AdamW(model.parameters())
    x = models.batches("blocks", 1, 0)[0]
    step(model, optimizer, "blocks", 0)
    with zshard.no_sync(model):
        models.loss_of(model, x).backward()
        planned.check(model)
    models.loss_of(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    planned.check(model)


def test_states_of_fp64_parameters_are_planned_and_checked_in_fp64() -> None:
    model = nn.Sequential(nn.Linear(7, 8), nn.Linear(7, 8).double())
    planned = zshard.plan(model, 1)
    assert planned.to_dict()["per_rank"]["optimizer"] == 96 * 2 * (4 + 8)  # with padding
    zshard.wrap(model)
    optimizer = zshard.AdamW(model.parameters())
    (model[0](torch.ones(2, 7)).sum() + model[1](torch.ones(2, 7).double()).sum()).backward()
    optimizer.step()
    planned.check(model)


def test_a_plan_prints_a_line_for_each_strategy_and_what_fits() -> None:
    made = zshard.plan(models.build("blocks"), 4, strategy="zero2", hbm=1e6)
    heads, *lines = str(made).splitlines()[1:6]
    assert "full buffers" in heads and "fewest devices" in heads
    assert heads.startswith("MB (1e6) a rank")
    assert lines[3].split()[-3] == f"{made.with_strategy('zero3').peak / 1e6:.3f}"
    assert [line.split()[0] for line in lines] == STRATEGIES
    assert "zero2 *" in lines[2] and "Into 0.001 GB over 4 ranks" in str(made)
    assert "fits" not in str(zshard.plan(models.build("blocks"), 4))
