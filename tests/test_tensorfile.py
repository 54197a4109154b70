"""How tensors are laid out in safetensors files, and headers that others have written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zshard
from zshard.checkpoint.files import File
from zshard.checkpoint.tensorfile import Header, TensorSpec, plan_files, read_header


def test_a_file_takes_tensors_up_to_the_limit_and_a_larger_one_alone() -> None:
    nbytes = {"larger": 40, "a": 12, "fits": 4, "next": 8}
    tensors = {name: TensorSpec(torch.uint8, (size,)) for name, size in nbytes.items()}
    planned = plan_files("model", tensors, {}, 16)
    assert [list(file.slabs) for file in planned] == [["larger"], ["a", "fits"], ["next"]]
    assert [file.name for file in planned] == [
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]


def test_tensors_are_aligned_to_their_elements() -> None:
    dtypes = (torch.bool, torch.bfloat16, torch.int8, torch.float64, torch.float32)
    tensors = {str(dtype): TensorSpec(dtype, (3,)) for dtype in dtypes}
    (planned,) = plan_files("model", tensors, {"format": "pt"}, 1000)
    for slab in planned.slabs.values():
        assert slab.offset % slab.spec.dtype.itemsize == 0, slab
    assert planned.nbytes == len(planned.header) + 3 * (1 + 2 + 1 + 8 + 4)


def read(folder: Path, header: str) -> Header:
    path = folder / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    with File.to_read(str(path)) as file:
        return read_header(file)


def test_a_tensor_without_bytes_may_come_behind_the_one_it_lies_before(tmp_path: Path) -> None:
    one = '"one": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    none = '"none": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    found = read(tmp_path, f'{{"__metadata__": ["of", "no", "use"], {one}, {none}}}')
    assert (list(found.slabs), found.save) == (["one", "none"], None)


@pytest.mark.parametrize("shape", ["[true]", "{}", "[" * 100_000])
def test_a_shape_that_is_none_is_refused(shape: str, tmp_path: Path) -> None:
    with pytest.raises(zshard.CheckpointError, match="its safetensors header is damaged"):
        read(tmp_path, f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 4]}}}}')
