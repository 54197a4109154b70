"""The process group on which hosts tell each other things while their GPUs compute."""

from __future__ import annotations

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


def control_group(beside: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A gloo group of the ranks of ``beside``, the group for ``device``, with its timeout.

    All of the ranks have to ask for it.
    """
    ranks = tuple(dist.get_process_group_ranks(beside))
    timeout = timeout_of(beside, device)
    assert dist.group.WORLD is not None
    groups = _GROUPS.setdefault(dist.group.WORLD, {})
    if (ranks, timeout) not in groups:
        groups[ranks, timeout] = dist.new_group(
            list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True
        )
    return groups[ranks, timeout]
