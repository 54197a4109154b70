"""The states of optimizers: as hooks see and change them, when one is refused, and made early."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zshard


def test_hooks_of_states_see_and_change_them_as_those_of_torchs_optimizers_do() -> None:
    plain = nn.Linear(3, 5)
    theirs = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(2, 3)).sum().backward()
    theirs.step()
    model = zshard.wrap(copy.deepcopy(plain))
    ours = zshard.AdamW(model.parameters())
    steps: list[float] = []

    def renumber(_: torch.optim.Optimizer, given: dict[str, object]) -> dict[str, object]:
        return {**given, "state": {int(key): value for key, value in given["state"].items()}}

    def rename(_: torch.optim.Optimizer, found: dict[str, object]) -> dict[str, object]:
        return {**found, "state": {str(key): value for key, value in found["state"].items()}}

    for optimizer in (ours, theirs):
        optimizer.register_load_state_dict_pre_hook(renumber)
        optimizer.register_load_state_dict_post_hook(
            lambda done: steps.append(next(iter(done.state.values()))["step"].item())
        )
        optimizer.register_state_dict_post_hook(rename)
    named = theirs.state_dict()
    theirs.load_state_dict(named)
    ours.load_state_dict(named)
    assert steps == [1, 1]
    found = ours.state_dict()["state"]
    assert found.keys() == named["state"].keys() == {"0", "1"}
    assert found["0"]["exp_avg"].shape == (5, 3)  # sharded like the parameter
    assert torch.equal(found["1"]["exp_avg"].local, named["state"]["1"]["exp_avg"])


@pytest.mark.parametrize("goes_on", ["load", "into one without momentum", "copy"])
def test_sums_of_a_momentum_that_is_0_for_a_while_are_loaded_and_copied(goes_on: str) -> None:
    sides = []
    for kind in (zshard.SGD, torch.optim.SGD):
        param = nn.Parameter(torch.ones(5))
        optimizer = kind([param], lr=0.1, momentum=0.9)
        for step, momentum in enumerate((0.9, 0.0, 0.0, 0.9)):
            if step == 2 and goes_on == "copy":
                optimizer = copy.deepcopy(optimizer)
                (param,) = optimizer.param_groups[0]["params"]
            elif step == 2:
                saved = optimizer.state_dict()
                optimizer = kind([param], lr=0.1, momentum=0.9 if goes_on == "load" else 0.0)
                optimizer.load_state_dict(saved)
            optimizer.param_groups[0]["momentum"] = momentum
            param.grad = torch.full((5,), 1.0 + step)
            optimizer.step()
        sides.append(param.detach())
    torch.testing.assert_close(*sides)


def test_a_groups_momentum_comes_later_as_torchs_does_where_another_has_one() -> None:
    sides = []
    for kind in (zshard.SGD, torch.optim.SGD):
        params = [nn.Parameter(torch.ones(5)) for _ in range(3)]
        groups = [{"params": params[:1], "momentum": 0.5}, {"params": params[1:]}]
        optimizer = kind(groups, lr=0.1, dampening=0.5)
        for step, momentum in enumerate((0.0, 0.0, 0.9, 0.0, 0.9)):
            optimizer.param_groups[1]["momentum"] = momentum
            for param in params[: 2 + step % 2]:  # the last has a gradient in every second step
                param.grad = torch.full((5,), 1.0 + step)
            optimizer.step()
            optimizer.zero_grad()
        sides.append([param.detach() for param in params])
    torch.testing.assert_close(*sides)


def test_what_an_optimizer_keeps_for_all_parameters_is_loaded() -> None:
    params = [nn.Parameter(torch.ones(2))]
    first, second = zshard.AdamW(params), zshard.AdamW(params)
    first.state["epoch"] = {"seen": 3}
    second.load_state_dict(first.state_dict())
    assert second.state["epoch"] == {"seen": 3}


def test_what_a_script_keeps_in_a_parameters_state_stays_there(tmp_path: Path) -> None:
    kept = {"note": "warm", "seen": 3, "at": [1, 2], "rate": torch.tensor(0.5)}
    for plain in (True, False):
        model = nn.Linear(3, 5)
        model = model if plain else zshard.wrap(model)
        optimizer, other = (zshard.AdamW(model.parameters(), lr=0.1) for _ in range(2))
        if not plain:
            zshard.save(tmp_path / "before", model, optimizer)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.state[model.weight].update(kept, mean=torch.full_like(model.weight, 0.5))
        del optimizer.state[model.bias]  # all states are laid out anew
        optimizer.step()
        other.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(other.state_dict())
        for each in (optimizer, other):
            assert kept.items() <= each.state[model.weight].items()
            assert each.state[model.weight]["mean"].shape == model.weight.shape
            assert each.state[model.weight]["step"] == 2
        assert not kept.keys() & other.state[model.bias].keys()
        if not plain:
            zshard.save(tmp_path / "a", model, optimizer)
            other = zshard.AdamW(model.parameters(), lr=0.1)
            for target in (other, optimizer):
                zshard.load(tmp_path / "a", model, target)
                assert kept.items() <= target.state[model.weight].items()
                assert target.state[model.weight]["mean"].local.tolist() == [0.5] * 15
            zshard.load(tmp_path / "before", model, other)
            assert other.state[model.weight]["step"] == 0


def test_what_a_script_keeps_is_saved_where_the_rule_has_no_state_yet(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    zshard.wrap(model, units="layer")
    for kind in (zshard.SGD, torch.optim.SGD):
        first = kind(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(2, 3)).sum().backward()
        if kind is torch.optim.SGD:
            first.step()
        first.zero_grad()
        for param in model.parameters():
            first.state[param]["note"] = "kept"
        zshard.save(tmp_path / kind.__module__, model, first)
        second = zshard.SGD(model.parameters(), lr=0.1, momentum=0.9)
        zshard.load(tmp_path / kind.__module__, model, second)
        assert [second.state[param]["note"] for param in model.parameters()] == ["kept"] * 4
        assert second.state[model[1].weight]["step"] == (kind is torch.optim.SGD)


def test_states_that_are_made_in_inference_mode_outlive_it() -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": params[:1], "momentum": 0.9}, {"params": params[1:]}]
    optimizer = zshard.SGD(groups, lr=0.5)
    for param in params:
        param.grad = torch.ones(2)
    with torch.inference_mode():
        optimizer.step()
    optimizer.step()
    assert [optimizer.state[param]["step"] for param in params] == [2, 0]


def test_states_of_what_is_no_parameter_are_refused_and_nothing_changes() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = zshard.AdamW([param])
    param.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"] = {str(number): values for number, values in saved["state"].items()}
    with pytest.raises(zshard.OptimizerError, match="'0': no group has such a parameter"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[param]["step"] == 1


def test_sums_of_another_shape_are_refused_without_momentum_too_and_nothing_changes() -> None:
    narrow, wide = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
    theirs = torch.optim.SGD([narrow], lr=0.1, momentum=0.9)
    narrow.grad = torch.ones(3)
    theirs.step()
    ours = zshard.SGD([wide], lr=0.5)
    wide.grad = torch.ones(5)
    ours.step()
    with pytest.raises(zshard.OptimizerError, match=r"'momentum_buffer' .*\(5,\), got \(3,\)"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "gaps",
    [torch.ones(2, 1).expand(2, 2), torch.ones(1, 1).expand(2, 2), torch.ones(2, 4)[:, ::2]],
    ids=["repeated", "one", "gaps"],
)
def test_a_parameter_that_is_refused_at_a_step_costs_the_others_no_states(
    gaps: torch.Tensor,
) -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = zshard.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    dense = params[1].data
    params[1].data = gaps
    with pytest.raises(zshard.OptimizerError, match="does not fill one block of memory"):
        optimizer.step()
    params[1].data = dense
    optimizer.step()
    assert [optimizer.state[param]["step"].item() for param in params] == [2, 2]


def test_an_optimizer_takes_no_more_memory_for_parameters_in_another_order() -> None:
    taken = []
    for order in (1, -1):
        model = zshard.wrap(nn.Linear(3, 5))
        zshard.AdamW(list(model.parameters())[::order]).state_dict()
        taken.append(zshard.memory(model)["peak"]["optimizer"])
    assert taken[0] == taken[1] > 0


def save_before_a_step(rank: int, world_size: int, folder: Path) -> list[bool]:
    """Whether an Adagrad, which has states at once, goes on alike whenever each was made."""
    torch.manual_seed(0)
    model, other = nn.Linear(5, 3), nn.Linear(5, 3)
    make = functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3)
    optimizer = make(model.parameters())
    zshard.wrap(model)
    zshard.save(folder / "a", model, optimizer)
    zshard.wrap(other)
    again = make(other.parameters(), initial_accumulator_value=7.0)
    zshard.load(folder / "a", other, again)
    for module, each in ((model, optimizer), (other, again)):
        module(torch.ones(2, 5)).square().sum().backward()
        each.step()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return [torch.equal(one.local, two.local) for one, two in pairs]


@pytest.mark.parametrize("world_size", [1, 2])
def test_states_made_before_wrap_are_saved_before_any_step(world_size: int, tmp_path: Path) -> None:
    assert run_ranks(save_before_a_step, world_size, tmp_path) == [[True, True]] * world_size


def shrinks(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):  # both of an fp32 master
        model = nn.Linear(64, 32, dtype=dtype)
        optimizer = torch.optim.Adagrad(model.parameters())
        zshard.wrap(model)
        model(torch.ones(2, 64, dtype=dtype)).sum().backward()
        optimizer.step()
        for param in model.parameters():
            state = optimizer.state[param]["sum"].local
            assert state.untyped_storage().nbytes() == 4 * param.local_numel


def test_states_made_before_wrap_take_the_memory_of_shards_from_the_first_step_on() -> None:
    run_ranks(shrinks, 2)


def test_states_of_steps_before_wrap_are_refused_at_a_save_as_at_a_step(tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    zshard.wrap(model)
    with pytest.raises(zshard.OptimizerError, match=r"'exp_avg' of weight is of the whole param"):
        zshard.save(tmp_path / "a", model, optimizer)


class Scaled(nn.Module):
    """A linear layer, and a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.linear = nn.Parameter(torch.tensor(2.0)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    model.zero_grad()


def goes_on_with_plain_states(rank: int, world_size: int) -> list[str]:
    """What differs from the plain model for optimizers of the 0-d parameter alone."""
    wrong = []
    for kind, options in (
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (functools.partial(torch.optim.SGD, momentum=0.9), {}),
        (torch.optim.NAdam, {}),
    ):
        plain, wrapped = Scaled(), zshard.wrap(Scaled())
        optimizers = [kind([each.scale], lr=0.1, **options) for each in (plain, wrapped)]
        if kind is not torch.optim.NAdam:  # whose state has a 0-d number, wrapped or not
            step(plain, optimizers[0])
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            wrapped.scale.data = plain.scale.data
        for _ in range(2):
            for each, optimizer in zip((plain, wrapped), optimizers, strict=True):
                step(each, optimizer)
        found = zshard.full_param(wrapped, "scale")
        if not torch.allclose(found, plain.scale, rtol=1e-6, atol=0):
            wrong.append(f"{kind} {options}: {found} and {plain.scale}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_states_of_a_parameter_without_dimensions_are_taken(world_size: int) -> None:
    assert run_ranks(goes_on_with_plain_states, world_size) == [[]] * world_size


class Counted(torch.optim.Optimizer):
    """Steps by signs, less each time; of each parameter it keeps how many there were."""

    @torch.no_grad()
    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            count = self.state[param].setdefault("count", torch.tensor(0.0)).add_(1)
            param.sub_(param.grad.sign() / count.item())


def test_a_number_that_an_optimizer_keeps_of_each_parameter_stays_one(tmp_path: Path) -> None:
    plain, wrapped = Scaled(), zshard.wrap(Scaled())
    theirs, ours = (Counted(each.parameters(), {}) for each in (plain, wrapped))
    for _ in range(3):
        step(plain, theirs)
        step(wrapped, ours)
        zshard.save(tmp_path / "saved", wrapped, ours)
    assert torch.equal(zshard.full_param(wrapped, "scale"), plain.scale)
    assert float(ours.state[wrapped.scale]["count"]) == 3


class Weighted(torch.optim.Optimizer):
    """Keeps a number of each parameter in a vector of one, as pytorch_optimizer's QHAdam."""

    @torch.no_grad()
    def step(self) -> None:
        for param in self.param_groups[0]["params"]:
            weight = self.state[param].setdefault("weight", torch.zeros(1)).mul_(0.9).add_(1)
            param.sub_(param.grad.sign() * weight.reshape(()))


@pytest.mark.parametrize("first", [{}, {"step": 0}])  # as of states made before the first step
def test_a_number_in_a_vector_is_no_state_of_a_parameter_with_one_element(first: dict) -> None:
    plain = nn.Linear(3, 1)
    wrapped = zshard.wrap(copy.deepcopy(plain))
    theirs, ours = (Weighted(each.parameters(), {}) for each in (plain, wrapped))
    ours.state.update({p: {**first, "weight": torch.zeros(1)} for p in wrapped.parameters()})
    for _ in range(3):
        step(plain, theirs)
        step(wrapped, ours)
    assert torch.equal(zshard.full_param(wrapped, "bias"), plain.bias)
