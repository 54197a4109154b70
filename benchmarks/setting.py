"""What the steps train, and in which precision: the same for all contestants."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zshard.gpt import GPT, SIZES, VOCABULARY, GPTConfig

UNITS = 48  # of the model that measures the host's overhead
_TINY_WIDTH = 16
_BATCHES = 4

# Relative, of the losses. One that reduces nothing is off by 2e-3 to 2e-2 in bf16, peers by 1e-4.
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-3, "bf16/bf16": 1e-3}


@dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    Args:
        model: a size of zshard.gpt, or "units": 48 tiny ones.
        tokens: of one sequence, the batch of a rank and step.
        precision: "fp32"; "bf16", which reduces in fp32; or "bf16/bf16", which reduces in bf16.
    """

    model: str
    tokens: int
    precision: str
    device: torch.device

    @property
    def compute(self) -> torch.dtype | None:
        """The compute dtype; None where it is the parameters' own."""
        return None if self.precision == "fp32" else torch.bfloat16

    @property
    def reduce(self) -> torch.dtype | None:
        """The dtype of gradients on the wire; None where it is the parameters' own."""
        return torch.bfloat16 if self.precision == "bf16/bf16" else None

    def build(self) -> nn.Module:
        """The plain model, with the same values every time."""
        torch.manual_seed(0)
        with self.device:  # drawn there: on one CPU thread a large model takes seconds
            if self.model == "units":
                return _Units()
            layers, width, heads = SIZES[self.model]
            return GPT(GPTConfig(layers, width, heads, context=self.tokens))

    def batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of some steps, of this rank's own."""
        generator = torch.Generator().manual_seed(rank + 1)
        if self.model == "units":
            x = torch.randn(_BATCHES, 2, self.tokens, _TINY_WIDTH, generator=generator)
        else:
            x = torch.randint(VOCABULARY, (_BATCHES, 2, 1, self.tokens), generator=generator)
        return [(pair[0], pair[1]) for pair in x.to(self.device)]


class _Units(nn.Module):
    """Units that compute next to nothing, so that what is left is the host's work."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(_TINY_WIDTH, _TINY_WIDTH) for _ in range(UNITS))
        self.head = nn.Linear(_TINY_WIDTH, _TINY_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of one batch, reduced in fp32."""
    out = model(x).float()
    if y.is_floating_point():
        return F.mse_loss(out, y)
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
