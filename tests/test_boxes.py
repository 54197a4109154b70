"""A range of a tensor's memory as boxes: against the indices of its elements, one by one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from zshard.checkpoint.boxes import boxes_of
from zshard.layout import Layout

TENSORS = {
    "0-d": torch.empty(()),
    "1-d": torch.empty(7),
    "one element": torch.empty(1, 1, 1),
    "matrix": torch.empty(5, 3),
    "transposed": torch.empty(5, 3).t(),
    "a column": torch.empty(6, 1),
    "channels_last": torch.empty(3, 4, 2, 3).contiguous(memory_format=torch.channels_last),
    "sizes of 1": torch.empty(1, 4, 1, 3).permute(2, 3, 0, 1),
    "permuted": torch.empty(2, 3, 2, 4).permute(2, 0, 3, 1),
    "zero-size": torch.empty(3, 0, 2),
}


@pytest.mark.parametrize("name", TENSORS)
def test_every_range_is_the_elements_of_its_few_boxes(name: str) -> None:
    like = TENSORS[name]
    layout = Layout.of([like], 1)
    segment = layout.segments[0]
    memory = torch.arange(layout.numel)
    elements = segment.offset + torch.arange(segment.numel)
    tensor = segment.view_of(memory)  # where each element lies, by index
    for begin, end in itertools.combinations_with_replacement(range(segment.numel + 1), 2):
        seen: list[Tensor] = []
        for box in boxes_of(segment, begin, end):
            part = tensor[
                tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            ]
            held = elements[box.begin : box.begin + box.numel]
            assert part.numel() == box.numel > 0 and tuple(part.shape) == box.sizes
            assert torch.equal(part, box.view_of(segment, held)), (begin, end, box)
            seen.append(held)
        assert torch.equal(torch.cat([elements[:0], *seen]), elements[begin:end])
        assert len(seen) <= max(1, 2 * like.ndim - 1)
