"""Results of simulation runs that did not take place."""

from __future__ import annotations

import os
import signal
import time

from remit.simulate.checkers.registry import Violation
from remit.simulate.scenarios import Injection, Scenario
from remit.simulate.seed_runner import SeedTask
from remit.simulate.simulation import RunResult

FAKE_SCENARIO = Scenario("pretended", "nothing is run")


def fake_result(seed: int = 1, *violations: Violation, plan: tuple[Injection, ...] = (), **more: object) -> RunResult:
    fields: dict[str, object] = {
        "scenario": "pretended",
        "seed": seed,
        "digest": f"{seed:064x}",
        "simulated_s": 3600.0,
        "events": 10,
        "commits": 2_000,
        "decided": 1_000,
        "faults": {"loss": 70},
        "missed": {},
        "violations": violations,
        "unknown": (),
        "plan": plan,
        "effective_scenario": FAKE_SCENARIO,
        "codes": {},
        "operations": {},
        "scheduler_paths": {},
        "edges": (),
        "reasons": {},
        **more,
    }
    return RunResult(**fields)  # type: ignore[arg-type]


def violation(check: str = "one_copy", at_s: float = 10.0) -> Violation:
    return Violation(check, "S8", "local", "replica/acme/web-0", "it ran twice", round(at_s * 1000))


def perform(task: SeedTask) -> RunResult:
    return fake_result(task.seed)


def perform_and_die(task: SeedTask) -> RunResult:
    """The process of seed 3 kills itself."""
    if task.seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return fake_result(task.seed)


def perform_and_hang(task: SeedTask) -> RunResult:
    if task.seed == 2:
        time.sleep(600)
    return fake_result(task.seed)
