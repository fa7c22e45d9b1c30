"""Shrinks a failing run to a minimal replay.

Every candidate is run, and it is kept if the same check fails; no assumption is made about which faults matter. The effect
of a fault depends only on the seed and its own number (see faults/kinds.py), so removing one fault changes no other. The
search is bounded by runs and CPU time; at a bound the best failing run so far is the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from remit.model.resources import format_duration
from remit.simulate.checkers.judge import checks_by_property
from remit.simulate.checkers.registry import Violation
from remit.simulate.scenarios import BadScenario, Injection, Replay, Scenario, fault_problems, problems
from remit.simulate.seed_runner import cpu_s
from remit.simulate.simulation import PROCESS_ENDED_CHECK, RunResult, simulate

RUNS_MAX: Final = 300
CPU_S_MAX: Final = 60.0
FILE_BYTES_MAX: Final = 16 << 20
SEED_MAX: Final = 2**63 - 1
NUMBER_MAX: Final = 1_000_000

_AFTER_S: Final = 0.002
"""A shrunk run ends this long after its violation, whose time is known to the millisecond."""

_SHARES: Final = (0.0, 0.25, 0.5)
"""Shares of a duration that are tried, smallest first."""


class SimulateFunction(Protocol):
    def __call__(
        self, scenario: Scenario, seed: int, *, plan: tuple[Injection, ...] | None, until_s: float | None
    ) -> RunResult: ...


class ShrinkResult(NamedTuple):
    """`complete`: the search ended before its bounds were reached and was not interrupted."""

    replay: Replay
    run: RunResult
    runs: int
    complete: bool
    interrupted: bool = False


class NotReproduced(Exception):
    """The run did not fail again: some of its behaviour does not depend on the seed alone."""


class _BudgetExhausted(Exception):
    """A bound of the search is reached."""


def shrink(
    first: RunResult,
    until_s: float | None = None,
    *,
    simulate: SimulateFunction = simulate,
    runs_max: int = RUNS_MAX,
    cpu_s_max: float = CPU_S_MAX,
    revision: str = "",
    on_progress: Callable[[str], None] = lambda _: None,
    on_smaller: Callable[[Replay], None] = lambda _: None,
) -> ShrinkResult:
    """Shrink the failing run `first`. `on_smaller` receives it before the search starts, and then every smaller one."""
    search = _Search(first, until_s, simulate, runs_max, cpu_s_max, on_progress, lambda: on_smaller(search.replay(revision)))
    complete, interrupted = True, False
    try:
        search.on_better()
        search.run_search()
    except _BudgetExhausted:
        complete = False
    except KeyboardInterrupt:
        complete, interrupted = False, True
    return ShrinkResult(search.replay(revision), search.run, search.runs, complete, interrupted)


class _Search:
    """The smallest failing run so far, and the steps that make it smaller."""

    def __init__(
        self,
        first: RunResult,
        until_s: float | None,
        simulate: SimulateFunction,
        runs_max: int,
        cpu_s_max: float,
        on_progress: Callable[[str], None],
        on_better: Callable[[], None],
    ) -> None:
        self.check = first.violations[0].check
        self.runs = 0
        self._simulate = simulate
        self._runs_max = runs_max
        self._cpu_s_end = cpu_s() + cpu_s_max
        self._on_progress = on_progress
        self.on_better = on_better
        self._adopt(
            first.effective_scenario,
            first.plan,
            until_s or first.effective_scenario.duration_s + first.effective_scenario.heal_s,
            first,
        )

    def replay(self, revision: str) -> Replay:
        details = {"digest": self.run.digest, **{name: str(value) for name, value in self.violation._asdict().items()}}
        return Replay(self.scenario, self.run.seed, self.until_s, self.plan, self.check, revision, details)

    def run_search(self) -> None:
        if not self._fails(self.scenario, self.plan, self.until_s):
            raise NotReproduced(f"seed {self.run.seed} of {self.run.scenario} did not violate {self.check} again")
        self._fails(self.scenario, (), self.until_s)
        if self.plan:
            self._fails(
                self.scenario, tuple(injection for injection in self.plan if injection.at_s < self.until_s), self.until_s
            )
            self._fewer()
            self._shorter_run()
            self._shorter_faults()

    def _fewer(self) -> None:
        """Delta debugging: remove halves, quarters, and at last single faults, until every remaining one is needed."""
        size = max(1, len(self.plan) // 2)
        while self.plan:
            before = len(self.plan)
            start = 0
            while start < len(self.plan):
                if not self._fails(self.scenario, (*self.plan[:start], *self.plan[start + size :]), self.until_s):
                    start += size
            if size == 1 and len(self.plan) == before:
                return
            size = max(1, min(size // 2, len(self.plan)))

    def _shorter_run(self) -> None:
        """Shorten the fault phase: a violation in the liveness phase then comes earlier."""
        full_s = self.scenario.duration_s
        if self.until_s <= full_s:
            return
        least_s = max((injection.at_s + injection.lasts_s for injection in self.plan), default=0.0) + 1.0
        for share in _SHARES:
            duration_s = least_s + (full_s - least_s) * share
            saved_s = full_s - duration_s
            shorter = replace(self.scenario, duration=format_duration(math.ceil(duration_s * 1000)))
            until_s = min(self.until_s, shorter.duration_s + shorter.heal_s)
            if saved_s > 1.0 and self._fails(shorter, self.plan, until_s):
                return

    def _shorter_faults(self) -> None:
        for injection in self.plan:
            for share in _SHARES if injection.lasts_s > 0 else ():
                shorter = replace(injection, lasts_s=injection.lasts_s * share)
                plan = tuple(shorter if other.number == injection.number else other for other in self.plan)
                if self._fails(self.scenario, plan, self.until_s):
                    break

    def _fails(self, scenario: Scenario, plan: tuple[Injection, ...], until_s: float) -> bool:
        """Run a candidate. If the same check fails, it becomes the smallest failing run."""
        if self.runs >= self._runs_max or cpu_s() >= self._cpu_s_end:
            raise _BudgetExhausted
        self.runs += 1
        self._on_progress(f"run {self.runs}: {len(self.plan)} faults left, ends after {self.until_s:.1f} s")
        run = self._simulate(scenario, self.run.seed, plan=plan, until_s=until_s)
        if not any(violation.check == self.check for violation in run.violations):
            return False
        self._adopt(scenario, plan, until_s, run)
        self.on_better()
        return True

    def _adopt(self, scenario: Scenario, plan: Sequence[Injection], until_s: float, run: RunResult) -> None:
        self.scenario, self.plan, self.run = scenario, tuple(plan), run
        self.violation: Violation = next(violation for violation in run.violations if violation.check == self.check)
        self.until_s = min(until_s, self.violation.at_ms / 1000 + _AFTER_S)


# ------------------------------------------------------------------------------------------------------------------- files


def save(replay: Replay, directory: Path) -> Path:
    """Write to a temporary file and rename it: an interrupt leaves the previously saved file intact."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", replay.scenario.name)
    path = directory / f"remit-replay-{name}-{replay.seed}.json"
    temporary = path.with_suffix(".part")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(replay), indent=2) + b"\n")
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return path


def read_replay(path: Path) -> Replay:
    """Raises BadScenario, with field and fix, if the file is not a replay."""
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise BadScenario(f"{path}: larger than any replay; use a file saved by `remit simulate`")
    try:
        replay = msgspec.json.decode(data, type=Replay)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadScenario(f"{path}: not a replay ({error}); use a file saved by `remit simulate`") from None
    for problem in _replay_problems(replay):
        raise BadScenario(f"{path}: {problem}")
    return replay


def _replay_problems(replay: Replay) -> Iterator[str]:
    """Problems of a replay. The file may have been edited, so nothing in it is trusted. The order of the checks matters."""
    yield from (f"scenario: {problem}" for problem in problems(replay.scenario))
    if not 0 <= replay.seed <= SEED_MAX:
        yield f"seed: must be from 0 to {SEED_MAX}"
    end_s = replay.scenario.duration_s + replay.scenario.heal_s
    if not 0 < replay.until_s <= end_s + _AFTER_S:
        yield f"until_s: must be more than 0 and at most {end_s:g}, the end of the scenario"
    numbers: set[int] = set()
    for index, injection in enumerate(replay.plan):
        yield from (f"plan[{index}].{problem}" for problem in _injection_problems(replay.scenario, injection))
        if injection.number in numbers:
            yield f"plan[{index}].number: {injection.number} is used twice; each fault needs its own, which seeds its draws"
        numbers.add(injection.number)
    yield from _violation_problems(replay.violation)


def _injection_problems(scenario: Scenario, injection: Injection) -> Iterator[str]:
    yield from fault_problems(scenario, injection)
    for name, value in {"number": injection.number, "at_s": injection.at_s, "lasts_s": injection.lasts_s}.items():
        high = scenario.duration_s if name.endswith("_s") else NUMBER_MAX
        if not 0 <= value <= high:
            yield f"{name}: must be from 0 to {high:.15g}"


def _violation_problems(check: str) -> Iterator[str]:
    """Reject the name of a check that does not exist: every run would pass it."""
    known = sorted({PROCESS_ENDED_CHECK, *chain.from_iterable(checks_by_property().values())})
    if check and check not in known:
        closest = get_close_matches(check, known, n=1, cutoff=0.0)[0]
        yield f"violation: there is no check {check!r}, the closest is {closest}; leave it empty to run without comparing"
