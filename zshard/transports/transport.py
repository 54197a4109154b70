"""Which transport the ranks of a sharding group take: the same one on all ranks of all replicas."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, cast, get_args

from ..errors import InputError, MismatchError, WrapError
from .discovery import find_each_other
from .groups import Ranks
from .neighbours import Neighbours
from .peer import PeerRanks
from .per_group import per_group
from .processes import Processes
from .refusal import Refusal, raise_together
from .shared import NoSharedMemory
from .symmetric import SymmetricRanks

Transport = Literal["auto", "group", "peer"]

_LOG = logging.getLogger("zshard")
_MOST_RANKS = 128  # that read each other's memory: kMaxPeers in csrc/ops.h


def require_transport(given: object, called: str = "comm") -> Transport:
    """``given``, if it is a transport; errors call it ``called``.

    Raises:
        InputError: if it is not.
    """
    if given not in get_args(Transport):
        raise InputError(f"{called}={given!r}: expected 'auto', 'group' or 'peer'")
    return cast("Transport", given)


def asked_for(
    transport: Transport, failure: Exception | None
) -> tuple[Transport, Exception | None]:
    """What this rank asks for, by its argument or else its environment; and what is wrong.

    Args:
        failure: what was wrong before.
    """
    if transport != "auto":
        return transport, failure
    try:
        given = os.environ.get("ZSHARD_COMM", transport)
        return require_transport(given, "ZSHARD_COMM"), failure
    except InputError as wrong:
        return transport, failure or wrong


def neighbours_of(ranks: Ranks) -> Neighbours | None:
    """Where ``ranks`` share memory already, if they do.

    For the caller to hold: the last model that shares it may be deleted meanwhile.
    """
    there = None if ranks.group is None else per_group(ranks.group).neighbours
    return there if there and not there.failed else None


class Offer(NamedTuple):
    """What a rank brings to ``wrap``.

    Attributes:
        transport: what it asks for.
        refusal: what it has found wrong.
        shards_token: of the ranks that it shares memory with already; "" if there are none.
        replicas_token: likewise, of its replicas: other models may be sharded over these.
        mesh: how many replicas and shards there are.
    """

    transport: Transport
    refusal: Refusal | None
    shards_token: str
    replicas_token: str
    mesh: tuple[int, int]


def agree_on_transport(
    offers: Sequence[Offer], global_ranks: Sequence[int], failure: Exception | None
) -> None:
    """Check that no rank has found anything wrong, and that all ask for one mesh and transport.

    Args:
        offers: of every rank; global_ranks: see ``Comm``.
        failure: this rank's own.

    Raises:
        Error: on every rank, if one has found anything wrong.
        MismatchError: on every rank, if they ask for different meshes or transports.
    """
    raise_together(failure, [offer.refusal for offer in offers], global_ranks)
    if len(meshes := _by_value([offer.mesh for offer in offers], global_ranks)) > 1:
        raise MismatchError(
            "the ranks wrap over different meshes, (replicate, shard): "
            f"{'; '.join(meshes)}. Pass the same on all."
        )
    if len(asked := _by_value([offer.transport for offer in offers], global_ranks)) > 1:
        raise MismatchError(
            f"the ranks ask for different transports: comm={'; '.join(asked)}. Pass the same on "
            "all."
        )


def _by_value(values: Sequence[object], global_ranks: Sequence[int]) -> list[str]:
    """The different ones among ``values`` of every rank, each with the ranks that it is of."""
    found: dict[object, list[int]] = {}
    for rank, value in zip(global_ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return [f"{value!r} on ranks {ranks}" for value, ranks in found.items()]


def share_memory(tokens: Iterable[str]) -> bool:
    """Whether the ranks that have offered ``tokens`` share one memory already, or all none."""
    return len(set(tokens)) == 1


def meet_in_one_place(ranks: Ranks) -> None:
    """Let ranks in meetings of different models over this group meet each other.

    Where one of these models shares memory, all of them meet there. All ranks come here together,
    once they have wrapped a model.

    Args:
        ranks: of that model along an axis; its shards may be what replicas are to another.
    """
    if ranks.group is None or ranks.size == 1:
        return
    models = per_group(ranks.group).models
    for other in models:
        if other.neighbours is None:
            other.neighbours = ranks.neighbours
    models.add(ranks)


def over_memory(transport: Transport, shards: Ranks, replicas: Ranks) -> Ranks:
    """``shards`` over shared memory if that is asked for; for "auto", where all of them can.

    Raises:
        WrapError: on every rank, for "peer" where a rank cannot reach another's memory.
    """
    if shards.size == 1 or transport == "group":
        return shards
    first = shards.rank == replicas.rank == 0
    if transport == "auto" and shards.device.type == "cuda":
        if first:
            _LOG.info("comm='group': GPUs read each other's memory where comm='peer' asks for it")
        return shards
    reached = _over_memory(shards)
    hindrance = reached if isinstance(reached, Refusal) else None
    if replicas.size > 1:
        everyone = cast("list[Refusal | None]", replicas.all_gather_object(hindrance))
        hindrance = hindrance or next(filter(None, everyone), None)
    if hindrance is None:
        if first:
            _LOG.info("comm='peer': the %d ranks read each other's memory", shards.size)
        assert isinstance(reached, Ranks)
        return reached
    if transport == "auto":
        if first:
            say_fallback(hindrance.text, logging.WARNING if hindrance.lack else logging.INFO)
        return shards
    if hindrance.lack:
        raise NoSharedMemory(hindrance.text)
    raise WrapError(
        f"comm='peer': {hindrance.text}. It needs processes of one user on one Linux host; "
        "comm='group' goes through the process group."
    )


def say_fallback(why: str, level: int) -> None:
    """Log that "auto" has become the process group; for one rank to call."""
    _LOG.log(level, "comm='group', because of %s", why)


def _over_memory(ranks: Ranks) -> Ranks | Refusal:
    """``ranks`` over shared memory, or what hinders them; alike on all of them."""
    group, device = ranks.group, ranks.device
    assert group is not None
    if ranks.size > _MOST_RANKS:
        return Refusal("WrapError", f"{ranks.size} ranks, where {_MOST_RANKS} is the most")
    if ranks.neighbours is not None:
        return PeerRanks(group, device, ranks.neighbours)
    processes = ranks.found or find_each_other(ranks)
    problem = processes if isinstance(processes, str) else ""
    if (found := ranks.first_problem(problem)) is not None:
        who, what = found
        return Refusal("WrapError", f"{who}: {what}")
    try:
        if device.type == "cuda":  # a barrier's timeout tells that a rank is missing
            return SymmetricRanks(group, device)
        assert isinstance(processes, Processes)
        there = per_group(group).neighbours = Neighbours(ranks, group, processes)
        return PeerRanks(group, device, there)
    except NoSharedMemory as error:
        return Refusal("WrapError", str(error), lack=True)
