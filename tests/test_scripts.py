"""What training scripts do with a model, under every strategy: gradients are the plain model's.

The reference is the plain model on every rank, with gradients averaged by hand.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import models
import pytest
import torch
import torch.distributed as dist
from models import Block, Blocks
from ranks import run_ranks
from steps import batch
from torch import Tensor, nn
from training import Wrapped, together

import zshard
from zshard.wrap import schedule_of

STRATEGIES = ["zero1", "zero2", "zero3", "ddp"]


@dataclasses.dataclass
class Answer:
    logits: Tensor
    hidden: Tensor | None = None
    note: str = ""


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Talkative(Block):
    """A block that returns whatever kind of structure it is asked for."""

    def forward(self, x: Any, kind: str = "tensor") -> object:
        if isinstance(x, dict):
            x = x["x"]
        elif isinstance(x, Answer):
            x = x.logits
        elif isinstance(x, tuple):
            x = x[0] + 0.1 * x[1]
        elif isinstance(x, (deque, frozenset)):
            (x,) = x
        y = super().forward(x)
        return {
            "tensor": y,
            "dict": {"x": y, "empty": None, "count": 3},
            "tuple": (y, y * 2),
            "named": Pair(y, y.sin()),
            "answer": Answer(y, hidden=y.cos(), note="said"),
            "deque": deque([y]),
            "frozenset": frozenset([y]),
            "behind much": {"ids": list(range(20_000)), "x": y},
        }[kind]


class Silent(Block):
    """Returns nothing: what it computes, it leaves on a list of the caller's."""

    def forward(self, x: Tensor, out: list[Tensor]) -> None:
        out.append(super().forward(x))


class Structures(nn.Module):
    """Units that take and return structures, and a root that returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, 7)
        self.blocks = nn.ModuleList(Talkative() for _ in range(4))
        self.outlet = nn.Linear(7, 1)

    def forward(self, x: Tensor, kind: str) -> Answer:
        y = self.inlet(x)
        for block in self.blocks[:3]:
            y = block(y, kind)
        hidden = self.blocks[3](y)
        return Answer(self.outlet(hidden), hidden=hidden)


class Nested(nn.Module):
    """Units in units, each with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 7)
        self.stages = nn.ModuleList(Blocks() for _ in range(2))
        for stage in self.stages:
            stage.inlet = nn.Linear(7, 7)
            stage.outlet = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x


def loss_of(output: Tensor) -> Tensor:
    return (output - 1.0).square().mean()


def several_forwards(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    losses = [loss_of(model(batch(rank, 10 * step + part))) for part in range(3)]
    (losses[0] + 2 * losses[1] + losses[2] * losses[0]).backward()
    return losses


def backward_in_the_order_of_forward(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    losses = [loss_of(model(batch(rank, 10 * step + part))) for part in range(2)]
    for loss in losses:
        loss.backward()
    return losses


def a_second_backward(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    loss = loss_of(model(batch(rank, step)))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    (loss * 3).backward()
    return [loss]


def evaluation_between(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    model.eval()
    with torch.inference_mode() if step % 2 else torch.no_grad():
        seen = model(batch(rank, step + 50)).clone()
    model.train()
    loss = loss_of(model(batch(rank, step)))
    with torch.no_grad():
        again = model(batch(rank, step + 60))
    loss.backward()
    return [loss, seen, again]


def a_gradient_for_the_input(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    x = batch(rank, step).requires_grad_()
    model(x).sum().backward()
    (alone,) = torch.autograd.grad(loss_of(model(x)), x)
    return [x.grad, alone]


def a_forward_that_is_dropped(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    dropped = loss_of(model(batch(rank, step + 70)))
    loss = loss_of(model(batch(rank, step)))
    loss.backward()
    return [loss, dropped]


def autocast(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch(rank, step))
        loss = loss_of(output.float())
    loss.backward()
    return [loss, output]


KINDS = (("dict", "deque"), ("tuple", "frozenset"), ("named", "behind much"), ("answer",))


def structures(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    losses: list[Tensor] = []
    for kind in KINDS[step]:
        answer = model(batch(rank, step), kind)
        # In turn: both outputs, one of them, the other.
        parts = (answer.logits, answer.hidden) if step % 2 else (answer.hidden,)
        losses += map(loss_of, parts)
    sum(losses, torch.zeros(())).backward()
    return losses


class Leaving(Blocks):
    """Ends with units that return None."""

    def __init__(self) -> None:
        super().__init__(block=Silent)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            out: list[Tensor] = []
            block(x, out)
            (x,) = out
        return self.outlet(x)


def one_backward(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    loss = loss_of(model(batch(rank, step)))
    loss.backward()
    return [loss]


class Script(NamedTuple):
    """A model, how it is wrapped, and what a step does."""

    step: Callable[[nn.Module, int, int], list[Tensor]]
    build: Callable[[], nn.Module] = Blocks
    options: dict[str, object] = {}  # noqa: RUF012


SCRIPTS = {
    **{
        script.__name__: Script(script)
        for script in (
            several_forwards,
            backward_in_the_order_of_forward,
            a_second_backward,
            evaluation_between,
            a_gradient_for_the_input,
            a_forward_that_is_dropped,
            autocast,
        )
    },
    "structures": Script(structures, Structures),
    "units in units": Script(one_backward, Nested, {"units": (Blocks, Block)}),
    "units in units, forwards in a row": Script(
        several_forwards, Nested, {"units": (Blocks, Block)}
    ),
    "every layer a unit": Script(several_forwards, Nested, {"units": "layer"}),
}


def gradients(
    model: nn.Module, world_size: int, strategy: str | None, number: int
) -> list[tuple[str, Tensor]]:
    log: list[tuple[str, Tensor]] = []
    for name, parameter in model.named_parameters():
        if strategy is not None:
            grad = zshard.full_grad(model, name)
        else:
            grad = parameter.grad
            if world_size > 1:
                has = torch.tensor(float(grad is not None))
                dist.all_reduce(has)
                if has > 0:
                    grad = torch.zeros_like(parameter) if grad is None else grad
                    parameter.grad = grad.div_(world_size)
                    dist.all_reduce(grad)
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None:
            log.append((f"{number} gradient {name}", grad.detach().clone()))
    return log


def run(rank: int, world_size: int, script: str, strategy: str | None) -> list[tuple[str, Tensor]]:
    step, build, options = SCRIPTS[script]
    torch.manual_seed(0)
    model = build()
    if strategy is not None:
        zshard.wrap(model, strategy=strategy, **options)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    log: list[tuple[str, Tensor]] = []
    for number in range(4):
        seen = step(model, rank, number)
        log += [(f"{number} {i}", tensor.detach().clone()) for i, tensor in enumerate(seen)]
        # One by one after the last step, as a script would; before it, at the price of one gather.
        with together(Wrapped(model)) if strategy is not None and number < 3 else nullcontext():
            log += gradients(model, world_size, strategy, number)
        optimizer.step()
        optimizer.zero_grad()
    return log


@cache  # the plain side is that of every strategy
def side(script: str, strategy: str | None, world_size: int) -> list[list[tuple[str, Tensor]]]:
    if world_size == 1:
        return [run(0, 1, script, strategy)]
    return run_ranks(run, world_size, script, strategy)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_gradients_and_outputs_are_the_plain_models(
    script: str, strategy: str, world_size: int
) -> None:
    sides = [side(script, each, world_size) for each in (strategy, None)]
    # Several reductions are averaged one by one, and the hand-made reference averages their sum.
    exact = world_size == 1 or script not in (
        "a_second_backward",
        "backward_in_the_order_of_forward",
    )
    for ours, theirs in zip(*sides, strict=True):
        assert [what for what, _ in ours] == [what for what, _ in theirs]
        for (what, one), (_, other) in zip(ours, theirs, strict=True):
            if exact:
                assert torch.equal(one, other), what
            else:
                torch.testing.assert_close(one, other, rtol=2e-4, atol=1e-6, msg=what)


def clipped(rank: int, world_size: int) -> float:
    model = zshard.wrap(Blocks())
    loss_of(model(batch(rank, 0))).backward()
    before = zshard.full_grad(model, "inlet.weight").clone()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    after = zshard.full_grad(model, "inlet.weight")
    assert torch.equal(after, before.clamp(-0.01, 0.01))
    return float(before.abs().max())


def test_clipping_by_value_is_torchs() -> None:
    assert all(largest > 0.01 for largest in run_ranks(clipped, 2))


def test_units_that_return_nothing_are_resharded_and_trained_all_the_same() -> None:
    torch.manual_seed(0)
    plain = Leaving()
    torch.manual_seed(0)
    model = zshard.wrap(Leaving())
    for side in (plain, model):
        loss_of(side(batch(0, 0))).backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(zshard.full_grad(model, name), parameter.grad), name
    assert not any(unit.in_use for unit in schedule_of(model).units)


def assigned(rank: int, world_size: int) -> list[str]:
    """Names whose values are not those of a state dict that was assigned inside full_params."""
    torch.manual_seed(0)
    model = zshard.wrap(models.build("tied_in_one_unit"))
    torch.manual_seed(1)
    other = models.CASES["tied_in_one_unit"].build().state_dict()
    with zshard.full_params(model, write=True):
        model.load_state_dict(other, assign=True)
    wrong = [n for n, value in other.items() if not torch.equal(zshard.full_param(model, n), value)]
    with (
        pytest.raises(zshard.InputError, match=r"tokens\.weight.*shape"),
        zshard.full_params(model, write=True),
    ):
        model.tokens.weight = torch.nn.Parameter(torch.zeros(2, 2))
    return wrong


def test_parameters_assigned_inside_full_params_are_taken_over() -> None:
    assert assigned(0, 1) == []
    assert run_ranks(assigned, 2) == [[], []]
