"""Is one seed one run? Standing runs against those of a fresh process with another hash seed; and another seed is another run.

Made again whole are as few scenarios as reach, between them, all that the standing runs reach: every refusal, fault, transition
and rare path that could depend on the order of something is run through twice. Of the others it is the beginning; the soak has
all of them whole.

Two fresh processes for all scenarios, not two for each: starting one costs more than the runs.
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
from tests.scenarios.standing_runs import begun_together, standing

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
for name, seed, whole in tasks:
    begun = simulate(load(name), seed, until_s=until_s)
    other = simulate(load(name), seed + 1, until_s=until_s).digest
    print(encode([simulate(load(name), seed) if whole else None, begun, other]).decode())
"""


class Again(NamedTuple):
    """A standing run, made again whole if it is one of those; how it begins; and the digest of how the next seed does."""

    whole: RunResult | None
    begun: RunResult
    other: str


@cache
def whole() -> frozenset[str]:
    """Which are made again whole: always the one that adds the most for what it costs."""
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
def afresh() -> dict[str, Again]:
    """By scenario."""
    env = {**os.environ, "PYTHONHASHSEED": HASH_SEED, "PYTHONPATH": str(ROOT / "src")}
    tasks = [(name, seed, name in whole()) for name, seed in coverage.suite_runs()]
    tasks.sort(key=lambda one: (one[2], standing()[one[0]].run.events))  # so that both halves take about as long
    commands = [[sys.executable, "-c", SCRIPT, json.dumps([BEGINNING_S, tasks[half::2]])] for half in (0, 1)]
    found = {}
    with ExitStack() as files:
        # Into files: with a pipe each the second would stand still, once its pipe is full, until the first has ended.
        told = [files.enter_context(TemporaryFile()) for _ in commands]
        started = [
            subprocess.Popen(command, env=env, stdout=out, stderr=out) for command, out in zip(commands, told, strict=True)
        ]
        for process, out in zip(started, told, strict=True):
            code = process.wait()
            out.seek(0)
            lines = out.read().splitlines()
            assert code == 0, b"\n".join(lines[-20:]).decode()
            for line in lines:
                again = decode(line, type=Again)
                found[again.begun.scenario] = again
    return found


@pytest.mark.parametrize("name", names())
def test_one_seed_is_one_run_under_any_hash_seed(name: str) -> None:
    """Not only to equal digests: whatever is told of a run is told again."""
    again = afresh()[name]
    run, same = (
        (standing()[name].run, again.whole) if again.whole is not None else (begun_together(BEGINNING_S)[name], again.begun)
    )
    assert run.digest == same.digest
    assert run == same
    assert run.events > EVENTS_MIN, "hardly anything happened, so this proves nothing"


def test_what_is_made_again_whole_reaches_all_that_is_reached() -> None:
    made = [one.whole for one in afresh().values() if one.whole is not None]
    assert coverage.reached_marks(made) == coverage.reached_marks([one.run for one in standing().values()])


@pytest.mark.parametrize("name", names())
def test_another_seed_is_another_run(name: str) -> None:
    again = afresh()[name]
    assert again.begun.digest != again.other
    assert again.begun.digest != standing()[name].run.digest, "what follows counts too"
