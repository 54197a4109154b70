"""Optimizers on shards: zshard.AdamW with groups and schedulers, torch.optim's elementwise."""

from __future__ import annotations

import copy
from collections.abc import Callable

import models
import pytest
import torch
from ranks import run_ranks
from steps import batch
from torch import nn
from torch.optim import lr_scheduler
from training import STEPS, Plain, Record, Wrapped, adamw, assert_close, assert_same_bits, train

import zshard

TORCH_OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw_fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-6, fused=True),
    "adamw_foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-6, foreach=True),
    "adamw_loop": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-6, foreach=False),
    "adam_amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-6, amsgrad=True),
    "adamw_foreach_amsgrad": lambda m: torch.optim.AdamW(
        m.parameters(), lr=1e-2, eps=1e-6, foreach=True, amsgrad=True
    ),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=5e-2),
    "sgd_momentum": lambda m: torch.optim.SGD(
        m.parameters(), lr=5e-2, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "sgd_fused": lambda m: torch.optim.SGD(m.parameters(), lr=5e-2, momentum=0.9, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3, eps=1e-4, momentum=0.5),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2, eps=1e-6),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=1e-3, foreach=False),
    "rprop_foreach": lambda m: torch.optim.Rprop(m.parameters(), lr=1e-3, foreach=True),
}


SGDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "plain sgd": lambda m: zshard.SGD(m.parameters(), lr=5e-2),
    "nesterov sgd": lambda m: zshard.SGD(
        m.parameters(), lr=5e-2, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "dampened sgd": lambda m: zshard.SGD(
        [{"params": [p], "momentum": 0.0 if p.ndim < 2 else 0.8} for p in m.parameters()],
        lr=5e-2,
        dampening=0.1,
    ),
}


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Decay matrices only, by p.ndim, which must be the global one; each group its own rates."""
    parameters = list(model.parameters())
    return zshard.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.3},
            {"params": [p for p in parameters if p.ndim < 2], "lr": 3e-2, "betas": (0.5, 0.8)},
        ],
        lr=1e-2,
        eps=1e-6,
        weight_decay=0.0,
    )


def both_sides(
    rank: int, world_size: int, name: str, optimizer: str, scheduler: str | None
) -> tuple[Record, Record]:
    """Train wrapped and plain (DDP) with one optimizer and scheduler."""
    make = {"adamw": adamw, "grouped": grouped, **TORCH_OPTIMIZERS, **SGDS}[optimizer]
    records = []
    for is_wrapped in (True, False):
        model = models.build(name)
        if is_wrapped:
            side: Plain | Wrapped = Wrapped(zshard.wrap(model))
        else:
            side = Plain(model, world_size, models.CASES[name].unused)
        built = make(model)
        after_step: Callable[[], object] = lambda: None  # noqa: E731
        if scheduler == "cosine":
            after_step = lr_scheduler.CosineAnnealingLR(built, T_max=STEPS).step
        elif scheduler == "one_cycle":  # moves beta1 as well
            after_step = lr_scheduler.OneCycleLR(built, max_lr=3e-2, total_steps=STEPS + 1).step
        data = models.batches(name, STEPS, rank)
        records.append(train(side, built, data, after_step=after_step))
    return records[0], records[1]


@pytest.mark.parametrize("optimizer", TORCH_OPTIMIZERS)
def test_torchs_elementwise_optimizers_train_shards_as_they_train_tensors(optimizer: str) -> None:
    # torch's kernels round by position in a tensor: last bits differ, and ten steps carry them on.
    for actual, expected in run_ranks(both_sides, 2, "odd_parameters", optimizer, None):
        assert_close(actual, expected, tolerance=1e-5)


def with_bf16_gradients(rank: int, world_size: int, optimizer: str) -> tuple[float, float]:
    """The last loss with gradients reduced in bf16 and in fp32."""
    last = []
    for reduce in (torch.bfloat16, torch.float32):
        model = zshard.wrap(models.build("blocks"), precision=zshard.Precision.bf16(reduce=reduce))
        built = TORCH_OPTIMIZERS[optimizer](model)
        record = train(Wrapped(model), built, models.batches("blocks", STEPS, rank))
        last.append(float(record.losses[-1]))
    return last[0], last[1]


@pytest.mark.parametrize("optimizer", ["adamw_fused", "adamw_foreach", "adamw_loop", "sgd_fused"])
def test_torchs_optimizers_take_gradients_that_were_reduced_in_bf16(optimizer: str) -> None:
    for actual, expected in run_ranks(with_bf16_gradients, 2, optimizer):
        assert actual == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("optimizer", ["adamw_fused", "sgd_momentum"])
def test_torchs_optimizers_leave_unused_parameters_alone(optimizer: str) -> None:
    for actual, expected in run_ranks(both_sides, 2, "unused", optimizer, None):
        assert_close(actual, expected, tolerance=1e-5)
        start = models.build("unused").get_parameter("blocks.1.up.weight")
        assert torch.equal(actual.parameters["blocks.1.up.weight"], start)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        *(("grouped", None), ("grouped", "cosine"), ("adamw", "cosine"), ("adamw", "one_cycle")),
        *((sgd, "cosine") for sgd in SGDS),
    ],
)
def test_groups_and_schedulers_give_the_plain_models_bits(
    optimizer: str, scheduler: str | None, world_size: int
) -> None:
    if world_size == 1:
        results = [both_sides(0, 1, "odd_parameters", optimizer, scheduler)]
    else:
        results = run_ranks(both_sides, 2, "odd_parameters", optimizer, scheduler)
    for actual, expected in results:
        assert_same_bits(actual, expected)


def resumed(rank: int, world_size: int) -> tuple[Record, Record]:
    """Ten steps at a stretch, and five and five with a new optimizer loaded in between."""
    data = models.batches("odd_parameters", STEPS, rank)
    model = zshard.wrap(models.build("odd_parameters"))
    straight = train(Wrapped(model), grouped(model), data)
    model = zshard.wrap(models.build("odd_parameters"))
    first = grouped(model)
    train(Wrapped(model), first, data[:5])
    state = copy.deepcopy(first.state_dict())
    second = grouped(model)
    for group in second.param_groups:
        group["lr"] = 123.0  # the loaded state has to win
    second.load_state_dict(state)
    tail = train(Wrapped(model), second, data[5:])
    straight.losses, straight.gradients = straight.losses[5:], straight.gradients[5:]
    return tail, straight


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_state_loaded_into_a_new_optimizer_goes_on_bit_by_bit(
    world_size: int,
) -> None:
    results = [resumed(0, 1)] if world_size == 1 else run_ranks(resumed, world_size)
    for actual, expected in results:
        assert_same_bits(actual, expected)


def test_a_new_optimizer_without_the_state_does_not_go_on_the_same() -> None:
    data = models.batches("blocks", STEPS)
    model = zshard.wrap(models.build("blocks"))
    straight = train(Wrapped(model), adamw(model), data)
    model = zshard.wrap(models.build("blocks"))
    train(Wrapped(model), adamw(model), data[:5])
    tail = train(Wrapped(model), adamw(model), data[5:])
    assert not torch.equal(tail.losses[-1], straight.losses[-1])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"weight_decay": 0.0}, {"weight_decay": 0.0}),
        (
            {"betas": (0.5, 0.9), "lr": 0.1, "eps": 1e-3},
            {"betas": (0.5, 0.9), "lr": 0.1, "eps": 1e-3},
        ),
    ],
    ids=["defaults", "no_decay", "other"],
)
def test_zshards_adamw_is_torchs_within_rounding_on_a_plain_model(
    ours: dict[str, object], theirs: dict[str, object]
) -> None:
    model, other = models.build("blocks"), models.build("blocks")
    optimizer, reference = (
        zshard.AdamW(model.parameters(), **ours),
        torch.optim.AdamW(other.parameters(), **theirs),
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-7)


def test_a_parameter_group_added_later_is_trained() -> None:
    model = zshard.wrap(models.build("blocks"))
    parameters = dict(model.named_parameters())
    late = parameters.pop("inlet.weight")
    optimizer = zshard.AdamW(parameters.values(), lr=1e-2)
    start = zshard.full_param(model, "inlet.weight").clone()
    values = []
    for step in range(2):
        models.loss_of(model, models.batches("blocks", 1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(zshard.full_param(model, "inlet.weight").clone())
        if step == 0:
            optimizer.add_param_group({"params": [late], "lr": 0.5})
    assert torch.equal(values[0], start)
    assert not torch.equal(values[1], start)


def test_step_runs_a_closure_and_returns_its_loss() -> None:
    model = zshard.wrap(models.build("blocks"))
    optimizer = adamw(model)
    batch = models.batches("blocks", 1)[0]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = models.loss_of(model, batch)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "arguments",
    [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}, {"weight_decay": -0.1}],
    ids=str,
)
def test_impossible_hyper_parameters_are_refused_by_name(arguments: dict[str, object]) -> None:
    with pytest.raises(zshard.Error, match=next(iter(arguments))):
        zshard.AdamW(models.build("blocks").parameters(), **arguments)


def sgd_against_torchs(momentum: float, **options: object) -> tuple[Record, Record]:
    records = []
    for kind in (zshard.SGD, torch.optim.SGD):
        model = models.build("odd_parameters")
        model = zshard.wrap(model) if kind is zshard.SGD else model
        side = Wrapped(model) if kind is zshard.SGD else Plain(model)
        optimizer = kind(model.parameters(), lr=1e-2, momentum=momentum, **options)
        records.append(train(side, optimizer, models.batches("odd_parameters", STEPS)))
    return records[0], records[1]


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.5, "maximize": True},
    ],
    ids=str,
)
def test_zshards_sgd_is_torchs_within_rounding(options: dict[str, object]) -> None:
    actual, expected = sgd_against_torchs(**options)
    assert_close(actual, expected, tolerance=1e-5)


@pytest.mark.parametrize("momenta", [(0.0, 0.0, 0.9, 0.9), (0.9, 0.9, 0.0, 0.9)])
def test_momentum_comes_later_or_again_as_torchs_does(momenta: tuple[float, ...]) -> None:
    sides = []
    for kind in (zshard.SGD, torch.optim.SGD):
        parameter = nn.Parameter(torch.ones(5))
        optimizer = kind([parameter], lr=0.1, dampening=0.5)
        for step, momentum in enumerate(momenta):
            optimizer.param_groups[0]["momentum"] = momentum
            parameter.grad = torch.full((5,), 1.0 + step)
            optimizer.step()
        sides.append(parameter.detach())
    torch.testing.assert_close(sides[0], sides[1])


def test_sgd_without_momentum_keeps_no_state() -> None:
    model = zshard.wrap(models.build("blocks"))
    optimizer = zshard.SGD(model.parameters())
    models.loss_of(model, models.batches("blocks", 1)[0]).backward()
    optimizer.step()
    assert zshard.memory(model)["now"]["optimizer"] == 0


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"momentum": -0.1}, {"nesterov": True}, {"weight_decay": float("nan")}],
    ids=str,
)
def test_impossible_options_of_sgd_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(zshard.InputError, match=next(iter(options))):
        zshard.SGD([nn.Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_optimizer_with_states_of_whole_tensors_is_told_what_takes_them(
    foreach: bool,
) -> None:
    plain = models.Blocks()
    models.loss_of(plain, batch(0, 0)).backward()
    before = torch.optim.AdamW(plain.parameters(), foreach=foreach)
    before.step()
    plain.zero_grad()
    model = zshard.wrap(plain)
    after = torch.optim.AdamW(model.parameters(), foreach=foreach)
    after.load_state_dict(before.state_dict())
    models.loss_of(model, batch(0, 1)).backward()
    values = zshard.state_dict(model)
    with pytest.raises(zshard.OptimizerError, match=r"'exp_avg' of inlet\.weight is of the whole"):
        after.step()
    for name, value in zshard.state_dict(model).items():
        assert torch.equal(value, values[name]), "half a step was made"
    optimizer = zshard.AdamW(model.parameters())
    optimizer.load_state_dict(before.state_dict())
    optimizer.step()


def test_a_state_of_other_groups_is_refused_by_its_groups() -> None:
    model = zshard.wrap(models.Blocks())
    first, *rest = model.parameters()
    two = zshard.AdamW([{"params": [first]}, {"params": rest}])
    with pytest.raises(zshard.OptimizerError, match=rf"groups of \[1, {len(rest)}\] parameters"):
        zshard.AdamW(model.parameters()).load_state_dict(two.state_dict())
