"""The tables that one call of an optimizer op takes: which shards, which segments, which numbers.

A bucket is what a call updates: shards of one dtype on one device, and one row for each parameter
that lies (in part) in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import InputError, OptimizerError
from ..layout import Range, memory_order
from ..param import Sharded
from ..streams import upload
from ..units.flat import Flat
from ..units.leaf import LiveLeaf

if TYPE_CHECKING:
    from ..schedule import Schedule


class Kind(NamedTuple):
    """What the shards of one bucket have in common."""

    schedule: Schedule | None  # of the wrapped model; None for plain parameters
    device: torch.device
    grad: torch.dtype
    send: torch.dtype | None  # None: the master is what is sent
    split: bool

    @property
    def wide(self) -> bool:
        """Whether masters and states are float64, as gradients are."""
        return self.grad == torch.float64


class Shard(NamedTuple):
    """What one entry of a bucket's lists is of."""

    flat: Flat | None  # None: a plain parameter
    part: Range  # of what this rank updates
    first: torch.Tensor  # the parameter that begins it; a plain one has a shard of its own

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part's elements of a tensor that has all, (O,)."""
        return tensor if self.part.numel == tensor.numel() else self.part.of(tensor)


class Row(NamedTuple):
    """One parameter in a bucket."""

    param: torch.Tensor
    group: int  # index into the optimizer's param_groups
    shard: int  # index into the bucket's lists
    begin: int  # elements, in the shard
    end: int


Hyper = tuple[float, ...]  # a row of the op's table of hyper-parameters, (6,)


@dataclass
class Bucket:
    """The arguments of one call of ``adamw_`` or ``sgd_``, kept from step to step.

    Args:
        names: the states of a parameter.
    """

    names: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    masters: list[torch.Tensor] = field(default_factory=list)  # (S,) fp32, fp64 or upper planes
    lows: list[torch.Tensor] = field(default_factory=list)  # (S,) int16, where masters are split
    states: dict[str, list[torch.Tensor]] = field(init=False)  # (S,) fp32, or fp64, each
    _hypers_of: list[Hyper] | None = None
    _active_of: list[bool] | None = None

    # Made by ``tabulate`` and ``refresh``.
    segments: torch.Tensor = field(init=False)  # (G, 3) int64
    steps: torch.Tensor = field(init=False)  # (G,) int64
    hypers: torch.Tensor = field(init=False)  # (G, 6) float64
    active: torch.Tensor = field(init=False)  # (G,) uint8

    def __post_init__(self) -> None:
        self.states = {name: [] for name in self.names}

    def add(self, flat: Flat, members: Mapping[int, tuple[Sharded, int]]) -> None:
        """Append rows for ``members`` of ``flat``, segment -> parameter and group.

        Their shard is all that this rank updates of ``flat``, padding included; where another
        optimizer has the rest, or nobody, there is a shard for each run of members, so that states
        are made for those alone.
        """
        everything = len(members) == len(flat.params)
        for run in _runs(members):
            part = Range(flat.local(run[0]).at.begin, flat.local(run[-1]).at.end)
            whole = Range(0, flat.owned.numel)
            shard = Shard(flat, whole if everything else part, members[run[0]][0])
            split = flat.master.low is not None
            self._append(shard, shard.of(flat.master.send if split else flat.master.read()))
            if flat.master.low is not None:
                self.lows.append(shard.of(flat.master.low))
            for segment in run:
                begin, end = flat.local(segment).at
                self._add_row(*members[segment], begin - shard.part.begin, end - shard.part.begin)

    def add_plain(self, param: torch.Tensor, group: int) -> None:
        """Append a row for a parameter that is not sharded, a shard of its own."""
        self._append(Shard(None, Range(0, param.numel()), param), flat_view(param))
        self._add_row(param, group, 0, param.numel())

    def _append(self, shard: Shard, master: torch.Tensor) -> None:
        self.shards.append(shard)
        self.masters.append(master)
        for states in self.states.values():
            dtype = torch.promote_types(master.dtype, torch.float32)
            states.append(torch.zeros_like(master, dtype=dtype))

    def _add_row(self, param: torch.Tensor, group: int, begin: int, end: int) -> None:
        self.rows.append(Row(param, group, len(self.shards) - 1, begin, end))

    def tabulate(self) -> None:
        """Make the tables that depend on the rows alone, and zero the step counts."""
        device = self.masters[0].device
        table = [[row.shard, row.begin, row.end] for row in self.rows]
        self.segments = torch.tensor(table, dtype=torch.int64, device="cpu").to(device)
        self.steps = torch.zeros(len(self.rows), dtype=torch.int64, device=device)

    def refresh(self, hypers: list[Hyper], active: list[bool]) -> None:
        """Bring the tables of hyper-parameters (by group) and activity (by row) up to date."""
        device = self.segments.device
        if hypers != self._hypers_of:
            table = [hypers[row.group] for row in self.rows]
            on_host = torch.tensor(table, dtype=torch.float64, device="cpu")
            self.hypers, self._hypers_of = upload(on_host, device), hypers
        if active != self._active_of:
            on_host = torch.tensor(active, dtype=torch.uint8, device="cpu")
            self.active = upload(on_host, device)
            self._active_of = active

    def grads(self) -> list[torch.Tensor]:
        """The gradient of every shard, 1-D, in the order of ``masters``."""
        return [
            _plain_grad(each.first) if each.flat is None else each.of(each.flat.grads.owned())
            for each in self.shards
        ]

    def arguments(self, all_active: bool) -> tuple[Any, ...]:
        """What the op takes, up to ``grad_scale``."""
        states = [*self.states.values()] or [[]]  # SGD without momentum has none
        shards = (self.masters, self.lows, *states, self.grads(), self.sends())
        tables = (self.segments, self.hypers, self.steps)
        return *shards, *tables, None if all_active else self.active

    def sends(self) -> list[torch.Tensor]:
        """The send buffers that the update writes too; none where the masters are sent."""
        return [
            shard.of(shard.flat.master.send)
            for shard in self.shards
            if shard.flat is not None and shard.flat.master.has_copy
        ]

    def before_write(self, active: Sequence[bool]) -> None:
        """Let gathers end that still send what the last update wrote.

        Args:
            active: of each row, whether it is updated.
        """
        for flat in self._flats(active):
            flat.before_write()

    def note_written(self, active: Sequence[bool]) -> None:
        """Tell the flat buffers, or autograd, that masters get new values; as ``before_write``."""
        for flat in self._flats(active):
            flat.updated(send_written=not flat.master.stale)
        for index in self._shards_of(active):
            if self.shards[index].flat is None:
                torch.autograd.graph.increment_version(self.masters[index])

    def _flats(self, active: Sequence[bool]) -> Iterable[Flat]:
        found = (self.shards[index].flat for index in self._shards_of(active))
        return dict.fromkeys(flat for flat in found if flat is not None)

    def _shards_of(self, active: Sequence[bool]) -> Iterable[int]:
        if all(active):
            return range(len(self.shards))
        return dict.fromkeys(row.shard for row in compress(self.rows, active))


@torch.inference_mode(False)  # they outlive a step there
@torch.no_grad()
def buckets_of(
    params: Iterable[tuple[torch.Tensor, int]], names: tuple[str, ...]
) -> dict[Kind, Bucket]:
    """The buckets of parameters with their groups.

    Args:
        names: the states of a parameter.

    Raises:
        OptimizerError: as ``kind_of``; for a plain parameter that is not one block of memory.
    """
    found: dict[Kind, Bucket] = {}
    by_flat: dict[Flat, dict[int, tuple[Sharded, int]]] = {}
    for param, group in params:
        if isinstance(param, Sharded):
            by_flat.setdefault(param.flat, {})[param.segment] = (param, group)
        else:
            found.setdefault(kind_of(param), Bucket(names)).add_plain(param, group)
    for flat, members in by_flat.items():
        first, _ = next(iter(members.values()))
        found.setdefault(kind_of(first), Bucket(names)).add(flat, members)
    for bucket in found.values():
        bucket.tabulate()
    return found


def _runs(segments: Iterable[int]) -> list[list[int]]:
    """``segments`` in order, cut where one is left out."""
    runs: list[list[int]] = []
    for segment in sorted(segments):
        if runs and runs[-1][-1] + 1 == segment:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return runs


def kind_of(param: torch.Tensor) -> Kind:
    """The bucket that ``param`` belongs to.

    Raises:
        OptimizerError: for a plain one that is neither float32 nor float64; for float64 gradients
            of an fp32 master.
    """
    if isinstance(param, Sharded):
        flat = param.flat
        send = flat.dtypes.compute if flat.master.has_copy else None
        if flat.dtypes.reduce == torch.float64 != flat.dtypes.master:
            raise OptimizerError(
                f"{param.fqn} has float64 gradients of a {flat.dtypes.master} master, which "
                "zshard's optimizers do not update. Make the parameter float64, or take those of "
                "torch.optim."
            )
        return Kind(flat.schedule, flat.device, flat.dtypes.reduce, send, flat.dtypes.split)
    if param.dtype not in (torch.float32, torch.float64):
        raise OptimizerError(
            f"a parameter of shape {tuple(param.shape)} is {param.dtype}; zshard's optimizers "
            "update float32 and float64, as the masters of wrapped models are. Those of "
            "torch.optim work on every dtype."
        )
    return Kind(None, param.device, param.dtype, None, split=False)


def is_trained(param: torch.Tensor) -> bool:
    """Whether there are gradients for ``param``, or others of its shard, or may be."""
    if not isinstance(param, Sharded) or param.flat.requires_grad:
        return True
    param.flat.schedule.reducer.read_outcome()
    return any(param.flat.grads.present)  # frozen since the backward


def has_grad(param: torch.Tensor) -> bool:
    """Whether any rank has a gradient for ``param``.

    Raises:
        StateError: if it is held back by no_sync.
    """
    if isinstance(param, Sharded):
        grads = param.flat.grads
        grads.refuse_held_back(param.segment)
        return grads.present[param.segment]
    return param.grad is not None


def flat_view(param: torch.Tensor) -> torch.Tensor:
    """The memory of a plain parameter as a 1-D tensor.

    Raises:
        OptimizerError: if it does not fill one block of memory.
    """
    in_order = param.detach().permute(memory_order(param.stride()))
    if not in_order.is_contiguous():  # of one stride it could be viewed as 1-D all the same
        raise OptimizerError(
            f"a parameter of shape {tuple(param.shape)} and strides {param.stride()} does not fill "
            "one block of memory; make it contiguous first"
        )
    return in_order.view(-1)


def _plain_grad(param: torch.Tensor) -> torch.Tensor:
    """The gradient of a plain parameter, 1-D in the parameter's memory order."""
    if param.grad is None:
        return flat_view(param)  # the segment is inactive: never read
    if param.grad.layout is not torch.strided:
        raise OptimizerError(
            f"a parameter of shape {tuple(param.shape)} has a gradient of layout "
            f"{param.grad.layout}; zshard's optimizers take dense ones. Wrapped models' are dense; "
            "for a plain one take torch.optim.SparseAdam"
        )
    return param.grad.permute(memory_order(param.stride())).reshape(-1)


def require_updatable(params: Sequence[torch.Tensor]) -> None:
    """Make sure that one pass over all of ``params`` updates each of them.

    Raises:
        InputError, OptimizerError: as ``FusedOptimizer.add_param_group``.
    """
    if len(set(map(id, params))) < len(params):
        raise InputError("a param group has a parameter twice; a step would update it once")
    for param in params:
        if type(param) is LiveLeaf:
            raise OptimizerError(
                "the optimizer was given whole parameters, which modules hold while their unit "
                "computes. If an exception (Ctrl-C) has left them there, call zshard.reset(model) "
                "first."
            )
        if isinstance(param, Sharded) and not param._of_model:
            raise OptimizerError(
                f"the optimizer was given a copy of {param.fqn!r}, of which a step would update "
                "the parameter itself. Give it model.parameters()."
            )
