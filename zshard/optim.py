"""AdamW, Adam and SGD over shards: one pass over the model, clip factor and cast included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from . import ops
from .errors import InputError
from .optimizers.buckets import Bucket, Hyper, Kind
from .optimizers.fused import FusedOptimizer, ParamGroups
from .optimizers.wide import Rule, wide_adamw, wide_sgd


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):  # float() reads them; schedulers do not
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name}={value!r}: expected a number") from None


def _not_negative(group: Mapping[str, Any], *names: str) -> None:
    if not all(_number(name, group[name]) >= 0 for name in names):
        given = ", ".join(f"{name}={group[name]}" for name in names)
        raise InputError(f"{given}: none may be negative, or NaN")


def _refuse(kind: str, **flags: bool) -> None:
    for name, value in flags.items():
        if value:
            works = " and works on wrapped models" if name in ("amsgrad", "maximize") else ""
            raise InputError(
                f"{name}=True is not available in zshard's optimizers; torch.optim.{kind} has it"
                f"{works}"
            )


class _FusedAdam(FusedOptimizer):
    """Adam's two variants share everything but the place of the weight decay."""

    _decoupled: bool

    def __init__(
        self,
        params: ParamGroups,
        lr: float | torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        **others: bool,
    ) -> None:
        _refuse("AdamW" if self._decoupled else "Adam", **others)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def _check(self, group: Mapping[str, Any]) -> None:
        _not_negative(group, "lr", "eps", "weight_decay")
        betas = group["betas"]
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise InputError(f"betas={betas!r}: expected two numbers")
        if not all(0 <= _number("betas", beta) < 1 for beta in betas):
            raise InputError(f"betas={betas}: both must lie in [0, 1)")

    def _state_names(self, states: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        lr, eps, decay = (_number(key, group[key]) for key in ("lr", "eps", "weight_decay"))
        beta1, beta2 = map(float, group["betas"])
        return lr, beta1, beta2, eps, decay, float(self._decoupled)

    def _torch_settings(self) -> dict[str, Any]:
        decoupled = self._decoupled
        return dict(amsgrad=False, maximize=False, decoupled_weight_decay=decoupled)

    def _rules(self) -> tuple[Callable[..., None], Rule]:
        return ops.adamw_, wide_adamw


class AdamW(_FusedAdam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), in one pass.

    Args:
        params: parameters, (name, parameter) pairs, or groups, as for torch.optim.AdamW.
        lr: learning rate.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: per step, times lr.
        amsgrad, maximize, capturable, differentiable: True is refused.
        foreach, fused: taken for torch's sake; there is one way to launch.

    The states, exp_avg and exp_avg_sq, are fp32, or fp64 of float64 parameters, and sharded like
    their parameter. (Those parameters are updated by operations of torch, not in the one pass.)

    Raises:
        InputError: a hyper-parameter out of range; what is refused.
        OptimizerError: from ``step``; see there.

    Example:
        >>> model = zshard.wrap(nn.Linear(4, 2))
        >>> opt = zshard.AdamW(
        ...     [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}], lr=3e-4
        ... )
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> opt.step()
        >>> opt.zero_grad()
    """

    _decoupled = True

    def __init__(
        self,
        params: ParamGroups,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        refused = dict(amsgrad=amsgrad, maximize=maximize)
        refused |= dict(capturable=capturable, differentiable=differentiable)
        super().__init__(params, lr, betas, eps, weight_decay, **refused)


class Adam(_FusedAdam):
    """Adam (Kingma & Ba 2015, algorithm 1), with L2 regularisation where weight_decay is not 0.

    Arguments and errors as for ``AdamW``, which ``decoupled_weight_decay=True`` would be: refused.
    """

    _decoupled = False

    def __init__(
        self,
        params: ParamGroups,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        if decoupled_weight_decay:
            raise InputError(
                "decoupled_weight_decay=True is not available in zshard.Adam; zshard.AdamW has it"
            )
        refused = dict(amsgrad=amsgrad, maximize=maximize)
        refused |= dict(capturable=capturable, differentiable=differentiable)
        super().__init__(params, lr, betas, eps, weight_decay, **refused)


class SGD(FusedOptimizer):
    """Stochastic gradient descent, with momentum where it is not 0; as torch.optim.SGD.

    Args:
        params: parameters, (name, parameter) pairs, or groups, as for torch.optim.SGD.
        lr: learning rate.
        momentum: of the gradient's running sum; 0 for none, and then only steps are counted.
        dampening: what of a new gradient does not enter that sum.
        weight_decay: added to the gradient, times the parameter.
        nesterov: look ahead along the momentum (Sutskever et al. 2013).
        maximize: go up instead of down.
        differentiable: True is refused.
        foreach, fused: taken for torch's sake; there is one way to launch.

    Raises:
        InputError: a hyper-parameter out of range; nesterov without momentum or with dampening;
            differentiable.
        OptimizerError: from ``step``; see there.
    """

    def __init__(
        self,
        params: ParamGroups,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _refuse("SGD", differentiable=differentiable)
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening)
        defaults |= dict(weight_decay=weight_decay, nesterov=nesterov, maximize=maximize)
        super().__init__(params, defaults)

    def _check(self, group: Mapping[str, Any]) -> None:
        _not_negative(group, "lr", "momentum", "weight_decay")
        momentum, dampening = group["momentum"], _number("dampening", group["dampening"])
        if group["nesterov"] and (momentum <= 0 or dampening != 0):
            raise InputError(
                f"nesterov=True with momentum={momentum} and dampening={dampening}: it takes a "
                "momentum and no dampening"
            )

    def _state_names(self, states: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        # A momentum of 0 leaves the sums as they are, for when it is another again.
        has_sums = any(group["momentum"] != 0 for group in self.param_groups) or any(
            "momentum_buffer" in values for values in states
        )
        return ("momentum_buffer",) if has_sums else ()

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
        return tuple(_number(name, group[name]) for name in names)

    def _update(self, kind: Kind, bucket: Bucket, active: list[bool], hypers: list[Hyper]) -> None:
        super()._update(kind, bucket, active, hypers)
        if any(active) and bucket.states and not all(hyper[1] for hyper in hypers):
            # A sum begins, undamped, with its first step that has momentum, whatever came before.
            idle = bucket.hypers[:, 1] == 0
            bucket.steps -= idle.long() if all(active) else idle * bucket.active

    def _torch_settings(self) -> dict[str, Any]:
        return {}

    def _rules(self) -> tuple[Callable[..., None], Rule]:
        return ops.sgd_, wide_sgd
