"""Imports go one way: what is built on what, as CONTRIBUTING.md says."""

from __future__ import annotations

import ast
from pathlib import Path

import zshard

# From the top down. What lies below must work, and be understood, without what lies above.
kLayers = (
    ("wrap", "optim"),
    ("fused",),
    ("schedule",),
    ("forward",),
    ("backward",),
    ("agreement",),
    ("crew",),
    ("reduction",),
    ("flight",),
    ("unit", "pool"),
    ("flat",),
    ("comm", "ops", "param"),
)


def imports_of(module: Path) -> set[str]:
    """The modules of the package that ``module`` imports as it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [alias.name for alias in node.names] if node.module is None else [node.module]
            found.update(name.split(".")[0] for name in names)
    return found


def reached_from(name: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [name]
    while left:
        new = graph.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


def test_no_layer_imports_one_above() -> None:
    folder = Path(zshard.__file__).parent
    graph = {path.stem: imports_of(path) for path in folder.glob("*.py")}
    wrong = [
        (name, above)
        for place, layer in enumerate(kLayers)
        for name in layer
        for above in sum(kLayers[:place], ())
        if above in reached_from(name, graph)
    ]
    assert not wrong
    assert "comm" in reached_from("wrap", graph)  # or nothing was looked at
