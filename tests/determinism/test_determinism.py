"""Is one seed one run? Every scenario's standing run, whole, against one in a fresh process with another hash seed; and another
seed is another run.

Two fresh processes for all scenarios, not two for each: starting one costs more than the runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from msgspec.json import decode

from remit.simulate import marks
from remit.simulate.scenarios import names
from remit.simulate.simulation import Run
from tests.scenarios.standing import standing

ROOT = Path(__file__).parents[2]
HASH_SEED = "1" if os.environ.get("PYTHONHASHSEED") == "4242" else "4242"
BEGINNING_S = 5.0

SCRIPT = """
import json, sys
from msgspec.json import encode
from remit.simulate.scenarios import load
from remit.simulate.simulation import simulate

until_s, tasks = json.loads(sys.argv[1])
for name, seed in tasks:
    run = simulate(load(name), seed)
    begun = [simulate(load(name), one, until_s=until_s).digest for one in (seed, seed + 1)]
    print(encode([run, begun]).decode())
"""


@cache
def afresh() -> dict[str, tuple[Run, tuple[str, str]]]:
    """By scenario: its standing run made again, and the digests of how it begins with that seed and with the next."""
    env = {**os.environ, "PYTHONHASHSEED": HASH_SEED, "PYTHONPATH": str(ROOT / "src")}
    tasks = marks.suite()
    commands = [[sys.executable, "-c", SCRIPT, json.dumps([BEGINNING_S, tasks[half::2]])] for half in (0, 1)]
    started = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for command in commands]
    found = {}
    for process in started:
        lines, errors = process.communicate()
        assert process.returncode == 0, errors.decode()
        for line in lines.splitlines():
            run, begun = decode(line, type=tuple[Run, tuple[str, str]])
            found[run.scenario] = run, begun
    return found


@pytest.mark.parametrize("name", names())
def test_one_seed_is_one_run_under_any_hash_seed(name: str) -> None:
    """Not only to equal digests: whatever is told of a run is told again."""
    run, again = standing()[name].run, afresh()[name][0]
    assert run.digest == again.digest
    assert run == again
    assert run.events > 1_000, "hardly anything happened, so this proves nothing"


@pytest.mark.parametrize("name", names())
def test_another_seed_is_another_run(name: str) -> None:
    one, other = afresh()[name][1]
    assert one != other
    assert one != afresh()[name][0].digest, "what follows counts too"
