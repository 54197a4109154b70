"""After wrap: the same objects, names, shapes and attributes; whole values on request only."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from training import STEPS, Record, Wrapped, adamw, assert_same_bits, train

import zshard

CASES = ["odd_parameters", "channels_last", "tied_in_one_unit", "tied_across_units", "frozen"]


def describe(model: nn.Module) -> dict[str, tuple[object, ...]]:
    return {
        name: (p.shape, p.ndim, p.numel(), p.dtype, p.requires_grad, p.device, len(p.size()))
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def identities(rank: int, world_size: int, name: str) -> list[str]:
    """Everything about the parameters' identity that wrap changed."""
    model = models.build(name)
    before = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    facts = describe(model)
    for index, parameter in enumerate(model.parameters()):
        parameter.label = ("user", index)
    wrapped = zshard.wrap(model)
    after = dict(wrapped.named_parameters(remove_duplicate=False))
    changes = []
    if wrapped is not model:
        changes.append("wrap returned another object")
    if list(after) != list(before):
        changes.append(f"names {list(before)} became {list(after)}")
    if dict(wrapped.named_modules()) != modules:
        changes.append("modules")
    changes += [f"{n}: another object" for n in before if after.get(n) is not before[n]]
    changes += [f"{n}: not a Parameter" for n in after if not isinstance(after[n], nn.Parameter)]
    changes += [
        f"{n}: {facts[n]} became {f}" for n, f in describe(wrapped).items() if f != facts[n]
    ]
    changes += [
        f"{n}: lost its attribute"
        for index, (n, p) in enumerate(wrapped.named_parameters())
        if getattr(p, "label", None) != ("user", index)
    ]
    # Inside forward a module holds another Parameter, the whole one: it has them too.
    labels: list[object] = []
    for module in modules.values():
        module.register_forward_pre_hook(
            lambda m, args: labels.extend(
                getattr(p, "label", None) for p in m.parameters(recurse=False)
            )
        )
    # The same after a step, when every unit has been gathered and freed.
    models.loss_of(wrapped, models.batches(name, 1, rank)[0]).backward()
    later = dict(wrapped.named_parameters(remove_duplicate=False))
    changes += [f"{n}: another object after backward" for n in before if later[n] is not before[n]]
    if not labels or None in labels:
        changes.append(f"attributes inside forward: {labels}")
    if describe(wrapped) != facts:
        changes.append("shapes after backward")
    return changes


@pytest.mark.parametrize("name", CASES)
def test_wrap_keeps_objects_names_shapes_and_attributes(name: str) -> None:
    assert identities(0, 1, name) == []


def test_wrap_keeps_identity_on_three_ranks() -> None:
    assert run_ranks(identities, 3, "odd_parameters") == [[], [], []]


def whole_values(rank: int, world_size: int, name: str) -> list[str]:
    """Everything that full_param, full_params or full_grad gives back wrongly."""
    plain, model = models.build(name), zshard.wrap(models.build(name))
    batch = models.batches(name, 1)[0]  # the same on every rank: the mean is the plain gradient
    models.loss_of(plain, batch).backward()
    models.loss_of(model, batch).backward()
    wrong = []
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for key, parameter in expected.items():
        whole = zshard.full_param(model, key)
        if whole.shape != parameter.shape or not torch.equal(whole, parameter):
            wrong.append(f"full_param {key}")
        grad = zshard.full_grad(model, key)
        if (grad is None) != (parameter.grad is None):
            wrong.append(f"full_grad {key}: {grad} against {parameter.grad}")
        elif grad is not None and not torch.equal(grad, parameter.grad):
            wrong.append(f"full_grad {key}")
    with zshard.full_params(model):
        for key, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.shape != expected[key].shape or not torch.equal(parameter, expected[key]):
                wrong.append(f"full_params {key}")
    return wrong


@pytest.mark.parametrize("name", [*CASES, "unused"])
def test_whole_values_and_gradients_are_the_plain_models(name: str) -> None:
    assert whole_values(0, 1, name) == []


@pytest.mark.parametrize("name", ["odd_parameters", "channels_last", "unused", "frozen"])
def test_whole_values_on_two_ranks_are_the_plain_models(name: str) -> None:
    assert run_ranks(whole_values, 2, name) == [[], []]


def test_a_parameter_with_gaps_in_its_memory_is_laid_out_without_them() -> None:
    layer, weight = nn.Linear(3, 4, bias=False), torch.arange(24.0).view(4, 6)[:, :3]
    layer.weight = nn.Parameter(weight)
    assert torch.equal(zshard.wrap(layer)(torch.eye(3)), weight.T)


def written(rank: int, world_size: int) -> list[Tensor]:
    model = zshard.wrap(models.build("blocks"))
    with zshard.full_params(model, write=True), torch.no_grad():
        model.inlet.weight.fill_(3.0)
        model.blocks[1].up.bias.add_(1.0)
    out = model(torch.ones(1, 3))
    names = ("inlet.weight", "blocks.1.up.bias", "outlet.weight")
    return [*(zshard.full_param(model, name).clone() for name in names), out.detach()]


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_written_inside_full_params_is_what_the_next_forward_uses(world_size: int) -> None:
    plain = models.build("blocks")
    with torch.no_grad():
        plain.inlet.weight.fill_(3.0)
        plain.blocks[1].up.bias.add_(1.0)
        out = plain(torch.ones(1, 3))
    expected = [plain.inlet.weight, plain.blocks[1].up.bias, plain.outlet.weight, out]
    results = [written(0, 1)] if world_size == 1 else run_ranks(written, world_size)
    for actual in results:
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=0)


def scribbled(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    model = zshard.wrap(models.build("blocks"))
    before = zshard.full_param(model, "inlet.weight").clone()
    with zshard.full_params(model), torch.no_grad():
        model.inlet.weight.fill_(3.0)
    return before, zshard.full_param(model, "inlet.weight").clone()


@pytest.mark.parametrize("world_size", [1, 2])
def test_full_params_without_write_changes_nothing(world_size: int) -> None:
    results = [scribbled(0, 1)] if world_size == 1 else run_ranks(scribbled, world_size)
    for before, after in results:
        assert torch.equal(before, after)


def gradients_by_hand(rank: int, world_size: int) -> list[Tensor]:
    """A gradient scaled in place, one replaced, one dropped, and the step they lead to."""
    model = zshard.wrap(models.build("blocks"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    models.loss_of(model, models.batches("blocks", 1)[0]).backward()
    model.inlet.weight.grad.mul_(0.25)
    model.outlet.weight.grad = model.outlet.weight.grad * 2.0
    model.blocks[1].up.weight.grad = None
    torch.nn.utils.clip_grad_value_([model.blocks[0].up.weight], 1e-3)
    optimizer.step()
    names = ("inlet.weight", "outlet.weight", "blocks.1.up.weight", "blocks.0.up.weight")
    return [zshard.full_param(model, name).clone() for name in names]


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_can_be_changed_replaced_and_dropped_by_hand(world_size: int) -> None:
    plain = models.build("blocks")
    models.loss_of(plain, models.batches("blocks", 1)[0]).backward()
    with torch.no_grad():
        plain.inlet.weight -= 0.5 * 0.25 * plain.inlet.weight.grad
        plain.outlet.weight -= 0.5 * 2.0 * plain.outlet.weight.grad
        assert plain.blocks[0].up.weight.grad.abs().max() > 1e-3, "no value is clipped"
        plain.blocks[0].up.weight -= 0.5 * plain.blocks[0].up.weight.grad.clamp(-1e-3, 1e-3)
    expected = [
        *(plain.inlet.weight, plain.outlet.weight),
        *(plain.blocks[1].up.weight, plain.blocks[0].up.weight),
    ]
    run = gradients_by_hand
    for actual in [run(0, 1)] if world_size == 1 else run_ranks(run, world_size):
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has its states, of whole parameters, before any step."""
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)


def optimizer_before_and_after(
    rank: int, world_size: int, make: Callable[[nn.Module], torch.optim.Optimizer], before: bool
) -> Record:
    model = models.build("odd_parameters")
    if before:
        optimizer = make(model)
        optimizer.load_state_dict(optimizer.state_dict())  # as accelerate's prepare does
        model = zshard.wrap(model)
    else:
        model = zshard.wrap(model)
        optimizer = make(model)
    return train(Wrapped(model), optimizer, models.batches("odd_parameters", STEPS, rank))


@pytest.mark.parametrize("make", [adamw, adagrad])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_built_before_wrap_trains_as_one_built_after(
    world_size: int, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    sides = [
        run_ranks(optimizer_before_and_after, world_size, make, before) for before in (True, False)
    ]
    for before, after in zip(*sides, strict=True):
        assert_same_bits(before, after)


def sgd_before_wrap(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    model = models.build("blocks")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model = zshard.wrap(model)
    models.loss_of(model, models.batches("blocks", 1)[0]).backward()
    gradient = zshard.full_grad(model, "inlet.weight").clone()
    optimizer.step()
    moved = zshard.full_param(model, "inlet.weight").clone()
    return moved, models.build("blocks").inlet.weight.detach() - 0.5 * gradient


def test_torchs_optimizer_built_before_wrap_trains_the_live_parameters() -> None:
    for moved, expected in run_ranks(sgd_before_wrap, 2):
        torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-7)


def test_zero_grad_clears_gradients_on_the_model_and_on_the_optimizer() -> None:
    model = zshard.wrap(models.build("blocks"))
    optimizer = adamw(model)
    for clear in (model.zero_grad, optimizer.zero_grad):
        models.loss_of(model, models.batches("blocks", 1)[0]).backward()
        assert zshard.full_grad(model, "inlet.weight") is not None
        clear()
        assert all(zshard.full_grad(model, name) is None for name, _ in model.named_parameters())


def test_buffers_stay_whole_and_are_updated_by_forward() -> None:
    model = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
    model = zshard.wrap(model)
    before = model[1].running_mean.clone()
    model(torch.randn(8, 3)).sum().backward()
    assert model[1].running_mean.shape == (7,)
    assert not torch.equal(model[1].running_mean, before)
    assert int(model[1].num_batches_tracked) == 1


def access_while_sharded(rank: int, world_size: int) -> str:
    model = zshard.wrap(models.build("blocks"))
    try:
        model.inlet.weight @ torch.ones(3)
    except zshard.Error as error:
        return str(error)
    return "no error"


def test_computing_with_a_sharded_parameter_is_refused_by_name() -> None:
    for message in run_ranks(access_while_sharded, 2):
        assert "inlet.weight" in message and "full_params(model), with write=True" in message


def wrapped_once_more(rank: int, world_size: int) -> str:
    try:
        nn.parallel.DistributedDataParallel(zshard.wrap(models.build("blocks")))
    except zshard.ShardedAccessError as error:
        return str(error)
    return "no error"


def test_ddp_around_a_sharded_model_is_refused_with_the_advice_to_leave_it_out() -> None:
    for message in run_ranks(wrapped_once_more, 2):
        assert "DistributedDataParallel is at work" in message and "leave it out" in message


def test_a_gradient_for_what_is_no_parameter_is_refused_and_not_lost() -> None:
    model = zshard.wrap(models.build("blocks"))
    detached = model.inlet.weight.detach()
    detached.grad = None
    with pytest.raises(zshard.StateError, match=r"inlet\.weight: only the parameter itself"):
        detached.grad = torch.ones(detached.shape)


@pytest.mark.parametrize("read", [zshard.full_param, zshard.full_grad], ids=["param", "grad"])
def test_an_unknown_name_is_refused_with_the_name(read: object) -> None:
    model = zshard.wrap(models.build("blocks"))
    with pytest.raises(zshard.Error, match=r"inlet\.wait"):
        read(model, "inlet.wait")
    with pytest.raises(zshard.InputError, match=r"name=\['inlet\.weight'\]: expected a name"):
        read(model, ["inlet.weight"])


def test_an_unwrapped_model_is_refused_by_every_reader() -> None:
    model = models.build("blocks")
    with pytest.raises(zshard.Error, match="wrap"):
        zshard.full_param(model, "inlet.weight")
    with pytest.raises(zshard.Error, match="wrap"):
        zshard.full_grad(model, "inlet.weight")
    with pytest.raises(zshard.Error, match="wrap"), zshard.full_params(model):
        pass
    with pytest.raises(zshard.Error, match="wrap"), zshard.no_sync(model):
        pass


@pytest.mark.parametrize("units", ["blocs", ["blocks.7"], [3]], ids=str)
def test_an_unknown_unit_is_refused(units: object) -> None:
    with pytest.raises(zshard.Error, match=r"units|blocks\.7"):
        zshard.wrap(models.build("blocks"), units=units)


def different_models(rank: int, world_size: int) -> str:
    model = models.build("blocks")
    if rank == 1:
        with torch.no_grad():
            model.blocks[1].up.weight.view(-1)[3] += 1e-3
    try:
        zshard.wrap(model)
    except zshard.Error as error:
        return str(error)
    return "no error"


def test_ranks_that_start_from_different_values_are_refused_by_name_on_every_rank() -> None:
    for message in run_ranks(different_models, 2):
        assert "blocks.1.up.weight" in message and "broadcast" in message


def broadcast_models(rank: int, world_size: int) -> Tensor:
    model = models.build("blocks")
    with torch.no_grad():
        model.inlet.weight += rank
    model = zshard.wrap(model, init="broadcast")
    return zshard.full_param(model, "inlet.weight").clone()


def test_init_broadcast_takes_rank_0s_values() -> None:
    for value in run_ranks(broadcast_models, 2):
        assert torch.equal(value, models.build("blocks").inlet.weight)
