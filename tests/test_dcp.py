"""torch.distributed.checkpoint on wrapped models: between ranks, strategies and precisions.

The plain model reads zshard's checkpoints in one process, and so is the reference of what lies
where in them.
"""

from __future__ import annotations

import copy
import itertools
import time
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from sides import PRECISIONS, RATE, STEP, Side, differs, load_sides, plain, save_sides, value_of
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.metadata import MetadataIndex

import zshard
from zshard.transports import peer

# In one process it says that torch.distributed is not there.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

AT_TWO = {
    "a": Side("odd_parameters"),
    "b": Side("odd_parameters", "ddp", optimizer="torch"),
    "c": Side("channels_last", "zero1"),
    "d": Side("frozen", "zero2", "bf16"),
    "e": Side("odd_parameters", precision="split"),
    "f": Side("tied_across_units", precision="bf16 parameters"),
    "j": Side("channels_last", precision="split"),
}
AT_FOUR = {
    "g": Side("odd_parameters", hsdp=True),
    "h": Side("channels_last", "ddp", hsdp=True),
    "i": Side("odd_parameters", "zero1", "split", hsdp=True),
}
LOADS = [
    ("a", Side("odd_parameters", "zero1", "split")),
    ("b", Side("odd_parameters", "zero3")),
    ("c", Side("channels_last", "ddp", "bf16", "torch")),
    ("d", Side("frozen", "zero3", "split")),
    ("e", Side("odd_parameters", "zero2", optimizer="torch")),
    ("f", Side("tied_across_units", "ddp", "bf16 parameters")),
    ("g", Side("odd_parameters", "zero1", "bf16")),
    ("h", Side("channels_last", "zero3", "split")),
    ("i", Side("odd_parameters", "ddp", "split")),
    ("j", Side("channels_last")),
]
LOADS_AT_FOUR = [
    ("a", Side("odd_parameters", "zero1", "split", hsdp=True)),
    ("c", Side("channels_last", "zero3", "bf16", "torch", hsdp=True)),
    ("h", Side("channels_last", "ddp", "bf16", hsdp=True)),
]
OPTIONS = [  # of get_state_dict and set_state_dict
    dict(full_state_dict=True),
    dict(cpu_offload=True),
    dict(flatten_optimizer_state_dict=True),
    dict(ignore_frozen_params=True, strict=False),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    run_ranks(save_sides, 2, AT_TWO, folder)
    run_ranks(save_sides, 4, AT_FOUR, folder)
    return folder


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_a_checkpoint_loads_at_other_ranks_strategies_and_precisions(
    world_size: int, saved: Path
) -> None:
    loads = LOADS_AT_FOUR if world_size == 4 else LOADS
    for wrong in run_ranks(load_sides, world_size, loads, saved):
        assert wrong == []


@pytest.mark.parametrize("name", [*AT_TWO, *AT_FOUR])
def test_a_plain_model_reads_every_element_where_it_belongs(name: str, saved: Path) -> None:
    side = (AT_TWO | AT_FOUR)[name]
    model = plain(side.case, "before")
    found = {"model": model.state_dict()}
    dcp.load(found, checkpoint_id=saved / name, no_dist=True)
    for key, param in model.named_parameters():
        assert torch.equal(param, value_of(key, param.shape)), key
    for file in (saved / name).iterdir():  # and without zshard
        assert b"zshard" not in file.read_bytes(), file


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
                state["step"] = torch.tensor(float(STEP))
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = value_of(f"{key} {name}", values[name].shape)
            states["param_groups"][0]["lr"] = RATE
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


def steps_from_what_was_given(rank: int, world_size: int) -> list[str]:
    """Whether a step from what get_state_dict gave, by each option, is the one that came then."""
    wrong = []
    batches = models.batches("frozen", 3, rank)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> object:
        models.loss_of(model, batches[number]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [param.local.tolist() for param in model.parameters()]

    sides = Side("frozen"), Side("frozen", "zero1", "split"), Side("frozen", "ddp", "fp32", "torch")
    for side, given in itertools.product(sides, OPTIONS):
        model, options = side.model(), dsd.StateDictOptions(**given)
        optimizer = side.make_optimizer(model)
        step(model, optimizer, 0)
        got = copy.deepcopy(dsd.get_state_dict(model, optimizer, options=options))
        wanted = step(model, optimizer, 1)
        step(model, optimizer, 2)
        dsd.set_state_dict(
            model, optimizer, model_state_dict=got[0], optim_state_dict=got[1], options=options
        )
        if step(model, optimizer, 1) != wanted:
            wrong.append(f"{side} {given}")
    return wrong


def test_what_get_state_dict_gives_by_any_option_is_what_training_goes_on_from() -> None:
    for wrong in run_ranks(steps_from_what_was_given, 2):
        assert wrong == []


def sharded_from_rank_0(rank: int, world_size: int) -> list[str]:
    """What is said where rank 0 is to send the tensors that torch's own get_... has given."""
    side = Side("blocks")
    model = side.model()
    optimizer = side.make_optimizer(model)
    weights, states = dsd.get_state_dict(
        model, optimizer, options=dsd.StateDictOptions(full_state_dict=True)
    )
    options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    said = []
    for send in (
        lambda: dsd.set_model_state_dict(model, weights, options=options),
        lambda: dsd.set_optimizer_state_dict(model, optimizer, states, options=options),
    ):
        with pytest.raises(zshard.ShardedAccessError) as error:
            send()
        said.append(str(error.value))
    return said


def test_sharded_tensors_are_refused_as_rank_0s_whole_ones_with_what_takes_them() -> None:
    (said,) = run_ranks(sharded_from_rank_0, 1)
    for message in said:  # of several ranks it is rank 0's alone, with which the others end
        assert "'inlet.weight'" in message and "leave out broadcast_from_rank0" in message


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


def test_a_model_without_values_is_neither_saved_nor_loaded(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = models.CASES["blocks"].build()
    model = zshard.wrap(model, device="cpu")
    with pytest.raises(dcp.api.CheckpointException, match=r"checkpoint\.save is refused"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    whole = zshard.wrap(models.build("blocks"))
    dcp.save({"model": whole.state_dict()}, checkpoint_id=tmp_path)
    with pytest.raises(dcp.api.CheckpointException, match=r"checkpoint\.load is refused"):
        dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path)


def test_a_box_of_a_split_master_is_written_by_copies_alone() -> None:
    model = Side("blocks", precision="split").model()
    weight = model.inlet.weight
    (chunk,) = weight.__create_chunk_list__()
    box = weight.__get_tensor_shard__(MetadataIndex("inlet.weight", chunk.offsets))
    with pytest.raises(zshard.StateError, match="of a split master: only copy_ writes to it"):
        box.add_(1)
    wanted = value_of("another", weight.shape)
    box.copy_(wanted)
    assert torch.equal(zshard.full_param(model, "inlet.weight"), wanted)


def gradients_loaded(rank: int, world_size: int, folder: Path) -> tuple[float, float, float]:
    """Norms: of gradients that are saved, of others, and of these once those are loaded."""
    norms = []
    for step in range(2):
        model = Side("blocks").model()
        models.loss_of(model, models.batches("blocks", 2, rank)[step]).backward()
        norms.append(zshard.clip_grad_norm_(model, 1e9).item())
        gradients = {name: param.grad for name, param in model.named_parameters()}
        (dcp.save, dcp.load)[step](gradients, checkpoint_id=folder)
    return *norms, zshard.clip_grad_norm_(model, 1e9).item()


def test_the_norm_of_gradients_that_are_loaded_is_theirs(tmp_path: Path) -> None:
    for saved, before, loaded in run_ranks(gradients_loaded, 2, tmp_path):
        assert loaded == saved != before


def loads_early(rank: int, world_size: int, folder: Path, precision: str) -> list[torch.Tensor]:
    """Outputs of forwards between loads by each rank for itself; rank 0 reads others' shards late.

    The last are of a run in which it does not.
    """
    read, seen = peer.PeerRanks.read, []

    def late(*args: object) -> None:
        time.sleep(0.02 if rank == 0 else 0)
        read(*args)

    for peer.PeerRanks.read in (late, read):
        model = zshard.wrap(plain("blocks", "before"), comm="peer", precision=PRECISIONS[precision])
        with torch.no_grad():
            for step in range(3):
                seen.append(models.loss_of(model, models.batches("blocks", 1)[0]))
                if peer.PeerRanks.read is read:
                    dist.barrier()
                dcp.load(model.state_dict(), checkpoint_id=folder / str(step), no_dist=True)
    return seen


@pytest.mark.parametrize("precision", ["fp32", "split"])
def test_a_rank_that_loads_for_itself_waits_for_those_that_still_read_its_values(
    precision: str, tmp_path: Path
) -> None:
    for step in range(3):
        dcp.save(plain("blocks", str(step)).state_dict(), checkpoint_id=tmp_path / str(step))
    for seen in run_ranks(loads_early, 2, tmp_path, precision):
        assert seen[:3] == seen[3:] and len(set(map(float, seen))) == 3
