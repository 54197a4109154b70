"""Units of which no rank has gradients are not reduced; what is known of all gradients is right."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import models
import pytest
import torch
from experts import DETACHED, Experts
from ranks import run_ranks
from steps import batch, mean_gradient
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard.step.executor import Executor
from zshard.unit import Unit

# The blocks that each of two ranks runs, and whether an optimizer's step follows, or else the next
# backward adds its gradients to these, which were clipped.
BACKWARDS: list[tuple[list[int], list[int], bool]] = [
    ([0, 1], [0, 2], True),
    ([3], [3], True),
    ([3], [3], True),  # as the last one
    ([], [], True),
    ([1, 4], [1], False),
    ([0], [0], True),
    ([0], [0], False),  # as the one two before, but nothing is there of blocks 1 and 4
    ([0], [0], False),
    ([2], [3], True),
    ([0, 1], [0, 2], True),
    ([1, DETACHED, 2], [1, DETACHED, 2], True),
    ([1, DETACHED, 2], [1, DETACHED, 2], True),
    (
        [1, 2],
        [1, 2],
        True,
    ),  # in a reentrant checkpoint no different from the last one until it runs
]


def reductions(
    rank: int, world_size: int, options: dict[str, object], reentrant: bool
) -> list[int]:
    """How many units were reduced in each backward; their results are the plain model's."""
    torch.manual_seed(1)
    plain, model = Experts(reentrant), Experts(reentrant)
    model.load_state_dict(plain.state_dict())
    zshard.wrap(model, **options)
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    sums: dict[str, Tensor] = {}
    counts = []
    for index, (*paths, steps) in enumerate(BACKWARDS):
        zshard.stats(model).reset()
        for side in (plain, model):
            side.path = paths[rank % 2]
            (side(batch(rank % 2, index)) - 1.0).square().mean().backward()
        counts.append(zshard.stats(model).calls["reduce_scatter"])
        for name, param in plain.named_parameters():
            if (mean := mean_gradient(param, world_size)) is not None:
                sums[name] = mean + sums.get(name, 0.0)
            param.grad = sums.get(name)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(zshard.clip_grad_norm_(model, 0.1).float(), expected)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(zshard.full_grad(model, name), param.grad)
            if steps and param.grad is not None:
                param.data.add_(param.grad, alpha=-0.1)
            param.grad = None
        if steps:
            sums.clear()
            gathered = zshard.stats(model).calls["all_gather"]
            optimizer.step()
            optimizer.zero_grad()
            renewed = zshard.stats(model).calls["all_gather"] - gathered
            assert renewed == (counts[-1] if options["strategy"] == "zero2" else 0)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(zshard.full_param(model, name), param.detach())
    return counts


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize(
    ("strategy", "reentrant"),
    # Under zero3 gathers tell that a checkpoint takes another way, which drops the step.
    [("zero2", False), ("zero2", True), ("zero3", False)],
)
def test_only_units_are_reduced_of_which_a_rank_has_gradients(
    strategy: str, comm: str, reentrant: bool
) -> None:
    options = {"strategy": strategy, "comm": comm}
    for counts in run_ranks(reductions, 2, options, reentrant):
        assert counts == [4, 2, 2, 1, 3, 4, 2, 2, 4, 4, 2, 2, 3]


def adapted(
    rank: int,
    world_size: int,
    strategy: str,
    reentrant: bool,
    backwards: Sequence[tuple[list[list[int]], str]],
) -> None:
    """Each backward's paths of the ranks; behind it "hold", or "add", or "drop" the gradients."""
    torch.manual_seed(1)
    plain, model = Experts(reentrant, frozen=True), Experts(reentrant, frozen=True)
    model.load_state_dict(plain.state_dict())
    zshard.wrap(model, strategy=strategy)
    sums: dict[str, Tensor] = {}
    for index, (paths, behind) in enumerate(backwards):
        for side in (plain, model):
            side.path = paths[rank]
            holds = side is model and behind == "hold"
            with zshard.no_sync(model) if holds else nullcontext():
                data = batch(rank, index).requires_grad_()
                (side(data) - 1.0).square().mean().backward()
        if behind == "hold":
            continue
        for name, param in plain.named_parameters():
            if (mean := mean_gradient(param, world_size)) is not None:
                sums[name] = mean + sums.get(name, 0.0)
            param.grad = None
        for name in sums:
            torch.testing.assert_close(zshard.full_grad(model, name), sums[name])
        norm = torch.stack([each.norm() for each in sums.values()]).norm()
        torch.testing.assert_close(zshard.clip_grad_norm_(model, 1e9), norm)
        if behind == "drop":
            sums.clear()
            model.zero_grad()


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_what_a_rank_holds_back_is_reduced_where_only_others_make_gradients_then(
    strategy: str,
) -> None:
    backwards = [([[3], [2]], "hold"), ([[], [1]], "drop")]
    run_ranks(adapted, 2, strategy, False, backwards * 3)


def test_reduced_gradients_count_where_a_known_backward_makes_none_this_time() -> None:
    learned = [([[0], [0]], "drop")] * 3
    run_ranks(
        adapted, 2, "zero2", True, [*learned, ([[1], [1]], "add"), ([[0, DETACHED]] * 2, "drop")]
    )


class Gated(Experts):
    """A weight of the root's that is used first, whose gradient ``opens`` may leave out."""

    def __init__(self) -> None:
        super().__init__(reentrant=True)
        self.gate = nn.Parameter(torch.ones(models.WIDTH))
        self.opens = True

    def gated(self, x: Tensor) -> Tensor:
        return x * (self.gate if self.opens else self.gate.detach())

    def forward(self, x: Tensor) -> Tensor:
        gated = checkpoint(self.gated, self.inlet(x), use_reentrant=True)
        return self.outlet(self.run(gated, x))


def gated(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    plain, model = Gated(), Gated()
    for module in (plain.inlet, plain.outlet, model.inlet, model.outlet):
        module.requires_grad_(False)
    model.load_state_dict(plain.state_dict())
    zshard.wrap(model)
    for step in range(5):
        for side in (plain, model):
            side.path, side.opens = ([0], [4, 3, 2, 1])[rank], rank == 0 or step > 2
            (side(batch(rank, step).requires_grad_()) - 1.0).square().mean().backward()
        for name, param in plain.named_parameters():
            mean, grad = mean_gradient(param, world_size), zshard.full_grad(model, name)
            assert (mean is None) == (grad is None), name
            assert mean is None or torch.allclose(grad, mean, atol=1e-6), name
            param.grad = None
        model.zero_grad()


def test_the_roots_reduction_is_last_where_a_rank_had_no_gradient_of_it_at_first() -> None:
    run_ranks(gated, 2)


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_one_rank_reduces_early_what_an_earlier_backward_did_not_come_to(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced: list[int] = []
    early: list[int] = []
    reduce = Executor.reduce

    def noted(executor: Executor, unit: Unit) -> None:
        reduced.append(unit.index)
        reduce(executor, unit)

    monkeypatch.setattr(Executor, "reduce", noted)
    model = zshard.wrap(Experts(reentrant=False), strategy=strategy)
    model.inlet.register_forward_hook(
        lambda *call: call[-1].register_hook(lambda grad: early.extend(reduced)) and None
    )
    for path in 2 * [[0, 1, DETACHED]] + 3 * [[0, 1]]:
        model.path = path
        reduced.clear()
        early.clear()
        model(batch(0, 0)).sum().backward()
        model.zero_grad()
    assert early == [2, 1]
    assert reduced == [2, 1, 0]
