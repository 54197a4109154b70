"""Session set-up: the fork server of the rank processes; for every test a seed and a transport."""

from __future__ import annotations

import os
from zlib import crc32

import pytest
import ranks
import torch


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start the fork server once, before the first test is timed."""
    # As in the ranks: threads that wait for one another cost more than these sizes can win.
    torch.set_num_threads(1)
    ranks.start_server()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Give every test the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have half of all tests run over the process group where they leave the choice to zshard.

    Which half is in their names, so that a test stays with its transport; ZSHARD_COMM=auto or
    =group runs all of them alike. (Over "peer" itself simulated ranks are refused.)
    """
    if ranks.TRANSPORT not in os.environ:
        half = crc32(request.node.nodeid.encode()) % 2
        monkeypatch.setenv(ranks.TRANSPORT, ("group", "auto")[half])


@pytest.fixture
def over_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what the process group's collectives do."""
    monkeypatch.setenv(ranks.TRANSPORT, "group")
