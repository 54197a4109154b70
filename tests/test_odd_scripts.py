"""What scripts may do that is unusual, between forwards and to them: right, or an error by name."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from odd import INPUT, Clamped, Stacked, assert_same_grads, pair
from ranks import run_ranks
from torch import Tensor, nn

import zshard
import zshard.comm
import zshard.transports.transport

# --- what comes in -------------------------------------------------------------------------------


class Collects(Stacked):
    """Appends to lists that came in."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(8, 8))

    def forward(self, x: Tensor, into: list[Tensor], more: dict[str, list[Tensor]]) -> Tensor:
        for block in self.blocks:
            x = block(x)
            into.append(x)
            more["seen"].append(x)
        return x


@pytest.mark.parametrize("precision", [None, zshard.Precision.bf16()])
def test_lists_that_come_in_are_the_callers(precision: zshard.Precision | None) -> None:
    wrapped = zshard.wrap(Collects(), precision=precision)
    into: list[Tensor] = []
    more: dict[str, list[Tensor]] = {"seen": []}
    wrapped(INPUT, into, more=more)
    assert len(into) == len(more["seen"]) == 6


# --- loops ---------------------------------------------------------------------------------------


def evaluates_between(rank: int, world_size: int) -> None:
    """Between a forward and its backward, at some steps alone."""
    plain, wrapped = pair(lambda: Stacked(lambda: nn.Linear(8, 8)))
    for step in range(8):
        for model in (plain, wrapped):
            model.zero_grad()
            loss = model(INPUT).square().mean()
            if step in (3, 6):
                with torch.no_grad():
                    model(INPUT * 2)
            if step == 5 and model is wrapped:
                with zshard.full_params(model):
                    pass
            loss.backward()
        assert_same_grads(plain, wrapped)


@pytest.mark.parametrize("world_size", [1, 2])
def test_something_may_come_between_a_forward_and_its_backward(world_size: int) -> None:
    run_ranks(evaluates_between, world_size)


def adversarial(rank: int, world_size: int) -> int:
    """Two backwards a step, through one forward and through both; how many steps were refused."""
    plain, wrapped = pair(lambda: Stacked(lambda: nn.Linear(8, 8)))
    refused = 0
    for _ in range(4):
        for model in (plain, wrapped):
            model.zero_grad()
            x = INPUT.clone().requires_grad_()
            try:
                clean = model(x).square().mean()
                (grad,) = torch.autograd.grad(clean, x, retain_graph=True)
                (clean + model(x.detach() + 0.1 * grad.sign()).square().mean()).backward()
            except zshard.StateError:
                refused += 1
                break
        else:
            assert_same_grads(plain, wrapped)
    return refused


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_that_goes_another_way_each_time_is_not_taken_for_the_other(
    world_size: int,
) -> None:
    assert run_ranks(adversarial, world_size) == [0] * world_size


# --- .data ---------------------------------------------------------------------------------------


def swap_data(rank: int, world_size: int, precision: zshard.Precision | None) -> None:
    _, model = pair(lambda: nn.Linear(8, 8), precision=precision)
    _, other = pair(lambda: nn.Linear(8, 8), precision=precision)
    with zshard.full_params(other, write=True), torch.no_grad():
        other.weight.fill_(0.25)
    before, average = (zshard.full_param(each, "weight") for each in (model, other))
    shadow = dict(other.named_parameters())
    backup = {}
    for name, param in model.named_parameters():
        backup[name] = param.data
        param.data = shadow[name].data
    assert torch.equal(zshard.full_param(model, "weight"), average)
    for name, param in model.named_parameters():
        param.data = backup[name]
    assert torch.equal(zshard.full_param(model, "weight"), before)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        a.data, b.data = b.data, a.data
    assert torch.equal(zshard.full_param(model, "weight"), average)
    assert torch.equal(zshard.full_param(other, "weight"), before)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "precision", [None, zshard.Precision.bf16(), zshard.Precision(torch.bfloat16, master="split")]
)
def test_data_kept_when_other_is_assigned_keeps_its_values(
    world_size: int, precision: zshard.Precision | None
) -> None:
    run_ranks(swap_data, world_size, precision)


class Renormed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_data_assigned_in_forward_is_refused_and_the_parameter_stays(strategy: str) -> None:
    model = zshard.wrap(Stacked(lambda: Renormed(8, 8)), strategy=strategy)
    before = zshard.full_param(model, "blocks.0.weight")
    for _ in range(2):
        with pytest.raises(zshard.StateError, match=r"forward changed one of blocks\.0\.weight"):
            model(INPUT)
    assert torch.equal(zshard.full_param(model, "blocks.0.weight"), before)
    model.blocks[0].__class__ = nn.Linear
    with torch.no_grad():
        expected = nn.functional.linear(INPUT, before, zshard.full_param(model, "blocks.0.bias"))
        assert torch.equal(model.blocks[0](INPUT), expected)


# --- optimizers ----------------------------------------------------------------------------------


def clear(opt: torch.optim.Optimizer) -> None:
    opt.state.clear()


def replace(opt: torch.optim.Optimizer) -> None:
    opt.state = defaultdict(dict)


def drop_one(opt: torch.optim.Optimizer) -> None:
    opt.state[opt.param_groups[0]["params"][1]] = {}


@pytest.mark.parametrize("change", [clear, replace, drop_one])
def test_a_state_that_is_cleared_begins_anew(
    change: Callable[[torch.optim.Optimizer], None],
) -> None:
    plain, wrapped = pair(lambda: Stacked(lambda: nn.Linear(8, 8)))
    for model, kind in ((plain, torch.optim.AdamW), (wrapped, zshard.AdamW)):
        opt = kind(model.parameters(), lr=0.01)
        for step in range(4):
            if step == 2:
                change(opt)
            opt.zero_grad()
            (model(INPUT) * (step + 1)).square().mean().backward()
            opt.step()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(zshard.full_param(wrapped, name), param.data)


def state_set(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Stacked(lambda: nn.Linear(8, 8)), nn.Linear(8, 8))
    wrapped = copy.deepcopy(plain)
    zshard.wrap(wrapped[0])
    for model, kind in ((plain, torch.optim.AdamW), (wrapped, zshard.AdamW)):
        opt = kind(model.parameters(), lr=0.01)
        for step in range(4):
            opt.zero_grad()
            (model(INPUT) * (step + 1)).square().mean().backward()
            opt.step()
            for param in (model[0].blocks[1].weight, model[1].weight):
                if step == 1:
                    opt.state[param]["exp_avg"] = torch.zeros_like(opt.state[param]["exp_avg"])
                if step == 2:
                    param.data = param.data * 0.5
    for name, param in plain.named_parameters():
        found = dict(wrapped.named_parameters())[name]
        if name.startswith("0."):
            found = zshard.full_param(wrapped[0], name.removeprefix("0."))
        torch.testing.assert_close(found, param, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_states_and_data_that_were_set_are_what_the_next_step_takes(world_size: int) -> None:
    run_ranks(state_set, world_size)


def freeze_before_step(rank: int, world_size: int) -> None:
    plain, wrapped = pair(lambda: Stacked(lambda: nn.Linear(8, 8)))
    for model, kind in ((plain, torch.optim.AdamW), (wrapped, zshard.AdamW)):
        opt = kind(model.parameters(), lr=0.01)
        for step in range(3):
            model(INPUT).square().mean().backward()
            model.blocks[1].requires_grad_(step != 1)
            opt.step()
            opt.zero_grad()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(zshard.full_param(wrapped, name), param.data)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_unit_frozen_between_backward_and_step_is_updated(world_size: int) -> None:
    run_ranks(freeze_before_step, world_size)


# --- the default device of new tensors -----------------------------------------------------------


def elsewhere(rank: int, world_size: int, comm: str) -> None:
    torch.manual_seed(0)
    plain = Stacked(lambda: nn.Linear(8, 8))
    found = []
    for device in ("cpu", "meta"):
        model, x = copy.deepcopy(plain), INPUT * (rank + 1)
        ignored = [model.blocks[5].bias]
        with torch.device(device):  # as torch.set_default_device
            zshard.wrap(model, comm=comm, ignored=ignored)
            optimizer = zshard.AdamW(model.parameters(), lr=0.01)
            scaler = zshard.GradScaler("cpu", 8.0)
            for _ in range(3):
                with zshard.no_sync(model):
                    scaler.scale(model(x).square().mean()).backward()
                scaler.scale(model(x).square().mean()).backward()
                scaler.unscale_(optimizer)
                zshard.clip_grad_norm_(model, 0.1)
                zshard.clip_grad_norm_(model.blocks[0].parameters(), 0.05)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            optimizer.load_state_dict(optimizer.state_dict())
            weights = zshard.state_dict(model, all_ranks=True)
        found.append(weights)
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize(("world_size", "comm"), [(1, "group"), (2, "group"), (2, "peer")])
def test_the_default_device_of_new_tensors_does_not_matter(world_size: int, comm: str) -> None:
    run_ranks(elsewhere, world_size, comm)


# --- wrap ----------------------------------------------------------------------------------------


def collected_meanwhile(rank: int, world_size: int, on: tuple[int, ...]) -> None:
    """The garbage collector takes the last model over the group while the next is wrapped."""
    gc.disable()
    model = zshard.wrap(nn.Linear(8, 8))
    model = None  # noqa: F841
    if rank in on:
        tell = zshard.comm.Comm.all_gather_object

        def collect_first(self: object, value: object, tag: object) -> list[object]:
            gc.collect()
            return tell(self, value, tag)

        zshard.comm.Comm.all_gather_object = collect_first
    zshard.wrap(nn.Linear(8, 8))(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("on", [(0,), (0, 1)])
def test_a_model_may_be_collected_while_another_is_wrapped(on: tuple[int, ...]) -> None:
    run_ranks(collected_meanwhile, 2, on)


def old_weight_norm() -> Stacked:
    return Stacked(lambda: nn.utils.weight_norm(nn.Linear(8, 8)))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_a_model_whose_attributes_keep_a_graph_is_told_which() -> None:
    torch.manual_seed(0)
    plain = old_weight_norm()
    torch.manual_seed(0)
    model = old_weight_norm()
    with pytest.raises(zshard.WrapError, match=r"weight_g cannot be .*attribute 'weight'\. Detach"):
        zshard.wrap(model)
    for block in model.blocks:
        block.weight = block.weight.detach()
    wrapped = zshard.wrap(model)
    for each in (plain, wrapped):
        each(INPUT).square().mean().backward()
    assert_same_grads(plain, wrapped)


def after_a_forward_that_wrote(rank: int, world_size: int, strategy: str, load: bool) -> None:
    model = zshard.wrap(Stacked(lambda: Clamped(8, 8)), strategy=strategy)
    before = zshard.state_dict(model, all_ranks=True)
    model.blocks[0].clamps = True
    with pytest.raises(zshard.StateError, match=r"forward changed one of blocks\.0\.weight"):
        model(INPUT)
    model.blocks[0].clamps = False
    model(INPUT)
    if load:
        model.load_state_dict(before)
    else:
        with zshard.full_params(model, write=True):
            for name, param in model.named_parameters():
                param.data.copy_(before[name])
    model(INPUT).sum().backward()
    assert torch.equal(zshard.full_param(model, "blocks.0.weight"), before["blocks.0.weight"])


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_after_a_forward_that_wrote_parameters_they_are_set_and_go_on(
    world_size: int, strategy: str, load: bool
) -> None:
    run_ranks(after_a_forward_that_wrote, world_size, strategy, load)
