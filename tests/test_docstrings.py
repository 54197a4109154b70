"""The examples of the public names' docstrings run, and say what comes out."""

from __future__ import annotations

import doctest
import inspect
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import zshard

# What is made by a call is shown by that call's example; Adam and SGD are used as AdamW is.
_MADE = {"Alternative", "CommStats", "Fit", "Loaded", "Memory", "Plan", "SaveHandle", "Trace"}
_AS_OTHERS = {"Adam", "SGD", "Link", "Machine", "mark_updated"}


def _callables() -> list[str]:
    public = {name: getattr(zshard, name) for name in zshard.__all__}
    return [
        name
        for name, each in public.items()
        if callable(each) and not (inspect.isclass(each) and issubclass(each, Exception))
    ]


@pytest.mark.parametrize("name", sorted({*_callables()} - _MADE - _AS_OTHERS))
def test_examples_give_what_they_show(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    given = {"zshard": zshard, "torch": torch, "nn": nn, "os": os, "safetensors": safetensors}
    tests = doctest.DocTestFinder(recurse=False).find(getattr(zshard, name), name, globs=given)
    assert [test for test in tests if test.examples], f"zshard.{name} has no example"
    said: list[str] = []
    for test in tests:
        ended = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
            test, out=said.append
        )
        assert ended.failed == 0, "".join(said)
