"""Names and statements that product code does without."""

from __future__ import annotations

import ast

from tests.tidy.source_tree import SOURCE, definitions, modules

# Names that say nothing about what is inside.
MODULES_BANNED = {
    *("common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"),
}
CLASS_ENDINGS_BANNED = ("Helper", "Helpers", "Manager", "Util", "Utils")
FUNCTIONS_BANNED = {"handle"}


def test_no_import_is_relative() -> None:
    said = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not said, f"relative imports: {said}"


def test_product_code_checks_and_does_not_assert() -> None:
    """`python -O` takes an assert away, and with it the one line that would have named the bug."""
    said = [
        f"{module.path}:{node.lineno}" for module in modules() for node in ast.walk(module.tree) if isinstance(node, ast.Assert)
    ]
    assert not said, f"use check(condition, why) in place of assert: {said}"


def test_no_module_is_a_drawer() -> None:
    said = [
        path.relative_to(SOURCE).as_posix() for path in sorted(SOURCE.rglob("*")) if path.stem.lstrip("_") in MODULES_BANNED
    ]
    assert not said, f"name what is inside: {said}"


def test_no_class_or_function_is_a_drawer_or_a_twin() -> None:
    said = []
    for module in modules():
        for name, node in definitions(module.tree):
            word = node.name.lstrip("_")
            if isinstance(node, ast.ClassDef):
                banned = word.endswith(CLASS_ENDINGS_BANNED)
            else:
                banned = word in FUNCTIONS_BANNED
            if banned:
                said.append(f"{module.path}:{node.lineno} {name}")
    assert not said, f"say what it is, or what it does: {said}"


def test_every_package_has_a_first_line_of_its_own() -> None:
    """A folder without __init__.py imports as a namespace: its ban is then written nowhere."""
    rooms = {path.parent for path in SOURCE.rglob("*.py")} - {SOURCE}
    said = [room.relative_to(SOURCE).as_posix() for room in sorted(rooms) if not (room / "__init__.py").exists()]
    assert not said, f"packages without __init__.py: {said}"
