"""Small models of odd shapes, each with a habit of a real one, and the batches they train on.

Sizes are 7 and 13 wherever they can be: no shard boundary falls between two parameters, and every
unit needs padding. Every rank builds the same values and draws its own batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 7
HIDDEN = 13
VOCAB = 17
SEQUENCE = 5


class Block(nn.Module):
    """A residual MLP block with a norm: the repeated unit of most cases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # x (B, 7)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class OddBlock(Block):
    """A block with a 0-d parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


class Blocks(nn.Module):
    """Three blocks between an input and an output layer; `order` says which block runs when."""

    def __init__(
        self, order: tuple[int, ...] = (0, 1, 2), block: Callable[[], nn.Module] = Block
    ) -> None:
        super().__init__()
        self.order = order
        self.inlet = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.outlet = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:  # x (B, 3)
        x = self.inlet(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.outlet(x)


class Routed(Blocks):
    """Blocks in an order that each batch draws for itself, and so each rank and step."""

    def forward(self, x: Tensor) -> Tensor:
        self.draw(x)
        return super().forward(x)

    def draw(self, x: Tensor) -> None:
        rng = random.Random(float(x.detach().double().sum()))
        self.order = tuple(rng.choices(range(3), k=rng.randrange(5)))


class OddParameters(Blocks):
    """Parameters on the root itself: 0-d, zero-size, one element, and a matrix."""

    def __init__(self) -> None:
        super().__init__(block=OddBlock)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.one = nn.Parameter(torch.full((1,), 0.25))
        self.mix = nn.Parameter(torch.eye(3) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x @ self.mix) * self.gain + self.nothing.sum()
        for block in self.blocks:
            x = block(x)
        return self.outlet(x) + self.one


class Conv(nn.Module):
    """Convolutions whose weights are channels_last: dense in memory, not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3)
        self.layers = nn.Sequential(*(nn.Conv2d(5, 5, 3, padding=1) for _ in range(3)))
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:  # x (B, 3, 6, 6)
        return self.layers(self.stem(x)).mean((1, 2, 3))


class TiedAcrossUnits(Blocks):
    """One weight owned by two blocks, which are two units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Unused(Blocks):
    """Parameters that no rank uses: one in each block, and the whole middle block."""

    def __init__(self) -> None:
        super().__init__(order=(0, 2))
        for block in self.blocks:
            block.spare = nn.Parameter(torch.ones(3, WIDTH))


class Frozen(Blocks):
    """Frozen and trainable parameters in one unit, one unit all frozen, and the input frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet.requires_grad_(False)
        self.blocks[0].up.weight.requires_grad_(False)
        self.blocks[1].requires_grad_(False)


class Attention(nn.Module):
    """Causal attention with two heads."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # x (B, T, C)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class GPTBlock(nn.Module):
    """One transformer block; `inside` recomputes its MLP in backward."""

    def __init__(self, width: int, dropout: float, inside: bool | None) -> None:
        super().__init__()
        self.inside = inside
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        if self.inside is None:
            return x + self.mlp(self.norm2(x))
        return x + checkpoint(self.mlp, self.norm2(x), use_reentrant=self.inside)


class GPT(nn.Module):
    """A small causal transformer.

    Args:
        tied: the head's weight is the token embedding's.
        dropout: in every attention block; recomputation must draw the same numbers again.
        inside: activation checkpointing of each block's MLP; the value is `use_reentrant`.
        around: activation checkpointing of each block, likewise.
    """

    def __init__(
        self,
        tied: bool = True,
        dropout: float = 0.0,
        inside: bool | None = None,
        around: bool | None = None,
        width: int = 14,
    ) -> None:
        super().__init__()
        self.around = around
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Parameter(0.02 * torch.randn(SEQUENCE, width))
        self.blocks = nn.ModuleList(GPTBlock(width, dropout, inside) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:  # ids (B, T) int64; returns logits (B, T, V)
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            recompute = self.around is not None
            x = checkpoint(block, x, use_reentrant=self.around) if recompute else block(x)
        return self.head(self.norm(x))


def features(generator: torch.Generator) -> Tensor:
    """Return one rank's batch for the MLP cases: (4, 3) fp32."""
    return torch.randn(4, 3, generator=generator)


def images(generator: torch.Generator) -> Tensor:
    """Return one rank's batch for the convolution: (2, 3, 6, 6) fp32, channels_last."""
    return torch.randn(2, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)


def tokens(generator: torch.Generator) -> Tensor:
    """Return one rank's batch for the transformer: (3, 6) int64, the last column a target only."""
    return torch.randint(VOCAB, (3, SEQUENCE + 1), generator=generator)


@dataclass(frozen=True)
class Case:
    """A model and its data; `name` indexes `CASES`, so a case travels to a rank as a string."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Tensor] = features
    unused: bool = False  # some parameters get no gradient: DDP has to be told


CASES: dict[str, Case] = {
    "blocks": Case(Blocks),
    "odd_parameters": Case(OddParameters),
    "channels_last": Case(Conv, images),
    "tied_in_one_unit": Case(lambda: GPT(tied=True), tokens),
    "tied_across_units": Case(TiedAcrossUnits),
    "called_twice": Case(lambda: Blocks(order=(0, 1, 0, 2, 2))),
    "unused": Case(Unused, unused=True),
    "frozen": Case(Frozen),
    "gpt": Case(lambda: GPT(tied=False), tokens),
    "gpt_dropout": Case(lambda: GPT(dropout=0.2), tokens),
    "gpt_inside": Case(lambda: GPT(dropout=0.2, inside=False), tokens),
    "gpt_inside_reentrant": Case(lambda: GPT(dropout=0.2, inside=True), tokens),
    "gpt_around": Case(lambda: GPT(dropout=0.2, around=False), tokens),
    "gpt_around_reentrant": Case(lambda: GPT(dropout=0.2, around=True), tokens),
    "gpt_both": Case(lambda: GPT(dropout=0.2, inside=False, around=False), tokens),
}

PLAIN_CASES = [name for name in CASES if not name.startswith("gpt_")]


def build(name: str) -> nn.Module:
    """Build a case's model with the same values on every rank and in every call."""
    torch.manual_seed(1234)
    return CASES[name].build()


def batches(name: str, steps: int, rank: int = 0) -> list[Tensor]:
    """Return one batch a step; every rank draws its own, the same in every call."""
    generator = torch.Generator().manual_seed(77 + rank)
    return [CASES[name].batch(generator) for _ in range(steps)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the scalar fp32 loss of one batch, whichever case the model belongs to."""
    if batch.dtype == torch.int64:
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    return (model(batch).float() - 1.0).square().mean()
