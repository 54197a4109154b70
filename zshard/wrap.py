"""``zshard.wrap``: from a plain model to one whose parameters are shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from .comm import Comm
from .errors import InputError, StateError, WrapError
from .hooks import ModuleHook
from .optimizers import other_optimizers
from .param import Sharded
from .precision import Precision
from .schedule import Schedule
from .step.debts import settle
from .step.meeting import meetings_of
from .strategy import Choice, Strategy, strategy_of
from .tag import Tag
from .transports.groups import require_backends
from .transports.mesh import warn_if_alone
from .transports.refusal import together
from .transports.transport import Transport, meet_in_one_place
from .unit import Unit
from .unitmap import Units, UnitSpec, check_parameters, persistent_buffers, unit_map
from .units.pool import Pool
from .wrapping import same_model
from .wrapping.arguments import check_arguments, check_precision, ignored_parameters
from .wrapping.malloc import keep_freed
from .wrapping.materialize import (
    InitFn,
    Materializer,
    allocate_outside,
    default_device,
    move,
    on_meta,
)
from .wrapping.overlaps import check_apart
from .wrapping.sharding import Sharder, UnitParts

M = TypeVar("M", bound=nn.Module)
_SCHEDULE = "_zshard_schedule"  # the attribute of a wrapped model that holds its schedule


@torch.inference_mode(False)  # what it makes outlives it
def wrap(
    model: M,
    *,
    strategy: Choice = "zero3",
    units: Units = None,
    precision: Precision | None = None,
    mesh: dist.ProcessGroup | DeviceMesh | None = None,
    comm: Transport = "auto",
    prefetch: int = 1,
    init: Literal["check", "broadcast", "trust"] = "check",
    ignored: Iterable[str | nn.Parameter | nn.Module] | None = None,
    device: torch.device | str | None = None,
    init_fn: InitFn | None = None,
) -> M:
    """Shard ``model`` over the ranks, in place.

    Names, global shapes, Parameter objects and attributes set on them stay, so an optimizer built
    before or after holds the live parameters. While a unit computes, its modules hold whole
    parameters; between, they hold sharded ones.

    Args:
        model: any module, the same on every rank; the root of what is trained.
        strategy: what of a unit is sharded. "zero3" (or "full_shard"): everything. "zero2"
            ("shard_grad_op"): all but the parameters that are computed with. "zero1": all but those
            and the gradient buffer. "ddp" ("no_shard"): nothing. Or a callable (name, module) ->
            one of these, asked once for each unit; the root's name is "".
        units: what is gathered and freed together. None: the repeated blocks of every ModuleList
            and Sequential (of the stages of a net, those in them), and one unit for the rest.
            "model": one unit. "layer": every module that owns parameters. Or module classes, fully
            qualified names, or a callable (name, module) -> bool.
        precision: see ``Precision``; None keeps every parameter's own dtype.
        mesh: the ranks to shard over: None (the default process group, or one rank if there is
            none), a ProcessGroup, or a 1-D DeviceMesh. A 2-D DeviceMesh is (replicate, shard),
            HSDP: sharded inside, the shards' gradients summed across. Over torch's fake backend
            this process is one rank of as many as that has, alone: memory, calls and the order of
            events are those of so many, values are of no model.
        comm: how the ranks of the sharding group reach each other. "group": by the process group's
            collectives. "peer": they read each other's memory, which they share; every rank has to
            be a process on one Linux host, on the CPU or with a GPU of its own. "auto": what the
            environment variable ZSHARD_COMM says, else on the CPU "peer" where every rank finds it
            possible and has memory for it, else "group", which the logger "zshard" then says.
        prefetch: how many units are gathered ahead of the one that computes.
        init: "check" compares the parameters' values over the ranks and refuses differences;
            "broadcast" takes rank 0's; "trust" does neither. Names, shapes, dtypes, units and
            options are compared in any case.
        ignored: parameters to leave whole and unreduced: a list of them, of their names, or of
            modules or modules' names for all that these have.
        device: where to move the model first. None leaves it; what is on the meta device goes to
            where the other parameters are, or else to the current GPU under NCCL, or to the CPU.
        init_fn: for a model on the meta device: called as ``init_fn(module)``, without autograd,
            once for every module that itself owns parameters or buffers there, and writes them
            all. One unit is whole at a time, in the order of the unit map. Every rank draws rank
            0's random numbers meanwhile, and has its own generators' states afterwards.
            None: such a model gets memory without values, each rank's shards alone, and refuses to
            run until ``zshard.load`` or ``zshard.load_weights`` brings them.

    Returns:
        ``model`` itself.

    Raises:
        InputError: an argument that cannot be used, or an ``init_fn`` that does what cannot work.
            (If ``init_fn`` replaced anything before it raised, build the model anew.)
        WrapError: a model that cannot be wrapped: wrapped before, parameters on several devices or
            not of a floating-point dtype, or with another ``grad_dtype``, non-persistent buffers on
            the meta device without an ``init_fn``, persistent ones that are sparse,
            quantised or without a shape yet on several ranks; for "peer", a rank out of reach or
            without memory to share.
        MismatchError: on every rank, if the ranks' models, options or transports differ.
        CommError: if a rank cannot be reached any more; then the model may be half wrapped.

        After any other error the model is as it was, but on ``device`` and, with "broadcast", maybe
        with rank 0's values; and the other ranks have one, too.

    Example:
        >>> model = zshard.wrap(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), units="layer")
        >>> model(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    precision = Precision() if precision is None else precision
    settle()
    survey: _Survey | None = None
    failure = None
    # This rank alone: what is wrapped, and into what units.
    try:
        _check_model(model)
        check_arguments(model, precision, comm, prefetch, init, device, init_fn)
        if device is not None:
            move(model, device)
        survey = _survey(model, units, ignored, strategy, precision)
        where = survey.device or default_device(device, mesh)
        require_backends(mesh, where)
    except Exception as error:
        failure = error  # for the other ranks to know, who are about to meet this one
        where = _meeting_place(model, mesh)
    # With the other ranks: they wrap the same. Raises on every rank if one of them has failed.
    collectives = Comm(mesh, where, comm, failure)
    assert survey is not None
    meta = on_meta(model)
    if collectives.world_size > 1:
        options = {
            "precision": str(precision),
            "prefetch": str(prefetch),
            "init": init,
            "init_fn": "None" if init_fn is None else "given",
        }
        _require_same(model, survey, meta, options, collectives)
        meetings_of(collectives).count_alike(collectives)
    # Unit by unit: values, where there are none yet, and shards of them in the whole ones' place.
    pool = Pool(1 + prefetch, where, collectives.empty, collectives.give_back)
    sharder = Sharder(model, precision, collectives, where, meta)
    materializer, unusable = None, ""
    made: list[UnitParts] = []
    with collectives.awaited("wrap", but=(Exception,)), sharder:
        if init_fn is not None:
            materializer = Materializer(model, survey.specs, init_fn, where, collectives)
        else:
            allocate = partial(allocate_outside, model, survey.specs, where)
            unusable = together(allocate, collectives, Tag(None, "wrap"))
            same_model.values(survey.specs, collectives, init)
        for spec, chosen in zip(survey.specs, survey.strategies, strict=True):
            if materializer is not None:
                materializer.fill(spec)
                same_model.values([spec], collectives, init)
            made.append(sharder.shard(spec, chosen))
        sharder.reserve(pool)
    for over in collectives.axes:
        meet_in_one_place(over)
    # What runs the units: from here on the model is wrapped, and every unit SHARDED.
    built = _build(survey, made, collectives, pool)
    if where.type == "cpu":
        # See [Note: what the C library keeps].
        keep_freed(max(unit.full_bytes for unit in built))
    schedule = Schedule(model, built, collectives, pool, precision, prefetch, where)
    schedule.unusable = unusable
    schedule.lacks_group = mesh is None and dist.group.WORLD is None
    setattr(model, _SCHEDULE, schedule)
    other_optimizers.look_after()
    warn_if_alone(mesh)
    hook = ModuleHook(partial(_before_load_state_dict, schedule))
    model.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
    return model


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"zshard.wrap takes a torch.nn.Module, got a {type(model).__name__}")
    if hasattr(model, _SCHEDULE):
        raise WrapError("this model is wrapped already; wrap a model once")
    if isinstance(model, (DistributedDataParallel, torch.jit.ScriptModule)):
        kind = type(model).__name__
        raise WrapError(f"zshard.wrap takes the plain module that this {kind} was made of")


def _meeting_place(model: object, mesh: dist.ProcessGroup | DeviceMesh | None) -> torch.device:
    """Where the other ranks meet this one, of whose model they have to be told."""
    there = _device_of(model)
    if there is not None:
        with suppress(WrapError):
            require_backends(mesh, there)
            return there
    return default_device(None, mesh)


def _device_of(model: object) -> torch.device | None:
    """Where the parameters are, of a model that may make no sense otherwise."""
    params = model.parameters() if isinstance(model, nn.Module) else ()
    there = [param.device for param in params if not param.is_meta]
    on_gpus = [device for device in there if device.type != "cpu"]  # the ignored may be elsewhere
    return next(iter(on_gpus or there), None)


class _Survey(NamedTuple):
    """What this rank alone can say of a model before it is wrapped."""

    specs: list[UnitSpec]  # the unit map, the root first
    strategies: list[Strategy]  # of each unit
    device: torch.device | None  # of the parameters; None: there are none, or all are on meta


def _survey(
    model: nn.Module,
    units: Units,
    ignored: Iterable[str | nn.Parameter | nn.Module] | None,
    strategy: Choice,
    precision: Precision,
) -> _Survey:
    specs = unit_map(model, units, ignored_parameters(model, ignored))
    strategies = [strategy_of(strategy, spec.name, spec.module) for spec in specs]
    device = check_parameters(specs)
    check_apart(model, specs)
    check_precision(specs, precision)
    return _Survey(specs, strategies, device)


def _require_same(
    model: nn.Module,
    survey: _Survey,
    meta: Mapping[str, torch.Tensor],  # what of the model is on the meta device, by name
    options: Mapping[str, str],
    comm: Comm,
) -> None:
    """Make sure that all ranks wrap the same model, and that its buffers can be broadcast.

    Raises:
        MismatchError: on every rank, if they differ.
        WrapError: for a sparse or quantised buffer, or a lazy one.
    """
    in_units = {name for spec in survey.specs for owned in spec.params for name in owned.names}
    buffers = persistent_buffers(model.named_modules())
    refused = {
        name: "lazy" if is_lazy(buffer) else "quantised" if buffer.is_quantized else "sparse"
        for name, buffer in buffers
        if is_lazy(buffer) or buffer.is_quantized or buffer.layout is not torch.strided
    }
    found = {
        "what is on meta outside of units": str(sorted(meta.keys() - in_units)),
        "sparse buffers, quantised ones and lazy ones": str(refused),
    }
    same_model.check(survey.specs, comm, {**options, **found}, survey.strategies)
    for name, kind in refused.items():
        remedy = "Register it with persistent=False; each rank then has its own."
        if kind == "lazy":
            remedy = "Run a forward under torch.no_grad() before, which gives it its shape."
        raise WrapError(f"{name} is a {kind} buffer, and persistent ones are broadcast. {remedy}")


def _build(survey: _Survey, made: Sequence[UnitParts], comm: Comm, pool: Pool) -> list[Unit]:
    """The units of sharded parameters, and the memory that gathers of them take."""
    built: list[Unit] = []
    for index, (spec, strategy, (flats, sites)) in enumerate(
        zip(survey.specs, survey.strategies, made, strict=True)
    ):
        parent = None if spec.parent is None else built[spec.parent]
        built.append(Unit(spec, index, parent, strategy, flats, sites, comm, pool))
    pool.reserve([unit.slot_bytes for unit in built])
    return built


def _before_load_state_dict(
    schedule: Schedule,
    model: nn.Module,
    state_dict: Mapping[str, object],
    prefix: str,
    metadata: dict[str, object],
    *_: object,
) -> None:
    """Refuse what load_state_dict would lose without a word."""
    schedule.require_values("load_state_dict")
    if schedule.whole:
        return
    if metadata.get("assign_to_params_buffers"):
        raise StateError(
            "load_state_dict(assign=True) would put plain tensors in place of the sharded "
            "parameters; without it, or inside zshard.full_params(model, write=True), the shards "
            "take their values"
        )
    for flat in schedule.flats:
        if any(prefix + name in state_dict for names in flat.all_names for name in names):
            flat.before_write()  # here: of an error in a copy_ torch makes a RuntimeError


def schedule_of(model: nn.Module, or_pass: str = "") -> Schedule:
    """The schedule of a wrapped model.

    Args:
        model: what a script passed.
        or_pass: what else the caller takes in place of a part of a model, for the error.

    Raises:
        WrapError: if ``model`` is not the module that zshard.wrap was given.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a wrapped model, got a {type(model).__name__}")
    schedule = getattr(model, _SCHEDULE, None)
    if not isinstance(schedule, Schedule):
        part = any(isinstance(param, Sharded) for param in model.parameters())
        what = "a part of a wrapped model" if part else "not wrapped"
        remedy = f"pass zshard.wrap's result{or_pass if part else ''}"
        raise WrapError(f"this {type(model).__name__} is {what}; {remedy}")
    return schedule
