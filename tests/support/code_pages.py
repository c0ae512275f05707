"""Pages that name the code by file and function: what they name, and what a file uses of which other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

HOUSES = ("pipeline", "stages", "slurm")
Name = tuple[str, str]
"""File as pages write it, below pipeline/ unless its house is named, and a name in it; "" for all of it."""


def named(text: str) -> list[Name]:
    return re.findall(r"`((?:\w+/)*\w+\.py)(?::(\w+))?`", text)


def file_of(path: str) -> Path:
    return ROOT / path if path.startswith(("stages/", "slurm/")) else ROOT / "pipeline" / path


def written(path: Path) -> str:
    """Return a file as pages write it."""
    return str(path.relative_to(ROOT)).removeprefix("pipeline/")


def sources(*houses: str) -> list[Path]:
    return [path for house in houses for path in (ROOT / house).rglob("*.py")]


def defined(path: Path) -> set[str]:
    """Return names of functions, classes and values of a module."""
    body = ast.parse(path.read_text()).body
    stored = {n.id for node in body for n in ast.walk(node) if isinstance(n, ast.Name) and is_stored(n)}
    return stored | {node.name for node in body if hasattr(node, "name")}


def is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _module(name: str) -> str | None:
    """Return the file of a module as pages write it; None for a package, and for what is not ours."""
    path = ROOT / f"{name.replace('.', '/')}.py"
    return written(path) if name.split(".")[0] in HOUSES and path.is_file() else None


def imported(path: Path) -> Iterator[Name]:
    """Yield the modules that a file imports, and the names of them that it imports or uses."""
    tree = ast.parse(path.read_text())
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.ImportFrom) and node.module else ():
            if whole := _module(f"{node.module}.{alias.name}"):
                modules[alias.asname or alias.name] = whole
                yield whole, ""
            elif file := _module(node.module):
                yield from ((file, ""), (file, alias.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr
