"""adamw_: the reference's bits in every form it takes, and torch.optim's values."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields

import pytest
import torch
from ops_check import F, Twins, assert_same, check, devices, odd, refuses
from torch import Tensor

from zshard import ops, reference

kDecoupled = [1e-3, 0.9, 0.999, 1e-8, 0.01, 1.0]
kL2 = [1e-2, 0.8, 0.99, 1e-6, 0.1, 0.0]
kSizes = [5001, 70_003, 0, 1]


@dataclass
class Call:
    """The arguments of adamw_, by name."""

    masters: list[Tensor]
    lows: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    grads: list[Tensor]
    sends: list[Tensor]
    segments: Tensor
    hypers: Tensor
    steps: Tensor
    active: Tensor | None = None
    grad_scale: Tensor | None = None
    skip: Tensor | None = None

    def arguments(self) -> list[object]:
        return [getattr(self, field.name) for field in fields(self)]


def make(
    sizes: list[int] = kSizes,
    segments: list[list[int]] | None = None,
    grad_dtype: torch.dtype = torch.float32,
    send_dtype: torch.dtype | None = None,
    split: bool = False,
    start: int = 0,
) -> Call:
    """Random shards, `start` elements off alignment; one segment a shard unless given."""
    masters = [odd(size, torch.float32, start) for size in sizes]
    lows: list[Tensor] = []
    if split:
        values, masters = masters, [odd(size, torch.bfloat16, start) for size in sizes]
        lows = [torch.zeros(size + start, dtype=torch.int16)[start:] for size in sizes]
        for hi, lo, value in zip(masters, lows, values, strict=True):
            reference.split_master_(hi, lo, value)
    rows = segments or [[u, 0, size] for u, size in enumerate(sizes)]
    hypers = [kDecoupled if g % 2 == 0 else kL2 for g in range(len(rows))]
    return Call(
        masters=masters,
        lows=lows,
        exp_avgs=[odd(size, torch.float32, start) for size in sizes],
        exp_avg_sqs=[odd(size, torch.float32, start).square_() for size in sizes],
        grads=[odd(size, grad_dtype, start) for size in sizes],
        sends=[odd(size, send_dtype, start) for size in sizes] if send_dtype else [],
        segments=torch.tensor(rows, dtype=torch.int64).view(-1, 3),
        hypers=torch.tensor(hypers, dtype=torch.float64).view(-1, 6),
        steps=torch.tensor([(0, 5, 1000)[g % 3] for g in range(len(rows))], dtype=torch.int64),
    )


kPartial = [[1, 9, 33], [0, 3, 17], [0, 17, 4003], [1, 50, 69_999], [1, 33, 33], [3, 0, 1]]
kForms = [(None, False), (torch.bfloat16, False), (torch.float16, False), (None, True)]


@devices
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize(("send_dtype", "split"), kForms)
@pytest.mark.parametrize("grad_dtype", F)
def test_adamw_updates_its_segments_and_nothing_else(
    device: str, grad_dtype: torch.dtype, send_dtype: torch.dtype | None, split: bool, start: int
) -> None:
    call = make(kSizes, kPartial, grad_dtype, send_dtype, split, start)
    check("adamw_", device, *call.arguments())
    check("adamw_", device, *make(kSizes, None, grad_dtype, send_dtype, split, start).arguments())


@devices
def test_grad_scale_multiplies_every_gradient(device: str) -> None:
    call = make()
    call.grad_scale = torch.tensor([0.37])
    check("adamw_", device, *call.arguments())


@devices
@pytest.mark.parametrize("split", [False, True])
def test_infinities_and_nan_go_through(device: str, split: bool) -> None:
    call = make([64], split=split)
    for i, value in enumerate([float("nan"), float("inf"), -float("inf"), 1e38, 1e-45]):
        call.grads[0][i] = value
        call.exp_avg_sqs[0][i + 8] = value
        call.exp_avgs[0][i + 16] = value
    check("adamw_", device, *call.arguments())


@devices
def test_an_inactive_segment_is_left_alone(device: str) -> None:
    call = make(kSizes, kPartial, send_dtype=torch.bfloat16)
    call.active = torch.tensor([1, 0, 1, 0, 1, 0], dtype=torch.uint8)
    before = copy.deepcopy(call)
    check("adamw_", device, *call.arguments())
    assert call.steps.tolist() == [1, 5, 1001, 0, 6, 1000]
    assert_same(call.masters[0][3:17], before.masters[0][3:17])


@devices
@pytest.mark.parametrize("skip", [1.0, -2.0, float("nan"), 0.0])
def test_a_nonzero_skip_changes_nothing(device: str, skip: float) -> None:
    call = make(send_dtype=torch.bfloat16)
    call.skip = torch.tensor([skip])
    before = copy.deepcopy(call)
    check("adamw_", device, *call.arguments())
    assert torch.equal(call.steps, before.steps) == (skip != 0.0)
    assert torch.equal(call.masters[1], before.masters[1]) == (skip != 0.0)


@devices
def test_a_thousand_small_shards(device: str) -> None:
    sizes = [(37 * i) % 411 for i in range(1000)]
    check("adamw_", device, *make(sizes, send_dtype=torch.bfloat16).arguments())


@devices
@pytest.mark.parametrize("start", [0, 1, 32])
def test_a_large_send_buffer(device: str, start: int) -> None:
    call = make([2_400_001], [[0, 5, 2_400_000]], torch.bfloat16, torch.bfloat16, start=start)
    check("adamw_", device, *call.arguments())


@devices
def test_no_shards_and_no_segments_is_a_no_op(device: str) -> None:
    check("adamw_", device, *make([], []).arguments())
    call = make([10])
    call.segments, call.hypers, call.steps = call.segments[:0], call.hypers[:0], call.steps[:0]
    check("adamw_", device, *call.arguments())


@devices
def test_an_element_has_the_same_bits_wherever_it_lies(device: str) -> None:
    numel = 10_001
    whole = make([numel], [[0, 0, numel]])
    pieces = [[0, a, b] for a, b in zip([0, 1, 6, 4099], [1, 6, 4099, numel], strict=True)]
    cut = make([numel], pieces)
    shifted = make([numel], [[0, 0, numel]], start=3)
    for other in (cut, shifted):
        for name in ("masters", "exp_avgs", "exp_avg_sqs", "grads"):
            getattr(other, name)[0].copy_(getattr(whole, name)[0])
        other.hypers = whole.hypers.expand(len(other.segments), 6).contiguous()
        other.steps = whole.steps.expand(len(other.segments)).clone()
    results = []
    for call in (whole, cut, shifted):
        moved = Twins(device).of(call.arguments())
        ops.adamw_(*moved)
        results.append(moved[0][0].cpu())
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("hyper", [kDecoupled, kL2])
def test_adamw_agrees_with_torch_within_rounding(hyper: list[float]) -> None:
    lr, beta1, beta2, eps, decay, decoupled = hyper
    param = torch.nn.Parameter(torch.randn(4097))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    torch_opt = kind([param], lr, (beta1, beta2), eps, decay, foreach=False)
    call = make([4097])
    call.masters[0].copy_(param.detach())
    call.exp_avgs[0].zero_()
    call.exp_avg_sqs[0].zero_()
    call.hypers = torch.tensor([hyper], dtype=torch.float64)
    for _ in range(10):
        call.grads[0].normal_()
        param.grad = call.grads[0].clone()
        torch_opt.step()
        ops.adamw_(*call.arguments())
    # A few roundings a step, each 2^-24 of the parameter or of the step it takes.
    torch.testing.assert_close(call.masters[0], param.detach(), rtol=2**-20, atol=lr * 2**-16)
    torch.testing.assert_close(call.exp_avgs[0], torch_opt.state[param]["exp_avg"])
    torch.testing.assert_close(call.exp_avg_sqs[0], torch_opt.state[param]["exp_avg_sq"])


def test_errors_give_values_and_remedy() -> None:
    def broken(match: list[str], sizes: list[int] = [8, 9], **changes: object) -> None:  # noqa: B006
        call = make(sizes)
        for name, value in changes.items():
            setattr(call, name, value)
        refuses("adamw_", *call.arguments(), match=match)

    half, whole = torch.bfloat16, [torch.empty(8), torch.empty(9)]
    low = [torch.empty(n, dtype=torch.int16) for n in (8, 9)]
    broken(["exp_avgs has 1 entries but masters has 2"], exp_avgs=whole[:1])
    broken(["sends has 1 entries", "or none"], sends=[whole[0].to(half)])
    broken(["lows and sends", "sends=[]"], lows=low, sends=[t.to(half) for t in whole])
    broken(["masters[0] is float32", "must be bfloat16"], lows=low)
    broken(["exp_avg_sqs[1] has 8 elements", "must have 9"], exp_avg_sqs=[whole[0]] * 2)
    broken(["exp_avgs[0] is bfloat16", "float32"], exp_avgs=[t.to(half) for t in whole])
    broken(["grads[1] is bfloat16", "must be float32"], grads=[whole[0], whole[1].to(half)])
    broken(["grads are float64", "cast them"], grads=[t.double() for t in whole])
    broken(["sends are float32", "sends=[]"], sends=whole)
    broken(["grads[0] is", "1-D"], grads=[whole[0].view(2, 4), whole[1]])
    broken(["hypers is", "shape (2, 6)"], hypers=torch.zeros(2, 5, dtype=torch.float64))
    broken(["segments is int32"], segments=torch.zeros(2, 3, dtype=torch.int32))
    broken(["steps has 3 elements"], steps=torch.zeros(3, dtype=torch.int64))
    broken(["active is float32", "uint8"], active=torch.ones(2))
    broken(["grad_scale has 2 elements"], grad_scale=torch.ones(2))
    broken(["skip is float64", "float32"], skip=torch.ones(1).double())
    for rows, texts in [
        ([[0, 0, 8], [2, 0, 1]], ["[2, 0, 1]", "outside [0, 2)"]),
        ([[0, 0, 8], [1, 3, 10]], ["[1, 3, 10]", "9 elements"]),
        ([[0, 5, 4], [1, 0, 1]], ["[0, 5, 4]", "8 elements"]),
        ([[0, 3, 5], [0, 0, 4]], ["[0, 0, 4] and [0, 3, 5] overlap"]),
    ]:
        broken(texts, segments=torch.tensor(rows))
