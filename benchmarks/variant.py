"""Ways to run zshard, as the benchmarks' command lines name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Variant:
    """A way to run zshard.

    Args:
        reduce: the dtype of gradients on the wire, "fp32" or "bf16"; None for the setting's.
        comm: "group", the process group's collectives, or "peer", memory that the ranks share.
        traced: whether every step is recorded by zshard.trace, and forgotten.
        split: whether the master is two 16-bit planes, in the settings that compute in bf16.
    """

    strategy: str = "zero3"
    prefetch: int = 1
    reduce: str | None = None
    comm: Literal["group", "peer"] = "group"
    traced: bool = False
    split: bool = False

    @classmethod
    def parse_all(cls, text: str) -> list[Variant]:
        """Read ``--zshard``.

        Raises:
            ValueError: for a variant that is none, or one given twice.
        """
        variants = [cls.parse(part) for part in text.split(",")]
        if len(set(variants)) < len(variants):
            raise ValueError(f"{text!r} has one variant twice")
        return variants

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read, for instance, "zero3", "prefetch=0" or "zero2+prefetch=2+reduce=bf16".

        Raises:
            ValueError: with what is wrong and what can be asked for.
        """
        given: dict[str, object] = {}
        for part in text.split("+"):
            key, equals, value = part.rpartition("=")
            if not equals and value in ("zero3", "zero2", "zero1", "ddp"):
                given["strategy"] = value
            elif key == "prefetch" and value.isdecimal():
                given[key] = int(value)
            elif key == "reduce" and value in DTYPES:
                given[key] = value
            elif not equals and value == "peer":
                given["comm"] = value
            elif not equals and value == "trace":
                given["traced"] = True
            elif not equals and value == "split":
                given["split"] = True
            else:
                raise ValueError(
                    f"{text!r}: {part!r} is none of zero3, zero2, zero1, ddp, prefetch=NUMBER, "
                    "reduce=fp32, reduce=bf16, peer, trace, split (joined by + in one variant)"
                )
        return cls(**given)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """What the tables call it."""
        name = f"zshard {self.strategy}"
        if self.prefetch != 1:
            name += f" prefetch={self.prefetch}"
        if self.reduce is not None:
            name += f" reduce={self.reduce}"
        if self.comm != "group":
            name += f" {self.comm}"
        if self.split:
            name += " split"
        return f"{name} trace" if self.traced else name
