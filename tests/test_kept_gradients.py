"""A gradient that is kept when it is dropped keeps its values, as plain tensors do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import zshard

PRECISIONS = {
    "fp32": None,
    "bf16": zshard.Precision.bf16(reduce=torch.bfloat16),
    "fp16": zshard.Precision.fp16(reduce=torch.float16),
}


def build(strategy: str = "zero3", precision: str = "fp32") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 2))
    return zshard.wrap(model, strategy=strategy, precision=PRECISIONS[precision])


def backward(model: nn.Module, step: int) -> None:
    (model(torch.full((2, 6), step + 1.0)) * 3.0).sum().backward()


def values(tensors: list[Tensor]) -> list[list[float]]:
    """Of the slices that this rank holds."""
    return [(each * 1.0).local.tolist() for each in tensors]


def slice_of(grad: Tensor, whole: Tensor) -> Tensor:
    """What this rank holds of ``whole``, a gradient like ``grad``."""
    return grad.flat.local(grad.segment).elements.of(whole.reshape(-1))


def keep_across_steps(rank: int, world_size: int, strategy: str, precision: str) -> list[str]:
    """Gradients of three steps, kept as objects and as aliases, while a fourth is made."""
    model = build(strategy, precision)
    opt = zshard.SGD(model.parameters(), lr=0.1)
    # fp16 gradients cannot be looked at once they are unscaled: what is dropped is the user's.
    scaler = zshard.GradScaler(device="cpu", init_scale=4.0, enabled=precision == "fp16")
    wrong, kept = [], []
    for step in range(3):
        scaler.scale((model(torch.full((2, 6), step + 1.0)) * 3.0).sum()).backward()
        whole = [zshard.full_grad(model, name) for name, _ in model.named_parameters()]
        divisor = scaler.get_scale()
        scaler.unscale_(opt)
        norm = float(zshard.clip_grad_norm_(model, 0.5))
        objects = [p.grad for p in model.parameters()]
        aliases = [] if scaler.is_enabled() else [g.detach() for g in objects]
        scaler.step(opt)
        scaler.update()
        (opt if step % 2 == 0 else model).zero_grad()
        if any(p.grad is not None for p in model.parameters()):
            wrong.append("there after zero_grad")
        factor = min(0.5 / (norm + 1e-6), 1.0) / divisor
        expected = [
            slice_of(grad, each).float() * factor for grad, each in zip(objects, whole, strict=True)
        ]
        kept.append((expected, objects, aliases))
    (model(torch.ones(2, 6)) * 3.0).sum().backward()
    new = [p.grad for p in model.parameters()]
    for step, (expected, objects, aliases) in enumerate(kept):
        for each in (objects, aliases or objects):
            for name, grad, values in zip(
                dict(model.named_parameters()), each, expected, strict=True
            ):
                if not torch.allclose(grad.local, values, rtol=1e-4, atol=0.0):
                    wrong.append(f"step {step}, {name}: {grad.local} instead of {values}")
        wrong += [f"step {step}: kept object" for a, b in zip(new, objects, strict=True) if a is b]
    if torch.allclose(kept[0][0][0], kept[1][0][0], rtol=1e-3, atol=0.0):
        wrong.append("steps have the same gradients")
    return wrong


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize(("world_size", "strategy"), [(1, "zero3"), (2, "zero3"), (2, "ddp")])
def test_gradients_kept_across_zero_grad_keep_their_values(
    world_size: int, strategy: str, precision: str
) -> None:
    assert run_ranks(keep_across_steps, world_size, strategy, precision) == [[]] * world_size


def test_a_gradient_that_accumulates_stays_one_object() -> None:
    model = build()
    plain = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 2))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        theirs.data = mine.local.detach().view(mine.shape).clone()
    kept = []
    for each in (model, plain):
        backward(each, 0)
        objects = [p.grad for p in each.parameters()]
        kept.append(objects + [g.detach() for g in objects])
        backward(each, 1)
        each.zero_grad(set_to_none=False)
        backward(each, 2)
    for mine, theirs in zip(*kept, strict=True):
        assert torch.equal((mine * 1.0).local, theirs.reshape(-1))
    assert all(p.grad is g for p, g in zip(model.parameters(), kept[0], strict=False))


def fail(*_: object) -> None:
    raise ArithmeticError


def test_a_gradient_that_an_exception_drops_is_left_as_it_was() -> None:
    model = build()
    backward(model, 0)
    kept = [p.grad for p in model.parameters()]
    before = values(kept)
    output = model(torch.ones(2, 6))
    output.register_hook(fail)
    with pytest.raises(ArithmeticError):
        output.sum().backward()
    zshard.reset(model)
    backward(model, 1)
    assert values(kept) == before
    assert not any(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))


def replace(p: Tensor) -> None:
    p.grad = torch.full(p.shape, 7.0)


def replace_by_sparse(p: Tensor) -> None:
    p.grad = torch.full(p.shape, 7.0).to_sparse()


def drop_and_replace(p: Tensor) -> None:
    p.grad = None
    p.grad = torch.full(p.shape, 7.0)


@pytest.mark.parametrize("change", [replace, replace_by_sparse, drop_and_replace])
def test_a_gradient_that_is_replaced_is_left_as_it_was(change: Callable[[Tensor], None]) -> None:
    model = build()
    backward(model, 0)
    p = next(model.parameters())
    kept, alias = p.grad, p.grad.detach()
    before = values([kept])
    change(p)
    assert values([kept]) == values([alias]) == before
    assert values([p.grad]) == [[7.0] * p.numel()]
    with pytest.raises(zshard.InputError, match=r"gradient of 0\.weight"):
        list(model.parameters())[1].grad = kept
    assert list(model.parameters())[1].grad is not None


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("shape", [(), (7,)])
def test_a_gradient_or_data_of_another_shape_is_refused_and_changes_nothing(
    shape: tuple[int, ...], held: bool
) -> None:
    model = build()
    with zshard.no_sync(model) if held else nullcontext():
        backward(model, 0)
    p = next(model.parameters())
    kept, data, whole = p.grad, p.data, zshard.full_param(model, "0.weight")
    for attribute in ("grad", "data"):
        with pytest.raises(zshard.InputError, match=r"0\.weight: cannot copy a tensor of shape"):
            setattr(p, attribute, torch.ones(shape))
    assert p.grad is kept and torch.equal(zshard.full_param(model, "0.weight"), whole)
    data.fill_(1.0)  # the parameter's own memory still
    assert torch.equal(zshard.full_param(model, "0.weight"), torch.ones_like(whole))
    data.copy_(whole)
    backward(model, 1)
    expected = build()
    backward(expected, 0)
    backward(expected, 1)
    names = [name for name, _ in model.named_parameters()]
    found, wanted = ([zshard.full_grad(m, name) for name in names] for m in (model, expected))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_one_dropped_gradient_is_left_out_of_what_is_clipped_and_scaled_later() -> None:
    model = build()
    backward(model, 0)
    p = next(model.parameters())
    kept, before = p.grad, values([p.grad])
    p.grad = None
    zshard.clip_grad_norm_(model, 1e-3)
    assert values([kept]) == before
    kept.mul_(2.0)
    assert values([kept]) == [[2.0 * x for x in before[0]]]


def test_a_gradient_dropped_while_no_sync_held_it_has_no_values() -> None:
    model = build()
    with zshard.no_sync(model):
        backward(model, 0)
    p = next(model.parameters())
    kept = p.grad
    model.zero_grad()
    with pytest.raises(zshard.StateError, match=r"0\.weight.*dropped while zshard\.no_sync"):
        kept.mul(2.0)
    backward(model, 1)
    assert (p.grad * 1.0).local.abs().sum() > 0


def test_what_was_kept_of_a_gradient_outlives_a_later_one_that_no_sync_held() -> None:
    model = build()
    backward(model, 0)
    alias = next(model.parameters()).grad.detach()
    before = values([alias])
    model.zero_grad()
    with zshard.no_sync(model):
        backward(model, 1)
    model.zero_grad()
    assert values([alias]) == before


def test_where_nobody_keeps_a_gradient_no_object_is_made_anew() -> None:
    model = build()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, 0)
    objects = [weakref.ref(p.grad) for p in model.parameters()]
    memory = next(model.parameters()).grad.local.data_ptr()
    for step in range(2):
        opt.step()
        opt.zero_grad()
        backward(model, step)
        assert all(there() is p.grad for there, p in zip(objects, model.parameters(), strict=True))
        assert next(model.parameters()).grad.local.data_ptr() == memory
