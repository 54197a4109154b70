"""A wrapped model that another one's forward calls, of which ranks run different units."""

from __future__ import annotations

import gc
import random
import re
import weakref
from contextlib import suppress

import pytest
import torch
from odd import Clamped
from ranks import run_ranks
from steps import batch, build
from test_joint_backward import wrong_gradients
from torch import Tensor, nn

import zshard

# Few, so that they come again; some are alike behind the first unit, where a forward is cut.
ORDERS = [(0, 1, 2), (1,), (2, 0), (1, 0)]


class Calling(nn.Module):
    """Runs the units that ``order`` says, and another model behind one or all of them.

    Args:
        inner: the other one, not a submodule; None for none.
        early: whether it runs behind the first unit, and the rest behind it.
        trains: whether it has a backward of its own in there.
    """

    def __init__(
        self, inner: nn.Module | None = None, *, early: bool, trains: bool = False
    ) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.order: tuple[int, ...] = (0, 1, 2)
        self.inner, self._early, self._trains = [inner], early, trains

    def _call(self, x: Tensor) -> Tensor:
        (inner,) = self.inner
        if inner is None:
            return x
        if self._trains:
            with torch.enable_grad():
                inner(x.detach()).square().mean().backward()
        with torch.no_grad():
            found = inner(x.detach())
        return x + found

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for place, index in enumerate(self.order):
            x = self.blocks[index](x).tanh()
            if self._early and place == 0:
                x = self._call(x)
        return x if self._early else self._call(x)


def chain(early: bool, trains: bool) -> list[nn.Module]:
    """Three models, from the innermost to the outermost."""
    torch.manual_seed(0)
    models: list[nn.Module] = []
    for _ in range(3):
        models.append(Calling(models[-1] if models else None, early=early, trains=trains))
    return models


def inside(
    rank: int, world_size: int, comm: str, routed: set[int], early: bool, trains: bool
) -> list[int]:
    """Steps whose outputs or gradients are not the plain models', at one rank's own orders."""
    own = random.Random(rank)
    plain = chain(early, trains)
    wrapped = chain(early, trains)
    for model in wrapped:
        zshard.wrap(model, comm=comm)
    wrong = []
    for step in range(10):
        x = batch(rank, step)
        for number in range(3):
            order = own.choice(ORDERS) if number in routed and step > 1 else ORDERS[0]
            plain[number].order = wrapped[number].order = order
        outputs = [models[-1](x) for models in (plain, wrapped)]
        for output in outputs:
            output.square().mean().backward()
        if not torch.equal(*outputs):
            wrong.append(step)
        for model, other in zip(plain, wrapped, strict=True):
            if wrong_gradients(other, model, world_size):
                wrong.append(step)
            model.zero_grad()
            other.zero_grad()
    return wrong


EACH = [{0}, {1}, {2}]


@pytest.mark.parametrize(
    ("routed", "early", "trains"),
    [
        *((routed, early, False) for routed in [set(), *EACH] for early in (False, True)),
        *(({0, 1, 2}, early, trains) for early in (False, True) for trains in (False, True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_ranks_may_run_unlike_units_of_models_inside_each_other(
    comm: str, routed: set[int], early: bool, trains: bool
) -> None:
    assert run_ranks(inside, 2, comm, routed, early, trains) == [[], []]


def leaves_out(rank: int, world_size: int, comm: str) -> list[object]:
    """A rank leaves out the inner model in a step behind three that are alike."""
    inner, _, outer = (zshard.wrap(model, comm=comm) for model in chain(early=True, trains=False))
    outer.inner = [inner]
    found: list[object] = []
    for step in range(6):
        outer.inner = [None] if (step, rank) == (3, 0) else [inner]
        try:
            outer(batch(0, 0)).square().mean().backward()
            found.append(zshard.full_grad(outer, "inlet.weight"))
        except zshard.MismatchError as error:
            found.append(str(error))
        outer.zero_grad()
    return found


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_model_that_one_rank_leaves_out_is_told_of_on_all(comm: str) -> None:
    for *before, said, again, _ in run_ranks(leaves_out, 2, comm):
        assert re.search(r"rank 0: a backward, .* rank 1: a forward, of wrapped model 0", said)
        assert all(torch.equal(each, again) for each in before)


class Planted(Exception):
    """Raised inside a forward, as user code might."""


def raise_planted(*_: object) -> None:
    raise Planted


def fall(rank: int, world_size: int, seed: int, comm: str, early: bool) -> tuple[int, list[Tensor]]:
    """A loop that goes on after what some ranks raise in any model; its steps, and the end."""
    common, own = random.Random(seed), random.Random(100 * seed + rank)
    models = [zshard.wrap(model, comm=comm) for model in chain(early, trains=False)]
    optimizers = [zshard.SGD(model.parameters(), lr=0.05) for model in models]
    made = 0
    for step in range(12):
        for model in models:
            model.order = own.choice(ORDERS) if step > 1 else ORDERS[0]
        who = {each for each in range(world_size) if 1 < step < 11 and common.random() < 0.4}
        model = common.choice(models)
        where = common.choice([model, model.inlet, model.blocks[model.order[-1]]])
        handle = where.register_forward_hook(raise_planted) if rank in who else None
        try:
            models[-1](batch(rank, step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            made += 1
        except (Planted, zshard.Error):
            for model in models:
                model.zero_grad()
        finally:
            if handle is not None:
                handle.remove()
    names = [(model, name) for model in models for name, _ in model.named_parameters()]
    return made, [zshard.full_param(model, name) for model, name in names]


@pytest.mark.parametrize("seed", range(8))
def test_after_exceptions_in_models_inside_each_other_the_loops_are_in_step(seed: int) -> None:
    comm, early = ("group", "peer")[seed % 2], seed > 2
    (made, ours), *others = run_ranks(fall, 2 + seed % 2, seed, comm, early)
    assert 2 < made < 12
    for also, theirs in others:
        assert also == made
        assert all(map(torch.equal, theirs, ours))


def inner_comes_next(rank: int, world_size: int, comm: str) -> tuple[list[str], Tensor]:
    """Steps of one model, then of another that calls it; rank 0 leaves one of these before that."""
    inner, outer = (zshard.wrap(model, comm=comm) for model in chain(True, trains=False)[:2])
    optimizers = {id(model): zshard.SGD(model.parameters(), lr=0.05) for model in (inner, outer)}
    came = []
    for step in range(3):
        for model in (inner, outer):
            bad = (rank, step) == (0, 1) and model is outer
            handle = outer.inlet.register_forward_hook(raise_planted) if bad else None
            try:
                model(batch(rank, step)).square().mean().backward()
                optimizers[id(model)].step()
                came.append("done")
            except (Planted, zshard.Error) as error:
                came.append(type(error).__name__)
            if handle is not None:
                handle.remove()
            model.zero_grad()
    return came, zshard.full_param(inner, "inlet.weight")


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_forward_of_the_next_step_is_not_taken_for_one_inside_the_last(comm: str) -> None:
    (own, ours), (others, theirs) = run_ranks(inner_comes_next, 2, comm)
    assert own == ["done", "done", "done", "Planted", "done", "done"]
    assert others == ["done", "done", "done", "MismatchError", "done", "done"]
    assert torch.equal(ours, theirs)


def beside_one_that_was_refused(rank: int, world_size: int, comm: str) -> list[str]:
    """What comes of steps of a model, one of which raises, after another's forward was refused."""
    refused = build(comm=comm)
    optimizer = zshard.AdamW(refused.parameters(), lr=0.1 * (1 + rank))
    refused(batch(rank, 0)).sum().backward()
    optimizer.step()
    with pytest.raises(zshard.MismatchError, match="settings"):
        refused(batch(rank, 0))
    model, came = build(comm=comm), []
    for step in range(4):
        columns = 2 if (rank, step) == (1, 0) else 3
        try:
            model(batch(rank, step)[:, :columns]).sum().backward()
            came.append("done")
        except RuntimeError as error:
            came.append(type(error).__name__)
    return came


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_forward_that_was_refused_has_no_other_models_inside(comm: str) -> None:
    first, second = run_ranks(beside_one_that_was_refused, 2, comm)
    assert first == ["MismatchError", "done", "done", "done"]
    assert second == ["RuntimeError", "done", "done", "done"]


def beside_one_that_wrote(rank: int, world_size: int, comm: str) -> list[str]:
    """Steps of two models in turn; once, rank 0's forward of the first is refused at its end."""
    models = [zshard.wrap(Clamped(3, 3), init="broadcast", comm=comm) for _ in range(2)]
    came = []
    for step in range(4):
        for model in models:
            model.clamps = (rank, step) == (0, 1) and model is models[0]
            try:
                model(batch(rank, step)).sum().backward()
                came.append("done")
            except zshard.Error as error:
                came.append(type(error).__name__)
    return came


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_forward_that_wrote_to_the_roots_parameters_has_no_other_models_inside(comm: str) -> None:
    first, second = run_ranks(beside_one_that_wrote, 2, comm)
    assert first == ["done", "done", "StateError", *["done"] * 5]
    assert second == ["done", "done", "MismatchError", *["done"] * 5]


class Training(nn.Module):
    """Trains another model between its units, and goes on where that raises, if it ``goes_on``."""

    def __init__(self, inner: nn.Module, goes_on: bool, more: bool, steps: bool = True) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.inner, self.goes_on, self.more = [inner], goes_on, more
        self.optimizer = zshard.SGD(inner.parameters(), lr=0.05) if steps else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.outlet[0](self.inlet(x))
        try:
            self.inner[0](x.detach()).sum().backward()
            if self.optimizer is not None:
                self.optimizer.step()
        except (Planted, zshard.StateError):
            if not self.goes_on:
                raise
        return self.outlet[1](x) if self.more else x


def trains_inside(
    rank: int, world_size: int, comm: str, who: set[int], goes_on: bool, more: bool, steps: bool
) -> list[str]:
    """Steps with a backward inside, which raises in some of them, half way, on ranks ``who``."""
    torch.manual_seed(0)
    inner = zshard.wrap(chain(early=False, trains=False)[0], comm=comm)
    outer = zshard.wrap(Training(inner, goes_on, more, steps), comm=comm)
    optimizer = zshard.SGD(outer.parameters(), lr=0.05)
    came = []
    for step in range(6):
        handle = None
        if rank in who and step in (1, 2, 4):
            handle = inner.blocks[0].register_full_backward_pre_hook(raise_planted)
        try:
            outer(batch(rank, step)).sum().backward()
            optimizer.step()
            came.append("done")
        except (Planted, zshard.StateError, zshard.MismatchError) as error:
            came.append(type(error).__name__)
        if handle is not None:
            handle.remove()
        for model in (inner, outer):
            with suppress(zshard.StateError):  # that its last backward has raised elsewhere
                model.zero_grad()
    zshard.full_param(outer, "inlet.weight")
    return came


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("who", [{0}, {0, 1}], ids=str)
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_backward_that_raises_inside_another_models_forward_leaves_all_in_step(
    comm: str, who: set[int], goes_on: bool, more: bool
) -> None:
    raised = "done" if goes_on else "Planted"
    told = "done" if goes_on else "StateError"
    for rank, came in enumerate(run_ranks(trains_inside, 2, comm, who, goes_on, more, True)):
        each = raised if rank in who else told
        assert came == ["done", each, each, "done", each, "done"]


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_rank_that_left_a_forward_by_a_backward_inside_ends_the_step_of_the_others_alone(
    comm: str,
) -> None:
    for rank, came in enumerate(run_ranks(trains_inside, 2, comm, {1}, False, True, False)):
        each = ("MismatchError", "Planted")[rank]
        assert came == ["done", each, each, "done", each, "done"]


def test_a_model_whose_forward_has_raised_is_not_kept() -> None:
    model = zshard.wrap(chain(early=True, trains=False)[0])
    handle = model.inlet.register_forward_hook(raise_planted)
    with pytest.raises(Planted):
        model(batch(0, 0))
    gone = weakref.ref(model)
    del model, handle
    gc.collect()
    assert gone() is None
