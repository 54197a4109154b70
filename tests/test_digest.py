"""Checksums that ranks compare: no change of values goes unseen, however regular it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zshard import digest as digests

# As on a CPU, and as on a GPU.
DIGESTS: dict[str, Callable[[Tensor], str]] = {
    "xxh3": digests.digest,
    "mixed": lambda tensor: digests.mixed_sum(tensor.contiguous().view(-1).view(torch.uint8)),
}
WORDS = 1 << 10  # mixed at once, in these tests


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_WORDS", WORDS)


def negated_column(w: Tensor) -> Tensor:
    w[:, 1].neg_()
    return w


def rows_in_reverse(w: Tensor) -> Tensor:
    return w.flip(0)


def two_signs(w: Tensor) -> Tensor:
    w.view(-1)[[1, 5]] *= -1
    return w


def two_swapped(w: Tensor) -> Tensor:
    w.view(-1)[[1, -1]] = w.view(-1)[[-1, 1]]
    return w


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [negated_column, rows_in_reverse, two_signs, two_swapped])
@pytest.mark.parametrize("kind", DIGESTS)
def test_a_regular_change_is_seen(
    kind: str, change: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    digest = DIGESTS[kind]
    for values in (torch.randn(8, 4), torch.arange(32.0).view(8, 4) % 2 + 1):
        plain = values.to(dtype)
        changed = change(plain.clone())
        assert torch.equal(changed, plain) or digest(changed) != digest(plain)


@pytest.mark.parametrize("at", [0, 2 * WORDS, 4 * WORDS + 4])
@pytest.mark.parametrize("kind", DIGESTS)
def test_it_is_of_all_chunks_and_of_their_order(kind: str, at: int) -> None:
    digest = DIGESTS[kind]
    values = torch.randn(4 * WORDS + 5)
    other, swapped = values.clone(), values.clone()
    other[at] += 1
    swapped[at], swapped[1] = values[1], values[at]
    assert len({digest(each) for each in (values, other, swapped)}) == 3
    chunks = values[: 4 * WORDS].view(2, -1)
    assert digest(chunks) != digest(chunks.flip(0))


@pytest.mark.parametrize("kind", DIGESTS)
def test_it_is_the_same_wherever_the_values_lie(kind: str) -> None:
    digest = DIGESTS[kind]
    values = torch.randn(12, 5)
    assert digest(values.view(-1)[1:]) == digest(values.view(-1)[1:].clone())
    assert digest(values.t()) == digest(values.t().contiguous()) != digest(values)
    assert digest(torch.empty(0)) == digest(torch.empty(0)) != digest(torch.zeros(1))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(8, 3)[2:3, 1],
        torch.ones(()).expand(1),
        torch.arange(24.0).view(8, 3).t(),
        torch.randn(8, dtype=torch.complex64).conj(),
        torch._neg_view(torch.randn(8)),
    ],
    ids=["one element of a column", "one expanded", "transposed", "conjugated", "negated"],
)
def test_it_is_of_the_values_however_they_lie(tensor: Tensor) -> None:
    plain = torch.tensor(tensor.tolist(), dtype=tensor.dtype)
    assert digests.digest(tensor) == digests.digest(plain)
