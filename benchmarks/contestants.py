"""Training steps to compare: zshard, FSDP2 and DDP with their best settings, and compute alone.

All train the same GPT from the same seed, with the same units, precision policy, clipping and
learning rate. "compute" is the forward and backward of the whole model on one rank, without
gradients' communication, clipping or optimizer: what no way of sharding can save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zshard
from zshard.gpt import GPT, SIZES, VOCABULARY, GPTConfig

UNITS = 48  # of the model that measures the host's overhead
_TINY_WIDTH = 16
_LR, _MAX_NORM = 1e-3, 1.0


@dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    Args:
        model: a size of zshard.gpt, or "units": 48 tiny ones.
        tokens: of one sequence, the batch of a rank and step.
        precision: "fp32"; "bf16", which reduces in fp32; or "bf16/bf16", which reduces in bf16.
    """

    model: str
    tokens: int
    precision: str
    device: torch.device

    @property
    def compute(self) -> torch.dtype | None:
        """The compute dtype; None where it is the parameters' own."""
        return None if self.precision == "fp32" else torch.bfloat16

    @property
    def reduce(self) -> torch.dtype | None:
        """The dtype of gradients on the wire; None where it is the parameters' own."""
        return torch.bfloat16 if self.precision == "bf16/bf16" else None

    def build(self) -> nn.Module:
        """The plain model, with the same values every time."""
        torch.manual_seed(0)
        if self.model == "units":
            return _Units().to(self.device)
        layers, width, heads = SIZES[self.model]
        return GPT(GPTConfig(layers, width, heads, context=self.tokens)).to(self.device)

    def batches(self, rank: int, count: int = 4) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of ``count`` steps, of this rank's own."""
        generator = torch.Generator().manual_seed(rank + 1)
        if self.model == "units":
            x = torch.randn(count, 2, self.tokens, _TINY_WIDTH, generator=generator)
        else:
            x = torch.randint(VOCABULARY, (count, 2, 1, self.tokens), generator=generator)
        return [(pair[0], pair[1]) for pair in x.to(self.device)]


class _Units(nn.Module):
    """Units that compute next to nothing, so that what is left is the host's work."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(_TINY_WIDTH, _TINY_WIDTH) for _ in range(UNITS))
        self.head = nn.Linear(_TINY_WIDTH, _TINY_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x).float()
    if y.is_floating_point():
        return F.mse_loss(out, y)
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


class Contestant:
    """One way of training; ``step`` takes a batch and returns its loss before the update.

    Args:
        clip: clips the gradients, given the model.
        optimizer: None to compute alone.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        clip: Callable[[nn.Module], object],
    ) -> None:
        self.name, self.model, self.optimizer, self._clip = name, model, optimizer, clip

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = _loss(self.model, x, y)
        loss.backward()
        if self.optimizer is None:
            self.model.zero_grad()
        else:
            self._clip(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def exposed_seconds(self) -> float:
        """Time the host has waited for collectives so far; NaN where nobody counts it."""
        if not self.name.startswith("zshard"):
            return float("nan")
        return zshard.stats(self.model).exposed_seconds


def _torch_clip(model: nn.Module) -> object:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM, foreach=True)


def _fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)


def make_zshard(setting: Setting) -> Contestant:
    """zshard's zero3 over the default group, or one rank without a group."""
    precision = zshard.Precision(setting.compute, setting.reduce)
    fake = dist.is_initialized() and dist.get_backend() == "fake"
    model = zshard.wrap(
        setting.build(), precision=precision, comm="group", init="trust" if fake else "check"
    )
    optimizer = zshard.AdamW(model.parameters(), lr=_LR)
    return Contestant(
        "zshard zero3", model, optimizer, lambda m: zshard.clip_grad_norm_(m, _MAX_NORM)
    )


def make_fsdp2(setting: Setting) -> Contestant:
    """FSDP2 that reshards after forward, with explicit prefetch of one unit in both directions."""
    model = setting.build()
    mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=setting.compute, reduce_dtype=setting.reduce or torch.float32
    )
    blocks = list(model.blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    return Contestant("FSDP2", model, _fused_adamw(model), _torch_clip)


def make_ddp(setting: Setting) -> Contestant:
    """DDP, its gradients views of the buckets. fp32 only: it has no precision policy."""
    model = DistributedDataParallel(setting.build(), gradient_as_bucket_view=True)
    return Contestant("DDP", model, _fused_adamw(model), _torch_clip)


def make_compute(setting: Setting) -> Contestant:
    """Forward and backward of the plain model, its parameters in the compute dtype."""
    model = setting.build()
    if setting.compute is not None:
        for param in model.parameters():
            param.data = param.data.to(setting.compute)
    return Contestant("compute", model, None, lambda m: None)


def make_plain(setting: Setting) -> Contestant:
    """The plain model's whole step on one rank: what the host's overhead is counted from."""
    model = setting.build()
    return Contestant("plain", model, _fused_adamw(model), _torch_clip)


MAKERS: dict[str, Callable[[Setting], Contestant]] = {
    "zshard": make_zshard,
    "fsdp2": make_fsdp2,
    "ddp": make_ddp,
    "compute": make_compute,
    "plain": make_plain,
}
