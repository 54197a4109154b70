"""Gradients that are differentiated again: gradient penalties, forces, residuals of an equation.

[Note: double backward]
``torch.autograd.grad(..., create_graph=True)`` makes a graph that reads the parameters of the units
it goes through, after their own backward, in a backward that may reach no output of theirs. So
their whole parameters have to stay where they are: as with zero2, zero1, ddp, and on one rank. Such
a backward makes gradients of inputs alone; nothing is reduced, and there is no more to it. In the
next one, through that graph, each parameter gets its gradient at once, as ever.
"""

from __future__ import annotations

import torch

from ..errors import StateError
from ..unit import Unit


def refuse_graph_through(unit: Unit) -> None:
    """Refuse a backward that makes a graph through ``unit``, where it could not be used.

    To be asked in one of its hooks, in which autograd enables gradients only if it makes one.

    Raises:
        StateError: if the unit is freed behind its backward, or gradients of its parameters come.
    """
    if not torch.is_grad_enabled():
        return
    if any(flat.full.will_be_reached() for flat in unit.flats):
        refuse_graph_of_gradients(unit)
    if unit.slot_bytes > 0:
        raise StateError(
            f"unit {unit.label!r}: torch.autograd.grad(create_graph=True) makes a graph that reads "
            "the unit's parameters, whose memory is about to hold another unit. Pass a strategy "
            'that keeps whole parameters: zshard.wrap(strategy="zero2").'
        )


def refuse_graph_of_gradients(unit: Unit) -> None:
    """Refuse a gradient of a parameter of ``unit`` if it has a graph.

    Raises:
        StateError: if it has.
    """
    if torch.is_grad_enabled():
        raise StateError(
            f"unit {unit.label!r}: backward(create_graph=True) of a wrapped model: the gradients "
            "of parameters that zshard reduces have no graph. Differentiate gradients of inputs, "
            "torch.autograd.grad(loss, inputs, create_graph=True), or leave the model unwrapped."
        )
