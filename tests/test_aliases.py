"""What a script takes from a parameter, by .data and detach(), and writes to later."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zshard
from zshard.wrapping import overlaps

BF16, SPLIT = zshard.Precision.bf16(), zshard.Precision.bf16(master="split")


@pytest.mark.parametrize("precision", [None, BF16])
@pytest.mark.parametrize("kind", ["data", "detach"])
def test_an_alias_taken_in_inference_mode_may_be_written_outside_of_it(
    kind: str, precision: zshard.Precision | None
) -> None:
    model = zshard.wrap(nn.Linear(3, 2), precision=precision)
    with torch.inference_mode():
        alias = model.weight.data if kind == "data" else model.weight.detach()
    alias.fill_(2.0)
    model.bias.data.zero_()
    assert torch.equal(zshard.full_param(model, "weight"), torch.full((2, 3), 2.0))
    assert model(torch.ones(1, 3)).tolist() == [[6.0, 6.0]]
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(zshard.full_grad(model, "weight"), torch.ones(2, 3))


def test_data_set_to_itself_or_of_a_gradient_leaves_the_parameters_aliases() -> None:
    model = zshard.wrap(nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    alias = model.weight.data
    model.weight.data = model.weight
    model.weight.grad.data = torch.full((2, 3), 5.0)
    alias.fill_(2.0)
    assert torch.equal(zshard.full_param(model, "weight"), torch.full((2, 3), 2.0))
    assert torch.equal(zshard.full_grad(model, "weight"), torch.full((2, 3), 5.0))


@pytest.mark.parametrize("precision", [None, BF16, SPLIT], ids=["fp32", "bf16", "split"])
def test_data_of_an_alias_may_be_set_without_a_change_of_the_parameter(
    precision: zshard.Precision | None,
) -> None:
    model = zshard.wrap(nn.Linear(3, 2), precision=precision)
    with torch.no_grad():
        model.weight.copy_(torch.ones(2, 3))
    average, other = model.weight.data, model.weight.detach()
    average.data = torch.full((2, 3), 3.0)
    assert torch.equal(zshard.full_param(model, "weight"), torch.ones(2, 3))
    average.data = average.data * 0.5 + model.weight.data * 0.5
    assert (average * 1.0).local.tolist() == [2.0] * 6
    assert (other * 1.0).local.tolist() == [1.0] * 6


@pytest.mark.parametrize("precision", [None, BF16])
def test_an_alias_that_data_is_set_to_goes_on_to_be_one(
    precision: zshard.Precision | None,
) -> None:
    model = zshard.wrap(nn.Linear(3, 2), precision=precision)
    alias = model.weight.data
    alias.fill_(1.0)
    model.weight.data = alias
    alias.add_(1.0)
    assert torch.equal(zshard.full_param(model, "weight"), torch.full((2, 3), 2.0))


def test_data_of_what_an_optimizers_state_dict_shows_is_the_optimizers() -> None:
    model = zshard.wrap(nn.Linear(3, 2))
    optimizer = zshard.AdamW([model.weight])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    alias = model.weight.data  # of the parameter, whose states are no aliases
    optimizer.state_dict()["state"][0]["exp_avg"].data = torch.full((2, 3), 3.0)
    assert optimizer.state[model.weight]["exp_avg"].tolist() == [3.0] * 6
    assert torch.equal(alias.local, model.weight.local)


@pytest.mark.parametrize("precision", [None, SPLIT], ids=["fp32", "split"])
def test_of_a_copy_and_its_alias_each_keeps_its_values_where_the_others_data_is_set(
    precision: zshard.Precision | None,
) -> None:
    model = zshard.wrap(nn.Linear(3, 2), precision=precision)
    average = model.weight.detach().clone().fill_(1.0)
    before = average.data
    model.weight.data = torch.full((2, 3), 4.0)
    average.data = torch.full((2, 3), 2.0)
    assert before.local.tolist() == [1.0] * 6
    later = average.detach()
    later.data = torch.full((2, 3), 3.0)
    assert average.local.tolist() == [2.0] * 6


def test_a_gradient_that_comes_to_an_alias_is_an_error_and_not_lost() -> None:
    model = zshard.wrap(nn.Linear(3, 2))
    model.weight.requires_grad_(False)
    alias = model.weight.detach().requires_grad_()  # which trains no parameter
    found = torch.autograd.grad(alias * 2.0, alias, torch.ones(2, 3))
    assert torch.equal(found[0], torch.full((2, 3), 2.0))
    with pytest.raises(zshard.StateError, match="weight: only the parameter itself has a gradient"):
        (alias * 2.0).backward(torch.ones(2, 3))
    zeros = torch.zeros_like(model.weight, requires_grad=True)
    with pytest.raises(zshard.StateError, match="weight: only the parameter itself has a gradient"):
        (zeros * 2.0).backward(torch.ones(2, 3))
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is None


def test_a_parameter_made_of_a_copy_has_no_gradient_and_freezes_nothing() -> None:
    model = zshard.wrap(nn.Linear(3, 2))
    copied = nn.Parameter(model.weight.detach().clone())
    model(torch.ones(1, 3)).sum().backward()
    assert isinstance(copied, nn.Parameter) and copied.grad is None
    with pytest.raises(zshard.ShardedAccessError, match="cannot be deep-copied"):
        copy.deepcopy(copied)  # which would make no Parameter of it
    torch.optim.SGD([copied], lr=1.0).zero_grad()
    assert torch.equal(zshard.full_grad(model, "weight"), torch.ones(2, 3))
    copied.requires_grad_(False)
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(zshard.full_grad(model, "weight"), torch.full((2, 3), 2.0))


def test_a_copy_has_no_hooks_no_step_of_zshards_optimizers_and_no_clipping() -> None:
    copied = zshard.wrap(nn.Linear(3, 2)).weight.detach().clone().requires_grad_()
    with pytest.raises(zshard.StateError, match="weight: a hook on what is not a trained param"):
        copied.register_hook(lambda grad: grad)
    with pytest.raises(zshard.StateError, match="weight: a hook on what is not a trained param"):
        copied.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(zshard.OptimizerError, match="was given a copy of 'weight'"):
        zshard.SGD([copied], lr=1.0)
    with pytest.raises(zshard.InputError, match="1 of 1 parameters are not of a wrapped model"):
        zshard.clip_grad_norm_([copied], 1.0)


def test_data_of_a_tensor_like_the_parameter_on_another_device_is_refused() -> None:
    weight = zshard.wrap(nn.Linear(3, 2)).weight
    with pytest.raises(zshard.StateError, match=r"weight: \.data = a tensor of .* on meta would"):
        weight.data = torch.empty_like(weight, device="meta")


def test_aliases_that_nobody_has_any_more_are_not_remembered() -> None:
    model = zshard.wrap(nn.Linear(2, 2))
    for _ in range(5):
        model.weight.detach()
    assert len(model.weight.flat.aliases._known[model.weight.segment]) <= 2


@pytest.mark.parametrize("container", [list, tuple, dict])
def test_views_in_an_attribute_would_keep_the_values_of_wrap(container: type) -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    views = model[0].weight.data.chunk(2)
    model.halves = container(enumerate(views) if container is dict else views)
    with pytest.raises(zshard.WrapError, match=r"0\.weight shares memory with halves\[[01]\]"):
        zshard.wrap(model)
    model.halves = {nn.ReLU(): each for each in (views[0], torch.ones(2))}
    with pytest.raises(zshard.WrapError, match=r"0\.weight shares memory with halves\[\.\.\.\]"):
        zshard.wrap(model)
    of_another = zshard.wrap(nn.Linear(2, 2)).weight
    model.halves = [model[0].weight, None, torch.ones(2), of_another]
    zshard.wrap(model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("persistent", [True, False])
def test_a_parameter_that_is_a_buffer_as_well_is_refused(persistent: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 5))
    model.register_buffer("shift", model[0].bias, persistent=persistent)
    match = r"the buffer shift is the parameter 0\.bias itself"
    for attempt in (zshard.wrap, lambda each: zshard.plan(each, 2)):
        with pytest.raises(zshard.WrapError, match=match):
            attempt(model)
    del model.shift
    model.shift = model[0].bias
    assert zshard.full_param(zshard.wrap(model), "shift").shape == (5,)


def test_what_lies_in_a_list_beside_the_parameters_is_in_no_wraps_way() -> None:
    class Reading(dict):  # type: ignore[type-arg]
        def items(self) -> object:
            raise AssertionError("what reads its values from a disk")

    model = nn.LSTM(3, 4)
    nn.utils.spectral_norm(model, "weight_hh_l0")  # at first a view, also in _flat_weights
    plain = copy.deepcopy(model)
    of_vmap: list[torch.Tensor] = []
    torch.vmap(lambda row: of_vmap.append(row) or row)(torch.ones(2, 3))
    model.kept = [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), *of_vmap]
    model.lazy = Reading(a=torch.ones(2))
    zshard.wrap(model)
    assert torch.equal(model(torch.ones(2, 1, 3))[0], plain(torch.ones(2, 1, 3))[0])


def test_what_an_lstm_holds_from_before_a_parametrization_is_in_no_wraps_way() -> None:
    plain = nn.utils.parametrizations.weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    model = nn.utils.parametrizations.weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    model.load_state_dict(plain.state_dict())
    zshard.wrap(model)
    assert torch.equal(model(torch.ones(2, 1, 3))[0], plain(torch.ones(2, 1, 3))[0])


def test_a_tensor_that_has_no_shape_yet_or_refuses_to_tell_is_in_no_wraps_way() -> None:
    class Silent(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: object) -> torch.Tensor:
            raise TypeError("not of this class")

    model = nn.Sequential(nn.Linear(3, 4), nn.LazyBatchNorm1d(affine=False))
    model.kept = [torch.ones(2).as_subclass(Silent)]
    plain = nn.Sequential(copy.deepcopy(model[0]), nn.LazyBatchNorm1d(affine=False))
    zshard.wrap(model)
    assert torch.equal(model(torch.eye(3)), plain(torch.eye(3)))


def test_what_lies_upon_each_other_beside_the_parameters_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    class Counted(overlaps._Located):
        @property
        def end(self) -> int:
            nonlocal looks
            looks += 1
            return self[1]

    monkeypatch.setattr(overlaps, "_Located", Counted)
    model = nn.Linear(3, 4)
    model.table = torch.ones(200)
    model.kept = [model.table[:] for _ in range(300)]
    zshard.wrap(model)
    assert 0 < looks < 1000
