"""What a step depends on has to be alike on every rank; where it is not, all of them are told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import models
import pytest
import torch
from ranks import run_ranks
from steps import batch, build, one_step
from torch import nn

import zshard

Part = Callable[[nn.Module, torch.optim.Optimizer], object]


def clip_to(max_norm: float, norm_type: float = 2.0) -> Part:
    return partial(clip, max_norm=max_norm, norm_type=norm_type)


def clip(model: nn.Module, optimizer: torch.optim.Optimizer, **options: float) -> object:
    return zshard.clip_grad_norm_(model, **options)


def clip_fewer(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    return zshard.clip_grad_norm_([*model.parameters()][2:], 0.5, 1.0)


def clip_by_p(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    return zshard.clip_grad_norm_(model, 0.5, 1.0)


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def drop_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def drop_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.inlet.bias.grad = None


def other_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for group in optimizer.param_groups:
        group["params"] = [p for p in params if (p.ndim == 1) == (group["weight_decay"] > 0)]


def leave_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def setting(name: str, value: object) -> Part:
    return partial(set_one, name=name, value=value)


def set_one(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, value: object) -> None:
    optimizer.param_groups[0][name] = value


MAKERS = {
    "AdamW": zshard.AdamW,
    "torch SGD": partial(torch.optim.SGD, momentum=0.5),
    "torch AdamW": torch.optim.AdamW,
}

# What rank 1 does, what the others do -> the optimizer, what the error names.
PARTS: dict[str, tuple[Part, Part, str, str]] = {
    "clips to another norm": (clip_to(0.25), clip_to(0.5), "AdamW", "max_norm, norm_type"),
    "clips alone": (clip_to(0.5), nothing, "AdamW", "max_norm, norm_type"),
    "clips by another p": (clip_to(0.5, 1.0), clip_to(0.25, 1.0), "torch SGD", "max_norm, norm"),
    "clips fewer": (clip_fewer, clip_by_p, "AdamW", "norm_type and the parameters clipped"),
    "drops all gradients": (drop_all, nothing, "AdamW", "have changed"),
    "drops one gradient": (drop_one, nothing, "AdamW", "which parameters have gradients in AdamW"),
    "drops one of torch's": (drop_one, nothing, "torch SGD", "which parameters have gradients"),
    "has other groups": (other_groups, nothing, "AdamW", "which parameters are in AdamW's groups"),
    "has torch's other groups": (other_groups, nothing, "torch AdamW", "are in AdamW's groups"),
    "leaves a parameter out": (leave_out, nothing, "AdamW", "which parameters are in AdamW's"),
    "maximizes": (setting("maximize", True), nothing, "torch AdamW", "the settings of AdamW's"),
    "is Nesterov's": (setting("nesterov", True), nothing, "torch SGD", "the settings of SGD's"),
}


def told(rank: int, world_size: int, train: Callable[..., None], *args: object) -> str:
    """What this rank is told when the ranks ``train``; "" if nothing."""
    try:
        train(rank, *args)
    except zshard.MismatchError as error:
        return str(error)
    return ""


def parts(rank: int, case: str, strategy: str, apart: bool) -> None:
    own, others, kind, _ = PARTS[case]
    model = build(strategy=strategy)
    params = [*model.parameters()]
    optimizer = MAKERS[kind](
        [
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
            {"params": [p for p in params if p.ndim != 1], "weight_decay": 0.1},
        ],
        lr=0.1,
    )
    for step in range(3):
        one_step(model, rank, step)
        (own if rank == 1 or not apart else others)(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("case", PARTS)
def test_other_parts_of_a_step_are_an_error_on_all(case: str, strategy: str) -> None:
    own, other = run_ranks(told, 2, parts, case, strategy, True)
    assert own == other and PARTS[case][3] in own


@pytest.mark.parametrize("case", PARTS)
def test_the_same_on_all_ranks_is_no_error(case: str) -> None:
    assert run_ranks(told, 2, parts, case, "zero3", False) == ["", ""]


def drops_alone(rank: int) -> None:
    """Drop gradients between steps on rank 0 alone; rank 1 adds to them."""
    model = build()
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        one_step(model, rank, step)
        optimizer.step()
        if rank == 0:
            optimizer.zero_grad()


def test_gradients_that_some_ranks_add_to_are_an_error_on_all() -> None:
    own, other = run_ranks(told, 2, drops_alone)
    assert own == other and "which gradients a backward adds to" in own


def scales(rank: int, scale_of: Sequence[float]) -> None:
    model = build()
    optimizer = zshard.AdamW(model.parameters())
    scaler = zshard.GradScaler("cpu", init_scale=scale_of[rank])
    for step in range(2):
        scaler.scale(models.loss_of(model, batch(rank, step))).backward()
        scaler.step(optimizer)
        scaler.update()


def test_other_loss_scales_are_an_error_on_all() -> None:
    own, other = run_ranks(told, 2, scales, (256.0, 512.0))
    assert own == other and "the scale and the settings of GradScaler" in own
    assert run_ranks(told, 2, scales, (256.0, 256.0)) == ["", ""]


class Either(nn.Module):
    """Two units, of which a forward runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.parts[which](x)


OPTIMIZERS = {
    "zshard.SGD": partial(zshard.SGD, lr=0.1),
    "zshard.AdamW": zshard.AdamW,
    "SGD": partial(torch.optim.SGD, lr=0.1, foreach=False),
    "AdamW": partial(torch.optim.AdamW, foreach=True),
}


def held_behind(rank: int, world_size: int, name: str) -> None:
    """A step with the gradient of one unit, and another that no_sync holds back."""
    model = zshard.wrap(Either(), units="layer", init="broadcast")
    optimizer = OPTIMIZERS[name](model.parameters())
    model(torch.ones(2, 4), 0).sum().backward()
    with zshard.no_sync(model):
        model(torch.ones(2, 4), 1).sum().backward()
    before = zshard.state_dict(model, all_ranks=True)
    with pytest.raises(zshard.StateError, match="no_sync"):
        optimizer.step()
    for key, value in zshard.state_dict(model, all_ranks=True).items():
        assert torch.equal(value, before[key]), key


def closed(rank: int, world_size: int, name: str) -> None:
    """A closure runs the last micro-batch, the one that reduces."""
    torch.manual_seed(0)
    plain = Either()
    sides = []
    for model in (plain, zshard.wrap(copy.deepcopy(plain), units="layer")):
        optimizer = OPTIMIZERS[name.removeprefix("zshard.") if model is plain else name](
            model.parameters()
        )
        with nullcontext() if model is plain else zshard.no_sync(model):
            model(torch.ones(2, 4), 0).sum().backward()

        def last(model: nn.Module = model) -> torch.Tensor:
            loss = model(-torch.ones(2, 4), 1).square().sum()
            loss.backward()
            return loss

        optimizer.step(last)
        sides.append(model)
    for key, value in zshard.state_dict(sides[1], all_ranks=True).items():
        torch.testing.assert_close(value, plain.state_dict()[key])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure_may_reduce_what_no_sync_holds(name: str, size: int) -> None:
    run_ranks(closed, size, name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_refused_for_a_held_gradient_changes_nothing(name: str) -> None:
    run_ranks(held_behind, 2, name)


def clips_otherwise(rank: int, world_size: int) -> list[str]:
    model = build()
    models.loss_of(model, batch(rank, 0)).backward()
    zshard.clip_grad_norm_(model, 1.0 + rank)
    with pytest.raises(zshard.MismatchError, match="max_norm"):
        zshard.full_param(model, "inlet.bias")
    return list(zshard.state_dict(model, all_ranks=True))


def test_a_model_whose_gradients_alone_differ_is_not_torn() -> None:
    """No step has brought the difference to the parameters, which are saved as they are."""
    names, _ = run_ranks(clips_otherwise, 2)
    assert "inlet.bias" in names
