"""Gradients that come where the model does not look are errors: on shards, and on lent wholes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zshard


class Actor(nn.Module):
    """With a parameter that a script uses in a loss of its own, as of SAC."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.log_alpha.exp()


def actor(strategy: str = "zero3") -> nn.Module:
    torch.manual_seed(0)
    return zshard.wrap(Actor(), strategy=strategy)


def of_a_scalar(model: nn.Module) -> None:
    (-(model.log_alpha * 2.0)).backward()


def of_a_sum_with_a_loss(model: nn.Module) -> None:
    (model(torch.ones(3, 4)).sum() + model.log_alpha * 2.0).backward()


def by_itself(model: nn.Module) -> None:
    model.log_alpha.backward()


def with_a_gradient(model: nn.Module) -> None:
    (model.net.weight * 2).backward(torch.ones_like(model.net.weight))


GRAPHS = [of_a_scalar, of_a_sum_with_a_loss, by_itself, with_a_gradient]


def outside_of_forward(
    rank: int, world_size: int, strategy: str, backward: Callable[[nn.Module], None]
) -> list[str]:
    model = actor(strategy)
    optimizer = zshard.AdamW(model.parameters(), lr=0.1)
    before = zshard.state_dict(model, all_ranks=True)
    with pytest.raises(zshard.StateError) as refused:
        backward(model)
    zshard.reset(model)
    assert all(param.grad is None for param in model.parameters())
    messages = [str(refused.value)]
    model.log_alpha.requires_grad_(False)
    model.log_alpha.requires_grad_(True)
    with pytest.raises(zshard.StateError) as refused:
        of_a_scalar(model)
    messages.append(str(refused.value))
    # It goes on as if nothing had been.
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    after = zshard.state_dict(model, all_ranks=True)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    return messages


@pytest.mark.parametrize("backward", GRAPHS, ids=lambda each: each.__name__)
@pytest.mark.parametrize(("world_size", "strategy"), [(1, "zero3"), (2, "zero3"), (2, "ddp")])
def test_a_graph_outside_of_forward_whose_gradient_would_be_lost_is_refused_on_every_rank(
    world_size: int, strategy: str, backward: Callable[[nn.Module], None]
) -> None:
    used = "net.weight" if backward is with_a_gradient else "log_alpha"
    for first, second in run_ranks(outside_of_forward, world_size, strategy, backward):
        assert f"{used}: a graph outside of a forward has used the sharded parameter" in first
        assert "log_alpha: a graph outside" in second


def test_what_was_frozen_at_wrap_is_refused_too_once_it_is_trained() -> None:
    model = Actor()
    model.log_alpha.requires_grad_(False)
    zshard.wrap(model)
    model.log_alpha.requires_grad_(True)
    with pytest.raises(zshard.StateError, match="log_alpha: a graph outside"):
        of_a_scalar(model)


def into_them_alone(model: nn.Module, loss: torch.Tensor) -> None:
    loss.backward(inputs=list(model.net.parameters()))


def into_one(model: nn.Module, loss: torch.Tensor) -> None:
    loss.backward(inputs=model.net.weight)  # torch 2.11 hands it on without a tuple around it


def into_one_among_others(model: nn.Module, loss: torch.Tensor) -> None:
    torch.autograd.backward(loss, inputs=(loss, model.net.weight))


def of_them_or_none(model: nn.Module, loss: torch.Tensor) -> None:
    torch.autograd.grad(loss, list(model.net.parameters()), allow_unused=True)


def of_them_or_zeros(model: nn.Module, loss: torch.Tensor) -> None:
    torch.autograd.grad(loss, model.net.weight, materialize_grads=True)


INPUTS = [
    into_them_alone,
    into_one,
    into_one_among_others,
    of_them_or_none,
    of_them_or_zeros,
]


def as_inputs(
    rank: int, world_size: int, strategy: str, backward: Callable[[nn.Module, torch.Tensor], None]
) -> None:
    model = actor(strategy)
    loss = model(torch.ones(3, 4)).sum()
    with pytest.raises(zshard.StateError, match=r"net\.weight: no graph leads to the sharded"):
        backward(model, loss)
    loss.backward()  # the graph is as it was
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("backward", INPUTS, ids=lambda each: each.__name__)
@pytest.mark.parametrize(("world_size", "strategy"), [(1, "zero3"), (2, "zero3"), (2, "ddp")])
def test_gradients_asked_for_of_sharded_parameters_are_refused_and_no_silent_none(
    world_size: int, strategy: str, backward: Callable[[nn.Module, torch.Tensor], None]
) -> None:
    run_ranks(as_inputs, world_size, strategy, backward)


def test_a_sharded_parameter_does_not_hide_that_another_tensor_refuses() -> None:
    model = actor()
    kept: list[torch.Tensor] = []
    model.register_forward_hook(lambda *_: kept.append(model.net.weight))
    model(torch.ones(3, 4)).sum().backward()
    for made in (lambda: model.net.weight * kept[0], lambda: kept[0] * model.net.weight):
        with (
            torch.no_grad(),
            pytest.raises(zshard.ShardedAccessError, match="was kept from inside"),
        ):
            made()


def penalty(model: nn.Module) -> torch.Tensor:
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def gradients_of_wholes(rank: int, world_size: int, write: bool) -> None:
    model = actor()
    with (
        pytest.raises(zshard.StateError, match=r"log_alpha: the whole parameter .* lends"),
        zshard.full_params(model, write=write),
    ):
        penalty(model).backward()
    with zshard.full_params(model, write=write):
        loss = penalty(model)
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
        model.zero_grad()
        kept = penalty(model)
    with pytest.raises(zshard.StateError, match=r"after the end of zshard\.full_params"):
        kept.backward()
    model(torch.ones(3, 4)).sum().backward()
    assert model.log_alpha.grad is not None


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_whole_parameters_that_nobody_uses_are_refused(
    world_size: int, write: bool
) -> None:
    run_ranks(gradients_of_wholes, world_size, write)


def test_those_that_an_optimizer_inside_has_used_are_none_of_them() -> None:
    model = actor()
    before = zshard.full_param(model, "net.weight")
    with zshard.full_params(model, write=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        penalty(model).backward()
        optimizer.step()
    assert torch.allclose(zshard.full_param(model, "net.weight"), before * 0)


def test_attributes_set_on_lent_parameters_stay() -> None:
    model = actor()
    with zshard.full_params(model):
        model.log_alpha.tag = "kept"
    assert model.log_alpha.tag == "kept"


class Freezes(nn.Module):
    """Whose forward changes which of its own parameters are trained."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(4, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "method":
            self.inner.weight.requires_grad_(False)
        elif self.how == "attribute":
            self.inner.weight.requires_grad = False
        elif self.how == "detach_":
            self.inner.weight.detach_()
        else:
            self.inner.requires_grad_(True)  # as they are
        return self.inner(x)


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("how", ["method", "attribute", "detach_", "nothing"])
def test_a_unit_that_freezes_its_own_parameters_in_forward_is_refused(
    how: str, strategy: str
) -> None:
    model = zshard.wrap(nn.Sequential(Freezes(how), Freezes(how)), strategy=strategy)
    if how == "nothing":
        model(torch.ones(2, 4)).sum().backward()
        return
    with pytest.raises(zshard.StateError, match="requires_grad of a parameter cannot change"):
        model(torch.ones(2, 4))
