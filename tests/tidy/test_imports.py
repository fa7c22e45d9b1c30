"""A test module is run, not imported: what several of them use is a helper module with a name of its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.tidy.source_tree import TESTS, TOOLS, modules_below


def imported_test_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each import of, or from, a test module; also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        else:
            continue
        for name in names:
            if any(part.startswith("test_") for part in name.split(".")):
                yield node.lineno, name


def test_no_test_module_is_imported() -> None:
    found = [
        f"{module.path}:{line}: {name}"
        for module in (*modules_below(TESTS), *modules_below(TOOLS))
        for line, name in imported_test_modules(module.tree)
    ]
    assert not found, "move what is shared into a helper module:\n" + "\n".join(found)


def test_each_form_of_import_is_found() -> None:
    text = """
from tests.unit.law.test_fit import node
from tests.unit.law import test_fit as fit, strategies
import tests.unit.law.test_fit
from tests.unit.law.fit_fixtures import node
from hypothesis.stateful import run_state_machine_as_test

def late():
    from tests.unit.law.test_fit import node
"""
    assert list(imported_test_modules(ast.parse(text))) == [
        (2, "tests.unit.law.test_fit.node"),
        (3, "tests.unit.law.test_fit"),
        (4, "tests.unit.law.test_fit"),
        (9, "tests.unit.law.test_fit.node"),
    ]
