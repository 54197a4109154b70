"""What is known of all gradients of a model together, and the factor that they still lack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch

from ..units.flat import Flat
from .outcome import Outcome


class Totals:
    """The sum of squares of a reduction, until the gradients change, and what multiplies them.

    Clipping and unscaling multiply by one factor, which zshard's optimizers apply as they read the
    gradients; whoever else reads them applies it before, or sees them with it.

    Attributes:
        grad_scale: that factor, (1,) fp32 or fp64; None if there is none.
        unscales: whether it takes a loss scale away.
    """

    def __init__(self, flats: Sequence[Flat], read_outcome: Callable[[], None]) -> None:
        self._flats = flats
        self._read_outcome = read_outcome  # of the last backward, which comes by ``take``
        self._sum_of_squares: torch.Tensor | None = None  # (1,) float64, of all gradients
        self._factors: list[torch.Tensor] = []  # of the gradients, which that sum lacks; (1,)
        self._non_finite: torch.Tensor | None = None  # 0-d float64, of the last reduction
        self.grad_scale: torch.Tensor | None = None
        self.unscales = False
        self._zeroed: dict[Flat, set[int]] = defaultdict(set)  # gradients zeroed without it

    def take(self, found: Outcome) -> None:
        """Take in what came out of a reduction."""
        self._sum_of_squares, self._non_finite = found.sum_of_squares.view(1), found.non_finite
        self._factors.clear()

    def forget(self) -> None:
        """Forget the sum of squares: it is not of the gradients that there are."""
        self._sum_of_squares = None

    def note_change(self) -> None:
        """Note that gradients may have changed since the reduction."""
        self._read_outcome()
        self.forget()

    def squares(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The sum of squares of all gradients on all ranks, and a factor; None if they changed.

        Returns:
            (1,) float64; and what the gradients were multiplied by since, if anything, (1,).
        """
        self._read_outcome()
        if self._sum_of_squares is None:
            return None
        while len(self._factors) > 1:  # the last one is left to the op that takes the root
            factor = self._factors.pop(0).double()
            self._sum_of_squares = self._sum_of_squares * factor**2
        return self._sum_of_squares, next(iter(self._factors), None)

    @property
    def non_finite(self) -> torch.Tensor | None:
        """0-d float64, not 0 if any gradient is not finite; None if they were changed since."""
        self._read_outcome()
        if self._sum_of_squares is None or self._non_finite is None:
            return None
        found = self._non_finite
        for factor in self._factors:  # of a norm that has overflowed
            found = found + (~factor.isfinite()).sum()
        return found

    def covers(self, params: Iterable[torch.Tensor]) -> bool:
        """Whether ``params`` include every parameter that has a gradient."""
        given = {id(param) for param in params}
        return all(
            id(param) in given
            for flat in self._flats
            for param, present in zip(flat.params, flat.grads.present, strict=True)
            if present
        )

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient that was reduced."""
        self._read_outcome()
        return any(any(flat.grads.present) for flat in self._flats)

    # --- the factor ------------------------------------------------------------------------------

    def scale_by(self, factor: torch.Tensor, *, unscales: bool = False) -> None:
        """Defer a multiplication of the gradients by ``factor`` until they are read.

        Args:
            factor: of one element, fp32, or fp64 where any parameter is.
            unscales: this is the inverse of a loss scale; see ``Gradients.before_access``.
        """
        factor = factor.view(1)
        # Kept even after ``apply_scale``: a rank that has looked at a gradient has applied it, the
        # others have not, and all have to make the next norm of the same numbers.
        self._factors.append(factor)
        self.grad_scale = factor if self.grad_scale is None else self.grad_scale * factor
        self.unscales = self.unscales or unscales

    def apply_scale(self) -> None:
        """Multiply the gradients by the factor that zshard's optimizers apply on the fly."""
        self._read_outcome()
        if self.grad_scale is not None:
            for flat in self._flats:
                if any(flat.grads.present):
                    flat.grads.owned().mul_(self.grad_scale.to(flat.dtypes.master))
            self.drop_scale()

    def drop_scale(self) -> None:
        """Leave the gradients without the factor: they are zeros, or gone."""
        self.grad_scale, self.unscales = None, False
        self._zeroed.clear()

    def before_zeroing(self, flat: Flat, index: int) -> None:
        """Apply the factor, which the other gradients lack, before ``index`` of ``flat`` is zeroed.

        In fp16 small values of those would become 0: there it waits until all are zeroed.
        """
        reduced = (each.dtypes.reduce for each in self._flats)  # asked for only where it matters
        if not (self.unscales and torch.float16 in reduced):
            self.apply_scale()
            return
        self._zeroed[flat].add(index)
        present = ((each, i) for each in self._flats for i, p in enumerate(each.grads.present) if p)
        if all(i in self._zeroed[each] for each, i in present):
            self.drop_scale()
