"""An export of a model that holds a transformers model is not taken for that model."""

from __future__ import annotations

from pathlib import Path

import pytest
import third_party
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
