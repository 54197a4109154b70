"""Which dtype a parameter has where: in compute, on the wire, in the master, at the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from .errors import InputError

_WIRE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Dtypes(NamedTuple):
    """The four dtypes of one flat buffer."""

    param: torch.dtype  # the parameter's own dtype: what is read back
    compute: torch.dtype  # full buffer and send buffer
    reduce: torch.dtype  # gradients on the wire and in the gradient shard
    master: torch.dtype  # the authority; optimizer states have it too


@dataclass(frozen=True)
class Precision:
    """The precision policy of a wrapped model.

    Args:
        compute: dtype of the gathered parameters; None keeps each parameter's own.
        reduce: dtype of gradients on the wire and in the gradient shard; None keeps each
            parameter's own. Sums are accumulated in fp32 whatever this is.
        master: "fp32". ("split", two 16-bit planes, is not available yet.)
        output: dtype that the root module's floating-point outputs are cast to; None leaves them.
        cast_inputs: cast floating-point inputs of the root module to the compute dtype.

    Raises:
        InputError: for a dtype or master that zshard cannot use.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: Literal["fp32"] = "fp32"
    output: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("compute", "reduce", "output"):
            dtype = getattr(self, field)
            if dtype is not None and dtype not in _WIRE:
                names = ", ".join(str(d) for d in _WIRE)
                raise InputError(f"Precision({field}={dtype!r}): expected None or one of {names}")
        if self.master != "fp32":
            raise InputError(f"Precision(master={self.master!r}): only 'fp32' is available")

    @classmethod
    def bf16(
        cls,
        reduce: torch.dtype = torch.float32,
        *,
        output: torch.dtype | None = None,
        cast_inputs: bool = True,
    ) -> Precision:
        """Compute in bf16, reduce in ``reduce``, keep an fp32 master."""
        return cls(torch.bfloat16, reduce, output=output, cast_inputs=cast_inputs)

    @classmethod
    def fp16(
        cls,
        reduce: torch.dtype = torch.float32,
        *,
        output: torch.dtype | None = None,
        cast_inputs: bool = True,
    ) -> Precision:
        """Compute in fp16, reduce in ``reduce``, keep an fp32 master."""
        return cls(torch.float16, reduce, output=output, cast_inputs=cast_inputs)

    def resolve(self, param: torch.dtype) -> Dtypes:
        """The dtypes of a parameter whose own dtype is ``param``.

        float64 parameters stay float64 throughout: their master is exact.
        """
        if param == torch.float64:
            return Dtypes(param, param, param, param)
        return Dtypes(param, self.compute or param, self.reduce or param, torch.float32)
