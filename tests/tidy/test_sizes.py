"""Functions and modules are short enough to read in one go; exceptions.toml lists the exceptions and only shrinks."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

from tests.tidy.source_tree import Module, definitions, modules

FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 800
EXCEPTIONS = Path(__file__).with_name("exceptions.toml")


def measure(found: tuple[Module, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """The functions and the modules that are too long, with their lines."""
    functions, files = {}, {}
    for module in found:
        lines = len(module.text.splitlines())
        if lines > MODULE_LINES_MAX:
            files[module.path] = lines
        for name, node in definitions(module.tree):
            if isinstance(node, ast.ClassDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
            if lines > FUNCTION_LINES_MAX:
                functions[f"{module.path}::{name}"] = lines
    return functions, files


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Explanations do not count: a limit on code must not be a reason to explain less."""
    first = node.body[0]
    return (first.end_lineno or first.lineno) - first.lineno + 1 if ast.get_docstring(node) is not None else 0


def compare(kind: str, found: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """Why the list of exceptions does not match what was found. An entry may neither grow nor outlive its need."""
    said = []
    for name in sorted(found.keys() | allowed.keys()):
        now, kept = found.get(name, 0), allowed.get(name, 0)
        if not kept:
            said.append(f"{kind} {name} has {now} lines: split it")
        elif not now:
            said.append(f"{kind} {name} is short enough now: remove its entry from exceptions.toml")
        elif now > kept:
            said.append(f"{kind} {name} grew from {kept} to {now} lines: split it")
        elif now < kept:
            said.append(f"{kind} {name} shrank to {now} lines: lower its entry in exceptions.toml from {kept}")
    return said


def test_functions_and_modules_are_short_or_listed() -> None:
    allowed = tomllib.loads(EXCEPTIONS.read_text())
    functions, files = measure(modules())
    said = compare("function", functions, allowed["functions"]) + compare("module", files, allowed["modules"])
    assert not said, "\n".join(said)


def test_the_ratchet_turns_one_way() -> None:
    body = "".join(f"    x = {n}\n" for n in range(80))
    text = f"def long() -> None:\n{body}" + "\n" * 800
    functions, files = measure((Module("src/a.py", text, ast.parse(text)),))
    assert functions == {"src/a.py::long": 81}
    assert files == {"src/a.py": 881}
    assert compare("function", functions, {"src/a.py::long": 81}) == []
    assert "split it" in compare("function", functions, {})[0]
    assert "grew" in compare("function", functions, {"src/a.py::long": 80})[0]
    assert "lower" in compare("function", functions, {"src/a.py::long": 82})[0]
    assert "remove" in compare("function", {}, {"src/a.py::long": 81})[0]
