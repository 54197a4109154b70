"""torch.distributed.checkpoint on wrapped models: between ranks, strategies, precisions, and FSDP2.

Every value is a function of its name, so that each side knows what it has to find. The plain model
reads zshard's checkpoints in one process, and so is the reference of what lies where in them.
"""

from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import zshard
from zshard.param import Sharded

# In one process it says that torch.distributed is not there.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

kStep = 5
kRate = 0.0625
kPrecisions = {
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
        precision = kPrecisions[self.precision]
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
    _, _, skip = held.flat.local(held.segment)
    own = value.permute(segment.order).reshape(-1)[skip : skip + held._numel()]
    return not torch.equal(held.local, own.to(held.local.dtype))


@torch.no_grad()
def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    weights, states = dsd.get_state_dict(model, optimizer)
    for name, param in model.named_parameters():
        write(param, value_of(name, param.shape))
    for name, state in states["state"].items():
        for key, tensor in state.items():
            if key == "step":
                tensor.fill_(kStep)
            else:
                write(tensor, value_of(f"{key} {name}", weights[name].shape))
    for group in states["param_groups"]:
        group["lr"] = kRate
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
        wrong += [f"step of {name}: {state['step']}"] if state["step"] != kStep else []
        for key in ("exp_avg", "exp_avg_sq"):
            if differs(state[key], value_of(f"{key} {name}", weights[name].shape)):
                wrong.append(f"{key} of {name}")
    rates = [group["lr"] for group in optimizer.param_groups]
    return wrong + ([f"lr {rates}"] if rates != [kRate] else [])


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


kAtTwo = {
    "a": Side("odd_parameters"),
    "b": Side("odd_parameters", "ddp", optimizer="torch"),
    "c": Side("channels_last", "zero1"),
    "d": Side("frozen", "zero2", "bf16"),
    "e": Side("odd_parameters", precision="split"),
    "f": Side("tied_across_units", precision="bf16 parameters"),
}
kAtFour = {
    "g": Side("odd_parameters", hsdp=True),
    "h": Side("channels_last", "ddp", hsdp=True),
    "i": Side("odd_parameters", "zero1", "split", hsdp=True),
}
kLoads = [
    ("a", Side("odd_parameters", "zero1", "split")),
    ("b", Side("odd_parameters", "zero3")),
    ("c", Side("channels_last", "ddp", "bf16", "torch")),
    ("d", Side("frozen", "zero3", "split")),
    ("e", Side("odd_parameters", "zero2", optimizer="torch")),
    ("f", Side("tied_across_units", "ddp", "bf16 parameters")),
    ("g", Side("odd_parameters", "zero1", "bf16")),
    ("h", Side("channels_last", "zero3", "split")),
    ("i", Side("odd_parameters", "ddp", "split")),
]
kLoadsAtFour = [
    ("a", Side("odd_parameters", "zero1", "split", hsdp=True)),
    ("c", Side("channels_last", "zero3", "bf16", "torch", hsdp=True)),
    ("h", Side("channels_last", "ddp", "bf16", hsdp=True)),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    run_ranks(save_sides, 2, kAtTwo, folder)
    run_ranks(save_sides, 4, kAtFour, folder)
    return folder


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_a_checkpoint_loads_at_other_ranks_strategies_and_precisions(
    world_size: int, saved: Path
) -> None:
    loads = kLoadsAtFour if world_size == 4 else kLoads
    for wrong in run_ranks(load_sides, world_size, loads, saved):
        assert wrong == []


@pytest.mark.parametrize("name", [*kAtTwo, *kAtFour])
def test_a_plain_model_reads_every_element_where_it_belongs(name: str, saved: Path) -> None:
    side = (kAtTwo | kAtFour)[name]
    model = plain(side.case, "before")
    found = {"model": model.state_dict()}
    dcp.load(found, checkpoint_id=saved / name, no_dist=True)
    for key, param in model.named_parameters():
        assert torch.equal(param, value_of(key, param.shape)), key


def load_plain(rank: int, world_size: int, path: Path) -> list[str]:
    model = Side("channels_last", "zero1", "split").model()
    found = {"model": model.state_dict()}
    dcp.load(found, checkpoint_id=path)
    return [n for n, p in model.named_parameters() if differs(p, value_of(n, p.shape))]


def test_a_plain_models_checkpoint_loads(tmp_path: Path) -> None:
    dcp.save({"model": plain("channels_last", "").state_dict()}, checkpoint_id=tmp_path / "p")
    for wrong in run_ranks(load_plain, 3, tmp_path / "p"):
        assert wrong == []


def load_in_place(rank: int, world_size: int, path: Path) -> list[str]:
    """dcp.load alone, into what model.state_dict() shows of the model's own memory."""
    wrong = []
    batch = models.batches("odd_parameters", 1, rank)[0]
    for strategy in ("zero1", "zero3", "ddp"):
        for precision in ("fp32", "bf16", "split"):
            side = Side("odd_parameters", strategy, precision)
            model, other = side.model(), side.model()
            with torch.no_grad():
                models.loss_of(model, batch)
                dcp.load({"model": model.state_dict()}, checkpoint_id=path)
                for key, param in other.named_parameters():
                    param.copy_(value_of(key, param.shape))
                if not torch.equal(models.loss_of(model, batch), models.loss_of(other, batch)):
                    wrong.append(f"{side}: forward")
            wrong += [
                f"{side}: {n}"
                for n, p in model.named_parameters()
                if differs(p, value_of(n, p.shape))
            ]
    return wrong


def test_a_load_alone_writes_through_and_the_next_forward_computes_with_it(saved: Path) -> None:
    for wrong in run_ranks(load_in_place, 3, saved / "a"):
        assert wrong == []


def fsdp2(case: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain(case, "before")
    blocks = model.blocks if hasattr(model, "blocks") else []
    for block in blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


kShared = ["blocks", "frozen", "tied_in_one_unit"]


def fsdp2_saves(rank: int, world_size: int, folder: Path) -> None:
    for case in kShared:
        save(*fsdp2(case), folder / case)


def fsdp2_loads(rank: int, world_size: int, folder: Path, names: list[str]) -> list[str]:
    wrong = []
    for case, name in ((case, name) for case in kShared for name in names):
        model, optimizer = fsdp2(case)
        wrong += load(model, optimizer, folder / f"{case} {name}")
        models.loss_of(model, models.batches(case, 1, rank)[0]).backward()
        optimizer.step()  # also with steps that were counted in int64
    return wrong


@pytest.mark.parametrize(("ours", "theirs"), [(2, 3), (3, 2)])
def test_a_checkpoint_moves_to_and_from_fsdp2(ours: int, theirs: int, tmp_path: Path) -> None:
    kinds = {
        "torch": ("zero3", "fp32"),
        "zshard": ("zero1", "split") if ours == 2 else ("zero3", "bf16"),
    }
    sides = {f"{c} {o}": Side(c, *kinds[o], o) for c in kShared for o in kinds}
    run_ranks(fsdp2_saves, theirs, tmp_path)
    loads = [(side.case, side) for side in sides.values()]
    for wrong in run_ranks(load_sides, ours, loads, tmp_path):
        assert wrong == []
    run_ranks(save_sides, ours, sides, tmp_path)
    for wrong in run_ranks(fsdp2_loads, theirs, tmp_path, list(kinds)):
        assert wrong == []


def whole_values(rank: int, world_size: int) -> list[str]:
    """set_state_dict with whole tensors, on every rank or on rank 0 alone."""
    wrong = []
    values = plain("odd_parameters", "").state_dict()
    for from_first in (False, True):
        for side in (Side("odd_parameters"), Side("odd_parameters", "zero1", "split")):
            model = side.model()
            optimizer = side.make_optimizer(model)
            options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
            states = dsd.get_optimizer_state_dict(model, optimizer)
            for name, state in states["state"].items():
                state["step"] = torch.tensor(float(kStep))
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = value_of(f"{key} {name}", values[name].shape)
            states["param_groups"][0]["lr"] = kRate
            if from_first and rank > 0:
                values, states = {}, {}
            dsd.set_model_state_dict(model, values, options=options)
            dsd.set_optimizer_state_dict(model, optimizer, states, options=options)
            wrong += [n for n, p in model.named_parameters() if differs(p, value_of(n, p.shape))]
            for name, state in dsd.get_optimizer_state_dict(model, optimizer)["state"].items():
                for key in ("exp_avg", "exp_avg_sq"):
                    if differs(state[key], value_of(f"{key} {name}", state[key].shape)):
                        wrong.append(f"{key} of {name}")
            values = plain("odd_parameters", "").state_dict()
    return wrong


def test_set_state_dict_takes_whole_tensors() -> None:
    for wrong in run_ranks(whole_values, 2):
        assert wrong == []


def test_a_copied_state_dict_keeps_the_values_of_its_time() -> None:
    for precision in ("fp32", "split"):
        side = Side("odd_parameters", precision=precision)
        model = side.model()
        optimizer = side.make_optimizer(model)
        dsd.get_optimizer_state_dict(model, optimizer)  # makes the states
        weights, states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for batch in models.batches("odd_parameters", 2):
            models.loss_of(model, batch).backward()
            optimizer.step()
        assert differs(model.inlet.weight, value_of("beforeinlet.weight", torch.Size([7, 3])))
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        for name, param in model.named_parameters():
            assert not differs(param, value_of("before" + name, param.shape))
        for state in optimizer.state_dict()["state"].values():
            assert state["step"] == 1 and not state["exp_avg"].local.any()


def test_the_state_of_another_rule_is_refused() -> None:
    side = Side("blocks")
    model = side.model()
    optimizer = side.make_optimizer(model)
    for name, value in (("amsgrad", True), ("maximize", True), ("decoupled_weight_decay", False)):
        state = optimizer.state_dict()
        state["param_groups"][0][name] = value
        with pytest.raises(zshard.OptimizerError, match=f"{name}={value}.*torch.optim"):
            optimizer.load_state_dict(state)
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(3, 7)
    with pytest.raises(zshard.OptimizerError, match=r"'exp_avg' of inlet.weight.*\(3, 7\)"):
        optimizer.load_state_dict(state)
