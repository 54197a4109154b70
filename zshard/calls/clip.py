"""Gradient clipping by the global norm over all ranks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from typing import SupportsFloat

import torch
from torch import nn

from .. import ops
from ..errors import InputError, StateError
from ..optimizers.buckets import has_grad
from ..param import Sharded
from ..schedule import Schedule
from ..tag import Tag
from ..wrap import schedule_of

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_: keeps the factor finite where the norm is 0


def clip_grad_norm_(
    model_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float | torch.Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients so that their global norm is at most ``max_norm``.

    As torch.nn.utils.clip_grad_norm_ does: by min(max_norm / (norm + 1e-6), 1).

    A collective for norms other than 2, and for part of a model's parameters: every rank calls it.
    The 2-norm of a whole model costs nothing here: the pass after each reduction has summed the
    squares, and zshard's optimizers apply the factor as they read the gradients.

    Args:
        model_or_params: the wrapped model, or parameters of one wrapped model.
        max_norm: the largest norm allowed; infinite to have the norm alone.
        norm_type: p of the p-norm; ``inf`` for the largest magnitude.
        error_if_nonfinite: raise if the norm is infinite or NaN.

    Returns:
        The norm before clipping, 0-d, the same on every rank: fp32, or fp64 where any of the
        parameters is, in which the factor is computed then as well. 0 of no parameters.

    Raises:
        InputError: parameters of no wrapped model, or of several; a norm_type that is not positive,
            a max_norm that is negative or not a number.
        StateError: a norm that is not finite, on every rank, with error_if_nonfinite; the
            gradients are left as they are; after a backward that raised on any rank, inside a
            forward or backward, and for gradients that no_sync holds back.
        MismatchError: if ranks clip with different arguments, on every rank, by the next forward.
        WrapError: if the model is not wrapped.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> opt = zshard.AdamW(model.parameters())
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> norm = zshard.clip_grad_norm_(model, 1.0)
        >>> opt.step()
        >>> norm
        tensor(9.4868)
    """
    if isinstance(model_or_params, nn.Module):
        schedule = schedule_of(model_or_params, ", or the part's parameters()")
        params = schedule.parameters()
    elif listed := _listed(model_or_params):
        params = _of_one_model(listed)
        schedule = params[0].flat.schedule
    else:
        return torch.tensor(0.0)
    wide = any(param.flat.dtypes.param == torch.float64 for param in params)
    dtype = torch.float64 if wide else torch.float32
    limit = _limit(max_norm, dtype)
    norm_type = _positive(norm_type)
    schedule.backward.require_gradients()
    everything = schedule.totals.covers(params)
    if everything:
        for param in schedule.parameters():
            param.flat.grads.refuse_held_back(param.segment)
    known = schedule.totals.squares() if everything and norm_type == 2.0 else None
    if known is None:
        norm = _norm(schedule, params, norm_type).to(dtype)
        factor = _factor(norm, limit)
    else:
        norm, factor = _known_norm_and_factor(*known, limit, dtype)
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise StateError(
            f"the {norm_type}-norm of the gradients is non-finite ({float(norm)}), so they cannot "
            "be clipped. Skip the step, or pass error_if_nonfinite=False."
        )
    shown = None if isinstance(limit, torch.Tensor) else limit
    if shown != math.inf:
        given = (shown, norm_type, "all" if everything else _which(params))
        what = "max_norm, norm_type and the parameters clipped"
        schedule.updates.note(what, given, of_gradients=True)
    if everything:
        schedule.totals.scale_by(factor)
    else:
        for param in params:
            if (grad := param.grad) is not None:
                grad.mul_(factor)
    return norm


def _known_norm_and_factor(
    squares: torch.Tensor,
    scale: torch.Tensor | None,
    limit: float | torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The 2-norm, 0-d, and what clips to ``limit``, (1,) or 0-d, both of ``dtype``; in one launch.

    Args:
        squares, scale: see ``Totals.squares``.
    """
    norm = torch.empty(1, dtype=dtype, device=squares.device)
    factor = torch.empty_like(norm)
    number = math.inf if isinstance(limit, torch.Tensor) else limit  # the op takes no other
    ops.clip_factor_(factor, norm, squares, number, None if scale is None else scale.to(dtype))
    norm.squeeze_()
    return norm, _factor(norm, limit) if isinstance(limit, torch.Tensor) else factor


def _factor(norm: torch.Tensor, limit: float | torch.Tensor) -> torch.Tensor:
    return (limit / (norm + _EPSILON)).clamp(max=1.0)


def _limit(max_norm: object, dtype: torch.dtype) -> float | torch.Tensor:
    """``max_norm`` as a number; 0-d, of ``dtype``, where the host would have to wait for it."""
    if isinstance(max_norm, torch.Tensor) and max_norm.numel() == 1:
        max_norm = max_norm.detach().reshape(())
        if not max_norm.is_cpu:
            return max_norm.to(dtype)
    elif isinstance(max_norm, torch.Tensor) or not isinstance(max_norm, SupportsFloat):
        raise InputError(f"max_norm={max_norm!r}: expected a number")
    try:
        value = float(max_norm)
    except (OverflowError, RuntimeError, TypeError):  # too large, complex
        value = math.nan
    if not value >= 0.0:
        raise InputError(f"max_norm={max_norm}: expected a number that is not negative")
    return value


def _positive(norm_type: object) -> float:
    try:
        value = float(norm_type)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        value = math.nan
    if not value > 0:
        raise InputError(f"norm_type={norm_type!r}: expected a positive number or inf")
    return value


def _listed(params: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(params, torch.Tensor):
        return [params]
    if not isinstance(params, Iterable):
        raise InputError(f"{params!r}: expected a wrapped model or its parameters")
    listed = [*params]
    for each in listed:
        if not isinstance(each, torch.Tensor):  # named_parameters() gives pairs
            raise InputError(
                f"a {type(each).__name__} among the parameters: expected tensors, as of "
                "model.parameters()"
            )
    return listed


def _of_one_model(given: list[torch.Tensor]) -> list[Sharded]:
    params = [param for param in given if isinstance(param, Sharded) and param._of_model]
    if len(params) != len(given):
        raise InputError(
            f"{len(given) - len(params)} of {len(given)} parameters are not of a wrapped model; "
            "clip those with torch.nn.utils.clip_grad_norm_"
        )
    if len({param.flat.schedule for param in params}) > 1:
        raise InputError("the parameters belong to several wrapped models; clip each on its own")
    return params


def _which(params: list[Sharded]) -> str:
    checksum = zlib.crc32(" ".join(param.fqn for param in params).encode())
    return f"{len(params)} from {params[0].fqn} on (checksum {checksum:08x})"


def _norm(schedule: Schedule, params: list[Sharded], p: float) -> torch.Tensor:
    """The p-norm of the parameters' gradients over all ranks, 0-d fp64."""
    maximum, scale = math.isinf(p), schedule.totals.grad_scale
    pending = 1.0 if scale is None else scale.double()
    powers = []
    for param in params:
        flat = param.flat
        # Of this rank's shard, also where it has more: the terms are the same for every strategy.
        part = flat.layout.local(param.segment, flat.shard).at
        if has_grad(param) and part.numel > 0:
            # Not param.grad, which would apply the pending factor to all gradients.
            grad = part.of(flat.grads.shard())
            if p == 2.0:
                stats = torch.empty(2, dtype=torch.float64, device=grad.device)
                ops.reduce_(grad, grad[None], stats=stats)
                powers.append(stats[0] * pending**2)
            elif maximum:
                low, high = grad.aminmax()
                powers.append(torch.maximum(low.abs(), high.abs()).double() * pending)
            else:
                wide = grad.to(torch.float64, copy=True)
                powers.append(wide.abs_().mul_(pending).pow_(p).sum())
    total = torch.zeros(1, dtype=torch.float64, device=schedule.device)
    if powers:
        stacked = torch.stack(powers).double()
        total[0] = stacked.max() if maximum else stacked.sum()
    if schedule.comm.size > 1:
        call = f"the {p}-norm of gradients"
        with schedule.comm.awaited(call):
            schedule.begin_call(call)
            tag = Tag(schedule.executor.step, "reduce", "root", "norm")
            over, nan = schedule.comm.shards, total.isnan()
            if maximum:  # of which a backend's maximum may keep a NaN or not
                total = torch.cat([total.masked_fill(nan, 0.0), nan.double()])
            schedule.comm.all_reduce(total, tag, over, maximum=maximum).wait()
        if maximum:
            total = total[:1].masked_fill(total[1:] > 0, math.nan)
    return (total if maximum else total.pow(1.0 / p))[0]
