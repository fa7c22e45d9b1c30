"""Bans on time, randomness, ids, sockets, threads and processes apply everywhere but in world/."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from remit.world.interfaces import World
from tests.tidy.source_tree import ROOT

PLANTED = '''"""A module with banned names."""

import random
import time
import uuid

began = time.time()
lot = random.random()
name = uuid.uuid4()
'''


def ruff(place: str, text: str) -> str:
    """Output of ruff for `text` as if it stood at `place`; nothing is written there."""
    command = [
        str(Path(sys.executable).parent / "ruff"),
        "check",
        "--no-cache",
        "--output-format=concise",
        "--stdin-filename",
        place,
    ]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False).stdout


BANNED = [
    *("time", "random", "secrets", "uuid", "os.urandom", "os.getrandom"),
    *("datetime.datetime.now", "datetime.datetime.utcnow", "asyncio.timeout", "asyncio.timeout_at", "asyncio.wait_for"),
    *("socket", "socketserver", "select", "selectors", "asyncio.open_connection", "asyncio.open_unix_connection"),
    *("asyncio.start_server", "asyncio.start_unix_server"),
    *("threading", "_thread", "concurrent.futures", "asyncio.to_thread"),
    *("multiprocessing", "subprocess", "signal", "asyncio.subprocess", "asyncio.create_subprocess_exec"),
    *("asyncio.create_subprocess_shell", "os.fork", "os.kill", "os.killpg", "os.popen", "os.posix_spawn", "os.system"),
]


def module_using(name: str) -> list[str]:
    """Modules that use `name`, one for each way of importing it."""
    place, _, last = name.rpartition(".")
    # A class is reached through its module: datetime.datetime.now
    module, _, owner = place.rpartition(".") if name.startswith("datetime.") else (place, "", "")
    if owner:
        ways = [f"from {module} import {owner}\n\nused = {owner}.{last}\n", f"import {module}\n\nused = {name}\n"]
    elif place:
        ways = [f"from {place} import {last}\n\nused = {last}\n", f"import {place}\n\nused = {name}\n"]
    else:
        ways = [f"import {name}\n\nused = {name}\n", f"from {name} import anything\n\nused = anything\n"]
    return [f'"""A module with banned names."""\n\n{way}' for way in ways]


def test_banned_names_match_tested_names() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    banned = settings["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert sorted(banned) == sorted(BANNED)
    interfaces = {field.name for field in fields(World)}
    for ban in banned.values():
        instead = ban["msg"].removeprefix("use ").partition(" of the World")[0]
        assert instead.partition(":")[0] in interfaces, "the message names what to use instead"


@pytest.mark.parametrize("name", BANNED)
def test_name_is_banned_everywhere_but_in_world(name: str) -> None:
    for text in module_using(name):
        assert f"TID251 `{name}` is banned" in ruff("src/remit/commitment/planted.py", text), text
        assert "TID251" not in ruff("src/remit/world/planted.py", text), text


@pytest.mark.parametrize("room", ["model", "law", "store", "commitment", "client", "cli"])
def test_time_randomness_and_ids_are_banned_in_package(room: str) -> None:
    output = ruff(f"src/remit/{room}/planted.py", PLANTED)
    for module in ("time", "random", "uuid"):
        assert f"TID251 `{module}` is banned" in output, output


@pytest.mark.parametrize(
    "line", ["from datetime import datetime\n\nnow = datetime.now(None)\n", "import os\n\nlot = os.urandom(8)\n"]
)
def test_other_ways_to_time_and_randomness_are_banned(line: str) -> None:
    assert "TID251" in ruff("src/remit/law/planted.py", line)


def test_world_may_use_time_and_randomness() -> None:
    assert "TID251" not in ruff("src/remit/world/planted.py", PLANTED)


def test_relative_import_is_banned() -> None:
    assert "TID252" in ruff("src/remit/law/planted.py", "from .fit import fits\n\n__all__ = ['fits']\n")


@pytest.mark.parametrize("place", ["src/remit/law/planted.py", "tests/unit/law/test_planted.py", "tools/planted.py"])
@pytest.mark.parametrize(("branches", "is_reported"), [(19, False), (20, True)])
def test_a_function_is_too_complex__ruff_reports_it(place: str, branches: int, is_reported: bool) -> None:
    body = "".join(f"    if number == {i}:\n        number += 1\n" for i in range(branches))
    text = f"def planted(number: int) -> int:\n{body}    return number\n"
    assert ("C901" in ruff(place, text)) == is_reported
