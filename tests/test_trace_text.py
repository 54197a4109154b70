"""A trace whose every time is known, as text and as a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_trace_file import tracks
from test_trace_numbers import ByHand, recorded

import zshard
from zshard.tag import Tag
from zshard.tracing.recorder import Recorder
from zshard.tracing.trace import Trace

DAY = 86_400 * 10**9


def table(lines: list[str], name: str) -> list[list[str]]:
    """The rows of the table that a line begins or names, without its heads."""
    begin = next(n for n, line in enumerate(lines) if line.split()[:2] == name.split())
    begin += 1 if name == "unit compute" else 2
    rows = lines[begin:]
    return [re.split(" {2,}", line.strip()) for line in rows[: [*rows, ""].index("")]]


def test_a_summary_is_printed_in_milliseconds_megabytes_and_shares() -> None:
    lines = str(recorded(10**9, rank=1).summary()).splitlines()
    assert lines[0].startswith(
        "rank 1 of 2: 11000.00 ms, compute stalled for 54.5 % of it, 47 % of communication hidden"
    )
    assert table(lines, "unit compute") == [
        ["root", "1250.00", "500.00", "500.00", "0.00", "100 %", "1000.00", "2.00"],
        ["a", "1500.00", "4500.00", "2500.00", "2000.00", "56 %", "1010000.00", "224.44"],
        ["b", "1500.00", "4500.00", "1500.00", "3000.00", "33 %", "10100000.00", "2244.44"],
        ["(other)", "750.00", "0.00", "0.00", "0.00", "-", "0.00", "0.00"],
        ["all", "5000.00", "9500.00", "4500.00", "5000.00", "47 %", "11111000.00", "1169.58"],
    ]
    assert table(lines, "critical path")[:3] == [
        ["gather a", "4000.00", "36.4%"],
        ["gather b", "4000.00", "36.4%"],
        ["outside the model's phases", "750.00", "6.8%"],
    ]
    assert table(lines, "stalls") == [
        ["wait a", "op, gather a", "1", "3000.00"],
        ["wait b", "op, gather b", "1", "2500.00"],
        ["forward root", "reclaim, gather a", "1", "500.00"],
    ]


def test_the_shortest_of_many_stalls_are_one_row() -> None:
    clock = ByHand()
    recorder = Recorder(clock)
    for unit in range(14):
        for times in (1, 2):
            stall = recorder.begin_stall("op", Tag(0, "gather", f"u{unit}"), None)
            clock.at += (14 - unit) * times / 100
            recorder.end_stall(stall)
            clock.at += 1.0
    recorder.end(linger=False)
    summary = Trace(recorder, rank=0, world=2, units=("root",), model="Model").summary()
    assert summary.seconds == pytest.approx(28 + 3 * 1.05)
    lines = str(summary).splitlines()
    stalls = table(lines, "stalls")
    assert stalls[0] == ["-", "op, gather u0", "2", "420.00"]
    assert stalls[-1] == ["2 others", "4", "90.00"] and len(stalls) == 13
    path = table(lines, "critical path")
    assert path[0] == ["outside the model's phases", "28000.00", f"{28 / 31.15:.1%}"]
    assert path[1] == ["wait u0", "420.00", f"{0.42 / 31.15:.1%}"]
    assert path[-1] == ["3 others", "180.00", f"{0.18 / 31.15:.1%}"] and len(path) == 13


def test_transfers_count_up_to_the_end_of_the_trace_and_two_at_once_but_once() -> None:
    clock = ByHand()
    recorder = Recorder(clock)
    gather = recorder.issue("op", Tag(0, "gather", "root"), 100, "gather")
    reduce = recorder.issue("op", Tag(0, "reduce", "a"), 100, "reduce")
    clock.at = 3.0  # as a thread of the backend's would note it
    gather.completed()
    clock.at = 1.5
    reduce.completed()
    clock.at = 2.0
    recorder.end(linger=True)
    trace = Trace(recorder, rank=0, world=2, units=("root", "a"), model="Model")
    assert (gather.ended, trace.seconds, trace.summary().cut) == (3.0, 2.0, 0)
    assert [each.seconds for each in trace.summary().units] == [2.0, 1.5, 0.0]
    assert trace.summary().total.seconds == 2.0


def test_an_arrow_from_a_transfer_that_never_began_goes_not_backwards(tmp_path: Path) -> None:
    clock = ByHand()
    recorder = Recorder(clock)
    recorder.issue("op", Tag(0, "gather", "root"), 100, "gather")  # a rank is gone: it never ends
    stuck = recorder.issue("op", Tag(0, "gather", "root"), 100, "gather")
    clock.at = 1.0
    stall = recorder.begin_stall("op", Tag(0, "gather", "root"), stuck)
    clock.at = 2.0
    recorder.end_stall(stall)
    clock.at = 3.0
    recorder.end(linger=False)
    assert stuck.began == 3.0  # behind the other, on its lane
    Trace(recorder, rank=0, world=2, units=("root",), model="Model").save(tmp_path / "0.json")
    events = json.loads((tmp_path / "0.json").read_text())["traceEvents"]
    assert [(e["ph"], e["ts"]) for e in events if e["ph"] in "sf"] == [("s", 2e6), ("f", 2e6)]


def test_a_file_has_every_event_at_its_time_since_midnight(tmp_path: Path) -> None:
    recorded(10**9, 3 * DAY + 2_500_000, rank=1).save(tmp_path / "1.json")
    content = json.loads((tmp_path / "1.json").read_text())
    assert content["baseTimeNanoseconds"] == 3 * DAY
    assert content["otherData"] == {"model": "Model", "rank": 1, "world": 2}
    found = tracks(content)
    late = 2500.0  # microseconds
    times = {
        track: [(e["name"], e["ts"] - late, e["dur"]) for e in found[1, track]]
        for track in ("compute", "gather", "reduce")
    }
    assert times["gather"] == [
        ("gather root", 0.0, 5e5),
        ("gather a", 5e5, 4.5e6),
        ("gather b", 5e6, 4e6),
    ]
    assert times["reduce"] == [("reduce a", 2e6, 2e6), ("reduce b", 10.5e6, 5e5)]
    assert {
        ("forward root", 2e6, 8.5e6),
        ("issue gather b", 1e6, 1e6),
        ("stall gather b", 7e6, 2.5e6),
    } <= set(times["compute"])
    told = {e["name"]: e["args"] for track in ("gather", "reduce") for e in found[1, track]}
    assert [told[f"gather {unit}"]["GB/s"] for unit in ("root", "a", "b")] == [2.0, 2.222, 25.0]
    assert [told[f"reduce {unit}"]["complete"] for unit in "ab"] == [True, False]
    orders = {e["name"]: e["args"] for e in content["traceEvents"] if e["ph"] == "M"}
    assert orders["process_sort_index"] == {"sort_index": 1}


def test_merged_traces_count_from_the_first_of_their_midnights(tmp_path: Path) -> None:
    parts = [tmp_path / f"{rank}.json" for rank in range(2)]
    for rank, part in enumerate(parts):  # rank 1 began on the day before
        recorded(1, 9 * DAY + (1 - 2 * rank) * 10**6, rank).save(part)
    zshard.merge_traces(tmp_path / "all.json", parts)
    content = json.loads((tmp_path / "all.json").read_text())
    assert content["baseTimeNanoseconds"] == 8 * DAY
    began = [tracks(content)[rank, "reduce"][0]["ts"] - 2e6 for rank in (0, 1)]
    assert began == [DAY / 1e3 + 1e3, DAY / 1e3 - 1e3]


def test_a_sum_on_the_reduce_stream_is_drawn_there(tmp_path: Path) -> None:
    clock = ByHand()
    recorder = Recorder(clock)
    with recorder.span("sum", "a", "reduce"):
        clock.at = 2.0
    recorder.issue("op", Tag(0, "reduce", "a"), 1, "reduce").completed()
    recorder.end(linger=False)
    Trace(recorder, rank=0, world=2, units=("a",), model="Model").save(tmp_path / "0.json")
    found = tracks(json.loads((tmp_path / "0.json").read_text()))
    assert ("sum a", 2e6) in [(e["name"], e["dur"]) for e in found[0, "reduce"]]
