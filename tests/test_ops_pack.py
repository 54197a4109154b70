"""pack_ and unpack_: every dtype pair, layout and offset against the reference, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from ops_check import F, assert_same, check, devices, odd, refuses
from torch import Tensor

from zshard import ops

SPECIALS = [
    float("nan"),
    float("inf"),
    -float("inf"),
    0.0,
    -0.0,
    1e30,
    -1e-7,
    6e-8,
    65519.0,
]


def ragged(dtypes: list[torch.dtype]) -> list[Tensor | None]:
    """One source of each layout and size that matters, dtypes taken in turn."""
    shapes: list[Tensor | None] = [
        torch.randn(37, 5),
        None,
        torch.randn(70, 100).t(),
        torch.tensor(3.25),
        torch.randn(0, 4),
        torch.tensor(SPECIALS),
        torch.randn(4, 3, 6, 5).permute(0, 2, 3, 1),
        torch.randn(64, 9)[::3, 1::2],
        torch.randn(2, 1, 3, 1).expand(2, 5, 3, 7),
        torch.randn(1025)[1:],
        torch.randn(301, 403).t()[5:],
    ]
    cycle = itertools.cycle(dtypes)
    return [None if shape is None else cast_keeping_strides(shape, next(cycle)) for shape in shapes]


def cast_keeping_strides(x: Tensor, dtype: torch.dtype) -> Tensor:
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(dtype)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def place(tensors: list[Tensor | None], gaps: list[int]) -> tuple[list[int], int]:
    """Offsets with the given gaps in turn between the tensors, and an end with padding."""
    offsets, at = [], 0
    for tensor, gap in zip(tensors, itertools.cycle(gaps)):
        at += gap
        offsets.append(at)
        at += 11 if tensor is None else tensor.numel()
    return offsets, at + 13


@devices
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
@pytest.mark.parametrize("dtypes", [*([dtype] for dtype in F), F], ids=str)
@pytest.mark.parametrize("flat_dtype", F)
def test_pack_casts_scales_and_zeroes_what_no_source_covers(
    device: str, flat_dtype: torch.dtype, dtypes: list[torch.dtype], scale: float
) -> None:
    sources = ragged(dtypes)
    for gaps, start in [([0], 0), ([3, 0, 1], 0), ([5, 32], 1), ([1, 2], 7)]:
        offsets, total = place(sources, gaps)
        out = odd(total, flat_dtype, start)
        check("pack_", device, out, sources, offsets, scale)


@devices
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("dtypes", [*([dtype] for dtype in F), F], ids=str)
@pytest.mark.parametrize("flat_dtype", F)
def test_unpack_writes_each_target_and_nothing_else(
    device: str, flat_dtype: torch.dtype, dtypes: list[torch.dtype], scale: float
) -> None:
    targets = [t if t is None or 0 not in t.stride() else t.clone() for t in ragged(dtypes)]
    offsets, total = place(targets, [3, 0, 1])
    check("unpack_", device, targets, odd(total, flat_dtype), offsets, scale)


@devices
@pytest.mark.parametrize("sizes", [[3_000_000, 5, 1_500_001], [1] * 3000])
def test_pack_and_unpack_many_and_large(device: str, sizes: list[int]) -> None:
    sources: list[Tensor | None] = [odd(size, F[i % 3], i % 5) for i, size in enumerate(sizes)]
    offsets, total = place(sources, [0, 7])
    for dtype in (torch.float32, torch.bfloat16):
        check("pack_", device, odd(total, dtype), sources, offsets, 0.5)
        check("unpack_", device, sources, odd(total, dtype), offsets)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t,
    "transposed": lambda t: t.view(700, 100).t(),
    "permuted": lambda t: t.view(10, 70, 100).permute(2, 0, 1),
    "every second": lambda t: t[::2],
}


@devices
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [*F, torch.float64])
def test_scale_one_copies_every_bit(device: str, dtype: torch.dtype, view: str) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    source = torch.randint(-(2**15), 2**15, (70_000,)).to(bits) << (8 * dtype.itemsize - 16)
    source[::3] += 1  # NaN payloads, signalling ones too
    seen, back = (VIEWS[view](t.to(device)) for t in (source, torch.empty_like(source)))
    flat = torch.zeros(seen.numel() + 1, dtype=dtype, device=device)
    ops.pack_(flat, [seen.view(dtype)], [1])
    ops.unpack_([back.view(dtype)], flat, [1])
    assert_same(flat[1:].view(bits).cpu(), seen.flatten().cpu())
    assert_same(back.cpu(), seen.cpu())


@devices
def test_float64_keeps_its_own_precision(device: str) -> None:
    sources = [torch.randn(1001, dtype=torch.float64), torch.randn(7, 9, dtype=torch.float64).t()]
    check("pack_", device, torch.ones(2000, dtype=torch.float64), sources, [3, 1500], 1 / 3)
    check("unpack_", device, sources, torch.randn(2000, dtype=torch.float64), [3, 1500], 1 / 3)


@devices
def test_nothing_to_pack_is_all_zeros(device: str) -> None:
    check("pack_", device, odd(1003, torch.bfloat16), [None, None], [0, 5])
    check("pack_", device, odd(17, torch.float32), [], [])
    check("pack_", device, torch.empty(0), [torch.empty(0)], [0])
    check("unpack_", device, [None], torch.empty(0), [0])


def test_errors_give_values_and_remedy() -> None:
    out, source = torch.empty(10), torch.randn(4)
    refuses("pack_", out, [source], [0, 1], match=["1 sources but 2 offsets", "give one offset"])
    refuses(
        "pack_", out, [source, source], [0, 3], match=["sources[1]", "offset 3", "before it, 4"]
    )
    refuses("pack_", out, [source], [7], match=["offset 7", "end of out, 10", "leave room"])
    refuses("pack_", out, [source], [-1], match=["offset -1"])
    refuses("pack_", out.view(2, 5), [source], [0], match=["out is float32 of shape (2, 5)", "1-D"])
    refuses("pack_", out[::2], [source], [0], match=["strides (2,)", "contiguous"])
    refuses("pack_", out.int(), [source], [0], match=["out is", "float32, bfloat16, float16"])
    refuses("pack_", out, [source.int()], [0], match=["sources[0] is", "shape (4,)", "convert"])
    refuses("pack_", out, [source.double()], [0], match=["sources[0] is float64", "of its own"])
    refuses("pack_", out.double(), [source], [0], match=["out is float64", "float64 goes only"])
    refuses("pack_", out, [out[2:4]], [0], match=["sources[0] and out share memory", "copy"])
    refuses("pack_", out, ["text"], [0], match=["sources"])
    refuses("unpack_", [source], out, [], match=["1 targets but 0 offsets"])
    refuses("unpack_", [torch.empty(1).expand(4)], out, [0], match=["targets[0]", "one place"])
    refuses("unpack_", [out[2:4]], out, [0], match=["targets[0] and flat share memory"])
    deep = torch.randn((3,) * 9).permute(8, 7, 6, 5, 4, 3, 2, 1, 0)
    refuses("pack_", torch.empty(3**9), [deep], [0], match=["too many dim", "contiguous()"])
    refuses("pack_", out, [source.to("meta")], [0], match=["cpu and meta", "one device"])
