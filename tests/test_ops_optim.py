"""adamw_ and sgd_: the reference's bits in every form that an optimizer's step takes."""

from __future__ import annotations

import copy

import pytest
import torch
from ops_check import F, Twins, assert_same, check, devices
from optim_calls import HYPERS, SIZES, STATES, make, refuses_change

from zshard import ops

PARTIAL = [[1, 9, 33], [0, 3, 17], [0, 17, 4003], [1, 50, 69_999], [1, 33, 33], [3, 0, 1]]
FORMS = [(None, False), (torch.bfloat16, False), (torch.float16, False), (None, True)]

every_op = pytest.mark.parametrize("op", sorted(STATES))


@devices
@every_op
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize(("send_dtype", "split"), FORMS)
@pytest.mark.parametrize("grad_dtype", F)
def test_a_step_updates_its_segments_and_nothing_else(
    device: str,
    op: str,
    grad_dtype: torch.dtype,
    send_dtype: torch.dtype | None,
    split: bool,
    start: int,
) -> None:
    for segments in (PARTIAL, None):
        call = make(op, SIZES, segments, grad_dtype, send_dtype, split, start)
        check(op, device, *call.arguments())


@devices
@every_op
def test_grad_scale_multiplies_every_gradient(device: str, op: str) -> None:
    call = make(op)
    call.grad_scale = torch.tensor([0.37])
    check(op, device, *call.arguments())


@devices
@every_op
@pytest.mark.parametrize("split", [False, True])
def test_infinities_and_nan_go_through(device: str, op: str, split: bool) -> None:
    for hyper in HYPERS[op]:
        call = make(op, [64], split=split, hypers=[hyper])
        buffers = [call.grads, call.masters, *call.states.values()]
        for at, buffer in enumerate(buffers):
            for i, value in enumerate([float("nan"), float("inf"), -float("inf"), 1e38, 1e-45]):
                buffer[0][8 * at + i] = value
        for step in (0, 7):
            again = copy.deepcopy(call)
            again.steps.fill_(step)
            planes = zip(again.masters, again.lows, strict=True) if split else ()
            check(op, device, *again.arguments(), planes=planes)


@devices
@every_op
def test_an_inactive_segment_is_left_alone(device: str, op: str) -> None:
    call = make(op, SIZES, PARTIAL, send_dtype=torch.bfloat16)
    call.active = torch.tensor([1, 0, 1, 0, 1, 0], dtype=torch.uint8)
    before = copy.deepcopy(call)
    check(op, device, *call.arguments())
    assert call.steps.tolist() == [1, 5, 1001, 0, 6, 1000]
    assert_same(call.masters[0][3:17], before.masters[0][3:17])


@devices
@every_op
@pytest.mark.parametrize("skip", [1.0, -2.0, float("nan"), 0.0])
def test_a_nonzero_skip_changes_nothing(device: str, op: str, skip: float) -> None:
    call = make(op, send_dtype=torch.bfloat16)
    call.skip = torch.tensor([skip])
    before = copy.deepcopy(call)
    check(op, device, *call.arguments())
    assert torch.equal(call.steps, before.steps) == (skip != 0.0)
    assert torch.equal(call.masters[1], before.masters[1]) == (skip != 0.0)


@devices
@every_op
def test_a_thousand_small_shards(device: str, op: str) -> None:
    sizes = [(37 * i) % 411 for i in range(1000)]
    check(op, device, *make(op, sizes, send_dtype=torch.bfloat16).arguments())


@devices
@every_op
@pytest.mark.parametrize("start", [0, 1, 32])
def test_a_large_send_buffer(device: str, op: str, start: int) -> None:
    segments = [[0, 5, 2_400_000]]
    call = make(op, [2_400_001], segments, torch.bfloat16, torch.bfloat16, start=start)
    check(op, device, *call.arguments())


@devices
@every_op
def test_no_shards_and_no_segments_is_a_no_op(device: str, op: str) -> None:
    check(op, device, *make(op, []).arguments())
    check(op, device, *make(op, [10], []).arguments())


@devices
@every_op
def test_an_element_has_the_same_bits_wherever_it_lies(device: str, op: str) -> None:
    numel = 10_001
    pieces = [[0, a, b] for a, b in zip([0, 1, 6, 4099], [1, 6, 4099, numel], strict=True)]
    for hyper in HYPERS[op]:
        whole, cut, shifted = (
            make(op, [numel], segments, start=start, hypers=[hyper])
            for segments, start in ((None, 0), (pieces, 0), (None, 3))
        )
        results = []
        for call in (whole, cut, shifted):
            call.steps.fill_(5)
            call.masters[0].copy_(whole.masters[0])
            call.grads[0].copy_(whole.grads[0])
            for name, state in call.states.items():
                state[0].copy_(whole.states[name][0])
            moved = Twins(device).of(call.arguments())
            getattr(ops, op)(*moved)
            results.append(moved[0][0].cpu())
        assert_same(results[1], results[0])
        assert_same(results[2], results[0])


@every_op
def test_errors_give_values_and_remedy(op: str) -> None:
    def broken(match: list[str], **changes: object) -> None:
        refuses_change(op, match, **changes)

    half, whole = torch.bfloat16, [torch.empty(8), torch.empty(9)]
    low = [torch.empty(n, dtype=torch.int16) for n in (8, 9)]
    state = STATES[op][-1]
    broken([f"{state} has 1 entries but masters has 2"], **{state: whole[:1]})
    broken([f"{state}[1] has 8 elements", "must have 9"], **{state: [whole[0]] * 2})
    broken([f"{state}[0] is bfloat16", "float32"], **{state: [t.to(half) for t in whole]})
    broken(["sends has 1 entries", "or none"], sends=[whole[0].to(half)])
    broken(["lows and sends", "sends=[]"], lows=low, sends=[t.to(half) for t in whole])
    broken(["masters[0] is float32", "must be bfloat16"], lows=low)
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
