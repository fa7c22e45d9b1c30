"""Do the rooms import only downwards, and would the contracts notice if they did not?"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.tidy.source_tree import ROOT, modules

LINT = Path(sys.executable).parent / "lint-imports"

# A house with every module that the contracts name, and no import that breaks one.
LAWFUL = {
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
    "a room that no layer names": ("drawer.py", ""),
    "the authority reads a cache": ("commitment/authority.py", "import remit.observation"),
    "a checker asks the law": ("simulate/checkers/books.py", "import remit.law"),
    "a checker asks the authority": ("simulate/checkers/books.py", "import remit.commitment.authority"),
    "one architecture uses another": ("proposal/architectures/probe.py", "import remit.proposal.architectures.central"),
    "a decision reads the clock": ("commitment/decide.py", "import time"),
    "the backlog reads the clock behind its own back": ("proposal/queue/fair_share.py", "import time"),
    "the law draws lots": ("law/__init__.py", "import random"),
    "a noun touches the system": ("model/__init__.py", "from os import path"),
    "the law waits": ("law/__init__.py", "import asyncio"),
}


def lint(place: Path, source: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(source), "COLUMNS": "200"}
    command = [str(LINT), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)


def build_house(place: Path) -> Path:
    """The rooms under `place`/src/remit, under the contracts of this repository."""
    shutil.copy(ROOT / "pyproject.toml", place)
    house = place / "src" / "remit"
    rooms = "agent bench cli client commitment correction demo docgen law model serve store world"
    for room in rooms.split():
        (house / room).mkdir(parents=True)
        (house / room / "__init__.py").write_text("")
    (house / "__init__.py").write_text("")
    for name, text in LAWFUL.items():
        (house / name).parent.mkdir(parents=True, exist_ok=True)
        (house / name).write_text(text)
    return house


def test_every_room_imports_only_the_rooms_below_it() -> None:
    done = lint(ROOT, ROOT / "src")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_lawful_house_passes(tmp_path: Path) -> None:
    house = build_house(tmp_path)
    done = lint(tmp_path, house.parent)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("story", PLANTED)
def test_a_planted_import_is_caught(story: str, tmp_path: Path) -> None:
    house = build_house(tmp_path)
    name, text = PLANTED[story]
    (house / name).write_text(text)
    done = lint(tmp_path, house.parent)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Broken contracts" in done.stdout, done.stdout


def test_the_architecture_page_draws_the_layers_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contract = next(one["layers"] for one in contracts if one["id"] == "layers")
    page = (ROOT / "ARCHITECTURE.md").read_text()
    drawn = re.search(r"<!-- layers -->\n+```text\n(.*?)```", page, re.DOTALL)
    assert drawn, "ARCHITECTURE.md has no drawing of the layers under its <!-- layers --> mark"
    assert [line.split("  ")[0].strip() for line in drawn[1].splitlines()] == contract


def test_a_room_that_is_built_is_not_marked_as_missing() -> None:
    """Parentheses make a layer optional, so that a room may come later; once it is there they would hide its removal."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = " ".join(next(one["layers"] for one in contracts if one["id"] == "layers"))
    house = ROOT / "src" / "remit"
    built = {
        room for room in re.findall(r"\((\w+)\)", layers) if any(house.glob(f"{room}.py")) or any(house.glob(f"{room}/*.py"))
    }
    assert not built, f"built, so take off the parentheses in pyproject.toml and ARCHITECTURE.md: {sorted(built)}"


ACYCLIC_ROOMS = ("law", "commitment", "observation", "proposal", "correction", "simulate")


def imported_names(tree: ast.AST) -> set[str]:
    """Every module or name that a module imports, also under TYPE_CHECKING and inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("room", ACYCLIC_ROOMS)
def test_modules_of_a_room_import_each_other__there_is_no_cycle(room: str) -> None:
    trees = {
        module.path.removeprefix("src/").removesuffix(".py").replace("/", "."): module.tree
        for module in modules()
        if module.path.startswith(f"src/remit/{room}/")
    }
    imports = {name: imported_names(tree) & trees.keys() for name, tree in trees.items()}
    while leaves := [name for name, others in imports.items() if not others]:
        for leaf in leaves:
            del imports[leaf]
        for others in imports.values():
            others.difference_update(leaves)
    assert not imports, "these modules form cycles, or import modules that do"
