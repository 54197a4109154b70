"""Which parameters form a unit: the map, from the modules that are found or asked for."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from .attributes import reserved_attributes
from .errors import InputError, WrapError
from .precision import FLOATS, Dtypes, Precision
from .repeated import NEVER_CALLED, repeated_blocks

Units = (
    str
    | Sequence[str]
    | type[nn.Module]
    | Sequence[type[nn.Module]]
    | Callable[[str, nn.Module], bool]
    | None
)

# What torch's checkpoint_wrapper registers its module as, and takes out of a state_dict's keys.
_WRAPPED = "_checkpoint_wrapped_module."


@dataclass(frozen=True)
class Owned:
    """A parameter and every attribute that holds it."""

    param: nn.Parameter
    names: tuple[str, ...]  # every fully qualified name, in order of registration
    sites: tuple[tuple[nn.Module, str], ...]  # (module, attribute)

    @property
    def name(self) -> str:
        """The first of its names, the one that it goes by."""
        return self.names[0]

    @property
    def holders(self) -> list[nn.Module]:
        """The modules that have it, perhaps repeated."""
        return [module for module, _ in self.sites]


@dataclass(frozen=True)
class UnitSpec:
    """A unit before it has any memory.

    Attributes:
        name: fully qualified name of the module; "" for the root.
        parent: index of the unit around it in the map, None for the root.
    """

    name: str
    module: nn.Module
    parent: int | None
    params: tuple[Owned, ...]

    @property
    def label(self) -> str:
        """What errors, traces and tables call it."""
        return self.name or "root"


def unit_map(model: nn.Module, units: Units, ignored: Iterable[nn.Parameter]) -> list[UnitSpec]:
    """The units of ``model``, the root first, the rest in order of registration.

    A parameter belongs to the innermost unit around it; one that several units share (a tied
    weight) to the root, which is gathered in all of its own forward.

    Raises:
        InputError: for a ``units`` that cannot be understood, names no module of the model, or a
            container that is never called.
        WrapError: for a parameter whose name leads to no module.
    """
    names = {name for name in unit_names(model, units) if name}
    home: dict[str, int] = {"": 0}  # module name -> index of the innermost unit around it
    parents: list[int | None] = [None]
    found = [("", model)]
    # A module shared by several units has a name in each, and so its parameters fall to the root.
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        outer = home[name.rpartition(".")[0]]
        home[name] = outer
        if name in names:
            home[name] = len(found)
            parents.append(outer)
            found.append((name, module))
    params: list[list[Owned]] = [[] for _ in found]
    for owned in owned_parameters(model, ignored):
        holders = {path: path.rpartition(".")[0] for path in owned.names}
        if lost := [path for path, holder in holders.items() if holder not in home]:
            raise WrapError(
                f"{lost[0]!r} leads to no module: a module has parameters of others, as losses of "
                "torchrl do. Wrap those others, before it is made of them."
            )
        around = {home[holder] for holder in holders.values()}
        params[around.pop() if len(around) == 1 else 0].append(owned)
    specs = [
        UnitSpec(name, module, parent, tuple(own))
        for (name, module), parent, own in zip(found, parents, params, strict=True)
    ]
    for spec in specs[1:]:
        if spec.params and type(spec.module) in NEVER_CALLED:
            raise InputError(
                f"units: {spec.name!r} is a {type(spec.module).__name__}, which has no forward to "
                "gather it for. Make its members units, or the module around it."
            )
    members = set(_members(model))
    called = [i for i, spec in enumerate(specs) if spec.name in members]
    have_state = {i for i in called if any(persistent_buffers(specs[i].module.named_modules()))}
    return _without_empty(specs, have_state)


def owned_parameters(model: nn.Module, ignored: Iterable[nn.Parameter]) -> list[Owned]:
    """The model's parameters in order of registration, each once."""
    skip = {id(param) for param in ignored}
    found: dict[int, tuple[nn.Parameter, list[str], list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():
            if param is not None and id(param) not in skip:
                _, names, sites = found.setdefault(id(param), (param, [], []))
                names.append(f"{prefix}.{attribute}" if prefix else attribute)
                if (module, attribute) not in sites:  # a module may be shared itself
                    sites.append((module, attribute))
    return [Owned(param, tuple(names), tuple(sites)) for param, names, sites in found.values()]


def state_key(name: str) -> str:
    """The key in a state_dict of what is registered as ``name``."""
    return name.replace(_WRAPPED, "")


def persistent_buffers(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that are part of the state, by name, of modules with their names."""
    for prefix, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def unit_names(model: nn.Module, units: Units) -> list[str]:
    """Fully qualified names of the modules that ``units`` makes units of."""
    modules = dict(model.named_modules())
    if units is None:
        blocks = set(repeated_blocks(model))
        held = (*model.named_parameters(), *model.named_buffers())
        rest = [name for name, _ in held if blocks.isdisjoint(_around(name))]
        members = {m for m in _members(model) if any(name.startswith(f"{m}.") for name in rest)}
        return [name for name in modules if name in members or name in blocks]
    if units == "model":
        return []
    if units == "layer":
        return _layers(modules)
    if isinstance(units, str) or not (callable(units) or isinstance(units, Iterable)):
        raise InputError(
            f"units={units!r}: expected None, 'model', 'layer', module classes, names, or a "
            "callable (name, module) -> bool"
        )
    if callable(units) and not isinstance(units, type):
        return [name for name, module in modules.items() if units(name, module)]
    wanted = (units,) if isinstance(units, type) else tuple(units)
    classes = tuple(u for u in wanted if isinstance(u, type))
    names = {u for u in wanted if isinstance(u, str)}
    if not all(isinstance(u, type | str) for u in wanted):
        raise InputError(f"units={units!r}: expected module classes or names of modules")
    if unknown := sorted(names - modules.keys()):
        raise InputError(f"units: the model has no module named {', '.join(unknown)}")
    if classes and not any(isinstance(m, classes) for m in modules.values()):
        raise InputError(f"units: no module of the model is a {' or a '.join(map(str, classes))}")
    return [n for n, m in modules.items() if n in names or isinstance(m, classes)]


def _around(name: str) -> Iterator[str]:
    """Names of the modules around what ``name`` leads to, but the root's."""
    return accumulate(name.split(".")[:-1], "{}.{}".format)


def _layers(modules: dict[str, nn.Module]) -> list[str]:
    """The modules that use parameters of their own, or in containers that are never called."""
    found: set[str] = set()
    for name, module in modules.items():
        # nn.MultiheadAttention reads this one's weight without calling it.
        read = isinstance(module, NonDynamicallyQuantizableLinear)
        if any(param is not None for param in module._parameters.values()) and not read:
            user = name
            while isinstance(modules[user], NEVER_CALLED) and user:
                user = user.rpartition(".")[0]  # no call of it announces the use
            found.add(user)
    return [name for name in modules if name in found]


def _members(model: nn.Module, prefix: str = "") -> list[str]:
    """What a script calls of a model that has no forward: several models wrapped as one."""
    if type(model) not in NEVER_CALLED:
        return [prefix.removesuffix(".")] if prefix else []
    children = model.named_children()
    return [name for path, child in children for name in _members(child, f"{prefix}{path}.")]


def _without_empty(specs: list[UnitSpec], but: Container[int]) -> list[UnitSpec]:
    """``specs`` without units that own nothing; the root stays, since its hooks frame a step.

    Args:
        but: indices of those that stay, as nobody else's forward broadcasts their buffers.
    """
    kept = [i for i, spec in enumerate(specs) if i == 0 or spec.params or i in but]
    index = {old: new for new, old in enumerate(kept)}

    def parent(i: int) -> int | None:
        above = specs[i].parent
        while above is not None and above not in index:
            above = specs[above].parent
        return None if above is None else index[above]

    return [replace(specs[i], parent=parent(i)) for i in kept]


def check_kinds(specs: Sequence[UnitSpec]) -> None:
    """Check that zshard can shard parameters of these kinds.

    Raises:
        WrapError: for parameters that are wrapped already, or of another class; that are sparse,
            have no shape yet, or a dtype that zshard does not shard; that ask for gradients of
            another dtype; or an attribute of a name that sharded ones have.
    """
    for spec in specs:
        for owned in spec.params:
            param = owned.param
            if is_lazy(param):
                raise WrapError(
                    f"{owned.name} has no shape yet (a lazy module); call the model once before "
                    "zshard.wrap"
                )
            if type(param) is not nn.Parameter:
                raise WrapError(
                    f"{owned.name} is a {type(param).__name__}, not a plain Parameter. Where part "
                    "of the model is wrapped already, wrap it once, at its root; a frozen weight "
                    "of another library's kind (quantised, say) stays whole with ignored=."
                )
            if reserved := reserved_attributes(param):
                raise WrapError(
                    f"{owned.name} has an attribute {reserved[0]!r}, which in a sharded parameter "
                    "is zshard's own. Give yours another name."
                )
            if param.layout is not torch.strided:
                raise WrapError(
                    f"{owned.name} is sparse ({param.layout}), and a shard is a run of elements. "
                    "Name it in ignored=[...] to leave it whole."
                )
            if param.dtype not in FLOATS:
                raise WrapError(
                    f"{owned.name} has dtype {param.dtype}; zshard shards float32, bfloat16, "
                    "float16 and float64. Name it in ignored=[...] to leave it whole."
                )
            if param.grad_dtype != param.dtype:
                raise WrapError(
                    f"{owned.name} has .grad_dtype = {param.grad_dtype}, but gradients come in the "
                    f"dtype of compute. Set it to the parameter's ({param.dtype}); "
                    "zshard.Precision(reduce=...) is the dtype in which they are reduced and added."
                )


def check_parameters(specs: Sequence[UnitSpec]) -> torch.device | None:
    """The one device of all parameters that have values; None where none has.

    Raises:
        WrapError: as ``check_kinds``; for parameters that have a gradient, or lie on different
            devices.
    """
    check_kinds(specs)
    devices: dict[torch.device, str] = {}
    for spec in specs:
        for owned in spec.params:
            if owned.param.grad is not None:
                raise WrapError(
                    f"{owned.name} has a gradient already; call zero_grad() before zshard.wrap"
                )
            if not owned.param.is_meta:
                devices.setdefault(owned.param.device, owned.name)
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise WrapError(f"parameters lie on different devices: {where}. Pass device=...")
    return next(iter(devices), None)


def flat_groups(spec: UnitSpec, precision: Precision) -> list[tuple[Dtypes, list[Owned]]]:
    """The unit's parameters by what one flat buffer can hold: their dtypes and requires_grad."""
    groups: dict[tuple[Dtypes, bool], list[Owned]] = {}
    for owned in spec.params:
        dtypes = precision.resolve(owned.param.dtype)
        normalises = all(isinstance(module, _NormBase) for module, _ in owned.sites)
        if normalises and precision.compute != torch.float64:
            # Batch normalisation's kernels want them in the dtype of the running statistics, and
            # take inputs of 16 bits, but not of 64.
            dtypes = Precision(reduce=precision.reduce).resolve(owned.param.dtype)
        groups.setdefault((dtypes, owned.param.requires_grad), []).append(owned)
    return [(dtypes, group) for (dtypes, _), group in groups.items()]
