"""A damaged checkpoint is refused with a typed error that names what is damaged: never loaded."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from adversity import DATA, MANIFEST, Run, same, scratch, two_saves
from ranks import run_ranks

import zshard

MUTATIONS = 1000
BLOCK = 64  # bytes

Mutation = Callable[[random.Random, Path, Path], str | None]


def some_file(rng: random.Random, folder: Path) -> Path:
    return folder / rng.choice([*DATA, MANIFEST])


def flip_bit(rng: random.Random, folder: Path, other: Path) -> str:
    path = some_file(rng, folder)
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return path.name


def change_byte(rng: random.Random, folder: Path, other: Path) -> str:
    path = some_file(rng, folder)
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    data[at] = (data[at] + rng.randrange(1, 256)) % 256
    path.write_bytes(data)
    return path.name


def truncate(rng: random.Random, folder: Path, other: Path) -> str:
    path = some_file(rng, folder)
    os.truncate(path, rng.randrange(path.stat().st_size))
    return path.name


def extend(rng: random.Random, folder: Path, other: Path) -> str:
    path = some_file(rng, folder)
    data = path.read_bytes()
    more = rng.choice([bytes(rng.randrange(1, 99)), data, data[-rng.randrange(1, len(data)) :]])
    path.write_bytes(data + more)
    return path.name


def swap_blocks(rng: random.Random, folder: Path, other: Path) -> str | None:
    path = some_file(rng, folder)
    data = path.read_bytes()
    size = min(rng.choice([1, 4, BLOCK]), len(data) // 2)
    a = rng.randrange(len(data) - 2 * size + 1)
    b = rng.randrange(a + size, len(data) - size + 1)
    swapped = data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size]
    path.write_bytes(swapped + data[b + size :])
    return path.name if swapped + data[b + size :] != data else None


def swap_files(rng: random.Random, folder: Path, other: Path) -> str:
    a, b = (folder / name for name in rng.sample([*DATA, MANIFEST], 2))
    a_data, b_data = a.read_bytes(), b.read_bytes()
    a.write_bytes(b_data)
    b.write_bytes(a_data)
    return f"{a.name} {b.name}"


def take_anothers_file(rng: random.Random, folder: Path, other: Path) -> str:
    name = rng.choice(DATA)
    shutil.copy(other / name, folder / name)
    return name


def take_anothers_data(rng: random.Random, folder: Path, other: Path) -> str | None:
    """Another save's data beneath this one's header: in the right place, of another step."""
    name = rng.choice(DATA)
    ours, theirs = (folder / name).read_bytes(), (other / name).read_bytes()
    header = 8 + int.from_bytes(ours[:8], "little")
    assert len(ours) == len(theirs) and header == 8 + int.from_bytes(theirs[:8], "little")
    start = rng.randrange(header, len(ours))
    size = rng.randrange(1, len(ours) - start + 1)
    mixed = ours[:start] + theirs[start : start + size] + ours[start + size :]
    (folder / name).write_bytes(mixed)
    return name if mixed != ours else None


def take_anothers_manifest(rng: random.Random, folder: Path, other: Path) -> str:
    shutil.copy(other / MANIFEST, folder / MANIFEST)
    return " ".join(DATA)


def lose(rng: random.Random, folder: Path, other: Path) -> str:
    path = some_file(rng, folder)
    path.unlink()
    return path.name


def lose_and_make(rng: random.Random, folder: Path, other: Path) -> str:
    """Something that is no file in the place of a file."""
    path = some_file(rng, folder)
    path.unlink()
    rng.choice([os.mkdir, os.mkfifo, lambda name: os.symlink(name, name)])(path)
    return path.name


WAYS: list[Mutation] = [
    *(flip_bit, change_byte, truncate, extend, swap_blocks, swap_files, take_anothers_file),
    *(take_anothers_data, take_anothers_manifest, lose, lose_and_make),
]


def mutations(count: int, first: Path, second: Path, place: Path) -> Iterator[tuple[str, str]]:
    """Damaged copies of the first checkpoint at ``place``: what was done, and the files' names."""
    done = 0
    for seed in range(10 * count):
        rng = random.Random(seed)
        way = WAYS[seed % len(WAYS)]
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(first, place)
        names = way(rng, place, second)
        if names is None:  # the bytes are the same
            continue
        yield f"{way.__name__} with seed {seed}", names
        done += 1
        if done == count:
            return


def check_refused(run: Run, place: Path, names: str, expected: dict[str, torch.Tensor]) -> bool:
    """See that the damage is found and named; returns whether it was in data that was loaded."""
    with pytest.raises(zshard.CheckpointError) as raised:
        run.load(place, rng=True)
    text = str(raised.value)
    assert any(name in text for name in names.split()), text
    in_data = "elements" in text
    if in_data:
        assert "tensor " in text and "checksum" in text, text
        with pytest.raises(zshard.StateError, match="failed halfway") as refused:
            run.step()
        assert str(place) in str(refused.value)
    else:
        assert same(run.bits(), expected), "a refused load changed the model"
        run.step()  # and it still runs
    return in_data


def test_a_thousand_damages_are_each_refused_by_name_and_never_loaded() -> None:
    data_found = 0
    with two_saves() as (first, second, run):
        expected, place = run.bits(), first.parent / "damaged"
        for what, names in mutations(MUTATIONS, first, second, place):
            try:
                data_found += check_refused(run, place, names, expected)
                assert run.load(first, rng=True) == "first"
                assert same(run.bits(), expected)
            except BaseException as error:
                raise AssertionError(what) from error
        run.step()
    assert data_found > MUTATIONS // 20, "hardly any damage reached the data"
    print(f"{data_found} of {MUTATIONS} damages were in data")


def refuse_on_two_ranks(rank: int, world_size: int, base: str, count: int) -> list[bool]:
    """Both ranks are given the same damages, each made by the first."""
    run, first, second = Run(1), Path(base, "first"), Path(base, "second")
    run.save(first, "first", rng=True)
    run.step(2)
    run.save(second, "second", rng=True)
    assert run.load(first, rng=True) == "first"
    expected, found = run.bits(), []
    makes = mutations(count, first, second, Path(base, "damaged"))
    for number in range(count):
        made = [next(makes) if rank == 0 else None]
        dist.broadcast_object_list(made)
        what, names = made[0]
        try:
            found.append(check_refused(run, Path(base, "damaged"), names, expected))
            assert run.load(first, rng=True) == "first"
            assert same(run.bits(), expected)
        except BaseException as error:
            raise AssertionError(f"{number}: {what}") from error
    return found


def test_both_of_two_ranks_refuse_a_damage_that_one_of_them_meets() -> None:
    with scratch() as base:
        a, b = run_ranks(refuse_on_two_ranks, 2, str(base), 110, timeout=120.0)
    assert a == b
    assert any(a) and not all(a)
