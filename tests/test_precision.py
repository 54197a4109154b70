"""bf16 compute equals a plain model that makes the same casts; what is read back is the master.

The reference keeps fp32 masters, runs a bf16 copy of the model on every rank's batch in turn, casts
each gradient to the reduce dtype, averages in fp32 in rank order, and steps AdamW on the masters.
At N = 1 and 2 the average divides exactly, so the comparison is bit by bit.
"""

from __future__ import annotations

import dataclasses

import models
import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from training import STEPS, Record, Wrapped, adamw, assert_close, assert_same_bits, train

import zshard
from zshard.containers import cast_floating

CASES = ["blocks", "odd_parameters", "channels_last", "tied_in_one_unit", "unused", "gpt"]


class Masters(nn.Module):
    """The fp32 masters of a model, as parameters under the model's own names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.named = dict(model.named_parameters())

    def parameters(self, recurse: bool = True):
        return iter(self.named.values())


def as_compute(batch: Tensor) -> Tensor:
    return batch.bfloat16() if batch.is_floating_point() else batch


def mean_in_rank_order(gradients: list[Tensor | None], reduce: torch.dtype) -> Tensor | None:
    """Average what the ranks sent: summed in fp32, rounded once to the reduce dtype."""
    if all(gradient is None for gradient in gradients):
        return None
    total = gradients[0].to(reduce).float()
    for gradient in gradients[1:]:
        total = total + gradient.to(reduce).float()
    return (total / len(gradients)).to(reduce).float()


def reference(name: str, rank: int, world_size: int, reduce: torch.dtype) -> Record:
    """Train the case as bf16 compute is defined, every rank's part in this process."""
    masters = Masters(models.build(name))
    optimizer = adamw(masters)
    model = models.build(name).bfloat16()
    data = [models.batches(name, STEPS, other) for other in range(world_size)]
    record = Record()
    for step in range(STEPS):
        with torch.no_grad():
            for key, master in masters.named.items():
                model.get_parameter(key).copy_(master)
        sent: dict[str, list[Tensor | None]] = {key: [] for key in masters.named}
        for other in range(world_size):
            model.zero_grad()
            loss = models.loss_of(model, as_compute(data[other][step]))
            loss.backward()
            if other == rank:
                record.losses.append(loss.detach())
            for key, gradients in sent.items():
                gradients.append(model.get_parameter(key).grad)
            model.zero_grad(set_to_none=True)
        for key, master in masters.named.items():
            master.grad = mean_in_rank_order(sent[key], reduce)
        record.gradients.append({key: p.grad for key, p in masters.named.items()})
        optimizer.step()
        optimizer.zero_grad()
    record.parameters = {key: p.detach().clone() for key, p in masters.named.items()}
    return record


def wrapped(name: str, rank: int, reduce: torch.dtype) -> Record:
    model = zshard.wrap(models.build(name), precision=zshard.Precision.bf16(reduce=reduce))
    record = train(Wrapped(model), adamw(model), models.batches(name, STEPS, rank))
    for gradients in record.gradients:
        gradients.update({k: None if g is None else g.float() for k, g in gradients.items()})
    return record


def both_sides(rank: int, world_size: int, name: str, reduce: torch.dtype) -> tuple[Record, Record]:
    return wrapped(name, rank, reduce), reference(name, rank, world_size, reduce)


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_one_rank_equals_the_reference_bit_by_bit(name: str, reduce: torch.dtype) -> None:
    actual, expected = both_sides(0, 1, name, reduce)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["odd_parameters", "unused", "gpt"])
def test_two_ranks_equal_the_reference_bit_by_bit(name: str, reduce: torch.dtype) -> None:
    for actual, expected in run_ranks(both_sides, 2, name, reduce):
        assert_same_bits(actual, expected)


def test_three_ranks_are_within_a_bf16_rounding_of_the_reference() -> None:
    # A third is not exact: one bf16 rounding of a gradient may fall the other way (2^-8), and
    # AdamW moves an element by at most lr = 1e-2 a step whatever its gradient.
    for actual, expected in run_ranks(both_sides, 3, "blocks", torch.float32):
        assert_close(actual, expected, tolerance=2e-2)


class Spy(nn.Module):
    """Records what its forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, OUTPUTS)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, ids: Tensor, extra: dict[str, Tensor]) -> dict[str, Tensor]:
        self.seen += [x.dtype, ids.dtype, extra["y"].dtype, self.inner.weight.dtype]
        return {"out": self.inner(x.to(self.inner.weight.dtype)), "ids": ids}


OUTPUTS = 5


def spy(precision: zshard.Precision) -> tuple[list[torch.dtype], dict[str, Tensor]]:
    model = zshard.wrap(Spy(), precision=precision)
    out = model(torch.ones(2, 3), torch.ones(2, dtype=torch.int64), {"y": torch.ones(2)})
    return model.seen, out


def test_floating_point_inputs_are_cast_wherever_they_lie_and_others_are_not() -> None:
    seen, out = spy(zshard.Precision.bf16())
    assert seen == [torch.bfloat16, torch.int64, torch.bfloat16, torch.bfloat16]
    assert out["out"].dtype == torch.bfloat16 and out["ids"].dtype == torch.int64


def test_cast_inputs_false_leaves_the_inputs() -> None:
    seen, _ = spy(zshard.Precision(compute=torch.bfloat16, cast_inputs=False))
    assert seen == [torch.float32, torch.int64, torch.float32, torch.bfloat16]


def test_output_dtype_is_what_the_caller_gets() -> None:
    _, out = spy(zshard.Precision.bf16(output=torch.float32))
    assert out["out"].dtype == torch.float32 and out["ids"].dtype == torch.int64


def test_what_is_read_back_is_the_fp32_master() -> None:
    model = zshard.wrap(models.build("blocks"), precision=zshard.Precision.bf16())
    before = models.build("blocks").get_parameter("outlet.weight")
    assert not torch.equal(before, before.bfloat16().float())
    assert torch.equal(zshard.full_param(model, "outlet.weight"), before)
    with zshard.full_params(model):
        assert torch.equal(model.get_parameter("outlet.weight"), before)


def test_an_update_below_a_bf16_step_is_not_lost() -> None:
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    model = zshard.wrap(model, precision=zshard.Precision.bf16())
    optimizer = zshard.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(5):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # bf16's step below 1 is 2^-8: five updates of 1e-4 in bf16 would leave 1.
    torch.testing.assert_close(
        zshard.full_param(model, "weight"), torch.full((1, 3), 1 - 5e-4), atol=1e-6, rtol=0
    )


def foreign_writes(rank: int, world_size: int) -> list[Tensor]:
    """Outputs after each way other than zshard's optimizers of writing the master."""
    torch.manual_seed(2)
    model = zshard.wrap(nn.Linear(3, 7, bias=False), precision=zshard.Precision.bf16())
    x = torch.ones(1, 3)
    outputs = [model(x)]
    outputs[0].sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    outputs.append(model(x))
    with zshard.full_params(model, write=True), torch.no_grad():
        model.weight.fill_(4.0)
    outputs.append(model(x))
    for shard in zshard.local_shards(model).values():
        shard.fill_(5.0)
    zshard.mark_updated(model)
    outputs.append(model(x))
    return [output.detach().float() for output in outputs]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_next_forward_computes_with_what_others_wrote_into_the_master(world_size: int) -> None:
    run = foreign_writes
    for outputs in [run(0, 1)] if world_size == 1 else run_ranks(run, world_size):
        # The gradient of each weight is 1, so SGD with lr 1 takes 3 off the sum over a row.
        torch.testing.assert_close(outputs[1], outputs[0] - 3.0, atol=0.05, rtol=0)
        assert outputs[2].unique().tolist() == [12.0] and outputs[3].unique().tolist() == [15.0]


def test_bf16_parameters_read_back_in_their_own_dtype() -> None:
    plain = models.build("blocks").bfloat16()
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model = zshard.wrap(plain)
    for name, value in expected.items():
        whole = zshard.full_param(model, name)
        assert whole.dtype == torch.bfloat16 and torch.equal(whole, value)


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Tensor
    ids: Tensor
    parts: tuple[Tensor, ...] = ()
    name: str = "batch"


class TakesAndGives(nn.Module):
    """Takes a dataclass and returns one, with the dtypes that it was given in its name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch: Batch) -> Batch:
        seen = f"{batch.x.dtype} {batch.ids.dtype} {batch.parts[0].dtype}"
        return Batch(self.linear(batch.x), batch.ids, (batch.x,), seen)


def test_dataclasses_are_cast_on_the_way_in_and_out_and_else_left_alone() -> None:
    precision = zshard.Precision.bf16(output=torch.float64)
    model = zshard.wrap(TakesAndGives(), precision=precision)
    given = Batch(torch.ones(1, 3), torch.ones(1, dtype=torch.int64), (torch.ones(2),))
    out = model(given)
    assert out.name == "torch.bfloat16 torch.int64 torch.bfloat16"
    assert given.x.dtype == torch.float32, "the caller's own is not changed"
    assert out.x.dtype == out.parts[0].dtype == torch.float64 and out.ids.dtype == torch.int64
    only = Batch(torch.ones(1), torch.ones(1, dtype=torch.int64), name="kept")
    assert cast_floating([only], torch.float32)[0] is only


class KeptInFp32(models.Block):
    """A block that casts around its norm, which stays in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x.float()).to(x.dtype)
        return x + self.down(self.up(normed).relu())


def kept_in_fp32(rank: int, world_size: int) -> list[str]:
    """Gradients that are not the plain model's, averaged by hand."""
    sides = []
    for is_wrapped in (True, False):
        torch.manual_seed(0)
        model = models.Blocks(block=KeptInFp32).bfloat16()
        for block in model.blocks:
            block.norm.float()
        if is_wrapped:
            zshard.wrap(model)
        model(models.batches("blocks", 1)[0].bfloat16()).float().square().sum().backward()
        sides.append(
            {
                name: zshard.full_grad(model, name) if is_wrapped else p.grad
                for name, p in model.named_parameters()
            }
        )
    assert sides[0]["blocks.0.norm.weight"].dtype == torch.float32
    return [n for n, grad in sides[1].items() if not torch.equal(sides[0][n], grad)]


def test_a_module_kept_in_fp32_inside_a_bf16_model_has_the_plain_models_bits() -> None:
    # Both ranks have the same batch, so the average is each one's gradient.
    assert kept_in_fp32(0, 1) == []
    assert run_ranks(kept_in_fp32, 2) == [[], []]


class MixedDtypes(nn.Module):
    """Parameters of three dtypes in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.second = nn.Linear(7, 5).bfloat16()
        self.third = nn.Linear(5, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).bfloat16()).double())


def mixed_dtypes(rank: int, world_size: int) -> list[str]:
    """What of a mixed unit's loss, gradients and values is not the plain model's."""
    sides = []
    for is_wrapped in (False, True):
        torch.manual_seed(3)
        model = zshard.wrap(MixedDtypes()) if is_wrapped else MixedDtypes()
        out = model(models.batches("blocks", 1)[0]).sum()
        out.backward()
        read = {
            name: (zshard.full_param(model, name), zshard.full_grad(model, name))
            if is_wrapped
            else (p.detach(), p.grad)
            for name, p in model.named_parameters()
        }
        sides.append({"loss": (out.detach(), out.detach()), **read})
    return [
        f"{name}: {ours} against {theirs}"
        for name in sides[0]
        for ours, theirs in zip(sides[1][name], sides[0][name], strict=True)
        if ours.dtype != theirs.dtype or not torch.equal(ours, theirs)
    ]


def test_three_dtypes_in_one_unit_keep_the_plain_models_bits() -> None:
    assert mixed_dtypes(0, 1) == []
    assert run_ranks(mixed_dtypes, 2) == [[], []]


def test_fp64_parameters_stay_exact() -> None:
    def run(model: nn.Module, wrap: bool) -> list[Tensor]:
        model = zshard.wrap(model) if wrap else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for batch in models.batches("blocks", STEPS):
            loss = (model(batch.double()) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    expected = run(models.build("blocks").double(), wrap=False)
    actual = run(models.build("blocks").double(), wrap=True)
    assert expected[0].dtype == torch.float64
    # torch's SGD rounds alike everywhere in fp64 up to fused multiply-adds: far below fp32's 1e-7.
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    "arguments",
    [{"compute": torch.int32}, {"reduce": "bf16"}, {"output": torch.complex64}, {"master": "fp8"}],
    ids=str,
)
def test_an_impossible_precision_is_refused_by_name(arguments: dict[str, object]) -> None:
    with pytest.raises(zshard.Error, match=next(iter(arguments))):
        zshard.Precision(**arguments)
