"""Runs an op and its reference on twins of the same arguments and compares all memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from zshard import ops, reference

F = [torch.float32, torch.bfloat16, torch.float16]

# Without a GPU the CUDA cases do not exist, so that a skipped test always means something.
devices = pytest.mark.parametrize(
    "device",
    ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])],
)


def odd(numel: int, dtype: torch.dtype, start: int = 1) -> Tensor:
    """Return random values that start `start` elements behind an aligned address."""
    # Doubles of their own, whose squares are not exact in a double.
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(numel + start + 3, dtype=wide).to(dtype)[start : start + numel]


def peers_of(world_size: int, numel: int, dtype: torch.dtype, *starts: int) -> list[Tensor]:
    """A tensor a rank, rank i's starts[i % len(starts)] elements behind an aligned address."""
    return [odd(numel, dtype, starts[i % len(starts)]) for i in range(world_size)]


def stats() -> Tensor:
    """Statistics that a call has to overwrite."""
    return torch.full((2,), -1.0, dtype=torch.float64)


class Twins:
    """Copies of tensors with the same strides and offsets; views that share storage still do."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.storages: dict[int, tuple[Tensor, Tensor]] = {}  # address -> (original, copy), flat

    def of(self, value: object) -> object:
        if isinstance(value, list | tuple):
            return type(value)(self.of(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage.nbytes() == 0:  # all empty storages have the same address
            return value.to(self.device)
        if storage.data_ptr() not in self.storages:
            count = storage.nbytes() // value.element_size()
            whole = value.as_strided((count,), (1,), 0)
            self.storages[storage.data_ptr()] = (whole, whole.to(self.device, copy=True))
        copy = self.storages[storage.data_ptr()][1]
        return copy.as_strided(value.shape, value.stride(), value.storage_offset())


def check(
    name: str,
    device: str,
    *args: object,
    planes: Iterable[tuple[Tensor, Tensor]] = (),
    **kwargs: object,
) -> None:
    """Run ops.<name> on twins and reference.<name> on the originals; no byte may differ.

    Whole storages are compared, so an op that writes beside its views is caught as well.

    Args:
        planes: (hi, lo) of split masters among the arguments that may become NaN. Which NaN that is
            is left open (processors differ), and so is lo there.
    """
    twins = Twins(device)
    moved = twins.of(args)
    moved_named = {key: twins.of(value) for key, value in kwargs.items()}
    getattr(ops, name)(*moved, **moved_named)
    getattr(reference, name)(*args, **kwargs)
    for pair in planes:
        for hi, lo in (pair, twins.of(pair)):
            lo[hi.isnan()] = 0
    for expected, actual in twins.storages.values():
        assert_same(actual.cpu(), expected)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Require equal bits (any NaN equals any NaN); name the first coordinate that differs."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integer[expected.element_size()]
    differs = actual.contiguous().view(kind) != expected.contiguous().view(kind)
    if expected.is_floating_point():
        differs &= ~(actual.isnan() & expected.isnan())
    if differs.any():
        first = tuple(differs.nonzero()[0].tolist())
        pytest.fail(
            f"{int(differs.sum())} of {differs.numel()} elements differ, the first at {first}: "
            f"got {actual[first].item()!r}, expected {expected[first].item()!r}"
        )


def refuses(name: str, *args: object, match: Sequence[str], **kwargs: object) -> None:
    """Require ops.<name> to raise InputError with every text of `match` in its message."""
    with pytest.raises(ops.InputError) as caught:
        getattr(ops, name)(*args, **kwargs)
    for text in match:
        assert text in str(caught.value), f"{text!r} is not in {str(caught.value)!r}"
