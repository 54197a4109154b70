"""Frozen parameters: no gradient memory, no traffic; and freezing and unfreezing between steps."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
import torch
from models import Blocks
from ranks import run_ranks
from steps import batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zshard
from zshard.wrap import schedule_of

STEPS = 8
STRATEGIES = ["zero1", "zero2", "zero3", "ddp"]


class LoRA(nn.Module):
    """A frozen matrix and a trained one of low rank beside it, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7).requires_grad_(False)
        self.down = nn.Linear(7, 2, bias=False)
        self.up = nn.Linear(2, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x).tanh() + self.up(self.down(x))


class Adapted(Blocks):
    def __init__(self) -> None:
        super().__init__(block=LoRA)


def whole_block(model: nn.Module, step: int) -> None:
    """Unfreeze the blocks one after the other, from the last."""
    for index, block in enumerate(model.blocks):
        block.requires_grad_(index >= 2 - step // 2)


def single_parameters(model: nn.Module, step: int) -> None:
    """Freeze another parameter of every unit at each step."""
    for block in (*model.blocks, model.inlet):
        for index, parameter in enumerate(block.parameters()):
            parameter.requires_grad_(index != step % 3)


def back_and_forth(model: nn.Module, step: int) -> None:
    """Freeze everything but the root, and thaw it again."""
    model.blocks.requires_grad_(step % 2 == 0)


PLANS: dict[str, Callable[[nn.Module, int], None]] = {
    plan.__name__: plan for plan in (whole_block, single_parameters, back_and_forth)
}


def train(
    rank: int, world_size: int, plan: str, strategy: str | None, build: Callable[[], nn.Module]
) -> list[tuple[str, Tensor | None]]:
    """Losses, gradients and final parameters; plain (a new DDP each step) without a strategy."""
    torch.manual_seed(0)
    model = build()
    if strategy is not None:
        zshard.wrap(model, strategy=strategy)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    log: list[tuple[str, Tensor | None]] = []
    for step in range(STEPS):
        PLANS[plan](model, step)
        run = model
        if strategy is None and world_size > 1:
            run = DistributedDataParallel(model)
        loss = models.loss_of(run, batch(rank, step))
        loss.backward()
        log.append((f"loss {step}", loss.detach()))
        for name, parameter in model.named_parameters():
            grad = parameter.grad if strategy is None else zshard.full_grad(model, name)
            log.append((f"gradient {step} {name}", None if grad is None else grad.clone()))
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        whole = parameter.detach() if strategy is None else zshard.full_param(model, name)
        log.append((name, whole))
    return log


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("plan", PLANS)
def test_freezing_between_steps_has_the_plain_models_bits(
    plan: str, strategy: str, world_size: int
) -> None:
    arguments = (plan, strategy, Blocks), (plan, None, Blocks)
    if world_size == 1:
        results = [tuple(train(0, 1, *each) for each in arguments)]
    else:
        results = list(zip(*(run_ranks(train, 2, *each) for each in arguments), strict=True))
    for actual, expected in results:
        for (what, ours), (_, theirs) in zip(actual, expected, strict=True):
            assert (ours is None) == (theirs is None), what
            assert ours is None or torch.equal(ours, theirs), what


def frozen_costs(rank: int, world_size: int, strategy: str) -> tuple[int, int, dict[str, int]]:
    """Elements trained, bytes of gradients, and bytes sent, of a step with adapters."""
    torch.manual_seed(0)
    model = zshard.wrap(Adapted(), strategy=strategy)
    optimizer = zshard.AdamW(model.parameters())
    for step in range(3):
        zshard.stats(model).reset()
        models.loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = sum(
        flat.layout.numel
        for unit in schedule_of(model).units
        for flat in unit.flats
        if flat.requires_grad
    )
    gradients = zshard.memory(model)["now"]["gradients"]
    return trained, gradients, dict(zshard.stats(model).sent_bytes)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_frozen_beside_adapters_takes_no_gradient_memory_and_no_traffic(
    strategy: str,
) -> None:
    for trained, gradients, sent in run_ranks(frozen_costs, 2, strategy):
        whole = strategy in ("zero1", "ddp")
        assert gradients == 4 * trained // (1 if whole else 2)
        assert sent["reduce_scatter"] == 4 * trained // 2


def freeze_and_look(rank: int, world_size: int) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = zshard.wrap(Blocks())
    models.loss_of(model, batch(rank, 0)).backward()
    full = zshard.memory(model)["now"]["gradients"]
    model.zero_grad()
    model.blocks.requires_grad_(False)
    models.loss_of(model, batch(rank, 1)).backward()
    zshard.stats(model).reset()
    models.loss_of(model, batch(rank, 2)).backward()
    root = schedule_of(model).units[0].flats[0]
    assert zshard.stats(model).sent_bytes["reduce_scatter"] == 4 * root.layout.shard_size
    return full, zshard.memory(model)["now"]["gradients"], root.layout.shard_size


def test_freezing_units_gives_their_gradient_memory_back() -> None:
    for full, now, root in run_ranks(freeze_and_look, 2):
        assert full > now == 4 * root


def frozen_on_one_rank(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = zshard.wrap(Blocks())
    model.blocks[1].up.weight.requires_grad_(rank == 0)
    with pytest.raises(zshard.MismatchError) as caught:
        models.loss_of(model, batch(rank, 0)).backward()
    model.blocks[1].up.weight.requires_grad_(True)
    models.loss_of(model, batch(rank, 0)).backward()
    return str(caught.value)


def test_a_parameter_frozen_on_one_rank_alone_is_refused_by_name_on_every_rank() -> None:
    for message in run_ranks(frozen_on_one_rank, 2):
        assert "blocks.1.up.weight requires a gradient on ranks [0] alone" in message


def frozen_after_an_exception(rank: int, world_size: int, comm: str, good: int) -> list[str]:
    """Each step of a training loop: a unit is frozen or thawed, whatever came of the step before.

    Args:
        good: steps before one whose backward raises on rank 0.
    """
    torch.manual_seed(0)
    model = zshard.wrap(Blocks(), comm=comm)
    optimizer = zshard.AdamW(model.parameters())

    def fail(*_: object) -> None:
        raise ValueError("user code")

    ends = []
    for step in range(4):
        model.blocks[0].requires_grad_(step <= good)
        output = model(batch(rank, step))
        if step == good and rank == 0:
            output.grad_fn.register_prehook(fail)  # when backward has come into the model
        try:
            output.sum().backward()
            optimizer.step()
            ends.append("made")
        except (ValueError, zshard.Error) as error:
            ends.append(type(error).__name__)
        optimizer.zero_grad()
    zshard.full_param(model, "blocks.0.up.weight")
    return ends


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("good", [0, 2])
def test_freezing_after_an_exception_leaves_the_others_what_they_reduce(
    comm: str, good: int
) -> None:
    """Rank 0 takes part in what is left of that backward first; without or by a program."""
    own, other = run_ranks(frozen_after_an_exception, 2, comm, good, timeout=20)
    expected = ["made"] * 4
    expected[good] = "ValueError"
    assert own == expected
    expected[good] = "StateError"
    assert other == expected


def test_freezing_inside_a_forward_is_refused() -> None:
    model = zshard.wrap(Blocks())
    parameter = model.get_parameter("outlet.weight")
    model.blocks[0].register_forward_hook(lambda *_: parameter.requires_grad_(False))
    with pytest.raises(zshard.StateError, match=r"outlet\.weight: requires_grad cannot change"):
        model(batch(0, 0))


def test_what_is_detached_in_place_is_frozen() -> None:
    model = zshard.wrap(Blocks())
    parameter = model.get_parameter("outlet.weight")
    assert parameter.detach_() is parameter
    models.loss_of(model, batch(0, 0)).backward()
    grads = [zshard.full_grad(model, f"outlet.{name}") for name in ("weight", "bias")]
    assert not parameter.requires_grad and grads[0] is None and grads[1] is not None


@pytest.mark.parametrize("value", [0, 2, None, "no"])
def test_what_is_no_bool_is_torchs_error_and_freezes_nothing(value: object) -> None:
    model = zshard.wrap(nn.Linear(3, 3))
    with pytest.raises(TypeError, match="must be bool"):
        model.weight.requires_grad = value
    with pytest.raises(TypeError, match="must be bool"):
        model.requires_grad_(value)
    model(torch.ones(1, 3)).sum().backward()
    assert all(zshard.full_grad(model, name).eq(1.0).all() for name in ("weight", "bias"))


def test_states_of_what_was_frozen_since_are_saved_and_loaded_any_number_of_times() -> None:
    model = zshard.wrap(Blocks())
    optimizer = zshard.AdamW(model.parameters())
    models.loss_of(model, batch(0, 0)).backward()
    optimizer.step()
    before = optimizer.state[model.blocks[1].up.weight]["exp_avg"].clone()
    model.blocks[1].requires_grad_(False)
    for _ in range(3):
        optimizer.load_state_dict(optimizer.state_dict())
    assert before.any()
    assert torch.equal(optimizer.state[model.blocks[1].up.weight]["exp_avg"], before)


def frozen_while_accumulating(rank: int, world_size: int, strategy: str, scaled: bool) -> None:
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))
        model = zshard.wrap(model, strategy=strategy) if wrap else model
        clip = zshard.clip_grad_norm_ if wrap else torch.nn.utils.clip_grad_norm_
        optimizer = (zshard.AdamW if wrap else torch.optim.AdamW)(model.parameters(), lr=0.01)
        scaler = (zshard if wrap else torch).GradScaler("cpu", 8.0, enabled=scaled)
        norms = []
        for step in range(3):
            for part in range(2):
                loss = model(torch.linspace(-1, 1, 7) * (part + 2) * (step + 1)).square().sum()
                scaler.scale(loss).backward()
                model[1].requires_grad_(part == 1)
            scaler.unscale_(optimizer)
            arguments = (model,) if wrap else (model.parameters(),)
            norms.append(clip(*arguments, 0.5))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        model = model.requires_grad_(True)
        names = dict(model.named_parameters())
        whole = [zshard.full_param(model, n) if wrap else names[n].detach() for n in names]
        results.append((norms, whole))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_gradients_of_what_was_frozen_since_count(
    strategy: str, world_size: int, scaled: bool
) -> None:
    run_ranks(frozen_while_accumulating, world_size, strategy, scaled)


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_gradient_that_is_set_on_a_frozen_parameter_counts(strategy: str) -> None:
    norms = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        if wrap:
            zshard.wrap(model, strategy=strategy)
        model[0].weight.grad = torch.ones(4, 4)
        model(torch.ones(2, 4)).sum().backward()
        clip = zshard.clip_grad_norm_ if wrap else nn.utils.clip_grad_norm_
        norms.append(clip(model.parameters(), 1e9))
    torch.testing.assert_close(norms[1], norms[0])


def norms_around_freezing(rank: int, world_size: int) -> None:
    model = zshard.wrap(models.build("blocks"))
    for trained in (True, False, True):
        model.blocks[1].requires_grad_(trained)
        models.loss_of(model, models.batches("blocks", 1, rank)[0]).backward()
        grads = [zshard.full_grad(model, name) for name, _ in model.named_parameters()]
        norms = torch.stack([grad.norm() for grad in grads if grad is not None])
        norm = zshard.clip_grad_norm_(model, 1e9)
        torch.testing.assert_close(norm, norms.norm(), rtol=1e-4, atol=0.0)
        model.zero_grad()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_norm_has_nothing_of_what_was_frozen_since_the_last_one(world_size: int) -> None:
    run_ranks(norms_around_freezing, world_size)
