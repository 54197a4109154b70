"""clip_grad_norm_: the global norm on every rank, and steps that equal a clipped plain run."""

from __future__ import annotations

import math

import models
import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from training import STEPS, Plain, Record, Wrapped, adamw, assert_close, assert_same_bits, train

import zshard
from zshard.calls.clip import _limit

# The norm is summed shard by shard, so the clip factor differs in its last bits from a sum over
# whole tensors; ten AdamW steps carry that on.
TOLERANCE = 1e-5

LIMIT = 0.05  # far below the first norm of every case


def both_sides(
    rank: int, world_size: int, name: str, clip: tuple[float, float], sgd: bool = False
) -> tuple[Record, Record]:
    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) if sgd else adamw(model)

    data = models.batches(name, STEPS, rank)
    plain = Plain(models.build(name), world_size, models.CASES[name].unused)
    expected = train(plain, optimizer(plain.module), data, clip=clip)
    model = zshard.wrap(models.build(name))
    return train(Wrapped(model), optimizer(model), data, clip=clip), expected


def assert_clipped_alike(results: list[tuple[Record, Record]], tolerance: float) -> None:
    for actual, expected in results:
        assert_close(actual, expected, tolerance)
        assert expected.norms[0] > LIMIT, "nothing was clipped"
    norms = [torch.stack(actual.norms) for actual, _ in results]
    assert all(torch.equal(norm, norms[0]) for norm in norms), "ranks disagree about the norm"


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf, "inf"])
def test_every_norm_at_one_rank_equals_torchs(norm_type: float) -> None:
    assert_clipped_alike([both_sides(0, 1, "blocks", (LIMIT, norm_type))], TOLERANCE)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_norm_over_ranks_equals_ddps(world_size: int, norm_type: float) -> None:
    results = run_ranks(both_sides, world_size, "blocks", (LIMIT, norm_type))
    assert_clipped_alike(results, 2 * TOLERANCE)


def largest_gradient(rank: int, world_size: int) -> tuple[float, float]:
    """The inf-norm of a model with zero-size parameters, which torch's own clipping refuses."""
    model = zshard.wrap(models.build("odd_parameters"))
    models.loss_of(model, models.batches("odd_parameters", 1, rank)[0]).backward()
    grads = [zshard.full_grad(model, name) for name, _ in model.named_parameters()]
    largest = max(float(grad.abs().max()) for grad in grads if grad.numel())
    return float(zshard.clip_grad_norm_(model, 1.0, math.inf)), largest


def test_the_inf_norm_passes_over_zero_size_parameters() -> None:
    for norm, largest in run_ranks(largest_gradient, 2):
        assert norm == largest


@pytest.mark.parametrize("name", ["tied_across_units", "tied_in_one_unit", "unused", "frozen"])
def test_tied_unused_and_frozen_parameters_are_counted_once_or_not_at_all(name: str) -> None:
    for actual, expected in run_ranks(both_sides, 2, name, (LIMIT, 2.0)):
        assert_close(actual, expected, TOLERANCE)


def test_torchs_optimizer_steps_with_the_clipped_gradients() -> None:
    for actual, expected in run_ranks(both_sides, 2, "blocks", (LIMIT, 2.0), True):
        assert_close(actual, expected, TOLERANCE)
        assert expected.norms[0] > LIMIT, "nothing was clipped"


def in_fp64(
    rank: int, world_size: int, norm_type: float, whole: bool, huge: float
) -> list[tuple[Tensor, Tensor]]:
    """The norm and the clipped gradients of an fp64 model, and a plain model's."""

    def loss_of(model: torch.nn.Module, rank: int) -> Tensor:
        batch = models.batches("blocks", 1, rank)[0].double()
        return (model(batch) * huge).square().mean()

    model, plain = zshard.wrap(models.build("blocks").double()), models.build("blocks").double()
    for each in range(world_size):
        (loss_of(plain, each) / world_size).backward()
    loss_of(model, rank).backward()
    target = model if whole else [p for n, p in model.named_parameters() if "inlet" not in n]
    theirs = [p for n, p in plain.named_parameters() if whole or "inlet" not in n]
    pairs = [
        (
            zshard.clip_grad_norm_(target, LIMIT, norm_type),
            torch.nn.utils.clip_grad_norm_(theirs, LIMIT, norm_type),
        )
    ]
    for name, parameter in plain.named_parameters():
        grad = zshard.full_grad(model, name)
        assert grad is not None and parameter.grad is not None
        pairs.append((grad, parameter.grad))
    return pairs


@pytest.mark.parametrize("huge", [1.0, 1e30])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_an_fp64_model_is_clipped_in_fp64(norm_type: float, whole: bool, huge: float) -> None:
    for pairs in run_ranks(in_fp64, 2, norm_type, whole, huge):
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


class TwoDtypes(torch.nn.Module):
    """An fp32 layer whose output an fp64 parameter scales."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(3, 5)
        self.scale = torch.nn.Parameter(torch.rand(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:  # x (B, 3) -> (B, 5) fp64
        return self.layer(x) * self.scale


def test_a_factor_in_fp64_serves_the_fp32_parameters_of_a_fused_optimizer_too() -> None:
    trained = []
    for kind in (zshard.AdamW, torch.optim.AdamW):
        wrapped = kind is zshard.AdamW
        model = zshard.wrap(TwoDtypes()) if wrapped else TwoDtypes()
        optimizers = [kind(model.layer.parameters()), torch.optim.SGD([model.scale], 0.1)]
        for batch in models.batches("blocks", 3):
            model(batch).square().mean().backward()
            if wrapped:
                norm = zshard.clip_grad_norm_(model, LIMIT)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        state = zshard.state_dict(model) if wrapped else model.state_dict()
        trained.append({**state, "norm": norm})
    for name, expected in trained[1].items():
        torch.testing.assert_close(trained[0][name], expected, rtol=1e-6, atol=0, msg=name)


def run(clip: tuple[float, float] | None) -> Record:
    model = zshard.wrap(models.build("blocks"))
    record = train(Wrapped(model), adamw(model), models.batches("blocks", STEPS), clip=clip)
    record.norms = []
    return record


def test_a_norm_below_the_limit_changes_no_bit() -> None:
    assert_same_bits(run((1e6, 2.0)), run(None))


def test_clipping_changes_the_steps_at_all() -> None:
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(run((LIMIT, 2.0)), run(None))


def planted(
    rank: int, world_size: int, value: float, norm_type: float, strict: bool
) -> tuple[str, Tensor, Tensor]:
    """A non-finite loss on the last rank only: what every rank sees of it."""
    model = zshard.wrap(models.build("blocks"))
    before = zshard.full_param(model, "inlet.weight").clone()
    loss = models.loss_of(model, models.batches("blocks", 1, rank)[0])
    (loss * (value if rank == world_size - 1 else 1.0)).backward()
    try:
        norm = zshard.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=strict)
    except RuntimeError as error:
        return str(error), zshard.full_param(model, "inlet.weight").clone(), before
    return f"norm {float(norm)}", zshard.full_param(model, "inlet.weight").clone(), before


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_gradient_on_one_rank_is_seen_by_all(value: float, norm_type: float) -> None:
    seen = {message for message, _, _ in run_ranks(planted, 2, value, norm_type, False)}
    assert len(seen) == 1 and seen <= {"norm nan", "norm inf"}


class OneNaN(torch.nn.Module):
    """Two parameters, each in the shard of one of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # x (2,), of the gradients
        return self.first.sum() * x[0] + self.second.sum() * x[1]


def one_nan(
    rank: int, world_size: int, norm_type: float, where: int, comm: str
) -> tuple[float, bool]:
    model = zshard.wrap(OneNaN(), comm=comm)
    model(torch.tensor([math.nan if each == where else 7.0 for each in range(2)])).backward()
    mine = (model.first, model.second)[rank].grad.local  # type: ignore[union-attr]
    return float(zshard.clip_grad_norm_(model, 1.0, norm_type)), bool(mine.isnan().all())


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_nan_in_one_shard_is_not_lost_in_the_maximum_over_ranks(
    norm_type: float, where: int, comm: str
) -> None:
    for rank, (norm, has_it) in enumerate(run_ranks(one_nan, 2, norm_type, where, comm)):
        assert math.isnan(norm) and has_it == (rank == where)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_error_if_nonfinite_raises_on_every_rank_and_changes_nothing(norm_type: float) -> None:
    for message, after, before in run_ranks(planted, 2, math.nan, norm_type, True):
        assert "non-finite" in message and "norm" in message
        assert torch.equal(after, before)


def after_a_nan(rank: int, world_size: int, set_to_none: bool) -> Tensor:
    """The norm of a step that follows one whose clip factor was NaN."""
    model = zshard.wrap(models.build("odd_parameters"))
    nan, finite = models.batches("odd_parameters", 2, rank)
    (models.loss_of(model, nan) * math.nan).backward()
    assert math.isnan(zshard.clip_grad_norm_(model, 1.0))
    model.zero_grad(set_to_none)
    models.loss_of(model, finite).backward()
    return zshard.clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_nan_norm_is_gone_after_zero_grad_from_the_padding_too(world_size: int) -> None:
    for set_to_none in (False, True):
        if world_size == 1:
            norms = [after_a_nan(0, 1, set_to_none)]
        else:
            norms = run_ranks(after_a_nan, world_size, set_to_none)
        assert all(norm.isfinite() for norm in norms), f"set_to_none={set_to_none}: {norms}"


def by_trained_parameters(rank: int, world_size: int) -> tuple[Tensor, Tensor, int]:
    """The norm by the model and by its trained parameters, and what the latter communicates."""
    norms = []
    for by_parameters in (False, True):
        model = zshard.wrap(models.build("frozen"))
        models.loss_of(model, models.batches("frozen", 1, rank)[0]).backward()
        calls = zshard.stats(model).calls["all_reduce"]
        target = [p for p in model.parameters() if p.requires_grad] if by_parameters else model
        norms.append(zshard.clip_grad_norm_(target, 0.05))
    return norms[0], norms[1], zshard.stats(model).calls["all_reduce"] - calls


def test_clipping_by_all_trained_parameters_is_clipping_by_model() -> None:
    for by_model, by_parameters, calls in run_ranks(by_trained_parameters, 2):
        assert torch.equal(by_model, by_parameters) and calls == 0


def look_on_one_rank(rank: int, world_size: int, norm_type: float, look: bool) -> list[float]:
    model = zshard.wrap(models.build("blocks"))
    models.loss_of(model, models.batches("blocks", 1, rank)[0]).backward()
    norms = []
    for limit in (0.2, 0.05, 0.01):
        norms.append(float(zshard.clip_grad_norm_(model, limit, norm_type)))
        if look and rank == 0:
            parameter = model.get_parameter("outlet.bias")
            parameter.grad.local.abs()  # applies what is pending on this rank
            assert parameter.flat.schedule.totals.grad_scale is None
    return norms


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_ranks_agree_on_every_norm_though_one_has_looked_in_between(norm_type: float) -> None:
    first, second = run_ranks(look_on_one_rank, 2, norm_type, True)
    assert first == second
    undisturbed = run_ranks(look_on_one_rank, 2, norm_type, False)[0]
    assert first == pytest.approx(undisturbed, rel=1e-6)
    assert first[1:] == pytest.approx([0.2, 0.05], rel=1e-4)


def test_a_limit_on_another_device_is_taken_in_the_norms_dtype_and_not_waited_for() -> None:
    limit = _limit(torch.ones(1, dtype=torch.float64, device="meta"), torch.float32)
    assert (type(limit), limit.dtype, limit.ndim) == (Tensor, torch.float32, 0)


def assert_same_gradients(model: torch.nn.Module, plain: torch.nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        clipped = zshard.full_grad(model, name)
        torch.testing.assert_close(clipped, parameter.grad, rtol=1e-5, atol=1e-9, msg=name)


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_a_limit_that_is_not_waited_for_clips(
    monkeypatch: pytest.MonkeyPatch, norm_type: float
) -> None:
    # As on a GPU: by a tensor whose value the host does not know.
    monkeypatch.setattr("zshard.calls.clip._limit", lambda limit, dtype: limit.to(dtype))
    model, plain = zshard.wrap(models.build("blocks")), models.build("blocks")
    for each in (model, plain):
        models.loss_of(each, models.batches("blocks", 1)[0]).backward()
    limit = torch.tensor(LIMIT, dtype=torch.float64)
    ours = zshard.clip_grad_norm_(model, limit, norm_type)
    theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), LIMIT, norm_type)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert_same_gradients(model, plain)


def test_an_fp64_model_is_clipped_twice_after_its_fp32_loss_scale_was_taken_away() -> None:
    model, plain = (each.double() for each in (models.build("blocks"), models.build("blocks")))
    model = zshard.wrap(model)
    norms = []
    for each, scaler, clip in (
        (model, zshard.GradScaler("cpu", 1024.0), zshard.clip_grad_norm_),
        (plain, torch.amp.GradScaler("cpu", 1024.0), torch.nn.utils.clip_grad_norm_),
    ):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        scaler.scale(each(models.batches("blocks", 1)[0].double()).square().mean()).backward()
        scaler.unscale_(optimizer)
        target = each if each is model else [*each.parameters()]
        norms.append([float(clip(target, limit)) for limit in (0.2, LIMIT)])
        scaler.step(optimizer)
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(zshard.state_dict(model)[name], value, rtol=1e-12, atol=0)


def test_clipping_without_any_gradient_gives_zero() -> None:
    model = zshard.wrap(models.build("blocks"))
    assert float(zshard.clip_grad_norm_(model, 1.0)) == 0.0


@pytest.mark.parametrize("norm_types", [(2.0, 2.0), (math.inf, 2.0), (2.0, 1.0), (1.0, 2.0)])
def test_clipping_twice_clips_the_clipped(norm_types: tuple[float, float]) -> None:
    model, plain = zshard.wrap(models.build("blocks")), models.build("blocks")
    batch = models.batches("blocks", 1)[0]
    models.loss_of(model, batch).backward()
    models.loss_of(plain, batch).backward()
    for limit, norm_type in zip((0.2, 0.05), norm_types, strict=True):
        ours = zshard.clip_grad_norm_(model, limit, norm_type)
        theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert_same_gradients(model, plain)
