"""A trace on disk and as a picture: valid, nested, arrows in pairs, written whole or not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from traced import trained

import zshard

NO_RANK = '{"traceEvents": [], "baseTimeNanoseconds": 1, "otherData": {}}'


def save_one(rank: int, world_size: int, folder: str, strategy: str) -> list[tuple[str, str]]:
    model, step = trained(strategy=strategy)
    with zshard.trace(model) as trace:
        step(rank, 2)
        step(rank, 3)
    trace.save(Path(folder) / f"{rank}.json")
    return [tuple(event) for event in trace.events]


def tracks(content: dict[str, Any]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Slices by process and name of the thread."""
    events = content["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], names[event["pid"], event["tid"]]), []).append(event)
    return found


def assert_nested(slices: list[dict[str, Any]]) -> None:
    """Any two are one inside the other, or beside it."""
    around: list[float] = []
    for each in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        end = each["ts"] + each["dur"]
        while around and around[-1] <= each["ts"] + 5e-4:  # microseconds: a float's last digits
            around.pop()
        assert each["dur"] >= 0 and (not around or end <= around[-1] + 5e-4), each
        around.append(end)


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
def test_a_saved_trace_has_a_nested_track_a_stream_and_arrows_in_pairs(
    tmp_path: Path, strategy: str
) -> None:
    everyone = run_ranks(save_one, 2, str(tmp_path), strategy)
    for rank, events in enumerate(everyone):
        text = (tmp_path / f"{rank}.json").read_text()
        content = json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
        found = tracks(content)
        assert {pid for pid, _ in found} == {rank}
        expected = {"compute", "reduce", "meet"} | ({"gather"} if strategy != "ddp" else set())
        assert {name for _, name in found} == expected
        for slices in found.values():
            assert_nested(slices)
        compute = [e["name"] for e in found[rank, "compute"]]
        assert [name for name in compute if name in {f"{p} {u}" for p, u in events}][
            : len(events)
        ] == [f"{p} {u}" for p, u in events]
        for slices in (found[rank, name] for name in expected - {"compute"}):
            sent = [e["args"]["bytes"] for e in slices if "bytes" in e["args"]]
            assert sent and all(isinstance(each, int) for each in sent)
        arrows: dict[int, list[dict[str, Any]]] = {}
        for event in content["traceEvents"]:
            if event["ph"] in "sf":
                arrows.setdefault(event["id"], []).append(event)
        assert arrows
        for first, last in arrows.values():
            assert (first["ph"], last["ph"], last["bp"]) == ("s", "f", "e")
            assert first["ts"] <= last["ts"]
            for end in (first, last):
                lane = [s for t in found.values() for s in t if s["tid"] == end["tid"]]
                assert any(s["ts"] <= end["ts"] <= s["ts"] + s["dur"] + 5e-4 for s in lane)


def test_merged_ranks_lie_side_by_side_on_one_clock(tmp_path: Path) -> None:
    run_ranks(save_one, 2, str(tmp_path), "zero3")
    parts = [tmp_path / f"{rank}.json" for rank in range(2)]
    second = json.loads(parts[1].read_text())
    # As if rank 1 counted from another midnight: the moments stay.
    second["baseTimeNanoseconds"] += 86_400 * 10**9
    for event in second["traceEvents"]:
        if "ts" in event:
            event["ts"] -= 86_400e6
    zshard.merge_traces(tmp_path / "whole.json", parts)
    whole = json.loads((tmp_path / "whole.json").read_text())
    parts[1].write_text(json.dumps(second))
    zshard.merge_traces(tmp_path / "again.json", parts)
    again = json.loads((tmp_path / "again.json").read_text())
    for content in (whole, again):
        found = tracks(content)
        assert {pid for pid, _ in found} == {0, 1}
        threads = {(e["pid"], e["tid"]) for e in content["traceEvents"]}
        # Perfetto takes a thread 0, and one numbered as a process, for that process's main thread.
        assert len({tid for _, tid in threads} - {0, 1}) == len(threads) == 8
        both = [[e["ts"] for e in found[rank, "compute"]] for rank in (0, 1)]
        # They trained together, so each began before the other had ended.
        assert max(map(min, both)) < min(map(max, both))
        arrows = [(e["id"], e["ph"]) for e in content["traceEvents"] if e["ph"] in "sf"]
        assert len(set(arrows)) == len(arrows) == 2 * len({number for number, _ in arrows})
        for number in {number for number, _ in arrows}:
            assert (number, "s") in arrows and (number, "f") in arrows


def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path) -> None:
    save_one(0, 1, str(tmp_path), "zero3")
    part = tmp_path / "0.json"
    with pytest.raises(zshard.InputError, match="both of rank 0"):
        zshard.merge_traces(tmp_path / "whole.json", [part, part])
    with pytest.raises(zshard.InputError, match=r"parts='a\.json': expected a list"):
        zshard.merge_traces(tmp_path / "all.json", "a.json")
    with pytest.raises(zshard.InputError, match="parts=3: expected a list"):
        zshard.merge_traces(tmp_path / "all.json", 3)
    with pytest.raises(zshard.InputError, match="merge_traces: 3 is not what"):
        zshard.merge_traces(tmp_path / "all.json", [3])
    with pytest.raises(zshard.InputError, match="no parts"):
        zshard.merge_traces(tmp_path / "whole.json", [])
    others = [NO_RANK.replace("{}", other) for other in ("5", '{"rank": [1]}')]
    for number, text in enumerate(["{", "[" * 99_999, "[]", "{}", NO_RANK, *others]):
        name = f"{number}-wrong.json"
        (tmp_path / name).write_text(text)
        with pytest.raises(zshard.InputError, match=rf"{name} is not what Trace\.save"):
            zshard.merge_traces(tmp_path / "whole.json", [part, tmp_path / name])
    for events in ('[{"ts": "soon"}]', '[{"ts": 1, "id": []}]', '["ts"]', "[5]", "{}", "7"):
        wrong = NO_RANK.replace("{}", '{"rank": 1}').replace("[]", events, 1)
        (tmp_path / "wrong.json").write_text(wrong)
        reason = "it has the event" if events[0] == "[" else "it lacks traceEvents"
        with pytest.raises(zshard.InputError, match=rf"wrong\.json is not what .*: {reason}"):
            zshard.merge_traces(tmp_path / "whole.json", [part, tmp_path / "wrong.json"])
    assert not (tmp_path / "whole.json").exists()
    before = part.read_text()
    (tmp_path / "link.json").symlink_to(part)
    for path in (part, tmp_path / "link.json"):
        with pytest.raises(zshard.InputError, match=r"\.json is one of the parts: name another"):
            zshard.merge_traces(path, [part])
    assert part.read_text() == before


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, step = trained()
    with zshard.trace(model) as trace:
        step(0, 2)
    path = tmp_path / "t.json"
    path.write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", fail)
        with pytest.raises(zshard.InputError, match=r"t\.json cannot be written: No space left"):
            trace.save(path)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["t.json"]
    for read in (trace.save, trace.plot):
        with pytest.raises(zshard.InputError, match=r"missing.t cannot be written: No such file"):
            read(tmp_path / "missing" / "t")
        with pytest.raises(zshard.InputError, match="cannot be written"):
            read(tmp_path)
        with pytest.raises(zshard.InputError, match="'' is no file's name"):
            read("")
        with pytest.raises(zshard.InputError, match="3 is no file's name"):
            read(3)
        with pytest.raises(zshard.InputError, match=r"cannot be written: .*embedded null"):
            read(f"{tmp_path}/\0")
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    trace.save(str(path))
    assert json.loads(path.read_text())["otherData"] == {"model": "Blocks", "rank": 0, "world": 1}


def plotted(rank: int, world_size: int, folder: str) -> None:
    model, step = trained()
    with zshard.trace(model) as trace:
        step(rank, 2)
    trace.plot(Path(folder) / f"{rank}.png")


def test_a_trace_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(plotted, 2, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model, step = trained()
    with zshard.trace(model) as trace:
        step(0, 2)
    trace.plot()
    for name in ("0.png", "1.png", "trace.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n")


def test_without_matplotlib_the_plot_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, step = trained()
    with zshard.trace(model) as trace:
        step(0, 2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(zshard.Error, match="pip install matplotlib"):
        trace.plot(tmp_path / "t.png")
    assert not list(tmp_path.iterdir())
