"""Determinism: one seed gives one run, also in a fresh process with another hash seed; another seed gives another run.

Repeated in full are as few scenarios as together reach every refusal, fault, transition and rare path that the standing
runs reach. Of the others only the beginning is repeated; the soak repeats all in full.

Two fresh processes run all scenarios, instead of two each: starting one costs more than the runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import pytest
from msgspec.json import decode

from remit.simulate import coverage
from remit.simulate.scenarios import names
from remit.simulate.simulation import RunResult
from tests.properties.effort import SOAKING
from tests.scenarios.standing_runs import simulate_beginnings, standing

ROOT = Path(__file__).parents[2]
HASH_SEED = "1" if os.environ.get("PYTHONHASHSEED") == "4242" else "4242"
BEGINNING_S = 20.0
EVENTS_MIN = 1_000

SCRIPT = """
import json, sys
from msgspec.json import encode
from remit.simulate.scenarios import load
from remit.simulate.simulation import simulate

until_s, tasks = json.loads(sys.argv[1])
for name, seed, in_full in tasks:
    begun = simulate(load(name), seed, until_s=until_s)
    other = simulate(load(name), seed + 1, until_s=until_s).digest
    print(encode([simulate(load(name), seed) if in_full else None, begun, other]).decode())
"""


class RepeatedRun(NamedTuple):
    """A standing run repeated (in full if chosen), its beginning, and the digest of the next seed's beginning."""

    result: RunResult | None
    begun: RunResult
    other: str


@cache
def full_repeats() -> frozenset[str]:
    """Scenarios to repeat in full: a greedy cover by marks reached per event."""
    if SOAKING:
        return frozenset(names())
    runs = {name: one.run for name, one in standing().items()}
    reach = {name: coverage.reached_marks([run]) for name, run in runs.items()}
    left, chosen = set.union(*reach.values()), list[str]()
    while left:
        chosen.append(max(sorted(runs), key=lambda name: len(reach[name] & left) / runs[name].events))
        left -= reach[chosen[-1]]
    return frozenset(chosen)


@cache
def repeated_runs() -> dict[str, RepeatedRun]:
    """Repeated runs by scenario."""
    env = {**os.environ, "PYTHONHASHSEED": HASH_SEED, "PYTHONPATH": str(ROOT / "src")}
    tasks = [(name, seed, name in full_repeats()) for name, seed in coverage.suite_runs()]
    tasks.sort(key=lambda one: (one[2], standing()[one[0]].run.events))  # so that both halves take about equal time
    commands = [[sys.executable, "-c", SCRIPT, json.dumps([BEGINNING_S, tasks[half::2]])] for half in (0, 1)]
    found = {}
    with ExitStack() as files:
        # Into files: with pipes, the second process would block on a full pipe until the first ends.
        outputs = [files.enter_context(TemporaryFile()) for _ in commands]
        started = [
            subprocess.Popen(command, env=env, stdout=out, stderr=out) for command, out in zip(commands, outputs, strict=True)
        ]
        for process, out in zip(started, outputs, strict=True):
            code = process.wait()
            out.seek(0)
            lines = out.read().splitlines()
            assert code == 0, b"\n".join(lines[-20:]).decode()
            for line in lines:
                again = decode(line, type=RepeatedRun)
                found[again.begun.scenario] = again
    return found


@pytest.mark.parametrize("name", names())
def test_seed_repeats_run_under_any_hash_seed(name: str) -> None:
    """Not only the digest: every reported field is equal."""
    again = repeated_runs()[name]
    run, same = (
        (standing()[name].run, again.result)
        if again.result is not None
        else (simulate_beginnings(BEGINNING_S)[name], again.begun)
    )
    assert run.digest == same.digest
    assert run == same
    assert run.events > EVENTS_MIN, "too few events to prove anything"


def test_full_repeats_reach_every_mark_of_standing_runs() -> None:
    made = [repeated_run.result for repeated_run in repeated_runs().values() if repeated_run.result is not None]
    assert coverage.reached_marks(made) == coverage.reached_marks([one.run for one in standing().values()])


@pytest.mark.parametrize("name", names())
def test_other_seed_gives_other_run(name: str) -> None:
    again = repeated_runs()[name]
    assert again.begun.digest != again.other
    assert again.begun.digest != standing()[name].run.digest, "the rest of the run counts too"
