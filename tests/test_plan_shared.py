"""Step times in plans where ranks read each other's memory."""

from __future__ import annotations

import pytest
import torch
from test_plan_times import gpt_plan, hand, machine

import zshard
from zshard.planning.timeline import Durations, timeline


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_what_ranks_read_of_each_other_takes_their_own_time(prefetch: int) -> None:
    line = hand(prefetch, in_memory=True)
    assert line.exposed == line.communication == 6 * 4 + 4 * 6
    assert line.seconds == 4 * (10 + 20 + 1 + 2) + 5 + line.exposed
    assert {span.stream for span in line.spans} == {"compute"}
    assert hand(prefetch, in_memory=True, share=3.0).seconds == line.seconds + 4 * 3


def test_whole_parameters_are_read_at_once_where_ranks_write_what_others_read() -> None:
    units = [Durations(n, True, 10.0, 20.0, gather=4.0) for n in ("root", "a", "b")]
    arguments = {"step": 5.0, "meeting": 0.0, "interference": 0.0, "sums_on_host": True}
    line = timeline(units, range(3), 1, in_memory=True, **arguments)
    assert line.exposed == 3 * 4
    first = [span.unit for span in line.spans[:4]]
    assert first == ["gather root", "gather a", "gather b", "root"]


SHARED = zshard.Link(1e10, 1e-5)


@pytest.mark.parametrize(
    ("comm", "fields", "carried"),
    [
        ("auto", {}, "group"),
        ("auto", {"shared": SHARED}, "peer"),
        ("peer", {"shared": SHARED}, "peer"),
        ("group", {"shared": SHARED}, "group"),
        ("auto", {"shared": SHARED, "network": zshard.Link(1e9), "host": 8}, "peer"),
        ("auto", {"shared": SHARED, "network": zshard.Link(1e9), "host": 7}, "group"),
    ],
)
def test_auto_takes_shared_memory_where_the_machine_was_measured_with_it(
    comm: str, fields: dict[str, object], carried: str
) -> None:
    planned = gpt_plan(machine=machine(**fields), comm=comm)
    assert planned.comm == planned.to_dict()["comm"] == carried
    sent = {s.stream for s in planned.timeline.spans if s.phase in ("gather", "reduce")}
    assert sent == (set() if carried == "peer" else {"gather", "reduce"})
    assert planned.buffers == gpt_plan().buffers


def test_what_is_read_is_charged_to_what_was_measured_of_shared_memory() -> None:
    on = machine(shared=zshard.Link(1e9, 1e-3), sums_on_host=True)
    line = zshard.plan(
        torch.nn.Linear(640, 480, bias=False), 4, batch=torch.empty(1, 640), machine=on
    ).timeline
    waits = {s.unit: s.ended - s.began for s in line.spans if s.phase == "wait"}
    others = 640 * 480 * 4 // 4 * 3
    meeting = 2e-3  # of four ranks
    assert waits == {
        "gather root": pytest.approx(meeting + others / 1e9),
        "reduce root": pytest.approx(meeting),
        "meet": pytest.approx(meeting),
    }


def test_shared_memory_that_was_not_measured_is_refused_and_a_network_has_none() -> None:
    with pytest.raises(zshard.InputError, match="comm='peer': made up was not measured with 8"):
        gpt_plan(comm="peer")
    with pytest.raises(zshard.InputError, match="comm='mail': expected 'auto', 'group' or 'peer'"):
        gpt_plan(comm="mail")
    on = machine(shared=SHARED)
    assert gpt_plan(machine=on, network=1e9).comm == "group"
    assert gpt_plan(machine=None, comm="peer").peak == gpt_plan(comm="group").peak
    assert gpt_plan(machine=on, comm="peer").with_world_size(1).comm == "group"
    assert gpt_plan(machine=None).comm is None


def test_without_a_batch_no_time_is_predicted_so_shared_memory_needs_no_measurement() -> None:
    planned = zshard.plan(torch.nn.Linear(64, 48), 4, comm="peer")
    assert planned.comm is planned.to_dict()["comm"] is None
    assert planned.peak == zshard.plan(torch.nn.Linear(64, 48), 4, comm="group").peak
    assert planned.with_world_size(2).fit(hbm=1e9) and planned.alternatives() and str(planned)
