"""What comes straight after a refused step: values are loaded, other calls made, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from models import Blocks
from ranks import run_ranks
from steps import batch, one_step
from test_writes_in_backward import Rewrites
from torch import Tensor, nn

import zshard
from zshard.optimizers import buckets, optim_states
from zshard.param import Sharded


def loaded_at_once(rank: int, world_size: int, strategy: str, dtypes: str) -> None:
    torch.manual_seed(0)
    split = zshard.Precision.bf16(master="split") if dtypes == "split" else None
    model = zshard.wrap(Blocks(block=Rewrites), strategy=strategy, precision=split)
    values = zshard.state_dict(model, all_ranks=True)
    before = one_step(model, rank, 0)
    for writer in (0, 1):
        model.blocks[1].writes = rank == writer
        with pytest.raises(zshard.StateError if rank == writer else zshard.MismatchError):
            one_step(model, rank, 0)
        model.blocks[1].writes = False
        model.load_state_dict(values)
        assert torch.equal(one_step(model, rank, 0), before)
    after = zshard.state_dict(model, all_ranks=True)
    assert all(torch.equal(value, after[name]) for name, value in values.items())


@pytest.mark.parametrize("dtypes", ["fp32", "split"])
@pytest.mark.parametrize("strategy", ["zero2", "ddp"])
def test_a_master_that_one_rank_has_written_is_mended_by_a_load(strategy: str, dtypes: str) -> None:
    run_ranks(loaded_at_once, 2, strategy, dtypes)


def mended_in_part(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Blocks(block=Rewrites), strategy="ddp")
    values = zshard.state_dict(model, all_ranks=True)
    model.blocks[1].writes = rank == 0
    with pytest.raises(zshard.StateError if rank == 0 else zshard.MismatchError):
        one_step(model, rank, 0)
    model.blocks[1].writes = False
    name = "blocks.1.down.weight"
    model.load_state_dict({name: values[name]}, strict=False)
    with pytest.raises(zshard.MismatchError, match=r"the values of blocks\.1\."):
        one_step(model, rank, 0)


def test_a_load_of_some_of_what_was_written_mends_nothing_else() -> None:
    run_ranks(mended_in_part, 2)


class Twice(Blocks):
    """One with a method that calls the model, and that raises before."""

    raises = False

    def twice(self, x: Tensor) -> Tensor:
        first = self.outlet(self.inlet(x))
        if self.raises:
            raise ArithmeticError
        return first + self(x)


def changed_after_a_method(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Twice(), strategy=strategy)
    zshard.method(model, "twice")
    for step in range(3):
        model.twice(batch(rank, step)).sum().backward()
    before = one_step(model, rank, 0)
    values = zshard.state_dict(model, all_ranks=True)
    model.raises = rank == 0
    with pytest.raises(ArithmeticError if rank == 0 else zshard.MismatchError):
        model.twice(batch(rank, 0)).sum().backward()
    model.raises = False
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0)
    model.load_state_dict(values)
    assert torch.equal(one_step(model, rank, 0), before)


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_ranks_change_parameters_alike_after_an_exception_in_a_method(strategy: str) -> None:
    run_ranks(changed_after_a_method, 2, strategy)


def evaluated_after_a_method(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Twice(), strategy=strategy)
    zshard.method(model, "twice")
    before = one_step(model, rank, 0)
    model.zero_grad()
    model.raises = rank == 0  # in the first call of it, of which nobody knows what it calls
    with pytest.raises(ArithmeticError if rank == 0 else zshard.MismatchError):
        model.twice(batch(rank, 0))
    model.raises = False
    with torch.no_grad():  # not taken for the forward that the method calls on the other rank
        model(batch(rank, 1))
    assert torch.equal(one_step(model, rank, 0), before)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_forward_is_not_taken_for_one_that_a_method_calls_on_another_rank(strategy: str) -> None:
    run_ranks(evaluated_after_a_method, 2, strategy)


def changed_after_a_refused_method(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Twice(), strategy=strategy)
    zshard.method(model, "twice")
    optimizer = zshard.SGD(model.parameters(), lr=0.0)
    for step in range(2):
        model.twice(batch(rank, step)).sum().backward()
    before = one_step(model, rank, 0)
    param = model.outlet.weight
    if rank == 0:
        model.outlet.weight = nn.Parameter(torch.ones(param.shape))
    with pytest.raises(zshard.StateError if rank == 0 else zshard.MismatchError):
        model.twice(batch(rank, 0))
    model.outlet.weight = param
    optimizer.step()
    assert torch.equal(one_step(model, rank, 0), before)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_method_that_is_refused_as_it_begins_is_over(strategy: str, world_size: int) -> None:
    run_ranks(changed_after_a_refused_method, world_size, strategy)


class Pairs(NamedTuple):
    """What cannot be made of its parts again, as the cast of a forward's output has to."""

    first: Tensor


class Unmade(Pairs):
    def __new__(cls, first: Tensor, second: str = "") -> Unmade:
        if not second:
            raise ArithmeticError
        return super().__new__(cls, first)


class Pairing(Blocks):
    pairs = False

    def forward(self, x: Tensor) -> Tensor | Unmade:
        made = super().forward(x)
        return Unmade(made, "second") if self.pairs else made

    def paired(self, x: Tensor) -> Unmade:
        return Unmade(self.outlet(self.inlet(x)), "second")


def casts(rank: int, world_size: int, method: bool) -> None:
    torch.manual_seed(0)
    precision = zshard.Precision.bf16(output=torch.float32)
    model = zshard.wrap(Pairing(), precision=precision)
    zshard.method(model, "paired")
    optimizer = zshard.SGD(model.parameters(), lr=0.0)
    before = one_step(model, rank, 0)
    model.pairs = True
    with pytest.raises(ArithmeticError):
        (model.paired if method else model)(batch(rank, 0))
    model.pairs = False
    assert all(isinstance(param, Sharded) for param in model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(one_step(model, rank, 0), before)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("method", [False, True])
def test_a_forward_is_over_whose_output_cannot_be_cast(method: bool, world_size: int) -> None:
    run_ranks(casts, world_size, method)


class Interrupted(Blocks):
    interrupted = False

    def forward(self, x: Tensor) -> Tensor:
        if self.interrupted:
            raise KeyboardInterrupt
        return super().forward(x)


class Outer(Blocks):
    """One that calls another wrapped model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.others = [inner]  # which keeps it from becoming a part of this one

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0](x) + super().forward(x)


def interrupted_inside(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(0)
    inner = zshard.wrap(Interrupted(), strategy=strategy)
    outer = zshard.wrap(Outer(inner), strategy=strategy)
    for _ in range(2):
        before = one_step(outer, rank, 0)
    inner.interrupted = rank == 0
    with pytest.raises(KeyboardInterrupt if rank == 0 else zshard.MismatchError):
        one_step(outer, rank, 0)
    inner.interrupted = False
    if rank == 0:
        zshard.reset(outer)
        zshard.reset(inner)
    zshard.full_param(inner, "inlet.weight")  # of a model that is in no forward, on any rank
    assert torch.equal(one_step(outer, rank, 0), before)


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_a_model_whose_call_inside_another_model_is_refused_is_between_steps(strategy: str) -> None:
    run_ranks(interrupted_inside, 2, strategy)


def interrupted_at(param: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def as_sharded(of: Tensor, value: Tensor) -> Tensor:
        if of is param:
            raise KeyboardInterrupt
        return optim_states.as_sharded(of, value)

    return as_sharded


class Interrupting(dict):  # type: ignore[type-arg]
    """Buckets in whose laying out Ctrl-C comes."""

    def items(self) -> NoReturn:
        raise KeyboardInterrupt


def interrupting(*args: Any) -> Interrupting:
    return Interrupting(buckets.buckets_of(*args))


@pytest.mark.parametrize("error", ["another shape", "Ctrl-C", "Ctrl-C before"])
def test_a_state_that_cannot_be_taken_over_costs_no_others(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Blocks())
    optimizer = zshard.AdamW(model.parameters())
    for step in range(2):
        one_step(model, 0, step)
        optimizer.step()
    params = list(model.parameters())
    states = {param: dict(optimizer.state[param]) for param in params}
    before = {param: state["exp_avg"].clone() for param, state in states.items()}
    own = dict(optimizer.state[params[3]])
    optimizer.state[params[3]] = {**own, "exp_avg": torch.zeros(5)}
    with monkeypatch.context() as patched:
        if error != "another shape":
            optimizer.state[params[3]]["exp_avg"] = own["exp_avg"].clone()
        if error == "Ctrl-C":
            patched.setattr("zshard.optimizers.fused.as_sharded", interrupted_at(params[3]))
        elif error == "Ctrl-C before":
            patched.setattr("zshard.optimizers.fused.buckets_of", interrupting)
        with pytest.raises(zshard.InputError if error == "another shape" else KeyboardInterrupt):
            optimizer.step()
    optimizer.state[params[3]] = own
    optimizer.state_dict()  # lays out the states anew
    for param in params:
        assert int(optimizer.state[param]["step"]) == 2
        assert torch.equal(optimizer.state[param]["exp_avg"], before[param])


def test_a_group_whose_laying_out_was_interrupted_may_be_taken_back() -> None:
    optimizers, held = [], []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = zshard.wrap(Blocks())
        first, *others = model.parameters()
        optimizer = zshard.AdamW([first])
        optimizers.append(optimizer)
        for step in range(2):
            one_step(model, 0, step)
            optimizer.step()
            if step == 0 and interrupted:
                optimizer.add_param_group({"params": others})
                with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
                    patched.setattr("zshard.optimizers.fused.as_sharded", interrupted_at(first))
                    optimizer.step()
                optimizer.param_groups.pop()
        held.append(zshard.memory(model)["now"]["optimizer"])
    assert held[0] == held[1]
    assert optimizers[1].state_dict()["state"].keys() == {0}
    (expected,), (found,) = (
        [each.state[p] for p in each.param_groups[0]["params"]] for each in optimizers
    )
    assert int(found["step"]) == int(expected["step"]) == 2
    assert torch.equal(found["exp_avg"], expected["exp_avg"])
