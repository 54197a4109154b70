"""Optimizers with some of a wrapped model's parameters each, and groups that change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import models
import pytest
import torch
from models import OddParameters
from ranks import run_ranks
from steps import batch
from torch import nn

import zshard

Make = Callable[..., torch.optim.Optimizer]
STEPS = 3
MAKES: dict[str, Make] = {
    "adamw": lambda p: zshard.AdamW(p, lr=0.01, weight_decay=0.1),
    "sgd": lambda p: zshard.SGD(p, lr=0.01, momentum=0.9),
}
PRECISIONS = {
    "fp32": None,
    "bf16": zshard.Precision.bf16(),
    "split": zshard.Precision(torch.bfloat16, master="split"),
}


def every(count: int, model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters dealt to ``count`` optimizers in turn."""
    params = list(model.parameters())
    return [params[first::count] for first in range(count)]


def train(
    model: nn.Module, rank: int, make: Make, count: int
) -> tuple[list[torch.optim.Optimizer], int]:
    optimizers = [make(params) for params in every(count, model)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        models.loss_of(model, batch(rank, step)).backward()
        zshard.clip_grad_norm_(model, 0.5)
        for optimizer in optimizers:
            optimizer.step()
    return optimizers, zshard.memory(model)["now"]["optimizer"]


def parts(rank: int, world_size: int, make: str, precision: str, strategy: str) -> None:
    torch.manual_seed(0)
    plain = OddParameters()
    wanted, one_takes = None, 0
    for count in (1, 2, 3, len(list(plain.parameters()))):
        options = {"strategy": strategy, "precision": PRECISIONS[precision]}
        model = zshard.wrap(copy.deepcopy(plain), **options)
        optimizers, takes = train(model, rank, MAKES[make], count)
        found = zshard.state_dict(model, all_ranks=True)
        if wanted is None:
            wanted, one_takes = found, takes
        assert 0 < takes <= one_takes, count  # less by the padding
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (count, name)
        again = [MAKES[make](params) for params in every(count, model)]
        for old, new in zip(optimizers, again, strict=True):
            new.load_state_dict(old.state_dict())
            for param, state in old.state.items():
                for key, value in state.items():
                    assert torch.equal(new.state[param][key], value)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("make", "precision", "strategy"),
    [
        ("adamw", "fp32", "zero3"),
        ("adamw", "fp32", "ddp"),
        ("adamw", "bf16", "zero2"),
        ("adamw", "split", "zero3"),
        ("sgd", "fp32", "zero1"),
    ],
)
def test_optimizers_with_parts_of_a_model_make_the_bits_of_one_and_take_its_memory(
    world_size: int, make: str, precision: str, strategy: str
) -> None:
    run_ranks(parts, world_size, make, precision, strategy)


def in_hooks(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = OddParameters()
    whole, hooked = (zshard.wrap(copy.deepcopy(plain)) for _ in range(2))
    optimizer = zshard.AdamW(whole.parameters(), lr=0.01)
    own = {param: zshard.AdamW([param], lr=0.01) for param in hooked.parameters()}

    def take_step(param: torch.Tensor) -> None:
        own[param].step()
        own[param].zero_grad()

    for param in own:
        param.register_post_accumulate_grad_hook(take_step)
    for step in range(STEPS):
        models.loss_of(whole, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        models.loss_of(hooked, batch(rank, step)).backward()
    for name, _ in plain.named_parameters():
        assert torch.equal(zshard.full_param(hooked, name), zshard.full_param(whole, name)), name
    one, many = (zshard.memory(model)["now"]["optimizer"] for model in (whole, hooked))
    assert 0 < many <= one


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_for_each_parameter_steps_in_its_hook(world_size: int) -> None:
    run_ranks(in_hooks, world_size)


class Either(nn.Module):
    """Two parameters in one flat buffer, of which a forward may use one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = (nn.Parameter(torch.ones(3)) for _ in range(2))

    def forward(self, both: bool) -> torch.Tensor:
        return self.always + self.sometimes if both else self.always * 1.0


def test_what_was_written_to_a_parameter_that_a_step_leaves_alone_is_computed_with() -> None:
    model = zshard.wrap(Either(), precision=zshard.Precision.bf16())
    model(both=False).sum().backward()
    with torch.no_grad():
        model.sometimes.fill_(4.0)
    zshard.SGD(model.parameters(), lr=1.0).step()  # which writes the bf16 copy of the other alone
    assert model(both=True).tolist() == [4.0] * 3


def test_a_part_that_grows_keeps_its_states() -> None:
    torch.manual_seed(0)
    plain = OddParameters()
    results = []
    for wrapped in (False, True):
        model = zshard.wrap(copy.deepcopy(plain)) if wrapped else copy.deepcopy(plain)
        first, *rest = every(3, model)
        optimizer = (zshard if wrapped else torch.optim).AdamW(first, lr=0.01)
        for step in range(STEPS):
            if step > 0:
                optimizer.add_param_group({"params": rest[step - 1]})
            optimizer.zero_grad()
            models.loss_of(model, batch(0, step)).backward()
            optimizer.step()
        named = dict(model.named_parameters())
        results.append([zshard.full_param(model, n) if wrapped else named[n].data for n in named])
    torch.testing.assert_close(results[1], results[0])


def convolved(steps: range, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        x = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("to", ["plain", "wrapped", "torch"])
def test_states_of_plain_parameters_are_whole_and_fit_other_memory_orders(to: str) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 3)
    optimizer = zshard.AdamW(model.parameters(), lr=0.1)
    convolved(range(2), model, optimizer)
    states = copy.deepcopy(optimizer.state_dict())
    assert states["state"][0]["exp_avg"].shape == model.weight.shape
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    if to == "wrapped":
        zshard.wrap(other)
    made = torch.optim.AdamW if to == "torch" else zshard.AdamW
    taken = made(other.parameters(), lr=0.1)
    taken.load_state_dict(states)
    convolved(range(2, 4), model, optimizer)
    convolved(range(2, 4), other, taken)
    weight = zshard.full_param(other, "weight") if to == "wrapped" else other.weight
    torch.testing.assert_close(weight, model.weight, rtol=1e-4, atol=1e-5)


def test_a_state_in_memory_order_is_not_taken_for_a_whole_one() -> None:
    model = nn.Conv2d(2, 3, 3)
    optimizer = zshard.AdamW(model.parameters(), lr=0.1)
    convolved(range(1), model, optimizer)
    states = optimizer.state_dict()
    states["state"][0]["exp_avg"] = states["state"][0]["exp_avg"].flatten()
    with pytest.raises(zshard.OptimizerError, match=r"expected \(3, 2, 3, 3\), got \(54,\)"):
        optimizer.load_state_dict(states)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("make", MAKES)
def test_a_copy_or_a_pickle_of_a_model_and_its_optimizer_goes_on_bit_by_bit(
    make: str, copied: Callable[[object], tuple[nn.Module, torch.optim.Optimizer]]
) -> None:
    model = nn.Linear(3, 2)
    pairs = [(model, MAKES[make](model.parameters()))]
    for step in range(STEPS):
        if step == 1:
            pairs.append(copied(pairs[0]))
        for each, optimizer in pairs:
            optimizer.zero_grad()
            each(torch.full((1, 3), step + 1.0)).square().sum().backward()
            optimizer.step()
    before, after = (list(each.parameters()) for each, _ in pairs)
    assert all(a is not b and torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_sparse_gradients_of_a_plain_model_are_refused() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = zshard.AdamW(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(zshard.OptimizerError, match=r"\(5, 3\) has a gradient of layout.*sparse"):
        optimizer.step()


Groups = list[dict[str, object]]


def move_to_the_one_before(groups: Groups, params: list[nn.Parameter]) -> None:
    groups[0]["params"].append(groups[1]["params"].pop(0))


def cut_elsewhere(groups: Groups, params: list[nn.Parameter]) -> None:
    first, second = groups
    groups[:] = [{**first, "params": params[:4]}, {**second, "params": params[4:]}]


def split_one(groups: Groups, params: list[nn.Parameter]) -> None:
    last = groups[-1]
    held = last["params"]
    groups[-1:] = [{**last, "params": held[:2]}, {**last, "params": held[2:], "lr": 0.2}]


def merge(groups: Groups, params: list[nn.Parameter]) -> None:
    groups[:] = [{**groups[1], "params": params}]


@pytest.mark.parametrize("change", [move_to_the_one_before, cut_elsewhere, split_one, merge])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_groups_that_are_put_together_anew_train_as_torchs(
    name: str, change: Callable[[Groups, list[nn.Parameter]], None]
) -> None:
    """States go with their parameters, settings with the group that these are in."""
    ends = []
    for package in (torch.optim, zshard):
        torch.manual_seed(0)
        model = models.Blocks()
        if package is zshard:
            zshard.wrap(model)
        params = list(model.parameters())
        groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:], "lr": 0.003}]
        optimizer = getattr(package, name)(groups)
        for step in range(4):
            if step == 2:
                change(optimizer.param_groups, params)
            models.loss_of(model, batch(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = zshard.state_dict(model) if package is zshard else model.state_dict()
        ends.append({name: value.clone() for name, value in state.items()})
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flag", ["amsgrad", "maximize"])
@pytest.mark.parametrize("kind", [zshard.AdamW, zshard.Adam])
def test_a_group_that_asks_for_another_rule_is_refused(flag: str, kind: Make) -> None:
    params = list(models.Blocks().parameters())
    kind(params, **{flag: False}, foreach=True, fused=False)  # how torch launches is no rule
    with pytest.raises(zshard.InputError, match=rf"{flag}=True.*optim\.{kind.__name__} has"):
        kind(params, **{flag: True})
    with pytest.raises(zshard.InputError, match=f"{flag}=True; zshard's {kind.__name__} has"):
        kind([{"params": params, flag: True}])
    optimizer = kind(params[:2])
    with pytest.raises(zshard.InputError, match=f"{flag}=True"):
        optimizer.add_param_group({"params": params[2:], flag: True})
    optimizer.param_groups[0][flag] = True
    before = params[0].detach().clone()
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(zshard.InputError, match=f"{flag}=True"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_a_parameter_that_is_twice_in_a_group_is_refused() -> None:
    param = nn.Parameter(torch.ones(2))
    with (
        pytest.warns(UserWarning, match="duplicate"),  # torch's
        pytest.raises(zshard.InputError, match="a parameter twice"),
    ):
        zshard.SGD([param, param])


def test_a_state_with_steps_that_are_numbers_is_taken() -> None:
    """As torch saved it before 1.12."""
    plain = models.Blocks()
    before = torch.optim.AdamW(plain.parameters())
    models.loss_of(plain, batch(0, 0)).backward()
    before.step()
    state = before.state_dict()
    for values in state["state"].values():
        values["step"] = int(values["step"])
    optimizer = zshard.AdamW(zshard.wrap(models.Blocks()).parameters())
    optimizer.load_state_dict(state)
    steps = [int(values["step"]) for values in optimizer.state.values()]
    assert steps == [1] * len(list(plain.parameters()))


def test_a_momentum_that_has_not_begun_is_taken() -> None:
    """As torch.optim.SGD saved it, without momentum, before 2.0."""
    params = [nn.Parameter(torch.ones(2))]
    state = torch.optim.SGD(params, lr=0.1).state_dict()
    state["state"] = {0: {"momentum_buffer": None}}
    optimizer = zshard.SGD(params)
    optimizer.load_state_dict(state)
    params[0].grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(params[0], torch.full((2,), 0.9))


@pytest.mark.parametrize(("ours", "theirs"), [("AdamW", "SGD"), ("SGD", "AdamW")])
def test_a_state_of_another_optimizer_is_refused(ours: str, theirs: str) -> None:
    params = [nn.Parameter(torch.ones(2))]
    optimizer = getattr(zshard, ours)(params)
    settings = dict(optimizer.param_groups[0])
    with pytest.raises(zshard.OptimizerError, match=f"another optimizer than zshard's {ours}"):
        optimizer.load_state_dict(getattr(torch.optim, theirs)(params, lr=0.1).state_dict())
    assert optimizer.param_groups[0] == settings


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_one_kernel_updates_sharded_and_ignored_parameters(kernel: str) -> None:
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2))
    model = zshard.wrap(copy.deepcopy(plain), ignored=["1"])
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), **{kernel: True})
        for _ in range(2):
            each(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(zshard.state_dict(model), plain.state_dict())
