"""Pictures. What draws one imports matplotlib only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import MissingPackage

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib(what: str) -> None:
    """Refuse at once what would have nothing to draw its picture with.

    Raises:
        MissingPackage: without matplotlib.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingPackage(
            f"{what} needs matplotlib, which is not installed: pip install matplotlib"
        ) from error


def new_figure(what: str, width: float, height: float) -> Figure:  # in inches
    """An empty picture.

    Raises:
        MissingPackage: without matplotlib.
    """
    require_matplotlib(what)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
