"""What holds for every op: torch's opcheck, fake tensors, no effect of the vector instructions."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from ops_check import devices
from torch._subclasses.fake_tensor import FakeTensorMode

from zshard import ops

STREAMED = 2_200_003  # elements: more than 4 MiB in every dtype, which is stored around the cache


def samples(device: str, n: int = 5003) -> dict[str, tuple[object, ...]]:
    """A call of each op, as torch.ops.zshard takes it, with the same values each time."""
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    half = torch.bfloat16
    low = torch.arange(n, device=device).to(torch.int16)
    segments = torch.tensor([[0, 1, n], [1, 0, 9]], device=device)
    scale = torch.full((1,), 0.3, device=device)
    skip = torch.zeros(1, device=device)
    active = torch.ones(2, dtype=torch.uint8, device=device)

    def optim(states: int, *hypers: list[float]) -> tuple[object, ...]:
        shards = [[rand(n), rand(9)], []]
        shards += [[rand(n).square(), rand(9).square()] for _ in range(states)]
        shards += [[rand(n, dtype=half), rand(9, dtype=half)] for _ in ("grads", "sends")]
        table = torch.tensor(hypers, dtype=torch.float64, device=device)
        return (*shards, segments, table, torch.tensor([3, 0], device=device), active, scale, skip)

    def reduce_adamw() -> tuple[object, ...]:
        shard = (rand(n, dtype=half), low.clone(), rand(n), rand(n).square())
        rows = torch.tensor([[0, 1, 40], [0, 50, n]], device=device)
        hypers = torch.tensor([[1e-3, 0.9, 0.99, 1e-8, 0.1, d] for d in (1.0, 0.0)], device=device)
        steps = torch.tensor([3, 0], device=device)
        peers = [rand(n, dtype=half) for _ in range(3)]
        tables = (rows, hypers.double(), steps, 0.3, stats.clone(), active, scale, skip)
        return (*shard, peers, None, *tables)

    stats = torch.zeros(2, dtype=torch.float64, device=device)
    return {
        "pack_": (rand(n), [rand(7, 3).t(), rand(n - 200, dtype=torch.float16)], [2, 100], 0.3),
        "unpack_": ([rand(7, 3).t(), rand(n - 200, dtype=torch.float16)], rand(n), [2, 100], 0.3),
        "cast_": (rand(n, dtype=torch.float16), rand(n)),
        "gather_cast_": (rand(2 * n, dtype=half), [rand(n), rand(n)]),
        "split_master_": (rand(n, dtype=half), low.clone(), rand(n)),
        "join_master_": (rand(n), rand(n, dtype=half), low),
        "reduce_": (rand(n), rand(3, n, dtype=half), 0.3, True, stats),
        "reduce_peers_": (rand(n), [rand(n, dtype=half) for _ in range(3)], 0.3, True, stats),
        "clip_factor_": (rand(1), rand(1), rand(1).double().square(), 0.3, scale),
        "reduce_adamw_": reduce_adamw(),
        "adamw_": optim(2, [1e-3, 0.9, 0.999, 1e-8, 0.1, 1.0], [1e-3, 0.9, 0.999, 1e-8, 0.1, 0.0]),
        "sgd_": optim(1, [1e-2, 0.9, 0.2, 0.1, 1.0, 0.0], [1e-2, 0.9, 0.0, 0.0, 0.0, 1.0]),
    }


def test_every_op_has_a_sample() -> None:
    assert sorted(samples("cpu")) == sorted(ops.__all__)


@devices
@pytest.mark.parametrize("name", ops.__all__)
def test_opcheck(name: str, device: str) -> None:
    torch.library.opcheck(getattr(torch.ops.zshard, name).default, samples(device)[name])


@pytest.mark.parametrize("name", ops.__all__)
def test_tracing_runs_without_data(name: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=False):
        assert getattr(ops, name)(*samples("cpu")[name]) is None


def test_tracing_refuses_two_devices() -> None:
    with FakeTensorMode(), pytest.raises(ops.InputError, match="cpu and meta"):
        ops.cast_(torch.empty(3), torch.empty(3, device="meta"))


@pytest.mark.parametrize("wrong", [None, torch.ones(3).to_sparse()])
def test_what_is_no_dense_tensor_is_refused_by_name(wrong: torch.Tensor | None) -> None:
    for op, arguments in (
        ("cast_", (wrong, torch.ones(3))),
        ("pack_", (wrong, [], [])),
        ("reduce_", (torch.ones(3), wrong)),
    ):
        with pytest.raises(ops.InputError, match=f"^zshard::{op}: every tensor has to be there"):
            getattr(ops, op)(*arguments)


def test_memory_between_two_elements_places_is_refused() -> None:
    """Where it is large it would be stored by whole cache lines, which end the process there."""
    memory = torch.zeros(21, dtype=torch.uint8).numpy()
    between = torch.frombuffer(memory, dtype=torch.float32, offset=1, count=5)
    for op, arguments in (
        ("cast_", (between, torch.ones(5, dtype=torch.bfloat16))),
        ("unpack_", ([between], torch.ones(5), [0])),
    ):
        with pytest.raises(ops.InputError, match=r"no multiple of its elements' 4 bytes: pass a"):
            getattr(ops, op)(*arguments)
    out = torch.empty(5)
    ops.pack_(out, [between], [0])  # which a model's parameter may be
    assert out.tolist() == [0.0] * 5


def digest() -> str:
    """A digest of all memory that large calls leave behind: of several grains, and streamed."""
    sha = hashlib.sha256()
    calls = [*samples("cpu", 200_003).items(), *samples("cpu", STREAMED).items()]
    for name, arguments in calls:
        getattr(ops, name)(*arguments)
        for argument in arguments:
            for t in argument if isinstance(argument, list) else [argument]:
                if isinstance(t, torch.Tensor):
                    sha.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    before, alone = torch.get_num_threads(), digest()
    try:
        torch.set_num_threads(threads)
        assert digest() == alone
    finally:
        torch.set_num_threads(before)


def run_with_isa(isa: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import test_ops_contract as t; print(t.digest())"],
        env={**os.environ, "ZSHARD_ISA": isa},
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("isa", ["baseline", "v3", "v4"])
def test_every_instruction_set_gives_the_same_bits(isa: str) -> None:
    done = run_with_isa(isa)
    if "this processor lacks it" in done.stderr:
        pytest.skip(f"this processor has no x86-64-{isa}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="ZSHARD_ISA is for x86-64")
def test_an_unknown_instruction_set_is_refused() -> None:
    done = run_with_isa("sse9")
    assert "InputError" in done.stderr
    assert "ZSHARD_ISA=sse9 is not one of auto, baseline, v3, v4" in done.stderr
