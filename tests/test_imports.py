"""Imports go one way, as CONTRIBUTING.md says, and every note that is cited is written."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import zshard

FOLDER = Path(zshard.__file__).parent

# From the top down. What lies below must work, and be understood, without what lies above.
LAYERS = (
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
    above = len(module.relative_to(FOLDER).parts)  # dots that lead to zshard
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
    for path in FOLDER.rglob("*.py"):  # a package is one node
        name = path.relative_to(FOLDER).parts[0].removesuffix(".py")
        graph.setdefault(name, set()).update(imports_of(path))
    wrong = [
        (name, above)
        for place, layer in enumerate(LAYERS)
        for name in layer
        for above in sum(LAYERS[:place], ())
        if above in reached_from(name, graph)
    ]
    assert wrong == []
    assert "comm" in reached_from("wrap", graph)  # or nothing was looked at


# --- notes ---------------------------------------------------------------------------------------

SOURCES = (".py", ".h", ".cpp", ".cu", ".cuh")
NOTE = re.compile(r"\[Note: ([\w ']+)\]")


def test_every_note_that_is_cited_is_written_once_and_the_other_way_round() -> None:
    top = Path(__file__).parent.parent
    folders = [top / name for name in ("csrc", "zshard", "benchmarks", "tests")]
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in SOURCES]
    written: Counter[str] = Counter()
    named: Counter[str] = Counter()
    for path in paths:
        lines = [re.sub(r"^\s*(//|#)?\s*", "", line) for line in path.read_text().splitlines()]
        named.update(NOTE.findall(" ".join(lines)))
        # It begins a line, and nothing comes behind it, or a new sentence.
        heads = (re.match(NOTE.pattern + r"($| [A-Z])", line) for line in lines)
        written.update(head[1] for head in heads if head)
    assert len(written) > 20
    assert {name: count for name, count in written.items() if count > 1} == {}
    assert sorted(named.keys() - written.keys()) == []
    assert [name for name in written if named[name] == 1] == [], "never cited"
