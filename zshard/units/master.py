"""The authority over a flat buffer's values, and the copy of it that gathers send.

With fp32 compute the master is what is computed with and sent: one tensor. With 16-bit compute it
is an fp32 tensor beside the copy in the compute dtype. Split, it is two 16-bit planes: the upper is
a bf16, and itself the copy that is sent; the lower is the rest.
"""

from __future__ import annotations

import torch

from .. import ops
from ..precision import Dtypes


class Master:
    """The owned range of a flat buffer.

    Attributes:
        values: (O,) master dtype; None where the master is split.
        low: (O,) int16, the lower plane of a split master, else None.
        send: (O,) compute dtype: the values themselves where dtypes agree, the upper plane of a
            split master, else a copy that the optimizer writes with each update.

    Args:
        initial: (O,) master dtype, kept as the values unless the master is split.
        send: memory for the copy, (O,) compute dtype; ``initial`` itself where dtypes agree.
    """

    values: torch.Tensor | None
    low: torch.Tensor | None

    def __init__(self, initial: torch.Tensor, send: torch.Tensor, dtypes: Dtypes) -> None:
        if dtypes.compute == dtypes.master:
            self.values = self.send = initial
            self.low, self.stale = None, False
            return
        self.send = send
        self.stale = not dtypes.split  # the copy is out of date
        if dtypes.split:
            self.values, self.low = None, torch.empty_like(initial, dtype=torch.int16)
            ops.split_master_(self.send, self.low, initial)
        else:
            self.values, self.low = initial, None

    @property
    def has_copy(self) -> bool:
        """Whether there is a copy beside the values, for the optimizer to write too."""
        return self.values is not None and self.send is not self.values

    def move(self, send: torch.Tensor) -> None:
        """Replace the send buffer by ``send`` (O,) compute dtype, which has the same values."""
        if self.values is self.send:
            self.values = send
        self.send = send

    def read(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Elements [begin, end): a view of the values, or a copy where the master is split."""
        part = slice(begin, end)
        if self.values is not None:
            return self.values[part]
        assert self.low is not None
        joined = torch.empty_like(self.low[part], dtype=torch.float32)
        ops.join_master_(joined, self.send[part], self.low[part])
        return joined

    def store(self, begin: int, value: torch.Tensor) -> None:
        """Make ``value`` (1-D, of any dtype and device) the elements from ``begin`` on."""
        part = slice(begin, begin + value.numel())
        if self.values is not None:
            self.values[part].copy_(value)
            return
        assert self.low is not None
        ops.split_master_(self.send[part], self.low[part], self._exact(value))

    def scatter(self, at: torch.Tensor, value: torch.Tensor) -> None:
        """Make ``value`` (1-D, of any dtype and device) the elements ``at`` (1-D int64)."""
        at, value = at.to(self.send.device), self._exact(value)
        if self.values is not None:
            self.values[at] = value
            return
        assert self.low is not None
        send, low = (torch.empty_like(value, dtype=each.dtype) for each in (self.send, self.low))
        ops.split_master_(send, low, value)
        self.send[at], self.low[at] = send, low

    def _exact(self, value: torch.Tensor) -> torch.Tensor:
        """``value`` in the master's dtype, beside it."""
        dtype = torch.float32 if self.values is None else self.values.dtype
        return value.to(self.send.device, dtype)

    def refresh(self) -> None:
        """Bring the copy up to date after something other than an optimizer op wrote the values."""
        if self.stale and self.values is not None:
            ops.cast_(self.send, self.values)
        self.stale = False

    @property
    def nbytes(self) -> int:
        """Bytes beside the copy: the fp32 values, or the lower plane; 0 where they are one."""
        beside = self.low if self.values is None else self.values
        return 0 if beside is None or beside is self.send else beside.nbytes
