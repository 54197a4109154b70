"""Checksums of values, for ranks to compare."""

from __future__ import annotations

import ctypes

import torch
import xxhash

_WORDS = 1 << 24  # of 8 bytes, mixed at once on a GPU, where they take 128 MiB
# Odd constants of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
# OOPSLA 2014, fig. 16), as int64.
_GOLDEN, _FIRST, _SECOND = (
    int.from_bytes(constant.to_bytes(8, "little"), "little", signed=True)
    for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def digest(tensor: torch.Tensor) -> str:
    """A checksum of 64 bits of the tensor's bits in their order, as hexadecimal digits.

    Ranks compare those of tensors of one shape, dtype and kind of device: it is XXH3 on a CPU, and
    on a GPU, where a sum is what is fast, one of words that are mixed with their places.
    """
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not by view(-1): one element is contiguous whatever its stride, which then stays.
    data = values.as_strided((values.numel(),), (1,)).view(torch.uint8)
    if data.is_cpu:
        return xxhash.xxh3_64_hexdigest(bytes_of(data))
    return mixed_sum(data)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which has to outlive it."""
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def mixed_sum(data: torch.Tensor) -> str:
    """Words of ``data`` (n,) uint8, each mixed with its place by SplitMix64's steps, and summed.

    Mixing is not linear, so that changes of two words do not cancel: a sum that is, weighted or
    not, is blind to any two flipped signs.
    """
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for begin in range(0, data.numel(), 8 * _WORDS):
        words = _words(data[begin : begin + 8 * _WORDS])
        words = words ^ (torch.arange(words.numel(), device=data.device) + begin // 8 + 1) * _GOLDEN
        words = (words ^ (words >> 30)) * _FIRST
        words = (words ^ (words >> 27)) * _SECOND
        total += (words ^ (words >> 31)).sum()
    return f"{int(total) % (1 << 64):016x}"  # read once: the host has to wait


def _words(data: torch.Tensor) -> torch.Tensor:
    """Bytes as int64, the last ones with zeros behind them."""
    if data.numel() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    elif data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)
