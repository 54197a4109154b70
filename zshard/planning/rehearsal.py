"""One step on fake tensors: what a model's forward and backward keep and compute, unit by unit.

The plain model runs as it would in a sharded step: whole parameters in the compute dtype, the
gradients of a unit freed once all of them are there. Nothing has values or memory, so a model of
any size runs in the time that Python takes to call its ops.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from ..containers import cast_floating, tensors_in
from ..errors import InputError
from ..precision import Precision
from ..unitmap import UnitSpec, flat_groups
from ..units.forward_io import ForwardIO
from .gathers import Event, Happening
from .inputs import BatchLike, inputs_of, like
from .untouched import untouched
from .work import Work, call_of, run


@dataclass
class UnitWork:
    """What one unit computes in a step, on one rank."""

    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)  # recomputation included
    reached: bool = False  # by backward
    reduced: bool = False  # a gradient of it is made
    kept: int = 0  # bytes alive after forward that were not before: for backward, and the output


@dataclass(frozen=True)
class Rehearsal:
    """What a step keeps and computes on one rank.

    Attributes:
        activations: the most bytes that are alive at once besides parameters, buffers of modules
            and the batch: what forward keeps for backward, what ops put out, what is cast of the
            batch, and gradients that are not packed yet.
        at: when that is, a phase and a unit ("backward blocks.3").
        order: the units that forward comes to, in its order, the root first.
        happenings: what the step came to, for ``gathers_of``.
    """

    activations: int
    at: str
    units: tuple[UnitWork, ...]
    order: tuple[int, ...]
    happenings: tuple[Happening, ...]

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, forward and backward."""
        parts = (part for unit in self.units for part in (unit.forward, unit.backward))
        return sum(call.flops * count for part in parts for call, count in part.items())


def rehearse(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    precision: Precision,
    batch: BatchLike,
    *,
    checkpointing: bool,
) -> Rehearsal:
    """Run a step of ``model`` on fake tensors; the model is as before afterwards.

    Whether gradients are recorded where it is called does not matter.

    Args:
        specs: the unit map, the root first.
        batch: of one rank.
        checkpointing: recompute every unit but the root in backward, whatever the model does.

    Raises:
        InputError: for a batch that is none, or a model that does not run without values.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    meter = Meter(specs)
    try:
        with ExitStack() as stack:
            stack.enter_context(untouched(model))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.set_detect_anomaly(False))  # it looks at values
            stack.enter_context(fake)
            stack.enter_context(_InPlaceOf(_set_fakes(model, specs, precision)))
            _cast_as_wrap_does(model, precision)
            for index, spec in enumerate(specs):
                stack.enter_context(meter.watch(index, spec))
            if checkpointing:
                for spec in specs[1:]:
                    _recompute(spec.module)
            args, kwargs, loss_of = inputs_of(batch, model)
            meter.ignore([*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))])
            with meter:
                loss = loss_of(model(*args, **kwargs))
                meter.begin_backward()
                loss.backward()  # type: ignore[no-untyped-call]
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"the model does not run on tensors without values ({type(error).__name__}: {error}); "
            "pass what its forward takes as batch=, or else activations=BYTES"
        ) from error
    return meter.result()


class Meter(TorchDispatchMode):
    """Counts the bytes alive and the work done, by the phase and unit that is under way."""

    def __init__(self, specs: Sequence[UnitSpec]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._specs = specs
        self._work = [UnitWork() for _ in specs]
        self._order: list[int] = []
        self._happenings: list[Happening] = []
        self._inside = [0]  # the units whose modules are being called; the root encloses all
        self._backward = False
        self._alive: dict[int, weakref.ref[Any]] = {}  # storages, by their address
        self._ignored: dict[int, torch.UntypedStorage] = {}  # held, as are their addresses
        self._outputs = WeakIdKeyDictionary()
        self._bytes = self._peak = 0
        self._at = ""

    def ignore(self, tensors: Sequence[Tensor]) -> None:
        """Leave out what is no activation."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._ignored = {storage._cdata: storage for storage in storages}

    @property
    def total(self) -> Work:
        """The calls of all units, forward and backward."""
        return sum((part for unit in self._work for part in (unit.forward, unit.backward)), Work())

    def begin_backward(self) -> None:
        """Attribute what follows to backward."""
        self._backward, self._inside = True, [0]
        self._happenings.append(Happening(Event.BACKWARD, 0))

    def result(self) -> Rehearsal:
        """What was counted."""
        for spec, work in zip(self._specs, self._work, strict=True):
            if spec.parent is not None:  # what a unit keeps is not what the one around it keeps
                self._work[spec.parent].kept -= work.kept
        for work in self._work:  # where an output does not outlive the unit around it
            work.kept = max(work.kept, 0)
        order = tuple(dict.fromkeys(self._order))
        return Rehearsal(self._peak, self._at, tuple(self._work), order, tuple(self._happenings))

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        out = run(func, args, kwargs or {})
        call = call_of(func, args, kwargs or {}, out)
        if call is not None:
            unit = self._work[self._inside[-1]]
            (unit.backward if self._backward else unit.forward)[call] += 1
        for item in tree_leaves(out):
            if isinstance(item, Tensor):
                self._note(item)
        if self._bytes > self._peak:
            phase = "backward" if self._backward else "forward"
            unit_name = self._specs[self._inside[-1]].label
            self._peak, self._at = self._bytes, f"{phase} {unit_name}"
        return out

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout is torch.sparse_coo:  # a gradient, of nn.Embedding(sparse=True) say
            self._note(tensor._indices())
            self._note(tensor._values())
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._ignored:
            return

        def freed(_: object) -> None:
            del self._alive[key]
            self._bytes -= nbytes

        self._alive[key] = weakref.ref(storage, freed)
        self._bytes += nbytes

    # --- which unit is under way -----------------------------------------------------------------

    @contextmanager
    def watch(self, index: int, spec: UnitSpec) -> Iterator[None]:
        """Attribute to a unit what its module does, and free its gradients when they are there."""
        leaves = [module._parameters[name] for o in spec.params for module, name in o.sites[:1]]
        trained = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        missing = {id(leaf) for leaf in trained}

        # Of the calls under way. The module may call itself: a part of the call around it.
        calls: list[ForwardIO] = []

        def happen(event: Event) -> None:
            if index > 0 and len(calls) <= 1:  # the root stays until all is over
                self._happenings.append(Happening(event, index))

        def before(module: nn.Module, args: object, kwargs: object) -> None:
            calls.append(ForwardIO())
            calls[-1].enter((args, kwargs))
            self._inside.append(index)
            happen(Event.AGAIN if self._backward else Event.FORWARD)
            if not self._backward:
                self._order.append(index)
                self._work[index].kept -= self._bytes

        def after(module: nn.Module, args: object, output: object) -> None:
            self._inside.pop()
            watched = calls[-1].leave(output)  # backward comes to what it made, as in a real step
            if self._backward:
                happen(Event.OUTPUT_AGAIN)
            else:
                self._work[index].kept += self._bytes
                happen(Event.OUTPUT if watched else Event.OUTPUT_APART)
            calls.pop()

            def reached(inner: bool, grad: Tensor) -> None:
                happen(Event.REACHED)
                self._work[index].reached = True
                if not inner:  # else it is the output of a unit inside, which has computed it
                    self._inside = [0, index]

            for tensor in watched:
                tensor.register_hook(partial(reached, tensor in self._outputs))  # type: ignore[no-untyped-call]
                self._outputs[tensor] = True

        def arrived(leaf: Tensor) -> None:
            self._work[index].reduced = True
            missing.discard(id(leaf))
            if not missing:
                # As packing reads them, which makes memory only of sparse ones, all at once.
                dense = [each.grad.to_dense() for each in trained if each.grad is not None]
                del dense
                for each in trained:
                    each.grad = None
                self._inside = [0]
                missing.update(id(each) for each in trained)  # they may come once more
                if len(trained) == len(leaves):  # else a node may yet read a frozen weight
                    happen(Event.COMPLETE)

        handles = [
            spec.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            spec.module.register_forward_hook(after, always_call=True),
            *(each.register_post_accumulate_grad_hook(arrived) for each in trained),  # type: ignore[no-untyped-call]
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _set_fakes(
    model: nn.Module, specs: Sequence[UnitSpec], precision: Precision
) -> dict[int, Tensor]:
    """Install fake parameters, in their compute dtypes, and fake buffers; by the real ones' ids."""
    made: dict[int, Tensor] = {}
    for spec in specs:
        for dtypes, group in flat_groups(spec, precision):
            for owned in group:
                param = owned.param
                leaf = nn.Parameter(like(param, dtypes.compute), param.requires_grad)
                made[id(param)] = leaf
                for module, attribute in owned.sites:
                    module._parameters[attribute] = leaf
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                fake = made.setdefault(id(buffer), like(buffer, buffer.dtype))
                module._buffers[name] = fake
    return made


class _InPlaceOf(TorchFunctionMode):
    """Has fakes used where a module finds the real tensors otherwise, in a list of its own say."""

    def __init__(self, fakes: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        def fake(leaf: object) -> object:
            return self._fakes.get(id(leaf), leaf)

        args, kwargs = tree_map(fake, (args, kwargs or {}))
        return func(*args, **kwargs)


def _cast_as_wrap_does(model: nn.Module, precision: Precision) -> None:
    """Cast what the model is given, beside the batch, and what it returns.

    Hooks, ahead of the model's own and behind them, as wrap's are.
    """
    inputs = precision.compute if precision.cast_inputs else None
    outputs = precision.output
    calls = 0  # under way: what the model gives itself is not cast

    def before(module: nn.Module, args: object, kwargs: object) -> Any:
        nonlocal calls
        calls += 1
        return None if inputs is None or calls > 1 else cast_floating((args, kwargs), inputs)

    def after(module: nn.Module, args: object, output: object) -> object:
        nonlocal calls
        calls -= 1
        return None if outputs is None or calls > 0 else cast_floating(output, outputs)

    model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    model.register_forward_hook(after)


def _recompute(module: nn.Module) -> None:
    """Checkpoint ``module``: it keeps nothing but its input for backward."""
    forward = module.forward

    def recomputed(*args: object, **kwargs: object) -> object:
        call = partial(forward, **kwargs)
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False)

    module.forward = recomputed
