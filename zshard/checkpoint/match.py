"""Which tensor of a checkpoint goes where in the model, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import CheckpointError
from .held import Sink
from .inventory import Inventory
from .manifest import Stored
from .reader import Pair


@dataclass
class Match:
    """What of a checkpoint goes where, and what does not fit.

    Attributes:
        problems: what can never be loaded, such as another shape.
        copies: stored tensors that are one in the model, by name; the first of them is loaded.
    """

    pairs: list[Pair] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    copies: list[dict[str, Stored]] = field(default_factory=list)

    def add(self, name: str, stored: Stored, held: Sink, *, cast: bool = False) -> None:
        """Note that ``stored`` goes to ``held``, if it fits."""
        if held.obstacle:
            self.problems.append(f"{name}: {held.obstacle}")
        elif tuple(stored.shape) != tuple(held.shape):
            shapes = f"of shape {stored.shape}, and {tuple(held.shape)} in the model"
            self.problems.append(f"{name}: {shapes}")
        elif stored.torch_dtype != held.dtype and not cast:
            dtypes = f"of {stored.torch_dtype}, and {held.dtype} in the model"
            self.problems.append(f"{name}: {dtypes}")
        else:
            self.pairs.append(Pair(name, stored, held))

    def refuse(self, where: str, *, strict: bool, has_values: bool) -> None:
        """Refuse what does not fit.

        Args:
            has_values: whether what is missing may stay as it is.

        Raises:
            CheckpointError: listing all of it.
        """
        lines = list(self.problems)
        if strict or not has_values:
            lines += [f"{name}: missing there" for name in self.missing]
        if strict:
            lines += [f"{name}: not in the model" for name in self.unexpected]
        if lines:
            helps = strict and (self.missing or self.unexpected)
            remedy = " (strict=False allows what is missing or unexpected)" if helps else ""
            raise CheckpointError(
                f"{where} does not fit the model, and nothing was loaded{remedy}:\n  "
                + "\n  ".join(lines)
            )


def match_model(
    stored: Mapping[str, Stored],
    masters: Mapping[str, Stored],
    aliases: Mapping[str, str],
    inventory: Inventory,
    *,
    cast: bool = False,
) -> Match:
    """Find the place of every stored tensor of the model.

    Args:
        stored: by name; masters: likewise, in the dtypes of the masters.
        aliases: of the stored tensors: other name -> name.
        cast: take floating-point tensors of another dtype than the model's too.
    """
    match = Match()
    used: set[str] = set()
    for name, held in (inventory.parameters | inventory.buffers).items():
        keys = [aliases.get(each, each) for each in inventory.names_of[name]]
        there = [key for key in dict.fromkeys(keys) if key in stored]
        used.update(there)
        if not there:
            match.missing.append(name)
            continue
        if len(there) > 1 and cast:
            match.copies.append({each: stored[each] for each in there})
        elif len(there) > 1:
            match.problems.append(
                f"{name}: one tensor in the model, and several there: {sorted(there)}"
            )
        key, master = there[0], inventory.masters.get(name)
        of_master = masters.get(key)
        same_dtype = stored[key].torch_dtype == held.dtype
        if master is not None and of_master is not None and same_dtype:
            match.add(name, of_master, master)
        else:
            floating = stored[key].torch_dtype.is_floating_point and held.dtype.is_floating_point
            match.add(name, stored[key], held, cast=cast and floating)
    match.unexpected += [name for name in stored if name not in used]
    return match
