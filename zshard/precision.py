"""Which dtype a parameter has where: in compute, on the wire, in the master, at the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from .errors import InputError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # that zshard shards


class Dtypes(NamedTuple):
    """The dtypes of one flat buffer."""

    param: torch.dtype  # the parameter's own dtype: what is read back
    compute: torch.dtype  # full buffer and send buffer
    reduce: torch.dtype  # gradients on the wire and in the gradient shard
    master: torch.dtype  # the authority; optimizer states have it too
    split: bool = False  # the fp32 master is two 16-bit planes, the upper of them the bf16 copy

    @property
    def beside_bytes(self) -> int:
        """Of the master, for an element, beside what is sent: its values, or their lower plane."""
        if self.split:
            return 2
        return 0 if self.compute == self.master else self.master.itemsize


@dataclass(frozen=True)
class Precision:
    """The precision policy of a wrapped model.

    Args:
        compute: dtype of the gathered parameters; None keeps each parameter's own.
        reduce: dtype of gradients on the wire and in the gradient shard; None keeps each
            parameter's own. The sum over ranks is taken in fp32 (of fp64 gradients in fp64) and
            rounded to it once. What several backwards add up is kept in it: a sum of hundreds of
            micro-batches in bf16 stands still where one in fp32 goes on.
        master: "fp32"; or "split", for bf16 compute: the fp32 master as two 16-bit planes, of
            which the upper is the bf16 copy that is gathered (rounded half up, not to even). Two
            bytes a parameter less, and the same updates bit for bit; only zshard's optimizers can
            use it. Parameters that compute in fp32 or fp64 are their own master all the same.
        output: dtype that the root module's floating-point outputs are cast to; None leaves them.
        cast_inputs: cast floating-point inputs of the root module to the compute dtype. Both find
            tensors in tuples, lists, dicts, dataclasses and what is registered as a pytree, as the
            outputs of Hugging Face's models are; not in subclasses of list and dict, or objects.

    Raises:
        InputError: for a dtype or master that zshard cannot use, or a split one without bf16.

    Example:
        >>> zshard.Precision.bf16(reduce=torch.bfloat16, master="split").compute
        torch.bfloat16
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    master: Literal["fp32", "split"] = "fp32"
    output: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for field in ("compute", "reduce", "output"):
            dtype = getattr(self, field)
            if dtype is not None and dtype not in FLOATS:
                names = ", ".join(str(d) for d in FLOATS)
                raise InputError(f"Precision({field}={dtype!r}): expected None or one of {names}")
        if self.master not in ("fp32", "split"):
            raise InputError(f"Precision(master={self.master!r}): expected 'fp32' or 'split'")
        if not isinstance(self.cast_inputs, bool):
            raise InputError(f"Precision(cast_inputs={self.cast_inputs!r}): expected True or False")
        if self.master == "split" and self.compute not in (None, torch.bfloat16):
            raise InputError(
                f"Precision(compute={self.compute}, master='split'): the upper plane of a split "
                "master is the bf16 copy that is computed with; use compute=torch.bfloat16"
            )

    @classmethod
    def bf16(
        cls,
        reduce: torch.dtype = torch.float32,
        *,
        master: Literal["fp32", "split"] = "fp32",
        output: torch.dtype | None = None,
        cast_inputs: bool = True,
    ) -> Precision:
        """Compute in bf16, reduce in ``reduce``, keep an fp32 master."""
        return cls(torch.bfloat16, reduce, master, output, cast_inputs)

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

        Raises:
            InputError: where only one of compute and reduce would be float64.
        """
        if param == torch.float64:
            return Dtypes(param, param, param, param)
        compute, reduce = self.compute or param, self.reduce or param
        if (compute == torch.float64) != (reduce == torch.float64):
            raise InputError(
                f"Precision(compute={self.compute}, reduce={self.reduce}) for {param} parameters: "
                "float64 gradients are reduced in float64 and others are not; give both, or none"
            )
        split = self.master == "split" and compute == torch.bfloat16
        return Dtypes(param, compute, reduce, torch.float32, split)
