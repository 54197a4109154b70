"""Ctrl-C inside of what the runtime does: after zshard.reset the step has not been."""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from models import Blocks
from ranks import run_ranks, simulated
from steps import batch, training_step
from torch import Tensor, nn

import zshard
from zshard.step.forward_log import ForwardLog
from zshard.step.outcome import OutcomeSum
from zshard.step.pending_reduction import PendingReduction
from zshard.step.program import Programs
from zshard.step.reduction import Reducer
from zshard.transports.handle import Handle
from zshard.unit import Unit
from zshard.units.flat import Flat
from zshard.units.full_buffer import FullBuffer
from zshard.units.gradient import Gradients
from zshard.units.param_site import ParamSite
from zshard.units.pool import Pool
from zshard.wrap import schedule_of

SITES = {
    "install": (ParamSite, "install"),
    "mark": (FullBuffer, "mark"),
    "uninstall": (Unit, "uninstall"),
    "take a slot": (Pool, "take"),
    "enter a state": (Unit, "_enter"),
    "begin to reduce": (Reducer, "start"),
    "find reduce buffers": (Reducer, "_buffers_of"),
    "hold a collective": (Handle, "__init__"),
}
# Where what the modules are given, and what counts as up to date, is being changed.
CHANGES = {
    "attach": (FullBuffer, "attach"),
    "say what is valid": (FullBuffer, "mark"),
    "refresh what is sent": (Flat, "refresh_send"),
    "note an update": (Flat, "updated"),
    "end a write": (Flat, "slices_written"),
}
# What every rank does at the same point of a step.
TURNS = {
    "gather": (Unit, "gather"),
    "pack": (Gradients, "pack"),
    "reduce": (PendingReduction, "__init__"),
    "begin a forward": (ForwardLog, "begin"),
    "begin a pass": (Programs, "begin"),
    "state": (zshard.step.executor.Executor, "enter_state"),
    "end a backward": (OutcomeSum, "start"),
}
GATHERS = [("gather", 1), ("gather", 3)]
POINTS = [
    *GATHERS,
    *((site, at) for site in ("pack", "reduce") for at in (1, 3)),
    *((site, 1) for site in ("begin a forward", "end a backward")),
    *(("begin a pass", 2), ("state", 3)),  # a backward
]
RULES = {"zshard's": zshard.AdamW, "torch's": torch.optim.AdamW}


class Interrupts:
    """A method whose ``at``-th call raises instead."""

    def __init__(self, site: str, at: int) -> None:
        self._owner, self._name = (SITES | CHANGES | TURNS)[site]
        self._at, self._calls = at, 0

    def __enter__(self) -> None:
        self._plain: Any = getattr(self._owner, self._name)

        @functools.wraps(self._plain)
        def interrupting(*args: object, **kwargs: object) -> object:
            self._calls += 1
            if self._calls == self._at:
                raise KeyboardInterrupt
            return self._plain(*args, **kwargs)

        setattr(self._owner, self._name, interrupting)

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._plain)


def values(model: nn.Module) -> list[Tensor]:
    return [zshard.full_param(model, name) for name, _ in model.named_parameters()]


def interrupted(rank: int, world_size: int, site: str) -> list[str]:
    """What differs, wherever the second of three steps was interrupted."""
    torch.set_num_threads(1)
    wrong: list[str] = []
    expected: list[Tensor] = []
    for at in range(200):
        torch.manual_seed(0)
        model = zshard.wrap(Blocks(), comm="peer" if world_size > 1 else "auto")
        optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
        training_step(model, optimizer, batch(rank, 0))
        if at == 0:
            training_step(model, optimizer, batch(rank, 2))
            expected = values(model)
            continue
        try:
            with Interrupts(site, at):
                models.loss_of(model, batch(rank, 1)).backward()
        except KeyboardInterrupt:
            pass
        else:
            assert at > 1, "never called"
            return wrong
        try:
            zshard.reset(model)
            if schedule_of(model).pool.live > 0:
                wrong.append(f"call {at}: a unit that is not gathered keeps its memory")
            model.zero_grad()
            with zshard.full_params(model):
                pass
            training_step(model, optimizer, batch(rank, 2))
            if not all(map(torch.equal, values(model), expected)):
                wrong.append(f"call {at}: other values")
        except Exception as error:
            wrong.append(f"call {at}: {type(error).__name__}: {error}")
            if world_size > 1:
                return wrong
    raise AssertionError("still called")


@pytest.mark.parametrize(
    ("world_size", "site"),
    [
        *((1, site) for site in SITES if site not in ("take a slot", "hold a collective")),
        *((2, site) for site in SITES),
    ],
)
def test_a_reset_after_ctrl_c_is_as_if_the_step_had_not_been(site: str, world_size: int) -> None:
    if world_size == 1:
        assert interrupted(0, 1, site) == []
    else:
        assert run_ranks(interrupted, 2, site) == [[], []]


def test_so_it_is_for_a_simulated_rank_which_has_nobody_to_begin_anew_with() -> None:
    with simulated(0, 2):
        assert interrupted(0, 1, "enter a state") == []


def afterwards(rank: int, world_size: int, strategy: str, rule: str, site: str) -> list[str]:
    """Where a step, the first or second, was interrupted so that the model is not what it holds."""
    torch.set_num_threads(1)
    wrong: list[str] = []
    # torch's makes six writes of each parameter: every fifth comes to all of these, too.
    stride = 5 if rule == "torch's" else 1
    for before in (0, 1):
        for at in itertools.count(1, stride):
            torch.manual_seed(0)
            comm = "peer" if world_size > 1 else "auto"
            model, plain = zshard.wrap(Blocks(), strategy=strategy, comm=comm), Blocks()
            optimizer = RULES[rule](model.parameters(), lr=1e-2)
            if before:
                training_step(model, optimizer, batch(rank, 0))
            try:
                with Interrupts(site, at):
                    training_step(model, optimizer, batch(rank, 1))
            except KeyboardInterrupt:
                zshard.reset(model)
            else:
                assert at > 1 or before, "never called"
                break  # it is called no more often
            optimizer.zero_grad()
            plain.load_state_dict(zshard.state_dict(model, all_ranks=True))
            for number in (2, 3):
                with torch.no_grad():
                    if not torch.equal(model(batch(rank, number)), plain(batch(rank, number))):
                        wrong.append(f"{before=} {at=}: forward {number} has other values")
            training_step(model, optimizer, batch(rank, 4))
    return wrong


@pytest.mark.parametrize(
    ("size", "strategy", "rule", "site"),
    [
        (size, strategy, rule, site)
        for size, strategy in ((1, "zero1"), (2, "zero2"), (2, "zero3"))
        for rule in RULES
        for site in CHANGES
        # What stays whole is attached in wrap; zshard's optimizers write no slices.
        if (strategy == "zero3" or site != "attach")
        and (rule == "torch's" or site != "end a write")
    ],
)
def test_after_ctrl_c_the_model_computes_with_the_parameters_that_it_holds(
    size: int, strategy: str, rule: str, site: str
) -> None:
    if size == 1:
        assert afterwards(0, 1, strategy, rule, site) == []
    else:
        assert run_ranks(afterwards, size, strategy, rule, site, timeout=120) == [[], []]


def alone(rank: int, world_size: int, strategy: str, site: str, at: int) -> tuple[str, ...]:
    """Over the process group: rank 0 is interrupted, and goes on; rank 1 is not."""
    model = zshard.wrap(Blocks(), strategy=strategy, comm="group")
    another = zshard.wrap(Blocks(), comm="group")
    optimizer = zshard.AdamW(model.parameters())
    for number in range(2):
        training_step(model, optimizer, batch(rank, number))
    refused: list[str] = []
    if rank == 0:
        with pytest.raises(KeyboardInterrupt), Interrupts(site, at):
            training_step(model, optimizer, batch(rank, 2))
        zshard.reset(model)
        for use in (lambda: another(batch(rank, 2)), lambda: zshard.wrap(Blocks(), comm="group")):
            with pytest.raises(zshard.CommError) as caught:
                use()
            refused.append(str(caught.value))
    with pytest.raises(zshard.CommError) as caught:
        for number in range(2, 5):
            training_step(model, optimizer, batch(rank, number))
    return str(caught.value), *refused


TURNS_OF_ONE = [
    *((strategy, *point) for strategy in ("zero3", "zero2") for point in POINTS),
    ("zero2", "begin a pass", 3),  # a gather of updated parameters
]


@pytest.mark.parametrize(("strategy", "site", "at"), [*TURNS_OF_ONE, ("zero3", "state", 4)])
def test_a_rank_that_ctrl_c_took_out_of_a_turn_over_the_group_takes_part_in_nothing_more(
    strategy: str, site: str, at: int
) -> None:
    """Else its next collective would be taken for another: gloo ends the process, or garbage."""
    (*own, another, new), (other,) = run_ranks(alone, 2, strategy, site, at)
    for said in (*own, another, new):
        assert "KeyboardInterrupt was raised in it during the" in said
        assert "start the processes anew" in said
    assert "rank 1 of 2" in other


def told(rank: int, world_size: int, strategy: str, site: str, at: int) -> tuple[str, bool]:
    """Over shared memory: rank 0 is interrupted, and both come back."""
    runs = []
    said = ""
    for interrupts in (True, False):
        torch.manual_seed(0)
        model = zshard.wrap(Blocks(), strategy=strategy, comm="peer")
        optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
        for number in range(2):
            training_step(model, optimizer, batch(rank, number))
        if interrupts:
            try:
                with Interrupts(site, at) if rank == 0 else nullcontext():
                    training_step(model, optimizer, batch(rank, 2))
            except (KeyboardInterrupt, zshard.CommError) as error:
                said = f"{type(error).__name__}: {error}"
            zshard.reset(model)
            optimizer.zero_grad()
        # zero2 gathers when all have made the update.
        made = strategy == "zero2" and (site, at) in (*GATHERS, ("begin a pass", 3))
        for number in range(2 + (made and interrupts), 4):
            training_step(model, optimizer, batch(rank, number))
        runs.append(values(model))
    return said, all(map(torch.equal, *runs))


@pytest.mark.parametrize(("strategy", "site", "at"), TURNS_OF_ONE)
def test_a_rank_that_ctrl_c_took_out_of_a_turn_over_shared_memory_tells_the_others(
    strategy: str, site: str, at: int
) -> None:
    """They would wait for it until the group's timeout."""
    (own, own_same), (other, other_same) = run_ranks(told, 2, strategy, site, at, timeout=30)
    assert own == "KeyboardInterrupt: "
    assert "has left the collectives: KeyboardInterrupt was raised in it during" in other
    assert own_same and other_same


def between_meetings(rank: int, world_size: int) -> list[str]:
    """Rank 0 is interrupted where no other rank waits for it; both repeat the step."""
    model = zshard.wrap(Blocks(), comm="group")
    optimizer = zshard.AdamW(model.parameters())
    said: list[str] = []
    for number in (0, 1, 1, 2):
        torch.manual_seed(number)
        interrupts = (
            Interrupts("begin to reduce", 1) if (rank, said) == (0, ["ok"]) else nullcontext()
        )
        try:
            with interrupts:
                training_step(model, optimizer, batch(rank, number))
        except (KeyboardInterrupt, zshard.Error) as error:
            said.append(type(error).__name__)
        else:
            said.append("ok")
    return said


def test_a_step_that_ctrl_c_ended_between_meetings_is_repeated_on_all_ranks() -> None:
    own, other = run_ranks(between_meetings, 2)
    assert own == ["ok", "KeyboardInterrupt", "ok", "ok"]
    assert other == ["ok", "StateError", "ok", "ok"]


def test_a_reset_inside_a_backward_is_refused_and_no_gradient_is_lost() -> None:
    torch.manual_seed(0)
    plain, refused = Blocks(), []
    torch.manual_seed(0)
    model = zshard.wrap(Blocks())

    def hook(*_: object) -> None:
        with pytest.raises(zshard.StateError, match="inside a backward") as caught:
            zshard.reset(model)
        refused.append(str(caught.value))  # not itself: its traceback would keep the graph

    model.blocks[1].register_full_backward_hook(hook)
    for each in (plain, model):
        models.loss_of(each, batch(0, 0)).backward()
    assert len(refused) == 1
    for name, param in plain.named_parameters():
        assert torch.equal(zshard.full_grad(model, name), param.grad), name


def test_a_reset_inside_a_forward_is_refused_and_the_forward_goes_on() -> None:
    torch.manual_seed(0)
    model = zshard.wrap(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), units="layer")
    expected = model(torch.ones(2, 4))

    def resets(*_: object) -> None:
        with pytest.raises(zshard.StateError, match="inside a forward"):
            zshard.reset(model)

    model[1].register_forward_hook(resets)
    out = model(torch.ones(2, 4))
    out.sum().backward()
    assert torch.equal(out, expected) and zshard.full_grad(model, "0.weight") is not None
