"""A trace as a file that ui.perfetto.dev and chrome://tracing open: the Trace Event Format, JSON.

A process is a rank and a thread a stream. Times are microseconds since ``baseTimeNanoseconds``, a
midnight (UTC), so that the files of one job agree; ranks on one host have the same clock.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..whole_files import StrPath, write_whole
from .records import TRACKS, Event, Stall, Transfer
from .trace import Trace

# Beyond every process's number, and the threads' of all ranks differ: Perfetto puts a thread 0, and
# one with its process's number, together as that process's main thread.
_FIRST_TID = 1 << 22
_DAY_NS = 86_400 * 10**9

Json = dict[str, Any]


def save(trace: Trace, path: StrPath) -> None:
    """Write one rank's trace; see ``Trace.save``."""
    base = trace.unix_ns // _DAY_NS * _DAY_NS
    content = {
        "traceEvents": list(_Writer(trace, base).everything()),
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "otherData": {"model": trace.model, "rank": trace.rank, "world": trace.world},
    }
    write_whole(path, lambda part: part.write_text(json.dumps(content), encoding="utf-8"))


def merge_traces(path: StrPath, parts: Iterable[StrPath]) -> None:
    """Make one file of those that the ranks have saved: a process a rank, on one clock.

    Args:
        path: of the file to write.
        parts: the ranks' files, which ``Trace.save`` has written.

    Raises:
        InputError: for a part that is no such file, two of one rank, or a path that cannot be
            written or is one of the parts.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> with zshard.trace(model) as recorded:
        ...     _ = model(torch.ones(3, 4))
        >>> recorded.save("rank-0.json")
        >>> zshard.merge_traces("all.json", ["rank-0.json"])  # of every rank
    """
    if isinstance(parts, (str, PathLike)) or not isinstance(parts, Iterable):
        raise InputError(f"merge_traces: parts={parts!r}: expected a list of the ranks' files")
    parts = list(parts)
    contents = [_read(part) for part in parts]
    if not contents:
        raise InputError("merge_traces: there are no parts to be merged")
    named = isinstance(path, (str, PathLike)) and os.path.exists(path)
    if named and any(os.path.samefile(path, part) for part in parts):
        raise InputError(f"merge_traces: {path} is one of the parts: name another file")
    base = min(content["baseTimeNanoseconds"] for content in contents)
    ranks: dict[int, object] = {}
    merged: list[Json] = []
    numbers: dict[tuple[int, object], int] = {}  # (part, id of an arrow) -> another id
    for index, (part, content) in enumerate(zip(parts, contents, strict=True)):
        rank = content["otherData"]["rank"]
        if rank in ranks:
            raise InputError(f"merge_traces: {part} and {ranks[rank]} are both of rank {rank}")
        ranks[rank] = part
        later = (content["baseTimeNanoseconds"] - base) / 1e3
        for event in content["traceEvents"]:
            try:
                if "ts" in event:
                    event["ts"] += later
                if "id" in event:
                    event["id"] = numbers.setdefault((index, event["id"]), len(numbers))
            except TypeError as error:
                raise _damaged(part, f"it has the event {event!r:.200}") from error
            merged.append(event)
    content = {"traceEvents": merged, "displayTimeUnit": "ms", "baseTimeNanoseconds": base}
    write_whole(path, lambda whole: whole.write_text(json.dumps(content), encoding="utf-8"))


def _read(part: StrPath) -> Json:
    try:
        content = json.loads(Path(part).read_text(encoding="utf-8"))
        keys = ("traceEvents", "baseTimeNanoseconds", "otherData")
        if isinstance(content, dict) and content.keys() >= set(keys):
            events, base, other = (content[key] for key in keys)
            rank = other.get("rank") if isinstance(other, dict) else None
            if isinstance(events, list) and type(base) is type(rank) is int:
                return content
        reason = f"it lacks {', '.join(keys)} or its rank"
    except (OSError, TypeError, ValueError, RecursionError) as error:
        reason = str(error)
    raise _damaged(part, reason)


def _damaged(part: StrPath, reason: str) -> InputError:
    return InputError(f"merge_traces: {part} is not what Trace.save has written: {reason}")


class _Writer:
    """Turns a trace into events of the format."""

    def __init__(self, trace: Trace, base: int) -> None:
        self._trace, self._offset = trace, (trace.unix_ns - base) / 1e3  # microseconds
        self._numbers = itertools.count(1)

    def everything(self) -> Iterator[Json]:
        """Every event."""
        trace = self._trace
        yield from self._names()
        for event in (*trace.events, *trace.spans):
            own = event.stream == "compute" or event.phase == "sum"
            yield self._event(event) if own else self._issued(event)
        for transfer in trace.transfers:
            if transfer.returned > transfer.issued:
                name = f"issue {transfer}"
                yield self._slice(name, "issue", "compute", transfer.issued, transfer.returned)
            yield self._transfer(transfer)
        for stall in trace.stalls:
            yield self._stall(stall)
            yield from self._arrow(stall)

    def _names(self) -> Iterator[Json]:
        trace = self._trace
        process = f"rank {trace.rank} of {trace.world}: {trace.model}"
        yield self._meta("process_name", "compute", name=process)
        yield self._meta("process_sort_index", "compute", sort_index=trace.rank)
        lanes = {"compute", *(e.stream for e in trace.events), *(t.lane for t in trace.transfers)}
        for index, track in enumerate(TRACKS):
            if track in lanes:
                yield self._meta("thread_name", track, name=track)
                yield self._meta("thread_sort_index", track, sort_index=index)

    def _on(self, track: str) -> Json:
        """Where an event is drawn."""
        rank = self._trace.rank
        return {"pid": rank, "tid": _FIRST_TID + rank * len(TRACKS) + TRACKS.index(track)}

    def _meta(self, kind: str, track: str, **args: object) -> Json:
        return {"ph": "M", "name": kind, **self._on(track), "args": args}

    def _slice(
        self, name: str, category: str, track: str, began: float, ended: float, **args: object
    ) -> Json:
        first, last = self._time(began), self._time(ended)
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            **self._on(track),
            "ts": first,
            "dur": round(last - first, 3),
            "args": args,
        }

    def _time(self, seconds: float) -> float:
        return round(self._offset + seconds * 1e6, 3)

    def _event(self, event: Event) -> Json:
        began, ended = event.began, event.ended
        return self._slice(str(event), event.phase, event.stream, began, ended, unit=event.unit)

    def _issued(self, event: Event) -> Json:
        """A mark on compute; what it started is on its lane."""
        at = event.issued
        args = {"unit": event.unit, "bytes": event.bytes}
        return self._slice(str(event), event.phase, "compute", at, at, **args)

    def _transfer(self, transfer: Transfer) -> Json:
        seconds = transfer.ended - transfer.began
        args = {
            "op": transfer.op,
            "unit": transfer.unit,
            "bytes": transfer.bytes,
            "GB/s": round(transfer.bytes / seconds / 1e9, 3) if seconds > 0 else 0.0,
            "complete": transfer.complete,
            "exact": transfer.exact,
        }
        name, lane = str(transfer), transfer.lane
        return self._slice(name, transfer.phase, lane, transfer.began, transfer.ended, **args)

    def _stall(self, stall: Stall) -> Json:
        args = {"op": stall.op, "waited for": str(stall), "unit": stall.unit}
        return self._slice(f"stall {stall}", "stall", "compute", stall.began, stall.ended, **args)

    def _arrow(self, stall: Stall) -> Iterator[Json]:
        """From the transfer to the stall that it ended."""
        transfer = stall.transfer
        if transfer is None:
            return
        # Viewers look for the slices around both ends, and for arrows that go forwards.
        first = self._time(transfer.began)
        last = min(max(self._time(stall.began), first), self._time(stall.ended))
        common = {"name": "waited for", "cat": "stall", "id": next(self._numbers)}
        start, end = self._on(transfer.lane), self._on("compute")
        yield {**common, **start, "ph": "s", "ts": min(first, last)}
        yield {**common, **end, "ph": "f", "bp": "e", "ts": last}
