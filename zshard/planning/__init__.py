"""What a model takes, sends and lasts, before there is a rank, a GPU or any of its memory.

A reader follows a plan through ``planner``, ``plan`` and ``footprint`` (bytes), ``rehearsal`` and
``work`` (activations and operations, on fake tensors), ``forecast``, ``machine`` and ``timeline``
(times).
"""

from .fit import Alternative, Fit
from .machine import Link, Machine
from .plan import Plan
from .planner import plan

__all__ = ["Alternative", "Fit", "Link", "Machine", "Plan", "plan"]
