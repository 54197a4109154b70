"""What a trace says in numbers, of one whose every time is known."""

from __future__ import annotations

import zshard.tracing.clock
from zshard.tag import Tag
from zshard.tracing.path import critical_path, pieces
from zshard.tracing.recorder import Recorder
from zshard.tracing.records import Transfer
from zshard.tracing.trace import Trace


class ByHand(zshard.tracing.clock.Clock):
    """A clock that stands until it is set."""

    def __init__(self, unix_ns: int = 0) -> None:
        self.at, self.unix_ns, self.now = 0.0, unix_ns, lambda: self.at

    def start(self) -> None:
        self.at = 0.0

    def synchronize(self) -> None:
        pass

    def seconds(self, stamp: object) -> float:
        assert isinstance(stamp, float)
        return stamp


def recorded(scale: int = 1, unix_ns: int = 0, rank: int = 0) -> Trace:
    """Three gathers, one behind another on their lane; a reduction under them, and one cut off."""
    clock = ByHand(unix_ns)
    recorder = Recorder(clock)

    def issue(began: float, returned: float, phase: str, unit: str, nbytes: int) -> Transfer:
        clock.at = began
        recorder.enter(phase, unit)
        transfer = recorder.issue("op", Tag(0, phase, unit), nbytes * scale, phase)
        clock.at = returned
        transfer.returns()
        return transfer

    def ends(at: float, transfer: Transfer) -> None:
        clock.at = at
        transfer.completed()

    def waits(began: float, ended: float, unit: str, transfer: Transfer) -> None:
        clock.at = began
        recorder.enter("wait", unit)
        stall = recorder.begin_stall("op", Tag(0, "gather", unit), transfer)
        clock.at = ended
        recorder.end_stall(stall)
        recorder.leave("wait", unit)
        recorder.enter("forward", unit)

    ends(0.5, issue(0.0, 0.25, "gather", "root", 1))
    first = issue(0.5, 1.0, "gather", "a", 10)
    second = issue(1.0, 2.0, "gather", "b", 100)
    recorder.enter("forward", "root")
    ends(4.0, issue(2.0, 2.0, "reduce", "a", 1000))
    ends(5.0, first)
    waits(3.0, 6.0, "a", first)
    clock.at = 7.0
    recorder.leave("forward", "a")
    ends(9.0, second)
    waits(7.0, 9.5, "b", second)
    clock.at = 10.0
    recorder.leave("forward", "b")
    stall = recorder.begin_stall("reclaim", Tag(0, "gather", "a"), None)  # others read what it lent
    clock.at = 10.5
    recorder.end_stall(stall)
    recorder.leave("forward", "root")
    cut = issue(10.5, 10.5, "reduce", "b", 10000)
    clock.at = 11.0
    recorder.end(linger=False)
    cut.completed()  # too late
    return Trace(recorder, rank=rank, world=2, units=("root", "a", "b"), model="Model")


def test_each_moment_is_of_the_innermost_and_the_critical_path_leads_over_the_lane() -> None:
    trace = recorded()
    row = pieces(trace)
    assert [piece[:4] for piece in row] == [
        ("issue", "root", 0.0, 0.25),
        ("outside", "", 0.25, 0.5),
        ("issue", "a", 0.5, 1.0),
        ("issue", "b", 1.0, 2.0),
        ("forward", "root", 2.0, 3.0),
        ("wait", "a", 3.0, 6.0),
        ("forward", "a", 6.0, 7.0),
        ("wait", "b", 7.0, 9.5),
        ("forward", "b", 9.5, 10.0),
        ("wait", "root", 10.0, 10.5),
        ("outside", "", 10.5, 11.0),
    ]
    assert [piece[:4] for piece in critical_path(trace, row)] == [
        ("issue", "root", 0.0, 0.25),
        ("outside", "", 0.25, 0.5),
        ("issue", "a", 0.5, 1.0),
        ("gather", "a", 1.0, 5.0),
        ("gather", "b", 5.0, 9.0),  # its lane was busy with the other's until then
        ("wait", "b", 9.0, 9.5),  # to wake up
        ("forward", "b", 9.5, 10.0),
        ("wait", "root", 10.0, 10.5),
        ("outside", "", 10.5, 11.0),
    ]


def test_the_critical_path_keeps_to_a_lane_and_to_the_waiter_that_reads_itself() -> None:
    clock = ByHand()
    recorder = Recorder(clock)

    def issue(at: float, phase: str) -> Transfer:
        clock.at = at
        return recorder.issue("op", Tag(0, phase, "root"), 1, phase)

    def waits(began: float, ended: float, transfer: Transfer) -> None:
        clock.at = began
        stall = recorder.begin_stall("op", Tag(0, "gather", "root"), transfer)
        clock.at = ended
        recorder.end_stall(stall)

    recorder.enter("forward", "root")
    other = issue(0.0, "reduce")
    clock.at = 0.5
    other.returns()
    own = issue(1.0, "gather")
    for at, transfer in ((3.0, other), (4.0, own)):
        clock.at = at
        transfer.completed()
    waits(2.0, 4.0, own)
    waits(5.0, 5.5, own)  # which has ended long ago
    read = issue(6.0, "gather")
    read.started([object()], by_waiter=True)
    waits(6.5, 8.0, read)
    read.waited(6.5, 8.0)
    clock.at = 9.0
    recorder.leave("forward", "root")
    recorder.end(linger=False)
    trace = Trace(recorder, rank=0, world=2, units=("root",), model="Model")
    assert [piece[:4] for piece in critical_path(trace, pieces(trace))] == [
        ("issue", "root", 0.0, 0.5),
        ("forward", "root", 0.5, 1.0),
        ("gather", "root", 1.0, 4.0),  # and not the reduction, on another lane
        ("forward", "root", 4.0, 5.0),
        ("wait", "root", 5.0, 5.5),
        ("forward", "root", 5.5, 6.5),
        ("wait", "root", 6.5, 8.0),
        ("forward", "root", 8.0, 9.0),
    ]


Placed = tuple[str, str, float, float]


def gathered(
    transfers: dict[str, tuple[str, float, float, float]],
    stalls: list[tuple[str, float, float]],
    end: float,
) -> Trace:
    """One forward.

    Args:
        transfers: unit -> lane, issued, returned, ended; stalls: for which unit, began, ended.
    """
    clock, given = ByHand(), {}
    recorder = Recorder(clock)
    recorder.enter("forward", "root")
    for unit, (lane, clock.at, returned, ended) in transfers.items():
        given[unit] = recorder.issue("op", Tag(0, "gather", unit), 1, lane)
        clock.at = returned
        given[unit].returns()
        clock.at = ended
        given[unit].completed()
    for unit, clock.at, ended in stalls:
        stall = recorder.begin_stall("op", Tag(0, "gather", unit), given[unit])
        clock.at = ended
        recorder.end_stall(stall)
    clock.at = end
    recorder.end(linger=False)
    return Trace(recorder, rank=0, world=2, units=("root", *transfers), model="Model")


def path_of(trace: Trace) -> list[Placed]:
    return [piece[:4] for piece in critical_path(trace, pieces(trace))]


def test_a_transfer_is_held_up_by_the_last_one_on_its_lane_that_ended_before_it() -> None:
    ends = [("wait", "root", 8.0, 9.0)]
    a_b_c = {"a": ("gather", 0.0, 0.0, 6.0), "b": ("gather", 1.0, 1.0, 2.0)}
    a_b_c["c"] = ("gather", 3.0, 3.0, 8.0)
    trace = gathered(a_b_c, [("c", 4.0, 9.0)], 9.0)
    assert path_of(trace) == [("gather", "a", 0.0, 6.0), ("gather", "c", 6.0, 8.0), *ends]
    assert [each.began for each in trace.transfers] == [0.0, 1.0, 6.0]
    at_once = {"a": ("gather", 0.0, 0.0, 8.0), "c": ("gather", 3.0, 3.0, 8.0)}
    trace = gathered(at_once, [("c", 4.0, 9.0)], 9.0)
    assert path_of(trace) == [("gather", "a", 0.0, 8.0), *ends]
    as_issued = at_once | {"a": ("gather", 0.0, 0.0, 3.0)}
    assert path_of(gathered(as_issued, [("c", 4.0, 9.0)], 9.0)) == [
        ("forward", "root", 0.0, 3.0),  # the lane was free when it came
        ("gather", "c", 3.0, 8.0),
        *ends,
    ]


def test_the_way_back_from_a_transfer_goes_on_before_its_issue_not_in_a_stall_behind_it() -> None:
    transfers = {"a": ("reduce", 1.0, 1.0, 7.0), "b": ("gather", 4.0, 5.0, 9.0)}
    assert path_of(gathered(transfers, [("a", 5.0, 7.0), ("b", 7.0, 9.0)], 9.0)) == [
        ("forward", "root", 0.0, 4.0),
        ("issue", "b", 4.0, 5.0),
        ("gather", "b", 5.0, 9.0),
    ]


def test_a_stall_that_took_no_time_is_no_piece() -> None:
    trace = gathered({"a": ("gather", 0.0, 0.0, 1.0)}, [("a", 2.0, 2.0)], 4.0)
    row = [piece[:4] for piece in pieces(trace)]
    assert row == path_of(trace) == [("forward", "root", 0.0, 4.0)]


def test_a_transfer_does_not_end_before_its_issue_though_its_clock_be_another_one() -> None:
    (transfer,) = gathered({"a": ("gather", 2.0, 1.0, 1.0)}, [], 4.0).transfers
    assert transfer.issued == transfer.returned == transfer.began == transfer.ended == 2.0


def test_a_backward_ends_with_its_own_unit_or_with_whatever_leaves_all() -> None:
    clock = ByHand()
    recorder = Recorder(clock)
    recorder.enter("backward", "a")
    for clock.at, unit in ((1.0, "b"), (2.0, "a")):
        recorder.end_backward(unit)
    recorder.enter("backward", "b")
    clock.at = 3.0
    recorder.leave_all()
    recorder.resume_backward("root")
    clock.at = 4.0
    recorder.end(linger=False)
    trace = Trace(recorder, rank=0, world=2, units=("root", "a", "b"), model="Model")
    assert [(*each, each.began, each.ended) for each in (*trace.events, *trace.spans)] == [
        ("backward", "a", 0.0, 2.0),
        ("backward", "b", 2.0, 3.0),
        ("backward", "root", 3.0, 4.0),
    ]


def test_communication_counts_once_and_is_exposed_while_compute_stands_still() -> None:
    summary = recorded().summary()
    found = {
        each.unit: (each.bytes, each.seconds, each.exposed, each.stalled, each.compute)
        for each in (*summary.units, summary.total)
    }
    assert found == {
        "root": (1, 0.5, 0.0, 0.0, 1.25),
        "a": (1010, 4.5, 2.0, 3.5, 1.5),
        "b": (10100, 4.5, 3.0, 2.5, 1.5),
        "(other)": (0, 0.0, 0.0, 0.0, 0.75),
        "all": (11111, 9.5, 5.0, 6.0, 5.0),
    }
    assert summary.cut == 1 and summary.total.hidden == 4.5
    assert [delay[:4] for delay in summary.stalls] == [
        ("wait a", "op", "gather a", 1),
        ("wait b", "op", "gather b", 1),
        ("forward root", "reclaim", "gather a", 1),
    ]


def test_a_gather_is_under_way_once_its_lane_is_free_of_those_before() -> None:
    events = [e for e in recorded().events if e.stream != "compute"]
    assert [(*e, e.bytes, e.issued, e.began, e.ended) for e in events] == [
        ("gather", "root", 1, 0.0, 0.0, 0.5),
        ("gather", "a", 10, 0.5, 0.5, 5.0),
        ("gather", "b", 100, 1.0, 5.0, 9.0),
        ("reduce", "a", 1000, 2.0, 2.0, 4.0),
        ("reduce", "b", 10000, 10.5, 10.5, 11.0),
    ]
