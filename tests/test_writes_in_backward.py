"""Parameters that a forward, or a node of the graph, changes in place, which would be lost."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from models import WIDTH, Block, Blocks
from ranks import run_ranks
from steps import one_step
from torch import Tensor, nn

import zshard


class Writes(torch.autograd.Function):
    """x W^T, whose backward updates W at once, as LOMO does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, writes: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.writes = writes
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        made = grad @ weight, grad.t() @ x, None
        if ctx.writes:
            weight.add_(1)
        return made


class Lomo(Block):
    writes = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = Writes.apply(x, self.up.weight, self.writes)
        return x + self.down(torch.tanh(hidden + self.up.bias)) + self.norm(x)


def written_in_backward(rank: int, world_size: int, strategy: str, at: int) -> None:
    torch.manual_seed(0)
    model = Blocks(block=Lomo)
    if at == 0:
        model.blocks[at].down.weight.requires_grad_(False)  # it is not freed early
    zshard.wrap(model, strategy=strategy, precision=zshard.Precision.bf16())
    values = zshard.state_dict(model, all_ranks=True)
    losses = []
    for writes in (False, True, False, True):
        model.blocks[at].writes = writes
        if not writes:
            losses.append(one_step(model, rank, 0))
            assert torch.equal(losses[0], losses[-1])
            continue
        with pytest.raises(
            zshard.StateError, match=rf"backward or forward changed one of blocks\.{at}"
        ):
            one_step(model, rank, 0)
        after = zshard.state_dict(model, all_ranks=True)
        assert all(torch.equal(value, after[name]) for name, value in values.items())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_a_parameter_written_in_backward_is_no_silent_loss(
    strategy: str, at: int, world_size: int
) -> None:
    run_ranks(written_in_backward, world_size, strategy, at)


class Rewrites(Block):
    writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.up.weight.add_(1)
                self.down.weight.add_(1)
        return super().forward(x)


def test_what_one_rank_has_written_in_its_copies_does_not_stay() -> None:
    model = Blocks(block=Rewrites)
    model.blocks[1].down.weight.requires_grad_(False)  # which has a flat buffer of its own
    zshard.wrap(model, precision=zshard.Precision.bf16())
    before = one_step(model, 0, 0)
    model.blocks[1].writes = True
    with pytest.raises(zshard.StateError, match=r"backward or forward changed one of blocks\.1"):
        one_step(model, 0, 0)
    model.blocks[1].writes = False
    assert torch.equal(one_step(model, 0, 0), before)


class TriesTwice(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        with suppress(zshard.StateError):
            self.blocks[1](self.inlet(x))
        return super().forward(x)


def written_on_one_rank(
    rank: int, world_size: int, strategy: str, dtypes: str, told: bool, kind: type[Blocks] = Blocks
) -> None:
    torch.manual_seed(0)
    precision = zshard.Precision.bf16(master="split") if dtypes == "split" else None
    model = zshard.wrap(kind(block=Rewrites), strategy=strategy, precision=precision)
    values = zshard.state_dict(model, all_ranks=True)
    model.blocks[1].writes = rank == 0
    with pytest.raises(zshard.StateError if rank == 0 else zshard.MismatchError):
        one_step(model, rank, 0)
    model.blocks[1].writes = False
    if told:
        zshard.mark_updated(model)  # a change of all slices, behind which nobody could tell it
        with pytest.raises(zshard.MismatchError, match=r"the values of blocks\.1\."):
            one_step(model, rank, 0)
    for _ in range(2):
        model.load_state_dict(values)
    one_step(model, rank, 0)
    after = zshard.state_dict(model, all_ranks=True)
    assert all(torch.equal(value, after[name]) for name, value in values.items())


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("dtypes", ["fp32", "split"])
@pytest.mark.parametrize("strategy", ["zero2", "ddp"])
def test_a_master_that_one_rank_has_written_is_refused_on_every_rank_until_it_is_loaded(
    strategy: str, dtypes: str, told: bool
) -> None:
    run_ranks(written_on_one_rank, 2, strategy, dtypes, told)


def test_a_load_mends_a_master_that_one_rank_has_written_twice_in_a_forward() -> None:
    run_ranks(written_on_one_rank, 2, "zero2", "fp32", False, TriesTwice)


def written_in_whole_parameters(rank: int, world_size: int, strategy: str, by_all: bool) -> None:
    torch.manual_seed(0)
    model = Blocks(block=Rewrites)
    zshard.wrap(model, strategy=strategy, precision=zshard.Precision.bf16())
    values = zshard.state_dict(model, all_ranks=True)
    before = one_step(model, rank, 0)
    writes = by_all or rank == 0
    for _ in range(2):
        model.blocks[1].writes = writes
        with pytest.raises(zshard.StateError if writes else zshard.MismatchError):
            one_step(model, rank, 0)
        model.blocks[1].writes = False
        assert torch.equal(one_step(model, rank, 0), before)
    after = zshard.state_dict(model, all_ranks=True)
    assert all(torch.equal(value, after[name]) for name, value in values.items())


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_what_was_written_to_whole_parameters_does_not_stay(strategy: str, by_all: bool) -> None:
    run_ranks(written_in_whole_parameters, 2, strategy, by_all)


def written_in_the_master(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(Blocks(block=Rewrites), strategy=strategy)
    values = zshard.state_dict(model, all_ranks=True)
    model.blocks[1].writes = True
    with pytest.raises(zshard.StateError, match=r"backward or forward changed one of blocks\.1"):
        one_step(model, rank, 0)
    model.blocks[1].writes = False
    one_step(model, rank, 0)
    after = zshard.state_dict(model, all_ranks=True)
    for name, value in values.items():
        written = name in ("blocks.1.up.weight", "blocks.1.down.weight")
        assert torch.equal(value + 1 if written else value, after[name])


@pytest.mark.parametrize("strategy", ["zero2", "ddp"])
def test_what_all_ranks_have_written_alike_in_the_master_stays(strategy: str) -> None:
    run_ranks(written_in_the_master, 2, strategy)


class Catches(Blocks):
    """One that goes on without its second block, where that is refused."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.inlet(x))
        try:
            x = self.blocks[1](x)
        except zshard.StateError:
            assert self.blocks[1].writes
        return self.outlet(self.blocks[2](x))


def refused_unit(rank: int, world_size: int, strategy: str, alone: bool) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(
        Catches(block=Rewrites), strategy=strategy, precision=zshard.Precision.bf16()
    )
    values = zshard.state_dict(model, all_ranks=True)
    before = one_step(model, rank, 0)
    model.blocks[1].writes = True
    if alone:
        x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
        with pytest.raises(zshard.StateError, match="backward or forward changed one of blocks"):
            model.blocks[1](x)
    else:
        one_step(model, rank, 0)
    model.blocks[1].writes = False
    after = zshard.state_dict(model, all_ranks=True)  # the modules hold the sharded parameters
    assert all(torch.equal(value, after[name]) for name, value in values.items())
    assert torch.equal(one_step(model, rank, 0), before)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_a_refused_unit_is_in_use_no_more(strategy: str, alone: bool, world_size: int) -> None:
    run_ranks(refused_unit, world_size, strategy, alone)


class Keeps(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.up.weight]
        return super().forward(x)


@pytest.mark.parametrize("through_data", [False, True])
def test_one_that_was_kept_is_guarded_while_a_backward_may_read_it(through_data: bool) -> None:
    model = zshard.wrap(Blocks(block=Keeps), precision=zshard.Precision.bf16())

    def hook(grad: Tensor) -> None:
        (kept,) = model.blocks[2].kept  # whose unit is resharded by now
        with pytest.raises(zshard.StateError, match="cannot change inside the forward or backward"):
            kept.requires_grad_(False)
        with torch.no_grad():
            (kept.data if through_data else kept).add_(1)

    def hooked(module: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(hook)

    handle = model.inlet.register_forward_hook(hooked)
    with pytest.raises(zshard.StateError, match=r"backward or forward changed one of blocks\.2"):
        one_step(model, 0, 0)
    handle.remove()
    one_step(model, 0, 0)


class RewritesRoot(Blocks):
    writes = raises = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes or self.raises:
            with torch.no_grad():
                self.inlet.weight.add_(1)
        out = super().forward(x)
        if self.raises:
            raise ArithmeticError
        return out


def test_what_one_rank_has_written_before_an_exception_does_not_stay() -> None:
    model = zshard.wrap(RewritesRoot(), precision=zshard.Precision.bf16())
    before = one_step(model, 0, 0)
    model.raises = True
    with pytest.raises(ArithmeticError):
        one_step(model, 0, 0)
    model.raises = False
    assert torch.equal(one_step(model, 0, 0), before)


def written_alike_but_refused_in_two_ways(rank: int, world_size: int, strategy: str) -> None:
    torch.manual_seed(0)
    model = zshard.wrap(RewritesRoot(), strategy=strategy)
    one_step(model, rank, 0)
    model.writes, model.raises = True, rank == 1
    with pytest.raises(ArithmeticError if rank == 1 else zshard.StateError):
        one_step(model, rank, 0)
    model.writes = model.raises = False
    one_step(model, rank, 0)


@pytest.mark.parametrize("strategy", ["zero2", "ddp"])
def test_a_master_that_all_have_written_alike_is_not_torn_by_another_exception(
    strategy: str,
) -> None:
    run_ranks(written_alike_but_refused_in_two_ways, 2, strategy)


def write_in_backward(model: nn.Module, at: tuple[int, ...]) -> Tensor:
    """One whose backward writes to parameters that were kept from the last forward."""

    def hook(grad: Tensor) -> None:
        with torch.no_grad():
            for index in at:
                model.blocks[index].kept[0].add_(1)

    x = torch.ones(3, requires_grad=True) * 2
    x.register_hook(hook)
    return x


def test_what_a_backward_wrote_to_several_units_is_told_once_and_does_not_stay() -> None:
    model = zshard.wrap(Blocks(block=Keeps), precision=zshard.Precision.bf16())
    before = one_step(model, 0, 0)
    x = write_in_backward(model, (0, 1, 2))
    with pytest.raises(zshard.StateError, match=r"backward or forward changed one of blocks\.\d"):
        (model(x).sum() + x.sum()).backward()
    model.order = (0, 1)  # a step without a unit that was written
    one_step(model, 0, 0)
    model.order = (0, 1, 2)
    assert torch.equal(one_step(model, 0, 0), before)


@pytest.mark.parametrize("alone", [False, True])
def test_what_a_backward_of_something_else_wrote_is_no_silent_loss(alone: bool) -> None:
    model = zshard.wrap(Blocks(block=Keeps), precision=zshard.Precision.bf16())
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)

    def call() -> Tensor:
        return model.blocks[1](x) if alone else one_step(model, 0, 0)

    before = [one_step(model, 0, 0), call()][-1]
    write_in_backward(model, (1,)).sum().backward()
    with pytest.raises(zshard.StateError, match=r"backward or forward changed one of blocks\.1"):
        call()
    assert torch.equal(call(), before)


@pytest.mark.parametrize("mixed", [True, False])
def test_what_a_hook_wrote_to_a_unit_that_was_gathered_ahead_is_no_silent_loss(
    mixed: bool,
) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))  # the first saves no weight
    precision = zshard.Precision.bf16() if mixed else None
    zshard.wrap(model, units=[nn.Linear], precision=precision)
    kept: list[Tensor] = []
    handle = model[0].register_forward_hook(lambda module, *_: kept.append(module.weight))
    one_step(model, 0, 0)
    handle.remove()
    out = model(torch.ones(4, 3))

    def hook(grad: Tensor) -> None:  # behind that which gathers both
        with torch.no_grad():
            kept[0].add_(1)

    out.register_hook(hook)
    with pytest.raises(zshard.StateError, match=r"backward or forward changed one of 0\.weight"):
        out.sum().backward()
    one_step(model, 0, 0)
