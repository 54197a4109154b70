"""The metrics of a training run for TensorBoard, where that is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Scalars:
    """Writes scalars into ``folder``, from after the step ``resumed_at`` on."""

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    @classmethod
    def open(cls, folder: Path, *, resumed_at: int) -> Scalars | None:
        """None where tensorboard is not installed.

        Raises:
            InputError: if nothing can be written into the folder.
        """
        if find_spec("tensorboard") is None:
            return None
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier run wrote after that step is hidden.
        purged = resumed_at + 1 if resumed_at else None
        try:
            return cls(SummaryWriter(str(folder), purge_step=purged))
        except (OSError, UnicodeError) as error:
            raise InputError(f"{folder} cannot be written to: {error}") from error

    def write(self, step: int, values: dict[str, float | None]) -> None:
        """Append what of ``values`` is known, by name."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush everything to the file."""
        self._writer.close()
