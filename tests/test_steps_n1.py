"""N = 1: ten AdamW steps of every odd model equal the plain model's bit by bit, in fp32."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
import torch
import torch.distributed as dist
from ops_check import devices
from torch import nn
from training import (
    STEPS,
    Plain,
    Wrapped,
    adamw,
    assert_close,
    assert_same_bits,
    torch_adamw,
    train,
)

import zshard


def run_plain(name: str, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw):
    model = models.build(name)
    torch.manual_seed(5)  # dropout's numbers
    return train(Plain(model), make_optimizer(model), models.batches(name, STEPS))


def run_wrapped(
    name: str,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    **options: object,
):
    model = models.build(name)
    torch.manual_seed(5)
    model = zshard.wrap(model, **options)
    return train(Wrapped(model), make_optimizer(model), models.batches(name, STEPS))


@pytest.mark.parametrize("name", models.CASES)
def test_ten_steps_equal_the_plain_models_bit_by_bit(name: str) -> None:
    assert not dist.is_initialized()
    expected = run_plain(name)
    assert_same_bits(run_wrapped(name), expected)
    first, last = expected.losses[0], expected.losses[-1]
    assert torch.isfinite(last) and first != last, "the model does not train: nothing was compared"


@devices
@pytest.mark.parametrize("name", ["blocks", "odd_parameters", "tied_across_units", "frozen"])
def test_on_every_device_the_losses_are_the_plain_models(name: str, device: str) -> None:
    """Not bit by bit on a GPU, where products may be summed by where a matrix begins in memory."""
    data = [batch.to(device) for batch in models.batches(name, STEPS)]
    plain = models.build(name).to(device)
    expected = train(Plain(plain), adamw(plain), data)
    model = zshard.wrap(models.build(name), device=torch.device(device))
    assert_close(train(Wrapped(model), adamw(model), data), expected, tolerance=1e-4)


@pytest.mark.parametrize("units", ["model", "layer", "classes", "callable", "names"])
@pytest.mark.parametrize("name", ["odd_parameters", "tied_across_units", "frozen", "gpt_dropout"])
def test_every_unit_map_gives_the_same_bits(name: str, units: str) -> None:
    choice = {
        "model": "model",
        "layer": "layer",
        "classes": [models.Block, models.Attention],
        "callable": lambda name, module: name.endswith("blocks.1"),
        "names": ["blocks.0", "blocks.2"],
    }[units]
    assert_same_bits(run_wrapped(name, units=choice), run_plain(name))


@pytest.mark.parametrize("prefetch", [0, 2, 9])
def test_prefetch_depth_does_not_change_a_bit(prefetch: int) -> None:
    assert_same_bits(run_wrapped("gpt", prefetch=prefetch), run_plain("gpt"))


@pytest.mark.parametrize("name", ["blocks", "odd_parameters", "gpt"])
def test_zshards_adamw_is_within_tolerance_of_torchs(name: str) -> None:
    # Both round a handful of fp32 operations an element a step: ten steps stay within 1e-5.
    assert_close(run_wrapped(name), run_plain(name, torch_adamw), tolerance=1e-5)


def test_evaluation_between_steps_changes_nothing() -> None:
    expected = run_plain("gpt")
    model = zshard.wrap(models.build("gpt"))
    held_out = models.batches("gpt", 1, rank=9)[0]
    seen = []

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            seen.append(models.loss_of(model, held_out))
        model.train()

    actual = train(Wrapped(model), adamw(model), models.batches("gpt", STEPS), after_step=evaluate)
    assert_same_bits(actual, expected)
    assert len({float(loss) for loss in seen}) == STEPS, "evaluation did not see the new weights"


def test_no_grad_first_then_training_equals_the_plain_model() -> None:
    model = zshard.wrap(models.build("blocks"))
    plain = models.build("blocks")
    batch = models.batches("blocks", 1, rank=3)[0]
    with torch.no_grad():
        assert torch.equal(model(batch), plain(batch))
    with torch.inference_mode():
        assert torch.equal(model(batch), plain(batch))
    actual = train(Wrapped(model), adamw(model), models.batches("blocks", STEPS))
    assert_same_bits(actual, run_plain("blocks"))


def test_wrap_leaves_the_random_numbers_alone() -> None:
    model = models.build("blocks")
    before = torch.get_rng_state()
    zshard.wrap(model)
    assert torch.equal(torch.get_rng_state(), before)
