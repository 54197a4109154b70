"""Which transport the ranks of a sharding group take: the same one on all ranks of all replicas."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Literal, cast, get_args

import torch

from .discovery import close_all, find_each_other
from .errors import InputError, MismatchError, WrapError
from .groups import Ranks
from .neighbours import Neighbours, known
from .peer import PeerRanks
from .refusal import Refusal, raise_together

Transport = Literal["auto", "group", "peer"]

_LOG = logging.getLogger("zshard")


def asked_for(
    transport: Transport, failure: Exception | None
) -> tuple[Transport, Exception | None]:
    """What this rank asks for, by its argument or else its environment; and what is wrong.

    Args:
        failure: what was wrong before.
    """
    if transport != "auto":
        return transport, failure
    given = os.environ.get("ZSHARD_COMM", transport)
    if given not in get_args(Transport):
        wrong = InputError(f"ZSHARD_COMM={given!r}: expected 'auto', 'group' or 'peer'")
        return transport, failure or wrong
    return cast("Transport", given), failure


def agree_on_transport(told: Sequence[object], failure: Exception | None) -> None:
    """See that no rank has found anything wrong, and that all ask for one transport.

    Args:
        told: (transport, refusal) of every rank; failure: this rank's own.

    Raises:
        Error: on every rank, if one has found anything wrong.
        MismatchError: on every rank, if they ask for different transports.
    """
    asked, refusals = zip(*cast("Sequence[tuple[str, Refusal | None]]", told), strict=True)
    raise_together(failure, refusals)
    if len(set(asked)) > 1:
        raise MismatchError(f"the ranks ask for different transports: comm={asked}, by rank")


def over_memory(
    transport: Transport, shards: Ranks, replicas: Ranks, device: torch.device
) -> Ranks:
    """``shards`` over shared memory if that is asked for; for "auto", where all of them can.

    Raises:
        WrapError: on every rank, for "peer" where a rank cannot reach another's memory.
    """
    if shards.size == 1 or transport == "group":
        return shards
    carried, problem = _reached(shards, device)
    if replicas.size > 1:
        everyone = [str(each) for each in replicas.all_gather_object(problem)]
        problem = problem or next(filter(None, everyone), "")
    if carried is not None and not problem:
        if shards.rank == replicas.rank == 0:
            _LOG.info("comm='peer': the %d ranks read each other's memory", shards.size)
        return carried
    if transport == "peer":
        raise WrapError(
            f"comm='peer': {problem}. Ranks have to be processes of one user on one Linux host, "
            "and parameters on the CPU; comm='group' goes through the process group."
        )
    if shards.rank == replicas.rank == 0:
        _LOG.info("comm='group', because of %s", problem)
    return shards


def _reached(ranks: Ranks, device: torch.device) -> tuple[PeerRanks | None, str]:
    """``ranks`` over shared memory, or which of them cannot, and why; alike on all of them."""
    group = ranks.group
    assert group is not None
    there = known.get(id(group))
    tokens = ranks.all_gather_object(there.token if there else "")
    if there is not None and len(set(tokens)) == 1:
        return PeerRanks(group, device, there), ""
    lives, problem = find_each_other(ranks, device)
    problems = [str(each) for each in ranks.all_gather_object(problem)]
    if any(problems):
        close_all([life.fd for life in lives])
        rank = next(rank for rank, each in enumerate(problems) if each)
        return None, f"{ranks.name(rank)} of {ranks.size}: {problems[rank]}"
    there = known[id(group)] = Neighbours(ranks, group, lives)
    return PeerRanks(group, device, there), ""
