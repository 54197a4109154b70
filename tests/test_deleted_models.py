"""A wrapped model that nobody holds is freed, and what a backward finds that comes after it."""

import gc
import weakref
from contextlib import nullcontext

import models
import pytest
import torch
from models import Blocks
from ranks import run_ranks
from steps import batch

import zshard


def dropped_model(rank: int, world_size: int) -> bool:
    model = zshard.wrap(Blocks())
    optimizer = zshard.AdamW(model.parameters())
    handle = model.inlet.weight.register_hook(lambda grad: grad)
    for step in range(2):
        models.loss_of(model, batch(rank, step)).backward()
        zshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    gone = weakref.ref(model), weakref.ref(model.blocks[0].up.weight)
    del model, optimizer, handle
    gc.collect()
    return all(reference() is None for reference in gone)


def test_a_model_that_nobody_holds_is_freed() -> None:
    assert dropped_model(0, 1)
    assert run_ranks(dropped_model, 2) == [True, True]


KEEPERS = {
    "the model its loss": lambda model, block, loss: model.__dict__.update(kept=loss),
    "the model a unit's output": lambda model, block, loss: model.__dict__.update(kept=block),
    "a unit its output": lambda model, block, loss: model.blocks[0].__dict__.update(kept=block),
}


def fail(*_: object) -> None:
    raise ArithmeticError


def model_with_a_graph(rank: int, world_size: int, keeper: str, raises: bool = False) -> bool:
    model = zshard.wrap(Blocks())
    outputs: list[torch.Tensor] = []
    handle = model.blocks[0].register_forward_hook(lambda m, args, out: outputs.append(out))
    loss = models.loss_of(model, batch(rank, 0))
    if raises:
        outputs[0].register_hook(fail)
    KEEPERS[keeper](model, outputs.pop(), loss)
    with pytest.raises(ArithmeticError) if raises else nullcontext():
        loss.backward()
    if raises:
        zshard.reset(model)
    gone = weakref.ref(model)
    del model, handle, loss
    gc.collect()
    return gone() is None


@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_model_that_keeps_a_part_of_its_graph_is_freed_as_well(keeper: str) -> None:
    assert model_with_a_graph(0, 1, keeper)
    assert run_ranks(model_with_a_graph, 2, keeper) == [True, True]


def test_so_it_is_where_an_exception_has_ended_the_backward() -> None:
    keeper = "a unit its output"
    assert model_with_a_graph(0, 1, keeper, raises=True)
    assert run_ranks(model_with_a_graph, 2, keeper, True) == [True, True]


def input_gradients(rank: int, world_size: int, strategy: str) -> list[torch.Tensor | str]:
    """Of backwards through a model that is deleted, on one rank later than on the other."""
    torch.manual_seed(0)
    model = Blocks()
    if strategy != "plain":
        zshard.wrap(model, strategy=strategy)
    x = batch(rank, 0).requires_grad_()
    loss = model(x).sum()
    gone, found = weakref.ref(model), []
    del model
    for _ in range(2):
        if rank == 0:
            gc.collect()
        try:
            loss.backward(retain_graph=True)
        except zshard.StateError as error:
            found.append(str(error))
        else:
            found.append(x.grad.clone())
        gc.collect()
    assert gone() is None
    return found


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_a_backward_outlives_its_model(strategy: str) -> None:
    plain = run_ranks(input_gradients, 2, "plain")
    for (first, _), (expected, _) in zip(
        run_ranks(input_gradients, 2, strategy), plain, strict=True
    ):
        assert torch.equal(first, expected)
    assert torch.equal(input_gradients(0, 1, strategy)[0], input_gradients(0, 1, "plain")[0])


@pytest.mark.parametrize("strategy", ["zero2", "ddp"])
def test_so_does_another_one_where_whole_parameters_stay(strategy: str) -> None:
    for found, plain in zip(
        run_ranks(input_gradients, 2, strategy),
        run_ranks(input_gradients, 2, "plain"),
        strict=True,
    ):
        assert all(map(torch.equal, found, plain))


def test_else_another_one_is_refused() -> None:
    for _, second in (input_gradients(0, 1, "zero3"), *run_ranks(input_gradients, 2, "zero3")):
        assert "a model that was deleted" in second
