"""Functions are short enough to read in one go."""

from __future__ import annotations

import ast

from tests.tidy.source_tree import definitions, modules

FUNCTION_LINES_MAX = 70


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without the docstring: a limit on code must not be a reason to explain less."""
    first = node.body[0]
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if ast.get_docstring(node) is not None else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - docstring


def test_functions_are_short() -> None:
    long = [
        f"{module.path}::{name} has {code_lines(node)} lines: split it"
        for module in modules()
        for name, node in definitions(module.tree)
        if not isinstance(node, ast.ClassDef) and code_lines(node) > FUNCTION_LINES_MAX
    ]
    assert not long, "\n".join(long)


def test_docstring_does_not_count_and_code_does() -> None:
    tree = ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    x = 1\n    return x\n')
    assert [code_lines(node) for _, node in definitions(tree) if isinstance(node, ast.FunctionDef)] == [3]
