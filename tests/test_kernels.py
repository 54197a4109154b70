"""What the compiler made of the CUDA kernels, read from the built extension; it needs no GPU."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections import defaultdict
from typing import NamedTuple

import pytest

from zshard import _C

ARCHS: list[str] = _C.build_info()["cuda_archs"]  # as "sm_90"

# What a multiprocessor has, of every target.
REGISTERS = 65536

# Kernel -> threads of a block, and blocks that a multiprocessor holds as far as registers go; the
# first row that fits an instance counts. Fewer would have too few bytes under way, see below.
THREADS = {"plan_kernel": 1024, "stats_kernel": 1024}  # the others: 256
BLOCKS = {
    "cast_kernel<": 5,
    "clip_kernel<": 1,
    "join_kernel": 4,
    "measure_kernel<": 5,
    "move_kernel<": 5,
    "optim_kernel<": 5,  # AdamW 6, but for sm_120
    "plan_kernel<": 1,
    "reduce_adamw_kernel<": 3,
    "reduce_kernel<double": 2,
    "reduce_kernel<": 5,
    "split_kernel": 4,
    "stats_kernel": 1,
    "strided_kernel<": 4,
}

# Kernels that move whole arrays. Each thread asks for this many bytes, in accesses of 8 and more,
# before it waits for the first: with the blocks above 40 KB a multiprocessor and more. An H200
# moves 4.8 TB/s after some 700 ns, which is 25 KB for each of its 132 (Little's law). What counts
# is the busiest place: a reduction's loop over two ranks; of a single row in 16 bits it asks for
# half as much.
STREAMING = {
    "cast_kernel": 64,
    "join_kernel": 64,
    "measure_kernel": 64,
    "move_kernel": 64,
    "optim_kernel": 40,
    "reduce_adamw_kernel": 64,
    "reduce_kernel": 64,
    "split_kernel": 64,
}
# Where elements become wider, as many loads are of half the bytes.
WIDENING = re.compile(
    r"measure_kernel<(Bf16|Fp16)>|"
    r"cast_kernel<(float, (Bf16|Fp16)|double, float)>|"
    r"move_kernel<(true, float, (Bf16|Fp16)|false, (Bf16|Fp16), float),"
)


# [Note: kernels that follow]: those that do, and those that let others.
FOLLOWERS = {"optim_kernel", "reduce_adamw_kernel", "stats_kernel"}
FOLLOWED = {"plan_kernel", "measure_kernel", "reduce_kernel", "reduce_adamw_kernel"}


class Kernel(NamedTuple):
    """One instance of a kernel, for one architecture."""

    name: str  # reduce_kernel
    full: str  # reduce_kernel<float, zshard::Bf16>
    registers: int
    memory: int  # bytes of a thread's own memory: what was spilled, or an array not in registers

    @property
    def blocks(self) -> int:
        """Blocks that the registers of a multiprocessor are enough for."""
        per_thread = -(-self.registers // 8) * 8  # given out eight at a time
        return REGISTERS // (THREADS.get(self.name, 256) * per_thread)


def the_tool() -> str:
    """Path of cuobjdump: the package's, or a toolkit's."""
    try:
        files = importlib.metadata.files("nvidia-cuda-cuobjdump") or []
    except importlib.metadata.PackageNotFoundError:
        found = shutil.which("cuobjdump")
        assert found is not None, "no cuobjdump: pip install zshard[test], or put it on PATH"
        return found
    return str(next(file.locate() for file in files if file.name == "cuobjdump"))


def cuobjdump(*arguments: str) -> str:
    command = [the_tool(), *arguments, _C.__file__]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def demangled(names: list[str]) -> list[str]:
    """Names with template arguments, but without namespaces and parameters."""
    text = subprocess.run(
        ["c++filt", "-p"], input="\n".join(names), check=True, capture_output=True, text=True
    ).stdout
    return re.sub(r"zshard::|cuda::|\(anonymous namespace\)::", "", text).splitlines()


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[Kernel]]:
    """Every kernel of every architecture."""
    found: dict[str, list[Kernel]] = defaultdict(list)
    for part in cuobjdump("--dump-resource-usage").split("\narch = ")[1:]:
        arch = part.split(maxsplit=1)[0]
        rows = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", part)
        for full, (_, registers, *memory) in zip(
            demangled([r[0] for r in rows]), rows, strict=True
        ):
            name = full.partition("<")[0]
            found[arch].append(Kernel(name, full, int(registers), sum(map(int, memory))))
    return found


def test_a_build_that_has_to_have_kernels_has_them() -> None:
    assert ARCHS or os.environ.get("ZSHARD_CUDA") != "1", "built without CUDA: run `make build`"


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_keeps_in_registers_what_a_thread_works_on(
    kernels: dict[str, list[Kernel]], arch: str
) -> None:
    assert {k.name for k in kernels[arch]} == {prefix.partition("<")[0] for prefix in BLOCKS}
    assert [f"{k.full}: {k.memory} bytes" for k in kernels[arch] if k.memory > 0] == []


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_leaves_room_for_the_blocks_that_it_is_meant_to_run_beside(
    kernels: dict[str, list[Kernel]], arch: str
) -> None:
    few = []
    for kernel in kernels[arch]:
        wanted = next(blocks for prefix, blocks in BLOCKS.items() if kernel.full.startswith(prefix))
        if kernel.blocks < wanted:
            few.append(f"{kernel.full}: {kernel.registers} registers, {kernel.blocks} blocks")
    assert few == []


# An instruction, without its predicate: name and operands.
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;", re.M)
BRANCHES = ("BRA", "BRX", "BSSY", "BSYNC", "EXIT", "WARPSYNC")


def bytes_under_way(code: str) -> int:
    """Most bytes that loads of 8 and more have asked for before one is used, or a branch comes."""
    most = asked = 0
    pending: set[int] = set()  # registers that are being loaded
    for name, operands in INSTRUCTION.findall(code):
        registers = [int(number) for number in re.findall(r"\bR(\d+)", operands)]
        size = {"64": 2, "128": 4}.get(name.rpartition(".")[2], 0) if name[:3] == "LDG" else 0
        if name in BRANCHES or pending.intersection(registers[1:] if size else registers):
            asked = 0
            pending.clear()
        if size:
            pending.update(range(registers[0], registers[0] + size))
            asked += 4 * size
            most = max(most, asked)
    return most


@pytest.fixture(scope="module")
def hopper() -> dict[str, str]:
    """The machine code of every kernel for sm_90."""
    _, *parts = cuobjdump("-sass", "-arch", "sm_90").split("Function : ")
    return dict(zip(demangled([part.split()[0] for part in parts]), parts, strict=True))


@pytest.mark.skipif("sm_90" not in ARCHS, reason="not built for sm_90")
def test_a_streaming_kernel_asks_for_many_bytes_before_it_waits(hopper: dict[str, str]) -> None:
    few = []
    for full, code in hopper.items():
        most, wanted = bytes_under_way(code), STREAMING.get(full.partition("<")[0], 0)
        if WIDENING.match(full):
            wanted //= 2
        if most < wanted:
            few.append(f"{full} on sm_90: {most} bytes under way instead of {wanted}")
    assert hopper
    assert few == []


@pytest.mark.skipif("sm_90" not in ARCHS, reason="not built for sm_90")
def test_a_streaming_kernel_moves_16_bytes_at_a_time(hopper: dict[str, str]) -> None:
    # Beside fp32 a 16-bit dtype moves in 8; a reduction of 16 bits to 16 does, whose order of sums
    # says which elements a thread has.
    narrow = []
    for full, code in hopper.items():
        name, _, dtypes = full.partition("<")
        small = name in ("reduce_kernel", "measure_kernel") and not re.search(
            "float|double", dtypes
        )
        size = "64" if small else "128"
        if name in STREAMING and not re.search(rf"\b(LDG|STG)\.E\.{size}\b", code):
            narrow.append(f"{full} on sm_90 has no access of {int(size) // 8} bytes")
    assert hopper
    assert narrow == []


@pytest.mark.skipif("sm_90" not in ARCHS, reason="not built for sm_90")
def test_a_copying_kernel_stores_single_elements_only_one_at_a_time(hopper: dict[str, str]) -> None:
    # Several in a row are a vector that the compiler has taken apart.
    split = []
    for full, code in hopper.items():
        if full.partition("<")[0] not in ("cast_kernel", "move_kernel"):
            continue
        names = " ".join(name for name, _ in INSTRUCTION.findall(code))
        if rows := re.findall(r"(?:STG\.E(?:\.U16)? (?:(?!LDG|STG|B|EXIT)\S+ )*){2,}", names):
            split.append(f"{full} on sm_90: {max(row.count('STG') for row in rows)} stores")
    assert split == []


@pytest.mark.skipif("sm_90" not in ARCHS, reason="not built for sm_90")
def test_a_kernel_that_follows_waits_before_all_else_and_no_other_waits(
    hopper: dict[str, str],
) -> None:
    wait, let = "ACQBULK", "PREEXIT"
    wrong = []
    for full, code in hopper.items():
        names = [name for name, _ in INSTRUCTION.findall(code)]
        kernel = full.partition("<")[0]
        if (wait in names, let in names) != (kernel in FOLLOWERS, kernel in FOLLOWED):
            wrong.append(f"{full} on sm_90: {wait} {wait in names}, {let} {let in names}")
        if wait in names:
            early = r"LD\.|LDG|ST\.|STG|ATOM|RED|UBLKCP|BRA|EXIT|PREEXIT"
            before = [name for name in names[: names.index(wait)] if re.match(early, name)]
            if before:
                wrong.append(f"{full} on sm_90: {before} before {wait}")
    assert hopper
    assert wrong == []
