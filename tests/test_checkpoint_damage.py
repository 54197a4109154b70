"""A damaged checkpoint, or one made up to harm, is refused with a typed error: never loaded."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from adversity import Run, patched, same, scratch
from ranks import run_ranks

import zshard

kMutations = 1000
kData = ("model.safetensors", "optimizer.safetensors", "rng.safetensors")
kManifest = "checkpoint.json"
kBlock = 64  # bytes

Mutation = Callable[[random.Random, Path, Path], str | None]


def some_file(rng: random.Random, folder: Path) -> Path:
    return folder / rng.choice([*kData, kManifest])


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
    size = min(rng.choice([1, 4, kBlock]), len(data) // 2)
    a = rng.randrange(len(data) - 2 * size + 1)
    b = rng.randrange(a + size, len(data) - size + 1)
    swapped = data[:a] + data[b : b + size] + data[a + size : b] + data[a : a + size]
    path.write_bytes(swapped + data[b + size :])
    return path.name if swapped + data[b + size :] != data else None


def swap_files(rng: random.Random, folder: Path, other: Path) -> str:
    a, b = (folder / name for name in rng.sample([*kData, kManifest], 2))
    a_data, b_data = a.read_bytes(), b.read_bytes()
    a.write_bytes(b_data)
    b.write_bytes(a_data)
    return f"{a.name} {b.name}"


def take_anothers_file(rng: random.Random, folder: Path, other: Path) -> str:
    name = rng.choice(kData)
    shutil.copy(other / name, folder / name)
    return name


def take_anothers_data(rng: random.Random, folder: Path, other: Path) -> str | None:
    """Another save's data, beneath this one's header: right but for the id of the save."""
    name = rng.choice(kData)
    ours, theirs = (folder / name).read_bytes(), (other / name).read_bytes()
    header = 8 + int.from_bytes(ours[:8], "little")
    assert len(ours) == len(theirs) and header == 8 + int.from_bytes(theirs[:8], "little")
    start = rng.randrange(header, len(ours))
    size = rng.randrange(1, len(ours) - start + 1)
    mixed = ours[:start] + theirs[start : start + size] + ours[start + size :]
    (folder / name).write_bytes(mixed)
    return name if mixed != ours else None


def take_anothers_manifest(rng: random.Random, folder: Path, other: Path) -> str:
    shutil.copy(other / kManifest, folder / kManifest)
    return " ".join(kData)


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


kWays: list[Mutation] = [
    *(flip_bit, change_byte, truncate, extend, swap_blocks, swap_files, take_anothers_file),
    *(take_anothers_data, take_anothers_manifest, lose, lose_and_make),
]


@contextmanager
def two_saves() -> Iterator[tuple[Path, Path, Run]]:
    """Two checkpoints of the same model, a step apart, and the run as of the first."""
    with scratch() as base:
        run = Run(1)
        run.save(base / "first", "first", rng=True)
        run.step(2)
        run.save(base / "second", "second", rng=True)
        assert run.load(base / "first", rng=True) == "first"
        yield base / "first", base / "second", run


def mutations(count: int, first: Path, second: Path, place: Path) -> Iterator[tuple[str, str]]:
    """Damaged copies of the first checkpoint at ``place``: what was done, and the files' names."""
    done = 0
    for seed in range(10 * count):
        rng = random.Random(seed)
        way = kWays[seed % len(kWays)]
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
        for what, names in mutations(kMutations, first, second, place):
            try:
                data_found += check_refused(run, place, names, expected)
                assert run.load(first, rng=True) == "first"
                assert same(run.bits(), expected)
            except BaseException as error:
                raise AssertionError(what) from error
        run.step()
    assert data_found > kMutations // 20, "hardly any damage reached the data"
    print(f"{data_found} of {kMutations} damages were in data")


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


# --- manifests that were made to harm ------------------------------------------------------------


def write_manifest(path: Path, content: bytes, form: str = "1", sequence: int = 1) -> None:
    xxh3 = xxhash.xxh3_64_hexdigest(content, sequence)
    facts = f'"format": {form}, "sequence": {sequence}, "xxh3": "{xxh3}"'
    prefix = f'{{{facts}, "checkpoint": '
    path.write_bytes(prefix.encode() + content + b"}\n")


kOutside = ("../first/model.safetensors", "/etc/hostname", "..", ".", "", "a\0b", "a/b", "\ud800")
kWrong: list[object] = [
    *(None, True, -1, 10**4000, 1 << 63, 1.5, float("nan"), "", "x", [], {}, [[]], {"x": {}}),
    *([-1], [1, "2"], [10**30, 0], {"": None}, [None], [{}], "../x", "long_names" * 1000),
]


def parts(content: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of everything in a manifest."""
    yield path
    if isinstance(content, dict):
        for key, item in content.items():
            yield from parts(item, (*path, key))
    elif isinstance(content, list):
        for key, item in enumerate(content):
            yield from parts(item, (*path, key))


def put(content: Any, path: tuple[Any, ...], value: object) -> object:
    """The content, with that value at the path."""
    if not path:
        return value
    part = content
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return content


@contextmanager
def only_within(folder: Path) -> Iterator[None]:
    """Fail if anything outside ``folder`` is opened."""
    real = os.open

    def open_within(path: str, *args: Any, **options: Any) -> int:
        inside = os.path.realpath(path) + "/"
        assert inside.startswith(f"{folder}/"), f"{path} was opened"
        return real(path, *args, **options)

    with patched(open=open_within):
        yield


def refuses(run: Run, place: Path) -> bool:
    """Whether a made-up checkpoint is refused, with a typed error and with nothing else opened."""
    try:
        with only_within(place):
            run.load(place, rng=True)
    except zshard.Error as error:
        assert isinstance(error, zshard.CheckpointError) and str(place) in str(error), error
        return True
    return False


def is_free(path: tuple[Any, ...], value: object) -> bool:
    """Whether a value there is the user's, or only told: another of the right type will do."""
    if path[:2] == ("optimizer", "state") and len(path) == 3 and value == {}:
        return True  # of a parameter before its first step
    told = ("extra", "extra_state", "saved", "sequence", "ranks", "buffers", "aliases")
    return path[:1] in [(name,) for name in told] or "groups" in path or path[-1:] == ("value",)


def test_every_part_of_a_manifest_may_be_of_any_wrong_type() -> None:
    cases = accepted = 0
    with two_saves() as (first, _, run):
        place = first.parent / "hostile" / "x"
        shutil.copytree(first, place)
        content = json.loads((first / kManifest).read_bytes())["checkpoint"]
        # One tensor of each kind: what is done to one need not be done to all.
        others = {"turned", "seen", "weight", "turned.exp_avg", "weight.exp_avg"}
        for path in parts(content):
            if others & set(path):
                continue
            for value in kWrong:
                changed = put(copy.deepcopy(content), path, value)
                if json.dumps(changed) == json.dumps(content):
                    continue
                write_manifest(place / kManifest, json.dumps(changed).encode())
                cases += 1
                try:
                    if not refuses(run, place):
                        assert is_free(path, value), "accepted"
                        accepted += 1
                    zshard.latest(place.parent)
                except BaseException as error:
                    raise AssertionError(f"{path} = {value!r:.100}") from error
        assert run.load(first, rng=True) == "first"
        run.step()
    print(f"{cases} cases, {accepted} accepted")


def hostile_contents(content: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Manifests that are well-formed, and wrong as a whole."""

    def changed(change: Callable[[dict[str, Any]], object]) -> object:
        own = copy.deepcopy(content)
        return change(own) or own

    for outside in kOutside:

        def move(own: dict[str, Any], name: str = outside) -> None:
            own["files"][name] = own["files"].pop(kData[0])
            for stored in own["tensors"]["model"].values():
                stored["file"] = name

        yield f"a file named {outside!r}", changed(move)
        yield (
            f"one more file named {outside!r}",
            changed(lambda own, n=outside: own["files"].update({n: own["files"][kData[0]]})),
        )
    model = content["tensors"]["model"]
    scale = model["scale"]
    yield (
        "two tensors in one place",
        changed(lambda own: own["tensors"]["model"].update(twin=dict(scale))),
    )
    weight = model["weight"]
    for ends, sums in (([15, 15], 2), ([20], 1), ([15], 2), ([], 0), ([0, 15], 2), ([14], 1)):
        stored = {**weight, "ends": ends, "xxh3": weight["xxh3"] * sums}
        yield (
            f"chunks that end at {ends}",
            changed(lambda own, s=stored: own["tensors"]["model"].update(weight=s)),
        )
    for shape in ([5], [3, 5], [5, 3, 1], [1 << 62, 1 << 62], [0, 10**30], [15]):
        stored = {**weight, "shape": shape, "order": list(range(len(shape)))}
        yield (
            f"a tensor of shape {shape}",
            changed(lambda own, s=stored: own["tensors"]["model"].update(weight=s)),
        )
    for key in content:
        yield f"no {key}", {k: v for k, v in content.items() if k != key}
    yield "an unknown key", {**content, "run": "rm -rf /"}
    for dtype in ("load", "F4", "float32", "classes", "C64", "BOOL"):
        stored = {**weight, "dtype": dtype}
        yield (
            f"dtype {dtype}",
            changed(lambda own, s=stored: own["tensors"]["model"].update(weight=s)),
        )
    for entry in (
        {"value": 1, "dtype": "load", "on": "host"},
        {"value": 10**30, "dtype": "int64", "on": "host"},
        {"value": [1], "dtype": "nn", "on": "device"},
        {"tensor": "weight"},
        {"tensor": "weight.exp_avg", "value": 1},
    ):
        yield (
            f"an optimizer's state {entry}",
            changed(lambda own, e=entry: own["optimizer"]["state"]["scale"].update(step=e)),
        )
    for key, entry in (
        ("exp_avg", {"value": 1.0}),
        ("exp_avg", {"value": 1.0, "dtype": "float32", "on": "host"}),
        ("step", {"tensor": "weight.exp_avg"}),
        ("step", {"value": "x"}),
    ):
        yield (
            f"an optimizer's state {key} {entry}",
            changed(lambda own, k=key, e=entry: own["optimizer"]["state"]["weight"].update({k: e})),
        )


def test_a_made_up_manifest_is_refused_and_nothing_outside_its_folder_is_opened() -> None:
    with two_saves() as (first, _, run):
        place = first.parent / "hostile" / "x"
        shutil.copytree(first, place)
        content = json.loads((first / kManifest).read_bytes())["checkpoint"]
        expected, cases = run.bits(), 0
        for what, changed in hostile_contents(content):
            write_manifest(place / kManifest, json.dumps(changed).encode())
            assert refuses(run, place), what
            assert same(run.bits(), expected), what
            assert zshard.latest(place.parent) in (None, str(place)), what
            cases += 1
        text = json.dumps(content).encode()
        deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
        for form, raw in (
            *(("1", deep), ("1", text.replace(b'"first"', b"[" * 10**5)), ("1", b"\xff" + text)),
            *(("1", text + b" x"), ("1", b""), ("1", b"null"), ("2", text), ("9" * 5000, text)),
        ):
            write_manifest(place / kManifest, raw, form)
            assert refuses(run, place), raw[:80]
            cases += 1
        with (place / kManifest).open("wb") as file:
            os.truncate(file.fileno(), 1 << 40)  # of holes
        assert refuses(run, place)
        run.step()
    print(f"{cases + 1} cases")


@pytest.mark.parametrize("text", [b"{}", b"[]", b"{", b'{"cpu": 1, "python": 2}', b"\xff"])
def test_random_states_that_are_none_are_refused_though_their_checksum_is_right(
    text: bytes,
) -> None:
    with two_saves() as (first, _, run):
        content = json.loads((first / kManifest).read_bytes())["checkpoint"]
        (stored,) = content["tensors"]["rng"].values()
        data = text.ljust(stored["shape"][0])
        stored["xxh3"] = [xxhash.xxh3_64_hexdigest(data, int(content["id"][:16], 16))]
        with (first / kData[2]).open("r+b") as file:
            file.seek(stored["offset"])
            file.write(data)
        write_manifest(first / kManifest, json.dumps(content).encode())
        with pytest.raises(zshard.CheckpointError, match="random states"):
            run.load(first, rng=True)
        with pytest.raises(zshard.StateError):
            run.step()
        assert run.load(first) == "first"
        run.step()
