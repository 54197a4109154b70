"""How tensors are laid out in safetensors files."""

from __future__ import annotations

import torch

from zshard.checkpoint.tensorfile import plan_files


def test_a_file_takes_tensors_up_to_the_limit_and_a_larger_one_alone() -> None:
    nbytes = {"larger": 40, "a": 12, "fits": 4, "next": 8}
    tensors = {name: (torch.uint8, (size,)) for name, size in nbytes.items()}
    planned = plan_files("model", tensors, {}, 16)
    assert [list(file.slabs) for file in planned] == [["larger"], ["a", "fits"], ["next"]]
    assert [file.name for file in planned] == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]


def test_tensors_are_aligned_to_their_elements() -> None:
    dtypes = (torch.bool, torch.bfloat16, torch.int8, torch.float64, torch.float32)
    tensors = {str(dtype): (dtype, (3,)) for dtype in dtypes}
    (planned,) = plan_files("model", tensors, {"format": "pt"}, 1000)
    for slab in planned.slabs.values():
        assert slab.offset % slab.dtype.itemsize == 0, slab
    assert planned.nbytes == len(planned.header) + 3 * (1 + 2 + 1 + 8 + 4)
