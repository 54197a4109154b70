"""A byte-level GPT in plain torch, nothing of zshard in it: what ``zshard train`` trains."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .errors import InputError

VOCABULARY = 256  # one token per byte value
_ROTARY_BASE = 10_000.0
_INIT_STD = 0.02
# The first norm divides by it, and so multiplies the gradient of a small embedding.
_EMBEDDING_STD = 0.5
_TEMPERATURE = 0.8  # of sampling; lower is safer text


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Args:
        layers: number of transformer blocks.
        width: embedding width, divisible by ``heads``, with an even width per head.
        heads: attention heads per block.
        context: the longest sequence, in bytes.
        tied_head: the output layer is the embedding's own parameter.
        activation_checkpointing: recompute each block in the backward pass.

    Raises:
        InputError: for a shape no transformer can have.
    """

    layers: int
    width: int
    heads: int
    context: int
    tied_head: bool = False
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: it has to be 1 or more")
        if self.width % (2 * self.heads):
            raise InputError(
                f"width={self.width} is not a multiple of 2 * heads = {2 * self.heads}: rotary "
                f"embeddings need an even width per head; "
                f"try width={math.ceil(self.width / (2 * self.heads)) * 2 * self.heads}"
            )


# name -> (layers, width, heads); the name is the number of parameters, roughly
SIZES: dict[str, tuple[int, int, int]] = {
    "tiny": (4, 192, 6),
    "small": (6, 384, 6),
    "25m": (8, 512, 8),
    "100m": (14, 768, 12),
    "350m": (24, 1088, 17),
    "1b": (24, 1856, 29),
    "7b": (32, 4270, 35),
    "13b": (40, 5208, 42),
    "70b": (80, 8540, 70),
    "175b": (96, 12320, 112),
    "1t": (128, 25520, 220),
}


class Attention(nn.Module):
    """Causal self-attention with rotary position embeddings (Su et al. 2021, equation 34)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        cos: Tensor,  # (T, C / heads / 2) fp32
        sin: Tensor,  # (T, C / heads / 2) fp32
    ) -> Tensor:  # (B, T, C)
        """Attends from each position to itself and those before it."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True
        )
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _rotate(
    x: Tensor,  # (B, heads, T, D)
    cos: Tensor,  # (T, D / 2) fp32
    sin: Tensor,  # (T, D / 2) fp32
) -> Tensor:  # (B, heads, T, D), the dtype of x
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class MLP(nn.Module):
    """Two linear layers, four times as wide in between, with a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C); ``cos`` and ``sin`` are the rotary tables."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    cos: Tensor  # (context, width / heads / 2) fp32
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialise()
        if config.tied_head:  # as small as a head has to be
            self.embedding.weight = self.head.weight
        half = config.width // config.heads // 2
        frequency = _ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.outer(torch.arange(config.context, dtype=torch.float32), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def _initialise(self) -> None:
        residual_std = _INIT_STD / math.sqrt(2 * self.config.layers)  # GPT-2, section 2.3
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=residual_std if into_residual else _INIT_STD)
        nn.init.normal_(self.embedding.weight, std=_EMBEDDING_STD)

    def forward(
        self,
        tokens: Tensor,  # (B, T) int64, T <= context
    ) -> Tensor:  # (B, T, 256)
        """Logits of the next byte at each position."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.config.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: bytes,
    length: int,
    *,
    context: int,
    device: torch.device,
    seed: int,
) -> bytes:
    """Sample ``length`` bytes that follow ``prompt``.

    A sharded model computes on all its ranks: each calls this with the same arguments, and each
    gets the same bytes, because logits and random numbers are the same everywhere.

    Args:
        model: maps (1, T) int64 to (1, T, 256) logits, T <= ``context``.
        prompt: at least one byte.
        length: number of bytes to add.
        context: the model sees at most this many of the last bytes.
        device: where the model's inputs live.
        seed: of the sampling.
    """
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt)
    for _ in range(length):
        tokens = torch.tensor([list(text[-context:])], device=device)
        logits = model(tokens)[0, -1].float().cpu()
        probabilities = torch.softmax(logits / _TEMPERATURE, dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text[len(prompt) :])
