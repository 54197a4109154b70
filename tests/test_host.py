"""The host runs ahead of the GPU: in a step it reads nothing back and sends nothing it need not.

The meta device stands for the GPU where there is none: nothing can be read from it, and its
collectives are left out. What the hosts tell each other goes over gloo all the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import models
import pytest
import torch
import torch.distributed as dist
from models import Blocks
from ops_check import devices
from ranks import run_ranks
from steps import training_step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zshard
from zshard.streams import Lane
from zshard.transports import control, groups
from zshard.wrap import schedule_of


class Crossings(TorchDispatchMode):
    """Collects the ops that take or make tensors on several devices."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        if len({tensor.device for tensor in tensors}) > 1:
            self.ops.append(str(func))
        return out


@contextmanager
def no_waiting(device: str) -> Iterator[list[str]]:
    """Raise at what makes the host wait for the device; yields the ops that go between the two."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield []
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:  # a meta tensor cannot be read
        with Crossings() as crossings:
            yield crossings.ops


def wrapped(device: str, **options: object) -> nn.Module:
    if device == "cuda":
        return zshard.wrap(Blocks(), device="cuda", **options)
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        module = importlib.import_module("zshard.wrap")
        patch.setattr(module, "on_meta", lambda model: {})
        patch.setattr(module, "allocate_outside", lambda *_: "")
        patch.setattr(module, "default_device", lambda *_: torch.device("meta"))
        return zshard.wrap(Blocks(), init="trust", **options)


DEVICES = ["meta", *devices.args[1][1:]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_a_step_makes_the_host_wait_for_nothing(device: str, strategy: str) -> None:
    model = wrapped(device, strategy=strategy)
    optimizer = zshard.AdamW(model.parameters())
    x = torch.zeros(4, 3, device=device)
    for _ in range(2):
        training_step(model, optimizer, x)
    with no_waiting(device) as crossed:
        training_step(model, optimizer, x)
    assert crossed == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_new_learning_rate_is_one_copy_that_nobody_waits_for(device: str) -> None:
    model = wrapped(device)
    optimizer = zshard.AdamW(model.parameters())
    x = torch.zeros(4, 3, device=device)
    for _ in range(2):
        training_step(model, optimizer, x)
    optimizer.param_groups[0]["lr"] = 0.5
    with no_waiting(device) as crossed:
        training_step(model, optimizer, x)
    assert crossed == ["aten._to_copy.default"] * (device == "meta")


def two_hosts(rank: int, world_size: int, break_at: int | None) -> tuple[list[str], list[bool]]:
    """Steps on which rank 1 leaves out a block, so that not every rank has every gradient.

    Args:
        break_at: a step in which backward raises on rank 1.
    """
    real = {name: getattr(dist, name) for name in ("all_reduce", "broadcast")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_backend_name", lambda group, device: "nccl")
        patch.setattr(groups, "control_group", lambda group, device: group)
        patch.setattr(groups, "_reduce_scatter", lambda *_, **__: None)
        gather = groups._all_gather
        patch.setattr(
            groups,
            "_all_gather",
            lambda out, *a, **k: None if out.is_meta else gather(out, *a, **k),
        )
        for name, op in real.items():
            patch.setattr(
                dist, name, lambda x, *a, op=op, **k: None if x.is_meta else op(x, *a, **k)
            )
        model = wrapped("meta")
        model.order = (0, 1, 2) if rank == 0 else (0, 2)
        optimizer = zshard.AdamW(model.parameters())
        x = torch.zeros(4, 3, device="meta")
        for count in range(3):
            if count == break_at and rank == 1:

                def fail(*_: object) -> None:
                    raise ValueError("user code")

                model.blocks[0].up.register_full_backward_hook(fail)
                with pytest.raises(ValueError, match="user code"):
                    models.loss_of(model, x).backward()
                zshard.reset(model)
                return [], []
            with no_waiting("meta") as crossed:
                training_step(model, optimizer, x)
        present = schedule_of(model).units[2].flats[0].grads.arrived
        return crossed, present


def test_what_ranks_tell_each_other_goes_from_host_to_host() -> None:
    for crossed, present in run_ranks(two_hosts, 2, None):
        assert crossed == []
        assert present == [True] * 5  # those of the block that rank 1 leaves out


def failing(rank: int, world_size: int) -> str:
    if rank == 1:
        two_hosts(rank, world_size, 2)
        return ""
    with pytest.raises(zshard.StateError) as caught:
        two_hosts(rank, world_size, 2)
    return str(caught.value)


def test_a_backward_that_raised_on_another_host_is_told() -> None:
    message, _ = run_ranks(failing, 2)
    assert "on rank 1 a backward of this step" in message


def groups_made(rank: int, world_size: int) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_backend_name", lambda group, device: "nccl")
        counts = []
        for _ in range(2):
            zshard.wrap(Blocks())
            counts.append(control.groups_made())
        return counts


def test_models_over_the_same_ranks_share_the_hosts_group() -> None:
    assert run_ranks(groups_made, 2) == [[1, 1]] * 2


def unreached(rank: int, world_size: int, over: str) -> str:
    """Ranks of NCCL that do not find each other, by it or by gloo."""

    def duplicate(*_: object) -> None:
        raise dist.DistBackendError("Duplicate GPU detected")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_backend_name", lambda group, device: "nccl")
        if over == "gloo":
            patch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
        else:
            patch.setattr(dist, "all_reduce", duplicate)
        with pytest.raises(zshard.CommError) as caught:
            zshard.wrap(Blocks())
    return str(caught.value)


@pytest.mark.parametrize(
    ("over", "cause", "remedy"),
    [
        ("nccl", "Duplicate GPU detected", "a GPU of its own"),
        ("gloo", "nowhere", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_ranks_of_gpus_that_do_not_reach_each_other_are_told_what_to_set(
    over: str, cause: str, remedy: str
) -> None:
    for said in run_ranks(unreached, 2, over):
        assert "ranks [0, 1]" in said and cause in said and remedy in said


def test_a_lane_that_goes_makes_the_compute_stream_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        device = torch.device("cpu")

        def __init__(self) -> None:
            self.waited: list[object] = []

        def wait_stream(self, other: object) -> None:
            self.waited.append(other)

    compute, side = Stream(), Stream()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda index: compute)
    lane = Lane(torch.device("cpu"))
    lane.stream = side  # type: ignore[assignment]
    del lane
    assert compute.waited == [side]
