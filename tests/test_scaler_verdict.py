"""GradScaler: where it looks for overflow, what the ranks tell each other, what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import models
import pytest
import torch
from models import Block
from ranks import run_ranks
from steps import batch, build
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training import adamw, torch_adamw

import zshard

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "zshard": adamw,
    "foreach": torch_adamw,
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
}


def backward(
    model: nn.Module, scaler: torch.amp.GradScaler, rank: int, step: int, times: float = 1.0
) -> None:
    scaler.scale(models.loss_of(model, batch(rank, step)) * times).backward()


def memory_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of this rank's masters and of all of the optimizer's states, step counts included."""
    states = optimizer.state_dict()["state"].values()
    kept = [*zshard.local_shards(model).values()]
    for state in states:
        # A sharded state shows its slice on this rank.
        kept += [getattr(value, "local", value) for value in state.values()]
    return [value.clone() for value in kept]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


class OneNaN(nn.Module):
    """Two parameters; the gradient of one element of `bad` is NaN, in one rank's shard alone."""

    def __init__(self) -> None:
        super().__init__()
        self.bad, self.good = (nn.Parameter(torch.ones(7)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # x (7,), the gradient of `bad`
        return (self.bad * x).sum() + (self.good * self.good).sum()


def nan_in_one_shard(rank: int, world_size: int, name: str) -> list[object]:
    """Of a good step, a skipped one and a good one: the scale, and whether anything changed."""
    model = zshard.wrap(OneNaN())
    optimizer, scaler = OPTIMIZERS[name](model), zshard.GradScaler("cpu", init_scale=8.0)
    seen: list[object] = []
    for last in (1.0, math.nan if rank == 0 else 1.0, 1.0):
        x = torch.ones(7)
        x[-1] = last
        scaler.scale(model(x)).backward()
        before = memory_of(model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [scaler.get_scale(), not same(before, memory_of(model, optimizer))]
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_nan_in_one_ranks_shard_leaves_every_rank_untouched(name: str, world_size: int) -> None:
    for seen in run_ranks(nan_in_one_shard, world_size, name):
        assert seen == [8.0, True, 4.0, False, 4.0, True]


def collectives(rank: int, world_size: int, kind: str) -> int:
    """All-reduces that unscale_ and step add to those of backward."""
    ignored = ["outlet.bias"] if kind == "ignored" else None
    model = zshard.wrap(models.build("unused"), ignored=ignored)
    params = list(model.parameters())
    if kind == "used":  # on no rank has one of the others a gradient
        names = [name for name, _ in model.named_parameters()]
        params = [p for p, n in zip(params, names, strict=True) if "spare" not in n]
    optimizer = zshard.AdamW(params[:4] if kind == "part" else params)
    scaler = zshard.GradScaler("cpu")
    backward(model, scaler, rank, 0)
    if kind == "changed":
        params[0].grad.mul_(2.0)
    before = zshard.stats(model).calls["all_reduce"]
    scaler.unscale_(optimizer)
    zshard.clip_grad_norm_(model, 1.0)
    scaler.step(optimizer)
    scaler.update()
    return zshard.stats(model).calls["all_reduce"] - before


@pytest.mark.parametrize(
    ("kind", "count"),
    # What is unscaled in place is not what the reduction has summed, so clipping sums it again.
    [("whole", 0), ("used", 0), ("ignored", 1), ("part", 2), ("changed", 2)],
)
def test_the_ranks_agree_at_no_cost_unless_the_reduction_saw_something_else(
    kind: str, count: int
) -> None:
    assert run_ranks(collectives, 2, kind) == [count] * 2


def one_of_two(rank: int, world_size: int) -> tuple[bool, bool, float]:
    """Two optimizers, NaN in the gradients of the second on rank 1: which of them step?"""
    model = zshard.wrap(OneNaN())
    halves = [zshard.AdamW([model.bad]), zshard.AdamW([model.good])]
    scaler = zshard.GradScaler("cpu", init_scale=8.0)
    x = torch.ones(7)
    x[2] = math.inf if rank == 1 else 1.0
    scaler.scale(model(x)).backward()
    for optimizer in halves:
        scaler.step(optimizer)
    scaler.update()
    bad, good = (zshard.full_param(model, name) for name in ("bad", "good"))
    return bool((bad == 1).all()), bool((good == 1).any()), scaler.get_scale()


def test_of_two_optimizers_only_the_one_with_the_overflow_skips() -> None:
    assert run_ranks(one_of_two, 2) == [(True, False, 4.0)] * 2


def planted(rank: int, world_size: int, where: str) -> tuple[float, bool]:
    """NaN put on rank 0 after the reduction: into a shard, or into an unsharded gradient."""
    model = build(ignored=["outlet.bias"])
    optimizer, scaler = adamw(model), zshard.GradScaler("cpu", init_scale=8.0)
    backward(model, scaler, rank, 0)
    factor = math.nan if rank == 0 else 1.0
    (model.outlet.bias if where == "ignored" else model.inlet.weight).grad.mul_(factor)
    before = [*memory_of(model, optimizer), model.outlet.bias.detach().clone()]
    scaler.step(optimizer)
    scaler.update()
    after = [*memory_of(model, optimizer), model.outlet.bias.detach()]
    return scaler.get_scale(), same(before, after)


@pytest.mark.parametrize("where", ["shard", "ignored"])
def test_what_one_rank_has_after_the_reduction_is_seen_by_all(where: str) -> None:
    assert run_ranks(planted, 2, where) == [(4.0, True)] * 2


def on_one_replica(rank: int, world_size: int) -> tuple[float, bool]:
    """NaN in an unsharded gradient of the last rank, behind an equal step of all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build(ignored=["outlet.bias"], mesh=mesh)
    optimizer, scaler = adamw(model), zshard.GradScaler("cpu", init_scale=8.0)
    backward(model, scaler, 0, 0)
    if rank == world_size - 1:
        model.outlet.bias.grad.mul_(math.nan)
    before = [each.clone() for each in zshard.local_shards(model).values()]
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), same(before, [*zshard.local_shards(model).values()])


def test_what_one_rank_of_a_mesh_has_is_seen_by_the_other_replicas_too() -> None:
    assert run_ranks(on_one_replica, 4) == [(4.0, True)] * 4


def ignored_steps(rank: int, world_size: int) -> list[Tensor]:
    """Two steps with a parameter that is not sharded, plain and wrapped."""
    ends = []
    for is_wrapped in (True, False):
        torch.manual_seed(0)
        model: nn.Module = models.Blocks()
        if is_wrapped:
            zshard.wrap(model, ignored=["outlet.bias"])
        scaler = (zshard if is_wrapped else torch.amp).GradScaler("cpu")
        optimizer = adamw(model)
        for step in range(2):
            backward(model, scaler, 0, step)  # the same on all ranks: nothing reduces the bias
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append(model.outlet.bias.detach().clone())
    return ends


def test_unsharded_parameters_are_unscaled_once() -> None:
    for wrapped, plain in run_ranks(ignored_steps, 2):
        assert torch.equal(wrapped, plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_torchs_scaler_is_refused_and_the_error_names_zshards(name: str, world_size: int) -> None:
    if world_size == 1:
        torchs_scaler(0, 1, name)
    else:
        run_ranks(torchs_scaler, 2, name)


def torchs_scaler(rank: int, world_size: int, name: str) -> None:
    model = build()
    optimizer, scaler = OPTIMIZERS[name](model), torch.amp.GradScaler("cpu")
    backward(model, scaler, rank, 0)
    with pytest.raises(zshard.ShardedAccessError, match=r"Use zshard\.GradScaler"):
        scaler.step(optimizer)
    with pytest.raises(zshard.ShardedAccessError, match=r"Use zshard\.GradScaler"):
        scaler.unscale_(optimizer)


def test_misuse_is_torchs_error() -> None:
    for scaler, model in [
        (zshard.GradScaler("cpu"), build()),
        (torch.amp.GradScaler("cpu"), models.Blocks()),
    ]:
        optimizer = adamw(model)
        with pytest.raises(AssertionError, match="_scale is None"):
            scaler.step(optimizer)
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)
        scaler = type(scaler)("cpu")
        backward(model, scaler, 0, 0)
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="after step"):
            scaler.unscale_(optimizer)


def held_back(rank: int, world_size: int) -> None:
    model = build()
    optimizer, scaler = adamw(model), zshard.GradScaler("cpu")
    with zshard.no_sync(model):
        backward(model, scaler, rank, 0)
    with pytest.raises(zshard.StateError, match="no_sync"):
        scaler.unscale_(optimizer)
    backward(model, scaler, rank, 1)
    scaler.unscale_(optimizer)  # what was refused has not counted as the one call
    scaler.step(optimizer)


def test_gradients_that_no_sync_holds_back_are_not_unscaled() -> None:
    run_ranks(held_back, 2)


def test_the_state_goes_from_torchs_scaler_to_ours_and_back() -> None:
    first = torch.amp.GradScaler("cpu", 64.0, 4.0, 0.25, 3)
    model = models.Blocks()
    backward(model, first, 0, 0)
    first.step(adamw(model))
    first.update()
    ours = zshard.GradScaler("cpu")
    ours.load_state_dict(first.state_dict())
    assert ours.state_dict() == first.state_dict() and ours.state_dict()["_growth_tracker"] == 1
    wrapped = build()
    optimizer = adamw(wrapped)
    for step in range(2):
        backward(wrapped, ours, 0, step)
        ours.step(optimizer)
        ours.update()
    assert ours.get_scale() == 256.0
    second = torch.amp.GradScaler("cpu")
    second.load_state_dict(ours.state_dict())
    assert second.state_dict() == ours.state_dict()


def test_a_disabled_scaler_only_steps() -> None:
    model, scaler = build(), zshard.GradScaler("cpu", enabled=False)
    optimizer, before = adamw(model), zshard.full_param(model, "inlet.weight")
    loss = models.loss_of(model, batch(0, 0))
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0 and scaler.state_dict() == {}
    assert not torch.equal(before, zshard.full_param(model, "inlet.weight"))


def test_a_plain_model_is_left_to_torchs_scaler() -> None:
    ends = []
    for kind in (zshard.GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        model, scaler = Block(), kind("cpu")
        optimizer = torch_adamw(model)
        for times in (1.0, math.inf, 1.0):
            scaler.scale(model(torch.ones(2, 7)).square().mean() * times).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append([scaler.get_scale(), *(p.tolist() for p in model.parameters())])
    assert ends[0] == ends[1] and ends[0][0] == 2.0**15


def test_a_list_of_losses_trains_as_with_torchs_scaler() -> None:
    ends = []
    for kind, model in [(zshard.GradScaler, build()), (torch.amp.GradScaler, None)]:
        if model is None:
            torch.manual_seed(0)
            model = models.Blocks()
        scaler, optimizer = kind("cpu"), adamw(model)
        out = model(batch(0, 0))
        losses = scaler.scale([out.square().mean(), (out.abs().mean(),)])
        losses[0].backward(retain_graph=True)
        losses[1][0].backward()
        scaler.step(optimizer)
        is_ours = kind is zshard.GradScaler
        ends.append(zshard.full_param(model, "inlet.weight") if is_ours else model.inlet.weight)
    assert torch.equal(*ends)


def huge(rank: int, world_size: int) -> list[Tensor]:
    """Norms after unscale_ of gradients near 1e30, whose squares are no fp32 numbers."""
    norms = []
    for norm_type in (1.0, 2.0, math.inf):
        for scale in (2.0**100, 1.0):
            model = build()
            optimizer, scaler = adamw(model), zshard.GradScaler("cpu", init_scale=scale)
            backward(model, scaler, rank, 0)
            scaler.unscale_(optimizer)
            norms.append(zshard.clip_grad_norm_(model, 1.0, norm_type))
    return norms


def test_the_norm_of_huge_gradients_is_right_once_they_are_unscaled() -> None:
    for norms in run_ranks(huge, 2):
        for scaled, unscaled in zip(norms[::2], norms[1::2], strict=True):
            torch.testing.assert_close(scaled, unscaled, rtol=1e-6, atol=0)


def test_gradients_that_a_clip_by_an_overflowed_norm_has_made_nan_are_not_stepped_with() -> None:
    model = zshard.wrap(nn.Linear(3, 2, dtype=torch.float64))
    before = zshard.state_dict(model)
    optimizer, scaler = zshard.SGD(model.parameters(), lr=1.0), zshard.GradScaler("cpu", 1.0)
    loss = model(torch.ones(1, 3, dtype=torch.float64)).sum() * 1e200
    scaler.scale(loss).backward()
    assert zshard.clip_grad_norm_(model, float("inf")).isinf()  # the factor is inf / inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 0.5
    assert all(torch.equal(value, before[n]) for n, value in zshard.state_dict(model).items())
