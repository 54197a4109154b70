"""What forwards, scripts and optimizers may do that is unusual: right, or an error by name."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import zshard
import zshard.comm
import zshard.transport
from zshard.leaf import as_autograd_sees
from zshard.wrap import schedule_of

kInput = torch.linspace(-1.0, 1.0, 48).view(2, 3, 8)


class Stacked(nn.Module):
    """Six blocks, each a unit, and how they are put together."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def pair(make: Callable[[], nn.Module], **arguments: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make()
    return plain, zshard.wrap(copy.deepcopy(plain), **arguments)


def assert_same_grads(plain: nn.Module, wrapped: nn.Module) -> None:
    for name, param in plain.named_parameters():
        torch.testing.assert_close(zshard.full_grad(wrapped, name), param.grad)


# --- what a unit gives out -----------------------------------------------------------------------


class AddsInPlace(Stacked):
    """Writes to what a unit returned, a view, in place."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = start = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x.tanh()).transpose(1, 2).transpose(1, 2)
            x += start
        return x


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class GivesSlotted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Slotted | Tensor) -> Slotted:
        return Slotted(self.linear(x.value if isinstance(x, Slotted) else x).tanh())


class SlottedStack(Stacked):
    def __init__(self) -> None:
        super().__init__(GivesSlotted)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).value


def unseen_outputs(rank: int, world_size: int, make: Callable[[], nn.Module], hooked: bool) -> None:
    plain, wrapped = pair(make)
    for _ in range(2):
        for model in (plain, wrapped):
            model.zero_grad()
            if hooked:  # what they keep, autograd does not check
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                    out = model(kInput)
            else:
                out = model(kInput)
            out.square().mean().backward()
        assert_same_grads(plain, wrapped)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("make", [AddsInPlace, SlottedStack])
def test_backward_finds_units_by_views_written_in_place_and_objects_with_slots(
    world_size: int, hooked: bool, make: Callable[[], nn.Module]
) -> None:
    run_ranks(unseen_outputs, world_size, make, hooked)


def test_relu_in_place_behind_linear_layers() -> None:
    layers = [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)]
    plain, wrapped = pair(lambda: nn.Sequential(*layers, nn.Linear(8, 8)))
    for model in (plain, wrapped):
        model(kInput).square().mean().backward()
    assert_same_grads(plain, wrapped)


class Spread(nn.Module):
    """Returns a distribution with a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.deviation = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor, into: list[Tensor] | None = None) -> object:
        if into is not None:
            into.append(self.deviation.expand_as(x))
            return self.linear(x)
        return torch.distributions.Normal(self.linear(x), self.deviation)


def leaves_a_view(rank: int, world_size: int, grad: bool) -> None:
    wrapped = zshard.wrap(Stacked(Spread), strategy="zero3")
    with torch.set_grad_enabled(grad):
        for call in (lambda: wrapped.blocks[0](kInput), lambda: wrapped.blocks[0](kInput, [])):
            with pytest.raises(zshard.ShardedAccessError, match=r"'blocks\.0'.*Put a copy there"):
                call()
    _, other = pair(lambda: Stacked(lambda: nn.Linear(8, 8)))
    other(kInput).sum().backward()  # the ranks are still in step


@pytest.mark.parametrize("grad", [True, False])
def test_a_view_of_a_parameter_left_where_it_cannot_be_copied_is_refused(grad: bool) -> None:
    run_ranks(leaves_a_view, 2, grad)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x.to_dense() if x.is_sparse else x)).relu().to_sparse()


def sparse_outputs(rank: int, world_size: int) -> None:
    plain, wrapped = pair(lambda: Stacked(Sparse))
    with torch.no_grad():
        torch.testing.assert_close(wrapped(kInput).to_dense(), plain(kInput).to_dense())


def test_a_unit_may_return_a_tensor_without_storage() -> None:
    run_ranks(sparse_outputs, 2)


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self) -> Tensor:
        return self.weight


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Position(), Position()])

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.blocks[0]()) * self.blocks[1]()


def returns_parameter(rank: int, world_size: int, strategy: str) -> None:
    plain, wrapped = pair(Positions, strategy=strategy)
    for _ in range(2):
        for model in (plain, wrapped):
            model.zero_grad()
            model(kInput).square().mean().backward()
        assert_same_grads(plain, wrapped)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(kInput), plain(kInput))
    with as_autograd_sees():
        for unit in schedule_of(wrapped).units:
            for leaf in (leaf for flat in unit.flats for leaf in flat.leaves):
                assert len(leaf._backward_hooks) == 1  # our own, not one more at each forward


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_unit_may_return_its_own_parameter(world_size: int, strategy: str) -> None:
    run_ranks(returns_parameter, world_size, strategy)


class Scaled(nn.Module):
    """Returns a parameter of the root beside what it computes, as contrastive models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.linear(x), {"scale": self.scale}


def returns_root_parameter(rank: int, world_size: int) -> None:
    plain, wrapped = pair(Scaled)
    for grad in (True, False, True):
        outs = []
        for model in (plain, wrapped):
            model.zero_grad()
            with torch.set_grad_enabled(grad):
                out, more = model(kInput)
                outs.append(loss := out.square().mean() * more["scale"].exp())
            if grad:
                loss.backward()
            outs.append(more["scale"].detach().clone())  # after backward, as loggers read it
        torch.testing.assert_close(outs[2:], outs[:2])
        if grad:
            assert_same_grads(plain, wrapped)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_model_may_return_its_own_parameter(world_size: int) -> None:
    run_ranks(returns_root_parameter, world_size)


class Listed(nn.Module):
    """Reads parameters out of containers, which are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(8)) for _ in range(2)])
        self.nested = nn.ModuleList([nn.ParameterDict({"shift": nn.Parameter(torch.rand(8))})])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0] * self.scales[1] + self.nested[0]["shift"]


def listed(rank: int, world_size: int) -> None:
    plain, wrapped = pair(lambda: Stacked(Listed), units="layer")
    for model in (plain, wrapped):
        model(kInput).square().mean().backward()
    assert_same_grads(plain, wrapped)
    units = [unit.name for unit in schedule_of(wrapped).units[1:]]
    assert units == [f"blocks.{index}" for index in range(6)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameter_containers_are_part_of_the_layer_that_reads_them(world_size: int) -> None:
    run_ranks(listed, world_size)


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
    wrapped(kInput, into, more=more)
    assert len(into) == len(more["seen"]) == 6


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
            model(kInput)
    assert torch.equal(zshard.full_param(model, "blocks.0.weight"), before)
    model.blocks[0].__class__ = nn.Linear
    with torch.no_grad():
        expected = nn.functional.linear(kInput, before, zshard.full_param(model, "blocks.0.bias"))
        assert torch.equal(model.blocks[0](kInput), expected)


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
            (model(kInput) * (step + 1)).square().mean().backward()
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
            (model(kInput) * (step + 1)).square().mean().backward()
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
            model(kInput).square().mean().backward()
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
        model, x = copy.deepcopy(plain), kInput * (rank + 1)
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
