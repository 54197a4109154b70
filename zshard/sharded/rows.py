"""Operators of lists in which some rows have no sharded tensor.

An average of weights has buffers beside parameters in its lists, and an optimizer parameters that
wrap was told to ignore beside sharded ones. What lies in one row is computed together, apart from
all other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ..param import Sharded


def plain_rows(args: tuple[object, ...], kwargs: dict[str, object]) -> list[int]:
    """The rows without a sharded tensor; none if the arguments cannot be taken apart by rows."""
    values = (*args, *kwargs.values())
    lists = [each for each in values if isinstance(each, (list, tuple)) and len(each) > 0]
    count = max(map(len, lists), default=0)
    if any(len(each) != count for each in lists):
        return []  # there are no rows, and it is refused
    if any(isinstance(each, Sharded) for each in values):
        return []  # it is for all rows
    return [
        row for row in range(count) if not any(isinstance(each[row], Sharded) for each in lists)
    ]


def apart(
    func: Any,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    plain: Collection[int],
    on_slices: Callable[[Any, tuple[object, ...], dict[str, object]], object],
) -> list[object]:
    """Carry ``func`` out on the rows ``plain`` as torch does, on the others by ``on_slices``.

    Returns:
        What it returns for each row, in order; nothing, if it returns nothing.
    """
    values = (*args, *kwargs.values())
    count = max(len(each) for each in values if isinstance(each, (list, tuple)))
    others = [row for row in range(count) if row not in plain]
    results: dict[int, object] = {}

    def carry_out(on: Callable[..., object], rows: Collection[int]) -> None:
        def pick(value: object) -> object:
            if isinstance(value, (list, tuple)) and len(value) > 0:
                return [value[row] for row in rows]
            return value

        picked = {name: pick(value) for name, value in kwargs.items()}
        result = on(func, tuple(map(pick, args)), picked)
        if isinstance(result, (list, tuple)):
            results.update(zip(rows, result, strict=True))

    carry_out(on_slices, others)  # first: where these are refused, nothing has changed
    carry_out(lambda func, args, kwargs: func(*args, **kwargs), plain)
    return [results[row] for row in sorted(results)]
