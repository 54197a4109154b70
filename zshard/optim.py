"""AdamW and Adam over shards: every shard of the model in one pass, clip factor and cast included.

Also for plain, unsharded fp32 parameters, which get the same bits: an element's update does not
depend on where it lies. (Other elementwise optimizers come from torch.optim, and work on shards.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from . import ops
from .batches import Batch, Hyper, Kind, has_grad, kind_of
from .errors import InputError, OptimizerError
from .param import Sharded
from .schedule import Schedule

ParamGroups = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


class _FusedAdam(Optimizer):
    """Adam's two variants share everything but the place of the weight decay."""

    _decoupled: bool

    def __init__(
        self,
        params: ParamGroups,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        amsgrad: bool,
    ) -> None:
        if not lr >= 0 or not eps >= 0 or not weight_decay >= 0:
            raise InputError(
                f"lr={lr}, eps={eps}, weight_decay={weight_decay}: none may be negative"
            )
        if not all(0 <= beta < 1 for beta in betas):
            raise InputError(f"betas={betas}: both must lie in [0, 1)")
        if amsgrad:
            raise InputError(
                "amsgrad=True is not available in zshard's optimizers; torch.optim's AdamW has it "
                "and works on wrapped models"
            )
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)
        self._batches: dict[Kind, Batch] = {}
        self._built_for: list[tuple[int, type, bool]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient on any rank; the others are left alone.

        Raises:
            OptimizerError: parameters that were wrapped after the optimizer had taken a step on
                them, or whose master is not fp32.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._build()
        for kind, batch in self._batches.items():
            if kind.schedule is not None:
                kind.schedule.backward.require_gradients()
            self._update(kind, batch)
        for schedule in dict.fromkeys(kind.schedule for kind in self._batches):
            if schedule is not None:
                schedule.renew()
        return loss

    def _update(self, kind: Kind, batch: Batch) -> None:
        active = [has_grad(row.param) for row in batch.rows]
        if not any(active):
            return
        if kind.schedule is not None:
            kind.schedule.crew.note("step", kind.schedule.root)
        batch.refresh([self._hyper(group) for group in self.param_groups], active)
        batch.before_write()
        ops.adamw_(
            batch.masters,
            batch.lows,
            batch.exp_avgs,
            batch.exp_avg_sqs,
            batch.grads(),
            batch.sends(),
            batch.segments,
            batch.hypers,
            batch.steps,
            active=None if all(active) else batch.active,
            grad_scale=None if kind.schedule is None else kind.schedule.reducer.grad_scale,
        )
        batch.written()

    def _hyper(self, group: dict[str, Any]) -> Hyper:
        lr, eps, decay = (float(group[key]) for key in ("lr", "eps", "weight_decay"))
        beta1, beta2 = map(float, group["betas"])
        return Hyper(lr, beta1, beta2, eps, decay, float(self._decoupled))

    def _build(self) -> None:
        """Lay out batches and states anew, if the parameters are not those of last time."""
        params = [p for group in self.param_groups for p in group["params"]]
        signature = [(id(p), type(p), _is_trained(p)) for p in params]
        if signature == self._built_for:
            return
        was = {key: kind for key, kind, _ in self._built_for}
        for param in params:
            if was.get(id(param), type(param)) is not type(param) and self.state.get(param):
                raise OptimizerError(
                    "the optimizer had taken steps before zshard.wrap, and its state is that of "
                    "whole parameters. Wrap the model first, or make a new optimizer."
                )
        saved = [(p, self.state.pop(p)) for p in params if self.state.get(p)]
        self._batches = {}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if _is_trained(param):
                    self._batches.setdefault(kind_of(param), Batch()).add(param, number)
        for kind, batch in self._batches.items():
            batch.tabulate()
            for step, row in zip(batch.steps, batch.rows, strict=True):
                self.state[row.param] = {
                    "step": step,
                    "exp_avg": batch.exp_avgs[row.shard][row.begin : row.end],
                    "exp_avg_sq": batch.exp_avg_sqs[row.shard][row.begin : row.end],
                }
            if kind.schedule is not None:
                kind.schedule.optimizers.add(self)
        self._built_for = signature
        self._restore(saved)

    def state_bytes(self, schedule: Schedule) -> int:
        """Bytes of the states of the shards of one wrapped model, padding included."""
        batches = [b for kind, b in self._batches.items() if kind.schedule is schedule]
        return sum(t.nbytes for b in batches for t in (*b.exp_avgs, *b.exp_avg_sqs))

    # --- state_dict ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's: of each parameter, this rank's slices of the states, 1-D fp32."""
        self._build()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the states and the hyper-parameters of ``state_dict``.

        Raises:
            OptimizerError: if it is of other parameters, or of another number of ranks.
        """
        self._build()
        params = [p for group in self.param_groups for p in group["params"]]
        count = sum(len(group["params"]) for group in state_dict["param_groups"])
        if count != len(params):
            raise OptimizerError(
                f"the state is of {count} parameters, the optimizer has {len(params)}"
            )
        saved = {params[int(i)]: values for i, values in state_dict["state"].items()}
        self._check_state(saved)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._built_for = []
        self._build()
        self._restore(list(saved.items()))

    def _check_state(self, saved: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        for param, values in saved.items():
            for name, own in self.state.get(param, {}).items():
                if name not in values or values[name].shape != own.shape:
                    label = param.fqn if isinstance(param, Sharded) else tuple(param.shape)
                    got = tuple(values[name].shape) if name in values else "nothing"
                    raise OptimizerError(
                        f"state {name!r} of {label}: expected {tuple(own.shape)}, got {got}. "
                        "A state_dict holds one rank's shards, and fits the same model, unit map "
                        "and number of ranks."
                    )

    def _restore(self, states: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> None:
        for param, values in states:
            own = self.state.get(param)
            if own:
                for name, state in own.items():
                    state.copy_(values[name])
            else:  # frozen since; it may be trained again
                self.state[param] = values


def _is_trained(param: torch.Tensor) -> bool:
    """Whether there are gradients for ``param``, or others of its shard."""
    return not isinstance(param, Sharded) or param.flat.requires_grad


class AdamW(_FusedAdam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), in one pass.

    Args:
        params: parameters, (name, parameter) pairs, or groups, as for torch.optim.AdamW.
        lr: learning rate.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: per step, times lr.
        amsgrad: refused; there for the error message.

    Raises:
        InputError: a hyper-parameter out of range.
    """

    _decoupled = True

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad)


class Adam(_FusedAdam):
    """Adam (Kingma & Ba 2015, algorithm 1), with L2 regularisation where weight_decay is not 0.

    Arguments and errors as for ``AdamW``.
    """

    _decoupled = False

    def __init__(
        self,
        params: ParamGroups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad)
