"""What the tests of checkpoints share: a model with everything in it, and an independent reader."""

from __future__ import annotations

import json
from pathlib import Path

import models
import torch
from safetensors import safe_open
from torch import Tensor, nn

import zshard


class Everything(models.Blocks):
    """What a checkpoint has to hold: each odd kind of parameter and buffer once.

    Frozen bf16 weights beside trained fp32 ones (as LoRA has them), a weight tied across two
    blocks, one whose memory is transposed, a 0-d, a zero-size and an unused one, and buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.base = nn.Parameter(torch.randn(3, 5).bfloat16(), requires_grad=False)
        self.low = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.turned = nn.Parameter(torch.randn(11, 7).t())
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(2, 3))
        self.aside = nn.Parameter(torch.randn(3), requires_grad=False)  # to be ignored
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.rand(2, 5) > 0.5)
        self.register_buffer("turned_buffer", torch.randn(4, 6).t())
        self.register_buffer("cache", torch.randn(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        low = (self.base @ self.low).float().sum() + (self.turned.float() ** 2).sum()
        return super().forward(x * self.scale) + 0.01 * low


def build(seed: int, **options: object) -> nn.Module:
    """Wrap the model, with the same values on every rank."""
    torch.manual_seed(seed)
    return zshard.wrap(Everything(), ignored=["aside"], **options)


def plain(seed: int = 0) -> tuple[nn.Module, zshard.AdamW]:
    """Wrap a small model, with the same values on every rank, and make its optimizer."""
    torch.manual_seed(seed)
    model = zshard.wrap(models.Blocks())
    return model, zshard.AdamW(model.parameters())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range
) -> list[float]:
    """Take steps; the batches are those of the rank and the step's number. Returns the losses."""
    losses = []
    for step in steps:
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = models.loss_of(model, batch)
        loss.backward()
        zshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def content(path: str | Path) -> dict[str, object]:
    """All that a checkpoint holds but the save's own facts, read by other means than zshard's."""
    found: dict[str, object] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (a safe_open is not a mapping)
                found[f"{file.name.split('.')[0].split('-')[0]}:{name}"] = opened.get_tensor(name)
    manifest = json.loads(Path(path, "checkpoint.json").read_text())["checkpoint"]
    for key in ("aliases", "buffers", "optimizer", "extra"):
        found[key] = manifest[key]
    return found


def assert_same(got: dict[str, object], wanted: dict[str, object], what: str) -> None:
    """Compare two contents bit by bit."""
    assert got.keys() == wanted.keys(), (what, got.keys() ^ wanted.keys())
    for key, value in wanted.items():
        other = got[key]
        if not isinstance(value, Tensor):
            assert other == value, (what, key, other, value)
            continue
        assert isinstance(other, Tensor)
        assert (other.dtype, other.shape) == (value.dtype, value.shape), (what, key)
        assert torch.equal(_bits(other), _bits(value)), (what, key, other, value)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
