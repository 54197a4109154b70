"""In wrap, before anything is sharded: all ranks hold the same model, or are given it, or an error.

(What ranks agree on while they train is agreement.py's.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, cast

import torch

from ..comm import Comm
from ..digest import digest
from ..errors import MismatchError
from ..layout import dense_stride
from ..strategy import Strategy
from ..tag import Tag
from ..unitmap import UnitSpec


class _Fact(NamedTuple):
    """What ranks must agree on about one parameter, besides its values."""

    name: str
    unit: str
    strategy: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # of its place in the flat buffer
    dtype: str
    requires_grad: bool
    on_meta: bool


_OF_MODEL = ("name", "shape", "stride", "dtype", "requires_grad", "on_meta")  # and not of its units


def check(
    specs: Sequence[UnitSpec],
    comm: Comm,
    options: Mapping[str, str],
    strategies: Sequence[Strategy],
) -> None:
    """Compare names, unit map, shapes, dtypes and requires_grad over the ranks.

    Args:
        options: those of wrap that decide what is communicated, as text.
        strategies: one a unit.

    Raises:
        MismatchError: on every rank, with the first parameter that differs and how, rank by rank.
    """
    facts = [
        _Fact(
            name=owned.name,
            unit=spec.label,
            strategy=strategy.name,
            shape=tuple(owned.param.shape),
            stride=dense_stride(owned.param),
            dtype=str(owned.param.dtype),
            requires_grad=owned.param.requires_grad,
            on_meta=owned.param.is_meta,
        )
        for spec, strategy in zip(specs, strategies, strict=True)
        for owned in spec.params
    ]
    if _alike((options, facts), comm, Tag(None, "wrap")):
        return
    told = comm.all_gather_object(options, Tag(None, "wrap"))
    _compare_options(cast("list[Mapping[str, str]]", told), comm)
    everyone = cast("list[list[_Fact]]", comm.all_gather_object(facts, Tag(None, "wrap")))
    by_name = [{fact.name: fact for fact in facts} for facts in everyone]
    for fields in (_OF_MODEL, _Fact._fields):  # of other shapes, the units may be others, too
        for name in dict.fromkeys(fact.name for facts in everyone for fact in facts):
            _compare(name, [facts.get(name) for facts in by_name], fields, comm)
    orders = [[fact.name for fact in facts] for facts in everyone]
    for rank, order in enumerate(orders):
        for ours, theirs in zip(orders[0], order, strict=True):
            if ours != theirs:
                raise MismatchError(
                    f"parameters are registered in another order on {comm.name(rank)}: {theirs} "
                    f"where {comm.name(0)} has {ours}. Every rank must build the same model."
                )


def _alike(told: object, comm: Comm, tag: Tag) -> bool:
    """Whether all ranks have the same to tell, by its hash: then it is sent to nobody."""
    mine = hashlib.sha256(repr(told).encode()).digest()
    return len(set(comm.all_gather_object(mine, tag))) == 1


def _compare_options(everyone: Sequence[Mapping[str, str]], comm: Comm) -> None:
    for option in everyone[0]:
        ranks: dict[str, list[int]] = {}
        for rank, options in enumerate(everyone):
            ranks.setdefault(options[option], []).append(rank)
        if len(ranks) > 1:
            found = "; ".join(f"{value} on {comm.names(places)}" for value, places in ranks.items())
            raise MismatchError(
                f"zshard.wrap was called with different options: {option}: {found}. Pass the same "
                "on every rank."
            )


def _compare(name: str, facts: Sequence[_Fact | None], fields: Sequence[str], comm: Comm) -> None:
    seen = [fact and tuple(getattr(fact, field) for field in fields) for fact in facts]
    differing = [rank for rank, each in enumerate(seen) if each != seen[0]]
    if not differing:
        return
    first, other = facts[0], facts[differing[0]]
    if first is None or other is None:
        raise MismatchError(
            f"only some ranks have the parameter {name!r}: "
            f"{comm.names(r for r, fact in enumerate(facts) if fact is not None)} do. Every rank "
            "must build the same model, tie the same parameters in it, and pass the same ignored=."
        )
    field = next(f for f in fields if getattr(first, f) != getattr(other, f))
    a, b = getattr(first, field), getattr(other, field)
    raise MismatchError(
        f"parameter {name}: {_with_first(differing, comm)} differ in {field}: {a!r} on "
        f"{comm.name(0)}, {b!r} on {comm.name(differing[0])}. Every rank must build the same model."
    )


def values(specs: Sequence[UnitSpec], comm: Comm, init: str) -> None:
    """Compare the values of parameters over the ranks ("check"), or take rank 0's ("broadcast").

    Those on the meta device have none.

    Raises:
        MismatchError: on every rank, with the first parameter that differs.
    """
    if comm.world_size == 1 or init == "trust":
        return
    if init == "broadcast":
        _broadcast(specs, comm)
    else:
        there = [owned for spec in specs for owned in spec.params if not owned.param.is_meta]
        names = [owned.name for owned in there]
        mine = [digest(owned.param) for owned in there]
        remedy = (
            "seed the ranks alike (an init_fn: draw from torch's generators only), or pass "
            "init='broadcast'"
        )
        same_values(names, mine, comm, Tag(None, "wrap", specs[0].label), remedy)


def same_values(
    names: Sequence[str], mine: Sequence[object], comm: Comm, tag: Tag, remedy: str
) -> None:
    """Compare the ``digest`` of every parameter over the ranks.

    Args:
        names: of the parameters, the same on every rank.
        mine: their digests on this one.
        remedy: what the error says to do.

    Raises:
        MismatchError: on every rank, with the first parameter that differs.
    """
    if _alike(mine, comm, tag):
        return
    theirs = cast("list[list[object]]", comm.all_gather_object(mine, tag))
    for name, *digests in zip(names, *theirs, strict=True):
        if differing := [rank for rank, seen in enumerate(digests) if seen != digests[0]]:
            raise MismatchError(
                f"parameter {name}: {_with_first(differing, comm)} have different values; {remedy}"
            )


def _with_first(others: Sequence[int], comm: Comm) -> str:
    many = comm.names(others) if len(others) > 1 else comm.name(others[0])
    return f"{comm.name(0)} and {many}"


@torch.no_grad()
def _broadcast(specs: Sequence[UnitSpec], comm: Comm) -> None:
    for spec in specs:
        for param in (owned.param for owned in spec.params if not owned.param.is_meta):
            with torch.inference_mode() if param.is_inference() else nullcontext():
                value = param.detach().contiguous()
                # Not view(-1): one element is contiguous whatever its stride, which stays.
                flat = value.as_strided((value.numel(),), (1,))
                comm.broadcast(flat, Tag(None, "wrap", spec.label))
                if param.untyped_storage().nbytes() < value.nbytes:  # expanded
                    param.data = value
                else:
                    param.copy_(value)
