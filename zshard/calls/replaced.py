"""What the modules hold at the end of full_params, where a script has replaced what it lends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..digest import digest
from ..errors import InputError
from ..unit import Unit
from ..units.flat import Flat


def take_replaced(
    units: Sequence[Unit], wholes: Mapping[Flat, list[nn.Parameter]], *, write: bool
) -> None:
    """Take parameters that were put into the modules of ``units`` in the place of ``wholes``.

    Args:
        write: whether their values are taken as well.

    Raises:
        InputError: if they are, and one was removed, or modules that share one hold different ones.
    """
    given = {flat: list(params) for flat, params in wholes.items()}
    for unit in units:
        for site in unit.sites:
            now = site.module._parameters.get(site.attribute)
            if now is not None and now is not given[site.flat][site.segment]:
                wholes[site.flat][site.segment] = now  # load_state_dict(assign=True)
    for unit in units if write else ():
        for site in unit.sites:
            now = site.module._parameters.get(site.attribute)
            taken = wholes[site.flat][site.segment]
            if now is None:
                raise InputError(
                    f"{site.flat.names[site.segment]} was removed inside zshard.full_params(model, "
                    "write=True), so nothing of what was written is taken. Remove it, or prune or "
                    "parametrize it, before zshard.wrap; or set it to zeros there."
                )
            # Else it is refused for its shape.
            of_its_shape = taken.shape == site.flat.layout.segments[site.segment].shape
            if of_its_shape and not _alike(now, taken):
                names = ", ".join(site.flat.all_names[site.segment])
                raise InputError(
                    f"{names} are one parameter, and zshard.full_params(model, write=True) has "
                    "been left with different values in its places, so nothing of what was written "
                    "is taken. Put the same Parameter into all of them; to have two, untie them "
                    "before zshard.wrap."
                )


def _alike(now: torch.Tensor, taken: torch.Tensor) -> bool:
    """Whether a place of a parameter holds the values that are taken of it, if these are any."""
    if now is taken or taken.is_meta or taken.layout is not torch.strided:
        return True  # or else ``require_values`` refuses it
    same = (now.shape, now.dtype, now.device) == (taken.shape, taken.dtype, taken.device)
    return same and now.layout is torch.strided and digest(now) == digest(taken)


def require_values(wholes: Mapping[Flat, list[nn.Parameter]]) -> None:
    """Make sure that ``wholes``, which modules hold, have dense values.

    Raises:
        InputError: for one that has not.
    """
    for flat, params in wholes.items():
        for name, value in zip(flat.names, params, strict=True):
            if value.is_meta or value.layout is not torch.strided:
                kind = "on the meta device" if value.is_meta else f"of {value.layout}"
                raise InputError(
                    f"{name}: zshard.full_params(model, write=True) has been left with a tensor "
                    f"{kind} in its place, so nothing of what was written is taken. Put dense "
                    "values there"
                )
