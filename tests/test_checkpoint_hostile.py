"""A checkpoint made up to harm, its checksums right: typed errors, and nothing else is opened."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash
from adversity import DATA, MANIFEST, Run, patched, same, two_saves

import zshard
from zshard.checkpoint.command import run_ckpt


def write_manifest(path: Path, content: bytes, form: str = "1", sequence: int = 1) -> None:
    xxh3 = xxhash.xxh3_64_hexdigest(content, sequence)
    facts = f'"format": {form}, "sequence": {sequence}, "xxh3": "{xxh3}"'
    prefix = f'{{{facts}, "checkpoint": '
    path.write_bytes(prefix.encode() + content + b"}\n")


OUTSIDE = ("../first/model.safetensors", "/etc/hostname", "..", ".", "", "a\0b", "a/b", "\ud800")
WRONG: list[object] = [
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
        (place / "spare").write_bytes(b"x" * 10)
        content = json.loads((first / MANIFEST).read_bytes())["checkpoint"]
        # One tensor of each kind: what is done to one need not be done to all.
        others = {"turned", "seen", "weight", "turned.exp_avg", "weight.exp_avg"}
        for path in parts(content):
            if others & set(path):
                continue
            for value in WRONG:
                changed = put(copy.deepcopy(content), path, value)
                if json.dumps(changed) == json.dumps(content):
                    continue
                write_manifest(place / MANIFEST, json.dumps(changed).encode())
                cases += 1
                try:
                    if not refuses(run, place):
                        assert is_free(path, value), "accepted"
                        accepted += 1
                    zshard.latest(place.parent)
                    run_ckpt("info", str(place.parent))
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

    for outside in OUTSIDE:

        def move(own: dict[str, Any], name: str = outside) -> None:
            own["files"][name] = own["files"].pop(DATA[0])
            for stored in own["tensors"]["model"].values():
                stored["file"] = name

        yield f"a file named {outside!r}", changed(move)
        yield (
            f"one more file named {outside!r}",
            changed(lambda own, n=outside: own["files"].update({n: own["files"][DATA[0]]})),
        )
    moments = content["tensors"]["optimizer"]
    yield (
        "two tensors that the model has in one place",
        changed(
            lambda own: own["tensors"]["optimizer"].update(
                {"weight.exp_avg_sq": moments["weight.exp_avg"]}
            )
        ),
    )
    model = content["tensors"]["model"]
    scale = model["scale"]
    yield (
        "two tensors in one place",
        changed(lambda own: own["tensors"]["model"].update(twin=dict(scale))),
    )
    for offset in (0, content["files"][scale["file"]]["nbytes"] - 1):
        stored = {**scale, "offset": offset}
        yield (
            f"a tensor in the header or behind the end, at {offset}",
            changed(lambda own, s=stored: own["tensors"]["model"].update(scale=s)),
        )
    random = {"rank-00001": content["tensors"]["rng"]["rank-00000"]}
    yield "random states of another rank", changed(lambda own: own["tensors"].update(rng=random))
    spare = {"nbytes": 10, "header": 1 << 62, "xxh3": "0" * 16}
    yield "a header longer than its file", changed(lambda own: own["files"].update(spare=spare))
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
    for order in ([0, 0], [1, 1], [1, 2], [0]):
        yield (
            f"memory in the order {order}",
            changed(lambda own, o=order: own["tensors"]["model"]["weight"].update(order=o)),
        )
    for kind in ("model", "master"):
        rest = {k: v for k, v in content["tensors"].items() if k != kind}
        yield f"no tensors of the kind {kind}", {**content, "tensors": rest}
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
        (place / "spare").write_bytes(b"x" * 10)
        content = json.loads((first / MANIFEST).read_bytes())["checkpoint"]
        expected, cases = run.bits(), 0
        for what, changed in hostile_contents(content):
            write_manifest(place / MANIFEST, json.dumps(changed).encode())
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
            write_manifest(place / MANIFEST, raw, form)
            assert refuses(run, place), raw[:80]
            cases += 1
        write_manifest(place / MANIFEST, text, sequence=content["sequence"] + 1)
        assert refuses(run, place)
        with (place / MANIFEST).open("wb") as file:
            os.truncate(file.fileno(), 1 << 40)  # of holes
        assert refuses(run, place)
        run.step()
    print(f"{cases + 2} cases")


@pytest.mark.parametrize("text", [b"{}", b"[]", b"{", b'{"cpu": 1, "python": 2}', b"\xff"])
def test_random_states_that_are_none_are_refused_though_their_checksum_is_right(
    text: bytes,
) -> None:
    with two_saves() as (first, _, run):
        content = json.loads((first / MANIFEST).read_bytes())["checkpoint"]
        (stored,) = content["tensors"]["rng"].values()
        data = text.ljust(stored["shape"][0])
        stored["xxh3"] = [xxhash.xxh3_64_hexdigest(data, int(content["id"][:16], 16))]
        with (first / DATA[2]).open("r+b") as file:
            file.seek(stored["offset"])
            file.write(data)
        write_manifest(first / MANIFEST, json.dumps(content).encode())
        with pytest.raises(zshard.CheckpointError, match="random states"):
            run.load(first, rng=True)
        with pytest.raises(zshard.StateError):
            run.step()
        assert run.load(first) == "first"
        run.step()
