"""A backward inside a forward: of what it has made so far, or of something else.

See [Note: a backward inside a forward] in interrupted.py.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from odd import INPUT, Stacked, assert_same_grads, pair
from ranks import run_ranks
from torch import Tensor, nn

import zshard
from zshard.wrap import schedule_of

STEPS = 3
RANKS = [(1, "auto"), (2, "group"), (2, "peer")]
STRATEGIES = ["zero3", "zero2"]


class Adapts(nn.Linear):
    """Where ``adapts``, makes a gradient of its own before it returns, as that says."""

    adapts = ""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        first = super().forward(x).tanh() if self.adapts != "before" else x
        if self.adapts:
            super().forward(x.detach()).square().mean().backward()
        return {
            "": lambda: first,
            "after": lambda: first,
            "before": lambda: super(Adapts, self).forward(x).tanh(),
            "both": lambda: first + super(Adapts, self).forward(first),
            "input": lambda: x,
            "view": lambda: x.view(-1, 8),
            "input too": lambda: x + 0 * first,
        }[self.adapts]()


def units(rank: int, world_size: int, strategy: str, comm: str, how: str) -> None:
    for at in (0, 3):
        plain, wrapped = pair(lambda: Stacked(Adapts), strategy=strategy, comm=comm)
        for model in (plain, wrapped):
            model.blocks[at].adapts = how
        for alone in (False, True) * STEPS:
            for model in (plain, wrapped):
                model.zero_grad()
                forward = model.blocks[at] if alone and how not in ("input", "view") else model
                forward(INPUT).square().mean().backward()
            assert_same_grads(plain, wrapped)
        assert not any(unit.in_use for unit in schedule_of(wrapped).units)


@pytest.mark.parametrize(("world_size", "comm"), RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["after", "before", "both", "input", "view", "input too"])
def test_a_unit_may_run_a_backward_of_its_own(
    how: str, strategy: str, world_size: int, comm: str
) -> None:
    run_ranks(units, world_size, strategy, comm, how)


class Surface(nn.Module):
    """A surface and its colour, which depends on the normal: a gradient of what was made so far.

    What comes behind the gradient is the root's own, and blocks that were used before it.

    Attributes:
        graph: whether the normal has one; normals: whether it is taken; raises: where it raises.
        skips: blocks that are left out before the normal is taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.outlet, self.colour = nn.Linear(3, 8), nn.Linear(8, 1), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.graph, self.normals, self.raises = False, True, ""
        self.skips: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        first = h = self.inlet(x)
        for index, block in enumerate(self.blocks):
            h = h if index in self.skips else h + block(h)
            first = h if index == 0 else first
        distance = self.outlet(h)
        normal = x
        if self.normals:
            if self.raises == "in it":
                first.register_hook(self.fail)
            how = {"create_graph": self.graph, "retain_graph": True}
            (normal,) = torch.autograd.grad(distance.sum(), x, **how)
        if self.raises == "behind it":
            self.fail()
        shade = self.inlet(normal)
        for block in self.blocks[:2]:
            shade = block(shade)
        return distance, self.colour(shade)

    @staticmethod
    def fail(grad: Tensor | None = None) -> None:
        raise ArithmeticError("on purpose")


def surface(rank: int, world_size: int, strategy: str, comm: str, how: str) -> int:
    plain, wrapped = pair(Surface, strategy=strategy, comm=comm)
    plain.graph = wrapped.graph = how == "graph"
    if how == "method":
        for model in (plain, wrapped):
            model.render = lambda x, model=model: sum(map(Tensor.sum, Surface.forward(model, x)))
        zshard.method(wrapped, "render")
    x = torch.linspace(-1.0, 1.0, 12).view(4, 3)
    for step in range(4):
        before = zshard.stats(wrapped).calls["agree"]
        for model in (plain, wrapped):
            model.zero_grad()
            if how == "method":
                model.render(x + step).backward()
            else:
                distance, colour = model(x + step)
                (distance.square().mean() + colour.square().mean()).backward()
        met = zshard.stats(wrapped).calls["agree"] - before
        assert_same_grads(plain, wrapped)
    assert not any(unit.in_use for unit in schedule_of(wrapped).units)
    return met


@pytest.mark.parametrize(("world_size", "comm"), RANKS)
@pytest.mark.parametrize(
    ("strategy", "how"),
    [("zero3", "plain"), ("zero2", "plain"), ("zero2", "graph"), ("zero3", "method")],
)
def test_a_forward_goes_on_behind_a_gradient(
    strategy: str, how: str, world_size: int, comm: str
) -> None:
    met = run_ranks(surface, world_size, strategy, comm, how)
    # At the beginnings of a forward, of the backward inside, of the rest, and of the backward; and
    # at the end of the one inside, which has made no gradient.
    assert met == ([0] if world_size == 1 else [5] * world_size)


def one_step(model: nn.Module, step: int, backward: bool = True) -> Tensor:
    distance, colour = model(torch.linspace(-1.0, 1.0, 12).view(4, 3) + step)
    loss = distance.square().mean() + colour.square().mean()
    if backward:
        loss.backward()
    return loss


def raising(rank: int, world_size: int, strategy: str, comm: str, where: str) -> list[str]:
    """What each rank gets where rank 1 raises in or behind a gradient in a forward."""
    plain, wrapped = pair(Surface, strategy=strategy, comm=comm)
    caught = []
    for step in range(5):
        wrapped.raises = where if rank == 1 and step in (0, 3) else ""
        try:
            one_step(wrapped, step)
            caught.append("")
        except (ArithmeticError, zshard.Error) as error:
            caught.append(type(error).__name__)
            continue
        plain.zero_grad()
        one_step(plain, step)
        assert_same_grads(plain, wrapped)
        wrapped.zero_grad()
    return caught


def raising_hook(rank: int, world_size: int, strategy: str) -> list[bool]:
    """Whether each step raises on this rank, where one of rank 1's hooks does in two of them."""
    raises = False

    def hook(param: Tensor) -> None:
        if raises:
            Surface.fail()

    plain, wrapped = pair(lambda: Stacked(Adapts), strategy=strategy)
    plain.blocks[2].adapts = wrapped.blocks[2].adapts = "after"
    wrapped.blocks[2].weight.register_post_accumulate_grad_hook(hook)
    caught = []
    for step in range(5):
        raises = rank == 1 and step in (1, 3)
        for model in (plain, wrapped):
            model.zero_grad()
        plain(INPUT).square().mean().backward()
        try:
            wrapped(INPUT).square().mean().backward()
            caught.append(False)
        except (ArithmeticError, zshard.Error):
            caught.append(True)
            continue
        assert_same_grads(plain, wrapped)
    return caught


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_a_hook_of_one_rank_raises_all_do_and_go_on(strategy: str) -> None:
    assert run_ranks(raising_hook, 2, strategy) == [[False, True, False, True, False]] * 2


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("where", ["in it", "behind it"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_one_rank_raises_all_do_and_go_on(strategy: str, where: str, comm: str) -> None:
    first, second = run_ranks(raising, 2, strategy, comm, where)
    assert second == ["ArithmeticError", "", "", "ArithmeticError", ""]
    assert [bool(error) for error in first] == [bool(error) for error in second]
    errors = {name for name in first if name}
    assert errors == {"StateError" if where == "in it" else "MismatchError"}


def raising_inside_no_sync(rank: int, world_size: int) -> list[str]:
    _, wrapped = pair(Surface)
    caught = []
    for step in range(4):
        wrapped.raises = "in it" if rank == 1 and step in (0, 2) else ""
        try:
            with zshard.no_sync(wrapped):
                one_step(wrapped, step)
            one_step(wrapped, step)
            caught.append("")
        except (ArithmeticError, zshard.Error) as error:
            caught.append(type(error).__name__)
    return caught


def test_where_one_rank_raises_inside_no_sync_it_has_no_other_error_there() -> None:
    first, second = run_ranks(raising_inside_no_sync, 2)
    # A micro-batch is missing, as all ranks hear at the end of the step.
    assert second == ["ArithmeticError", "StateError"] * 2
    assert first == ["MismatchError", "StateError"] * 2


def routed(rank: int, world_size: int, strategy: str, comm: str) -> None:
    """Ranks leave out blocks of their own before the gradient."""
    plain, wrapped = pair(Surface, strategy=strategy, comm=comm)
    few, every, last = (0, 1), (), (1, 2)
    ways = [(few, few), (few, few), (every, every), (every, every), (last, every), (few, last)]
    for step, skips in enumerate([*ways, *reversed(ways)]):
        plain.zero_grad()
        for plain.skips in skips:
            (one_step(plain, step, backward=False) / world_size).backward()
        wrapped.zero_grad()
        wrapped.skips = skips[rank]
        one_step(wrapped, step)
        assert_same_grads(plain, wrapped)


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_may_run_other_units_before_it(strategy: str, comm: str) -> None:
    run_ranks(routed, 2, strategy, comm)


class Failing(nn.Module):
    """Raises in a gradient that it takes inside its forward, of what went in."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.inlet(x)
        first.register_hook(Surface.fail)
        return torch.autograd.grad(first.exp().sum(), x)[0]


def test_a_model_that_is_reset_holds_no_input_of_what_was_interrupted() -> None:
    _, model = pair(lambda: nn.Sequential(Failing()), units=["0", "0.inlet"])
    x = INPUT.clone().requires_grad_() * 1
    there = weakref.ref(x)
    with pytest.raises(ArithmeticError):
        model(x)
    zshard.reset(model)
    del x
    assert there() is None


class Around(nn.Module):
    """A unit around another, whose own backward frees it: all its gradients are there."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(self.own(x.detach())).square().mean().backward()
        return x


def test_what_a_unit_returns_as_it_came_is_not_hooked() -> None:
    _, model = pair(lambda: nn.Sequential(Around()), units=["0", "0.inner"])
    x = INPUT.clone().requires_grad_()
    model(x).sum().backward()
    assert not x._backward_hooks  # else one more with each step


def only_one(rank: int, world_size: int, strategy: str) -> str:
    _, wrapped = pair(Surface, strategy=strategy)
    plain, _ = pair(Surface, strategy=strategy)
    wrapped.normals = rank == 1
    with pytest.raises(zshard.MismatchError) as caught:
        one_step(wrapped, 0)
    wrapped.normals = True
    one_step(wrapped, 1)
    one_step(plain, 1)
    assert_same_grads(plain, wrapped)
    return str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_have_to_run_it(strategy: str) -> None:
    for told in run_ranks(only_one, 2, strategy):
        assert "rank 1: a backward" in told, told


def test_what_is_under_way_stays_gathered_and_goes_on_behind_it() -> None:
    _, model = pair(Surface)
    for step in range(2):
        one_step(model, step)
    with zshard.trace(model) as trace:
        model(torch.ones(4, 3))
    seen = [f"{event.phase} {event.unit}" for event in trace.events if event.phase != "wait"]
    behind = seen.index("backward blocks.2")
    assert seen[behind:] == [
        "backward blocks.2",
        "gather blocks.1",
        "reshard blocks.2",
        "backward blocks.1",
        "gather blocks.0",
        "reshard blocks.1",
        "backward blocks.0",
        "reshard blocks.0",
        "gather blocks.0",
        "forward blocks.0",
        "gather blocks.1",
        "reshard blocks.0",
        "forward blocks.1",
    ]
