"""What a model takes and sends, and how long a step lasts, before there is a rank or a GPU.

A reader follows a plan through ``planner``, ``plan`` and ``footprint`` (bytes), ``rehearsal`` with
``inputs`` and ``work`` (activations and operations, on fake tensors), ``forecast``, ``machine`` and
``timeline`` (times).
"""

from .fit import Alternative, Fit
from .machine import Link, Machine
from .plan import Plan
from .planner import plan

__all__ = ["Alternative", "Fit", "Link", "Machine", "Plan", "plan"]
