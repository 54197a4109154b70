"""Models that others wrote: transformers' architectures with random weights, and a small ConvNet.

Nothing is downloaded. Sizes are odd wherever the architecture allows it; every rank builds the
same values and draws its own batches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

os.environ["HF_HUB_OFFLINE"] = "1"  # read on import: a test that needs a download is wrong

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersExperts,
)

Batch = dict[str, Tensor]

VOCAB = 37
CLASSES = 5

# What a rank would import when it builds a model: 1 s and 500 modules, no thread.
MODULES = [
    "transformers",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("gpt2", "llama", "t5", "mixtral", "switch_transformers", "bert", "vit")
    ),
]

# The sizes that most configurations have names for.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 18,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


def gpt2() -> nn.Module:
    """Build a GPT-2 of three blocks: the head is the embedding, and dropout is on."""
    config = hf.GPT2Config(
        vocab_size=VOCAB, n_embd=18, n_layer=3, n_head=3, n_inner=29,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Build a Llama of three blocks, three query heads to one key-value head."""
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**{**SIZES, "num_hidden_layers": 3}, num_key_value_heads=1)
    )


def t5() -> nn.Module:
    """Build a T5: encoder, decoder and head share one embedding; dropout is on."""
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=18, d_kv=5, d_ff=29, num_layers=2, num_heads=3,
        decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    """Build a Mixtral, two of five experts a token; the experts of a layer are two 3-D parameters.

    Its loss has a term of router outputs that hooks took out of the blocks.
    """
    sizes = {**SIZES, "hidden_size": 24, "intermediate_size": 40}  # grouped_mm: multiples of 8
    config = hf.MixtralConfig(
        **sizes, num_key_value_heads=1, num_local_experts=5, output_router_logits=True
    )
    return hf.MixtralForCausalLM(config)


def switch() -> nn.Module:
    """Build a Switch Transformer, one of three experts a token; the experts are modules."""
    config = hf.SwitchTransformersConfig(
        vocab_size=VOCAB, d_model=18, d_kv=5, d_ff=29, num_heads=3, num_experts=3,
        num_layers=2, num_sparse_encoder_layers=1, num_decoder_layers=2,
        num_sparse_decoder_layers=1, decoder_start_token_id=0,
    )  # fmt: skip
    return hf.SwitchTransformersForConditionalGeneration(config)


def in_turn(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Send tokens to experts in turn, whatever the router said: a forward pre-hook of experts."""
    hidden, chosen, weights = args  # chosen (tokens, 1, experts), one-hot
    turn = torch.arange(chosen.shape[0]) % chosen.shape[-1]
    return hidden, F.one_hot(turn, chosen.shape[-1]).view_as(chosen), weights


def switch_balanced() -> nn.Module:
    """Build a Switch Transformer whose ranks use every expert in every step."""
    model = switch()
    for module in model.modules():
        if isinstance(module, SwitchTransformersExperts):
            module.register_forward_pre_hook(in_turn)
    return model


def bert() -> nn.Module:
    """Build a BERT whose head is its embedding, without dropout."""
    config = hf.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return hf.BertForMaskedLM(config)


def vit() -> nn.Module:
    """Build a vision transformer over nine patches and a class token, with dropout."""
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    config = hf.ViTConfig(
        **sizes, image_size=9, patch_size=3, num_labels=CLASSES, hidden_dropout_prob=0.1
    )
    return hf.ViTForImageClassification(config)


@dataclass
class Output:
    """What ConvNet returns, in the manner of transformers."""

    loss: Tensor
    logits: Tensor


class ConvBlock(nn.Module):
    """A residual convolution with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(7, 7, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(7)

    def forward(self, x: Tensor) -> Tensor:  # x (B, 7, 9, 9)
        return x + F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """A small image classifier whose batch normalisation keeps buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7), nn.ReLU())
        self.blocks = nn.Sequential(*(ConvBlock() for _ in range(3)))
        self.head = nn.Linear(7, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.blocks(self.stem(pixel_values)).mean((2, 3)))
        return Output(F.cross_entropy(logits, labels), logits)


def text(generator: torch.Generator) -> Batch:
    """Return tokens (3, 5) that are their own labels."""
    ids = torch.randint(1, VOCAB, (3, 5), generator=generator)
    return {"input_ids": ids, "labels": ids}


def translation(generator: torch.Generator) -> Batch:
    """Return inputs (3, 7), the last two of them padding in the first row, and labels (3, 5)."""
    mask = torch.ones(3, 7, dtype=torch.int64)
    mask[0, -2:] = 0
    return {
        "input_ids": torch.randint(1, VOCAB, (3, 7), generator=generator),
        "attention_mask": mask,
        "labels": torch.randint(1, VOCAB, (3, 5), generator=generator),
    }


def masked_text(generator: torch.Generator) -> Batch:
    """Return a translation's inputs, of which every third token is to be guessed."""
    batch = translation(generator)
    ids = batch["input_ids"]
    asked = (torch.arange(7) % 3 == 0).expand_as(ids)
    labels = ids.where(asked, torch.full_like(ids, -100))
    return {**batch, "input_ids": ids.masked_fill(asked, 0), "labels": labels}


def images(generator: torch.Generator) -> Batch:
    """Return images (3, 3, 9, 9) and their classes (3,)."""
    return {
        "pixel_values": torch.randn(3, 3, 9, 9, generator=generator),
        "labels": torch.randint(CLASSES, (3,), generator=generator),
    }


@dataclass(frozen=True)
class Case:
    """A model and its data; `name` indexes `CASES`, so a case travels to a rank as a string."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    unused: bool = False  # some parameters may get no gradient: DDP has to be told
    experts: str = ""  # names of the modules that hold experts, as a regular expression


CASES: dict[str, Case] = {
    "gpt2": Case(gpt2, text),
    "llama": Case(llama, text),
    "t5": Case(t5, translation),
    "mixtral": Case(mixtral, text, experts=r"\.experts$"),
    "switch": Case(switch, translation, unused=True, experts=r"\.expert_\d+$"),
    "switch_balanced": Case(switch_balanced, translation, experts=r"\.expert_\d+$"),
    "bert": Case(bert, masked_text),
    "vit": Case(vit, images),
    "batchnorm": Case(ConvNet, images),
}


def build(name: str) -> nn.Module:
    """Build a case's model in training mode, the same values on every rank and in every call."""
    torch.manual_seed(1234)
    return CASES[name].build().train()


def batches(name: str, steps: int, rank: int = 0) -> list[Batch]:
    """Return one batch a step; every rank draws its own, the same in every call."""
    generator = torch.Generator().manual_seed(77 + rank)
    return [CASES[name].batch(generator) for _ in range(steps)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the scalar loss that the model itself computes."""
    return model(**batch).loss


def blocks_and_experts(name: str) -> list[str]:
    """Return the names of the transformer blocks, and of the modules that hold their experts."""
    wanted = re.compile(r"\.(layers|block)\.\d+$|" + CASES[name].experts)
    return [path for path, _ in build(name).named_modules() if wanted.search(path)]
