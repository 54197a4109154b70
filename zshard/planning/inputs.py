"""What a plan's batch stands for: a model's inputs without values, and the loss of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..containers import tensors_in
from ..errors import InputError

# What a step is made with: (sequences, tokens of each) for a language model; a tensor, the model's
# input; several in a tuple; or by their names in a dict.
BatchLike = tuple[int, int] | Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
_Inputs = tuple[tuple[object, ...], dict[str, object], Callable[[object], Tensor]]
_TOKENS = 2**40  # of a rank: beyond any machine, and within what torch takes as a size


def text_of(batch: BatchLike | None) -> tuple[int, int] | None:
    """A batch that is (sequences, tokens); None: it is something else.

    Raises:
        InputError: for sizes that no batch has.
    """
    if not (isinstance(batch, tuple) and len(batch) == 2):
        return None
    sequences, tokens = batch
    if not (type(sequences) is int and type(tokens) is int):
        return None
    if min(sequences, tokens) < 1 or sequences * tokens > _TOKENS:
        raise InputError(
            f"batch={batch!r}: expected (sequences, tokens), each 1 or more, and up to {_TOKENS:,} "
            "in all"
        )
    return sequences, tokens


def inputs_of(batch: BatchLike, model: nn.Module) -> _Inputs:
    """Positional and named inputs of the model, and what makes the loss of its output."""
    text = text_of(batch)
    if text is not None:
        tokens = torch.zeros(text, dtype=torch.int64, device="cpu")
        if hasattr(model, "get_input_embeddings"):  # of transformers
            return (), {"input_ids": tokens, "labels": tokens}, _loss
        return (tokens,), {}, partial(_cross_entropy, tokens)
    if isinstance(batch, Tensor):
        return (_fake(batch),), {}, _loss
    if isinstance(batch, tuple) and all(isinstance(item, Tensor) for item in batch):
        return tuple(_fake(item) for item in batch), {}, _loss
    if isinstance(batch, Mapping):
        return (), {name: _fake(value) for name, value in batch.items()}, _loss
    raise InputError(
        f"batch={batch!r}: expected (sequences, tokens) for a language model, or the model's "
        "inputs: a tensor, a tuple of them, or a dict"
    )


def _fake(value: object) -> object:
    def fake(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return like(leaf, leaf.dtype).requires_grad_(leaf.requires_grad)

    return tree_map(fake, value)


def _cross_entropy(tokens: Tensor, output: object) -> Tensor:
    """The loss of a language model that returns logits (B, T, V), reduced in fp32."""
    logits = next(tensors_in(output))
    return F.cross_entropy(logits.float().flatten(0, -2), tokens.flatten())


def _loss(output: object) -> Tensor:
    """The model's own loss, where it returns one; else the mean of what it returns."""
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    means = [t.float().mean() for t in tensors_in(output) if t.requires_grad]
    if not means:
        raise InputError("the model's output depends on no trained parameter: there is no backward")
    return torch.stack(means).sum()


def like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """On the CPU, where a fake op exists for everything."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
