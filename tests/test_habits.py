"""What real training scripts do around a step, against the plain model; and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import models
import pytest
import torch
from models import Block, Blocks
from ranks import run_ranks
from steps import batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zshard


def pair(kind: Callable[[], nn.Module] = Blocks, **options: object) -> tuple[nn.Module, nn.Module]:
    """The same model wrapped and plain."""
    torch.manual_seed(0)
    wrapped = zshard.wrap(kind(), **options)
    torch.manual_seed(0)
    return wrapped, kind()


def assert_same_grads(wrapped: nn.Module, plain: nn.Module) -> None:
    for name, param in plain.named_parameters():
        grad = zshard.full_grad(wrapped, name)
        assert (grad is None) == (param.grad is None), name
        if grad is not None and param.grad is not None:
            assert torch.equal(grad, param.grad), name


def both(sides: tuple[nn.Module, nn.Module], act: Callable[[nn.Module], object]) -> None:
    for side in sides:
        act(side)


def test_zero_grad_between_forward_and_backward_drops_the_last_steps_gradients() -> None:
    sides = pair()
    for step in range(2):
        for side in sides:
            loss = models.loss_of(side, batch(0, step))
            side.zero_grad()
            loss.backward()
    assert_same_grads(*sides)


def test_an_optimizer_built_between_forward_and_backward_trains_every_parameter() -> None:
    model, _ = pair()
    loss = models.loss_of(model, batch(0, 0))
    optimizer = zshard.AdamW(model.parameters(), lr=0.1)
    before = {name: shard.clone() for name, shard in zshard.local_shards(model).items()}
    loss.backward()
    optimizer.step()
    for name, shard in zshard.local_shards(model).items():
        assert not torch.equal(before[name], shard), name


def test_16_bit_micro_batches_add_up_in_the_reduce_dtype() -> None:
    model = nn.Linear(1, 1, bias=False)
    zshard.wrap(model, precision=zshard.Precision.bf16())
    for _ in range(399):
        with zshard.no_sync(model):
            model(torch.ones(1, 1)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()
    assert float(zshard.full_grad(model, "weight")) == 400.0  # a bf16 sum stands still at 256


def test_zeroing_a_parameter_does_not_drop_its_gradient() -> None:
    sides = pair()
    for step in range(2):
        for side in sides:
            with zshard.no_sync(side) if step == 0 and side is sides[0] else torch.enable_grad():
                models.loss_of(side, batch(0, step)).backward()
            if step == 0:
                with torch.no_grad():
                    side.outlet.bias.zero_()
    assert_same_grads(*sides)


def test_a_forward_that_raises_keeps_the_micro_batches_before_it() -> None:
    sides = pair()
    for side in sides:
        with zshard.no_sync(side) if side is sides[0] else torch.enable_grad():
            models.loss_of(side, batch(0, 0)).backward()
        with pytest.raises(RuntimeError, match="shapes"):
            side(torch.randn(4, 5))
        models.loss_of(side, batch(0, 1)).backward()
    assert_same_grads(*sides)


@pytest.mark.parametrize("precision", [zshard.Precision(), zshard.Precision.bf16()])
@pytest.mark.parametrize("wrapped_there", [False, True])
def test_a_wrap_or_first_evaluation_in_inference_mode_does_not_poison_training(
    precision: zshard.Precision, wrapped_there: bool
) -> None:
    model = Blocks()
    with torch.inference_mode(wrapped_there):
        zshard.wrap(model, precision=precision)
    with torch.inference_mode():
        model(batch(0, 0))
    for optimizer in (zshard.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())):
        models.loss_of(model, batch(0, 1)).backward()
        optimizer.step()


class SharedModule(Blocks):
    """One linear layer registered in every block."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.down = self.blocks[0].down


def test_a_module_shared_by_several_units_is_a_tied_weight() -> None:
    sides = pair(SharedModule)
    both(sides, lambda side: models.loss_of(side, batch(0, 0)).backward())
    assert_same_grads(*sides)


def test_every_layer_a_unit_works_for_multihead_attention() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    zshard.wrap(model, units="layer")
    model(torch.randn(1, 3, 8)).sum().backward()
    assert zshard.full_grad(model, "self_attn.out_proj.weight") is not None


class InPlace(Block):
    """Adds to its input in place and returns it."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(self.down(torch.tanh(self.up(self.norm(x.clone())))))
        return x


def in_place_blocks() -> nn.Module:
    model = Blocks()
    model.blocks = nn.ModuleList(InPlace() for _ in range(4))
    return model


def gradients(rank: int, world_size: int, paths: list[tuple[int, ...]]) -> None:
    """One accumulated step over changing paths, the same on every rank, with equal data."""
    sides = pair(in_place_blocks)
    for step, path in enumerate(paths):
        for side in sides:
            side.order = path
            hold = side is sides[0] and step < len(paths) - 1
            with zshard.no_sync(side) if hold else torch.enable_grad():
                models.loss_of(side, batch(0, step)).backward()
    assert_same_grads(*sides)


@pytest.mark.parametrize(
    "paths",
    [
        [(0, 1, 2, 3)],
        [(0, 1, 2, 3), (0, 1), (0, 1, 3)],  # stochastic depth: a unit has to move
        [(0, 1, 2), (0, 1, 2, 0, 1, 2)],  # looped depth
    ],
)
def test_changing_paths_and_in_place_units_give_the_plain_models_gradients(
    paths: list[tuple[int, ...]],
) -> None:
    run_ranks(gradients, 2, paths)


def look_on_one_rank(rank: int, world_size: int) -> list[float]:
    model, _ = pair()
    models.loss_of(model, batch(rank, 0)).backward()
    norms = []
    for limit in (0.2, 0.05, 0.01):
        norms.append(float(zshard.clip_grad_norm_(model, limit)))
        if rank == 0:
            assert "sharded" not in repr(model.outlet.bias.grad)
            model.outlet.bias.grad.mul(2.0)
    return norms


def test_looking_at_a_gradient_on_one_rank_does_not_stop_the_others() -> None:
    first, second = run_ranks(look_on_one_rank, 2)
    assert first == second
    assert first[1:] == pytest.approx([0.2, 0.05], rel=1e-4)


def checkpointed_as_a_whole(rank: int, world_size: int, use_reentrant: bool) -> None:
    sides = pair()
    for step in range(2):
        for side in sides:
            side.zero_grad()
            x = batch(0, step).requires_grad_()
            out = checkpoint(side, x, use_reentrant=use_reentrant)
            (out.float() - 1.0).square().mean().backward()
    assert_same_grads(*sides)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_whole_model_may_be_one_checkpointed_region(use_reentrant: bool) -> None:
    run_ranks(checkpointed_as_a_whole, 2, use_reentrant)


def test_what_would_be_lost_or_wrong_is_refused_by_name() -> None:
    model, _ = pair()
    weight = model.inlet.weight
    with pytest.raises(zshard.StateError, match="dtype and device"):
        model.half()
    with pytest.raises(zshard.ShardedAccessError, match=r"of shapes \(7, 3\) and"):
        weight.detach() * model.outlet.weight.detach()
    with pytest.raises(zshard.ShardedAccessError, match=r"_foreach_mul.*of shapes"):
        torch._foreach_mul([weight.detach()] * 2, [weight.detach(), model.outlet.weight.detach()])
    with pytest.raises(zshard.ShardedAccessError, match="equal needs the whole"):
        torch.equal(weight, weight)  # an answer that would depend on the rank
    with pytest.raises(zshard.ShardedAccessError, match=r"before zshard\.wrap"):
        copy.deepcopy(model)
    with pytest.raises(zshard.ShardedAccessError, match="full_params"):
        pickle.dumps(model)
    with pytest.raises(zshard.ShardedAccessError, match=r"zshard\.state_dict.*zshard\.save"):
        pickle.dumps(model.state_dict())
    with pytest.raises(zshard.ShardedAccessError, match=r"zshard\.state_dict"):
        torch.empty(21, 21).copy_(weight.detach())  # 21 elements here, which would be spread


def test_weights_are_averaged_as_the_error_of_a_copy_says() -> None:
    (model, plain), (average, expected) = pair(), pair()
    with pytest.raises(zshard.ShardedAccessError, match=r"lerp_\(param, weight\).*no_grad"):
        pickle.dumps(model)
    with torch.no_grad():
        for changed, mean in ((model, average), (plain, expected)):
            for param, kept in zip(changed.parameters(), mean.parameters(), strict=True):
                kept.lerp_(param.mul_(2), 0.25)
    for name, param in expected.named_parameters():
        assert torch.equal(zshard.full_param(average, name), param), name


def test_a_parameter_replaced_after_wrap_is_refused() -> None:
    model, _ = pair()
    model.inlet.weight = nn.Parameter(torch.zeros(7, 3))
    with pytest.raises(
        zshard.StateError, match=r"weight \(weight of a Linear\) was replaced after zshard\.wrap"
    ):
        model(batch(0, 0))


def test_an_lstm_trains_with_the_plain_models_gradients() -> None:
    sides = pair(lambda: nn.LSTM(3, 4, 2))
    for step in range(2):
        for side in sides:
            side.zero_grad()
            side(batch(0, step).unsqueeze(1))[0].sum().backward()
    assert_same_grads(*sides)


def test_torch_compile_gives_the_same_output() -> None:
    model, _ = pair()
    expected = model(batch(0, 0))
    assert torch.equal(torch.compile(model, backend="eager")(batch(0, 0)), expected)


@pytest.mark.parametrize("rule", [zshard.AdamW, torch.optim.AdamW])
def test_a_step_after_a_backward_that_raised_is_refused(rule: type[torch.optim.Optimizer]) -> None:
    model, _ = pair()
    optimizer = rule(model.parameters())
    models.loss_of(model, batch(0, 0)).backward()  # whose gradients the step could take

    def fail(*_: object) -> None:
        raise ValueError("user code")

    handle = model.blocks[1].up.register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="user code"):
        models.loss_of(model, batch(0, 0)).backward()
    handle.remove()
    with pytest.raises(zshard.StateError, match="gradients are incomplete"):
        optimizer.step()
    models.loss_of(model, batch(0, 0)).backward()
    optimizer.step()


def clip_frozen(rank: int, world_size: int) -> float:
    model = zshard.wrap(Blocks().requires_grad_(False))
    return float(zshard.clip_grad_norm_(model, 1.0))


def test_clipping_an_all_frozen_model_gives_zero_on_every_rank() -> None:
    assert run_ranks(clip_frozen, 2) == [0.0, 0.0]


def different_options(rank: int, world_size: int) -> str:
    precision = zshard.Precision.bf16() if rank else zshard.Precision()
    torch.manual_seed(0)
    with pytest.raises(zshard.MismatchError) as caught:
        zshard.wrap(Blocks(), precision=precision)
    return str(caught.value)


def test_ranks_that_wrap_with_different_options_are_told_which() -> None:
    for message in run_ranks(different_options, 2):
        ours, theirs = message.split("different options: precision: ")[1].split("; ")
        assert ours.startswith("Precision(compute=None") and ours.endswith("on ranks [0]")
        assert theirs.startswith("Precision(compute=torch.bf") and "on ranks [1]. Pass" in theirs


class Penalised(nn.Linear):
    """A model with a training loop's own methods, as a LightningModule has them."""

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).square().mean() + self.bias @ self.bias

    def optimizer_step(self, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.training_step(x)
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, zshard.SGD])
def test_of_the_methods_around_a_closure_the_one_inside_is_told_to_gather(
    kind: type[torch.optim.Optimizer],
) -> None:
    sides = wrapped, plain = pair(lambda: Penalised(4, 4))
    optimizers = {side: kind(side.parameters(), lr=0.1) for side in sides}
    with pytest.raises(zshard.ShardedAccessError, match=r"zshard\.method\(model, 'training_step'"):
        wrapped.optimizer_step(optimizers[wrapped], torch.ones(2, 4))
    zshard.method(wrapped, "training_step")
    both(sides, lambda side: side.optimizer_step(optimizers[side], torch.ones(2, 4)))
    assert torch.equal(zshard.full_param(wrapped, "bias"), plain.bias)
