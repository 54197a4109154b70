"""Which tensors are found in what modules take and return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from odd import INPUT, Stacked, assert_same_grads, pair
from ranks import run_ranks
from torch import Tensor, nn

import zshard
from zshard.containers import map_tensors, tensors_in


class Deep(Stacked):
    """Units whose output lies deep, and whose inputs go on for long."""

    def __init__(self) -> None:
        super().__init__(lambda: DeepBlock())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, list(range(150_000)))["a"]["b"]["c"][0]
        return x


class DeepBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: list[int]) -> dict[str, Any]:
        return {"a": {"b": {"c": [self.linear(x).tanh()]}}}


def test_long_inputs_hide_no_deep_output() -> None:
    plain, wrapped = pair(Deep)
    for model in (plain, wrapped):
        model(INPUT).sum().backward()
    assert_same_grads(plain, wrapped)


class Node:
    def __init__(self, value: object, following: object) -> None:
        self.value, self.following = value, following


def test_the_search_for_tensors_ends_in_long_and_deep_things() -> None:
    chain: object = torch.ones(1)
    for _ in range(3000):
        chain = Node(None, chain)
    inner = torch.zeros(2)
    assert [*map(len, tensors_in([chain, {"a": [inner], "again": [inner]}, inner]))] == [2, 2, 2, 1]
    many = {index: str(index) for index in range(1_000_000)}
    assert [*tensors_in((many, Node(inner, inner), inner))] == [inner]
    looked_at = 0

    def endless() -> Iterator[Node]:
        nonlocal looked_at
        while True:
            looked_at += 1
            yield Node(None, None)

    class Endless(dict[str, Node]):
        def values(self) -> Any:
            return endless()

    assert [*tensors_in(Endless())] == []
    assert looked_at < 20_000


class Caching(nn.Linear):
    """Leaves something in a dict that comes in."""

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        y = super().forward(x)
        cache["y"] = y.detach()
        return y


def test_a_callers_container_gets_what_a_forward_leaves_there_though_inputs_are_cast() -> None:
    model = zshard.wrap(Caching(3, 2), precision=zshard.Precision.bf16())
    cache: dict[str, Tensor] = {}
    y = model(torch.ones(1, 3), cache)
    assert torch.equal(cache["y"], y)


@dataclass
class Found:
    """What a forward returns, of which it sets a part."""

    values: Tensor
    scores: Tensor = field(init=False)


class Finds(nn.Linear):
    def forward(self, x: Tensor) -> Found:
        return Found(super().forward(x))


def test_a_dataclass_of_which_a_field_is_not_set_is_cast_and_left_so() -> None:
    precision = zshard.Precision.bf16(output=torch.float32)
    found = zshard.wrap(Finds(3, 2), precision=precision)(torch.ones(1, 3))
    assert found.values.dtype == torch.float32 and not hasattr(found, "scores")


class OneSlot:
    """An object with one slot, named by a string."""

    __slots__ = "held"

    def __init__(self, held: Tensor) -> None:
        self.held = held


class Lends(nn.Linear):
    """Returns a view of its weight in an object that nobody can copy it out of."""

    def forward(self, x: Tensor) -> OneSlot:
        return OneSlot(self.weight[0])


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lends = Lends(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.lends(x).held


class Appends(nn.Linear):
    """Leaves a view of its weight in a list that is passed by its name."""

    def forward(self, x: Tensor, *, cache: list[Tensor]) -> None:
        cache.append(self.weight[0])


class Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lends = Appends(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        self.lends(x, cache=cache)
        return x * cache[0]


def lent(rank: int, world_size: int) -> None:
    for kind in (Keeps, Caches):
        model = zshard.wrap(kind(), units=["lends"], init="broadcast")
        with pytest.raises(zshard.ShardedAccessError, match="'lends': forward leaves a view of"):
            model(torch.ones(1, 3))


def test_a_view_of_a_parameter_in_an_object_with_one_slot_or_a_list_by_name_is_refused() -> None:
    run_ranks(lent, 2)


class GivesItems(nn.Module):
    """Returns the items of a dict, a view of its parameter among them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> object:
        return {"x": x * self.scale, "scale": self.scale[:4]}.items()


def items_hold_a_view(rank: int, world_size: int) -> None:
    _, wrapped = pair(lambda: Stacked(GivesItems))
    with torch.no_grad(), pytest.raises(zshard.ShardedAccessError, match="Put a copy there"):
        wrapped(INPUT)


def test_tensors_are_found_in_the_items_of_a_mapping() -> None:
    assert [*tensors_in({"input": INPUT}.items())] == [INPUT]
    run_ranks(items_hold_a_view, 2)


@dataclass
class Leaf:
    """One of a tree whose parts know what they lie in."""

    values: Tensor
    above: Any = None
    below: list[Any] = field(default_factory=list)


class OfTree(nn.Module):
    """Makes a tree of a tree."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, tree: Leaf) -> Leaf:
        made = Leaf(tree.values * self.scale)
        made.below += [Leaf(self.scale + each.values, above=made) for each in tree.below]
        return made


def test_what_leads_back_to_what_it_lies_in_goes_through_units() -> None:
    plain, wrapped = pair(lambda: Stacked(OfTree), precision=zshard.Precision.bf16())
    for model, dtype in ((plain, torch.float32), (wrapped, torch.bfloat16)):
        tree = Leaf(INPUT)
        tree.below.append(Leaf(INPUT, above=tree))
        out = model(tree)
        assert out.values.dtype == out.below[0].values.dtype == dtype
        assert out.below[0].above is out
        (out.values + out.below[0].values).sum().backward()
    cycle: list[Any] = [INPUT]
    cycle.append({"again": cycle})
    assert map_tensors(lambda tensor: tensor, cycle) is cycle
    assert map_tensors(torch.neg, cycle)[1]["again"] is cycle
    cycle[1] = cycle
    assert map_tensors(torch.neg, cycle)[1] is cycle


def test_what_is_found_on_many_ways_is_looked_at_once() -> None:
    nodes = [Leaf(torch.ones(2)) for _ in range(8)]
    for node in nodes:
        node.below = [other for other in nodes if other is not node]
    looked_at: list[Tensor] = []
    assert map_tensors(lambda tensor: looked_at.append(tensor) or tensor, nodes[0]) is nodes[0]
    assert len(looked_at) == len(nodes)
    shared: Any = [INPUT]
    for _ in range(12):
        shared = [shared, shared]
    out = map_tensors(torch.neg, shared)
    assert out is not shared and out[0] is out[1]  # type: ignore[index]
