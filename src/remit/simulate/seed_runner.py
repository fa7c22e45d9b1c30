"""Runs many seeds over worker processes and adds up the results.

Each worker is a separate process that performs one run after another and receives its tasks over a pipe. A worker that dies
or hangs affects only its own run, which is reported as a violation. SIGINT is blocked in workers, so that an interrupt
reaches only the parent, which ends them.
"""

from __future__ import annotations

import gc
import os
import signal  # noqa: TID251 - workers are real processes, outside of the simulation
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing import connection, get_context, resource_tracker  # noqa: TID251 - see above
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from msgspec import Struct, field

from remit.simulate.checkers.registry import Violation
from remit.simulate.scenario_types import Injection, Scenario
from remit.simulate.simulation import RunResult, simulate
from remit.world.clock import BootClock

FAULTS_PER_HOUR_MIN: Final = 70
DECISIONS_PER_HOUR_MIN: Final = 1_000
"""A simulated hour counts only with this many faults and decisions: hours without faults prove little and cost little."""

RUN_S_MAX: Final = 900.0
"""In real seconds. No run takes this long; a hanging run would take forever."""

RUN_LOST_CHECK: Final = "runs_come_to_an_end"
"""Name of the violation that is reported for a dead or hanging worker. The parent cannot see more of such a run."""

_END_S: Final = 5.0


class SeedTask(NamedTuple):
    """One run to perform."""

    scenario: Scenario
    seed: int
    until_s: float | None = None
    plan: tuple[Injection, ...] | None = None


class SeedResult(NamedTuple):
    """A finished run and the CPU time it took."""

    task: SeedTask
    run: RunResult
    cpu_s: float


Perform = Callable[[SeedTask], RunResult]


def perform(task: SeedTask) -> RunResult:
    return simulate(task.scenario, task.seed, plan=task.plan, until_s=task.until_s)


def run_seeds(
    tasks: Iterable[SeedTask], jobs: int, *, perform: Perform = perform, run_s_max: float = RUN_S_MAX
) -> Iterator[SeedResult]:
    """Yields runs as they finish. `tasks` may be endless: the next task is taken when a worker is free."""
    remaining = iter(tasks)
    workers: list[SeedWorker] = []
    directory = TemporaryDirectory(prefix="remit-swarm-")  # removed at the end, with the files that killed workers leave behind
    try:
        workers.extend(SeedWorker(perform, task, run_s_max, directory.name) for task in islice(remaining, jobs))
        while workers:
            connection.wait([worker.pipe for worker in workers], max(0.0, min(worker.remaining_s() for worker in workers)))
            for index, worker in reversed(list(enumerate(workers))):
                done = worker.poll()
                if done is None:
                    continue
                task = next(remaining, None)
                if task is None:
                    workers.pop(index).end()
                elif worker.usable:
                    worker.submit(task)
                else:
                    workers[index] = SeedWorker(perform, task, run_s_max, directory.name)
                yield done
    finally:
        for worker in workers:
            worker.end()
        directory.cleanup()


class SeedWorker:
    """The parent's side of one worker, which always has a run in progress."""

    def __init__(self, perform: Perform, task: SeedTask, run_s_max: float, directory: str) -> None:
        self.usable = True
        self._clock = BootClock()
        self._run_s_max = run_s_max
        context = get_context("spawn")
        self.pipe, worker_pipe = context.Pipe()
        self._process = context.Process(target=_worker_main, args=(worker_pipe, perform, directory), daemon=True)
        resource_tracker.ensure_running()  # otherwise started by the next line, where it would unblock SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits the signal mask
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        worker_pipe.close()  # so that the pipe ends when the worker does
        self.submit(task)

    def submit(self, task: SeedTask) -> None:
        self._task = task
        self._deadline_s = self._now_s() + self._run_s_max
        try:
            self.pipe.send(task)
        except OSError:
            self.usable = False  # the worker is dead already; the next poll reports it

    def remaining_s(self) -> float:
        return self._deadline_s - self._now_s()

    def poll(self) -> SeedResult | None:
        """The finished run, or the lost run of a dead or hanging worker; None while the run is in progress."""
        try:
            if self.pipe.poll():
                run, cpu_s = self.pipe.recv()
                return SeedResult(self._task, run, cpu_s)
        except (EOFError, OSError):
            self._process.join(_END_S)
            return self._lost(f"the worker process ended with exit code {self._process.exitcode}")
        if self.remaining_s() <= 0:
            return self._lost(f"the run did not end within {self._run_s_max:g} s")
        return None

    def _lost(self, message: str) -> SeedResult:
        self.usable = False
        self.end()
        scenario, seed, *_ = self._task
        violation = Violation(RUN_LOST_CHECK, "crash", "", "", message, 0)
        none: dict[str, int] = {}
        plan = self._task.plan or ()
        run = RunResult(
            scenario.name, seed, "", 0.0, 0, 0, 0, none, none, (violation,), (), plan, scenario, none, none, (), none, none
        )
        return SeedResult(self._task, run, 0.0)

    def end(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join(_END_S)

    def _now_s(self) -> float:
        return self._clock.now_ms() / 1000


def _worker_main(pipe: Any, perform: Perform, directory: str) -> None:
    """Main loop of a worker. It ends when the pipe is closed, also if the parent is gone."""
    tempfile.tempdir = directory
    gc.freeze()  # loaded modules are never garbage, so the collector need not scan them
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        before = cpu_s()
        run = perform(task)
        gc.collect()  # a run keeps its dead tasks until its end, in many reference cycles
        try:
            pipe.send((run, cpu_s() - before))
        except OSError:
            return


def cpu_s() -> float:
    times = os.times()
    return times.user + times.system


# ------------------------------------------------------------------------------------------------------------------ totals


class RunTotals(Struct):
    """Sums over all runs so far. `counted_s` are the simulated seconds with enough faults and decisions to count."""

    seeds: int = 0
    simulated_s: float = 0.0
    counted_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    commits: int = 0
    decided: int = 0
    events: int = 0
    cpu_s: float = 0.0
    violations: int = 0
    failing: int = 0
    """Seeds with at least one violation."""
    unknown: int = 0

    def add(self, run: RunResult, cpu_s: float = 0.0) -> None:
        self.seeds += 1
        self.simulated_s += run.simulated_s
        self.counted_s += counted_s(run)
        for kind, count in run.faults.items():
            self.faults[kind] = self.faults.get(kind, 0) + count
        self.commits += run.commits
        self.decided += run.decided
        self.events += run.events
        self.cpu_s += cpu_s
        self.violations += len(run.violations)
        self.failing += bool(run.violations)
        self.unknown += len(run.unknown)

    @property
    def hours(self) -> float:
        return self.simulated_s / 3600

    @property
    def counted_hours(self) -> float:
        return self.counted_s / 3600

    @property
    def faults_all(self) -> int:
        return sum(self.faults.values())

    @property
    def per_million_commits(self) -> float:
        return self.violations * 1e6 / self.commits if self.commits else 0.0


def counted_s(run: RunResult) -> float:
    """How much of a run counts, by its faults and decisions. Computed per run: a busy run does not make up for a calm one."""
    faults = sum(run.faults.values())
    return min(run.simulated_s, faults * 3600 / FAULTS_PER_HOUR_MIN, run.decided * 3600 / DECISIONS_PER_HOUR_MIN)
