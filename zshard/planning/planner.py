"""``zshard.plan``: a model planned, in as many ways as are asked for."""

from __future__ import annotations

import threading

import torch
from torch import nn

from ..errors import InputError
from ..layout import Layout
from ..precision import Precision
from ..strategy import Choice, strategy_of
from ..transports.transport import Transport
from ..unitmap import Units, UnitSpec, check_kinds, flat_groups, unit_map
from ..whole_files import StrPath
from ..wrapping.arguments import check_precision
from ..wrapping.overlaps import check_apart
from .fit import require_bytes
from .footprint import (
    OPTIMIZERS,
    Collective,
    FlatPlan,
    Holding,
    buffers_of,
    collectives_of,
    reduce_buffers_of,
    slot_bytes,
)
from .forecast import forecast
from .gathers import Gathers, gathers_of, one_call_each
from .inputs import BatchLike, text_of
from .machine import Link, Machine
from .models import model_of
from .plan import Activations, Plan, Setup, UnitPlan
from .rehearsal import Rehearsal, UnitWork, rehearse

_ALONE = threading.RLock()  # a rehearsal has the modules hold fake parameters for a while


def plan(
    model: nn.Module | StrPath | object,
    world_size: int,
    *,
    strategy: Choice = "zero3",
    units: Units = None,
    precision: Precision | None = None,
    optimizer: str = "adamw",
    prefetch: int = 1,
    batch: BatchLike | None = None,
    checkpointing: bool = False,
    activations: int | None = None,
    hbm: float | None = None,
    machine: Machine | StrPath | None = "h100",
    network: Link | float | None = None,
    comm: Transport = "auto",
    backend: str | None = None,
) -> Plan:
    """Say what ``zshard.wrap`` with these arguments takes on each rank, and sends in a step.

    (``wrap``'s ``mesh`` and ``ignored`` have no counterpart here: such models are not planned.)

    By the layout code of wrap itself, so bytes are exact: tests hold them against
    ``zshard.memory`` and ``zshard.stats``. The model may be on the meta device, and nothing of its
    size is allocated. With a batch, a step is run on fake tensors: activations are exact as well
    (those of the kernels that a CPU would use, without their workspaces), and the step's time is
    predicted from what it computes and sends, in the order of the real schedule.

    Args:
        model: a module that is not wrapped; "gpt:7b", of the sizes of ``zshard train``; a
            ``transformers`` configuration, or the path of its config.json (or the folder of that).
        world_size: ranks to shard over.
        strategy, units, precision, prefetch: as for ``wrap``.
        optimizer: "adamw", "adam", "momentum" (SGD with it) or "sgd".
        batch: of a rank: (sequences, tokens) for a language model; or the model's inputs, a tensor,
            a tuple of them or a dict, whose values do not matter (``requires_grad`` does).
        checkpointing: recompute every unit but the root in backward. What the model recomputes by
            itself counts in any case.
        activations: bytes that a rank's activations take at the peak, where there is no batch.
        hbm: bytes of a device, for ``fit`` and ``alternatives``.
        machine: "a100", "h100" or "h200", from their datasheets (fp32's products at TF32's rate);
            a ``Machine``; or the file that ``zshard plan --calibrate`` has measured; None: predict
            no times.
        network: between all ranks, in place of the machine's; a number is bytes a second.
        comm: as for ``wrap``; "auto": over shared memory where the machine was measured with it. A
            step's time depends on it; with ``backend="nccl"`` the reduce buffers do, too.
        backend: "nccl" or "gloo", whose reductions take different buffers; None: gloo for a machine
            without GPUs, or else NCCL where torch sees a GPU.

    Raises:
        MissingPackage: if the model is a configuration, and transformers is not installed.
        InputError: for an argument that cannot be used, or a model that does not run without
            values.
        WrapError: for parameters that ``wrap`` refuses.

    Example:
        >>> planned = zshard.plan("gpt:7b", world_size=8, precision=zshard.Precision.bf16())
        >>> f"{planned.to_dict()['per_rank']['states'] / 1e9:.1f} GB"
        '15.8 GB'
    """
    if activations is not None and (type(activations) is not int or activations < 0):
        raise InputError(f"activations={activations!r}: expected bytes, 0 or more")
    if activations is not None and batch is not None:
        raise InputError("activations= and batch=: give the bytes, or what they are measured with")
    if backend not in (None, "nccl", "gloo"):
        raise InputError(f"backend={backend!r}: expected 'nccl', 'gloo' or None")
    if hbm is not None:
        require_bytes(hbm)
    on = None if machine is None else Machine.of(machine)
    if on is not None and network is not None:
        on = on.with_network(network)
    policy = Precision() if precision is None else precision
    setup = Setup(world_size, strategy, policy, optimizer, prefetch, checkpointing, comm)
    text = text_of(batch)
    context = 0 if text is None else text[1]
    nccl = torch.cuda.is_available() and (on is None or not on.sums_on_host)
    if backend is not None:
        nccl = backend == "nccl"
    nccl = nccl and comm != "peer"  # every rank's row is read
    with _ALONE:
        built = model_of(model, context)
        specs = unit_map(built, units, ())
        check_kinds(specs)
        check_apart(built, specs)
        return _Planner(built, specs, batch, activations, nccl, on, hbm).plan(setup)


class _Planner:
    """Plans one model in several ways; runs it once for each precision, checkpointed or not."""

    def __init__(
        self,
        model: nn.Module,
        specs: list[UnitSpec],
        batch: BatchLike | None,
        activations: int | None,
        nccl: bool,
        machine: Machine | None,
        hbm: float | None,
    ) -> None:
        self._model, self._specs, self._batch, self._given = model, specs, batch, activations
        self._nccl, self._machine, self._hbm = nccl, machine, hbm
        self._rehearsals: dict[tuple[object, ...], Rehearsal] = {}

    def plan(self, setup: Setup, *, timed: bool = True) -> Plan:
        check_precision(self._specs, setup.precision)
        in_memory = False
        if timed and self._batch is not None and self._machine is not None:
            in_memory = self._machine.in_memory(setup.comm, setup.world_size)
        rehearsal = self._rehearse(setup)
        flats = [self._flats(spec, setup) for spec in self._specs]
        states = OPTIMIZERS[setup.optimizer]
        gathers = self._gathers(rehearsal, flats, setup)
        units: list[UnitPlan] = []
        sent: list[Collective] = []
        for index, (spec, own) in enumerate(zip(self._specs, flats, strict=True)):
            work = UnitWork(reduced=True) if rehearsal is None else rehearsal.units[index]
            units.append(self._unit(spec, own, states, work.kept))
            count = gathers.counts[index]
            sent += collectives_of(spec.label, own, count, reduced=work.reduced)
        line = None
        if timed and rehearsal is not None and self._machine is not None:
            line = forecast(
                [unit.name for unit in units],
                flats,
                rehearsal,
                self._machine,
                prefetch=setup.prefetch,
                optimizer_states=states,
                nccl=self._nccl,
                in_memory=in_memory,
            )
        return Plan(
            setup=setup,
            parameters=sum(unit.parameters for unit in units),
            units=tuple(units),
            buffers=buffers_of(flats, gathers.slots, nccl=self._nccl),
            activations=self._activations(rehearsal),
            collectives=tuple(sent),
            machine=self._machine,
            timeline=line,
            flops=None if rehearsal is None else rehearsal.flops,
            hbm=self._hbm,
            _again=self.plan,
        )

    def _gathers(
        self, rehearsal: Rehearsal | None, flats: list[list[FlatPlan]], setup: Setup
    ) -> Gathers:
        parents = [spec.parent for spec in self._specs]
        happenings = one_call_each(parents) if rehearsal is None else rehearsal.happenings
        in_slots = [slot_bytes(each) > 0 for each in flats]
        return gathers_of(happenings, parents, in_slots, setup.prefetch)

    def _unit(self, spec: UnitSpec, flats: list[FlatPlan], states: int, kept: int) -> UnitPlan:
        return UnitPlan(
            name=spec.label,
            parameters=sum(owned.param.numel() for owned in spec.params),
            holding=sum((flat.holding(states) for flat in flats), Holding()),
            full_buffer=sum(flat.full_bytes for flat in flats if not flat.stays),
            reduce_buffers=reduce_buffers_of(flats, nccl=self._nccl),
            activations=kept,
        )

    def _flats(self, spec: UnitSpec, setup: Setup) -> list[FlatPlan]:
        return [
            FlatPlan(
                Layout.of([owned.param for owned in group], setup.world_size),
                dtypes,
                strategy_of(setup.strategy, spec.name, spec.module),
                trained=any(owned.param.requires_grad for owned in group),
            )
            for dtypes, group in flat_groups(spec, setup.precision)
        ]

    def _activations(self, rehearsal: Rehearsal | None) -> Activations:
        if rehearsal is not None:
            return Activations(rehearsal.activations, "measured", rehearsal.at)
        if self._given is not None:
            return Activations(self._given, "given")
        return Activations(0, "not counted")

    def _rehearse(self, setup: Setup) -> Rehearsal | None:
        if self._batch is None:
            if setup.checkpointing:
                raise InputError("checkpointing=True changes activations, measured with batch=")
            return None
        precision = setup.precision
        key = precision.compute, precision.cast_inputs, precision.output, setup.checkpointing
        with _ALONE:
            if key not in self._rehearsals:
                self._rehearsals[key] = rehearse(
                    self._model,
                    self._specs,
                    precision,
                    self._batch,
                    checkpointing=setup.checkpointing,
                )
            return self._rehearsals[key]
