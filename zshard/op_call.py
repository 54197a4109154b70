"""How an op of the extension is called: its errors by type, and what it does while traced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import _C  # noqa: F401  # loading it registers torch.ops.zshard
from .errors import InputError


def call(op: Callable[..., None], *args: object) -> None:
    """Call ``op``, one of torch.ops.zshard.

    Raises:
        InputError: for what it does not take.
    """
    try:
        op(*args)
    except RuntimeError as error:
        message = str(error)
        # None, or memory of a kind that no kernel is for: torch's words do not say so.
        if isinstance(error, NotImplementedError) or "aoti_torch_get_device_type" in message:
            name = str(op).removesuffix(".default").replace(".", "::")
            message = f"{name}: every tensor has to be there, dense, and on a CPU or a CUDA device"
        elif "zshard::" not in message:  # not an argument's fault: a CUDA error, memory, a bug
            raise
        raise InputError(message) from None


def fake(*args: object) -> None:
    """Return nothing, as in-place ops do; but refuse a real tensor beside a meta tensor.

    Such a call is dispatched here as well, and would otherwise be silently without effect.
    """
    devices: set[torch.device] = set()
    for arg in args:
        tensors = arg if isinstance(arg, list | tuple) else [arg]
        devices.update(item.device for item in tensors if isinstance(item, Tensor))
    if len(devices) > 1:
        names = " and ".join(sorted(str(device) for device in devices))
        raise InputError(f"zshard::ops: a call's tensors are on {names}: move all to one device")
