"""Runs many seeds over worker processes and adds up the results.

Seeds over several processes, and their sum. What one run does is in simulation.py.

A worker is a process of its own that performs one run after another, and is asked over a pipe. One that dies or hangs costs its
own run, which is then told as a broken promise, and never the others. SIGINT is blocked in workers from birth: the one who
started them ends them.
"""

from __future__ import annotations

import gc
import os
import signal  # noqa: TID251 - workers are real processes, beside the simulated world and not in it
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing import connection, get_context, resource_tracker  # noqa: TID251 - see above
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from msgspec import Struct, field

from remit.simulate.checkers.registry import Violation
from remit.simulate.scenarios import Injection, Scenario
from remit.simulate.simulation import Run, simulate
from remit.world.clock import BootClock

FAULTS_AN_HOUR: Final = 70
DECIDED_AN_HOUR: Final = 1_000
"""An hour counts only with this much in it: hours of calm prove nothing, and cost nothing either."""

RUN_S_MAX: Final = 900.0
"""Real seconds. No run takes this long; one that stands still at one virtual moment would take for ever."""

LOST: Final = "runs_come_to_an_end"
"""The name under which a dead or hanging worker is told: such a run cannot be looked into from here."""

_END_S: Final = 5.0


class Task(NamedTuple):
    """One run to perform."""

    scenario: Scenario
    seed: int
    until_s: float | None = None
    plan: tuple[Injection, ...] | None = None


class Done(NamedTuple):
    """A run that is over, and the CPU time that it took."""

    task: Task
    run: Run
    cpu_s: float


Perform = Callable[[Task], Run]


def perform(task: Task) -> Run:
    return simulate(task.scenario, task.seed, plan=task.plan, until_s=task.until_s)


def swarm(tasks: Iterable[Task], jobs: int, *, perform: Perform = perform, run_s_max: float = RUN_S_MAX) -> Iterator[Done]:
    """Runs as they end, in the order in which they do. `tasks` may be endless: the next is asked for when a worker is free."""
    todo = iter(tasks)
    workers: list[Worker] = []
    place = TemporaryDirectory(prefix="remit-swarm-")  # what a worker that is killed leaves behind goes with it
    try:
        workers.extend(Worker(perform, task, run_s_max, place.name) for task in islice(todo, jobs))
        while workers:
            connection.wait([worker.pipe for worker in workers], max(0.0, min(worker.left_s() for worker in workers)))
            for index, worker in reversed(list(enumerate(workers))):
                done = worker.look()
                if done is None:
                    continue
                task = next(todo, None)
                if task is None:
                    workers.pop(index).end()
                elif worker.able:
                    worker.ask(task)
                else:
                    workers[index] = Worker(perform, task, run_s_max, place.name)
                yield done
    finally:
        for worker in workers:
            worker.end()
        place.cleanup()


class Worker:
    """The near end of one worker: it always has a run under way."""

    def __init__(self, perform: Perform, task: Task, run_s_max: float, place: str) -> None:
        self.able = True
        self._clock = BootClock()
        self._run_s_max = run_s_max
        context = get_context("spawn")
        self.pipe, far = context.Pipe()
        self._process = context.Process(target=_work, args=(far, perform, place), daemon=True)
        resource_tracker.ensure_running()  # it would be begun by the start below, and unblock what is blocked here
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits what is blocked
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        far.close()  # so that the pipe ends when the worker does
        self.ask(task)

    def ask(self, task: Task) -> None:
        self._task = task
        self._deadline_s = self._now_s() + self._run_s_max
        try:
            self.pipe.send(task)
        except OSError:
            self.able = False  # it is dead already, which the next look finds

    def left_s(self) -> float:
        return self._deadline_s - self._now_s()

    def look(self) -> Done | None:
        """The run that it has ended, or that has ended with it."""
        try:
            if self.pipe.poll():
                run, cpu_s = self.pipe.recv()
                return Done(self._task, run, cpu_s)
        except (EOFError, OSError):
            self._process.join(_END_S)
            return self._lost(f"its process ended with {self._process.exitcode}")
        if self.left_s() <= 0:
            return self._lost(f"it had not ended after {self._run_s_max:g} s")
        return None

    def _lost(self, why: str) -> Done:
        self.able = False
        self.end()
        scenario, seed, *_ = self._task
        violation = Violation(LOST, "crash", "", "", why, 0)
        none: dict[str, int] = {}
        plan = self._task.plan or ()
        run = Run(
            scenario.name, seed, "", 0.0, 0, 0, 0, none, none, (violation,), (), plan, scenario, none, none, (), none, none
        )
        return Done(self._task, run, 0.0)

    def end(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join(_END_S)

    def _now_s(self) -> float:
        return self._clock.now_ms() / 1000


def _work(pipe: Any, perform: Perform, place: str) -> None:
    """The far end. Whoever started it may be gone: then the pipe has ended, and so does this."""
    tempfile.tempdir = place
    gc.freeze()  # what is loaded now stays: nothing of it needs to be looked through again
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        before = cpu_s()
        run = perform(task)
        gc.collect()  # a run keeps its dead until its end: they are many, and point at each other
        try:
            pipe.send((run, cpu_s() - before))
        except OSError:
            return


def cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system


# ----------------------------------------------------------------------------------------------------------------- the sum


class Totals(Struct):
    """What was run so far. `counted_s` are the simulated seconds that had enough in them to count."""

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
    """Seeds with a violation; one seed may have several."""
    unknown: int = 0

    def add(self, run: Run, cpu_s: float = 0.0) -> None:
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


def counted_s(run: Run) -> float:
    """As much of the run as it had faults and decisions for. Each run by itself: a busy one lends nothing to a calm one."""
    faults = sum(run.faults.values())
    return min(run.simulated_s, faults * 3600 / FAULTS_AN_HOUR, run.decided * 3600 / DECIDED_AN_HOUR)
