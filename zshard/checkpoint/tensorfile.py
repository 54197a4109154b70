"""The safetensors format: its headers, written and read here so that ranks share a file.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes in C
order without gaps (https://huggingface.co/docs/safetensors, "Format"). The safetensors package
writes whole files from one process; here every rank writes its own ranges of a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from ..errors import CheckpointError, InputError
from .files import File

SAVE = "zshard_save"  # key of the id of the save, in the metadata of files of zshard's
_LENGTH_BYTES = 8
_METADATA = "__metadata__"  # the header's entry that is no tensor
_MAX_HEADER = 100_000_000  # bytes; what the safetensors package accepts

CODES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
DTYPES: Mapping[str, torch.dtype] = {code: dtype for dtype, code in CODES.items()}


class TensorSpec(NamedTuple):
    """A tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


class Slab(NamedTuple):
    """A tensor's place in a file."""

    spec: TensorSpec
    offset: int  # bytes, from the start of the file


class Planned(NamedTuple):
    """A file before it is written."""

    name: str
    header: bytes  # with its length
    slabs: dict[str, Slab]
    nbytes: int


def plan_files(
    stem: str,
    tensors: Mapping[str, TensorSpec],
    metadata: Mapping[str, str],
    limit: int,
) -> list[Planned]:
    """Lay tensors out in files of at most ``limit`` bytes (or one tensor).

    Args:
        stem: of the names, "model" for model.safetensors or model-00001-of-00002.safetensors.
        metadata: text for the files' headers.

    Raises:
        InputError: for a dtype, or a name, that the format does not have.
    """
    groups: list[dict[str, TensorSpec]] = [{}]
    room = limit
    for name, spec in tensors.items():
        if name == _METADATA:
            raise InputError(f"safetensors files cannot have a tensor of the name {name!r}")
        if spec.dtype not in CODES:
            raise InputError(f"{name} is of {spec.dtype}, which safetensors files do not have")
        if spec.nbytes > room and groups[-1]:
            groups.append({})
            room = limit
        groups[-1][name] = spec
        room -= spec.nbytes
    count = len(groups)
    names = [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    if count == 1:
        names = [f"{stem}.safetensors"]
    return [_plan(name, group, metadata) for name, group in zip(names, groups, strict=True)]


def _plan(name: str, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> Planned:
    # Widest first, so that every tensor is aligned to its elements.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, object] = {_METADATA: dict(metadata)}
    end = 0
    for key, spec in ordered:
        begin, end = end, end + spec.nbytes
        code, shape = CODES[spec.dtype], list(spec.shape)
        header[key] = dict(dtype=code, shape=shape, data_offsets=[begin, end])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = _LENGTH_BYTES + len(text)
    slabs: dict[str, Slab] = {}
    offset = data
    for key, spec in ordered:
        slabs[key] = Slab(spec, offset)
        offset += spec.nbytes
    return Planned(name, len(text).to_bytes(_LENGTH_BYTES, "little") + text, slabs, offset)


def index_of(files: Sequence[Planned]) -> bytes:
    """The index that Hugging Face's tools look for beside several files."""
    weight_map = {name: file.name for file in files for name in file.slabs}
    total = sum(slab.spec.nbytes for file in files for slab in file.slabs.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2).encode()


class Header(NamedTuple):
    """What a file holds."""

    slabs: dict[str, Slab]
    save: str | None  # id of the save of zshard's that wrote it


def read_header(file: File) -> Header:
    """The tensors of a file, and where it is from.

    Raises:
        CheckpointError: for a file that is not a whole, well-formed safetensors file.
    """
    size = file.size()
    length = bytearray(_LENGTH_BYTES)
    file.read(length, 0)
    count = int.from_bytes(length, "little")
    if count > min(size - _LENGTH_BYTES, _MAX_HEADER):
        is_zip = length.startswith(b"PK\x03\x04")
        remedy = " (what torch.save wrote, model.load_state_dict(torch.load(...)) takes)"
        raise CheckpointError(f"{file.path}: no safetensors file{remedy if is_zip else ''}")
    text = bytearray(count)
    file.read(text, _LENGTH_BYTES)
    try:
        header = json.loads(text)
        if not isinstance(header, dict):
            raise TypeError(f"a {type(header).__name__}")
        save = _save_of(header.pop(_METADATA, None))
        slabs = {name: _slab(entry, _LENGTH_BYTES + count) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: its safetensors header is damaged: {error}") from error
    end = _LENGTH_BYTES + count
    for name, slab in sorted(slabs.items(), key=lambda item: (item[1].offset, item[1].spec.nbytes)):
        if slab.offset != end:
            raise CheckpointError(f"{file.path}: {name} does not begin where the one before ends")
        end += slab.spec.nbytes
    if end != size:
        raise CheckpointError(f"{file.path}: has {size} bytes, and its header describes {end}")
    return Header(slabs, save)


def _save_of(metadata: object) -> str | None:
    save = metadata.get(SAVE) if isinstance(metadata, dict) else None
    if save is not None and not isinstance(save, str):
        raise TypeError(f"{SAVE} is a {type(save).__name__}")
    return save


def _slab(entry: Mapping[str, object], data: int) -> Slab:
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if code not in DTYPES:
        raise ValueError(f"unknown dtype {code!r}")
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise ValueError("a shape or an offset that is no list")
    if any(type(n) is not int or n < 0 for n in [*shape, *offsets]):
        raise ValueError("a size that is no whole number")
    begin, end = offsets
    spec = TensorSpec(DTYPES[str(code)], tuple(shape))
    if end - begin != spec.nbytes:
        raise ValueError(f"{end - begin} bytes for {spec.dtype} of shape {shape}")
    return Slab(spec, data + begin)
