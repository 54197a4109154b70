"""zshard.memory: now, by unit, as planned; and at the peak, the most that there ever was."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random

import models
import pytest
import torch
from ranks import run_ranks, simulated
from steps import batch, build, one_step
from test_plan import POLICIES, STRATEGIES
from torch import nn

import zshard
from zshard.units.ledger import Ledger
from zshard.units.pool import Pool
from zshard.wrap import schedule_of

STATES = ("parameters", "gradients", "master", "optimizer")
BUFFERS = ("full_buffers", "reduce_buffers")
KINDS = (*STATES, *BUFFERS)


def now(model: nn.Module) -> dict[str, int]:
    return dict(zshard.memory(model)["now"])


def peak(model: nn.Module) -> dict[str, int]:
    return dict(zshard.memory(model)["peak"])


# --- beside the plan -----------------------------------------------------------------------------


def compare(rank: int, size: int) -> int:
    """Hold the measurement after a step, now and at the peak, against plans; returns how many."""
    cases = [
        *itertools.product(["blocks"], STRATEGIES, POLICIES),
        *itertools.product(["frozen", "odd_parameters"], ["zero3", "zero1"], ["fp32", "split"]),
    ]
    for name, strategy, policy in cases:
        options = {"strategy": strategy, "precision": POLICIES[policy]}
        planned = zshard.plan(models.build(name), size, **options, backend="gloo").to_dict()
        model = zshard.wrap(models.build(name), **options)
        optimizer = zshard.AdamW(model.parameters())
        for _ in range(2):
            models.loss_of(model, models.batches(name, 1, rank)[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        measured = zshard.memory(model)
        rows = [(planned["per_rank"], measured[when]) for when in ("now", "peak")]
        rows += list(zip(planned["units"], measured["units"], strict=True))
        for expected, found in rows:
            assert expected.keys() <= found.keys()
            for key in expected.keys() - {"activations"}:
                if key != "padding" or rank == size - 1:  # the last rank has the padding at the end
                    assert found[key] == expected[key], (name, strategy, policy, key)
        assert measured["now"].keys() == planned["per_rank"].keys()
        for key in (*STATES, "states", "padding"):
            assert sum(unit[key] for unit in measured["units"]) == measured["now"][key]
    return len(cases)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_held_is_the_plan_to_the_byte_in_all_and_by_unit(size: int) -> None:
    assert set(run_ranks(compare, size, timeout=120)) == {24}


# --- the peak ------------------------------------------------------------------------------------


def numel(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def test_gradients_that_no_sync_held_and_zero_grad_dropped_are_in_the_peak() -> None:
    with simulated(0, 4):
        model = build()
        before = now(model)
        with zshard.no_sync(model):
            one_step(model, 0, 0)
        held = now(model)["gradients"]
        assert held == 4 * numel(model), "whole, in fp32"
        for param in model.parameters():
            param.grad = None
        assert now(model)["gradients"] == 0 == before["gradients"]
        assert peak(model)["gradients"] == held
        assert peak(model)["peak"] == held + now(model)["peak"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_while_the_held_gradients_are_reduced_unit_by_unit_both_are_counted(strategy: str) -> None:
    with simulated(0, 4):
        model = build(strategy=strategy)
        for sync in (False, True):
            with contextlib.nullcontext() if sync else zshard.no_sync(model):
                one_step(model, 0, 0)
        whole = strategy in ("zero1", "ddp")  # then the sums lie in the buffer of the unit
        shards, held = now(model)["gradients"], 4 * numel(model)
        # Each unit gives up what it held before its shard is allocated.
        assert peak(model)["gradients"] == (shards if whole else held) >= shards
        model.zero_grad()
        with zshard.no_sync(model):
            one_step(model, 0, 1)
        both = shards if whole else shards + held
        assert now(model)["gradients"] == peak(model)["gradients"] == both
        one_step(model, 0, 1)
        assert now(model)["gradients"] == shards
        assert peak(model)["gradients"] == both


def test_gradients_that_were_freed_as_parameters_were_frozen_are_in_the_peak() -> None:
    model = build()
    one_step(model, 0, 0)
    full = now(model)["gradients"]
    model.zero_grad()
    model.blocks.requires_grad_(False)
    one_step(model, 0, 1)
    assert 0 < now(model)["gradients"] < full == peak(model)["gradients"]


def test_states_of_an_optimizer_that_is_gone_are_in_the_peak() -> None:
    model = build()
    optimizer = zshard.AdamW(model.parameters())
    one_step(model, 0, 0)
    optimizer.step()
    states = now(model)["optimizer"]
    assert states == 2 * now(model)["parameters"]
    del optimizer
    gc.collect()
    assert now(model)["optimizer"] == 0 and peak(model)["optimizer"] == states


def test_states_of_what_was_frozen_since_stay_and_are_counted() -> None:
    model = build()
    optimizer = zshard.AdamW(model.parameters())
    one_step(model, 0, 0)
    optimizer.step()
    before = zshard.memory(model)
    model.blocks[1].requires_grad_(False)
    optimizer.zero_grad()
    one_step(model, 0, 1)
    optimizer.step()
    after = zshard.memory(model)
    assert [unit["optimizer"] for unit in after["units"]] == [
        unit["optimizer"] for unit in before["units"]
    ]
    moved = sum(u["optimizer"] for u in before["units"] if u["name"] != "blocks.1")
    assert after["peak"]["optimizer"] == before["now"]["optimizer"] + moved, (
        "while the states move into new batches they are there twice"
    )


def test_the_peak_of_the_sum_is_of_one_time_and_not_the_sum_of_peaks() -> None:
    with simulated(0, 4):
        model = build()
        with zshard.no_sync(model):
            one_step(model, 0, 0)
        model.zero_grad()
        optimizer = zshard.AdamW(model.parameters())
        one_step(model, 0, 1)
        optimizer.step()
    found = peak(model)
    apart = sum(found[key] for key in STATES)
    assert max(found[key] for key in STATES) < found["states"] < apart
    assert found["states"] < found["peak"] < apart + sum(found[key] for key in BUFFERS)


def test_a_buffer_that_there_is_no_memory_for_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Pool(
        1, torch.device("cpu"), lambda n, dtype: torch.empty(n, dtype=dtype), lambda _: None
    )
    pool.reserve([100, 200])

    def no_room(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_room)
        for make in (pool.own_slot, pool.free_slot):
            with pytest.raises(torch.OutOfMemoryError):
                make()
    assert pool.ledger.now["full_buffers"] == pool.slot_bytes == 0
    pool.own_slot()
    assert pool.ledger.now["full_buffers"] == pool.slot_bytes == 100


def test_a_reduce_buffer_that_grows_takes_the_place_of_the_smaller_one() -> None:
    given_back: list[int] = []
    pool = Pool(
        1,
        torch.device("cpu"),
        lambda n, dtype: torch.empty(n, dtype=dtype),
        lambda memory: given_back.append(memory.numel()),
    )
    for nbytes in (100, 250, 50):
        pool.reserve_scratch({"packed": nbytes, "chunks": 0})
        pool.scratch("packed", nbytes)
        assert pool.ledger.now["reduce_buffers"] == pool.scratch_bytes
    assert pool.ledger.peak["reduce_buffers"] == 250
    pool.drop_scratch()
    assert given_back == [100, 250]


def test_a_unit_alone_takes_all_of_the_buffers_that_units_share() -> None:
    with simulated(0, 4):
        model = build(units="model")
        one_step(model, 0, 0)
        (unit,), held = zshard.memory(model)["units"], now(model)
        assert {key: unit[key] for key in KINDS} == {key: held[key] for key in KINDS}
        assert unit["model_parameters"] == numel(model)


def test_a_peak_that_was_reset_begins_from_what_there_is() -> None:
    model = build()
    one_step(model, 0, 0)
    model.zero_grad()
    model.requires_grad_(False)
    model.outlet.requires_grad_(True)
    one_step(model, 0, 1)
    before = zshard.memory(model, reset_peak=True)
    assert before["peak"]["gradients"] > before["now"]["gradients"]
    after = zshard.memory(model)
    assert after["peak"] == after["now"] == before["now"]


def test_a_step_like_the_last_has_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(0, 4):
        model = build()
        optimizer = zshard.AdamW(model.parameters())
        told = []
        for step in range(4):
            if step == 2:
                monkeypatch.setattr(Ledger, "add", lambda *arguments: told.append(arguments))
            one_step(model, 0, step)
            zshard.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert not told


# --- in any order --------------------------------------------------------------------------------


class Session:
    """A model and an optimizer, and what a script may do with them."""

    def __init__(self, strategy: str, policy: str) -> None:
        self.model = build(strategy=strategy, precision=POLICIES[policy])
        self.optimizer = zshard.AdamW(self.model.parameters())

    def backward(self) -> None:
        one_step(self.model, 0, 0)

    def hold(self) -> None:
        with zshard.no_sync(self.model):
            one_step(self.model, 0, 1)

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def drop(self) -> None:
        self.optimizer.zero_grad()

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def drop_one(self) -> None:
        self.model.blocks[2].up.weight.grad = None

    def freeze(self) -> None:
        self.model.zero_grad()
        self.model.blocks[1].requires_grad_(False)

    def unfreeze(self) -> None:
        self.model.zero_grad()
        self.model.blocks[1].requires_grad_(True)

    def freeze_a_part(self) -> None:
        self.model.zero_grad()
        self.model.blocks[0].up.weight.requires_grad_(False)

    def change_optimizer(self) -> None:
        self.optimizer = zshard.SGD(self.model.parameters(), momentum=0.9)
        gc.collect()

    def reload(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(batch(0, 2))

    def fail(self) -> None:
        """Raise in the middle of a backward."""
        handle = self.model.blocks[1].register_full_backward_pre_hook(lambda *_: 1 // 0)
        loss = models.loss_of(self.model, batch(0, 3))
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        zshard.reset(self.model)


ACTIONS = [name for name in vars(Session) if not name.startswith("_")]


@pytest.mark.parametrize("policy", ["fp32", "bf16", "split"])
@pytest.mark.parametrize(("size", "strategy"), [(1, "zero3"), *((4, each) for each in STRATEGIES)])
def test_the_peak_is_never_below_now_whatever_is_done(
    size: int, strategy: str, policy: str
) -> None:
    draw = random.Random(f"{size} {strategy} {policy}")
    with simulated(0, size) if size > 1 else contextlib.nullcontext():
        session = Session(strategy, policy)
        ledger = schedule_of(session.model).pool.ledger
        highest = peak(session.model)
        seen = now(session.model)
        for number in range(40):
            action = draw.choice(ACTIONS)
            getattr(session, action)()
            found = zshard.memory(session.model)
            done = f"{action}, action {number}"
            assert {kind: found["now"][kind] for kind in KINDS} == ledger.now, done
            for key, value in found["now"].items():
                seen[key] = max(seen[key], value)
                assert found["peak"][key] >= max(highest[key], seen[key]), (done, key)
            highest = dict(found["peak"])
