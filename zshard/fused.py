"""What zshard's optimizers share: one op call over every shard of the model, and its states.

Also for plain, unsharded fp32 parameters, which get the same bits: an element's update does not
depend on where it lies. (Other elementwise optimizers come from torch.optim, and work on shards.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from .batches import Batch, Hyper, Kind, has_grad, kind_of
from .errors import OptimizerError
from .param import Sharded
from .schedule import LIVE, Schedule

ParamGroups = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


class FusedOptimizer(Optimizer):
    """An optimizer whose step is one op call for each kind of shard."""

    def __init__(self, params: ParamGroups, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._batches: dict[Kind, Batch] = {}
        self._built_for: list[tuple[object, ...]] = []

    @abstractmethod
    def _state_names(self) -> tuple[str, ...]:
        """The states of a parameter, each of the size of its shard."""

    @abstractmethod
    def _hyper(self, group: dict[str, Any]) -> Hyper:
        """A group's row in the op's table."""

    @abstractmethod
    def _launch(
        self, batch: Batch, active: torch.Tensor | None, grad_scale: torch.Tensor | None
    ) -> None:
        """Call the op."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient on any rank; the others are left alone.

        Raises:
            OptimizerError: parameters that were wrapped after the optimizer had taken a step on
                them, or whose master is not fp32; or those of a copy of the model that was wrapped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.lay_out()
        self._refuse_other_models()
        for kind in self._batches:
            if kind.schedule is not None:
                kind.schedule.backward.require_gradients()
        active = [[has_grad(row.param) for row in batch.rows] for batch in self._batches.values()]
        for (kind, batch), rows in zip(self._batches.items(), active, strict=True):
            self._update(kind, batch, rows)
        for schedule in dict.fromkeys(kind.schedule for kind in self._batches):
            if schedule is not None:
                schedule.renew()
        return loss

    def _refuse_other_models(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        if any(isinstance(p, Sharded) or p.grad is not None for p in params):
            return
        if model := _wrapped_like(params):
            raise OptimizerError(
                f"none of this optimizer's {len(params)} parameters is sharded or has a gradient, "
                f"while a wrapped {model} with parameters of the same shapes has gradients: the "
                "optimizer was given a copy's. Give it those of the wrapped model."
            )

    def _update(self, kind: Kind, batch: Batch, active: list[bool]) -> None:
        if not any(active):
            return
        if kind.schedule is not None:
            kind.schedule.crew.note("step", kind.schedule.root)
        batch.refresh([self._hyper(group) for group in self.param_groups], active)
        batch.before_write()
        grad_scale = None if kind.schedule is None else kind.schedule.reducer.grad_scale
        self._launch(batch, None if all(active) else batch.active, grad_scale)
        batch.written()

    def lay_out(self) -> None:
        """Lay out batches and states anew, if the parameters are not those of last time."""
        params = [p for group in self.param_groups for p in group["params"]]
        names = self._state_names()
        signature: list[tuple[object, ...]] = [
            (id(p), type(p), _is_trained(p), names) for p in params
        ]
        if signature == self._built_for:
            return
        was = {key: kind for key, kind, *_ in self._built_for}
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
                    batch = self._batches.setdefault(kind_of(param), Batch(names))
                    batch.add(param, number)
        for kind, batch in self._batches.items():
            batch.tabulate()
            for step, row in zip(batch.steps, batch.rows, strict=True):
                slices = {n: batch.states[n][row.shard][row.begin : row.end] for n in names}
                self.state[row.param] = {"step": step, **slices}
            if kind.schedule is not None:
                kind.schedule.optimizers.add(self)
        self._built_for = signature
        self._restore(saved)

    def state_bytes(self, schedule: Schedule) -> int:
        """Bytes of the states of the shards of one wrapped model, padding included."""
        batches = [b for kind, b in self._batches.items() if kind.schedule is schedule]
        return sum(t.nbytes for b in batches for states in b.states.values() for t in states)

    # --- state_dict ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's: of each parameter, this rank's slices of the states, 1-D fp32."""
        self.lay_out()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the states and the hyper-parameters of ``state_dict``.

        Raises:
            OptimizerError: if it is of other parameters, or of another number of ranks.
        """
        self.lay_out()
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
        self.lay_out()
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
            if not own:  # frozen since; it may be trained again
                self.state[param] = values
            elif own.keys() <= values.keys():
                for name, state in own.items():
                    state.copy_(values[name])


def _is_trained(param: torch.Tensor) -> bool:
    """Whether there are gradients for ``param``, or others of its shard."""
    return not isinstance(param, Sharded) or param.flat.requires_grad


def _wrapped_like(params: list[torch.Tensor]) -> str | None:
    """The class of a wrapped model that has gradients, and parameters of the shapes of these."""
    shapes = sorted(tuple(p.shape) for p in params)
    for schedule in LIVE:
        if sorted(tuple(p.shape) for p in schedule.parameters()) == shapes:
            schedule.reducer.settle()
            if any(any(flat.grads.present) for flat in schedule.reducer.flats):
                return type(schedule.model).__name__
    return None
