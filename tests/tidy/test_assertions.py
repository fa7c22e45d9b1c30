"""Every test asserts something: a test that only runs code passes whatever the code returns."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Final

from tests.tidy.source_tree import ROOT

Reference = tuple[str, str]
"""A module below tests/ and the name of a function or class in it."""

WITHOUT_ASSERTION: Final = {
    (
        "tests.contracts.test_world_disk",
        "test_simulated_disk_passes_contract_tests",
    ): "it runs a list of tests, which assert",
}
"""Tests that the search cannot follow, with the reason."""

RAISING = ("fail", "raises", "warns")


class Definitions:
    """Functions and classes of test modules, the names that each uses, and those that assert by themselves."""

    def __init__(self) -> None:
        self.uses: dict[Reference, set[Reference]] = {}
        self.asserting: set[Reference] = set()

    def add(self, module: str, tree: ast.Module) -> None:
        names = {
            imported.asname or imported.name: (node.module, imported.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for imported in node.names
        }
        definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        names |= {node.name: (module, node.name) for node in definitions}
        for definition in definitions:
            uses = self.uses.setdefault((module, definition.name), set())
            for node in ast.walk(definition):
                if asserts(node):
                    self.asserting.add((module, definition.name))
                elif isinstance(node, ast.Name) and node.id in names:
                    uses.add(names[node.id])
                elif isinstance(node, ast.arg) and node.arg in names:
                    uses.add(names[node.arg])  # a fixture

    def without_assertion(self) -> Iterator[Reference]:
        """Yield tests that neither assert nor use, directly or indirectly, something below tests/ that does."""
        found, before = set(self.asserting), -1
        while len(found) != before:
            before = len(found)
            found |= {name for name, uses in self.uses.items() if uses & found}
        yield from sorted(name for name in self.uses.keys() - found if name[1].startswith("test_"))


def asserts(node: ast.AST) -> bool:
    """Whether the node is an `assert`, `raise AssertionError`, or pytest's `raises`, `warns` or `fail`."""
    match node:
        case ast.Assert() | ast.Raise(exc=ast.Call(func=ast.Name("AssertionError"))):
            return True
        case ast.Attribute(value=ast.Name("pytest"), attr=attr):
            return attr in RAISING
        case _:
            return False


def without_assertion(sources: Iterable[tuple[str, str]]) -> list[Reference]:
    definitions = Definitions()
    for module, text in sources:
        definitions.add(module, ast.parse(text))
    return list(definitions.without_assertion())


def test_every_test_asserts_something() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = without_assertion((".".join(file.relative_to(ROOT).with_suffix("").parts), file.read_text()) for file in files)
    assert found == sorted(WITHOUT_ASSERTION), "assert what the test is for, or list it with the reason"


def test_search_follows_helpers_and_finds_test_without_assertion() -> None:
    helpers = "def compare(a, b):\n    assert a == b\ndef show(a):\n    print(a)\n"
    tests = (
        "from tests.a import compare, show\n"
        "def check(a):\n    compare(a, 1)\n"
        "def test_direct():\n    assert 1\n"
        "def test_by_helper():\n    check(1)\n"
        "def test_raising():\n    with pytest.raises(ValueError):\n        int('x')\n"
        "def test_nothing():\n    show(1)\n"
    )
    assert without_assertion([("tests.a", helpers), ("tests.b", tests)]) == [("tests.b", "test_nothing")]
