"""The two sides of a checkpoint by torch.distributed.checkpoint: what saves it, and what loads it.

Every value is a function of its name, so that each side knows what it has to find.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import zshard
from zshard.param import Sharded

STEP = 5
RATE = 0.0625
PRECISIONS = {
    "fp32": None,
    "bf16": zshard.Precision.bf16(),
    "split": zshard.Precision.bf16(master="split"),
    # bf16 parameters with fp32 masters, which have bits that the parameters do not.
    "bf16 parameters": zshard.Precision.bf16(),
}


@dataclass(frozen=True)
class Side:
    """A model and its optimizer, as one of the two jobs builds them."""

    case: str
    strategy: str = "zero3"
    precision: str = "fp32"
    optimizer: str = "zshard"
    hsdp: bool = False

    def model(self) -> nn.Module:
        """Wrapped, with values that are not the ones in question."""
        model = plain(self.case, "before")
        if self.precision == "bf16 parameters":
            model.bfloat16()
        mesh = None
        if self.hsdp:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        precision = PRECISIONS[self.precision]
        return zshard.wrap(model, strategy=self.strategy, precision=precision, mesh=mesh)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind = zshard.AdamW if self.optimizer == "zshard" else torch.optim.AdamW
        return kind(model.parameters(), lr=0.5)


def value_of(name: str, shape: torch.Size) -> Tensor:
    """(shape) fp32, positive, for a second moment has to be."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(shape, generator=generator) + 0.01


def plain(case: str, salt: str) -> nn.Module:
    model = models.build(case)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(value_of(salt + name, param.shape))
    return model


def write(target: Tensor, value: Tensor) -> None:
    if isinstance(target, DTensor):
        value = distribute_tensor(value, target.device_mesh, target.placements)
    target.copy_(value)


def differs(held: Tensor, value: Tensor) -> bool:
    """Whether ``held`` is not ``value``, as far as this rank holds it, in every bit of it."""
    if isinstance(held, DTensor):
        return not torch.equal(held.full_tensor(), value)
    if not isinstance(held, Sharded):
        return not torch.equal(held, value.to(held.dtype))
    segment = held.flat.layout.segments[held.segment]
    own = held.flat.local(held.segment).elements.of(value.permute(segment.order).reshape(-1))
    return not torch.equal(held.local, own.to(held.local.dtype))


@torch.no_grad()
def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    weights, states = dsd.get_state_dict(model, optimizer)
    for name, param in model.named_parameters():
        write(param, value_of(name, param.shape))
    for name, state in states["state"].items():
        for key, tensor in state.items():
            if key == "step":
                tensor.fill_(STEP)
            else:
                write(tensor, value_of(f"{key} {name}", weights[name].shape))
    for group in states["param_groups"]:
        group["lr"] = RATE
    dcp.save({"model": weights, "optim": states}, checkpoint_id=path)


@torch.no_grad()
def load(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> list[str]:
    """Load, and say what is not as it has to be."""
    weights, states = dsd.get_state_dict(model, optimizer)
    found = {"model": weights, "optim": states}
    dcp.load(found, checkpoint_id=path)
    dsd.set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"]
    )
    wrong = [n for n, p in model.named_parameters() if differs(p, value_of(n, p.shape))]
    states = dsd.get_optimizer_state_dict(model, optimizer)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    wrong += [f"states of {name}" for name in trained if name not in states["state"]]
    for name, state in states["state"].items():
        wrong += [f"step of {name}: {state['step']}"] if state["step"] != STEP else []
        for key in ("exp_avg", "exp_avg_sq"):
            if differs(state[key], value_of(f"{key} {name}", weights[name].shape)):
                wrong.append(f"{key} of {name}")
    rates = [group["lr"] for group in optimizer.param_groups]
    return wrong + ([f"lr {rates}"] if rates != [RATE] else [])


def elements_written_once(model: nn.Module) -> list[str]:
    """Names of the parameters of which the ranks together write not each element exactly once."""
    wrong = []
    for name, param in model.state_dict().items():
        boxes = [
            (tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
            for item in param.__create_write_items__(name, param)
        ]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, boxes)
        written = torch.zeros(param.shape)
        for offsets, sizes in (box for boxes in everyone for box in boxes):
            written[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        zero_size = param.numel() == 0  # a box without elements says that it exists
        if not (written == 1).all() or (zero_size and sum(map(len, everyone)) != 1):
            wrong.append(name)
    return wrong


def save_sides(rank: int, world_size: int, sides: dict[str, Side], folder: Path) -> None:
    for name, side in sides.items():
        model = side.model()
        save(model, side.make_optimizer(model), folder / name)
        assert elements_written_once(model) == [], name


def load_sides(
    rank: int, world_size: int, sides: list[tuple[str, Side]], folder: Path
) -> list[str]:
    wrong = []
    for name, side in sides:
        model = side.model()
        batches = models.batches(side.case, 2, rank)
        with torch.no_grad():
            models.loss_of(
                model, batches[0]
            )  # whole parameters that stay in memory are the old ones
        optimizer = side.make_optimizer(model)
        wrong += [f"{name} as {side}: {each}" for each in load(model, optimizer, folder / name)]
        # The forward computes with what was loaded, and training goes on.
        fresh = side.model()
        with torch.no_grad():
            for key, param in fresh.named_parameters():
                param.copy_(value_of(key, param.shape))
        ours, theirs = (models.loss_of(each, batches[1]) for each in (model, fresh))
        if not torch.equal(ours, theirs):
            wrong.append(f"{name} as {side}: forward gives {ours}, not {theirs}")
        ours.backward()
        theirs.backward()
        optimizer.step()
    return wrong
