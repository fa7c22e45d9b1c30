"""Which tests and scenarios cite which row of docs/faults.md? Writes the last column of its tables from them."""

from __future__ import annotations

import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "faults.md"
ID = re.compile(r"\b[FA]\d\d\b")
ROW = re.compile(r"^\| ([FA]\d\d) \|.*$")
SHOWN = 3


def citations() -> dict[str, list[str]]:
    """By id, the scenarios that cover it and the test files that name it, in order."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "src" / "remit" / "simulate" / "files").glob("*.toml")):
        for row in tomllib.loads(path.read_text()).get("covers", ()):
            found[f"F{row:02}"].add(path.relative_to(ROOT).as_posix())
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "tidy" not in path.parts:
            for name in ID.findall(path.read_text()):
                found[name].add(path.relative_to(ROOT).as_posix())
    return {name: sorted(paths) for name, paths in found.items()}


def filled(text: str) -> str:
    """The page with its last column as the tests have it."""
    cited = citations()
    lines = []
    for line in text.splitlines():
        row = ROW.match(line)
        if row is None:
            lines.append(line)
            continue
        paths = cited.get(row[1], [])
        more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
        told = ", ".join(f"`{path}`" for path in paths[:SHOWN]) + more if paths else "pending"
        cells = line.strip().strip("|").split("|")
        lines.append("|" + "|".join([*cells[:-1], f" {told} "]) + "|")
    return "\n".join(lines) + "\n"


def main() -> int:
    before = PAGE.read_text()
    after = filled(before)
    if "--check" in sys.argv[1:]:
        if before != after:
            sys.stderr.write("docs/faults.md: its last column has drifted from the tests; run `make docs`\n")
        return int(before != after)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
