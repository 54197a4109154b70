"""Loads the compiled extension before any other module does, to say so where there is none."""

from __future__ import annotations

from pathlib import Path

import torch  # noqa: F401  # whose libraries the extension is linked to

_HERE = Path(__file__).parent

try:
    from . import _C  # noqa: F401
except ImportError as error:
    if any(_HERE.glob("_C.*.so")):
        raise
    raise ImportError(
        f"{_HERE} has not been built. Start Python outside of that checkout to import an installed "
        "zshard, or build this one: pip install -e ."
    ) from error
