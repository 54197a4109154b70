"""A model of CUDA streams on CPU that finds accesses to the same memory which nothing orders.

The schedule's lanes get streams that only keep vector clocks, and every op that torch dispatches
while a `Model` is active counts as an access by the stream that is current: to all bytes of its
tensors, a write where its schema says so. Two accesses to one byte, one of them a write, that no
event puts in order are a race. Memory that was freed and allocated anew is the same memory, as it
is for CUDA's caching allocator.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zshard.streams import Lane

Clock = dict["Stream", int]  # of each stream, how much of its work comes before


class Event(NamedTuple):
    """A point in a stream's work."""

    clock: Clock
    device: torch.device = torch.device("cpu")


class Stream:
    """Work in order; knows what work of other streams comes before its own."""

    device = torch.device("cpu")

    def __init__(self, name: str, model: Model) -> None:
        self.name, self.model = name, model
        self.clock: Clock = {self: 0}
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        self._before.append(self.model.current)
        self.model.current = self

    def __exit__(self, *_: object) -> None:
        self.model.current = self._before.pop()

    def record_event(self) -> Event:
        return Event(dict(self.clock))

    def wait_event(self, event: Event) -> None:
        for stream, time in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Access(NamedTuple):
    """One op's use of the bytes [begin, end)."""

    begin: int
    end: int
    writes: bool
    stream: Stream
    time: int
    op: str

    def races(self, later: Access) -> bool:
        overlap = self.begin < later.end and later.begin < self.end
        ordered = later.stream.clock.get(self.stream, 0) >= self.time
        return overlap and (self.writes or later.writes) and not ordered


class Model(TorchDispatchMode):
    """Finds the races of what runs inside it.

    Attributes:
        races: what was found, as text.
        on_lanes: accesses by other streams than the compute stream.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.compute = self.current = Stream("compute", self)
        self.races: list[str] = []
        self.on_lanes = 0
        self._streams = [self.compute]
        self._lanes: list[Lane] = []
        self._accesses: list[Access] = []
        monkeypatch.setattr(Lane, "__init__", lambda lane, device: self._give_stream(lane))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda index: self.current)

    def _give_stream(self, lane: Lane) -> None:
        stream = lane.stream = Stream(f"lane {len(self._streams)}", self)  # type: ignore[assignment]
        self._streams.append(stream)
        self._lanes.append(lane)

    def end(self) -> None:
        """Take the streams back; lanes may outlive the patches."""
        for lane in self._lanes:
            lane.stream = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.current.clock[self.current] += 1
        schema = func._schema
        collective = schema.name.startswith("c10d::")  # their schemas do not tell what they write
        uses: list[tuple[object, bool]] = []
        for position, argument in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            uses.append((value, collective or (alias is not None and alias.is_write)))
        if not collective and all(returned.alias_info is None for returned in schema.returns):
            uses.append((out, True))
        elif not any(writes for _, writes in uses):
            return out  # a view
        if schema.name.endswith("_like"):
            uses = uses[-1:]  # the values of the other tensor do not matter
        if schema.name not in ("aten::empty", "aten::empty_like", "aten::set_"):  # no access
            for value, writes in uses:
                for tensor in tree_leaves(value):
                    if isinstance(tensor, torch.Tensor):
                        self._note(tensor, writes, schema.name)
        return out

    def _note(self, tensor: torch.Tensor, writes: bool, op: str) -> None:
        tensor = getattr(tensor, "_local", tensor)  # a sharded parameter's memory
        if tensor is None or tensor.numel() == 0:
            return
        begin = tensor.data_ptr()
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (last + 1) * tensor.element_size()
        access = Access(begin, end, writes, self.current, self.current.clock[self.current], op)
        self.races += [
            f"{old.op} on the {old.stream.name} stream, then {op} on the {self.current.name} stream"
            for old in self._accesses
            if old.races(access)
        ]
        self.on_lanes += self.current is not self.compute
        # What every stream knows to come before is in order with all that is still to come.
        self._accesses = [
            old
            for old in self._accesses
            if any(each.clock.get(old.stream, 0) < old.time for each in self._streams)
        ]
        self._accesses.append(access)
