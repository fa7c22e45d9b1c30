"""Parsed modules of the source, the tests and the tools, and the documentation pages, for the tests beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"
TOOLS = ROOT / "tools"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Module(NamedTuple):
    """One source file: its path from the root of the repository, its text, and the parsed tree."""

    path: str
    text: str
    tree: ast.Module


def modules() -> tuple[Module, ...]:
    return modules_below(SOURCE)


@cache
def modules_below(folder: Path) -> tuple[Module, ...]:
    found = []
    for file in sorted(folder.rglob("*.py")):
        text = file.read_text()
        found.append(Module(file.relative_to(ROOT).as_posix(), text, ast.parse(text, str(file))))
    return tuple(found)


def dotted(module: Module) -> str:
    """The name by which the module is imported."""
    return ".".join(Path(module.path.removeprefix("src/")).with_suffix("").parts).removesuffix(".__init__")


def definitions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, Definition]]:
    """Every class and function with its dotted name, outermost first."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            name = f"{outer}.{node.name}" if outer else node.name
            yield name, node
            yield from definitions(node, name)
        else:
            yield from definitions(node, outer)


def pages() -> tuple[Path, ...]:
    """Every hand-written or generated page that a reader may open."""
    return (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
