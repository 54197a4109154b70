"""Ranks that run different units: each still sends what the others need, and takes what is new."""

from __future__ import annotations

import models
import pytest
import torch
from ranks import run_ranks

import zshard


def other_blocks(rank: int, world_size: int, comm: str, master: str) -> None:
    precision = zshard.Precision.bf16(master=master)  # type: ignore[arg-type]
    model = zshard.wrap(models.build("blocks"), precision=precision, comm=comm)
    kind = zshard.SGD if master == "split" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.5)
    model.order = (0, 1, 2) if rank == 0 else (2,)
    x = models.batches("blocks", 1, rank)[0]
    outputs = []
    for _ in range(4):
        plain = models.build("blocks")
        plain.order = model.order
        plain.load_state_dict(zshard.state_dict(model, all_ranks=True))
        out = model(x)
        assert torch.equal(out, plain.bfloat16()(x.bfloat16()))
        outputs.append(out.detach())
        (out.float() - 1.0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(outputs[0], outputs[-1])


@pytest.mark.parametrize("master", ["fp32", "split"])
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_unit_that_some_ranks_pass_over_is_computed_with_new_values_on_the_others(
    comm: str, master: str
) -> None:
    run_ranks(other_blocks, 2, comm, master)


def full_buffers(rank: int, world_size: int, comm: str) -> list[int]:
    """Their bytes behind steps in which the ranks run the same units, and behind others."""
    model, nbytes = zshard.wrap(models.build("blocks"), comm=comm), []
    for order in ((0, 1, 2), (2,)):
        model.order = order if rank == 1 else (0, 1, 2)
        for batch in models.batches("blocks", 2, rank):
            models.loss_of(model, batch).backward()
        nbytes.append(zshard.memory(model)["peak"]["full_buffers"])
    return nbytes


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_gathers_for_other_ranks_alone_take_a_buffer_only_where_they_are_sent(comm: str) -> None:
    grown = [apart > alike for alike, apart in run_ranks(full_buffers, 2, comm)]
    assert any(grown) == (comm == "group")
