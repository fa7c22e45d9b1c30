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
    violations = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not violations, f"relative imports: {violations}"


def test_product_code_uses_check_instead_of_assert() -> None:
    """`python -O` removes an assert, and with it the one line that would have named the bug."""
    violations = [
        f"{module.path}:{node.lineno}" for module in modules() for node in ast.walk(module.tree) if isinstance(node, ast.Assert)
    ]
    assert not violations, f"use check(condition, why) in place of assert: {violations}"


def test_no_module_has_catch_all_name() -> None:
    violations = [
        path.relative_to(SOURCE).as_posix() for path in sorted(SOURCE.rglob("*")) if path.stem.lstrip("_") in MODULES_BANNED
    ]
    assert not violations, f"name what is inside: {violations}"


def test_no_class_or_function_has_catch_all_name() -> None:
    violations = []
    for module in modules():
        for name, node in definitions(module.tree):
            bare_name = node.name.lstrip("_")
            if isinstance(node, ast.ClassDef):
                banned = bare_name.endswith(CLASS_ENDINGS_BANNED)
            else:
                banned = bare_name in FUNCTIONS_BANNED
            if banned:
                violations.append(f"{module.path}:{node.lineno} {name}")
    assert not violations, f"say what it is, or what it does: {violations}"


def test_every_package_has_init_module() -> None:
    """A folder without __init__.py is imported as a namespace package, and its description is written nowhere."""
    packages = {path.parent for path in SOURCE.rglob("*.py")} - {SOURCE}
    violations = [
        package.relative_to(SOURCE).as_posix() for package in sorted(packages) if not (package / "__init__.py").exists()
    ]
    assert not violations, f"packages without __init__.py: {violations}"
