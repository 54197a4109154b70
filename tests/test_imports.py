"""Imports go one way: what is built on what, as CONTRIBUTING.md says."""

from __future__ import annotations

import ast
from pathlib import Path

import zshard

kFolder = Path(zshard.__file__).parent

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
    ("comm", "param"),
    ("transports",),
    ("ops",),
)


def imports_of(module: Path) -> set[str]:
    """The modules of zshard, and its packages, that ``module`` imports as it is imported itself."""
    above = len(module.relative_to(kFolder).parts)  # dots that lead to zshard
    found: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level == above:
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
    graph: dict[str, set[str]] = {}
    for path in kFolder.rglob("*.py"):  # a package is one node
        name = path.relative_to(kFolder).parts[0].removesuffix(".py")
        graph.setdefault(name, set()).update(imports_of(path))
    wrong = [
        (name, above)
        for place, layer in enumerate(kLayers)
        for name in layer
        for above in sum(kLayers[:place], ())
        if above in reached_from(name, graph)
    ]
    assert wrong == []
    assert "comm" in reached_from("wrap", graph)  # or nothing was looked at
