"""Tensors in what get_extra_state gives: zshard.state_dict copies each, wherever it lies."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

import zshard


class Counting(nn.BatchNorm1d):
    def get_extra_state(self) -> list[Tensor | None]:
        return [self.running_mean]


def test_tensors_in_an_extra_state_are_copied() -> None:
    model = zshard.wrap(Counting(2))
    [mean] = zshard.state_dict(model)["_extra_state"]
    model(torch.ones(3, 2))
    assert mean.tolist() == [0.0, 0.0]


@dataclass
class Packed:
    """Holds a number, of which a tensor is made whenever one is asked for."""

    number: float
    sparse: bool

    def tensors(self) -> tuple[list[Tensor], bool]:
        made = torch.tensor([self.number])
        return [made.to_sparse() if self.sparse else made], self.sparse


register_pytree_node(
    Packed,
    Packed.tensors,
    lambda made, sparse: Packed(*(t.to_dense().item() for t in made), sparse),
)


class Packing(nn.Linear):
    sparse = False

    def get_extra_state(self) -> list[Packed]:
        return [Packed(float(number), self.sparse) for number in range(9)]


@pytest.mark.parametrize("sparse", [False, True])
def test_tensors_that_are_made_as_one_looks_keep_their_own_values(sparse: bool) -> None:
    model = Packing(2, 2)
    model.sparse = sparse
    found = zshard.state_dict(zshard.wrap(model))["_extra_state"]
    assert found == model.get_extra_state()
