"""A save that is killed after any operation leaves the old checkpoint or the new one."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest
from adversity import SCENES, Run, States, dies, dying, fork, join, scratch, wait
from ranks import run_ranks

import zshard


def kill_one_rank_after_every_operation(rank: int, world_size: int, name: str, victim: int) -> int:
    """The test's driver, a process without threads, which can be forked; returns the cases."""
    scene, states = SCENES[name], States("old", "older", "new", "next")
    after, returned, stores = 0, 0, itertools.count()
    with scratch() as base:
        for label in states.runs:
            states.save(label, base / label)

        def save(
            label: str,
            target: Path,
            *,
            source: Path | None = None,
            keep: int | None,
            after: int = 0,
        ) -> list[int]:
            """Save what is in the source from two ranks; how they ended."""
            common = (base / f"store{next(stores)}", source or base / label, target, label, keep)
            children = [fork(save_as, r, *common, after if r == victim else 0) for r in range(2)]
            return [wait(pid) for pid in children]

        while True:
            after += 1
            folder = base / f"case{after}"
            scene.build(folder, states)
            ended = save("new", folder / scene.target, keep=scene.keep, after=after)
            if ended[victim] == 0:  # there are not that many operations
                assert ended == [0, 0], ended
                assert after > 8, "the victim does next to nothing"
                assert returned <= 1, "only the last close comes after the other rank's return"
                assert scene.check(folder, states, {"new"}) == "new"
                return after - 1
            assert ended[victim] == -signal.SIGKILL, ended
            now = scene.check(folder, states, {"new"})
            if ended[1 - victim] == 0:  # killed when all was done
                assert (now, victim) == ("new", 0)
                returned += 1
            else:
                assert ended[1 - victim] == 3, f"the survivor ended with {ended[1 - victim]}"
            if victim == 1:  # the first rank clears up at once
                visible = set(scene.before) | ({scene.empty} if scene.empty else set())
                assert set(os.listdir(folder)) <= visible | {scene.target}, os.listdir(folder)
            if after % 8:
                scene.check_next_save(folder, states)
                continue
            if now is not None:  # new ranks load what one loads
                copied = base / f"copy{after}"
                assert save(now, copied, source=folder / scene.target, keep=None) == [0, 0]
                assert states.at(copied) == now
            scene.check_next_save(folder, states, save)


def save_as(
    rank: int, store: Path, source: Path, target: Path, label: str, keep: int | None, after: int
) -> int:
    """A rank that loads and saves, killed after so many operations; 0, or 3 for a typed error."""
    join(rank, store)
    run = Run(step=False)
    run.load(source)
    try:
        with dying(after or 1 << 30, kill=True):
            run.save(target, label, keep=keep)
    except (zshard.CommError, zshard.CheckpointError):
        return 3
    return 0


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", ["new", "replace", "keep"])
def test_a_rank_killed_after_any_operation_leaves_old_or_new_and_the_other_a_typed_error(
    name: str, victim: int
) -> None:
    (cases,) = run_ranks(
        kill_one_rank_after_every_operation, 1, name, victim, timeout=200.0, group=False
    )
    print(f"{name}, rank {victim}: {cases} cases")


@pytest.mark.parametrize("name", SCENES)
def test_a_death_after_any_operation_leaves_old_or_new(name: str) -> None:
    scene, states, after = SCENES[name], States("old", "older", "new", "next"), 0
    seen = set()
    with scratch() as base:
        while True:
            after += 1
            folder = base / str(after)
            scene.build(folder, states)
            died = dies(after, states.save, "new", folder / scene.target, keep=scene.keep)
            seen.add(scene.check(folder, states, {"new"}))
            if not died:
                break
            scene.check_next_save(folder, states)
    assert seen == {scene.before.get(scene.target), "new"}
    assert after > 30
    print(f"{name}: {after - 1} cases")


def test_a_second_death_in_the_save_after_a_death_leaves_what_there_was_or_the_new() -> None:
    scene, states = SCENES["replace"], States("old", "new", "newer", "next")
    cases, first = 0, 0
    shapes: set[str] = set()
    with scratch() as base:
        while True:
            first += 1
            folder, second = base / str(first), 0
            scene.build(folder, states)
            if not dies(first, states.save, "new", folder / "x"):
                break
            found = shape(folder)
            if found in shapes:
                continue
            shapes.add(found)
            between = scene.check(folder, states, {"new"})
            while True:
                second += 1
                folder = base / f"{first}-{second}"
                scene.build(folder, states)
                assert dies(first, states.save, "new", folder / "x")
                died = dies(second, states.save, "newer", folder / "x")
                now = scene.check(folder, states, {"new", "newer"})
                assert now in {between, "newer"}
                if not died:
                    assert now == "newer"
                    break
                scene.check_next_save(folder, states)
                cases += 1
    assert len(shapes) >= 6, shapes
    print(f"{len(shapes)} first deaths, {cases} cases")


def shape(folder: Path) -> str:
    """What is there, without the saves' ids, and without the files of a save under way."""
    names = []
    for place in sorted(folder.iterdir()):
        kind = place.name if place.name == "x" else place.name.rsplit(".", 1)[1]
        inside = sorted(os.listdir(place)) if kind == "replaced" else []
        names.append(f"{kind}{inside}")
    return " ".join(names)
