"""Gradients changed between backward and step: through aliases, with a factor pending, and when."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import models
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import zshard
from zshard.units.gradient import Gradients

REDUCE = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "grad": lambda grad: grad.mul_(0.5),
    "data": lambda grad: grad.data.mul_(0.5),
    "detach": lambda grad: grad.detach().mul_(0.5),
    "data.clamp_": lambda grad: grad.data.clamp_(-1e-6, 1e-6),
    "data.zero_": lambda grad: grad.data.zero_(),
    "foreach": lambda grad: torch._foreach_mul_([grad.data, grad.detach()], 0.5),  # once each
}


def backward(reduce: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    """A wrapped model behind a backward, and one of its gradients."""
    model = zshard.wrap(models.build("blocks"), precision=zshard.Precision(reduce=reduce))
    models.loss_of(model, models.batches("blocks", 1)[0]).backward()
    grad = model.get_parameter("inlet.weight").grad
    assert grad is not None
    return model, grad


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reduce", REDUCE)
def test_a_change_through_an_alias_is_one_of_the_gradient(
    reduce: str, change: str, clipped: bool
) -> None:
    model, grad = backward(REDUCE[reduce])
    if clipped:
        zshard.clip_grad_norm_(model, 1e-2)
    expected = zshard.full_grad(model, "inlet.weight")
    assert expected is not None and expected.abs().max() > 1e-6
    CHANGES[change](expected)
    CHANGES[change](grad)
    found = zshard.full_grad(model, "inlet.weight")
    torch.testing.assert_close(found, expected, rtol=2e-2 if reduce == "bf16" else 1e-6, atol=0)


@pytest.mark.parametrize(
    "look",
    [
        lambda grad: grad.isfinite().all(),
        lambda grad: grad.norm(),
        lambda grad: grad.add_(torch.randn_like(grad)),
    ],
)
def test_a_look_at_a_whole_gradient_is_refused_with_what_to_call(
    look: Callable[[Tensor], object],
) -> None:
    _, grad = backward()
    with pytest.raises(zshard.ShardedAccessError, match=r"'inlet\.weight'.*zshard\.full_grad"):
        look(grad)


@pytest.mark.parametrize("reduce", REDUCE)
def test_an_alias_sees_a_later_clip_and_writes_past_it(reduce: str) -> None:
    model, grad = backward(REDUCE[reduce])
    alias = grad.detach()
    zshard.clip_grad_norm_(model, 1e-2)
    whole = zshard.full_grad(model, "inlet.weight")
    assert whole is not None
    assert torch.equal((alias * 1.0).local.to(whole.dtype), whole.reshape(-1))
    alias.fill_(1.0)
    assert torch.equal(zshard.full_grad(model, "inlet.weight"), torch.ones_like(whole))


def clipped_step(rank: int, world_size: int, strategy: str, read: str) -> list[Tensor]:
    """Whole parameters after a clipped step of 16-bit gradients, and one read of these before."""
    precision = zshard.Precision.bf16(reduce=torch.bfloat16)
    model = zshard.wrap(models.build("blocks"), strategy=strategy, precision=precision)
    optimizer = zshard.SGD(model.parameters(), lr=1.0)
    models.loss_of(model, models.batches("blocks", 1, rank)[0]).backward()
    whole = zshard.full_grad(model, "inlet.weight")
    assert whole is not None
    factor = 1e-2 / zshard.clip_grad_norm_(model, 1e-2)
    if read == "full_grad":
        found = zshard.full_grad(model, "inlet.weight")
        torch.testing.assert_close(found, whole * factor, rtol=2**-7, atol=0)
    elif read == "deepcopy":
        grad = model.get_parameter("inlet.weight").grad
        assert torch.equal(copy.deepcopy(grad).local, (grad * 1.0).local)
    optimizer.step()
    return [zshard.full_param(model, name) for name, _ in model.named_parameters()]


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_read_of_a_clipped_gradient_changes_nothing(world_size: int, strategy: str) -> None:
    expected = run_ranks(clipped_step, world_size, strategy, "none")
    for read in ("full_grad", "deepcopy"):
        for after, without in zip(
            run_ranks(clipped_step, world_size, strategy, read), expected, strict=True
        ):
            assert all(map(torch.equal, after, without)), read


def test_an_alias_of_a_gradient_that_no_sync_held_back_as_it_was_dropped_has_no_values() -> None:
    model = zshard.wrap(models.build("blocks"))
    with zshard.no_sync(model):
        models.loss_of(model, models.batches("blocks", 1)[0]).backward()
    grad = model.get_parameter("inlet.weight").grad
    assert grad is not None
    alias = grad.detach()
    model.zero_grad()
    with pytest.raises(zshard.StateError, match="never reduced"):
        alias * 1.0


def test_a_gradient_first_seen_in_inference_mode_may_be_changed_later() -> None:
    model = zshard.wrap(models.build("blocks"))
    models.loss_of(model, models.batches("blocks", 1)[0]).backward()
    with torch.inference_mode():
        zshard.clip_grad_norm_([*model.parameters()][:3], 1e-3)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()


def clip_held_back(rank: int, world_size: int, norm_type: float) -> None:
    model, _ = backward()
    with zshard.no_sync(model):  # on one rank there would be nothing to hold back
        models.loss_of(model, models.batches("blocks", 1)[0]).backward()
    with pytest.raises(zshard.StateError, match="held back by zshard"):
        zshard.clip_grad_norm_(model, 1.0, norm_type)


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_clipping_gradients_that_no_sync_holds_back_is_refused(norm_type: float) -> None:
    run_ranks(clip_held_back, 2, norm_type)


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_clipping_inside_a_backward_is_refused_and_changes_nothing(norm_type: float) -> None:
    model, _ = backward()
    expected = zshard.full_grad(model, "inlet.weight")
    assert expected is not None

    def hook(*_: object) -> None:
        zshard.clip_grad_norm_(model, 1e-3, norm_type)

    handle = model.get_submodule("outlet").register_full_backward_hook(hook)
    with pytest.raises(zshard.StateError, match="between steps"):
        models.loss_of(model, models.batches("blocks", 1)[0]).backward()
    handle.remove()
    zshard.reset(model)
    model.zero_grad()
    models.loss_of(model, models.batches("blocks", 1)[0]).backward()
    assert torch.equal(zshard.full_grad(model, "inlet.weight"), expected)


def test_a_scaled_step_is_skipped_where_the_norm_of_finite_gradients_has_overflowed() -> None:
    torch.manual_seed(0)
    model = zshard.wrap(nn.Linear(64, 4, bias=False))
    optimizer = zshard.SGD(model.parameters(), lr=0.1)
    scaler = zshard.GradScaler("cpu", init_scale=2.0**100)
    before = zshard.full_param(model, "weight")
    scaler.scale(model(torch.full((1, 64), 1e8)).sum()).backward()  # gradients of 1e38
    assert math.isinf(zshard.clip_grad_norm_(model, math.inf))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(zshard.full_param(model, "weight"), before)
    assert scaler.get_scale() == 2.0**99


@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce", [torch.bfloat16, torch.float16])
def test_a_fused_optimizer_that_would_divide_16_bit_gradients_is_refused(
    param: torch.dtype, reduce: torch.dtype
) -> None:
    model = zshard.wrap(nn.Linear(3, 2).to(param), precision=zshard.Precision(reduce=reduce))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = zshard.GradScaler("cpu", init_scale=1.0)
    scaler.scale(model(torch.ones(4, 3, dtype=param)).float().sum()).backward()
    before = zshard.state_dict(model)
    with pytest.raises(
        zshard.OptimizerError, match=rf"torch\.float32, .*'weight' is {reduce}"
    ) as refused:
        scaler.step(optimizer)
    assert ("scaler.unscale_(optimizer)" in str(refused.value)) == (reduce == torch.bfloat16)
    assert all(map(torch.equal, zshard.state_dict(model).values(), before.values()))


@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fused_optimizer_divides_fp32_gradients_whatever_the_parameters_are(
    param: torch.dtype,
) -> None:
    found = []
    for unscale in (False, True):
        torch.manual_seed(0)
        model = zshard.wrap(
            nn.Linear(3, 2).to(param), precision=zshard.Precision(reduce=torch.float32)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
        scaler = zshard.GradScaler("cpu", init_scale=2.0**5)
        scaler.scale(model(torch.ones(4, 3, dtype=param)).float().sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        found.append(zshard.local_shards(model)["weight"])
    assert torch.equal(*found)


@pytest.mark.parametrize("wrong", [10**400, torch.tensor(1j)])
def test_a_number_that_is_none_is_refused(wrong: object) -> None:
    model, _ = backward()
    with pytest.raises(zshard.InputError, match="max_norm"):
        zshard.clip_grad_norm_(model, wrong)  # type: ignore[arg-type]
    with pytest.raises(zshard.InputError, match="norm_type"):
        zshard.clip_grad_norm_(model, 1.0, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["grad", "data.zero_"])
def test_a_change_of_one_gradient_looks_at_those_of_no_other_unit(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, grad = backward()
    looked_at: set[Gradients] = set()
    look = Gradients._refuse_fp16

    def noted(gradients: Gradients, index: int) -> None:
        looked_at.add(gradients)
        look(gradients, index)

    monkeypatch.setattr(Gradients, "_refuse_fp16", noted)
    CHANGES[change](grad)
    next(model.parameters()).grad = torch.zeros_like(grad)
    assert len(looked_at) <= 1


def fail(*_: object) -> None:
    raise ArithmeticError


def looks_at_one_kept(rank: int, world_size: int) -> None:
    model = zshard.wrap(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)))
    model(torch.ones(2, 4)).sum().backward()
    grad = model[1].bias.grad
    if rank == 1:
        model[0].register_forward_hook(lambda *given: given[2].register_hook(fail) and None)
    loss = model(torch.ones(2, 4)).sum()
    if rank == 1:
        with pytest.raises(ArithmeticError):
            loss.backward()
        zshard.reset(model)
        return
    loss.backward()
    with pytest.raises(zshard.StateError, match="on rank 1 a backward of this step"):
        _ = grad.local


def test_a_look_at_a_gradients_slice_tells_of_a_backward_that_raised_on_another_rank() -> None:
    run_ranks(looks_at_one_kept, 2)
