"""Persistent buffers that ranks have made different, where whole parameters are lent or read."""

from __future__ import annotations

import torch
from ranks import run_ranks
from torch import Tensor, nn

import zshard


def normalised(rank: int) -> nn.Module:
    """A wrapped model whose training has left statistics of each rank's own batch."""
    torch.manual_seed(rank)
    model = zshard.wrap(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), init="broadcast")
    model(torch.randn(4, 5)).sum().backward()
    return model


def evaluated(rank: int, world_size: int, trained: bool) -> list[Tensor]:
    model = normalised(rank) if trained else nn.BatchNorm1d(5)
    if not trained:
        model.running_mean.fill_(rank)  # which rank 0 alone has from a file, say
        zshard.wrap(model, init="broadcast")
    model.eval()
    values, broadcasts = [], []
    for _ in range(2):
        with zshard.full_params(model), torch.no_grad():
            values.append(model(torch.ones(1, 5)))
        broadcasts.append(zshard.stats(model).calls["broadcast"])
    assert broadcasts[0] == broadcasts[1]  # nobody has changed them in between
    return [*values, *model.buffers()]


def test_every_rank_evaluates_with_rank_0s_buffers_inside_full_params() -> None:
    for trained in (False, True):
        first, second = run_ranks(evaluated, 2, trained)
        assert all(map(torch.equal, first, second))


def whole(rank: int, world_size: int) -> dict[str, Tensor]:
    return zshard.state_dict(normalised(rank), all_ranks=True)


def test_a_state_dict_on_all_ranks_has_rank_0s_buffers() -> None:
    first, second = run_ranks(whole, 2)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def written_through_data(rank: int, world_size: int) -> Tensor:
    model = zshard.wrap(nn.BatchNorm1d(3)).eval()
    model(torch.ones(2, 3))
    model.running_mean.data.fill_(rank)
    return zshard.state_dict(model, all_ranks=True)["running_mean"]


def test_a_state_dict_on_all_ranks_has_rank_0s_buffers_where_a_write_cannot_be_noticed() -> None:
    first, second = run_ranks(written_through_data, 2)
    assert torch.equal(first, second)
