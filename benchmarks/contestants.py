"""Training steps to compare: zshard, its peers with their best settings, and compute alone.

All train the same GPT from the same seed, with the same units, precision policy, clipping and
learning rate. "compute" is the forward and backward of the whole model on one rank, without
gradients' communication, clipping or optimizer: what no way of sharding can save.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

import torch
import torch.distributed as dist
from setting import TOLERANCE, Setting, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from variant import DTYPES, Variant

import zshard
from zshard.tracing.trace import Trace

_LR, _MAX_NORM = 1e-3, 1.0


class Contestant:
    """One way of training; ``step`` takes a batch and returns its loss before the update.

    Args:
        optimizer: None to compute alone.
        clip: clips the gradients, given the model.
        backward: given the loss.
        tolerance: relative, of its losses, besides the setting's.
        trails: whether a step leaves communication under way, for the next one to wait for.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        clip: Callable[[nn.Module], object],
        backward: Callable[[Tensor], object] = Tensor.backward,
        tolerance: float = 0.0,
        trails: bool = False,
    ) -> None:
        self.name, self.model, self.optimizer = name, model, optimizer
        self.tolerance, self.trails = tolerance, trails
        self._clip, self._backward = clip, backward

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(self.model, x, y)
        self._backward(loss)
        if self.optimizer is not None:
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


# --- zshard ---------------------------------------------------------------------------------------


class Traced(Contestant):
    """zshard that records every step, and forgets it as the next one begins."""

    _trace: Trace | None = None

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        if self._trace is None:
            self._context = ExitStack()
            self._trace = self._context.enter_context(zshard.trace(self.model))
        self._trace.clear()
        return super().step(x, y)


def make_zshard(setting: Setting, variant: Variant | None = None) -> Contestant:
    """zshard over the default group, or one rank without a group; zero3 by default."""
    variant = variant or Variant()
    reduce = setting.reduce if variant.reduce is None else DTYPES[variant.reduce]
    split = variant.split and setting.compute == torch.bfloat16
    fake = dist.is_initialized() and dist.get_backend() == "fake"
    model = zshard.wrap(
        setting.build(),
        strategy=variant.strategy,
        precision=zshard.Precision(setting.compute, reduce, "split" if split else "fp32"),
        comm=variant.comm,
        prefetch=variant.prefetch,
        init="trust" if fake else "check",
    )
    return (Traced if variant.traced else Contestant)(
        variant.name,
        model,
        zshard.AdamW(model.parameters(), lr=_LR),
        lambda m: zshard.clip_grad_norm_(m, _MAX_NORM),
        tolerance=TOLERANCE["bf16/bf16"] if reduce == torch.bfloat16 else 0.0,
        trails=variant.strategy in ("zero1", "zero2"),  # they gather what the step has updated
    )


# --- peers ----------------------------------------------------------------------------------------


def _simulate_alike(modules: list[nn.Module]) -> None:
    """Have FSDP2's gathers over the fake group cost what zshard's do, one copy.

    The group's own takes a copy for each of N ranks in some versions of torch, and none in others.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

    class OneCopy(AllGather):
        def allocate(self, size: object, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            async_op: bool = False,
        ) -> None:
            repeat_rows(output_tensor.view(dist.get_world_size(group), -1), input_tensor)

    for module in modules:
        module.set_custom_all_gather(OneCopy())


def repeat_rows(rows: Tensor, row: Tensor) -> None:
    """Fill ``rows`` (N, S) with ``row`` (S,)."""
    rows.copy_(row.view(1, -1).expand_as(rows))


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
    if dist.get_backend() == "fake":
        _simulate_alike([*blocks, model])
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    return Contestant("FSDP2", model, _fused_adamw(model), _torch_clip)


def make_fsdp1(setting: Setting) -> Contestant:
    """FSDP1, full shard, its prefetch on in both directions (before backward's is the default)."""
    plain = setting.build()
    blocks = set(plain.blocks)
    precision = MixedPrecision(
        param_dtype=setting.compute,
        reduce_dtype=setting.reduce or torch.float32,
        buffer_dtype=setting.compute,
    )
    model = FullyShardedDataParallel(
        plain,
        auto_wrap_policy=CustomPolicy(lambda module: module in blocks),
        mixed_precision=precision,
        device_id=setting.device,
        forward_prefetch=True,
        use_orig_params=True,
    )
    return Contestant("FSDP1", model, _fused_adamw(model), lambda m: m.clip_grad_norm_(_MAX_NORM))


def _ddp(setting: Setting) -> DistributedDataParallel:
    """Gradients are views of the buckets; buffers, constants here, are not sent in each forward."""
    known = inspect.signature(DistributedDataParallel).parameters
    # What torch 2.13 calls broadcast_buffers, and warns of it.
    not_sent = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(
        setting.build(), gradient_as_bucket_view=True, **{not_sent: False}
    )


def make_ddp(setting: Setting) -> Contestant:
    """DDP. fp32 only: it has no precision policy."""
    model = _ddp(setting)
    return Contestant("DDP", model, _fused_adamw(model), _torch_clip)


def make_zero1(setting: Setting) -> Contestant:
    """DDP with torch's ZeroRedundancyOptimizer, which broadcasts its parameters in buckets."""
    model = _ddp(setting)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=_LR,
        fused=True,
    )
    return Contestant("DDP+ZeRO1", model, optimizer, _torch_clip)


def make_deepspeed(setting: Setting) -> Contestant:
    """DeepSpeed's ZeRO-3 around torch's fused AdamW; it clips by itself."""
    os.environ.setdefault("DS_ACCELERATOR", setting.device.type)  # read by the import
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # which it insists on
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls collectives by names that torch has replaced: a warning each, on its time.
    warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
    model = setting.build()
    wire = "fp32" if setting.reduce is None else "bf16"
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": _MAX_NORM,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "communication_data_type": wire,
    }
    if setting.compute is not None:
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": wire}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=_fused_adamw(model), config=config, dist_init_required=False
    )
    return Contestant("DeepSpeed ZeRO-3", engine, engine, lambda m: None, engine.backward)


# --- what they are counted from -------------------------------------------------------------------


def make_compute(setting: Setting) -> Contestant:
    """Forward and backward of the plain model, its parameters in the compute dtype.

    Its gradients are dropped as they come, as a sharded step's are: with all of them alive at once,
    in fresh memory, it takes longer in fp32 than the same computing in zshard's step.
    """
    model = setting.build()
    for param in model.parameters():
        if setting.compute is not None:
            param.data = param.data.to(setting.compute)
        param.register_post_accumulate_grad_hook(_drop_gradient)
    return Contestant("compute", model, None, lambda m: None)


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


def make_plain(setting: Setting) -> Contestant:
    """The plain model's whole step on one rank: what the host's overhead is counted from."""
    model = setting.build()
    return Contestant("plain", model, _fused_adamw(model), _torch_clip)


MAKERS: dict[str, Callable[[Setting], Contestant]] = {
    "zshard": make_zshard,
    "fsdp2": make_fsdp2,
    "fsdp1": make_fsdp1,
    "ddp": make_ddp,
    "zero1": make_zero1,
    "deepspeed": make_deepspeed,
    "compute": make_compute,
    "plain": make_plain,
}
