"""``zshard.plan``: what a model will take and send on every rank, without a rank, GPU or memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn

from .errors import InputError
from .footprint import (
    STATES,
    Buffers,
    Collective,
    FlatPlan,
    Holding,
    buffers_of,
    collectives_of,
)
from .gpt import GPT, SIZES, GPTConfig
from .layout import Layout
from .param import Sharded
from .precision import Precision
from .strategy import Choice, strategy_of
from .unitmap import Units, flat_groups, unit_map

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")  # from the least that is sharded to the most
_MOST_DEVICES = 1 << 20
_CONTEXT = 2048  # of a preset


@dataclass(frozen=True)
class UnitPlan:
    """What one unit takes on a rank."""

    name: str
    parameters: int  # elements, of the whole unit
    holding: Holding
    full_buffer: int  # bytes while the unit is gathered; 0 where whole parameters stay


@dataclass(frozen=True)
class Plan:
    """What a model takes and sends on each rank; the padding is that of the last, which has most.

    Attributes:
        parameters: elements of the model.
        activations: bytes of a rank, as given to ``plan``; nothing is assumed of them.
        collectives: of a step; beside them ranks tell each other a few hundred bytes.
    """

    world_size: int
    strategy: str
    parameters: int
    units: tuple[UnitPlan, ...]
    buffers: Buffers
    activations: int
    collectives: tuple[Collective, ...]
    _again: Callable[[int, Choice], Plan]

    @property
    def holding(self) -> Holding:
        """What all units take together."""
        return sum((unit.holding for unit in self.units), Holding())

    @property
    def peak(self) -> int:
        """Bytes when most is there: in backward, with all buffers in use and gradients reduced."""
        return self.holding.states + self.buffers.full + self.buffers.reduce + self.activations

    def with_world_size(self, world_size: int) -> Plan:
        """The same over another number of ranks."""
        return self._again(world_size, self.strategy)

    def with_strategy(self, strategy: str) -> Plan:
        """The same with another strategy for all units."""
        return self._again(self.world_size, strategy)

    def fit(self, hbm: float) -> Fit:
        """What fits into ``hbm`` bytes a device.

        Raises:
            InputError: for a capacity that is no positive number.
        """
        if not hbm > 0:
            raise InputError(f"hbm={hbm!r}: expected bytes of a device, 80e9 for instance")
        rows = {name: self.with_strategy(name) for name in STRATEGIES}
        fits = [name for name, row in rows.items() if row.peak <= hbm]
        fewest = {name: _fewest_devices(row, hbm) for name, row in rows.items()}
        return Fit(hbm, fits[0] if fits else None, rows, fewest)

    def to_dict(self) -> dict[str, object]:
        """All of it, as ``zshard plan --json`` prints it; sizes in bytes."""
        return {
            "world_size": self.world_size,
            "strategy": self.strategy,
            "model_parameters": self.parameters,
            "per_rank": {
                **_as_dict(self.holding),
                "full_buffers": self.buffers.full,
                "reduce_buffers": self.buffers.reduce,
                "activations": self.activations,
                "peak": self.peak,
            },
            "units": [
                {
                    "name": unit.name,
                    "model_parameters": unit.parameters,
                    **_as_dict(unit.holding),
                    "full_buffers": unit.full_buffer,
                }
                for unit in self.units
            ],
            "collectives": [asdict(each) for each in self.collectives],
        }


@dataclass(frozen=True)
class Fit:
    """What fits into a device.

    Attributes:
        strategy: that shards least of those that fit; None if none does.
        plans: of every strategy, over as many ranks as the plan was made for.
        devices: the fewest that every strategy fits on; None for a strategy that never does.
    """

    hbm: float
    strategy: str | None
    plans: dict[str, Plan]
    devices: dict[str, int | None]


def plan(
    model: nn.Module | str | os.PathLike[str] | object,
    world_size: int,
    *,
    strategy: Choice = "zero3",
    units: Units = None,
    precision: Precision | None = None,
    optimizer: str = "adamw",
    prefetch: int = 1,
    activations: int = 0,
    backend: str | None = None,
) -> Plan:
    """Say what ``zshard.wrap`` with these arguments takes on each rank, and sends in a step.

    By the layout code of wrap itself, so it is exact: tests hold it against ``zshard.memory``. The
    model may be on the meta device, and nothing of its size is allocated.

    Args:
        model: a module that is not wrapped; "gpt:7b", of the sizes of ``zshard train``; a
            ``transformers`` configuration, or the path of its config.json (or the folder of that).
        world_size: ranks to shard over.
        strategy, units, precision, prefetch: as for ``wrap``.
        optimizer: "adamw", "adam", "momentum" (SGD with it) or "sgd".
        activations: bytes that a rank's activations take at the peak, to be added.
        backend: "nccl" or "gloo", whose reductions take different buffers; None: NCCL where torch
            sees a GPU.

    Raises:
        InputError: for an argument that cannot be used.
    """
    if type(world_size) is not int or world_size < 1:
        raise InputError(f"world_size={world_size!r}: expected a number of ranks, 1 or more")
    if type(prefetch) is not int or prefetch < 0:
        raise InputError(f"prefetch={prefetch!r}: expected a whole number of units, 0 or more")
    if type(activations) is not int or activations < 0:
        raise InputError(f"activations={activations!r}: expected bytes, 0 or more")
    if optimizer not in STATES:
        raise InputError(f"optimizer={optimizer!r}: expected one of {', '.join(STATES)}")
    if backend not in (None, "nccl", "gloo"):
        raise InputError(f"backend={backend!r}: expected 'nccl', 'gloo' or None")
    built = _model_of(model)
    precision = precision or Precision()
    nccl = torch.cuda.is_available() if backend is None else backend == "nccl"
    specs = unit_map(built, units, ())
    groups = [flat_groups(spec, precision) for spec in specs]

    def make(world_size: int, strategy: Choice) -> Plan:
        flats = [
            [
                FlatPlan(
                    Layout.of([owned.param for owned in group], world_size),
                    dtypes,
                    strategy_of(strategy, spec.name, spec.module),
                    any(owned.param.requires_grad for owned in group),
                )
                for dtypes, group in of_unit
            ]
            for spec, of_unit in zip(specs, groups, strict=True)
        ]
        made: list[UnitPlan] = []
        sent: list[Collective] = []
        for index, (spec, own) in enumerate(zip(specs, flats, strict=True)):
            label = spec.name or "root"
            holding = sum((flat.holding(STATES[optimizer]) for flat in own), Holding())
            numel = sum(owned.param.numel() for owned in spec.params)
            full = sum(flat.full_bytes for flat in own if not flat.resident)
            made.append(UnitPlan(label, numel, holding, full))
            # The root, and the unit that backward needs first, stay gathered in between.
            stays = index in (0, len(specs) - 1)
            sent += collectives_of(label, own, gathers=1 if stays else 2)
        name = strategy if isinstance(strategy, str) else "mixed"
        return Plan(
            world_size,
            name,
            sum(unit.parameters for unit in made),
            tuple(made),
            buffers_of(flats, prefetch, nccl=nccl),
            activations,
            tuple(sent),
            make,
        )

    return make(world_size, strategy)


def _model_of(model: object) -> nn.Module:
    """The module that is planned, on the meta device where it is made here."""
    if isinstance(model, nn.Module):
        if any(isinstance(param, Sharded) for param in model.parameters()):
            raise InputError("zshard.plan: this model is wrapped; zshard.memory says what it takes")
        return model
    if isinstance(model, str) and model.startswith("gpt:"):
        size = model.removeprefix("gpt:")
        if size not in SIZES:
            raise InputError(f"{model!r}: expected gpt: and one of {', '.join(SIZES)}")
        with torch.device("meta"):
            return GPT(GPTConfig(*SIZES[size], context=_CONTEXT))
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"{model!r}: to read it, zshard.plan needs transformers ({error})"
        ) from None
    config = model
    if isinstance(model, str | os.PathLike):
        try:
            config = transformers.AutoConfig.from_pretrained(
                os.fspath(model), local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise InputError(f"{model}: cannot be read as a configuration: {error}") from error
    if not isinstance(config, transformers.PretrainedConfig):
        raise InputError(f"zshard.plan: a {type(model).__name__} is no model or configuration")
    names = getattr(config, "architectures", None) or []
    architecture = getattr(transformers, names[0], None) if names else None
    with torch.device("meta"):
        built: object
        if architecture is not None:
            built = architecture(config)
        else:
            built = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    assert isinstance(built, nn.Module)
    return built


def _fewest_devices(plan: Plan, hbm: float) -> int | None:
    """The fewest devices, by doubling and then halving; more of them never take more each."""
    most = 1
    while plan.with_world_size(most).peak > hbm:
        most *= 2
        if most > _MOST_DEVICES:
            return None
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        if plan.with_world_size(middle).peak > hbm:
            least = middle
        else:
            most = middle
    return most


def _as_dict(holding: Holding) -> dict[str, int]:
    return {**asdict(holding), "states": holding.states}
