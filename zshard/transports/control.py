"""The process group on which hosts tell each other things while their GPUs compute."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

# One for each set of ranks, however many models are wrapped over it, as long as the default group
# lives: a gloo group holds threads and sockets, and nothing would end one made for a single model.
_GROUPS: WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[tuple[int, ...], timedelta], dist.ProcessGroup]
] = WeakKeyDictionary()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The group's; torch's default where the backend keeps none."""
    options = getattr(group._get_backend(device), "options", None)
    found: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return found


def groups_joined() -> int:
    """How many process groups this process is in, as torch counts them."""
    return len(dist.distributed_c10d._world.pg_names)


def make_group(ranks: Sequence[int], timeout: timedelta, joined: int) -> dist.ProcessGroup:
    """A gloo group of ``ranks``, all of which call this, and no others.

    Args:
        joined: the most that ``groups_joined`` says on any of them.
    """
    # A group of all is named by a count that all share. Those that make one by themselves look for
    # each other under a name that torch takes from the ranks and from how many groups a process is
    # in, which has to be the same.
    alone = len(ranks) < dist.get_world_size()
    while alone and groups_joined() < joined:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    made: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=alone
    )
    return made


def control_group(beside: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A gloo group of the ranks of ``beside``, the group for ``device``, with its timeout.

    All of the ranks have to ask for it.
    """
    ranks = tuple(dist.get_process_group_ranks(beside))
    timeout = timeout_of(beside, device)
    assert dist.group.WORLD is not None
    groups = _GROUPS.setdefault(dist.group.WORLD, {})
    if (ranks, timeout) not in groups:
        joined = torch.tensor([groups_joined()], device=device)
        dist.all_reduce(joined, dist.ReduceOp.MAX, beside)
        groups[ranks, timeout] = make_group(ranks, timeout, int(joined))
    return groups[ranks, timeout]
