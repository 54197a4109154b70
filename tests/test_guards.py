"""A step that would go wrong is refused, or made right: graphs, ranks, writes and exceptions."""

from __future__ import annotations

import copy
from collections.abc import Callable

import models
import pytest
import torch
from models import Block, Blocks
from ranks import run_ranks
from steps import batch, build, one_step
from torch import Tensor, nn
from torch.autograd import forward_ad

import zshard
from zshard.wrap import schedule_of


class Leaky(Block):
    """Keeps an activation of its inside, for someone to differentiate behind its back."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.tanh(self.up(x))
        return x + self.down(self.kept)


def backward_behind_the_units_back(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = Blocks()
    model.blocks = nn.ModuleList(Leaky() for _ in range(3))
    zshard.wrap(model)
    out = model(batch(rank, 0))
    kept = model.blocks[0].kept
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        kept.sum().backward()  # its input's gradient needs blocks.0.up.weight, long resharded
    del out, kept
    return str(caught.value)


def test_a_graph_never_reads_a_weight_that_is_not_there() -> None:
    run_ranks(backward_behind_the_units_back, 2)


def outlived_graph(rank: int, world_size: int) -> None:
    model = build()
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    loss = models.loss_of(model, batch(rank, 0))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_through_updated_weights_is_refused_as_in_plain_torch(world_size: int) -> None:
    if world_size == 1:
        outlived_graph(0, 1)
    else:
        run_ranks(outlived_graph, world_size)


def steps_around_an_exception(rank: int, world_size: int, where: str | None) -> list[Tensor]:
    model = build()
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    losses = [one_step(model, rank, 0)]
    optimizer.step()
    optimizer.zero_grad()
    if where is not None:

        def fail(*_: object) -> None:
            raise ValueError("user code")

        if where == "forward":
            handle = model.blocks[1].up.register_forward_hook(fail)
        else:
            handle = model.blocks[1].up.register_full_backward_hook(fail)
        with pytest.raises(ValueError, match="user code"):
            one_step(model, rank, 7)
        handle.remove()
    losses.append(one_step(model, rank, 1))
    optimizer.step()
    optimizer.zero_grad()
    losses.append(one_step(model, rank, 2))
    return losses


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_after_an_exception_equals_that_of_an_undisturbed_run(where: str) -> None:
    expected = run_ranks(steps_around_an_exception, 2, None)
    assert run_ranks(steps_around_an_exception, 2, where) == expected


def test_between_forward_and_backward_the_modules_hold_sharded_parameters() -> None:
    model = build()
    params = list(model.parameters())
    for step in range(2):
        loss = models.loss_of(model, batch(0, step))
        assert all(now is before for now, before in zip(model.parameters(), params, strict=True))
        model.zero_grad()
        loss.backward()
    torch.manual_seed(0)
    plain = Blocks()
    one_step(plain, 0, 1)
    for name, param in plain.named_parameters():
        assert torch.equal(zshard.full_grad(model, name), param.grad), name


class Tolerant(Blocks):
    """Goes on with what the exceptions of its blocks carry."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            try:
                x = block(x)
            except ValueError as error:
                x = x + error.args[0]
        return self.outlet(x)


def blocks_that_raise(
    rank: int, world_size: int, strategy: str, fails: bool
) -> tuple[bool, int, list[Tensor]]:
    def fail(module: nn.Module, args: object, output: Tensor) -> None:
        raise ValueError(output)

    torch.manual_seed(0)
    model = zshard.wrap(Tolerant(), strategy=strategy)
    params = list(model.parameters())
    for block in model.blocks if fails else ():
        block.down.register_forward_hook(fail)
    for step in range(2):
        loss = models.loss_of(model, batch(rank, step))
        same = all(now is before for now, before in zip(model.parameters(), params, strict=True))
        loss.backward()
    grads = [zshard.full_grad(model, name) for name, _ in model.named_parameters()]
    return same, schedule_of(model).pool.peak_live, grads


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_unit_whose_exception_the_model_catches_is_resharded_and_has_its_backward(
    world_size: int, strategy: str
) -> None:
    if world_size == 1:
        expected, found = ([blocks_that_raise(0, 1, strategy, fails)] for fails in (False, True))
    else:
        expected, found = (
            run_ranks(blocks_that_raise, world_size, strategy, fails) for fails in (False, True)
        )
    for (same, live, grads), (_, _, others) in zip(found, expected, strict=True):
        assert same
        assert live <= 2
        assert all(map(torch.equal, grads, others))


class Peeking(Blocks):
    """Goes on with the weight that an exception of its first block carries."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        try:
            self.blocks[0](x)
        except ValueError as error:
            (weight,) = error.args
        for block in self.blocks[1:]:
            x = block(x)
        return self.outlet(x * weight)


def weight_in_an_exception(rank: int, world_size: int) -> None:
    def fail(module: nn.Module, *_: object) -> None:
        raise ValueError(module.weight[:, 0])

    torch.manual_seed(0)
    plain = Peeking()
    model = zshard.wrap(copy.deepcopy(plain))
    for each in (plain, model):
        each.blocks[0].down.register_forward_hook(fail)
    with torch.no_grad(), pytest.warns(UserWarning, match="'blocks.0': forward leaves a view"):
        assert torch.equal(model(batch(rank, 0)), plain(batch(rank, 0)))


def test_a_weight_that_a_units_exception_carries_stays_as_long_as_it_may_be_read() -> None:
    run_ranks(weight_in_an_exception, 2)


class Written(Block):
    """Changes its weight in forward, as some quantisers do."""

    def __init__(self, write: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.up.weight)
        return super().forward(x)


@torch.no_grad()
def clamp(weight: nn.Parameter) -> None:
    weight.clamp_(-0.1, 0.1)


@pytest.mark.parametrize(
    "write",
    [
        clamp,
        lambda weight: weight.detach().mul_(0.5),
        lambda weight: weight.data.mul_(0.5),
        lambda weight: weight.data[0].zero_(),
        lambda weight: torch.nn.init.zeros_(weight.data),
    ],
)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_parameter_written_in_forward_is_an_error_and_not_lost(
    strategy: str, write: Callable[[nn.Parameter], object]
) -> None:
    model = Blocks()
    model.blocks = nn.ModuleList(Written(write) for _ in range(2))
    zshard.wrap(model, strategy=strategy)
    said = r"forward changed one of blocks\.0.*in place.*ActNorm.*before wrap.*ignored=.*codebook"
    with pytest.raises(zshard.StateError, match=said):
        model(batch(0, 0))


class Measured(Block):
    """Divides by the norm of its weight, a constant to autograd."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.up.weight.data.norm()


def test_data_may_be_read_in_forward() -> None:
    sides = []
    for wrap in (lambda model: model, zshard.wrap):
        torch.manual_seed(0)
        model = Blocks()
        model.blocks = nn.ModuleList(Measured() for _ in range(3))
        sides.append(wrap(model))
    plain, wrapped = sides
    assert torch.equal(one_step(wrapped, 0, 0), one_step(plain, 0, 0))
    for name, param in plain.named_parameters():
        assert torch.equal(zshard.full_grad(wrapped, name), param.grad), name


class Prompt(nn.Module):
    """A unit whose output is a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self) -> Tensor:
        return self.weight.t()


class Prompted(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList([Prompt(), Prompt()])

    def forward(self, x: Tensor) -> Tensor:
        first, second = (prompt() for prompt in self.prompts)
        return super().forward(x @ first) + super().forward(x @ second)


def prompted_loss(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    plain = Prompted()
    torch.manual_seed(0)
    model = zshard.wrap(Prompted())
    return one_step(model, rank, 0), one_step(plain, rank, 0)


def test_a_view_of_a_parameter_may_leave_its_unit() -> None:
    for ours, theirs in run_ranks(prompted_loss, 2):
        assert torch.equal(ours, theirs)


def aborted(rank: int, world_size: int, fails: tuple[int, ...]) -> list[Tensor]:
    """Losses of steps after a first one whose backward raised on the ranks ``fails``."""
    model = build()
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)

    def fail(*_: object) -> None:
        raise ValueError("user code")

    handle = model.blocks[1].up.register_full_backward_hook(fail) if rank in fails else None
    if fails:
        with pytest.raises((ValueError, zshard.StateError)):
            one_step(model, rank, 7)
            zshard.clip_grad_norm_(model, 1.0)
    if handle is not None:
        handle.remove()
        zshard.reset(model)
    optimizer.zero_grad()
    losses = []
    for step in range(4):
        losses.append(one_step(model, rank, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_nothing_is_learned_of_a_backward_that_raised() -> None:
    assert aborted(0, 1, (0,)) == aborted(0, 1, ())
    expected = run_ranks(aborted, 2, ())
    for fails in ((0,), (0, 1)):
        assert run_ranks(aborted, 2, fails) == expected


def transformed(rank: int, world_size: int, comm: str) -> list[bool]:
    model, told = build(comm=comm), []
    x = batch(rank, 0)
    for transform in (
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.jacfwd(model)(x),
        lambda: torch.func.grad(lambda x: model(x).sum())(x),
    ):
        with pytest.raises(zshard.StateError, match=r"torch\.func transforms .* on one rank\."):
            transform()
        told.append(torch.equal(torch.func.vmap(model)(x), model(x)))
    torch.manual_seed(0)
    plain = Blocks()
    tangents = []
    for side in (model, plain):
        with forward_ad.dual_level():
            dual = side(forward_ad.make_dual(x, x))
            tangents.append(forward_ad.unpack_dual(dual).tangent)
    return [*told, torch.equal(*tangents)]


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_transforms_that_ranks_cannot_meet_in_are_refused_and_the_model_goes_on(comm: str) -> None:
    assert run_ranks(transformed, 2, comm) == [[True] * 4] * 2
