"""Loss scaling for fp16 compute: every rank skips the same steps and has the same scale."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from numbers import Integral, Real
from types import SimpleNamespace
from typing import NamedTuple, cast

import torch
from torch.optim import Optimizer

from ..errors import InputError
from ..param import Sharded
from ..schedule import Schedule
from ..tag import Tag
from .buckets import has_grad


class _Share(NamedTuple):
    """What an optimizer has of one wrapped model."""

    schedule: Schedule
    present: list[Sharded]  # those that have a gradient, on any rank
    known: torch.Tensor | None  # the reduction's flag, where it looked at exactly these gradients


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for wrapped models: the same arguments, methods and state_dict.

    A gradient that is infinite or NaN on one rank skips the step on every rank, and all scales
    change alike. Where one optimizer has all gradients of a model this costs no communication and
    no pass over them: the reduction has looked, and zshard's optimizers divide as they read.

    Otherwise ``unscale_``, and a ``step`` without it, are collectives: every rank calls them, and
    one small all-reduce tells what was found. That is so where the optimizer has part of a model's
    gradients, or plain parameters beside sharded ones, or gradients were changed since backward.
    Optimizers without sharded parameters are left to torch.amp.GradScaler: no communication.

    Gradients in fp16 (``reduce=torch.float16``) can only be divided by zshard's optimizers as they
    read them, so these need all of the model's gradients in one of those.

    Args:
        device: "cuda" or "cpu".
        init_scale: the first scale.
        growth_factor: the scale is multiplied by it after ``growth_interval`` steps without a skip.
        backoff_factor: the scale is multiplied by it after a skipped step.
        growth_interval: see growth_factor.
        enabled: False makes ``step`` the optimizer's own, and the other methods do nothing.

    Raises:
        InputError: for a setting out of range; from ``unscale_`` and ``step``, for fp16 gradients
            that it would have to divide in place. It is a ValueError, as torch's is.
        StateError: from the same, after a backward that raised, or inside no_sync.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2), precision=zshard.Precision.fp16())
        >>> opt, scaler = zshard.AdamW(model.parameters()), zshard.GradScaler("cpu")
        >>> scaler.scale(model(torch.ones(3, 4)).float().mean()).backward()
        >>> scaler.unscale_(opt)
        >>> norm = zshard.clip_grad_norm_(model, 1.0)
        >>> scaler.step(opt)
        >>> scaler.update()
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        for name, value, low, high in (
            ("init_scale", init_scale, 0.0, math.inf),
            ("growth_factor", growth_factor, 1.0, math.inf),
            ("backoff_factor", backoff_factor, 0.0, 1.0),
        ):
            if enabled and not (isinstance(value, Real) and low < value < high):
                raise InputError(
                    f"GradScaler: {name}={value!r}: expected a number between {low:g} and {high:g}"
                )
        if enabled and not (isinstance(growth_interval, Integral) and growth_interval > 0):
            raise InputError(
                f"GradScaler: growth_interval={growth_interval!r}: expected a number of steps"
            )
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,  # 0-d fp32
        found_inf: torch.Tensor,  # 0-d fp32, zero
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """The one place where torch's scaler looks at gradients and divides them.

        With ``allow_fp16`` inv_scale is 1: one of torch's fused optimizers divides by itself.

        Returns:
            Device -> 0-d fp32, 1 if a gradient is not finite, else 0; empty without any gradient.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        plain = [param for param in params if not isinstance(param, Sharded)]
        divide = not allow_fp16
        shares = _shares(params, divide=divide)
        rest = cast(Optimizer, SimpleNamespace(param_groups=[{"params": plain}]))
        seen = super()._unscale_grads_(rest, inv_scale, found_inf, allow_fp16)
        if not shares or not (plain or any(share.present for share in shares)):
            return seen
        found = found_inf
        for verdict in seen.values():
            found = torch.maximum(found, verdict.to(found.device))
        for schedule, present, known in shares:
            # A scale on a GPU, which the host would wait for, is what these have made of it.
            rule = (self.get_growth_factor(), self.get_backoff_factor(), self.get_growth_interval())
            scale = float(inv_scale) if inv_scale.is_cpu else self._init_scale
            what = "the scale and the settings of GradScaler"
            schedule.updates.note(what, (scale, *rule), of_gradients=True)
            factor = inv_scale.to(schedule.device)
            if known is None:
                verdict = _check_and_multiply(present, factor)
            else:
                verdict = (known != 0).float()
                if divide:
                    schedule.totals.scale_by(factor, unscales=True)
            found = torch.maximum(found.to(schedule.device), verdict)
            if plain or known is None:
                call = "a look for gradients that are not finite"
                tag = Tag(schedule.executor.step, "reduce", "root", "non-finite")
                with schedule.comm.awaited(call):
                    schedule.begin_call(call)
                    for over in schedule.comm.axes:
                        schedule.comm.all_reduce(found, tag, over, maximum=True).wait()
        return {found.device: found}


def _shares(params: Sequence[torch.Tensor], *, divide: bool) -> list[_Share]:
    """Of each wrapped model what ``params`` have of it; nothing is changed yet."""
    models: dict[Schedule, list[Sharded]] = defaultdict(list)
    for param in params:
        if isinstance(param, Sharded):
            models[param.flat.schedule].append(param)
    shares = []
    for schedule, given in models.items():
        schedule.backward.require_gradients()
        present = [param for param in given if has_grad(param)]
        known = schedule.totals.non_finite if schedule.totals.covers(present) else None
        for param in present:
            if known is None and divide and param.flat.dtypes.reduce == torch.float16:
                raise InputError(
                    f"{param.fqn}: its gradient is float16, and dividing it by the loss scale in "
                    "place would flush small values to zero. Reduce in fp32 "
                    "(zshard.Precision.fp16()); or give all of the model's gradients to one "
                    "of zshard's optimizers and leave them as backward made them."
                )
        shares.append(_Share(schedule, present, known))
    return shares


def _check_and_multiply(params: Sequence[Sharded], factor: torch.Tensor) -> torch.Tensor:
    """Multiply the gradients; 0-d fp32, 1 if an element on this rank was not finite, else 0."""
    found = torch.zeros_like(factor)
    shards: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for param in params:
        grad = param.grad
        if isinstance(grad, Sharded) and (local := grad.local).numel() > 0:
            shards[local.dtype].append(local)
    for grads in shards.values():
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)
    for schedule in {param.flat.schedule for param in params}:
        schedule.totals.note_change()
    return found
