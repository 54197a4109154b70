"""Steps of the three-block model: what the tests of the schedule, guards and habits share."""

from __future__ import annotations

import models
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zshard
from zshard.transports import groups
from zshard.wrap import schedule_of


def batch(rank: int, step: int) -> Tensor:
    """Return a rank's inputs of one step, (4, 3) fp32, the same in every call."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def one_step(model: nn.Module, rank: int, step: int) -> Tensor:
    """Run forward and backward; returns the loss."""
    device = next(model.parameters()).device
    loss = models.loss_of(model, batch(rank, step).to(device))
    loss.backward()
    return loss.detach()


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor) -> None:
    """Take a whole step, clipped."""
    models.loss_of(model, data).backward()
    zshard.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def mean_gradient(param: Tensor, world_size: int) -> Tensor | None:
    """The mean over the ranks of what a plain model has, where any of them has a gradient."""
    there = torch.tensor([float(param.grad is not None)])
    mean = torch.zeros_like(param) if param.grad is None else param.grad / world_size
    dist.all_reduce(there)
    dist.all_reduce(mean)
    return mean if there.item() else None


def build(**options: object) -> nn.Module:
    """Wrap the model, with the same values on every rank and in every call."""
    torch.manual_seed(0)
    return zshard.wrap(models.Blocks(), **options)


def transport_of(model: nn.Module) -> str:
    """How the ranks of a wrapped model reach each other, as ``wrap`` calls it."""
    return "peer" if schedule_of(model).comm.shards.in_memory else "group"


def all_by_messages(rank: int) -> None:
    """Have this process believe that every rank is on a host of its own, and every row large."""
    groups._LARGE_BYTES = 1
    groups._host = lambda: f"host {rank}"
