"""Arithmetic between parameters whose shards are cut in different places, as moving averages do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from ranks import run_ranks
from test_symmetric import Double, take
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zshard
from zshard.wrap import schedule_of


class Byol(nn.Module):
    """An online network with a predictor, and a frozen one that follows it (Grill et al. 2020)."""

    def __init__(self, follow: Callable[[list[Tensor], list[Tensor]], None]) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(5))  # in front of the online network's
        self.predictor = nn.Linear(5, 5)
        # Its elements lie in another order in memory.
        self.target[0].weight = nn.Parameter(self.target[0].weight.t().contiguous().t(), False)
        self._follow = follow

    def forward(self, x: Tensor) -> Tensor:
        seen = self.predictor(self.online(x)) * self.scale
        return (seen - self.target(x)).square().mean()

    def follow(self) -> None:
        """Have the target take a step to the online network."""
        online = dict(self.online.named_parameters())
        pairs = [(online[name], value) for name, value in self.target.named_parameters()]
        with torch.no_grad():
            self._follow([a for a, _ in pairs], [b for _, b in pairs])


def in_place(online: list[Tensor], target: list[Tensor]) -> None:
    for a, b in zip(online, target, strict=True):
        b.mul_(0.75).add_(a, alpha=0.25)


def by_data(online: list[Tensor], target: list[Tensor]) -> None:
    for a, b in zip(online, target, strict=True):
        b.data = b.data * 0.75 + a.data * 0.25


def by_lists(online: list[Tensor], target: list[Tensor]) -> None:
    torch._foreach_lerp_(target, online, 0.25)


def by_copy(online: list[Tensor], target: list[Tensor]) -> None:
    for a, b in zip(online, target, strict=True):
        b.copy_(0.5 * a - b)


def mixed(name: str, module: nn.Module) -> str:
    return "ddp" if name.startswith("target") else "zero3"


FOLLOW = [in_place, by_data, by_lists, by_copy]


def train(follow: Callable[..., None], options: dict[str, object] | None) -> list[Tensor]:
    """Train, and return the parameters; the plain model's without options."""
    torch.manual_seed(0)
    model: nn.Module = Byol(follow)
    if options is not None:
        model = zshard.wrap(model, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.3)
    for _ in range(3):
        model(torch.randn(4, 7)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.follow()
    if options is None:
        return [p.detach() for p in model.parameters()]
    return [zshard.full_param(model, name) for name, _ in model.named_parameters()]


def both_are_alike(rank: int, world_size: int, follow: Callable[..., None], comm: str) -> None:
    plain = train(follow, None)
    variants: list[dict[str, object]] = [
        {"strategy": strategy} for strategy in ("zero3", "zero1", "ddp", mixed)
    ]
    variants += [{"units": "layer"}, {"units": "model"}, {"units": ["target"], "strategy": mixed}]
    for options in variants:
        sharded = train(follow, {**options, "comm": comm})
        assert all(map(torch.equal, plain, sharded)), options


@pytest.mark.parametrize(("size", "comm"), [(1, "auto"), (2, "group"), (4, "peer")])
@pytest.mark.parametrize("follow", FOLLOW)
def test_a_frozen_half_follows_a_trained_one(
    follow: Callable[..., None], size: int, comm: str
) -> None:
    run_ranks(both_are_alike, size, follow, comm)


def add_a_gradient(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = Byol(in_place)
    torch.manual_seed(0)
    model = zshard.wrap(Byol(in_place))
    for side, clip in (plain, nn.utils.clip_grad_norm_), (model, zshard.clip_grad_norm_):
        side(torch.ones(4, 7)).backward()
        clip(side.parameters(), 1e-3)
        with torch.no_grad():
            side.target[2].weight.add_(side.online[2].weight.grad, alpha=100)
    added = zshard.full_param(model, "target.2.weight")
    torch.testing.assert_close(added, plain.target[2].weight.detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1, 2])
def test_a_gradient_that_meets_another_cut_is_clipped(size: int) -> None:
    run_ranks(add_a_gradient, size)


def follow_on_some(rank: int, world_size: int) -> str:
    model = zshard.wrap(Byol(by_copy))
    with pytest.raises(zshard.MismatchError) as caught:
        if rank == 0:
            model.follow()
        else:
            model(torch.ones(4, 7))
    model(torch.ones(4, 7)).backward()  # they go on
    return str(caught.value)


def test_ranks_that_do_not_follow_alike_are_told() -> None:
    for said in run_ranks(follow_on_some, 2):
        assert "aten::sub of 'online.0.weight' and 'target.0.weight'" in said


def refusals(rank: int, world_size: int) -> None:
    model = zshard.wrap(Byol(in_place), units=["online.0", "online.2", "target"])
    hook = model.predictor.register_forward_pre_hook(lambda *_: model.follow())
    with pytest.raises(
        zshard.StateError, match=r"add_ of .* different shards\) can only be called between"
    ):
        model(torch.ones(4, 7))
    hook.remove()
    weight, other = model.online[0].weight.detach(), model.target[2].weight.detach()
    with pytest.raises(zshard.ShardedAccessError, match=r"of shapes \(9, 7\) and \(5, 9\)"):
        weight * other
    alone = [torch.distributed.new_group([each]) for each in range(world_size)]
    apart = zshard.wrap(Byol(in_place), mesh=alone[rank])
    with pytest.raises(zshard.ShardedAccessError, match="sharded over different ranks"):
        apart.predictor.weight.detach() * model.predictor.weight.detach()
    before = schedule_of(model).comm.stats.calls.total()
    model.predictor.weight.detach() * model.predictor.weight.detach()
    assert schedule_of(model).comm.stats.calls.total() == before


def test_what_cannot_be_cut_alike_is_refused() -> None:
    run_ranks(refusals, 2)


def over_other_ranks(rank: int, world_size: int) -> None:
    """Shards of one size, which two meshes give to other ranks."""
    models = [
        zshard.wrap(nn.Linear(64, 64, bias=False), mesh=DeviceMesh("cpu", mesh), init="broadcast")
        for mesh in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    ]
    before = zshard.full_param(models[0], "weight")
    with torch.no_grad(), pytest.raises(zshard.ShardedAccessError, match="over different ranks"):
        models[0].weight.copy_(models[1].weight)
    assert torch.equal(zshard.full_param(models[0], "weight"), before)


def test_equal_cuts_over_other_ranks_are_not_taken_for_alike() -> None:
    run_ranks(over_other_ranks, 4)


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.rand(200)) for _ in range(3))


def chained(rank: int, world_size: int, by_data: bool) -> None:
    torch.manual_seed(0)
    plain = Three()
    model = zshard.wrap(copy.deepcopy(plain), units="model")
    with torch.no_grad():
        a, b, c = (p.data if by_data else p for p in (model.a, model.b, model.c))
        again = model.b.data if by_data else b
        with pytest.raises(zshard.ShardedAccessError, match="changes 'b', and computes it with"):
            torch._foreach_add_([b, c], [a, again])
        torch._foreach_add_([b, c], [a, a])
        torch._foreach_add_([plain.b, plain.c], [plain.a, plain.a])
    for name, value in plain.named_parameters():
        assert torch.equal(zshard.full_param(model, name), value.detach()), name


@pytest.mark.parametrize("by_data", [False, True])
def test_what_one_call_writes_is_not_gathered_for_another_row_of_it(by_data: bool) -> None:
    run_ranks(chained, 2, by_data)


def foreign_states(rank: int, world_size: int, kind: str) -> None:
    """States of a model with another unit map, shards and all."""
    first, second = (zshard.wrap(Byol(by_copy), units=units) for units in ("model", "layer"))
    made = torch.optim.AdamW if kind == "torch" else zshard.AdamW
    old, new = made(first.parameters()), made(second.parameters())
    for model in (first, second):
        model(torch.ones(4, 7)).backward()
    old.step()
    with pytest.raises(zshard.OptimizerError, match=r"exp_avg' of .*cut"):
        new.load_state_dict(old.state_dict())
        new.step()


@pytest.mark.parametrize("kind", ["torch", "zshard"])
def test_states_that_are_cut_for_another_unit_map_are_refused(kind: str) -> None:
    run_ranks(foreign_states, 2, kind)


class OfBytes(nn.Module):
    """Two weights whose masks, and their rows on each rank, have few bytes; and no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 2))
        self.first, self.between = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(5))
        self.second = nn.Parameter(torch.randn(3))
        self.nor = nn.Parameter(torch.empty(0, 2))


def masks(rank: int, world_size: int, comm: str) -> None:
    if comm == "symmetric":
        take(Double())
    torch.manual_seed(0)
    plain = OfBytes()
    model = zshard.wrap(copy.deepcopy(plain), comm="peer" if comm == "symmetric" else comm)
    with torch.no_grad():
        for each in (plain, model):
            both = (each.first > 0) | (each.second > 0)
            each.second.mul_(both).add_((each.first * 2).half())
            each.nor.add_(each.none)
    assert torch.equal(zshard.full_param(model, "second"), plain.second.detach())


@pytest.mark.parametrize("comm", ["group", "peer", "symmetric"])
def test_elements_of_one_byte_and_of_two_meet_over_every_transport(comm: str) -> None:
    run_ranks(masks, 2, comm)
