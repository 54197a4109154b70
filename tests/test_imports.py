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
    ("optimizers.fused",),
    ("schedule",),
    ("step.forward",),
    ("step.backward",),
    ("step.agreement",),
    ("step.executor",),
    ("step.reduction",),
    ("step.pending_reduction",),
    ("unit", "units.pool"),
    ("units.flat",),
    ("comm", "param"),
    ("transports.transport",),
    ("transports.groups", "transports.peer", "ops"),
)


def name_of(module: Path) -> str:
    parts = module.relative_to(FOLDER).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(module: Path, names: set[str]) -> set[str]:
    """Those of ``names`` that ``module`` imports as it is imported itself."""
    folders = module.relative_to(FOLDER).parts[:-1]
    found: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            at = ".".join((*folders[: len(folders) - node.level + 1], *filter(None, [node.module])))
            found.add(at)
            found.update(f"{at}.{alias.name}".lstrip(".") for alias in node.names)
    return found & names


def reached_from(name: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [name]
    while left:
        new = graph.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


def graph_of_imports() -> dict[str, set[str]]:
    paths = {name_of(path): path for path in FOLDER.rglob("*.py")}
    return {name: imports_of(path, {*paths} - {""}) for name, path in paths.items()}


def test_no_layer_imports_one_above() -> None:
    graph = graph_of_imports()
    named = {name for layer in LAYERS for name in layer}
    assert named <= graph.keys()
    wrong = [
        (name, above)
        for place, layer in enumerate(LAYERS)
        for name in layer
        for above in sum(LAYERS[:place], ())
        if above in reached_from(name, graph)
    ]
    assert wrong == []
    assert "comm" in reached_from("wrap", graph)  # or nothing was looked at


def test_no_two_packages_import_each_other_by_whatever_way() -> None:
    graph: dict[str, set[str]] = {}
    for name, imported in graph_of_imports().items():
        node = graph.setdefault(name.split(".")[0], set())
        node |= {each.split(".")[0] for each in imported} - {name.split(".")[0]}
    del graph[""]  # the package itself, which has all names for users
    assert [name for name in graph if name in reached_from(name, graph)] == []


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
