"""Packages import only lower layers, and the contracts catch planted violations."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.tidy.source_tree import ROOT

LINT = Path(sys.executable).parent / "lint-imports"

# A minimal tree with every module that the contracts name, and no import that breaks one.
VALID_TREE = {
    "cli/main.py": "import remit.simulate.checkers.books",
    "assembly.py": "import remit.commitment.authority",
    "simulate/__init__.py": "",
    "simulate/checkers/__init__.py": "",
    "simulate/checkers/books.py": "import remit.model",
    "proposal/__init__.py": "import remit.observation.reflector",
    "proposal/queue/__init__.py": "",
    "proposal/placement/__init__.py": "",
    "proposal/queue/backlog.py": "import remit.proposal.queue.fair_share",
    "proposal/placement/kernel.py": "import remit.law",
    "proposal/placement/preemption.py": "import remit.law",
    "proposal/queue/fair_share.py": "",
    "proposal/architectures/__init__.py": "",
    "proposal/architectures/central.py": "import remit.law",
    "proposal/architectures/probe.py": "import remit.law",
    "commitment/decide.py": "import remit.law",
    "commitment/authority.py": "import time\nimport remit.commitment.decide\nimport remit.store\nimport remit.world",
    "observation/__init__.py": "",
    "observation/reflector.py": "import remit.client",
    "observation/column_table.py": "",
    "observation/node_columns.py": "import remit.law",
    "observation/topology_counts.py": "import remit.law",
    "law/__init__.py": "import remit.model",
}

PLANTED = {
    "upwards": ("model/__init__.py", "import remit.law"),
    "sideways": ("store/__init__.py", "import remit.world"),
    "a package without a layer": ("drawer.py", ""),
    "authority imports observation": ("commitment/authority.py", "import remit.observation"),
    "checker imports law": ("simulate/checkers/books.py", "import remit.law"),
    "checker imports commitment": ("simulate/checkers/books.py", "import remit.commitment.authority"),
    "architecture imports another": ("proposal/architectures/probe.py", "import remit.proposal.architectures.central"),
    "decide imports time": ("commitment/decide.py", "import time"),
    "queue imports time indirectly": ("proposal/queue/fair_share.py", "import time"),
    "law imports random": ("law/__init__.py", "import random"),
    "model imports os": ("model/__init__.py", "from os import path"),
    "law imports asyncio": ("law/__init__.py", "import asyncio"),
}


def lint(place: Path, source: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(source), "COLUMNS": "200"}
    command = [str(LINT), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)


def build_tree(place: Path) -> Path:
    """Create the packages under `place`/src/remit, with the contracts of this repository."""
    shutil.copy(ROOT / "pyproject.toml", place)
    package_root = place / "src" / "remit"
    names = "agent bench cli client commitment correction demo docgen law model serve store world"
    for name_ in names.split():
        (package_root / name_).mkdir(parents=True)
        (package_root / name_ / "__init__.py").write_text("")
    (package_root / "__init__.py").write_text("")
    for name, text in VALID_TREE.items():
        (package_root / name).parent.mkdir(parents=True, exist_ok=True)
        (package_root / name).write_text(text)
    return package_root


def test_packages_import_only_lower_layers() -> None:
    done = lint(ROOT, ROOT / "src")
    assert done.returncode == 0, done.stdout + done.stderr


def test_valid_tree_passes_contracts(tmp_path: Path) -> None:
    package_root = build_tree(tmp_path)
    done = lint(tmp_path, package_root.parent)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("violation", PLANTED)
def test_planted_import_breaks_contracts(violation: str, tmp_path: Path) -> None:
    package_root = build_tree(tmp_path)
    name, text = PLANTED[violation]
    (package_root / name).write_text(text)
    done = lint(tmp_path, package_root.parent)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Broken contracts" in done.stdout, done.stdout


def test_architecture_page_shows_layers_of_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contract = next(one["layers"] for one in contracts if one["id"] == "layers")
    page = (ROOT / "ARCHITECTURE.md").read_text()
    drawn = re.search(r"<!-- layers -->\n+```text\n(.*?)```", page, re.DOTALL)
    assert drawn, "ARCHITECTURE.md has no drawing of the layers under its <!-- layers --> mark"
    assert [line.split("  ")[0].strip() for line in drawn[1].splitlines()] == contract


def test_existing_package_is_not_marked_optional() -> None:
    """Parentheses make a layer optional, for a package that comes later; once it exists they would hide its removal."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = " ".join(next(one["layers"] for one in contracts if one["id"] == "layers"))
    package_root = ROOT / "src" / "remit"
    built = {
        name_
        for name_ in re.findall(r"\((\w+)\)", layers)
        if any(package_root.glob(f"{name_}.py")) or any(package_root.glob(f"{name_}/*.py"))
    }
    assert not built, f"built, so take off the parentheses in pyproject.toml and ARCHITECTURE.md: {sorted(built)}"
