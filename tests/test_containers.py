"""Which tensors are found in what modules take and return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from odd import INPUT, Stacked, assert_same_grads, pair
from torch import Tensor, nn

from zshard.containers import tensors_in


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
