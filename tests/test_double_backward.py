"""Gradients that are differentiated again; see [Note: double backward] in double_backward.py.

Losses of gradients with respect to inputs: a penalty (WGAN-GP), the residual of a differential
equation, forces. Bits are the plain model's on one rank, DDP's on two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from models import HIDDEN, WIDTH, Block, Blocks
from odd import pair
from ranks import run_ranks
from steps import batch, build, one_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import FEW_STEPS, Plain, Record, Wrapped, adamw, assert_close, assert_same_bits, train

import zshard
from zshard.wrap import schedule_of

WHOLE = ["zero2", "zero1", "ddp"]  # strategies under which whole parameters stay on several ranks


def slope(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the model makes of ``x``, and its gradient, with a graph."""
    x = x.clone().requires_grad_()
    out = model(x)
    return out, torch.autograd.grad(out.sum(), x, create_graph=True)[0]


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    out, grad = slope(model, x)
    return out.mean() + (grad.norm(dim=1) - 1).square().mean()


def penalty_alone(model: nn.Module, x: Tensor) -> Tensor:
    """Its backward reaches no output of the model."""
    return slope(model, x)[1].square().mean()


def residual(model: nn.Module, x: Tensor) -> Tensor:
    """Of a Poisson equation: second derivatives."""
    x = x.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    second = [torch.autograd.grad(g.sum(), x, create_graph=True)[0] for g in grad.unbind(1)]
    laplacian = torch.stack([each[:, i] for i, each in enumerate(second)]).sum(0)
    return (laplacian + out.squeeze(1).sin()).square().mean()


def batched(model: nn.Module, x: Tensor) -> Tensor:
    """Several gradients at once, by vmap."""
    x = x.clone().requires_grad_()
    out = model(x)
    rows = torch.eye(len(out)).to(out).unsqueeze(-1)
    options: dict[str, Any] = {"create_graph": True, "is_grads_batched": True}
    (jacobian,) = torch.autograd.grad(out, x, rows, **options)
    return jacobian.square().mean()


def forces(model: nn.Module, x: Tensor) -> Tensor:
    energy, force = model(x)
    return energy.square().mean() + (force - x).square().mean()


class Field(Blocks):
    """Differentiates what it makes inside its own forward, as interatomic potentials do."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        energy = super().forward(x)
        return energy, -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class Recomputed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.outlet(x)


class _Times(torch.autograd.Function):
    """x W^T, with a backward in Python, which reads the parameter that it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class InPython(Block):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(_Times.apply(x, self.weight)))


Loss = Callable[[nn.Module, Tensor], Tensor]
CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "penalty": (Blocks, penalty),
    "penalty alone": (Blocks, penalty_alone),
    "residual": (Blocks, residual),
    "batched": (Blocks, batched),
    "forces": (Field, forces),
    "recomputed": (Recomputed, penalty),
    "in Python": (lambda: Blocks(block=InPython), penalty_alone),
    "tied": (lambda: Blocks(order=(0, 2, 0, 1)), residual),
}
# Their backward makes no gradient of the last bias, with which DDP cannot go on. So every rank has
# the same batch, and its gradients are the plain model's.
ALONE = ("penalty alone", "in Python", "batched")


def trained(
    rank: int,
    world_size: int,
    case: str,
    strategy: str | None,
    comm: str = "auto",
    device: str = "cpu",
) -> Record:
    make, loss_of = CASES[case]
    torch.manual_seed(0)
    side: Plain | Wrapped
    if strategy is None:
        side = Plain(make().to(device), world_size)
    else:
        side = Wrapped(zshard.wrap(make(), strategy=strategy, comm=comm, device=device))
    own = 0 if case in ALONE else rank
    batches = [batch(own, step).to(device) for step in range(2 * FEW_STEPS)]
    how = {"loss_of": loss_of, "clip": (1.0, 2.0), "accumulate": 2}
    return train(side, adamw(side.module), batches, **how)


@cache
def plain(case: str, world_size: int) -> list[Record]:
    return sides(case, 1, None) * world_size if case in ALONE else sides(case, world_size, None)


def sides(case: str, world_size: int, *options: Any) -> list[Record]:
    if world_size == 1:
        return [trained(0, 1, case, *options)]
    return run_ranks(trained, world_size, case, *options)


@pytest.mark.parametrize("strategy", ["zero3", *WHOLE])
@pytest.mark.parametrize("case", CASES)
def test_on_one_rank_bits_are_the_plain_models_under_every_strategy(
    case: str, strategy: str
) -> None:
    assert_same_bits_but_norms(sides(case, 1, strategy)[0], plain(case, 1)[0])


@pytest.mark.parametrize("strategy", WHOLE)
@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks_bits_are_ddps_where_whole_parameters_stay(case: str, strategy: str) -> None:
    for ours, theirs in zip(sides(case, 2, strategy), plain(case, 2), strict=True):
        assert_same_bits_but_norms(ours, theirs)


def assert_same_bits_but_norms(ours: Record, theirs: Record) -> None:
    """In the first step; clipping differs in the last bit, and what comes after it."""
    ours.norms, norms = theirs.norms, ours.norms
    assert_same_bits(ours.before_any_step(), theirs.before_any_step())
    ours.norms = norms
    assert_close(ours, theirs, 1e-4)


if torch.cuda.is_available():

    @pytest.mark.cuda
    @pytest.mark.parametrize("strategy", ["zero3", "zero2"])
    @pytest.mark.parametrize("case", CASES)
    def test_on_a_gpu_gradients_are_the_plain_models(case: str, strategy: str) -> None:
        """Autograd runs the backward in a thread of its own there."""
        ours, theirs = (trained(0, 1, case, side, device="cuda").cpu() for side in (strategy, None))
        assert_close(ours, theirs, 1e-4)


@pytest.mark.parametrize("case", ["penalty", "residual", "forces"])
def test_on_three_ranks_strategies_and_transports_have_the_same_bits(case: str) -> None:
    first, *others = [
        sides(case, 3, strategy, comm) for strategy in WHOLE for comm in ("group", "peer")
    ]
    for other in others:
        for ours, theirs in zip(other, first, strict=True):
            assert_same_bits(ours, theirs)
    for ours, theirs in zip(first, plain(case, 3), strict=True):
        assert_close(ours, theirs, 1e-4)


def refused(rank: int, world_size: int, strategy: str, of_parameters: bool) -> tuple[str, Tensor]:
    """What is said of a graph that cannot be made, and the loss of a step after it."""
    model = build(strategy=strategy)
    with pytest.raises(zshard.StateError, match="create_graph=True") as caught:
        if of_parameters:
            model(batch(rank, 0)).sum().backward(create_graph=True)
        else:
            slope(model, batch(rank, 0))
    one_step(model, rank, 1)
    assert schedule_of(model).executor.gathered_units == "" or strategy != "zero3"
    return str(caught.value), one_step(model, rank, 1)


@pytest.mark.parametrize("of_parameters", [False, True])
def test_units_that_are_freed_make_no_graph_and_the_model_goes_on(of_parameters: bool) -> None:
    expected = one_step(build(), 0, 1)
    (told, loss), _ = run_ranks(refused, 2, "zero3", of_parameters)
    said = "have no graph" if of_parameters else 'strategy="zero2"'
    assert "unit 'root'" in told and said in told
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("strategy", ["zero3", *WHOLE])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_parameters_have_no_graph(world_size: int, strategy: str) -> None:
    if world_size == 1:
        told = [refused(0, 1, strategy, True)]
    else:
        told = run_ranks(refused, 2, strategy, True)
    assert all("have no graph" in said for said, _ in told)
    assert torch.equal(told[0][1], one_step(build(), 0, 1))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.critic, self.maker = nn.Linear(3, 3), Blocks(), Blocks()

    def forward(self, x: Tensor) -> Tensor:
        return self.maker(self.inlet(x))


class Leaky(Block):
    """Keeps what it makes inside of it, for a loss that reaches no output of the unit."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.up(x)
        return x + self.down(torch.tanh(self.kept))


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_gradients_of_parameters_have_no_graph_where_no_output_is_reached(strategy: str) -> None:
    plain, model = pair(lambda: Blocks(block=Leaky), strategy=strategy)
    model(batch(0, 0))
    with pytest.raises(zshard.StateError, match="have no graph"):
        model.blocks[0].kept.sum().backward(create_graph=True)
    for side in (plain, model):
        one_step(side, 0, 1)
    for name, param in plain.named_parameters():  # what was refused is not added to
        assert param.grad is None or torch.equal(zshard.full_grad(model, name), param.grad), name


def critic_apart(rank: int, world_size: int, wrapped: bool) -> Record:
    """Trains a critic with a penalty; what it judges is another model, which is freed."""
    torch.manual_seed(0)
    both = Both()
    names = [name for name, _ in both.named_parameters()]
    side: Plain | Wrapped = Plain(both)
    if wrapped:
        kind = {"strategy": lambda name, _: "zero2" if name.startswith("critic") else "zero3"}
        critic = ["critic", "critic.blocks.0", "critic.blocks.1", "critic.blocks.2"]
        made = [f"maker.blocks.{i}" for i in range(3)]
        side = Wrapped(zshard.wrap(both, units=[*critic, *made], **kind))
    record = Record()
    for step in range(FEW_STEPS):
        made = both(batch(0, step))
        loss = penalty(both.critic, made.detach().expand(-1, 3)) + made.mean()
        loss.backward()
        record.losses.append(loss.detach().clone())
        record.gradients.append({name: side.gradient(name) for name in names})
        both.zero_grad()
    return record


def test_of_units_with_several_strategies_those_make_graphs_that_stay_whole() -> None:
    for ours in run_ranks(critic_apart, 2, True):  # the same batches: an average is each one's
        assert_same_bits(ours, critic_apart(0, 1, False))


def transforms(x: Tensor) -> dict[str, Callable[[nn.Module], Tensor]]:
    func = torch.func
    return {
        "grad": lambda model: func.grad(lambda x: model(x).sum())(x),
        "vmap of grad": lambda model: func.vmap(func.grad(lambda x: model(x).sum()))(x),
        "jacrev": lambda model: func.jacrev(model)(x),
        "hessian": lambda model: func.vmap(func.hessian(lambda x: model(x).sum()))(x),
        "vjp": lambda model: func.vjp(model, x)[1](torch.ones(4, 1))[0],
        "jvp": lambda model: func.jvp(model, (x,), (x,))[1],
    }


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("transform", transforms(torch.zeros(1)))
def test_what_torch_func_makes_on_one_rank_can_be_differentiated(
    transform: str, strategy: str
) -> None:
    torch.manual_seed(0)
    plain, model = Blocks(), build(strategy=strategy)
    for step in range(FEW_STEPS):
        ours, theirs = (transforms(batch(0, step))[transform](side) for side in (model, plain))
        assert torch.equal(ours, theirs)
        for made in (ours, theirs):
            made.square().sum().backward()
        for name, param in plain.named_parameters():
            grad = zshard.full_grad(model, name)
            assert (grad is None) == (param.grad is None), name
            assert grad is None or torch.equal(grad, param.grad), name
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_a_graph_that_outlives_an_update_is_refused_as_in_plain_torch(strategy: str) -> None:
    model = build(strategy=strategy)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    one_step(model, 0, 0)
    _, grad = slope(model, batch(0, 1))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad.sum().backward()
