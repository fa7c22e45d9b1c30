"""Every manifest in tests/bad is refused at its position, with the cure in expected.toml, and quickly."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from remit.model.manifests.reader import read

BAD = Path(__file__).parents[3] / "bad"
EXPECTED: dict[str, Any] = tomllib.loads((BAD / "expected.toml").read_text())
FILES = sorted(path.name for path in BAD.iterdir() if path.suffix != ".toml")

TIMED = """
import json, sys, time
from pathlib import Path
import remit.model.manifests.json_reader, remit.model.manifests.yaml_reader
from remit.model.manifests.reader import read
times = {}
for name in sys.argv[1:]:
    data = Path(name).read_bytes()
    start = time.perf_counter()
    read(data, name)
    times[name] = time.perf_counter() - start
print(json.dumps(times))
"""


def test_bad_manifests_are_enough_and_all_expected() -> None:
    assert len(FILES) >= 40
    assert sorted(EXPECTED) == FILES


@pytest.mark.parametrize("name", FILES)
def test_bad_manifest_is_refused_at_position_with_cure(name: str) -> None:
    """Among them A22 (alias-bomb), A24 (deep), A25 (nan, infinite-number, many-digits, memory-overflow, negative-cpu), A26
    (duplicate-key), A27 (python-tag) and A28 (name-with-dots, name-with-newline, name-with-nul, name-right-to-left,
    name-too-long).
    """
    manifests = read((BAD / name).read_bytes(), name)
    assert not manifests.objects
    assert [f"{p.line}:{p.column} {p.path}; {p.cure}" for p in manifests.problems] == EXPECTED[name]["problems"]
    for problem in manifests.problems:
        assert problem.cure, "a problem needs a cure"
        assert str(problem).isprintable(), "file content must not control the terminal"
        assert str(problem).startswith(f"{name}:{problem.line}:{problem.column}: ")


def test_bad_manifests_are_refused_quickly() -> None:
    """The limit has slack for a busy machine; the measured time is in the message."""
    small = [str(BAD / name) for name in FILES if (BAD / name).stat().st_size <= 8192]
    done = subprocess.run([sys.executable, "-c", TIMED, *small], capture_output=True, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout)
    slowest = max(times, key=lambda name: times[name])
    assert len(times) == len(small)
    assert times[slowest] < 3, f"{slowest} took {times[slowest]:.3f} s"
