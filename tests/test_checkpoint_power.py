"""A loss of power at any moment of a save leaves the old checkpoint or the new one, bit by bit.

The operations of a save are recorded, and done again on a model of a disk that keeps what was
synced, and of the rest whatever is worst: a file's data from its fsync on, a folder's names from
the folder's. Between, every write and every name may be there or not, each by itself.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from adversity import OPERATIONS, SCENES, Run, Scene, States, dies, patched, scratch
from ranks import run_ranks
from torch import nn

import zshard
from zshard.checkpoint import writer
from zshard.checkpoint.files import File as DataFile

Operation = tuple[Any, ...]  # its name, the path, and what else it was given


@contextmanager
def recorded(log: Path) -> Iterator[None]:
    """Write every operation to ``log``; those of several processes in the order they happened."""
    paths: dict[int, str] = {}  # of the open files

    def tapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with log.open("ab") as out:
                fcntl.flock(out, fcntl.LOCK_EX)
                result = real(*args, **options)
                entry: Operation | None = None
                if name == "open":
                    paths[result] = args[0]
                    if args[1] & os.O_CREAT:
                        entry = ("create", args[0])
                elif name == "pwrite":
                    entry = (name, paths[args[0]], args[2], bytes(args[1][:result]))
                elif name == "fsync":
                    entry = (name, paths[args[0]])
                elif name != "close":
                    entry = (name, *args)
                if entry is not None:
                    pickle.dump(entry, out)
            return result

        return call

    with patched(**{name: tapped(name, getattr(os, name)) for name in OPERATIONS}):
        yield


def operations(log: Path) -> list[Operation]:
    found = []
    with log.open("rb") as file:
        while file.peek(1):
            found.append(pickle.load(file))
    return found


class File:
    """A file's synced content, and the writes since."""

    def __init__(self, durable: bytes = b"") -> None:
        self.durable, self.writes = durable, []

    def sync(self) -> None:
        self.durable, self.writes = self.after(lambda _: "kept"), []

    def after(self, fate: Callable[[str], str]) -> bytes:
        content = bytearray(self.durable)
        for offset, data in self.writes:
            what = fate("data")
            if what == "lost":
                continue
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = bytes(len(data)) if what == "zeros" else data
        return bytes(content)


class Folder:
    """A folder's synced names, and the changes since; ``now`` is what a program sees."""

    def __init__(self) -> None:
        self.durable: dict[str, File | Folder] = {}
        self.now: dict[str, File | Folder] = {}
        self.changes: list[tuple[str | None, str | None, File | Folder]] = []

    def change(self, old: str | None, new: str | None, node: File | Folder) -> None:
        """``node`` is no more at ``old``, but at ``new``."""
        self.changes.append((old, new, node))
        self._apply(self.now, old, new, node)

    @staticmethod
    def _apply(
        names: dict[str, File | Folder], old: str | None, new: str | None, node: File | Folder
    ) -> None:
        if old is not None and names.get(old) is node:
            del names[old]
        if new is not None:
            names[new] = node

    def sync(self) -> None:
        self.durable, self.changes = dict(self.now), []

    def after(self, fate: Callable[[str], str]) -> dict[str, Any]:
        names = dict(self.durable)
        for old, new, node in self.changes:
            if fate("name") == "kept":
                self._apply(names, old, new, node)
        return {name: node.after(fate) for name, node in sorted(names.items())}


class Disk:
    """A model of the disk, which starts as what is in ``folder``, all of it synced."""

    def __init__(self, folder: Path) -> None:
        self._base = folder
        self.root = self._read(folder)

    def _read(self, folder: Path) -> Folder:
        found = Folder()
        for place in folder.iterdir():
            node = self._read(place) if place.is_dir() else File(place.read_bytes())
            found.now[place.name] = node
        found.sync()
        return found

    def _find(self, path: str) -> tuple[Folder, str]:
        *parents, name = Path(path).relative_to(self._base).parts
        folder = self.root
        for parent in parents:
            folder = folder.now[parent]
        return folder, name

    def do(self, operation: Operation) -> None:
        kind, path, *rest = operation
        if path == str(self._base):
            assert kind == "fsync"
            self.root.sync()
            return
        folder, name = self._find(path)
        if kind in ("create", "mkdir"):
            folder.change(None, name, File() if kind == "create" else Folder())
        elif kind == "pwrite":
            folder.now[name].writes.append(tuple(rest))
        elif kind == "fsync":
            folder.now[name].sync()
        elif kind == "rename":
            to, new = self._find(rest[0])
            assert to is folder, "a rename between folders would need two of them synced"
            folder.change(name, new, folder.now[name])
        else:
            assert kind in ("unlink", "rmdir"), kind
            folder.change(name, None, folder.now[name])


def fates() -> Iterator[tuple[str, Callable[[str], str]]]:
    """What becomes of that which was not synced."""
    for names in ("lost", "kept"):
        for data in ("lost", "zeros", "kept"):
            yield f"names {names}, data {data}", {"name": names, "data": data}.__getitem__
    for seed in range(6):
        rng = random.Random(seed)
        yield (
            f"seed {seed}",
            lambda what, rng=rng: rng.choice(["lost", "kept", "zeros"][: 2 + (what == "data")]),
        )


def write(tree: dict[str, Any], folder: Path) -> None:
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            write(content, folder / name)
        else:
            (folder / name).write_bytes(content)


def check_every_loss(
    scene: Scene,
    states: States,
    disk: Disk,
    done: list[Operation],
    base: Path,
    news: list[str],
    returned: dict[int, str],
) -> int:
    """Lose power after each operation, in every way; returns the number of different outcomes.

    Args:
        news: the states that were being saved; returned: the number of operations after which a
            save returned -> what it saved.
    """
    seen: set[str] = set()
    durable = None
    for count in range(len(done) + 1):
        if count:
            disk.do(done[count - 1])
        durable = returned.get(count, durable)
        for how, fate in fates():
            tree = disk.root.after(fate)
            key = repr((tree, durable))
            if key in seen:
                continue
            seen.add(key)
            folder = base / f"lost{len(seen)}"
            write(tree, folder)
            story = f"power lost after {count} of {len(done)} operations, {how}"
            try:
                now = scene.check(folder, states, set(news))
                assert durable is None or now == durable, f"{now} after the save of {durable}"
                scene.check_next_save(folder, states)
            except Exception as error:
                raise AssertionError(f"{story}; the last: {done[:count][-1:]}") from error
    return len(seen)


@pytest.mark.parametrize("name", SCENES)
def test_a_loss_of_power_in_a_save_leaves_old_or_new_and_after_it_the_new(name: str) -> None:
    scene, states = SCENES[name], States("old", "older", "new", "next")
    with scratch() as base:
        folder, log = base / "folder", base / "log"
        scene.build(folder, states)
        disk = Disk(folder)
        with recorded(log):
            states.save("new", folder / scene.target, keep=scene.keep)
        done = operations(log)
        cases = check_every_loss(scene, states, disk, done, base, ["new"], {len(done): "new"})
    assert cases > 30
    print(f"{name}: {len(done)} operations, {cases} outcomes")


def save_recorded(rank: int, world_size: int, source: str, target: str, log: str) -> None:
    run = Run(step=False)
    run.load(source)
    with recorded(Path(log)):
        run.save(target, "new")


def test_a_loss_of_power_in_a_save_of_two_ranks_leaves_old_or_new() -> None:
    scene, states = SCENES["replace"], States("old", "older", "new", "next")
    with scratch() as base:
        folder, log = base / "folder", base / "log"
        scene.build(folder, states)
        states.save("new", base / "source")
        disk = Disk(folder)
        run_ranks(save_recorded, 2, str(base / "source"), str(folder / "x"), str(log))
        done = operations(log)
        cases = check_every_loss(scene, states, disk, done, base, ["new"], {len(done): "new"})
    print(f"{len(done)} operations, {cases} outcomes")


@pytest.mark.parametrize("name", ["replace", "new"])
def test_a_loss_of_power_in_the_save_after_a_killed_one_leaves_one_of_the_three(name: str) -> None:
    scene, states = SCENES[name], States("old", "new", "newer", "next")
    total, after, shapes = 0, 0, set()
    died = True
    with scratch() as base:
        while died:
            after += 1
            folder, log = base / f"folder{after}", base / f"log{after}"
            scene.build(folder, states)
            disk = Disk(folder)
            with recorded(log):
                died = dies(after, states.save, "new", folder / "x")
                # What is not synced yet, and what was done: the same where only data differ.
                shape = [op[0] for op in operations(log) if op[0] in ("rename", "unlink", "rmdir")]
                if str(shape) in shapes:
                    continue
                shapes.add(str(shape))
                states.save("newer", folder / "x")
            done = operations(log)
            place = base / f"case{after}"
            place.mkdir()
            total += check_every_loss(
                scene, states, disk, done, place, ["new", "newer"], {len(done): "newer"}
            )
    print(f"{name}: {total} outcomes")


def synced(rank: int, world_size: int, folder: str) -> set[str]:
    """The files with tensors that a rank syncs in a save, of which each holds one tensor."""
    names, sync = set[str](), DataFile.sync

    def noted(file: DataFile) -> None:
        names.add(os.path.basename(file.path))
        sync(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataFile, "sync", noted)
        patch.setattr(writer, "FILE_BYTES", 1)
        zshard.save(f"{folder}/a", zshard.wrap(nn.Linear(4, 4)))
    return {name for name in names if name.endswith(".safetensors")}


def test_the_rank_that_has_written_all_headers_syncs_all_files(tmp_path: Path) -> None:
    files = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    first, second = run_ranks(synced, 2, str(tmp_path))
    assert first == files and len(second) == 1
