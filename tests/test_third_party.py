"""Models from transformers, and batch normalisation: five AdamW steps equal DDP's, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import ANY

import pytest
import ranks
import third_party
import torch
from meta import Logged
from ranks import run_ranks
from third_party import Batch
from torch import Tensor, nn
from training import Plain, Record, Wrapped, adamw, assert_same_bits, train

import zshard

STEPS = 5
STRATEGIES = ["zero1", "zero2", "zero3", "ddp"]

# The server starts before the first test and after this import: only where this file is run.
ranks.PRELOADED += third_party.MODULES


@dataclass
class Outcome:
    """What one rank has after its last step."""

    record: Record
    evaluation: Tensor  # 0-d, the loss of the first batch in evaluation mode
    buffers: dict[str, Tensor]
    routing: list[set[int]]  # experts used, one set a call of a mixture, in order


def watch_routing(model: nn.Module) -> list[set[int]]:
    """Collect which experts this rank uses, call by call."""
    seen: list[set[int]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        chosen = args[1]  # (tokens, k) indices, or (tokens, 1, experts) one-hot
        seen.append(set((chosen if chosen.ndim == 2 else chosen.argmax(-1)).flatten().tolist()))

    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(note)
    return seen


def run(side: Plain | Wrapped, data: list[Batch], rank: int) -> Outcome:
    routing = watch_routing(side.module)
    torch.manual_seed(5 + rank)  # dropout's numbers, other ones on every rank
    record = train(side, adamw(side.module), data, loss_of=third_party.loss_of)
    side.module.eval()
    with torch.no_grad():
        evaluation = third_party.loss_of(side.model, data[0])
    return Outcome(record, evaluation, dict(side.module.named_buffers()), routing)


def wrapped(rank: int, world_size: int, name: str, options: dict[str, object]) -> Outcome:
    side = Wrapped(zshard.wrap(third_party.build(name), **options))
    return run(side, third_party.batches(name, STEPS, rank), rank)


def plain(rank: int, world_size: int, name: str) -> Outcome:
    side = Plain(third_party.build(name), world_size, third_party.CASES[name].unused)
    return run(side, third_party.batches(name, STEPS, rank), rank)


@cache  # the same for every strategy
def expected_of(name: str, world_size: int) -> list[Outcome]:
    """What the plain model comes to, under DDP on several ranks."""
    return [plain(0, 1, name)] if world_size == 1 else run_ranks(plain, world_size, name)


def both_sides(
    name: str, world_size: int, options: dict[str, object]
) -> list[tuple[Outcome, Outcome]]:
    """Train the same case wrapped and plain: (wrapped, plain) of every rank."""
    if world_size == 1:
        actual = [wrapped(0, 1, name, options)]
    else:
        actual = run_ranks(wrapped, world_size, name, options)
    return list(zip(actual, expected_of(name, world_size), strict=True))


def assert_same_outcome(actual: Outcome, expected: Outcome) -> None:
    assert_same_bits(actual.record, expected.record)
    assert torch.equal(actual.evaluation, expected.evaluation)
    assert list(actual.buffers) == list(expected.buffers)
    for name, buffer in expected.buffers.items():
        assert torch.equal(actual.buffers[name], buffer), name


def assert_trained(name: str, outcome: Outcome) -> None:
    for path, start in third_party.build(name).named_parameters():
        end = outcome.record.parameters[path]
        assert torch.isfinite(end).all() and not torch.equal(end, start), f"{path} was not trained"


def assert_ranks_differ(outcomes: list[Outcome]) -> None:
    losses = {float(outcome.record.losses[0]) for outcome in outcomes}
    assert len(losses) == len(outcomes), "the ranks trained on one batch: reduction was not tested"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", third_party.CASES)
def test_five_steps_equal_ddps_bit_by_bit(name: str, strategy: str) -> None:
    results = both_sides(name, 2, {"strategy": strategy})
    for actual, expected in results:
        assert_same_outcome(actual, expected)
        assert_trained(name, expected)
    assert_ranks_differ([actual for actual, _ in results])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", third_party.CASES)
def test_five_steps_equal_the_plain_models_bit_by_bit(name: str, strategy: str) -> None:
    ((actual, expected),) = both_sides(name, 1, {"strategy": strategy})
    assert_same_outcome(actual, expected)
    assert_trained(name, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "name", [name for name in third_party.CASES if third_party.CASES[name].experts]
)
def test_steps_of_experts_that_are_units_equal_ddps(name: str, strategy: str) -> None:
    options = {"strategy": strategy, "units": third_party.blocks_and_experts(name)}
    results = both_sides(name, 2, options)
    for actual, expected in results:
        assert_same_outcome(actual, expected)
    mine, other = (expected.routing for _, expected in results)
    assert (mine == other) == (name == "switch_balanced"), f"experts: {mine} and {other}"


def exported(rank: int, world_size: int, folder: str) -> None:
    model = zshard.wrap(third_party.build("t5"))
    model.config.id2label = {label: f"label {label}" for label in range(12)}
    state = zshard.state_dict(model, all_ranks=True)
    if rank == 0:
        model.save_pretrained(f"{folder}/saved", state_dict=state)
    zshard.export(f"{folder}/exported", model)


def test_an_export_takes_the_model_that_one_rank_has_saved_as_transformers_does(
    tmp_path: Path,
) -> None:
    run_ranks(exported, 2, str(tmp_path))
    saved, there = (
        third_party.hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name)
        for name in ("saved", "exported")
    )
    assert there.config.to_dict() == saved.config.to_dict() | {"_name_or_path": ANY}
    assert [*there.config.id2label.values()] == [f"label {label}" for label in range(12)]
    for name, value in saved.state_dict().items():
        assert torch.equal(there.state_dict()[name], value), name


def from_meta(rank: int, world_size: int, name: str) -> tuple[Outcome, Outcome]:
    with torch.device("meta"):
        model = third_party.build(name)
    init_fn = Logged(model, model._init_weights)
    torch.manual_seed(9 + rank)
    zshard.wrap(model, init_fn=init_fn)
    plain = third_party.build(name)
    torch.manual_seed(9)
    for path in init_fn.calls:
        plain._init_weights(plain.get_submodule(path))
    data = third_party.batches(name, 2, rank)
    return run(Wrapped(model), data, rank), run(Wrapped(zshard.wrap(plain)), data, rank)


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5", "bert"])
def test_from_the_meta_device_transformers_own_function_initialises(name: str) -> None:
    for actual, expected in run_ranks(from_meta, 2, name):
        assert_same_outcome(actual, expected)
