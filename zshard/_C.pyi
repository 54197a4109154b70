"""The compiled extension: plain host objects. Its tensor ops are reached through zshard.ops."""

from typing import TypedDict

ALIGN: int  # segments and shards start at multiples of this many elements

class BuildInfo(TypedDict):
    """How this extension was compiled."""

    compiler: str
    flags: str
    cuda: str | None  # CUDA toolkit, "13.0"; None = built without CUDA kernels
    cuda_archs: list[str]  # ["sm_80", ...]
    torch_headers: str  # "2.13.0"

class Range:
    """Elements [begin, end) of a flat buffer."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def numel(self) -> int: ...

class FlatLayout:
    """Where the segments of a unit lie in its flat buffer. All counts are elements."""

    @property
    def offsets(self) -> list[int]:
        """One per segment, multiples of ALIGN, ascending."""
    @property
    def numels(self) -> list[int]:
        """One per segment."""
    @property
    def world_size(self) -> int: ...
    @property
    def total(self) -> int:
        """End of the last segment."""
    @property
    def shard_size(self) -> int:
        """Elements of each rank's shard, a multiple of ALIGN; world_size * shard_size >= total."""
    def intersection(self, segment: int, rank: int) -> Range:
        """Return the part of a segment that a rank's shard holds, in flat coordinates.

        Where it holds none, the range is empty. Raises InputError for an index out of range.
        """

def flat_layout(numels: list[int], world_size: int) -> FlatLayout:
    """Lay segments of the given sizes one after the other, each at a multiple of ALIGN.

    Raises InputError for a negative size, a total above 2^56 or a world_size below 1.
    """

class Rendezvous:
    """Where the ranks of one host meet: [Note: arrivals and departures] in csrc/rendezvous.h.

    Args:
        memory: address of the first rank's 64 bytes, at a multiple of 64, shared and 0 at first.
        stride: bytes from one rank's to the next, likewise.

    The two waits return -1, or a rank that is late after ``seconds``; a signal ends them early.
    """

    def __init__(self, memory: int, stride: int, world_size: int, rank: int) -> None: ...
    def arrive(self) -> None:
        """Let the others read this rank's memory of this round."""
    def depart(self) -> None:
        """Say that this rank has read what it needs of this round."""
    def await_arrivals(self, seconds: float) -> int:
        """Wait until every rank has arrived as often as this one has."""
    def await_departures(self, seconds: float) -> int:
        """Wait until every rank has departed as often as this one has arrived."""

def build_info() -> BuildInfo:
    """Return how this extension was compiled."""
