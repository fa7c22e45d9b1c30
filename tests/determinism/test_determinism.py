"""Is one seed one run? Every scenario in two processes with different hash seeds, to equal digests; and another seed differs.

Two processes for all scenarios, not two for each: starting one costs more than the runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from remit.simulate.scenarios import names

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("determinism")  # or each worker would have processes of its own for all scenarios
UNTIL_S = 120.0
SEED = 11

SCRIPT = """
import json, sys
from remit.simulate.scenarios import load, names
from remit.simulate.simulation import simulate

until_s, *seeds = json.loads(sys.argv[1])
found = {f"{name}/{seed}": simulate(load(name), seed, until_s=until_s) for seed in seeds for name in names()}
rows = {name: [run.digest, run.events, run.commits, run.faults] for name, run in found.items()}
print(json.dumps(rows))
"""


@cache
def digests(hash_seed: str, *seeds: int) -> dict[str, tuple[str, int, int, dict[str, int]]]:
    """Every scenario's digest, events, commits and faults, from a process of its own."""
    command = [sys.executable, "-c", SCRIPT, json.dumps([UNTIL_S, *seeds])]
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[str, int, int, dict[str, int]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", names())
def test_one_seed_is_one_run_under_any_hash_seed(name: str) -> None:
    one, other = digests("1", SEED, SEED + 1), digests("4242", SEED)
    assert one[f"{name}/{SEED}"] == other[f"{name}/{SEED}"]
    assert one[f"{name}/{SEED}"][1] > 1_000, "hardly anything happened, so this proves nothing"


@pytest.mark.parametrize("name", names())
def test_another_seed_is_another_run(name: str) -> None:
    found = digests("1", SEED, SEED + 1)
    assert found[f"{name}/{SEED}"][0] != found[f"{name}/{SEED + 1}"][0]
