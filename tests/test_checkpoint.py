"""Round trips: what is saved by N ranks is loaded by M, with any strategy, unit map and master."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import checkpoints
import pytest
import torch
from checkpoints import assert_same, build, content, train
from ranks import run_ranks

import zshard

SIZES = [1, 2, 3, 4]
BF16 = zshard.Precision.bf16()
SPLIT = zshard.Precision(compute=torch.bfloat16, master="split")


class Case(NamedTuple):
    """How a model is wrapped, and what updates it."""

    strategy: str
    units: str | None
    precision: zshard.Precision
    optimizer: type[torch.optim.Optimizer]


CASES = [
    Case("zero3", None, zshard.Precision(), zshard.AdamW),
    Case("zero1", "layer", BF16, zshard.AdamW),
    Case("zero2", "model", SPLIT, zshard.AdamW),
    Case("ddp", None, BF16, torch.optim.AdamW),
    Case("zero3", "layer", zshard.Precision(), torch.optim.AdamW),
]


def wrapped(case: Case, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = build(seed, strategy=case.strategy, units=case.units, precision=case.precision)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return model, case.optimizer(groups, lr=0.05 * seed, betas=(0.8, 0.9))


def save_all(rank: int, size: int, folder: str) -> list[list[float]]:
    """Train, save, and go on a little; what the run without interruption saw."""
    seen = []
    for number, case in enumerate(CASES):
        model, optimizer = wrapped(case, seed=1)
        train(model, optimizer, rank, range(2))
        zshard.save(f"{folder}/{size}-{number}", model, optimizer, extra={"case": number})
        seen.append(train(model, optimizer, rank, range(2, 4)))
    return seen


def load_all(rank: int, size: int, folder: str) -> list[list[float]]:
    """Load every checkpoint into a model wrapped in another way, and save it again."""
    for number, saved in enumerate(CASES):
        others = [case for case in CASES if case.optimizer is saved.optimizer]
        for writers in SIZES:
            case = others[(number + writers + size) % len(others)]  # over all sizes, every pair
            model, optimizer = wrapped(case, seed=2)
            train(model, optimizer, rank, range(7, 8))  # there are states to be replaced
            path = f"{folder}/{writers}-{number}"
            loaded = zshard.load(path, model, optimizer)
            assert loaded == zshard.Loaded({"case": number}), loaded
            zshard.save(f"{folder}/again", model, optimizer, extra=loaded.extra)
            if rank == 0:
                what = f"{saved} on {writers} ranks into {case} on {size}"
                assert_same(content(f"{folder}/again"), content(path), what)
    seen = []
    for number, case in enumerate(CASES):
        model, optimizer = wrapped(case, seed=2)
        zshard.load(f"{folder}/{size}-{number}", model, optimizer)
        seen.append(train(model, optimizer, rank, range(2, 4)))
    return seen


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[list[float]]]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, {size: run_ranks(save_all, size, str(folder)) for size in SIZES}


@pytest.mark.parametrize("size", SIZES)
def test_any_ranks_strategy_map_and_master_load_the_same_bits_and_go_on(
    saved: tuple[Path, dict[int, list[list[float]]]], size: int
) -> None:
    folder, losses = saved
    assert run_ranks(load_all, size, str(folder)) == losses[size]


def whole_values(rank: int, size: int, path: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    model = build(3)
    zshard.save(path, model)
    with zshard.full_params(model):
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return state, sorted(os.listdir(path))


@pytest.mark.parametrize("size", [1, 3])
def test_the_safetensors_package_reads_the_models_own_names_shapes_and_values(
    tmp_path: Path, size: int
) -> None:
    [(state, files), *_] = run_ranks(whole_values, size, str(tmp_path / "a"))
    found = content(tmp_path / "a")
    weights = {k.removeprefix("model:"): v for k, v in found.items() if k.startswith("model:")}
    assert found["aliases"] == {"blocks.1.up.weight": "blocks.0.up.weight"}
    tied = state.pop("blocks.1.up.weight")
    assert torch.equal(tied, weights["blocks.0.up.weight"])
    assert_same(weights, state, "weights")
    assert found["buffers"] == ["count", "mask", "turned_buffer"]
    assert files == ["checkpoint.json", "master.safetensors", "model.safetensors"]


def untied(rank: int, size: int, folder: str) -> None:
    model = build(1)
    optimizer = zshard.AdamW(model.parameters())
    train(model, optimizer, rank, range(1))
    zshard.save(f"{folder}/tied", model, optimizer)
    torch.manual_seed(5)
    plain = checkpoints.Everything()
    plain.blocks[1].up.weight = torch.nn.Parameter(torch.zeros(13, 7))
    other = zshard.wrap(plain, ignored=["aside"])
    states = zshard.AdamW(other.parameters())
    assert zshard.load(f"{folder}/tied", other, states) == zshard.Loaded()
    weight = zshard.full_param(model, "blocks.0.up.weight")
    for block in (0, 1):
        assert torch.equal(zshard.full_param(other, f"blocks.{block}.up.weight"), weight)
    zshard.save(f"{folder}/untied", other, states)
    found, key = content(f"{folder}/untied"), "optimizer:blocks.{}.up.weight.exp_avg"
    assert torch.equal(found[key.format(0)], found[key.format(1)]) and found[key.format(1)].any()
    with pytest.raises(zshard.CheckpointError, match="one tensor in the model, and several"):
        zshard.load(f"{folder}/untied", model)


def test_a_tied_weight_is_stored_once_and_loaded_under_either_name(tmp_path: Path) -> None:
    run_ranks(untied, 2, str(tmp_path))


def several_files(rank: int, size: int, folder: str) -> None:
    from zshard.checkpoint import manifest, writer

    writer.FILE_BYTES = 300
    manifest.CHUNK_BYTES = writer.CHUNK_BYTES = 64
    model, optimizer = wrapped(CASES[0], seed=1)
    train(model, optimizer, rank, range(2))
    zshard.save(f"{folder}/a", model, optimizer)
    other, states = wrapped(CASES[0], seed=2)
    zshard.load(f"{folder}/a", other, states)
    zshard.save(f"{folder}/b", other, states)


def test_large_models_go_into_several_files_with_an_index_and_many_chunks(tmp_path: Path) -> None:
    run_ranks(several_files, 3, str(tmp_path))
    assert_same(content(tmp_path / "b"), content(tmp_path / "a"), "again")
    files = sorted(file.name for file in tmp_path.glob("a/model-*"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert (tmp_path / "a/model.safetensors.index.json").exists()


def asynchronous(rank: int, size: int, folder: str) -> tuple[list[float], list[float]]:
    model, optimizer = wrapped(CASES[1], seed=1)
    train(model, optimizer, rank, range(2))
    first = zshard.save(f"{folder}/a", model, optimizer, asynchronous=True)
    losses = train(model, optimizer, rank, range(2, 4))
    second = zshard.save(f"{folder}/b", model, optimizer, asynchronous=True)  # waits for the first
    assert first.done() and first.written_bytes == first.total_bytes > 0
    train(model, optimizer, rank, range(4, 5))
    second.wait()
    assert second.done() and second.path == os.path.realpath(f"{folder}/b")
    other, states = wrapped(CASES[1], seed=2)
    zshard.load(f"{folder}/a", other, states)
    return losses, train(other, states, rank, range(2, 4))


@pytest.mark.parametrize("size", [1, 2])
def test_an_asynchronous_save_is_of_the_moment_it_was_called(tmp_path: Path, size: int) -> None:
    for before, after in run_ranks(asynchronous, size, str(tmp_path)):
        assert before == after


def two_at_once(rank: int, size: int, folder: str) -> None:
    made = [build(seed) for seed in (1, 2)]
    for turn in range(4):  # the second model's save begins while the first's is being written
        handles = [
            zshard.save(f"{folder}/{turn}-{name}", model, asynchronous=True)
            for name, model in zip("ab", made, strict=True)
        ]
        for handle in handles[:: 1 if rank else -1]:
            assert handle is not None
            handle.wait()
    for name, model in zip("ab", made, strict=True):
        zshard.load(f"{folder}/3-{name}", other := build(3))
        assert_same(zshard.state_dict(other), zshard.state_dict(model), name)


def test_asynchronous_saves_of_two_models_at_once_are_both_whole(tmp_path: Path) -> None:
    run_ranks(two_at_once, 2, str(tmp_path))


def numbers(rank: int, size: int, folder: str) -> None:
    import random

    import numpy

    model = build(1)
    torch.manual_seed(10 + rank)
    random.seed(20 + rank)
    numpy.random.seed(30 + rank)

    def drawn() -> list[object]:  # an odd number of normals: these come in pairs
        python, of_numpy = random.gauss(0, 1), numpy.random.randn()
        return [torch.rand(3).tolist(), python, random.random(), of_numpy, numpy.random.rand()]

    drawn()
    zshard.save(f"{folder}/a", model, rng=True)
    after = drawn()
    assert zshard.load(f"{folder}/a", model, rng=True)
    assert drawn() == after
    zshard.save(f"{folder}/b", model)
    with pytest.raises(zshard.CheckpointError, match="random states of 0 ranks, and there are 2"):
        zshard.load(f"{folder}/b", model, rng=True)


def test_random_states_are_restored_on_request(tmp_path: Path) -> None:
    run_ranks(numbers, 2, str(tmp_path))
    with pytest.raises(zshard.CheckpointError, match="random states of 2 ranks, and there are 1"):
        zshard.load(tmp_path / "a", build(1), rng=True)


def on_meta(rank: int, size: int, folder: str) -> None:
    model, optimizer = wrapped(CASES[0], seed=1)
    train(model, optimizer, rank, range(2))
    zshard.save(f"{folder}/a", model, optimizer)
    with torch.device("meta"):
        plain = checkpoints.Everything()
    plain.cache = torch.randn(4)
    other = zshard.wrap(plain, ignored=["aside"], strategy="zero2")
    with pytest.raises(zshard.StateError, match="no values yet"):
        other(torch.randn(4, 3))
    zshard.load(f"{folder}/a", other)
    zshard.save(f"{folder}/b", other)
    zshard.save(f"{folder}/c", model)
    if rank == 0:
        assert_same(content(f"{folder}/b"), content(f"{folder}/c"), "from meta")


def test_a_model_on_the_meta_device_gets_its_values(tmp_path: Path) -> None:
    run_ranks(on_meta, 2, str(tmp_path))


def replicated(rank: int, size: int, folder: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    seen: list[list[float]] = []
    for seed in (1, 2):
        model = build(seed, mesh=mesh)
        optimizer = zshard.AdamW(model.parameters(), lr=0.05)
        train(model, optimizer, rank, range(2))
        if seed == 1:
            handle = zshard.save(f"{folder}/a", model, optimizer, asynchronous=True)
        else:
            handle.wait()
            zshard.load(f"{folder}/a", model, optimizer)
        seen.append(train(model, optimizer, rank, range(2, 4)))
    zshard.load(f"{folder}/a", model, optimizer)
    zshard.save(f"{folder}/again", model, optimizer)
    assert seen[0] == seen[1]
    return seen[0]


def alone(rank: int, size: int, folder: str) -> None:
    model = build(3)
    optimizer = zshard.AdamW(model.parameters())
    zshard.load(f"{folder}/a", model, optimizer)
    zshard.save(f"{folder}/alone", model, optimizer)


def test_replicas_share_the_writing_and_all_load(tmp_path: Path) -> None:
    run_ranks(replicated, 4, str(tmp_path))
    run_ranks(alone, 1, str(tmp_path))
    assert_same(content(tmp_path / "again"), content(tmp_path / "a"), "again")
    assert_same(content(tmp_path / "alone"), content(tmp_path / "a"), "alone")


def turned(aside: list[str], precision: zshard.Precision, *, straight: bool) -> torch.nn.Module:
    """Weights whose memory is in another order; ``straight``: the same ones in C order."""
    torch.manual_seed(1 + straight)
    conv = torch.nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last)
    conv.turned = torch.nn.Parameter(torch.randn(11, 6, 5).permute(2, 0, 1))
    if straight:
        for name, param in conv.named_parameters():
            setattr(conv, name, torch.nn.Parameter(param.detach().contiguous()))
    return zshard.wrap(conv, ignored=aside, precision=precision)


def other_orders(rank: int, size: int, folder: str) -> None:
    for number, precision in enumerate((zshard.Precision(), SPLIT)):
        for aside in ([], ["turned"]):
            saved = turned([], precision, straight=number == 0)
            optimizer = zshard.AdamW(saved.parameters())
            for param in saved.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            zshard.save(f"{folder}/a", saved, optimizer)
            loaded = turned(aside, precision, straight=number == 1)
            states = zshard.AdamW(loaded.parameters())
            zshard.load(f"{folder}/a", loaded, states)
            zshard.save(f"{folder}/b", loaded, states)
            if rank == 0:
                assert_same(content(f"{folder}/b"), content(f"{folder}/a"), f"{precision} {aside}")
            zshard.load_weights(turned(aside, precision, straight=number == 1), f"{folder}/a")


@pytest.mark.parametrize("size", [1, 3])
def test_memory_in_another_order_changes_no_value(tmp_path: Path, size: int) -> None:
    run_ranks(other_orders, size, str(tmp_path))


def elsewhere(rank: int, size: int, folder: str) -> None:
    model, other = build(1), build(2)
    optimizer, states = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    train(model, optimizer, rank, range(2))
    wanted = zshard.state_dict(model, all_ranks=True)
    zshard.save(f"{folder}/a", model, optimizer, rng=True)
    with torch.device("meta"):  # as torch.set_default_device
        zshard.save(f"{folder}/b", model, optimizer, rng=True)
        zshard.load(f"{folder}/b", other, states, rng=True)
        found = zshard.state_dict(other, all_ranks=True)
    for name, value in wanted.items():
        assert found[name].is_cpu and torch.equal(found[name], value), name
    one, two = content(f"{folder}/a"), content(f"{folder}/b")
    assert_same(two, one, "under another default device")


@pytest.mark.parametrize("size", [1, 2])
def test_the_default_device_of_new_tensors_does_not_matter(tmp_path: Path, size: int) -> None:
    run_ranks(elsewhere, size, str(tmp_path))
