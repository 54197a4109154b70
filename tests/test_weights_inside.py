"""An export is not taken for the transformers model inside, or whose modules were replaced."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import third_party
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn

import zshard


class Holder(nn.Module):
    """As PEFT's models: the inner one's config, and names of its own."""

    def __init__(self, model: hf.PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).logits


def test_from_pretrained_refuses_what_another_module_holds(tmp_path: Path) -> None:
    inner = third_party.llama()
    names = {f"model.{name}" for name in inner.state_dict()}
    zshard.export(tmp_path / "a", zshard.wrap(Holder(inner)))
    assert set(load_file(tmp_path / "a/model.safetensors")) == names
    with pytest.raises((OSError, ValueError), match=r"config\.json|model_type"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "a")


class Adapted(nn.Module):
    """As a LoRA layer of PEFT's: the layer that it was put around has another name now."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.low = nn.Linear(base.in_features, 2)
        self.high = nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.high(self.low(x))


def adapted() -> nn.Module:
    model = third_party.llama()
    for block in model.model.layers:
        block.self_attn.q_proj = Adapted(block.self_attn.q_proj)
    return model


def compiled() -> nn.Module:
    model = third_party.llama()
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return model


def tied_by_hand() -> nn.Module:
    model = third_party.llama()
    assert not model.config.tie_word_embeddings
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (
            adapted,
            r"3 are not in the export \(model\.layers\.0\.self_attn\.q_proj\.weight, \.\.\.\)",
        ),
        (compiled, r"9 are not in the export \(model\.layers\.1\."),
        (tied_by_hand, r"1 are not in the export \(lm_head\.weight\)"),
    ],
    ids=["adapted", "compiled", "tied by hand"],
)
def test_from_pretrained_draws_no_weight_that_was_not_exported(
    make: Callable[[], nn.Module], lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = torch.get_rng_state()
    model = zshard.wrap(make())
    torch.set_rng_state(state)
    with caplog.at_level(logging.WARNING, "zshard"):
        zshard.export(tmp_path / "a", model)
    assert re.search(lost, caplog.text)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises((OSError, ValueError), match=r"config\.json|model_type"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert zshard.load_weights(model, tmp_path / "a").missing == []
