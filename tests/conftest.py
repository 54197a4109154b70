"""Session set-up: the fork server of the rank processes, and a seed for every test."""

from __future__ import annotations

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
