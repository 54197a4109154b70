"""The states of a rank's random number generators, as text of a fixed size."""

from __future__ import annotations

import json
import random
import sys

import torch

from ..errors import CheckpointError, InputError

NBYTES = 1 << 15  # the text is a little over 24 KB


def random_state(device: torch.device) -> torch.Tensor:  # (NBYTES,) uint8
    """The states of torch's generators for the CPU and ``device``, and of Python's and NumPy's.

    Raises:
        InputError: for another generator of NumPy's than its first.
    """
    version, words, gauss = random.getstate()
    state: dict[str, object] = {
        "cpu": _hex(torch.get_rng_state()),
        "python": [version, list(words), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = _hex(torch.cuda.get_rng_state(device))
    if "numpy" in sys.modules:
        numpys = sys.modules["numpy"].random
        if (kind := numpys.get_state(legacy=False)["bit_generator"]) != "MT19937":
            raise InputError(
                f"rng=True: numpy.random has another generator ({kind}, by set_bit_generator) than "
                "MT19937, and only that one's state is saved"
            )
        name, keys, *rest = numpys.get_state()
        state["numpy"] = [name, [int(key) for key in keys], *rest]
    text = json.dumps(state).encode()
    return torch.frombuffer(bytearray(text.ljust(NBYTES)), dtype=torch.uint8)


def set_random_state(stored: torch.Tensor, device: torch.device) -> None:
    """Go on with the random numbers where ``random_state`` was called.

    Raises:
        CheckpointError: if the state lacks that of a generator in use here, or is none.
    """
    try:
        _set(stored, device)
    except (ValueError, LookupError, TypeError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the random states cannot be understood: {error!r}") from error


def _set(stored: torch.Tensor, device: torch.device) -> None:
    state = json.loads(bytes(stored.tolist()))
    if device.type == "cuda" and "cuda" not in state:
        raise CheckpointError("the checkpoint has no random state for a GPU: it was saved without")
    torch.set_rng_state(_from_hex(state["cpu"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if device.type == "cuda":
        torch.cuda.set_rng_state(_from_hex(state["cuda"]), device)
    if "numpy" in state:
        try:
            import numpy
        except ImportError as error:
            raise CheckpointError(
                "the checkpoint has a random state of numpy, which is not installed: pip install "
                "numpy, or load without rng=True"
            ) from error
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8, device="cpu")
