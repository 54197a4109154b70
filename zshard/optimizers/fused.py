"""What zshard's optimizers share: one op call over every fp32 shard of the model, and its states.

Also for plain, unsharded parameters, which get the same bits: an element's update does not depend
on where it lies. (Other elementwise optimizers come from torch.optim, and work on shards.)
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import Error, InputError, OptimizerError
from ..param import Sharded
from ..schedule import Schedule, live
from ..step.updates import note_states, note_step
from ..units.flat import Flat
from .buckets import Bucket, Hyper, Kind, buckets_of, has_grad, is_trained, require_updatable
from .optim_states import (
    Place,
    as_it_lay,
    as_sharded,
    check_fits,
    saved_states,
    sharded_like,
    slice_of,
)
from .stand_ins import refuse_parameters_of_a_copy
from .wide import Rule, wide_step

Saved = Sequence[tuple[torch.Tensor, dict[str, Any]]]  # parameters and their states
ParamGroups = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]

# What torch.optim's groups say beside the rule: by which kernels it is carried out.
_TORCH_LAUNCHES = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}


class FusedOptimizer(Optimizer):
    """An optimizer whose step is one op call for each kind of shard, but for float64 ones."""

    def __init__(self, params: ParamGroups, defaults: dict[str, Any]) -> None:
        try:
            super().__init__(params, defaults)
        except InputError:
            raise
        except (TypeError, ValueError) as error:  # torch's: no parameters, or something else
            raise InputError(f"{type(self).__name__}: {error}") from error
        self._forget_layout()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's, of a copy or a pickle; the next step lays out buckets and states anew."""
        super().__setstate__(state)
        self._forget_layout()

    def _forget_layout(self) -> None:
        self._buckets: dict[Kind, Bucket] = {}
        self._built_for: Sequence[tuple[int, type, int, bool, Place | None, tuple[str, ...]]] = []
        self._laid_out: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # the states, made for it

    @abstractmethod
    def _state_names(self, states: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
        """A parameter's states, of its shard's size; ``states``: what is there, or will be."""

    @abstractmethod
    def _hyper(self, group: dict[str, Any]) -> Hyper:
        """A group's row in the op's table."""

    @abstractmethod
    def _check(self, group: Mapping[str, Any]) -> None:
        """Raise InputError if a group has settings out of range."""

    @abstractmethod
    def _torch_settings(self) -> dict[str, Any]:
        """What torch.optim's groups say of the rule, and is the same for all of these."""

    @abstractmethod
    def _rules(self) -> tuple[Callable[..., None], Rule]:
        """What takes a step, ``ops.adamw_`` say, and what does that of one float64 parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient on any rank; the others are left alone.

        Raises:
            OptimizerError: parameters that were wrapped after the optimizer had taken a step on
                them, or plain 16-bit ones; or those of a copy of the model that was wrapped.
            InputError: a group's settings that ask for another rule.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.lay_out()
        refuse_parameters_of_a_copy([p for group in self.param_groups for p in group["params"]])
        for kind in self._buckets:
            if kind.schedule is not None:
                kind.schedule.backward.require_gradients()
        for group in self.param_groups:
            if other := self._other_rule(group):
                raise InputError(f"a param group has {other}")
        settings = [self._hyper(group) for group in self.param_groups]
        note_step(type(self).__name__, self.param_groups, settings)
        active = [[has_grad(row.param) for row in bucket.rows] for bucket in self._buckets.values()]
        for (kind, bucket), rows in zip(self._buckets.items(), active, strict=True):
            if any(rows):
                self._update(kind, bucket, rows, settings)
        for schedule in dict.fromkeys(kind.schedule for kind in self._buckets):
            if schedule is not None:
                schedule.renew(behind_step_on=self._laid_out)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's.

        Raises:
            OptimizerError: for whole parameters of a wrapped model.
            InputError: for settings out of range or of another rule, or a parameter twice.
        """
        if isinstance(param_group, dict):
            if other := self._other_rule(param_group):
                raise InputError(f"a param group has {other}")
            self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            require_updatable(self.param_groups[-1]["params"])
        except Error:
            self.param_groups.pop()
            raise

    def _update(self, kind: Kind, bucket: Bucket, active: list[bool], hypers: list[Hyper]) -> None:
        schedule = kind.schedule
        grad_scale = None if schedule is None else schedule.totals.grad_scale
        if grad_scale is not None:
            grad_scale = grad_scale.to(torch.float64 if kind.wide else torch.float32)
        with nullcontext() if schedule is None else schedule.executor.doing("step", schedule.root):
            bucket.refresh(hypers, active)
            bucket.before_write(active)
            op, rule = self._rules()
            if kind.wide:
                update = partial(wide_step, rule, bucket, bucket.grads(), active, hypers)
            else:
                update = partial(op, *bucket.arguments(all(active)))
            with nullcontext() if schedule is None else schedule.updates.change() as change:
                bucket.note_written(active)  # before: after an exception all is gathered again
                if change is not None:
                    change.begun = True
                update(grad_scale)

    def lay_out(self, given: Iterable[Mapping[str, Any]] = ()) -> None:
        """Lay out buckets and states (those ``given``, too) anew, if parameters have changed."""
        grouped = [(p, i) for i, group in enumerate(self.param_groups) for p in group["params"]]
        params = [p for p, _ in grouped]
        names = self._state_names(chain((self.state.get(p, {}) for p in params), given))
        signature = [(id(p), type(p), i, is_trained(p), Place.of(p), names) for p, i in grouped]
        if signature == self._built_for and self._has_own_states():
            return
        was = {key: kind for key, kind, *_ in self._built_for}
        moved = {p for p in params if self.state.get(p) and was.get(id(p), type(p)) is not type(p)}
        if any(self.state[p].get("step", 1) for p in moved):  # 0: only a state_dict laid them out
            raise OptimizerError(
                "the optimizer had taken steps before zshard.wrap, and its state is that of whole "
                "parameters. Wrap the model first, or make a new optimizer."
            )
        places = {key: place for key, _, _, _, place, _ in self._built_for}
        saved = [
            (p, as_it_lay(p, old, self._laid_out.get(p, {}), places.get(id(p))))
            for p in params
            if (old := self.state.get(p)) and p not in moved
        ]
        before, states = self._buckets, dict(self.state)
        # First: it may refuse a parameter, and then all stays as it is.
        self._buckets = buckets_of([each for each in grouped if is_trained(each[0])], names)
        laid_out: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        try:
            for param in params:
                self.state.pop(param, None)
            for kind, bucket in self._buckets.items():
                for step, row in zip(bucket.steps, bucket.rows, strict=True):
                    slices = {n: bucket.states[n][row.shard][row.begin : row.end] for n in names}
                    laid_out[row.param] = {"step": step, **slices}
                    self.state[row.param] = {**laid_out[row.param]}
                if (of := kind.schedule) is not None and self not in of.optimizers:
                    of.optimizers.add(self)
                    weakref.finalize(self, of.pool.ledger.set_optimizer, id(self), 0).atexit = False
            self.tell_ledgers(saved)  # the old states and the new ones are there at once
            self._restore(saved)
        except BaseException:  # a state that does not fit, say: the next step lays out anew
            self._buckets = before
            self.state.clear()
            self.state.update(states)
            self.tell_ledgers()
            raise
        self._laid_out, self._built_for = laid_out, signature
        self.tell_ledgers()

    def _has_own_states(self) -> bool:
        """Whether the states are still those that were laid out; the user may clear or set them."""
        return all(
            self.state.get(param, {}).get(name) is value
            for param, laid_out in self._laid_out.items()
            for name, value in laid_out.items()
        )

    def tell_ledgers(self, replaced: Saved = ()) -> None:
        """Tell the ledgers of the wrapped models what the states take; see ``state_bytes``."""
        for schedule in (each for each in live() if self in each.optimizers):
            nbytes = sum(self.state_bytes(schedule, replaced).values())
            schedule.pool.ledger.set_optimizer(id(self), nbytes)

    def state_bytes(self, schedule: Schedule, replaced: Saved = ()) -> dict[Flat, int]:
        """Bytes of one model's states, and those ``replaced``, by flat buffer, with padding."""
        states = [
            (shard.flat, state)
            for bucket in self._buckets.values()
            for each in bucket.states.values()
            for shard, state in zip(bucket.shards, each, strict=True)
        ]
        # Those of what was frozen since are kept.
        for param, values in (*self.state.items(), *replaced):
            if isinstance(param, Sharded):
                kept = [value for name, value in values.items() if name != "step"]
                states += [(param.flat, each) for each in kept if isinstance(each, torch.Tensor)]
        seen: set[int] = set()
        found: dict[Flat, int] = {}
        for flat, state in states:
            if flat is not None and flat.schedule is schedule:
                storage = slice_of(state).untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    found[flat] = found.get(flat, 0) + storage.nbytes()
        return found

    # --- state_dict ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's, on wrapped models too: of each parameter, states sharded like it.

        The states are those in memory, no copies, but for the counts of steps, which are float32
        as torch's kernels take them. The groups have all that those of the optimizer of the same
        name in torch.optim have, so that it can load them.
        """
        self.lay_out()

        def as_torchs(_: Optimizer, found: dict[str, Any]) -> None:
            states = found["state"]
            for key, param in self._numbered(found).items():
                if key in states:
                    states[key] = sharded_like(param, states[key], self._state_names([states[key]]))
            settings = self._torch_settings() | _TORCH_LAUNCHES
            found["param_groups"] = [settings | group for group in found["param_groups"]]

        with self.register_state_dict_post_hook(as_torchs, prepend=True):  # before the user's
            return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the states and the hyper-parameters of ``state_dict``.

        A state may be sharded like its parameter, whole, or this rank's slice, 1-D. It may come
        from the optimizer of the same name in torch.optim.

        Raises:
            OptimizerError: if it is of other parameters, of another rule, or sharded otherwise.
        """
        self.lay_out()
        saved: dict[torch.Tensor, dict[str, Any]] = {}

        def take_states(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            theirs = [len(group["params"]) for group in given["param_groups"]]
            ours = [len(group["params"]) for group in self.param_groups]
            if theirs != ours:
                raise OptimizerError(
                    f"the state is of groups of {theirs} parameters, the optimizer has groups of "
                    f"{ours}"
                )
            params, others = self._numbered(given), {}
            for key, values in given["state"].items():
                if key not in params:
                    if isinstance(values, dict) and values.keys() & self._state_names([values]):
                        raise OptimizerError(f"the state of {key!r}: no group has such a parameter")
                    others[key] = values  # of all parameters
                elif states := saved_states(values):
                    param, names = params[key], ("step", *self._state_names([states]))
                    check_fits(param, states, self.state.get(param, {}), names)
                    saved[param] = states
            own_groups = [self.own_settings(group) for group in given["param_groups"]]
            return {"state": others, "param_groups": own_groups}

        def put_states(_: Optimizer) -> None:
            self.lay_out(saved.values())
            for param, values in saved.items():
                note_states(type(self).__name__, param, values, self._state_names([values]))
            self._restore(list(saved.items()))
            self.tell_ledgers()

        with (  # between the user's hooks before a load and those after it
            self.register_load_state_dict_pre_hook(take_states),
            self.register_load_state_dict_post_hook(put_states, prepend=True),
        ):
            super().load_state_dict(state_dict)

    def _numbered(self, state_dict: dict[str, Any]) -> dict[object, torch.Tensor]:
        """The parameters under what ``state_dict`` calls them: torch's numbers, or names."""
        calls = [each for group in state_dict["param_groups"] for each in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        return dict(zip(calls, params, strict=True))

    def own_settings(self, group: dict[str, Any]) -> dict[str, Any]:
        """Of a saved group what this optimizer has.

        Raises:
            OptimizerError: if it is of another rule.
        """
        if other := self._other_rule(group):
            raise OptimizerError(f"the state is of an optimizer with {other}")
        foreign = self._torch_settings().keys() | _TORCH_LAUNCHES.keys()
        # torch's load_state_dict adds one of those to the defaults.
        if missing := [name for name in self.defaults if name not in group.keys() | foreign]:
            raise OptimizerError(
                f"the state's groups have no {missing[0]!r}: it is of another optimizer than "
                f"zshard's {type(self).__name__}"
            )
        return {name: value for name, value in group.items() if name not in foreign}

    def _other_rule(self, group: Mapping[str, Any]) -> str:
        """What of a group's settings asks for another rule than this one; "" for nothing."""
        for name, value in self._torch_settings().items():
            if group.get(name, value) != value:
                return (
                    f"{name}={group[name]}; zshard's {type(self).__name__} has {name}={value}, "
                    "another rule. torch.optim's optimizers work on wrapped models too."
                )
        return ""

    def _restore(self, states: Saved) -> None:
        for param, values in states:
            own = self.state.get(param, {})
            if own.keys() <= values.keys():
                for name, state in own.items():
                    as_sharded(param, state).copy_(as_sharded(param, values[name]))
            # Of what is frozen since, which may be trained again, and what else the user keeps.
            names = values.keys() & self._state_names([values])
            self.state[param] = values | {name: slice_of(values[name]) for name in names} | own
