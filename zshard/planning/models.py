"""The module that is planned: as given, of a preset, or built of a configuration."""

from __future__ import annotations

import os

import torch
from torch import nn

from ..errors import InputError, MissingPackage
from ..gpt import GPT, SIZES, GPTConfig
from ..param import Sharded

_CONTEXT = 2048  # of a preset, if the batch has no longer sequences


def model_of(model: object, context: int) -> nn.Module:
    """The module that ``model`` stands for, on the meta device where it is made here.

    Args:
        model: see ``plan``.
        context: the longest sequence of a batch.

    Raises:
        InputError: if it stands for none, or is wrapped.
        MissingPackage: if it is a configuration, and transformers is not installed.
    """
    if isinstance(model, nn.Module):
        if any(isinstance(param, Sharded) for param in model.parameters()):
            raise InputError("zshard.plan: this model is wrapped; zshard.memory says what it takes")
        return model
    if isinstance(model, str) and model.startswith("gpt:"):
        size = model.removeprefix("gpt:")
        if size not in SIZES:
            raise InputError(f"{model!r}: expected gpt: and one of {', '.join(SIZES)}")
        with torch.device("meta"):
            return GPT(GPTConfig(*SIZES[size], context=max(_CONTEXT, context)))
    return _of_transformers(model)


def _of_transformers(model: object) -> nn.Module:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"{model!r}: to read it, zshard.plan needs {error.name}, which is not installed: "
            f"pip install {error.name}"
        ) from error
    config = model
    if isinstance(model, str | os.PathLike):
        try:
            config = transformers.AutoConfig.from_pretrained(
                os.fspath(model), local_files_only=True
            )
        except Exception as error:  # of any type, if the file has a field of another
            if not os.path.exists(model):  # nor a model in the cache of transformers
                raise InputError(
                    f"{model}: no such file; expected gpt:7b or another size, or a transformers "
                    "model's config.json or its folder"
                ) from None
            raise InputError(f"{model}: cannot be read as a configuration: {error}") from error
    if not isinstance(config, transformers.PretrainedConfig):
        raise InputError(
            "zshard.plan: expected a module or a transformers configuration, got a "
            f"{type(model).__name__}"
        )
    names = getattr(config, "architectures", None) or []
    architecture = getattr(transformers, str(names[0]), None) if names else None
    with torch.device("meta"):
        try:
            if architecture is not None:
                return _require_module(architecture(config))
        except Exception as error:  # what a model makes of a wrong size is its own
            raise InputError(
                f"{names[0]} cannot be built of this {type(config).__name__}: "
                f"{type(error).__name__}: {error}"
            ) from error
        try:
            built = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise InputError(
                f"a {type(config).__name__} without architectures is of no causal language "
                "model: name the model's class in config.architectures, or pass the model, "
                f"built on the meta device ({type(error).__name__}: {error})"
            ) from error
    return _require_module(built)


def _require_module(built: object) -> nn.Module:
    if not isinstance(built, nn.Module):
        raise TypeError(f"it makes a {type(built).__name__}, not a module")
    return built
