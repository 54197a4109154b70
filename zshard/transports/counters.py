"""What ``zshard.stats`` counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class CommStats:
    """What went through the seam since the last ``reset``.

    Attributes:
        calls: collectives issued, by operation: all_gather, reduce_scatter, all_reduce, broadcast,
            agree (what ranks tell each other before a pass), all_gather_object (in set-up).
        sent_bytes: bytes that other ranks needed of this one, by operation: the textbook volume.
        wire_bytes: the part of it that went through the process group, not over shared memory.
        exposed_seconds: time the host spent waiting for a collective; with NCCL, where the compute
            stream waits instead, for other hosts alone.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    wire_bytes: Counter[str] = field(default_factory=Counter)
    exposed_seconds: float = 0.0

    def reset(self) -> None:
        """Start counting anew."""
        self.calls.clear()
        self.sent_bytes.clear()
        self.wire_bytes.clear()
        self.exposed_seconds = 0.0
