"""What the package as a whole promises: its names and defaults, its imports, one place for each."""

from __future__ import annotations

import ast
import inspect
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
import torch
from ranks import run_ranks
from torch import nn

import zshard

TOP = Path(__file__).parent.parent
PACKAGE = Path(zshard.__file__).parent
MODULES = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}

# --- names and defaults --------------------------------------------------------------------------


def defaults_of(function: object) -> dict[str, object]:
    return {name: each.default for name, each in inspect.signature(function).parameters.items()}


def test_arguments_and_defaults_are_those_that_scripts_rely_on() -> None:
    required = inspect.Parameter.empty
    assert defaults_of(zshard.wrap) == {
        **{"model": required, "strategy": "zero3", "units": None, "precision": None},
        **{"mesh": None, "comm": "auto", "prefetch": 1, "init": "check", "ignored": None},
        **{"device": None, "init_fn": None},
    }
    assert defaults_of(zshard.Precision) == {
        **{"compute": None, "reduce": None, "master": "fp32"},
        **{"output": None, "cast_inputs": True},
    }
    assert defaults_of(zshard.clip_grad_norm_) == {
        **{"model_or_params": required, "max_norm": required},
        **{"norm_type": 2.0, "error_if_nonfinite": False},
    }
    assert defaults_of(zshard.GradScaler) == defaults_of(torch.amp.GradScaler)


@pytest.mark.parametrize("command", ["info", "plan --help", "train --help", "bench --help"])
def test_the_package_runs_as_a_module(command: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "zshard", *command.split()], text=True, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


# --- what an import does -------------------------------------------------------------------------

IMPORTS = """
import os, torch, torch.distributed, torch.utils.checkpoint
touched = []
for name in ("init", "_lazy_init", "is_available", "device_count", "current_device"):
    setattr(torch.cuda, name, lambda *args, name=name, **kwargs: touched.append(name) or 0)
before = os.listdir("/proc/self/task")
import sys, zshard
assert "torch.utils.flop_counter" not in sys.modules  # which imports triton
print(touched, len(os.listdir("/proc/self/task")) - len(before))
"""


def test_an_import_starts_no_thread_and_asks_nothing_of_cuda() -> None:
    said = subprocess.run([sys.executable, "-c", IMPORTS], text=True, capture_output=True)
    assert said.stdout == "[] 0\n", said.stderr


# --- one place for each --------------------------------------------------------------------------


def nodes() -> Iterator[tuple[str, str, ast.AST]]:
    """Every node of the package, with its module and the function around it."""

    def under(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef) else function
            yield inner, child
            yield from under(child, inner)

    for module, text in MODULES.items():
        for function, node in under(ast.parse(text), ""):
            yield module, function, node


COLLECTIVE = re.compile(
    r"(torch\.distributed|dist)\.(all_|reduce|broadcast|barrier|gather|scatter|i?send|i?recv|batch)"
)


def test_collectives_go_through_the_transports() -> None:
    """A save's background thread has a group of its own; so has the command's report."""
    callers = {
        module
        for module, _, node in nodes()
        if isinstance(node, ast.Attribute) and COLLECTIVE.match(ast.unparse(node))
    }
    outside = {module for module in callers if not module.startswith("transports/")}
    assert outside == {"checkpoint/peers.py", "training/job.py"}
    assert "transports/groups.py" in callers


def test_one_function_changes_the_state_of_a_unit() -> None:
    found = [
        (module, function)
        for module, function, node in nodes()
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr == "state"
        and (module == "unit.py" or "unit" in ast.unparse(node.value))
    ]
    assert sorted(found) == [("unit.py", "__init__"), ("unit.py", "_enter")]


def test_memory_is_never_handed_to_the_allocator_for_a_stream() -> None:
    """With record_stream it comes back at a time that depends on the device."""
    sources = [path for path in (TOP / "csrc").rglob("*") if path.is_file()]
    texts = MODULES | {str(path): path.read_text() for path in sources}
    assert len(texts) > 100
    assert [name for name, text in texts.items() if "record_stream" in text] == []


def test_every_variable_of_the_environment_is_read_in_the_one_file_that_the_readme_says() -> None:
    switches = (TOP / "README.md").read_text().partition("## Switches")[2]
    told = dict(re.findall(r"^\| `(ZSHARD_\w+)` \|.*\| (\S+) \|$", switches, re.MULTILINE))
    files = [path for folder in ("zshard", "csrc", "cmake") for path in (TOP / folder).rglob("*")]
    reads = re.compile(r"""(?:environ\.get\(|environ\[|getenv\()\s*["'](ZSHARD_\w+)""")
    found: dict[str, set[str]] = {"ZSHARD_TORCH": {"Makefile"}}
    for path in files:
        if path.suffix in (".py", ".cpp", ".h", ".cu"):
            for name in reads.findall(path.read_text()):
                found.setdefault(name, set()).add(str(path.relative_to(TOP)))
    assert found == {name: {file} for name, file in told.items()}


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    folders = ("csrc", "zshard", "cmake", "benchmarks", "tests")
    kinds = (".py", ".h", ".cpp", ".cu", ".cuh")
    files = [path for folder in folders for path in (TOP / folder).rglob("*.*")]
    lengths = {p: len(p.read_text().splitlines()) for p in files if p.suffix in kinds}
    assert len(lengths) > 300
    assert {path: length for path, length in lengths.items() if length > 350} == {}


# --- what ranks do -------------------------------------------------------------------------------


def logged(rank: int, world_size: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("zshard")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = zshard.wrap(models.Blocks())
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
    return lines


def test_what_auto_has_chosen_is_logged_once_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZSHARD_COMM", "auto")
    first, second = run_ranks(logged, 2)
    assert first == ["comm='peer': the 2 ranks read each other's memory"]
    assert second == []


def of_its_own(rank: int, world_size: int, init: str) -> list[float]:
    model = nn.Linear(64, 1, bias=False)
    nn.init.constant_(model.weight, rank + 1)
    zshard.wrap(model, init=init)
    return zshard.full_param(model, "weight").flatten().tolist()


@pytest.mark.parametrize(
    ("init", "values"), [("trust", [1.0] * 32 + [2.0] * 32), ("broadcast", [1.0] * 64)]
)
def test_values_are_taken_from_where_init_says(init: str, values: list[float]) -> None:
    assert run_ranks(of_its_own, 2, init) == [values, values]


def zeroed(rank: int, world_size: int, strategy: str, comm: str) -> None:
    torch.manual_seed(0)
    plain = models.Blocks()
    torch.manual_seed(0)
    model = zshard.wrap(models.Blocks(), strategy=strategy, comm=comm)
    for to_none in (False, True):
        for side in (model, plain):
            side(torch.randn(4, 3)).sum().backward()
            torch.optim.SGD(side.parameters()).zero_grad(set_to_none=to_none)
        for name, param in plain.named_parameters():
            grad = zshard.full_grad(model, name)
            assert (grad is None) == (param.grad is None) == to_none, name
            assert grad is None or not grad.count_nonzero(), name


@pytest.mark.parametrize("comm", ["group", "peer"])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp"])
def test_zero_grad_leaves_what_it_leaves_of_the_plain_model(strategy: str, comm: str) -> None:
    run_ranks(zeroed, 2, strategy, comm)


def full_buffers(rank: int, world_size: int, prefetch: int) -> int:
    model = zshard.wrap(models.Blocks(), prefetch=prefetch)
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
    return zshard.memory(model)["peak"]["full_buffers"]


def test_a_prefetch_beyond_all_units_takes_the_memory_of_all_units() -> None:
    few, all_units, more = (run_ranks(full_buffers, 2, prefetch)[0] for prefetch in (0, 3, 100))
    assert few < all_units == more
