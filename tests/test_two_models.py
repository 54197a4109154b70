"""Several models or losses in one script, and what else it communicates between passes."""

from __future__ import annotations

import random

import models
import pytest
import torch
import torch.distributed as dist
from models import Block, Blocks
from ranks import run_ranks
from steps import batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import adamw

import zshard


class Router(Blocks):
    """After two steps on which the ranks agree, each rank draws its own blocks, in any order."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rng, self.step = random.Random(rank), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.step >= 2:
            self.order = tuple(self.rng.choices(range(3), k=self.rng.randrange(4)))
        self.step += 1
        return super().forward(x)


def student_and_teacher(rank: int, world_size: int, own: bool) -> list[bool]:
    """Losses equal to DDP's; with ``own`` the script averages its loss between the passes."""
    sides = []
    for is_wrapped in (True, False):
        torch.manual_seed(0)
        student, teacher = Router(rank), Blocks().requires_grad_(False)
        if is_wrapped:
            run = zshard.wrap(student)
            zshard.wrap(teacher)
        else:
            run = DistributedDataParallel(student, find_unused_parameters=True)
        optimizer = zshard.AdamW(student.parameters(), lr=1e-2)
        losses = []
        for step in range(12):
            x = batch(rank, step)
            output = run(x)
            if own and step > 2:  # from the step on after the first that they don't
                mean = output.detach().mean()
                dist.all_reduce(mean)
                losses.append(mean)
            with torch.no_grad():
                target = teacher(x)
            loss = (output - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        sides.append(losses)
    return [bool(torch.equal(a, b)) for a, b in zip(*sides, strict=True)]


@pytest.mark.parametrize("own", [False, True])
def test_a_model_whose_ranks_differ_beside_another_has_ddps_bits(own: bool) -> None:
    for same in run_ranks(student_and_teacher, 2, own):
        assert all(same)


def crossed(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    pair = [zshard.wrap(Blocks()) for _ in range(2)]
    for model in pair:
        models.loss_of(model, batch(rank, 0)).backward()
    with pytest.raises(zshard.MismatchError) as caught:
        pair[rank](batch(rank, 1))
    for model in pair:
        model.zero_grad()
        models.loss_of(model, batch(rank, 2)).backward()
    return str(caught.value)


def test_ranks_that_call_different_models_are_all_told() -> None:
    for message in run_ranks(crossed, 2):
        assert "of wrapped model 0; rank 1: a forward, of wrapped model 1" in message


def one_backward_through_two(rank: int, world_size: int) -> list[bool]:
    sides = []
    for is_wrapped in (True, False):
        torch.manual_seed(0)
        first, second = Blocks(), nn.Sequential(nn.Linear(1, 3), Blocks())
        for model, strategy in ((first, "zero3"), (second, "zero2")):
            if is_wrapped:
                zshard.wrap(model, strategy=strategy)
        grads = []
        for step in range(3):
            second(first(batch(rank, step))).square().mean().backward()
            for model in (first, second):
                for name, parameter in model.named_parameters():
                    if is_wrapped:
                        grads.append(zshard.full_grad(model, name).clone())
                    else:
                        grads.append(parameter.grad.div_(world_size))
                        dist.all_reduce(grads[-1])
                        grads[-1] = grads[-1].clone()
                model.zero_grad()
        sides.append(grads)
    return [bool(torch.equal(a, b)) for a, b in zip(*sides, strict=True)]


def test_one_backward_goes_through_two_models() -> None:
    for same in run_ranks(one_backward_through_two, 2):
        assert all(same)


def left_out(rank: int, world_size: int, what: str) -> str:
    torch.manual_seed(0)
    model = zshard.wrap(Blocks())
    optimizer = zshard.AdamW(model.parameters())
    models.loss_of(model, batch(rank, 0)).backward()
    with pytest.raises(zshard.MismatchError) as caught:
        if what == "step":
            if rank == 0:
                optimizer.step()
            model(batch(rank, 1))
        elif rank == 0:
            with zshard.no_sync(model):
                models.loss_of(model, batch(rank, 1)).backward()
        else:
            models.loss_of(model, batch(rank, 1)).backward()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("step", "the ranks have changed [4, 0] flat buffers"),
        ("no_sync", "rank 0: a backward inside no_sync; rank 1: a backward"),
    ],
)
def test_what_one_rank_leaves_out_is_told_to_all(what: str, said: str) -> None:
    for message in run_ranks(left_out, 2, what):
        assert said in message


def look(rank: int, world_size: int, strategy: str, looks: bool) -> list[Tensor]:
    """Masters after a clipped step on bf16 gradients, at which one rank has looked before."""
    precision = zshard.Precision.bf16(reduce=torch.bfloat16)
    model = zshard.wrap(models.build("blocks"), strategy=strategy, precision=precision)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        models.loss_of(model, batch(rank, step)).backward()
        zshard.clip_grad_norm_(model, 0.01)
        if looks and rank == 0:
            assert float((model.inlet.weight.grad * 2).local.abs().sum()) > 0
        optimizer.step()
        optimizer.zero_grad()
    return [zshard.full_param(model, name) for name, _ in model.named_parameters()]


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_look_at_a_clipped_gradient_changes_no_master(strategy: str) -> None:
    first, second = run_ranks(look, 2, strategy, True)
    undisturbed, _ = run_ranks(look, 2, strategy, False)
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, undisturbed))


class Recursive(Blocks):
    """Calls itself, and methods that were given to zshard.method, from its own forward."""

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.inlet(x))

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        if depth:
            x = x + self(x, depth - 1)
        return self.outlet(self.blocks[1](self.encode(x)))


def recursive(rank: int, world_size: int) -> list[bool]:
    sides = []
    for is_wrapped in (True, False):
        torch.manual_seed(0)
        model = Recursive()
        run = model
        if is_wrapped:
            zshard.wrap(model)
            zshard.method(model, "encode")
        elif world_size > 1:
            run = DistributedDataParallel(model, find_unused_parameters=True)
        values = []
        for step in range(3):
            loss = models.loss_of(run, batch(rank, step))
            loss.backward()
            model.zero_grad()
            values.append(loss.detach())
        sides.append(values)
    return [bool(torch.equal(a, b)) for a, b in zip(*sides, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_may_call_the_model_and_its_methods(world_size: int) -> None:
    results = [recursive(0, 1)] if world_size == 1 else run_ranks(recursive, 2)
    assert all(map(all, results))


def failed_evaluation(rank: int, world_size: int) -> list[float]:
    """Rank 1 alone fails in the very first forward, and all go on."""
    model = zshard.wrap(models.build("blocks"))

    def fail(*_: object) -> None:
        raise ValueError("user code")

    handle = model.outlet.register_forward_hook(fail) if rank == 1 else None
    with torch.no_grad():
        if handle is not None:
            with pytest.raises(ValueError, match="user code"):
                model(batch(rank, 0))
            handle.remove()
        else:
            model(batch(rank, 0))
    return [float(models.loss_of(model, batch(0, step)).detach()) for step in range(3)]


def test_an_exception_on_one_rank_in_the_first_forward_leaves_all_usable() -> None:
    first, second = run_ranks(failed_evaluation, 2)
    assert first == second


class Looked(nn.Module):
    """An embedding with sparse gradients, which only rank 1 uses."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.table = nn.Embedding(11, 3, sparse=True)
        self.blocks = Blocks()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x + self.table(torch.arange(4)) if self.rank else x)


def sparse(rank: int, world_size: int) -> Tensor:
    torch.manual_seed(0)
    model = zshard.wrap(Looked(rank))
    models.loss_of(model, batch(rank, 0)).backward()
    return zshard.full_grad(model, "table.weight")


def test_sparse_gradients_are_reduced_dense() -> None:
    first, second = run_ranks(sparse, 2)
    assert torch.equal(first, second) and int((first != 0).any(1).sum()) == 4


class Heads(nn.Module):
    """Two heads over one trunk, each with blocks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, models.WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.blocks[0](self.inlet(x))
        return {"a": self.blocks[1](x), "b": self.blocks[3](self.blocks[2](x))}


def alternating(rank: int, world_size: int) -> list[bool]:
    sides = []
    for is_wrapped in (True, False):
        torch.manual_seed(0)
        model = Heads()
        run = model
        if is_wrapped:
            zshard.wrap(model)
        else:
            run = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = adamw(model)
        losses = []
        for step in range(8):
            loss = run(batch(rank, step))["ab"[step % 2]].square().mean()
            loss.backward()
            zshard.clip_grad_norm_(model, 1e9) if is_wrapped else None
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        sides.append(losses)
    return [bool(torch.equal(a, b)) for a, b in zip(*sides, strict=True)]


def test_losses_of_two_heads_in_turn_are_two_backwards_that_are_known() -> None:
    for same in run_ranks(alternating, 2):
        assert all(same)
