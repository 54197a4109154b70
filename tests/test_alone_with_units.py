"""Units called alone that have units inside, as several models of blocks in a ModuleDict."""

from __future__ import annotations

import copy
import random
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from odd import Clamped
from ranks import run_ranks
from steps import batch
from test_joint_backward import wrong_gradients
from test_models_inside import Calling, Planted, raise_planted
from torch import Tensor, nn

import zshard
from zshard.step.called_alone import CalledAlone

Order = tuple[int, ...]
# The last two are the first two's units, in another order.
ORDERS: list[Order] = [(0, 1, 2), (2, 0), (1,), (2, 1, 0), (0, 2)]


class Through(Calling):
    """Adds what the other model makes, so that one backward goes through both."""

    def _call(self, x: Tensor) -> Tensor:
        return x + self.inner[0](x)


def members(calls: str) -> nn.ModuleDict:
    """Two models of blocks; the first calls, in its forward, what ``calls`` says."""
    torch.manual_seed(0)
    critic = Calling(early=True)
    if calls == "through another":
        return nn.ModuleDict({"actor": Through(Calling(early=True), early=True), "critic": critic})
    inner = {"": None, "another": Calling(early=True)}.get(calls, critic)
    actor = Calling(inner, early=True, trains=calls == "trains")
    return nn.ModuleDict({"actor": actor, "critic": critic})


def unlike_ways(
    rank: int, world_size: int, comm: str, calls: str, orders: list[Order], strategy: str
) -> list[int]:
    """Steps whose outputs or gradients are not the plain models', at this rank's own orders."""
    own = random.Random(rank)
    plain, model = members(calls), members(calls)
    models = [model["actor"], model["critic"], *filter(None, model["actor"].inner)]
    zshard.wrap(model, comm=comm, strategy=strategy)
    if "another" in calls:
        zshard.wrap(models[-1], comm=comm, strategy=strategy)
    wrong = []
    for step in range(8):
        x = batch(rank, step)
        for name in plain:
            order = own.choice(orders) if step > 1 else ORDERS[0]
            plain[name].order = model[name].order = order
        outputs = [each["critic"](each["actor"](x)) for each in (plain, model)]
        for output in outputs:
            output.square().mean().backward()
        if not torch.equal(*outputs) or wrong_gradients(model, plain, world_size):
            wrong.append(step)
        plain.zero_grad()
        model.zero_grad()
    return wrong


@pytest.mark.parametrize("orders", [ORDERS[:1], ORDERS], ids=["alike", "unlike"])
@pytest.mark.parametrize("calls", ["", "another", "member", "trains"])
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_ranks_may_run_unlike_units_of_it(comm: str, calls: str, orders: list[Order]) -> None:
    assert run_ranks(unlike_ways, 2, comm, calls, orders, "zero3") == [[], []]


@pytest.mark.parametrize("calls", ["another", "through another", "trains"])
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_ranks_may_run_units_of_it_that_stay_whole_in_unlike_orders(comm: str, calls: str) -> None:
    orders = [(0, 1, 2), (2, 1, 0)]
    assert run_ranks(unlike_ways, 2, comm, calls, orders, "ddp", timeout=20) == [[], []]


def meetings(rank: int, world_size: int, strategy: str, calls: str) -> list[int]:
    """Meetings, gathers and lessons in the forwards of a later step, one of each of two models."""
    model = zshard.wrap(members(calls), strategy=strategy)
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        before = dict(zshard.stats(model).calls)
        output = model["critic"](model["actor"](batch(rank, 0)))
        after = dict(zshard.stats(model).calls)
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kinds = ("agree", "all_gather", "all_gather_object")
    return [after[kind] - before.get(kind, 0) for kind in kinds]


@pytest.mark.parametrize(
    ("strategy", "calls", "counts"),
    [
        ("zero3", "", [2, 8, 0]),
        ("zero2", "", [2, 0, 0]),
        ("zero3", "member", [3 + 2, 8 + 4, 0]),  # and one for each unit behind the one within
    ],
)
def test_a_forward_like_an_earlier_one_costs_one_meeting(
    strategy: str, calls: str, counts: list[int]
) -> None:
    assert run_ranks(meetings, 2, strategy, calls) == [counts] * 2


def collectives_between(rank: int, world_size: int, comm: str) -> float:
    """A sum over the ranks behind each forward; in the first two zshard learns of their ways.

    In two later ones rank 1's forward raises, half way.
    """
    own, total = random.Random(rank), torch.zeros(1)
    model = zshard.wrap(members(""), comm=comm)
    for step in range(8):
        model["actor"].order = own.choice(ORDERS) if step else ORDERS[0]
        falls = rank == 1 and step in (4, 6)
        handle = model["actor"].inlet.register_forward_hook(raise_planted) if falls else None
        with torch.no_grad(), suppress(Planted):
            total += model["actor"](batch(rank, step)).sum()
        if handle is not None:
            handle.remove()
        if step > 1:
            dist.all_reduce(total)
        else:
            zshard.full_param(model, "actor.inlet.weight")
    return float(total)


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_the_scripts_own_collectives_find_all_ranks_behind_it(comm: str) -> None:
    first, second = run_ranks(collectives_between, 2, comm, timeout=20)
    assert first == second


def fall(
    rank: int, world_size: int, seed: int, comm: str, calls: str
) -> tuple[list[bool], list[bool], list[object]]:
    """A loop that goes on after what some ranks raise in any of them.

    Returns:
        In which steps nobody raises, which steps were made, and the parameters at the end.
    """
    common, own = random.Random(seed), random.Random(100 * seed + rank)
    model = zshard.wrap(members(calls), comm=comm)
    optimizer = zshard.SGD(model.parameters(), lr=0.05)
    quiet, made = [], []
    for step in range(14):
        for each in model.values():
            each.order = own.choice(ORDERS) if seed % 4 > 1 and step > 1 else ORDERS[0]
        who = {each for each in range(world_size) if 1 < step < 12 and common.random() < 0.4}
        member = common.choice([model["actor"], model["critic"]])
        where = common.choice([member, member.inlet, member.blocks[member.order[-1]]])
        handle = where.register_forward_hook(raise_planted) if rank in who else None
        quiet.append(not who)
        try:
            model["critic"](model["actor"](batch(rank, step))).square().mean().backward()
            optimizer.step()
            made.append(True)
        except (Planted, zshard.MismatchError, zshard.StateError):
            made.append(False)
        optimizer.zero_grad()
        if handle is not None:
            handle.remove()
    names = [name for name, _ in model.named_parameters()]
    return quiet, made, [zshard.full_param(model, name).tolist() for name in names]


@pytest.mark.parametrize("calls", ["", "member", "trains"])
@pytest.mark.parametrize("seed", range(4))
def test_after_exceptions_in_it_the_loops_are_in_step(seed: int, calls: str) -> None:
    first, *others = run_ranks(fall, 2 + seed % 2, seed, ("group", "peer")[seed % 2], calls)
    quiet, made, _ = first
    assert made == quiet
    assert others == [first] * len(others)


def write_once(rank: int, world_size: int, comm: str) -> list[str]:
    """Steps of two models; once, rank 0's forward of the first is refused at its end."""
    models = nn.ModuleDict({name: nn.Sequential(Clamped(3, 3), Clamped(3, 3)) for name in "ab"})
    model, came = zshard.wrap(models, units=["a", "b"], init="broadcast", comm=comm), []
    for step in range(4):
        model["a"][0].clamps = (rank, step) == (0, 1)
        try:
            model["b"](model["a"](batch(rank, step))).sum().backward()
            came.append("done")
        except zshard.Error as error:
            came.append(type(error).__name__)
        model.zero_grad()
    return came


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_one_that_wrote_to_its_parameters_ends_the_step_of_the_others_alone(comm: str) -> None:
    first, second = run_ranks(write_once, 2, comm)
    assert first == ["done", "StateError", "done", "done"]
    assert second == ["done", "MismatchError", "done", "done"]


class Forces(Calling):
    """Adds what the gradient of its output is, of its input."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            energy = at = x.detach().requires_grad_()
            for index in self.order:
                energy = self.blocks[index](energy).tanh()
            (force,) = torch.autograd.grad(energy.sum(), at)
        return super().forward(x) + force


def forces(rank: int, world_size: int, alike: bool) -> list[int]:
    """Steps whose outputs are not the plain model's, as the units come in other orders."""
    torch.manual_seed(0)
    plain = nn.ModuleDict({"energy": Forces(early=False)})
    model, wrong = zshard.wrap(copy.deepcopy(plain)), []
    for step in range(6):
        turn = step if alike or step < 2 else step + rank
        plain["energy"].order = model["energy"].order = [(0, 1, 2), (1, 0, 2), (2, 1, 0)][turn % 3]
        outputs = [each["energy"](batch(rank, step)) for each in (plain, model)]
        for output in outputs:
            output.sum().backward()
        if not torch.equal(*outputs) or wrong_gradients(model, plain, world_size):
            wrong.append(step)
        plain.zero_grad()
        model.zero_grad()
    return wrong


@pytest.mark.parametrize("alike", [True, False])
def test_a_backward_within_it_may_go_other_ways_each_time(alike: bool) -> None:
    assert run_ranks(forces, 2, alike) == [[], []]


def other_ways(rank: int, world_size: int) -> int:
    """Steps of a model that calls another one behind its own blocks, which come in other orders."""
    torch.manual_seed(0)
    critic = Calling(early=False)
    models = {"actor": Calling(critic, early=False), "critic": critic}
    model = zshard.wrap(nn.ModuleDict(models))
    for step in range(4):
        model["actor"].order = [(0, 1, 2), (1, 0, 2)][step % 2]
        model["actor"](batch(rank, step)).sum().backward()
    return step


def test_the_way_before_a_call_within_it_tells_its_backwards_apart() -> None:
    assert run_ranks(other_ways, 2) == [3, 3]


def leave_after_a_read(rank: int, world_size: int, comm: str) -> list[str]:
    """Steps of a unit called alone that reads a weight; once, rank 0 leaves it behind that."""
    models, came = nn.ModuleDict({"a": Calling(early=False)}), []
    model = zshard.wrap(models, init="broadcast", comm=comm)

    def read(*_: object) -> None:
        zshard.full_param(model, "a.inlet.bias")

    model["a"].inlet.register_forward_hook(read)
    for step in range(4):
        handle = model["a"].register_forward_hook(raise_planted) if (rank, step) == (0, 1) else None
        try:
            model["a"](batch(rank, step)).sum().backward()
            came.append("done")
        except (Planted, zshard.MismatchError) as error:
            came.append(type(error).__name__)
        if handle is not None:
            handle.remove()
        model.zero_grad()
    return came


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_an_exception_behind_a_read_within_it_ends_the_step_of_the_others(comm: str) -> None:
    first, second = run_ranks(leave_after_a_read, 2, comm)
    assert first == ["done", "Planted", "done", "done"]
    assert second == ["done", "MismatchError", "done", "done"]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def interrupted(rank: int, world_size: int, comm: str, who: list[int]) -> list[str]:
    """Steps of two models; once, on some ranks, Ctrl-C ends a forward of the first half way.

    Between steps the modules hold sharded parameters again.
    """
    model, came = zshard.wrap(members(""), comm=comm), []
    for step in range(4):
        falls = step == 1 and rank in who
        handle = model["actor"].blocks[1].register_forward_hook(interrupt) if falls else None
        try:
            model["critic"](model["actor"](batch(rank, step))).sum().backward()
            came.append("done")
        except (KeyboardInterrupt, zshard.MismatchError) as error:
            came.append(type(error).__name__)
        if handle is not None:
            handle.remove()
            if world_size == 1:
                model["critic"](batch(rank, step)).sum().backward()
        model.zero_grad()
    zshard.state_dict(model)
    return came


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_ctrl_c_in_it_ends_the_step_as_another_exception_does(comm: str) -> None:
    ended = ["done", "KeyboardInterrupt", "done", "done"]
    assert interrupted(0, 1, "group", [0]) == ended
    assert run_ranks(interrupted, 2, comm, [0, 1]) == [ended] * 2
    others = ["done", "MismatchError", "done", "done"]
    assert run_ranks(interrupted, 2, comm, [1], timeout=20) == [others, ended]


def interrupted_as_it_begins(rank: int, world_size: int) -> str:
    """Rank 0 is interrupted behind the meeting in which both begin a call; both come back."""
    model, said, plain = zshard.wrap(members(""), comm="peer"), "", CalledAlone.begin
    for step in range(4):
        CalledAlone.begin = interrupt if (rank, step) == (0, 1) else plain
        try:
            model["actor"](batch(rank, step)).sum().backward()
        except (KeyboardInterrupt, zshard.CommError) as error:
            assert step == 1
            said = f"{type(error).__name__}: {error}"
            zshard.reset(model)
    return said


def test_ctrl_c_as_it_begins_is_told_at_once() -> None:
    own, other = run_ranks(interrupted_as_it_begins, 2, timeout=20)
    assert own == "KeyboardInterrupt: "
    assert "has left the collectives: KeyboardInterrupt was raised in it during" in other
