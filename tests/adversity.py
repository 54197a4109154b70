"""What the tests of checkpoints under adversity share: a tiny model, its states by name, and an
operating system whose calls can be counted, made to fail, or cut short by a death.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zshard

# Everything that changes what a file system holds, and what brackets it.
OPERATIONS = ("open", "pwrite", "fsync", "rename", "unlink", "rmdir", "mkdir", "close")

DATA = ("model.safetensors", "optimizer.safetensors", "rng.safetensors")
MANIFEST = "checkpoint.json"

TIMEOUT = 20.0  # seconds, of the groups of forked ranks

Bits = dict[str, Tensor]


class Tiny(nn.Module):
    """A matrix, one whose memory is transposed, a 0-d parameter, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(5, 3, generator=numbers))
        self.turned = nn.Parameter(torch.randn(2, 5, generator=numbers).t())
        self.scale = nn.Parameter(torch.randn((), generator=numbers))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return (x @ self.weight.t() @ self.turned * self.scale).sum()


class Run:
    """A wrapped model and its optimizer, after one step that depends on the seed."""

    def __init__(self, seed: int = 0, *, step: bool = True) -> None:
        self.model = zshard.wrap(Tiny(seed))
        self.optimizer = zshard.AdamW(self.model.parameters(), lr=0.1)
        if step:
            self.step(seed)

    def step(self, seed: int = 0) -> None:
        x = torch.randn(seed % 5 + 1, 3, generator=torch.Generator().manual_seed(seed))
        self.model(x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, path: str | Path, label: str = "", **options: Any) -> Any:
        return zshard.save(path, self.model, self.optimizer, extra=label, **options)

    def load(self, path: str | Path, **options: Any) -> str:
        """Load; returns the label that was saved."""
        return zshard.load(path, self.model, self.optimizer, **options).extra

    def bits(self) -> Bits:
        """A copy of everything that this rank holds."""
        found = {name: local(param) for name, param in self.model.named_parameters()}
        found.update({name: local(buffer) for name, buffer in self.model.named_buffers()})
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state[param].items():
                found[f"{name}.{key}"] = local(value) if torch.is_tensor(value) else value
        return {name: torch.as_tensor(value).clone() for name, value in found.items()}


def local(tensor: Tensor) -> Tensor:
    return tensor.local if hasattr(tensor, "local") else tensor.detach()


def same(a: Bits, b: Bits) -> bool:
    """Bit by bit."""
    return a.keys() == b.keys() and all(
        bytes(a[k].contiguous().view(-1).view(torch.uint8).tolist())
        == bytes(b[k].contiguous().view(-1).view(torch.uint8).tolist())
        and a[k].shape == b[k].shape
        for k in a
    )


class States:
    """States of the tiny model by label, and a model of one rank that tells which one it loads."""

    def __init__(self, *labels: str) -> None:
        self.runs = {label: Run(seed) for seed, label in enumerate(labels, 1)}
        self.expected = {label: run.bits() for label, run in self.runs.items()}
        assert not any(same(a, b) for a, b in itertools.combinations(self.expected.values(), 2)), (
            "two states are the same: nothing could be told apart"
        )
        self.reader = Run(len(labels) + 1)

    def save(self, label: str, path: str | Path, **options: Any) -> None:
        self.runs[label].save(path, label, **options)

    def at(self, path: str | Path) -> str | None:
        """The label of what is loaded from ``path``; None if there is no checkpoint.

        Raises:
            CheckpointError: if the checkpoint is refused.
        """
        try:
            label = self.reader.load(path)
        except zshard.CheckpointError as error:
            if "does not exist" in str(error):
                return None
            raise
        assert same(self.reader.bits(), self.expected[label]), f"{path}: a mix, labelled {label}"
        return label


@dataclass(frozen=True)
class Scene:
    """A folder of checkpoints, and the save that is killed.

    Attributes:
        before: name -> state, from the oldest.
        empty: a name at which there is an empty folder.
        displaced: a save was killed with the target's checkpoint out of its place.
    """

    before: dict[str, str]
    target: str
    keep: int | None = None
    empty: str = ""
    displaced: bool = False

    def build(self, folder: Path, states: States) -> None:
        folder.mkdir()
        for name, label in self.before.items():
            states.save(label, folder / name)
        if self.displaced:
            (folder / self.target).rename(folder / f".{self.target}.replaced")
        if self.empty:
            (folder / self.empty).mkdir()

    def check(self, folder: Path, states: States, news: set[str]) -> str | None:
        """See that every checkpoint is whole; returns the state at the target."""
        now = states.at(folder / self.target) if self._is_there(folder, states) else None
        assert now in {self.before.get(self.target), *news}, now
        is_new = now in news
        kept = []
        for name, label in self.before.items():
            if name == self.target:
                continue
            found = states.at(folder / name)
            assert found == label or (found is None and is_new and self.keep), (name, found)
            kept += [name] if found else []
        newest = self.target if is_new else next(iter(reversed(self.before)), None)
        latest = zshard.latest((folder / self.target).parent)
        assert latest == (None if newest is None else str(folder / newest)), latest
        return now

    def _is_there(self, folder: Path, states: States) -> bool:
        """False for an empty folder, which is no checkpoint, and says so."""
        place = folder / self.target
        if self.displaced or not place.is_dir() or list(place.iterdir()):
            return True
        with pytest.raises(zshard.CheckpointError, match="not a zshard checkpoint"):
            states.reader.load(place)
        return False

    def check_next_save(
        self, folder: Path, states: States, save: Callable[..., object] | None = None
    ) -> None:
        """See that the next save works, and that it leaves nothing but checkpoints."""
        (save or states.save)("next", folder / self.target, keep=self.keep)
        names = {self.target} if self.keep == 1 else {self.target, *self.before}
        there = os.listdir((folder / self.target).parent)
        assert set(there) == {os.path.basename(name) for name in names}, there
        assert states.at(folder / self.target) == "next"
        for name, label in self.before.items():
            if name in names and name != self.target:
                assert states.at(folder / name) == label


SCENES = {
    "new": Scene({}, "x"),
    "replace": Scene({"x": "old"}, "x"),
    "keep": Scene({"a": "older", "b": "old"}, "x", keep=1),
    "parents": Scene({}, "deep/down/x"),
    "displaced": Scene({"a": "older", "x": "old"}, "x", displaced=True),
    "displaced, empty": Scene({"x": "old"}, "x", displaced=True, empty="x"),
    "empty": Scene({"a": "old"}, "x", empty="x"),
    "replace and keep": Scene({"x": "older", "b": "old"}, "x", keep=1),
    "replace newest": Scene({"a": "older", "x": "old"}, "x", keep=1),
}


# What `scratch` makes, wherever it does.
SCRATCH = "scratch-of-a-test-"


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of saves would wait for a disk."""
    shared = "/dev/shm"
    place = shared if os.path.isdir(shared) and os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=place) as name:
        yield Path(name)


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


@contextmanager
def patched(**functions: Callable[..., Any]) -> Iterator[None]:
    """Have ``os`` call these instead."""
    before = {name: getattr(os, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(os, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(os, name, function)


class Dead(BaseException):
    """Stands for SIGKILL: nothing that the process does after it has an effect."""


@contextmanager
def dying(after: int, *, kill: bool = False) -> Iterator[list[str]]:
    """Die after that many operations; yields the names of those done.

    Args:
        kill: by SIGKILL. Otherwise the death is acted: the operation raises Dead, and so does every
            later one, but for close, which the end of a process does too.
    """
    done: list[str] = []

    def tapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if len(done) >= after and name != "close":
                raise Dead
            result = real(*args, **options)
            done.append(name)
            if len(done) == after:
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                if name == "open":
                    os.close(result)
                raise Dead
            return result

        return call

    with patched(**{name: tapped(name, getattr(os, name)) for name in OPERATIONS}):
        yield done


def dies(after: int, action: Callable[..., object], *args: Any, **options: Any) -> bool:
    """Whether ``action`` has that many operations; it is cut short after them."""
    try:
        with dying(after):
            action(*args, **options)
    except Dead:
        return True
    return False


# --- ranks that may be killed: forked by a process that has no threads ---------------------------


def fork(body: Callable[..., int], *args: Any) -> int:
    """A process that ends with the status that ``body`` returns; its id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = body(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int) -> int:
    """The exit status, or minus the signal; fails past the groups' timeout."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"a rank had not ended after {TIMEOUT} s")


def join(rank: int, store: Path) -> None:
    """Make a group of two forked ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve costs seconds
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT),
    )
