"""What errors advise, by where the sharded parameter was used that is whole nowhere."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

import zshard


def test_a_penalty_on_weights_is_told_where_it_has_a_graph() -> None:
    model = zshard.wrap(nn.Linear(3, 5))
    with pytest.raises(zshard.ShardedAccessError, match=r"penalty .* in a forward: .* no graph"):
        model.weight.square().sum()
    assert not zshard.full_param(model, "weight").requires_grad


class Helped(nn.Linear):
    def penalty(self) -> Tensor:
        return self._sum()

    def _sum(self) -> Tensor:
        return self.weight.square().sum()


def test_the_method_that_gathers_is_named_not_a_private_one_that_it_calls() -> None:
    model = zshard.wrap(Helped(3, 5))
    with pytest.raises(zshard.ShardedAccessError, match=r"The model's penalty\(\) uses it"):
        model.penalty()


def test_in_the_closure_of_an_optimizer_the_advice_is_the_scripts_not_the_optimizers() -> None:
    model = zshard.wrap(nn.Linear(3, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(zshard.ShardedAccessError, match="A penalty on weights, for a loss"):
        optimizer.step(lambda: model.weight.square().sum())


class Outside(models.Blocks):
    """Calls a layer of a block, while that block's unit is sharded."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1].up(self.inlet(x))


def test_a_cast_of_autocasts_outside_the_unit_is_told_where_the_parameter_is_used() -> None:
    model = zshard.wrap(Outside())
    match = (
        r"blocks\.1\.up\..*outside the module of its unit 'blocks\.1': make 'blocks\.1\.up' a unit"
    )
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(zshard.ShardedAccessError, match=match),
    ):
        model(torch.ones(2, 3))


class Reads(torch.autograd.Function):
    """Reads a weight of a module as it goes backward, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: nn.Linear) -> Tensor:
        ctx.linear = linear
        return x @ linear.weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.linear.weight.T, None


class ReadsBackward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Reads.apply(x, self) + super().forward(x)  # whose gradients come first


def test_what_a_functions_backward_reads_of_a_unit_that_is_done_is_told_to_be_saved() -> None:
    model = zshard.wrap(nn.Sequential(ReadsBackward(3, 3), ReadsBackward(3, 3)), units="layer")
    loss = model(torch.ones(2, 3)).sum()
    with pytest.raises(zshard.ShardedAccessError, match=r"1\.weight.*ctx\.save_for_backward"):
        loss.backward()


class Adjoint(torch.autograd.Function):
    """Saves a weight that only its backward computes with, as torchdiffeq's adjoint method does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.saved_tensors[0].T, None


class CallsAdjoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Adjoint.apply(x, self.linear.weight))


def test_shards_that_a_function_has_saved_are_told_that_the_module_calling_it_is_the_unit() -> None:
    plain, x = nn.Sequential(CallsAdjoint(), CallsAdjoint()), torch.ones(2, 3)
    model = zshard.wrap(copy.deepcopy(plain), units=[nn.Linear])
    match = r"module that calls apply\(\) has to be the unit"
    with pytest.raises(zshard.ShardedAccessError, match=match):
        model(x).sum().backward()
    model = zshard.wrap(copy.deepcopy(plain), units=[CallsAdjoint])
    model(x).sum().backward()
    plain(x).sum().backward()
    for name, param in plain.named_parameters():
        assert torch.equal(zshard.full_grad(model, name), param.grad), name


def test_a_hook_that_looks_at_a_weight_in_a_backward_is_told_to_look_between_steps() -> None:
    model = zshard.wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), units="layer")
    model[0].register_full_backward_hook(lambda *_: print(model[1].weight @ torch.ones(3)))
    loss = model(torch.ones(2, 3, requires_grad=True)).sum()
    with pytest.raises(zshard.ShardedAccessError, match=r"as a hook, .* with zshard\.full_param"):
        loss.backward()


def test_a_tied_weight_outside_its_unit_is_not_told_that_its_user_may_be_one() -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    zshard.wrap(model, units="layer")
    match = r"'root', which has all of its names \(0\.weight, 1\.weight\): call '1' in a forward of"
    with pytest.raises(zshard.ShardedAccessError, match=match):
        model[1](torch.ones(2, 4))


class OwnCall(nn.Linear):
    """As gpytorch's modules, which return other things than tensors."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


@pytest.mark.parametrize(
    ("model", "units", "remedy"),
    [
        (OwnCall(3, 3), None, "wrap that one"),
        (nn.Sequential(OwnCall(3, 3)), [OwnCall], "make that one the unit"),
    ],
)
def test_a_class_whose_own_call_goes_past_the_hooks_is_told_to_be_called_in_a_forward(
    model: nn.Module, units: list[type[nn.Module]] | None, remedy: str
) -> None:
    zshard.wrap(model, units=units)
    with pytest.raises(zshard.ShardedAccessError, match=f"__call__ of OwnCall, .*{remedy}"):
        model(torch.ones(2, 3))
    zshard.wrap(nn.Sequential(OwnCall(3, 3)))(torch.ones(2, 3)).sum().backward()


class CallsOn(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kept[0]


def test_a_class_whose_own_call_goes_on_to_nn_modules_is_not_told_that_nothing_gathers() -> None:
    model = zshard.wrap(CallsOn(3, 3))
    model.kept = [model.weight]
    with pytest.raises(zshard.ShardedAccessError, match="whole now, as the attribute") as error:
        model(torch.ones(2, 3))
    assert "__call__" not in str(error.value)


class _OnAllRanks(torch.optim.Optimizer):
    """Reduces its updates itself, as distributed Shampoo does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            dist.all_reduce(update := param.grad.sign())
            param.sub_(update)


def collectives_of_a_plain_script(rank: int, world_size: int) -> None:
    model = zshard.wrap(models.build("blocks"))
    models.loss_of(model, models.batches("blocks", 1, rank)[0]).backward()
    param = next(model.parameters())
    for collective in (
        lambda: dist.broadcast(param.data, 0),
        lambda: dist.all_reduce(param.grad),
        lambda: dist.all_gather([torch.zeros(param.shape) for _ in range(world_size)], param.data),
    ):
        with pytest.raises(zshard.ShardedAccessError, match=r"leave it out.*averaged.*broadcast"):
            collective()
    optimizer = _OnAllRanks(model.parameters(), {})
    with pytest.raises(zshard.ShardedAccessError, match=r"leave it out.*takes ones of your own"):
        optimizer.step()


def test_a_scripts_own_collective_of_shards_is_told_what_has_done_it() -> None:
    run_ranks(collectives_of_a_plain_script, 2)


def test_an_average_that_is_not_sharded_is_told_how_it_comes_to_be() -> None:
    plain = nn.Linear(3, 3)
    averages = [copy.deepcopy(plain) for _ in range(2)]
    model = zshard.wrap(plain)
    match = r"An average .* is made of parameters after zshard\.wrap; or copy .*, and wrap both"
    with torch.no_grad():
        for update in (torch.Tensor.lerp_, torch.Tensor.lerp):
            with pytest.raises(zshard.ShardedAccessError, match=match):
                update(averages[0].weight, model.weight, 0.1)
        zshard.wrap(averages[1])
        for average in (model.weight.clone(), averages[1].weight):
            average.lerp_(model.weight, 0.1)


class Listed(nn.Linear):
    """Finds its weight in a list of its own, which was made before wrap."""

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)
        self.weights = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0]


def test_another_reference_to_a_parameter_that_is_whole_now_is_told_where_that_is() -> None:
    match = r"'0\.weight' .* whole now, as the attribute 'weight' of its Listed: read it there"
    model = zshard.wrap(nn.Sequential(Listed(), Listed()))
    param = model[0].weight
    with pytest.raises(zshard.ShardedAccessError, match=match):
        model(torch.ones(2, 3))
    with zshard.full_params(model), pytest.raises(zshard.ShardedAccessError, match=match):
        param.cumsum(0)
    with pytest.raises(zshard.ShardedAccessError, match=r"Read it with zshard\.full_param"):
        param.cumsum(0)


def test_a_parameter_that_was_replaced_or_deleted_is_not_said_to_be_whole() -> None:
    match = r"Read it with zshard\.full_param"
    model = zshard.wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    param = model[0].weight
    with zshard.full_params(model):
        model[0].weight = None
        with pytest.raises(zshard.ShardedAccessError, match=match):
            param.cumsum(0)
    for other in (nn.Parameter(torch.ones(3, 3)), None):
        model[0].weight = other
        with pytest.raises(zshard.ShardedAccessError, match=match):
            param.cumsum(0)
