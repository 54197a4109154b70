"""zshard.method: methods other than forward. Buffers: those of the first rank, as under DDP."""

from __future__ import annotations

from contextlib import nullcontext

import models
import pytest
import torch
from models import Blocks
from ranks import run_ranks
from steps import batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zshard
from zshard.unit import State
from zshard.wrap import schedule_of


class Encoder(Blocks):
    """Can be called in parts, and several times."""

    def encode(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.inlet(x)
        for block in self.blocks[:2]:
            x = block(x)
        return {"features": x @ self.outlet.weight.t() * scale}

    def repeat(self, x: Tensor, times: int) -> Tensor:
        total = self.inlet(x).sum()
        for _ in range(times):
            total = total + self(x).sum()
        return total + self.blocks[1](self.inlet(x)).sum()

    def fail(self, x: Tensor) -> Tensor:
        raise ValueError("user code")


def parts(rank: int, world_size: int, grad: bool) -> list[str]:
    """Names of results that differ from the plain model's."""
    sides = []
    for is_wrapped in (True, False):
        torch.manual_seed(0)
        model = Encoder()
        if is_wrapped:
            zshard.wrap(model)
            encode = zshard.method(model, "encode")
            zshard.method(model, "repeat")
            assert model.encode is encode is zshard.method(model, "encode")
        results: dict[str, Tensor] = {}
        for step in range(3):
            model.zero_grad()
            with nullcontext() if grad else torch.no_grad():
                x = batch(rank, step)
                out = model.encode(x, scale=0.5)["features"].sum()
                out = out + model.repeat(x, times=step + 1) + model(x).sum()
            results[f"{step}"] = out.detach()
            if grad:
                (out / world_size if not is_wrapped else out).backward()
                for name, parameter in model.named_parameters():
                    if is_wrapped:
                        results[f"{step} {name}"] = zshard.full_grad(model, name).clone()
                    else:
                        total = parameter.grad.clone()
                        if world_size > 1:
                            torch.distributed.all_reduce(total)
                        results[f"{step} {name}"] = total
        if is_wrapped and not grad:
            assert all(unit.state is State.SHARDED for unit in schedule_of(model).units)
        sides.append(results)
    return [
        name
        for name, ours in sides[0].items()
        if not torch.allclose(ours, sides[1][name], rtol=1e-5, atol=1e-6)
    ]


@pytest.mark.parametrize("grad", [True, False])
def test_methods_gather_as_forward_does_alone_and_around_the_model(grad: bool) -> None:
    assert parts(0, 1, grad) == []
    assert run_ranks(parts, 2, grad) == [[], []]


def test_without_it_the_roots_own_parameters_are_refused_by_name() -> None:
    model = zshard.wrap(Encoder())
    with pytest.raises(zshard.ShardedAccessError, match=r"inlet\.weight.*method\(model, 'encode'"):
        model.encode(batch(0, 0))
    with pytest.raises(zshard.ShardedAccessError, match="Read it with zshard"):
        (lambda self: self.inlet(batch(0, 0)))(model)  # in no method that could gather


def test_after_an_exception_in_a_method_the_model_goes_on() -> None:
    model = zshard.wrap(Encoder())
    zshard.method(model, "fail")
    with pytest.raises(ValueError, match="user code"):
        model.fail(batch(0, 0))
    assert all(unit.state is State.SHARDED for unit in schedule_of(model).units)
    model(batch(0, 0)).sum().backward()


class Generator(nn.Module):
    """Whose method calls the model itself, as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != 4:
            raise ValueError("user code")
        for layer in (self.inlet, *self.blocks):
            x = layer(x)
        return x

    @torch.no_grad()
    def generate(self, x: torch.Tensor, times: int, handle: bool = False) -> torch.Tensor:
        for _ in range(times):
            try:
                x = self(x)
            except ValueError:
                if not handle:
                    raise
        return x


def generates(
    rank: int, world_size: int, comm: str, calls: list[list[tuple[int, ...]]]
) -> list[str]:
    """How each call ended, of a width and as many forwards as this rank is told, by position."""
    model = zshard.wrap(Generator(), comm=comm, init="trust")
    zshard.method(model, "generate")
    ends = []
    for width, *how in calls[rank]:
        try:
            model.generate(torch.ones(2, width), *how)
            ends.append("made")
        except (ValueError, zshard.MismatchError) as error:
            ends.append(type(error).__name__)
    return ends


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_an_exception_in_a_method_that_calls_the_model_costs_every_rank_that_call(
    comm: str,
) -> None:
    fine, wide, more = (4, 2), (5, 2), (4, 5)
    own, other = run_ranks(generates, 2, comm, [[fine] * 4, [fine, wide, fine, fine]], timeout=20)
    assert own == ["made", "MismatchError", "made", "made"]
    assert other == ["made", "ValueError", "made", "made"]
    handled = [[fine, fine, fine], [fine, (*wide, True), fine]]
    assert run_ranks(generates, 2, comm, handled, timeout=20) == [["made"] * 3] * 2
    both = run_ranks(generates, 2, comm, [[fine, wide, fine]] * 2, timeout=20)
    assert both == [["made", "ValueError", "made"]] * 2
    both = run_ranks(generates, 2, comm, [[fine, fine, fine], [fine, more, fine]], timeout=20)
    assert both == [["made", "MismatchError", "made"]] * 2


@pytest.mark.parametrize(
    ("name", "said"),
    [("decode", "no method 'decode'"), ("order", "no method 'order'"), ("forward", "call the mo")],
)
def test_what_is_no_such_method_is_refused_by_name(name: str, said: str) -> None:
    with pytest.raises(zshard.InputError, match=said):
        zshard.method(zshard.wrap(Encoder()), name)


class Normalised(nn.Module):
    """Convolutions with BatchNorm, and a cache that is no part of the state."""

    def __init__(self, caches: bool = True) -> None:
        super().__init__()
        self.caches = caches
        self.stem = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(5, 5, 1), nn.BatchNorm2d(5)) for _ in range(2))
        )
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.caches:
            self.cache = torch.zeros(int(x.sum().abs()) + 1)  # of another size on every rank
        return self.layers(self.norm(self.stem(x)).relu()).mean((1, 2, 3))


def normalised(rank: int, world_size: int, strategy: str) -> list[str]:
    sides, tags = [], []
    for is_wrapped in (True, False):
        torch.manual_seed(0)
        model = Normalised(caches=is_wrapped)  # DDP broadcasts caches too, and aborts
        run = (
            zshard.wrap(model, strategy=strategy) if is_wrapped else DistributedDataParallel(model)
        )
        if is_wrapped:
            schedule_of(model).comm.interpose = lambda op, tag: tags.append((op, tag.step))
        optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
        results = {}
        for step in range(4):
            x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = (run(x) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.eval()
            with torch.no_grad():
                results[f"evaluation {step}"] = run(x)
            run.train()
            results[f"loss {step}"] = loss.detach()
        results |= {name: b.clone() for name, b in model.named_buffers() if name != "cache"}
        sides.append(results)
    # Before each forward; evaluations come after the backward, from which on it is the next step.
    assert {step for op, step in tags if op == "broadcast"} == {0, 1, 2, 3, 4}
    return [name for name, ours in sides[0].items() if not torch.equal(ours, sides[1][name])]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "ddp"])
def test_batch_norm_trains_and_evaluates_as_under_ddp(strategy: str) -> None:
    assert run_ranks(normalised, 2, strategy) == [[], []]


def half_precision(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(0)
    model = zshard.wrap(Normalised(), precision=zshard.Precision.bf16())
    dtypes = {
        name: flat.dtypes.compute
        for unit in schedule_of(model).units
        for flat in unit.flats
        for name in flat.names
    }
    assert dtypes["norm.weight"] == torch.float32
    assert dtypes["stem.weight"] == torch.bfloat16
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
        loss = (model(x).float() - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_batch_norm_computes_in_the_dtype_of_its_statistics_in_a_bf16_model() -> None:
    for losses in (half_precision(0, 1), *run_ranks(half_precision, 2)):
        assert losses[-1] < 0.9 * losses[0]


def broadcasts(rank: int, world_size: int) -> list[int]:
    torch.manual_seed(0)
    model = zshard.wrap(Normalised())
    counts = []
    for step in range(7):
        model.train(step < 3)
        if step == 6:  # another tensor, while the one before is kept
            _kept, model.norm.running_mean = model.norm.running_mean, torch.ones(5)
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        zshard.stats(model).reset()
        with torch.no_grad():
            model(x)
        counts.append(zshard.stats(model).calls["broadcast"])
    return counts


def test_buffers_are_broadcast_only_after_somebody_has_changed_them() -> None:
    # Two dtypes; the last training step's changes go out before the first evaluation.
    assert run_ranks(broadcasts, 2) == [[2, 2, 2, 2, 0, 0, 2]] * 2


def unlike_buffers(rank: int, world_size: int) -> str:
    model = models.build("blocks")
    model.register_buffer("table", torch.zeros(3 + rank))
    zshard.wrap(model)
    with pytest.raises(zshard.MismatchError, match="persistent=False") as caught:
        model(batch(rank, 0))
    return str(caught.value)


class Unnoticed(nn.Module):
    """Writes to its buffers in ways that leave no trace on them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        found = y.detach().mean(0)
        if self.how == "batch_norm":
            return nn.functional.batch_norm(y, self.mean, self.var, training=self.training)
        if self.training and self.how == "data":
            self.mean.data.mul_(0.9).add_(found, alpha=0.1)
        if self.training and self.how == "replaced":
            for _ in range(2):  # the second may get the address of the one before the first
                self.mean = self.mean.lerp(found, 0.1)
        return y + self.mean


def evaluated(rank: int, world_size: int, how: str, ddp: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Unnoticed(how)
    model = DistributedDataParallel(model) if ddp else zshard.wrap(model)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(5):
        model(torch.randn(8, 4, generator=drawn)).square().mean().backward()
    model.eval()
    with torch.no_grad():
        return [model(torch.ones(1, 4)) for _ in range(2)]


@pytest.mark.parametrize("how", ["batch_norm", "data", "replaced"])
def test_buffers_written_without_a_trace_are_the_first_ranks_as_under_ddp(how: str) -> None:
    expected, found = (run_ranks(evaluated, 2, how, ddp) for ddp in (True, False))
    for rank in range(2):
        for value in found[rank]:
            torch.testing.assert_close(value, expected[0][0])


def test_persistent_buffers_of_other_shapes_are_refused_by_name_on_every_rank() -> None:
    for said in run_ranks(unlike_buffers, 2):
        assert "(3,) torch.float32 on ranks [0], table (4,) torch.float32 on ranks [1]" in said


def expanded_buffers(rank: int, world_size: int) -> list[float]:
    model = nn.Linear(2, 2)
    model.register_buffer("row", torch.tensor([[1.0], [2.0]]).mul(rank + 1).expand(2, 3))
    zshard.wrap(model)
    model(torch.ones(2))
    assert model.row.stride() == (1, 0)
    return model.row.flatten().tolist()


def registered_in_orders(rank: int, world_size: int) -> dict[str, float]:
    model = nn.Linear(2, 2)
    for name in ("a", "b") if rank == 0 else ("b", "a"):
        model.register_buffer(name, torch.tensor(ord(name) + 0.5 * rank))
    zshard.wrap(model)(torch.ones(2))
    return {name: float(buffer) for name, buffer in model.named_buffers()}


def test_ranks_may_have_registered_their_buffers_in_different_orders() -> None:
    assert run_ranks(registered_in_orders, 2) == [{"a": 97.0, "b": 98.0}] * 2


def test_an_expanded_buffer_is_the_first_ranks_too() -> None:
    assert run_ranks(expanded_buffers, 2) == [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 2
