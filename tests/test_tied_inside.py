"""Parameters put into other places inside zshard.full_params(write=True), tied ones too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import zshard


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def weight(value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((5, 3), value))


def untied(model: Tied) -> None:
    model.head.weight = weight(1.0)


def set_apart(model: Tied) -> None:
    model.embedding.weight, model.head.weight = weight(1.0), weight(2.0)


def assigned_in_part(model: Tied) -> None:
    model.load_state_dict({"embedding.weight": weight(1.0)}, assign=True, strict=False)


def set_together(model: Tied) -> None:
    model.embedding.weight = model.head.weight = weight(1.0)


def assigned(model: Tied) -> None:
    both = {"embedding.weight": weight(1.0), "head.weight": weight(1.0)}
    model.load_state_dict(both, assign=True)


def replaces(rank: int, world_size: int, how: Callable[[Tied], None]) -> bool:
    """Whether it is refused, and nothing taken."""
    torch.manual_seed(0)
    model = zshard.wrap(Tied())
    before = zshard.full_param(model, "head.weight")
    refused = False
    try:
        with zshard.full_params(model, write=True):
            how(model)
    except zshard.InputError as error:
        refused = "embedding.weight, head.weight are one parameter" in str(error)
    after = zshard.full_param(model, "head.weight")
    assert torch.equal(after, before if refused else weight(1.0))
    model(torch.arange(5)).sum().backward()
    with zshard.full_params(model):  # where nothing is taken, nothing is refused
        how(model)
    return refused


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", [untied, set_apart, assigned_in_part])
def test_different_values_for_one_parameter_are_refused_and_not_taken(
    how: Callable[[Tied], None], world_size: int
) -> None:
    assert run_ranks(replaces, world_size, how) == [True] * world_size


@pytest.mark.parametrize("how", [set_together, assigned])
def test_a_tied_parameter_may_be_replaced_in_all_its_places(how: Callable[[Tied], None]) -> None:
    assert run_ranks(replaces, 2, how) == [False, False]


def test_what_is_lent_for_one_place_may_be_put_into_another() -> None:
    model = zshard.wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    before = zshard.state_dict(model)
    with zshard.full_params(model, write=True):
        model[0].weight, model[1].weight = model[1].weight, model[0].weight
        model[0].bias = model[1].bias
    after = zshard.state_dict(model)
    assert torch.equal(after["0.weight"], before["1.weight"])
    assert torch.equal(after["1.weight"], before["0.weight"])
    assert torch.equal(after["0.bias"], before["1.bias"])
    assert torch.equal(after["1.bias"], before["1.bias"])


def removes(rank: int, world_size: int) -> None:
    model = zshard.wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), init="broadcast")
    before = zshard.state_dict(model)
    with (
        pytest.raises(zshard.InputError, match=r"0\.bias was removed inside"),
        zshard.full_params(model, write=True),
    ):
        nn.init.ones_(model[1].weight)
        model[0].bias = None
    assert all(map(torch.equal, zshard.state_dict(model).values(), before.values()))
    with zshard.full_params(model):  # where nothing is taken, nothing is refused
        model[0].bias = None
    model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_was_removed_inside_is_refused(world_size: int) -> None:
    run_ranks(removes, world_size)


def test_what_is_parametrized_inside_is_told_to_be_so_before_wrap() -> None:
    model = zshard.wrap(nn.Sequential(nn.Linear(3, 3)))
    with (
        pytest.raises(zshard.InputError, match=r"parametrize it, before zshard\.wrap"),
        zshard.full_params(model, write=True),
    ):
        nn.utils.parametrizations.weight_norm(model[0])
