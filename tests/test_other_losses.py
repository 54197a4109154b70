"""Losses of which a part comes and goes: the same forward, and a backward through other units."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import models
import pytest
import torch
from models import Block
from ranks import run_ranks
from steps import batch, build
from torch import Tensor, nn

import zshard
from zshard.wrap import schedule_of

STEPS = 6
FROM = 3  # the step from which on the other part is there


class Heads(nn.Module):
    """A trunk, and two heads on it; ``forward`` returns what each of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = (nn.Sequential(Block(), Block()) for _ in range(3))

    def forward(self, x: Tensor, detach: str) -> tuple[Tensor, Tensor]:
        with torch.no_grad() if detach == "trunk without a graph" else nullcontext():
            x = self.trunk(x)
        if detach == "trunk":
            x = x.detach()
        return self.a(x), self.b(x)


def left_out(a: Tensor, b: Tensor, other: bool) -> Tensor:
    return a.square().mean() + b.square().mean() if other else b.square().mean()


def detached(a: Tensor, b: Tensor, other: bool) -> Tensor:
    return b.square().mean() + (a if other else a.detach()).square().mean()


def both(a: Tensor, b: Tensor, other: bool) -> Tensor:
    return a.square().mean() + b.square().mean()


SCRIPTS = {
    "left out": (left_out, ""),
    "detached": (detached, ""),
    "trunk": (both, "trunk"),
    "without a graph": (both, "trunk without a graph"),
}
Forward = Callable[[], Tensor]
Turn = Callable[[Forward], None]
Turns = Callable[[int, int], bool]  # of a step and a rank: whether the other part is there


def late(step: int, rank: int) -> bool:
    return step >= FROM


def in_turn(step: int, rank: int) -> bool:
    return step % 2 == 1


def apart(step: int, rank: int) -> bool:
    return rank == 0 or step % 3 > 0


def trained(rank: int, world_size: int, script: str, turns: Turns, comm: str) -> list[Tensor]:
    """Train; return the losses, or the plain model's on all batches for ``comm="plain"``."""
    loss_of, detach = SCRIPTS[script]
    torch.manual_seed(0)
    model: nn.Module = Heads()
    if comm != "plain":
        zshard.wrap(model, comm=comm)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        found = []
        for each in range(2) if comm == "plain" else [rank]:
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + each))
            other = turns(step, each)
            found.append(loss_of(*model(x, "" if other else detach), other))
        (sum(found) / len(found)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(found).detach())
    return losses


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("turns", [late, in_turn, apart])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_part_of_the_loss_may_come_later_or_in_turn(script: str, turns: Turns, comm: str) -> None:
    expected = trained(0, 1, script, turns, "plain")
    found = run_ranks(trained, 2, script, turns, comm)
    for step, losses in enumerate(expected):
        ours = torch.cat([found[rank][step] for rank in range(2)])
        torch.testing.assert_close(ours, losses, rtol=1e-4, atol=1e-6)


def meetings(rank: int, world_size: int) -> list[int]:
    """What an iteration takes of small collectives, where two losses take turns."""
    torch.manual_seed(0)
    model = zshard.wrap(Heads(), comm="group")
    stats = zshard.stats(model)
    counts = []
    for step in range(8):
        stats.reset()
        x = torch.randn(4, 7)
        left_out(*model(x, ""), in_turn(step, rank)).backward()
        model.zero_grad()
        counts.append(stats.calls["agree"])
    return counts


def test_each_of_two_losses_has_a_program_of_its_own() -> None:
    for counts in run_ranks(meetings, 2):
        assert counts[4:] == [3, 2] * 2, "forward, backward, its end with a unit left out"


class Experts(nn.Module):
    """A unit with two experts inside, of which a batch takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(7, 7) for name in ("a", "b")})

    def forward(self, x: Tensor, name: str) -> Tensor:
        return x + self.experts[name](x)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x: Tensor, names: str) -> Tensor:
        for block, name in zip(self.blocks, names, strict=True):
            x = block(x, name)
        return x


def routed(rank: int, world_size: int) -> list[int]:
    """What a step takes of small collectives, where no two go through the same experts."""
    torch.manual_seed(0)
    model = zshard.wrap(Routed(), comm="group")
    stats = zshard.stats(model)
    counts = []
    for names in ("aaa", "bab", "abb", "bba", "aba", "bbb"):
        stats.reset()
        model(torch.randn(4, 7), names).square().mean().backward()
        model.zero_grad()
        counts.append(stats.calls["agree"])
    return counts


def test_which_parameters_of_a_unit_are_used_changes_no_program() -> None:
    for counts in run_ranks(routed, 2):
        assert counts[1:] == [2] * 5


# --- several forwards, of which a backward goes through some ------------------------------------


def discards(forward: Forward) -> None:
    forward()
    forward().backward()


def each_of_two(forward: Forward) -> None:
    first, second = forward(), forward()
    first.backward()
    second.backward()


def the_second(forward: Forward) -> None:
    first, second = forward(), forward()
    del first
    second.backward()


def their_sum(forward: Forward) -> None:
    (forward() + forward()).backward()


def one(forward: Forward) -> None:
    forward().backward()


TURNS = [
    (discards, their_sum, discards, their_sum),
    (each_of_two, their_sum, each_of_two),
    (one, their_sum, one, discards, one),
    (their_sum, each_of_two, discards, one),
    (the_second, their_sum, the_second),
]


def takes_turns(
    rank: int, world_size: int, turns: Sequence[Turn], comm: str
) -> list[dict[str, Tensor]]:
    """Make steps, each of another kind; returns the gradients of each, the plain model's if so."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    names = [name for name, _ in model.named_parameters()]
    if comm != "plain":
        model = zshard.wrap(model, comm=comm)
    x = torch.randn(4, 3)
    found = []
    for turn in turns:
        turn(lambda: model(x).square().mean())
        if comm == "plain":
            found.append({n: p.grad.clone() for n, p in model.named_parameters()})
        else:
            found.append({name: zshard.full_grad(model, name) for name in names})
        model.zero_grad()
    return found


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("turns", TURNS)
def test_a_backward_through_some_of_several_forwards_is_taken_for_no_other(
    turns: Sequence[Turn], size: int, comm: str
) -> None:
    plain = takes_turns(0, 1, turns, "plain")
    for found in run_ranks(takes_turns, size, turns, comm):
        for step, (grads, expected) in enumerate(zip(found, plain, strict=True)):
            for name, grad in grads.items():
                assert torch.equal(grad, expected[name]), (step, name)


def test_a_forward_that_nobody_can_go_through_any_more_is_forgotten() -> None:
    model = zshard.wrap(nn.Sequential(*(nn.Linear(3, 3) for _ in range(2))))
    for _ in range(5):
        output = model(torch.randn(4, 3))
    backward = schedule_of(model).backward
    assert [each.forward() is not None for each in backward.forwards._noted] == [False, True]
    del output


class Twice(nn.Module):
    """Calls its blocks twice, as siamese networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        halves = []
        for half in (x, -x):
            for block in self.blocks:
                half = block(half)
            halves.append(half.square().mean())
        return halves[0], halves[1]


def halves(rank: int, world_size: int, whole: Sequence[str], first: int) -> list[str]:
    """One half of the loss in the first step, both in the others; what came of each step.

    Args:
        whole: blocks whose parameters stay whole.
    """
    torch.manual_seed(0)
    expected = Twice()
    model = zshard.wrap(
        copy.deepcopy(expected), strategy=lambda name, _: "zero2" if name in whole else "zero3"
    )
    x = torch.randn(4, 3)
    ends = []
    for step in range(4):
        for each in (expected, model):
            losses = each(x)
            loss = losses[first] if step == 0 else losses[0] + losses[1]
            try:
                loss.backward()
            except zshard.StateError as error:
                ends.append(str(error))
                model.zero_grad()
                break
        else:
            ends.append("made")
            for name, param in expected.named_parameters():
                assert torch.equal(zshard.full_grad(model, name), param.grad), (step, name)
        expected.zero_grad()
        model.zero_grad()
    return ends


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("whole", "said"),
    [
        ((), "by another way"),
        (("blocks.2",), "had been reduced"),
        (("blocks.0",), "by another way"),
    ],
)
def test_the_other_half_of_a_forward_is_refused_once_and_by_one_rank_never(
    whole: Sequence[str], said: str, first: int
) -> None:
    assert run_ranks(halves, 1, whole, first) == [["made"] * 4]
    for ends in run_ranks(halves, 2, whole, first):
        if first == 1:  # which output is come to first is the same then as with both
            assert said in ends[1] and "epeat" in ends.pop(1)
        assert ends == ["made"] * len(ends)


def read_between(rank: int, world_size: int) -> list[Tensor]:
    """The gradient of like steps, where a read at times frees what forward has left gathered."""
    model, found = build(), []
    for step in range(6):
        loss = models.loss_of(model, batch(rank, 0))
        with zshard.full_params(model) if step in (2, 3, 5) else nullcontext():
            pass
        loss.backward()
        found.append(zshard.full_grad(model, "blocks.2.up.weight"))
        model.zero_grad()
    return found


def test_a_backward_behind_a_read_is_taken_for_no_other() -> None:
    for first, *others in run_ranks(read_between, 2):
        assert all(torch.equal(first, each) for each in others)
