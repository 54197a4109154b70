"""A machine as plans see it: how fast it computes, moves and sends; datasheets' or measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..errors import InputError
from ..transports.transport import Transport
from ..whole_files import StrPath, write_whole
from .work import Call, Work

_LINKS = ("gather", "reduce", "network", "shared")


class _Range(NamedTuple):
    """What a figure of a machine may be."""

    words: str
    least: float

    def holds(self, value: object) -> bool:
        """Whether ``value`` may be one; false for NaN."""
        return type(value) in (int, float) and self.least <= cast(float, value) <= 1e30


_RATE = _Range("a rate, 1 to 1e30 a second", least=1)
_AMOUNT = _Range("a number, 0 to 1e30", least=0)


def _require(made: object, expected: _Range, *names: str) -> None:
    for name in names:
        if not expected.holds(value := getattr(made, name)):
            raise InputError(f"{name}={value!r}: expected {expected.words}")


@dataclass(frozen=True)
class Link:
    """What carries a collective.

    Attributes:
        bandwidth: bytes a second that a rank sends.
        latency: seconds of a collective that moves nothing, between two ranks; it grows with the
            logarithm of their number, as in a tree.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        _require(self, _RATE, "bandwidth")
        _require(self, _AMOUNT, "latency")

    def seconds(self, sent: int, world_size: int) -> float:
        """Time of a collective in which each rank sends ``sent`` bytes."""
        return self.latency * math.ceil(math.log2(world_size)) + sent / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """What one rank has of a machine while all its ranks work.

    Attributes:
        flops: a second, of matrix products by dtype; and of attention, as "attention bfloat16".
        memory: bytes a second, read and written, of passes over large buffers: pack, sum, update.
        pointwise: likewise, of the ops between the products.
        call: seconds that any op takes at least, the host's time to call it.
        gather: the link of all-gathers between the ranks of a host; reduce: of reductions; None
            where one rank was measured.
        network: the link of both between hosts; None: all ranks are on one host.
        shared: what reads the memory of the ranks of a host (comm="peer"), in the rank's own time;
            its latency is that of a meeting. None: it was not measured.
        host: ranks that a host has.
        interference: of a second that a collective takes while the rank computes, the part by which
            computing takes longer. 0 where the processors that compute have nothing to do with it.
        sums_on_host: whether the sum of a reduction takes the rank's own time (CPU), or runs beside
            its computing (a GPU's reduce stream).
        hbm: bytes of memory; 0 if unknown.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    pointwise: float
    call: float
    gather: Link | None
    reduce: Link | None
    network: Link | None = None
    shared: Link | None = None
    host: int = 8
    interference: float = 0.0
    sums_on_host: bool = False
    hbm: float = 0.0
    facts: Mapping[str, object] = field(default_factory=dict)  # where a measured one comes from

    def __post_init__(self) -> None:
        _require(self, _RATE, "memory", "pointwise")
        _require(self, _AMOUNT, "call", "interference", "hbm")
        for name in _LINKS:
            link = getattr(self, name)
            if link is not None and not isinstance(link, Link):
                raise InputError(f"{name}={link!r}: expected a zshard.Link, or None")
        if not isinstance(self.flops, Mapping) or "float32" not in self.flops:
            raise InputError(f"flops={self.flops!r}: expected rates by dtype, with float32")
        for dtype, rate in self.flops.items():
            if not _RATE.holds(rate):
                raise InputError(f"flops[{dtype!r}]={rate!r}: expected {_RATE.words}")
        if not isinstance(self.name, str) or not isinstance(self.facts, Mapping):
            raise InputError(f"name={self.name!r}, facts={self.facts!r}: expected text, and a dict")
        if type(self.host) is not int or self.host < 1:
            raise InputError(f"host={self.host!r}: expected a number of ranks, 1 or more")
        if type(self.sums_on_host) is not bool:
            raise InputError(f"sums_on_host={self.sums_on_host!r}: expected True or False")

    def seconds(self, work: Work) -> float:
        """Time that ``work`` takes: each call what bounds it, computing, moving or being called."""
        return sum(self._call(call) * count for call, count in work.items())

    def _call(self, call: Call) -> float:
        if call.kind == "pointwise":
            return max(call.bytes / self.pointwise, self.call)
        rate = self.flops.get(call.dtype, self.flops["float32"])
        if call.kind == "attention":
            rate = self.flops.get(f"attention {call.dtype}", rate)
        return max(call.flops / rate, call.bytes / self.memory, self.call)

    def links(self, world_size: int) -> tuple[Link, Link]:
        """What carries all-gathers, and reductions, among that many ranks."""
        if self.network is not None and world_size > self.host:
            return self.network, self.network
        if self.gather is None or self.reduce is None:
            raise InputError(
                f"{self.name} was measured with one rank, which sends nothing: measure it with "
                f"{world_size}, or pass network="
            )
        return self.gather, self.reduce

    def in_memory(self, comm: Transport, world_size: int) -> bool:
        """Whether ``comm`` has that many ranks read each other's memory here.

        Raises:
            InputError: for "peer" where they are not known to be able to.
        """
        possible = self.shared is not None and (self.network is None or world_size <= self.host)
        if comm == "peer" and world_size > 1 and not possible:
            raise InputError(
                f"comm='peer': {self.name} was not measured with {world_size} ranks that read each "
                "other's memory: measure it with zshard plan --calibrate, or pass comm='group' or "
                "machine=None"
            )
        return comm != "group" and world_size > 1 and possible

    def with_network(self, network: Link | float) -> Machine:
        """The same with ``network`` between all ranks, whatever else there is; bytes a second."""
        if not isinstance(network, Link) and not _RATE.holds(network):
            raise InputError(
                f"network={network!r}: expected a zshard.Link, or bytes a second, 50e9 for instance"
            )
        link = network if isinstance(network, Link) else Link(network)
        return replace(self, gather=link, reduce=link, network=link, shared=None)

    def save(self, path: StrPath) -> None:
        """Write it as JSON, for ``Machine.of`` to read.

        Raises:
            InputError: for a path that cannot be written.
        """
        text = json.dumps(asdict(self), indent=1) + "\n"
        write_whole(path, lambda whole: whole.write_text(text, encoding="utf-8"))

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Machine:
        """A machine from its fields, as ``save`` writes them."""
        links = {name: found[name] for name in _LINKS}
        made = {name: None if link is None else Link(**link) for name, link in links.items()}
        return cls(**{**found, **made})

    @classmethod
    def of(cls, machine: Machine | StrPath) -> Machine:
        """A machine by its name ("h100") or by the file that ``zshard plan --calibrate`` wrote.

        Raises:
            InputError: for an unknown name, or a file that is none of these.
        """
        if isinstance(machine, Machine):
            return machine
        if isinstance(machine, str) and machine in MACHINES:
            return MACHINES[machine]
        try:
            return cls.from_dict(json.loads(Path(machine).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, RecursionError, InputError) as error:
            raise InputError(
                f"machine={machine!r}: expected one of {', '.join(MACHINES)}, or a file "
                f"of zshard plan --calibrate ({type(error).__name__}: {error})"
            ) from error


def _gpu(
    name: str, *, bf16: float, fp32: float, memory: float, nvlink: float, hbm: float
) -> Machine:
    """A GPU by its datasheet, whose products reach 60 % and whose memory 80 % of it: not measured.

    fp32 is TF32's rate. NVLink's is one direction; between hosts there are 400 Gbit/s a GPU.
    """
    products = {"float32": 0.6 * fp32, "bfloat16": 0.6 * bf16, "float16": 0.6 * bf16}
    inside = Link(0.8 * nvlink, 5e-6)
    return Machine(
        name,
        {**products, "float64": 0.6 * fp32 / 8},
        memory=0.8 * memory,
        pointwise=0.8 * memory,
        call=4e-6,
        gather=inside,
        reduce=inside,
        network=Link(0.8 * 50e9, 10e-6),
        hbm=hbm,
    )


# NVIDIA's datasheets: dense rates, without sparsity.
MACHINES = {
    machine.name: machine
    for machine in (
        _gpu("a100", bf16=312e12, fp32=156e12, memory=2.04e12, nvlink=300e9, hbm=80e9),
        _gpu("h100", bf16=989e12, fp32=494e12, memory=3.35e12, nvlink=450e9, hbm=80e9),
        _gpu("h200", bf16=989e12, fp32=494e12, memory=4.8e12, nvlink=450e9, hbm=141e9),
    )
}
