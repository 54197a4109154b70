"""What a rank holds beside its shard while it saves and loads, and what it reads: both bounded.

And what ``zshard.memory`` is told of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from live_bytes import LiveBytes
from ranks import run_ranks
from steps import build, one_step
from torch import nn

import zshard
from zshard.checkpoint import files, manifest, writer

MI_B = 1 << 20
WIDTH = 2560  # 26 MB of fp32 a layer


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes of tensors that ``work`` makes and has at a time.

    Counted, not measured: how often the C library uses memory again is not for zshard to say.
    """
    gc.collect()
    with LiveBytes() as live:
        work()
    return live.peak


def model_of(dtype: torch.dtype, precision: zshard.Precision) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(4)]
    return zshard.wrap(nn.Sequential(*layers), precision=precision)


def peaks(
    rank: int, size: int, folder: str, dtype: torch.dtype, precision: zshard.Precision
) -> tuple[int, int, int, int]:
    small = zshard.wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    zshard.save(f"{folder}/warm", small)  # what the first save imports and starts
    zshard.load(f"{folder}/warm", small)
    model = model_of(dtype, precision)
    optimizer = zshard.AdamW(model.parameters())
    model(torch.randn(2, WIDTH, dtype=dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saving = peak_of(lambda: zshard.save(f"{folder}/a", model, optimizer))
    loading = peak_of(lambda: zshard.load(f"{folder}/a", model, optimizer))
    weights = peak_of(lambda: zshard.load_weights(model, f"{folder}/a"))
    exporting = peak_of(lambda: zshard.export(f"{folder}/b", model, dtype=torch.float16))
    return saving, loading, weights, exporting


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float32, zshard.Precision()),
        (torch.bfloat16, zshard.Precision()),
        (torch.float32, zshard.Precision(torch.bfloat16, master="split")),
    ],
)
def test_beside_its_shard_a_rank_holds_a_chunk_and_little_more(
    tmp_path: Path, dtype: torch.dtype, precision: zshard.Precision
) -> None:
    # A chunk as it is read, in another dtype, and the one before.
    most = 3 * manifest.CHUNK_BYTES + MI_B
    for found in run_ranks(peaks, 2, str(tmp_path), dtype, precision):
        assert max(found) < most, [f"{n / MI_B:.1f} MiB" for n in found]


def bytes_read(rank: int, size: int, folder: str) -> tuple[int, int]:
    """What is read of a tensor of 16 KiB from a checkpoint, and from a file without checksums."""
    writer.CHUNK_BYTES = 1024
    model = zshard.wrap(nn.Linear(64, 64, bias=False))
    zshard.save(f"{folder}/a", model)
    zshard.export(f"{folder}/b", model)
    file = Path(folder) / "alone.safetensors"  # the manifest is beside the other
    if rank == 0:
        file.write_bytes((Path(folder) / "b/model.safetensors").read_bytes())
    torch.distributed.barrier()
    begin = 8 + int.from_bytes(file.read_bytes()[:8], "little")  # of the tensors
    read, counts = files.File.read, [0]

    def counted(self: files.File, into: bytearray | memoryview, offset: int) -> None:
        if offset >= begin and self.path.endswith(".safetensors"):
            counts[-1] += memoryview(into).nbytes
        read(self, into, offset)

    files.File.read = counted
    zshard.load(f"{folder}/a", model)
    counts.append(0)
    zshard.load_weights(model, file)
    return counts[0], counts[1]


def test_a_rank_reads_no_more_than_its_own_part(tmp_path: Path) -> None:
    for found in run_ranks(bytes_read, 2, str(tmp_path)):
        assert found == (64 * 64 * 4 // 2, 64 * 64 * 4 // 2)


def test_states_that_a_load_adds_are_in_the_peak(tmp_path: Path) -> None:
    model = build()
    optimizers = [zshard.AdamW(model.parameters()) for _ in range(2)]
    one_step(model, 0, 0)
    optimizers[0].step()
    for param in model.parameters():
        optimizers[0].state[param]["average"] = param.local.clone()
    zshard.save(tmp_path / "a", model, optimizers.pop(0))
    gc.collect()
    zshard.memory(model, reset_peak=True)
    zshard.load(tmp_path / "a", model, *optimizers)
    loaded = zshard.memory(model)["now"]["optimizer"]
    for param in model.parameters():
        del optimizers[0].state[param]["average"]
    found = zshard.memory(model)
    assert found["peak"]["optimizer"] == loaded > found["now"]["optimizer"] > 0
