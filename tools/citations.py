"""Writes the last column of the tables in docs/faults.md: the tests that cite a fault, the checks of a property.

tools/citations.py            write the page
tools/citations.py --check    exit with 1 if the page differs
"""

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
TESTED_OUTSIDE_THE_SIMULATOR = {
    "S19": ("tests/integration/store/test_older_store.py",),
    "S21": ("tests/unit/serve/auth/test_access_control.py", "tests/integration/attacks/rows_tenants.py"),
    "L11": ("tests/integration/serve/test_flood.py",),
    "L12": ("tests/integration/serve/test_flood.py",),
}
"""Properties that only tests check, because the simulator does not run the code they are about."""


def citations() -> dict[str, list[str]]:
    """Return, by id, the sorted scenarios that cover it and test files that name it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "src" / "remit" / "simulate" / "files").glob("*.toml")):
        for row in tomllib.loads(path.read_text()).get("covers", ()):
            found[f"F{row:02}"].add(path.relative_to(ROOT).as_posix())
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "tidy" not in path.parts:
            for name in ID.findall(docstrings_and_comments(path)):
                found[name].add(path.relative_to(ROOT).as_posix())
    return {name: sorted(paths) for name, paths in found.items()}


def docstrings_and_comments(path: Path) -> str:
    """Return only these parts of a file, because in code `A10` is the name of a GPU model."""
    text = path.read_text()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    return "\n".join([*(ast.get_docstring(node) or "" for node in nodes), *COMMENT.findall(text)])


def last_column() -> dict[str, str]:
    """Return the text of the last column by id. Ids without an entry are pending."""
    found = {name: f"not checked: needs {what}" for name, what in UNCHECKED_PROPERTIES.items()}
    for name, tests in TESTED_OUTSIDE_THE_SIMULATOR.items():
        found[name] = "tests only: " + ", ".join(f"`{path}`" for path in tests)
    found |= {name: ", ".join(f"`{check}`" for check in checks) for name, checks in checks_by_property().items()}
    for name, paths in citations().items():
        more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
        found[name] = ", ".join(f"`{path}`" for path in paths[:SHOWN]) + more
    return found


def filled(text: str) -> str:
    """Return the page with its last column generated from tests and checkers."""
    cells_by_id = last_column()
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
            sys.stderr.write("docs/faults.md: its last column differs from tests and checkers; run `make docs`\n")
        return int(before != after)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
