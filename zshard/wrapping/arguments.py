"""What ``wrap`` may be given: its arguments by themselves, and beside the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..errors import InputError
from ..precision import Precision
from ..transports.transport import require_transport
from ..unitmap import UnitSpec
from ..words import counted
from .materialize import on_meta


def check_arguments(
    model: nn.Module,
    precision: object,
    comm: object,
    prefetch: object,
    init: object,
    device: torch.device | str | None,
    init_fn: object,
) -> None:
    """Check those of ``wrap`` that need no look at more of ``model`` than where it is.

    Raises:
        InputError: for one that cannot be used.
    """
    if not isinstance(precision, Precision):
        raise InputError(
            f"precision={precision!r}: expected a zshard.Precision, such as "
            "zshard.Precision.bf16(), or None"
        )
    require_transport(comm)
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise InputError(f"prefetch={prefetch!r}: expected a whole number of units, 0 or more")
    if init not in ("check", "broadcast", "trust"):
        raise InputError(f"init={init!r}: expected 'check', 'broadcast' or 'trust'")
    if device is not None and _type_of(device) == "meta":
        raise InputError("device='meta': expected a device to train on; see init_fn for meta")
    if init_fn is not None and not callable(init_fn):
        raise InputError(f"init_fn={init_fn!r}: expected a function of a module")
    if init_fn is not None and not on_meta(model):
        raise InputError(
            "init_fn was given, but no parameter or buffer is on the meta device, so it would "
            'never be called. Build the model under torch.device("meta"), or leave init_fn out.'
        )


def _type_of(device: torch.device | str) -> str:
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"device={device!r}: {error}") from None
    if asked.type == "cuda" and (asked.index or 0) >= (count := torch.cuda.device_count()):
        raise InputError(
            f"device={str(device)!r}: torch finds {counted(count, 'GPU')} here, counted from 0 on "
            "each host; a rank's number on its host is torch.distributed.get_node_local_rank()"
        )
    return asked.type


def ignored_parameters(
    model: nn.Module, ignored: Iterable[str | nn.Parameter | nn.Module] | None
) -> list[nn.Parameter]:
    """The parameters that ``ignored`` names: by themselves, their names, or modules'.

    Raises:
        InputError: for one that the model does not have.
    """
    if ignored is None:
        return []
    named = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    own = {id(param) for param in named.values()}
    found: list[nn.Parameter] = []
    # A container is no list of what lies in it: it may have parameters besides, or give names.
    single = isinstance(ignored, (str, torch.Tensor, nn.Module))
    if single or not isinstance(ignored, Iterable):
        raise InputError(
            f"ignored={_shown(ignored)}: expected a list of parameters, names or modules"
        )
    for item in ignored:
        if isinstance(item, nn.Parameter) and id(item) in own:
            found.append(item)
        elif isinstance(item, nn.Module) and any(item is each for each in modules.values()):
            found += item.parameters()
        elif isinstance(item, str) and item in named:
            found.append(named[item])
        elif isinstance(item, str) and item in modules:
            found += modules[item].parameters()
        else:
            raise InputError(f"ignored: the model has no parameter or module {_shown(item)}")
    return found


def _shown(item: object) -> str:
    return type(item).__name__ if isinstance(item, nn.Module) else repr(item)


def check_precision(specs: Sequence[UnitSpec], precision: Precision) -> None:
    """Check that parameters of these dtypes can have ``precision``.

    Raises:
        InputError: if they cannot.
    """
    dtypes = {owned.param.dtype for spec in specs for owned in spec.params}
    casts = precision.cast_inputs and precision.compute not in (None, torch.float64)
    if casts and dtypes == {torch.float64}:
        raise InputError(
            f"Precision(compute={precision.compute}) would cast the model's inputs, while float64 "
            "parameters, which all of its are, stay float64. Convert the model first, or pass "
            "cast_inputs=False"
        )
    wanted = precision.master == "split" and bool(dtypes)
    if wanted and not any(precision.resolve(dtype).split for dtype in dtypes):
        if precision.compute == torch.bfloat16:
            raise InputError(
                "Precision(master='split') has nothing to split: all parameters are float64, "
                "which stay float64. Convert the model first, or pass master='fp32'"
            )
        raise InputError(
            "Precision(master='split') needs bf16 compute, and the parameters are "
            f"{', '.join(sorted(map(str, dtypes)))}: pass compute=torch.bfloat16"
        )
