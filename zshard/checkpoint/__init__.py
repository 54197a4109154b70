"""Checkpoints: sharded, without pickle, whole or absent, and loadable by any number of ranks.

A reader follows a save through ``save``, ``writer`` and ``manifest``, and a load through ``load``,
``match`` and ``reader``. ``files`` is the only module that touches a file system.
"""

from .catalogue import latest
from .load import Loaded, load
from .save import SaveHandle, save
from .weights import export, load_weights

__all__ = ["Loaded", "SaveHandle", "export", "latest", "load", "load_weights", "save"]
