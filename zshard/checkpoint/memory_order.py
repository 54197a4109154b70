"""Memory order and file order: the same elements of one tensor, counted in two ways.

A file has a tensor in C order. A parameter keeps its own order in memory (channels last, say), and
ranks cut that; ``order`` names its dimensions from the slowest to the fastest.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch


def file_positions(
    shape: tuple[int, ...], order: tuple[int, ...], begin: int, end: int
) -> torch.Tensor:  # (end - begin,) int64
    """Where elements [begin, end) in memory order lie in C order."""
    rest = torch.arange(begin, end, device="cpu")
    at = torch.zeros_like(rest)
    c_stride = _c_strides(shape)
    for dim in reversed(order):  # the fastest first
        at += rest % shape[dim] * c_stride[dim]
        rest //= shape[dim]
    return at


def memory_positions(
    shape: tuple[int, ...], order: tuple[int, ...], at: torch.Tensor
) -> torch.Tensor:  # like ``at``
    """Where elements that lie at ``at`` in C order come in memory order."""
    place = torch.zeros_like(at)
    for dim, stride in enumerate(_c_strides(shape)):
        index = at // stride % shape[dim]
        faster = [shape[other] for other in order[order.index(dim) + 1 :]]
        place += index * math.prod(faster)
    return place


def _c_strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides


def in_file_order(shape: tuple[int, ...], order: tuple[int, ...]) -> bool:
    """Whether memory order is that of the file; dimensions of size 1 decide nothing."""
    wide = [dim for dim in order if shape[dim] != 1]
    return wide == sorted(wide)


def runs(at: torch.Tensor) -> list[tuple[int, int]]:
    """The ranges of ``at`` (ascending) in which each number is one more than that before."""
    breaks = [int(i) + 1 for i in (at.diff() != 1).nonzero()]
    bounds = [0, *breaks, at.numel()]
    return [(a, b) for a, b in pairwise(bounds) if a < b]
