"""The lists of tensors that the kernels are measured on."""

from __future__ import annotations

import torch

Shapes = tuple[tuple[int, ...], ...]

_LLAMA_8B_LAYER: Shapes = (
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
    (4096,),
    (4096,),
)
_LLAMA_8B: Shapes = ((128256, 4096), *_LLAMA_8B_LAYER * 32, (4096,), (128256, 4096))
_GPT2_MEDIUM_BLOCK: Shapes = (
    (1024,),
    (1024,),
    (3072, 1024),
    (3072,),
    (1024, 1024),
    (1024,),
    (1024,),
    (1024,),
    (4096, 1024),
    (4096,),
    (1024, 4096),
    (1024,),
)


def _cut(shapes: Shapes, ranks: int) -> Shapes:
    """What one of ``ranks`` ranks holds, each tensor cut along its first dimension."""
    return tuple((shape[0] // ranks, *shape[1:]) for shape in shapes)


# name -> shapes; the first three are named by their elements
WORKLOADS: dict[str, Shapes] = {
    "4M": ((1024, 1024),) * 4,
    "27M (8B layer / 8)": _cut(_LLAMA_8B_LAYER, 8),
    "218M (8B layer)": _LLAMA_8B_LAYER,
    "GPT-2-medium block": _GPT2_MEDIUM_BLOCK,
    "Llama-8B / 64": _cut(_LLAMA_8B, 64),
    "1,000 small": tuple((37 + 17 * i % 4096,) for i in range(1000)),
    "odd": ((1023, 1025), (7,), (3, 333, 1001), (1,), (999_983,), (65_537, 3)),
}
QUICK = ("4M", "1,000 small", "odd")


def random_tensors(
    shapes: Shapes, dtype: torch.dtype, device: torch.device, *, skew: int = 0
) -> list[torch.Tensor]:
    """Random tensors of ``shapes``, each of its own memory.

    Args:
        skew: elements by which each tensor starts off the allocation's alignment.
    """
    tensors = []
    for shape in shapes:
        numel = torch.Size(shape).numel()
        memory = torch.randn(numel + skew, device=device).to(dtype)
        tensors.append(memory[skew:].view(shape))
    return tensors
