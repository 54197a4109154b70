"""The process group on which hosts tell each other things while their GPUs compute."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import xxhash

from ..errors import CommError

# One for each set of ranks, however many models are wrapped over it, as long as the default group
# lives: a gloo group holds threads and sockets, and nothing would end one made for a single model.
_GROUPS: WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[tuple[int, ...], timedelta], dist.ProcessGroup]
] = WeakKeyDictionary()

_made = 0  # never less: a name that was used once has left its ranks' addresses in the store


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The group's; torch's default where the backend keeps none."""
    options = getattr(group._get_backend(device), "options", None)
    found: timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return found


def groups_made() -> int:
    """How many groups this process has made here, finished or not."""
    return _made


def make_group(ranks: Sequence[int], timeout: timedelta, made: int) -> dist.ProcessGroup:
    """A gloo group of ``ranks``, all of which call this, and no others.

    Args:
        made: the most that ``groups_made`` says on any of them.
    """
    # dist.new_group has ranks that make a group by themselves look for each other under a name that
    # it takes from a count of its own: until torch 2.13 of the groups that a process is in, from
    # 2.14 on of those that it has made. These differ between ranks, and making one more changes
    # what the script's own groups are called later.
    global _made
    _made = made + 1
    c10d, ranks = dist.distributed_c10d, sorted(ranks)
    _, store = c10d._world.pg_map[c10d._get_default_group()]
    name = c10d.GroupName(f"zshard-{made}-{xxhash.xxh3_64_hexdigest(bytes(str(ranks), 'utf-8'))}")
    places = {rank: place for place, rank in enumerate(ranks)}
    group: dist.ProcessGroup
    group, _ = c10d._new_process_group_helper(
        len(ranks), places[dist.get_rank()], ranks, "gloo", store, name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = places
    return group


def control_group(beside: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A gloo group of the ranks of ``beside``, the group for ``device``, with its timeout.

    All of the ranks have to ask for it.

    Raises:
        CommError: if they do not reach each other, by the one backend or the other.
    """
    ranks = tuple(dist.get_process_group_ranks(beside))
    timeout = timeout_of(beside, device)
    assert dist.group.WORLD is not None
    groups = _GROUPS.setdefault(dist.group.WORLD, {})
    if (ranks, timeout) not in groups:
        try:
            made = torch.tensor([groups_made()], device=device)
            dist.all_reduce(made, dist.ReduceOp.MAX, beside)
            most = int(made)
        except RuntimeError as error:
            raise CommError(
                f"the first collective of ranks {[*ranks]}, on {device} of this one, failed: "
                f"{error}. Every rank needs a GPU of its own: torch.cuda.set_device(...) and "
                "model.to(...) it before zshard.wrap."
            ) from error
        try:
            groups[ranks, timeout] = make_group(ranks, timeout, most)
        except RuntimeError as error:
            raise CommError(
                f"ranks {[*ranks]} do not reach each other over gloo, by which their hosts tell "
                f"each other what the GPUs are to do: {error}. Name the network interface that "
                "the hosts share in the environment variable GLOO_SOCKET_IFNAME."
            ) from error
    return groups[ranks, timeout]
