"""Do the bans on time, chance and ids bite everywhere but in the world?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.tree import ROOT

PLANTED = '''"""Is the ban awake?"""

import random
import time
import uuid

began = time.time()
lot = random.random()
name = uuid.uuid4()
'''


def ruff(place: str, text: str) -> str:
    """What ruff says of `text` if it stood at `place`; nothing is written there."""
    command = [
        str(Path(sys.executable).parent / "ruff"),
        "check",
        "--no-cache",
        "--output-format=concise",
        "--stdin-filename",
        place,
    ]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("room", ["model", "law", "store", "commitment", "client", "cli"])
def test_time_chance_and_ids_are_banned_in(room: str) -> None:
    said = ruff(f"src/remit/{room}/planted.py", PLANTED)
    for module in ("time", "random", "uuid"):
        assert f"TID251 `{module}` is banned" in said, said


@pytest.mark.parametrize(
    "line", ["from datetime import datetime\n\nnow = datetime.now(None)\n", "import os\n\nlot = os.urandom(8)\n"]
)
def test_the_back_doors_are_banned_too(line: str) -> None:
    assert "TID251" in ruff("src/remit/law/planted.py", line)


def test_the_world_may_read_the_clock_and_draw_lots() -> None:
    assert "TID251" not in ruff("src/remit/world/planted.py", PLANTED)


def test_a_relative_import_is_banned() -> None:
    assert "TID252" in ruff("src/remit/law/planted.py", "from .fit import fits\n\n__all__ = ['fits']\n")
