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


ALIKE = [[(0, 1, 2)]]
SKIPPING = [[(0, 1, 2), (2,)], [(), (2, 1)], [(0, 1, 2), (0,)]]
IN_UNLIKE_ORDERS = [[(0, 1), (1, 0)]]  # both ask for a unit at once, and all gather both


def full_buffers(
    rank: int, world_size: int, comm: str, prefetch: int, apart: list[list[tuple[int, ...]]]
) -> list[int]:
    """Their bytes behind steps in which the ranks run the same units, and behind others."""
    model, nbytes = zshard.wrap(models.build("blocks"), comm=comm, prefetch=prefetch), []
    for orders in (ALIKE, apart):
        for order in [each[rank % len(each)] for each in orders for _ in range(3)]:
            plain = models.build("blocks")
            model.order = plain.order = order
            for batch in models.batches("blocks", 2, rank):  # the first leaves a unit gathered
                loss = models.loss_of(model, batch)
                assert torch.equal(loss, models.loss_of(plain, batch))
            loss.backward()
        nbytes.append(zshard.memory(model)["peak"]["full_buffers"])
    return nbytes


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("comm", ["group", "peer"])
def test_gathers_for_other_ranks_alone_take_no_memory(comm: str, prefetch: int) -> None:
    for before, after in run_ranks(full_buffers, 2, comm, prefetch, SKIPPING):
        assert before == after
    for before, after in run_ranks(full_buffers, 2, comm, prefetch, IN_UNLIKE_ORDERS):
        alone = prefetch == 0 and comm == "group"  # with the buffer of the unit that it needs
        assert before == after or alone


def loss_from(model: models.Blocks, rank: int) -> torch.Tensor:
    """From the output; on rank 1 from what the last block alone makes of its input."""
    outputs: list[torch.Tensor] = []
    last = model.blocks[2]
    hooks = [last.register_forward_hook(lambda module, args, out: outputs.append(out))]
    if rank == 1:
        hooks.append(last.register_forward_pre_hook(lambda module, args: args[0].detach()))
    outputs.append(model(models.batches("blocks", 1, rank)[0]))
    for hook in hooks:
        hook.remove()
    return outputs[1 - rank].square().mean()


def backwards_without_the_root(rank: int, world_size: int, comm: str) -> None:
    plain, model = models.build("blocks"), models.build("blocks")
    zshard.wrap(model, units=["blocks.2"], comm=comm)  # the root is the larger one of two units
    for each in range(world_size):
        (loss_from(plain, each) / world_size).backward()
    for _ in range(3):
        loss = loss_from(model, rank)
        with torch.no_grad():
            loss_from(model, rank)  # lets go of the root, which rank 0's backward needs
        held = zshard.memory(model)["peak"]["full_buffers"]
        loss.backward()
        assert zshard.memory(model)["peak"]["full_buffers"] == held
        for name, param in plain.named_parameters():
            torch.testing.assert_close(zshard.full_grad(model, name), param.grad)
        model.zero_grad()


@pytest.mark.parametrize("comm", ["group", "peer"])
def test_a_root_that_one_rank_alone_needs_in_backward_is_received_into_its_own_memory(
    comm: str,
) -> None:
    run_ranks(backwards_without_the_root, 2, comm)
