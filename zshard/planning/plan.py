"""``zshard.plan``: what a model takes and sends on every rank, and how long a step lasts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from ..errors import InputError
from ..flags import require_flags
from ..precision import Precision
from ..strategy import Choice, zero_name
from ..transports.transport import Transport, require_transport
from .check import check
from .fit import Alternative, Fit, alternatives, fit
from .footprint import OPTIMIZERS, Collective, Holding, SharedBuffers
from .machine import Machine
from .timeline import Timeline

MOST_RANKS = 1 << 30  # the layout counts elements of all of them in 64 bits


@dataclass(frozen=True)
class Setup:
    """How a model is to be trained: what ``Plan.changed`` may change."""

    world_size: int
    strategy: Choice
    precision: Precision
    optimizer: str
    prefetch: int
    checkpointing: bool
    comm: Transport = "auto"

    def __post_init__(self) -> None:
        if type(self.world_size) is not int or not 1 <= self.world_size <= MOST_RANKS:
            raise InputError(
                f"world_size={self.world_size!r}: expected a number of ranks, 1 to {MOST_RANKS:,}"
            )
        if not isinstance(self.precision, Precision):
            raise InputError(f"precision={self.precision!r}: expected a zshard.Precision")
        if type(self.prefetch) is not int or self.prefetch < 0:
            raise InputError(
                f"prefetch={self.prefetch!r}: expected a whole number of units, 0 or more"
            )
        if not isinstance(self.optimizer, str) or self.optimizer not in OPTIMIZERS:
            raise InputError(
                f"optimizer={self.optimizer!r}: expected one of {', '.join(OPTIMIZERS)}"
            )
        require_flags(checkpointing=self.checkpointing)
        require_transport(self.comm)


@dataclass(frozen=True)
class Activations:
    """What forward keeps for backward, and what is alive beside it, when that is most.

    Attributes:
        source: "measured" on fake tensors, "given", or "not counted".
        at: the phase and unit when they are most; "" if that is not known.
    """

    bytes: int
    source: str
    at: str = ""


@dataclass(frozen=True)
class UnitPlan:
    """What one unit takes on a rank."""

    name: str
    parameters: int  # elements, of the whole unit
    holding: Holding
    full_buffer: int  # bytes while the unit is gathered; 0 where whole parameters stay
    reduce_buffers: int  # bytes while it is reduced
    activations: int  # bytes that it keeps from its forward to its backward

    @property
    def peak(self) -> int:
        """Bytes of all of it at once."""
        buffers = self.full_buffer + self.reduce_buffers
        return self.holding.states + buffers + self.activations


class _Again(Protocol):
    """Plans the same model in another way."""

    def __call__(self, setup: Setup, *, timed: bool = True) -> Plan: ...


@dataclass(frozen=True)
class Plan:
    """What a model takes and sends on each rank; the padding is that of the last, which has most.

    Attributes:
        setup: what was asked for.
        parameters: elements of the model.
        units: name, elements, and bytes of each unit.
        buffers: bytes of the full buffers and of the reduce buffers, which units share.
        activations: bytes at the peak, where they come from, and when that is.
        collectives: of a step; beside them ranks tell each other a few hundred bytes.
        timeline: the predicted step on ``machine``; None without one, or without a batch.
        flops: of a rank's step, in matrix products; None without a batch.
        hbm: bytes of a device; None if not given.
    """

    setup: Setup
    parameters: int
    units: tuple[UnitPlan, ...]
    buffers: SharedBuffers
    activations: Activations
    collectives: tuple[Collective, ...]
    machine: Machine | None
    timeline: Timeline | None
    flops: int | None
    hbm: float | None
    _again: _Again

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.setup.world_size

    @property
    def strategy(self) -> str:
        """Of all units, by its ZeRO name; "mixed" where they were chosen one by one."""
        chosen = self.setup.strategy
        return zero_name(chosen) if isinstance(chosen, str) else "mixed"

    @property
    def comm(self) -> str | None:
        """What carries the collectives, "group" or "peer"; None where no times are predicted."""
        if self.machine is None or self.timeline is None:
            return None
        return "peer" if self.machine.in_memory(self.setup.comm, self.world_size) else "group"

    @property
    def holding(self) -> Holding:
        """Bytes of parameters, gradients, masters, optimizer and padding, of all units."""
        return sum((unit.holding for unit in self.units), Holding())

    @property
    def peak(self) -> int:
        """Bytes when most is there. States and buffers stay, so activations decide when."""
        buffers = self.buffers.full + self.buffers.reduce
        return self.holding.states + buffers + self.activations.bytes

    @property
    def peak_at(self) -> str:
        """When that is: a phase and a unit, from the second step on."""
        return self.activations.at or "backward"

    def __str__(self) -> str:
        """What ``zshard plan`` prints."""
        from .report import report  # not above: it is made of plans

        return report(self, None if self.hbm is None else self.fit(), title="The model")

    @property
    def step_seconds(self) -> float | None:
        """Predicted time of a step, in seconds; None without a batch."""
        return None if self.timeline is None else self.timeline.seconds

    @property
    def exposed_seconds(self) -> float | None:
        """Of these, the seconds for which computing waits for communication."""
        return None if self.timeline is None else self.timeline.exposed

    def changed(self, **changes: Any) -> Plan:
        """The same with other fields of its ``setup``, ``world_size`` or ``prefetch`` say.

        Raises:
            InputError: for values that ``zshard.plan`` does not take.
        """
        return self._again(replace(self.setup, **changes))

    def peak_over(self, world_size: int) -> int:
        """Bytes of the peak over another number of ranks; its machine need not join that many."""
        return self._again(replace(self.setup, world_size=world_size), timed=False).peak

    def with_world_size(self, world_size: int) -> Plan:
        """The same over another number of ranks."""
        return self.changed(world_size=world_size)

    def with_strategy(self, strategy: str) -> Plan:
        """The same with another strategy for all units."""
        return self.changed(strategy=strategy)

    def fit(self, hbm: float | None = None) -> Fit:
        """What fits into ``hbm`` bytes a device; None: those the plan was made with.

        Raises:
            InputError: for a capacity that is no positive number.
        """
        return fit(self, self.hbm if hbm is None else hbm)

    def alternatives(self) -> list[Alternative]:
        """What would change the answer, what helps most first; see ``Alternative``."""
        return alternatives(self)

    def check(self, model: nn.Module) -> None:
        """Make sure that a wrapped model takes what was planned, within 2 % of every kind and unit.

        Call it after the first step: before, gradients and states are not there. Activations are
        not zshard's memory and not compared; nor is what accumulation in ``no_sync`` takes besides.
        States of other optimizers than zshard's are not counted, and so are found missing.

        Raises:
            PlanError: with every kind and unit that differs.
        """
        check(self, model)

    def to_dict(self) -> dict[str, object]:
        """All of it, as ``zshard plan --json`` prints it; bytes and seconds."""
        line = self.timeline
        return {
            "world_size": self.world_size,
            "strategy": self.strategy,
            "precision": {
                name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
                for name, value in vars(self.setup.precision).items()
            },
            "optimizer": self.setup.optimizer,
            "prefetch": self.setup.prefetch,
            "checkpointing": self.setup.checkpointing,
            "comm": self.comm,
            "model_parameters": self.parameters,
            "per_rank": {
                **_as_dict(self.holding),
                "full_buffers": self.buffers.full,
                "reduce_buffers": self.buffers.reduce,
                "activations": self.activations.bytes,
                "peak": self.peak,
            },
            "peak_at": self.peak_at,
            "activations_source": self.activations.source,
            "units": [
                {
                    "name": unit.name,
                    "model_parameters": unit.parameters,
                    **_as_dict(unit.holding),
                    "full_buffers": unit.full_buffer,
                    "reduce_buffers": unit.reduce_buffers,
                    "activations": unit.activations,
                    "peak": unit.peak,
                }
                for unit in self.units
            ],
            "collectives": [asdict(each) for each in self.collectives],
            "machine": None if self.machine is None else self.machine.name,
            "flops": self.flops,
            "step_seconds": self.step_seconds,
            "exposed_seconds": self.exposed_seconds,
            "communication_seconds": None if line is None else line.communication,
            "timeline": None if line is None else [span._asdict() for span in line.spans],
        }


def _as_dict(holding: Holding) -> dict[str, int]:
    return {**asdict(holding), "states": holding.states}
