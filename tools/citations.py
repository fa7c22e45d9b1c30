"""What shows each row of docs/faults.md? Writes the last column of its tables: who cites a fault, who judges a promise."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

from remit.simulate.checkers.judge import UNCHECKED_PROPERTIES, checks_by_property

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "faults.md"
ID = re.compile(r"\b[FA]\d\d\b")
ROW = re.compile(r"^\| ([FASL]\d+) \|.*$")
COMMENT = re.compile(r"#.*$", re.MULTILINE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SHOWN = 3


def citations() -> dict[str, list[str]]:
    """By id, the scenarios that cover it and the test files that name it, in order."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "src" / "remit" / "simulate" / "files").glob("*.toml")):
        for row in tomllib.loads(path.read_text()).get("covers", ()):
            found[f"F{row:02}"].add(path.relative_to(ROOT).as_posix())
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "tidy" not in path.parts:
            for name in ID.findall(said(path)):
                found[name].add(path.relative_to(ROOT).as_posix())
    return {name: sorted(paths) for name, paths in found.items()}


def said(path: Path) -> str:
    """All docstrings and comments of a file: in its code an A10 is a graphics card."""
    text = path.read_text()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    return "\n".join([*(ast.get_docstring(node) or "" for node in nodes), *COMMENT.findall(text)])


def told() -> dict[str, str]:
    """By id, what its last column says; those that are not here are pending."""
    found = {name: f"not yet: needs {what}" for name, what in UNCHECKED_PROPERTIES.items()}
    found |= {name: ", ".join(f"`{check}`" for check in checks) for name, checks in checks_by_property().items()}
    for name, paths in citations().items():
        more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
        found[name] = ", ".join(f"`{path}`" for path in paths[:SHOWN]) + more
    return found


def filled(text: str) -> str:
    """The page with its last column as tests and checkers have it."""
    cells_by_id = told()
    lines = []
    for line in text.splitlines():
        row = ROW.match(line)
        if row is None:
            lines.append(line)
            continue
        cells = line.strip().strip("|").split("|")
        lines.append("|" + "|".join([*cells[:-1], f" {cells_by_id.get(row[1], 'pending')} "]) + "|")
    return "\n".join(lines) + "\n"


def main() -> int:
    before = PAGE.read_text()
    after = filled(before)
    if "--check" in sys.argv[1:]:
        if before != after:
            sys.stderr.write("docs/faults.md: its last column has drifted from tests and checkers; run `make docs`\n")
        return int(before != after)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
