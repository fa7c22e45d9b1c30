"""`simulate`.

Runs scenarios and says what held. What it looks like is in simulate_shown.py.
"""

from __future__ import annotations

import re
import shlex
import signal  # noqa: TID251 - the program's own end: interrupted, it leaves no process behind
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from remit.cli.main import examples
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.cli.output.simulation_report import Shown
    from remit.simulate.scenario_types import Injection, Replay, Scenario
    from remit.simulate.simulation import RunResult, Simulation

PASSED, VIOLATED, MISUSE = 0, 1, 2
"""The last is click's own. A story of nothing is misuse that only the run could tell."""

SEED_MAX: Final = 2**63 - 1
SHRUNK_MAX: Final = 5
"""So many failing seeds of one command are shrunk, each by a check of its own: the hundredth says no more than the first."""

SUGGESTIONS_MAX: Final = 3
"""So many names are offered for one that never was."""


class SimulationRequest(NamedTuple):
    """What the command line says, found to be sound."""

    scenario: Scenario
    seeds: range
    until_s: float | None
    plan: tuple[Injection, ...] | None = None
    expected: str = ""
    """The check that a replay has failed by."""
    revision: str = ""
    """What a replay was saved at."""
    words: str = ""
    """How this scenario is named in a command."""


class RunOptions(NamedTuple):
    """How it is run and told."""

    jobs: int
    as_json: bool
    trace: bool
    story: str
    shrinks: bool
    save: Path


@click.command(
    epilog=examples(
        "remit simulate --list                        the scenarios there are",
        "remit simulate swarm                         one seed, and what held",
        "remit simulate swarm --seeds 1-200 --jobs 2  many, on two processes",
        "remit simulate swarm --seed 7 --until 2h     the faults go on for longer",
        "remit simulate mine.toml --json              your own; a line of JSON for each seed",
        "remit simulate swarm --seed 7 --story replica/acme/web-0",
        "remit simulate --replay remit-replay-swarm-7.json",
    )
)
@click.argument("scenario", required=False)
@click.option("--list", "lists", is_flag=True, help="Print the scenarios that come with Remit.")
@click.option("--replay", type=click.Path(path_type=Path), help="Run what this file has saved.")
@click.option("--seed", type=click.IntRange(0, SEED_MAX), default=None, help="Which run; 1 if nothing is said.")
@click.option("--seeds", metavar="A-B", default=None, help="Many runs: all seeds from A to B.")
@click.option("--jobs", type=click.IntRange(1, 256), default=2, show_default=True, help="Processes for many seeds.")
@click.option("--until", metavar="TIME", default=None, help="Virtual time to run for, such as 90s or 2h.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a seed, on a line of its own.")
@click.option("--trace", is_flag=True, help="Print all that happened, a line each.")
@click.option("--story", metavar="KEY", default="", help="Print the life of one object, such as replica/acme/web-0.")
@click.option("--no-shrink", is_flag=True, help="Do not look for the least that breaks it.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    default=None,  # the directory of today is looked at only when there is something to save
    help="Where replays are saved; here if nothing is said.",
)
def simulate(
    scenario: str | None,
    lists: bool,
    replay: Path | None,
    seed: int | None,
    seeds: str | None,
    jobs: int,
    until: str | None,
    as_json: bool,
    trace: bool,
    story: str,
    no_shrink: bool,
    save: Path | None,
) -> None:
    """Run Remit's own code in a simulated world under faults, and check what it promises.

    SCENARIO is the name of one that comes with Remit, or a .toml file. One seed is one run: the same seed gives the same run
    on every machine. A run that breaks a promise is made as small as it can be, and saved as a file that replays it.

    Exits with 0 if everything held, 1 if something did not, and 2 if the command cannot be meant.
    """
    if sum((scenario is not None, lists, replay is not None)) != 1:
        raise click.UsageError("name one of: a SCENARIO, --list, --replay FILE; `remit simulate --list` shows what there is")
    from remit.cli.output.console import until_nobody_reads
    from remit.cli.output.simulation_report import Shown  # after --help: these load all that is simulated

    shown = Shown(as_json)
    if lists:
        with until_nobody_reads():
            shown.scenarios()
        return
    asked = (
        _read_replay(replay, seed, seeds, until) if replay is not None else _parse_request(str(scenario), seed, seeds, until)
    )
    if (trace or story) and (as_json or len(asked.seeds) > 1):
        raise click.UsageError("--trace and --story tell people about one run: leave out --json, and name one --seed")
    manner = RunOptions(jobs, as_json, trace, story, not no_shrink and replay is None, save or Path())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with until_nobody_reads():
        code = _run_many(shown, asked, manner) if len(asked.seeds) > 1 else _run_one(shown, asked, manner)
    sys.exit(code)


# ---------------------------------------------------------------------------------------------------------- what was asked


def _parse_request(name: str, seed: int | None, seeds: str | None, until: str | None) -> SimulationRequest:
    from remit.simulate.scenarios import BadScenario, load

    if seed is not None and seeds is not None:
        raise click.UsageError("--seed and --seeds exclude each other: name one seed, or from which to which")
    try:
        scenario = load(name)
    except BadScenario as error:
        raise click.UsageError(escaped(str(error))) from None
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{escaped(name)}: {escaped(str(error))}") from None
    words = shlex.join([name, *(("--until", until) if until else ())])
    return SimulationRequest(*_apply_until(scenario, until, _parse_seeds(seed, seeds)), words=words)


def _parse_seeds(seed: int | None, seeds: str | None) -> range:
    if seeds is None:
        return range(1, 2) if seed is None else range(seed, seed + 1)
    match = re.fullmatch(r"([0-9]{1,19})-([0-9]{1,19})", seeds)
    if match is None:
        raise click.UsageError(f"--seeds: {escaped(seeds)} names no seeds; write the first and the last, such as 1-200")
    first, last = int(match[1]), int(match[2])
    if not first <= last <= SEED_MAX:
        raise click.UsageError(f"--seeds: {escaped(seeds)} has its last before its first; write the smaller number first")
    return range(first, last + 1)


def _apply_until(scenario: Scenario, until: str | None, seeds: range) -> tuple[Scenario, range, float | None]:
    """Longer than the scenario: its faults go on for longer. Shorter: it is cut, with what that leaves undecided."""
    from msgspec.structs import replace

    from remit.model.resources import format_duration, parse_duration

    if until is None:
        return scenario, seeds, None
    try:
        until_ms = parse_duration(until)
    except ValueError as error:
        raise click.UsageError(f"--until: {escaped(until)}: {error}") from None
    if until_ms <= 0:
        raise click.UsageError("--until: nothing happens in no time; write more than 0s")
    heal_ms = round(scenario.heal_s * 1000)
    if until_ms > round(scenario.duration_s * 1000) + heal_ms:
        return replace(scenario, duration=format_duration(until_ms - heal_ms)), seeds, None
    return scenario, seeds, until_ms / 1000


def _read_replay(path: Path, seed: int | None, seeds: str | None, until: str | None) -> SimulationRequest:
    from remit.simulate.scenarios import BadScenario
    from remit.simulate.shrink import read_replay

    if seed is not None or seeds is not None or until is not None:
        raise click.UsageError("--replay has its seed and its time from its file: leave out --seed, --seeds and --until")
    try:
        replay = read_replay(path)
    except BadScenario as error:
        raise click.UsageError(f"--replay: {escaped(str(error))}") from None
    except OSError as error:
        why = escaped(error.strerror or str(error))
        raise click.UsageError(f"--replay: {escaped(str(path))}: {why}; name a file that a failed run has saved") from None
    seeds_one = range(replay.seed, replay.seed + 1)
    return SimulationRequest(replay.scenario, seeds_one, replay.until_s, replay.plan, replay.violation, replay.revision)


# ----------------------------------------------------------------------------------------------------------------- running


def _run_one(shown: Shown, asked: SimulationRequest, manner: RunOptions) -> int:
    from remit.cli.interrupts import insisting
    from remit.cli.session.source_revision import CHANGED, revision

    with insisting():
        from remit.simulate.simulation import Simulation

    if asked.revision and (asked.revision != (this := revision()) or asked.revision.endswith(CHANGED)):
        shown.other_revision(asked.revision, this, changed=asked.revision.endswith(CHANGED))
    simulation = Simulation(asked.scenario, asked.seeds[0], plan=asked.plan, until_s=asked.until_s, trace=manner.trace)
    with shown.waiting(f"{asked.scenario.name}, seed {asked.seeds[0]}"), insisting():
        run = simulation.run()
    if manner.as_json:
        shown.line(run)
    else:
        for line in run.trace:
            click.echo(escaped(line))
        shown.run(run)
    told = not manner.story or _print_story(simulation, manner.story)
    if asked.expected:
        shown.expected(asked.expected, run)
    if run.violations:
        shown.broken(run)
        if _shrink_and_save(shown, asked, manner, run):
            raise KeyboardInterrupt
        return VIOLATED
    return PASSED if told else MISUSE


def _run_many(shown: Shown, asked: SimulationRequest, manner: RunOptions) -> int:
    from remit.simulate.seed_runner import RunTotals, SeedTask, run_seeds

    def tasks() -> Iterator[SeedTask]:
        return (SeedTask(asked.scenario, seed, asked.until_s) for seed in asked.seeds)

    totals = RunTotals()
    failing: list[RunResult] = []
    early: dict[int, RunResult] = {}
    seeds = iter(asked.seeds)
    next_seed = next(seeds)
    with shown.progress(len(asked.seeds), totals) as note:
        for done in run_seeds(tasks(), min(manner.jobs, len(asked.seeds))):
            totals.add(done.run, done.cpu_s)
            if manner.as_json:
                early[done.run.seed] = done.run
                while next_seed in early:  # in the order of seeds, whichever ends first
                    shown.line(early.pop(next_seed))
                    next_seed = next(seeds, -1)
            if done.run.violations:
                failing.append(done.run)
            note()
    shown.totals(asked.scenario, totals)
    _report_failing(shown, asked, manner, sorted(failing, key=lambda run: run.seed))
    return VIOLATED if failing else PASSED


def _report_failing(shown: Shown, asked: SimulationRequest, manner: RunOptions, failing: list[RunResult]) -> None:
    """Whoever interrupts the shrinking is told of the others all the same."""
    checks: dict[str, None] = {}
    interrupted = False
    for run in failing:
        fresh = run.violations[0].check not in checks and len(checks) < SHRUNK_MAX and not interrupted
        checks.setdefault(run.violations[0].check)
        shown.broken(run)
        interrupted |= _shrink_and_save(shown, asked, manner if fresh else manner._replace(shrinks=False), run)
    if interrupted:
        raise KeyboardInterrupt


def _print_story(simulation: Simulation, key: str) -> bool:
    """Was there such an object? It may be known in several scopes; each tells its own."""
    histories = simulation.judge.histories
    known = [scope for scope, history in histories.items() if key in history.versions]
    for scope in known:
        click.echo(_escape_lines(simulation.judge.story(scope, key)))
    if not known:
        keys = sorted({key for history in histories.values() for key in history.versions})
        click.echo(f"--story: nothing named {escaped(key)} ever was in this run; {_suggest_keys(key, keys)}", err=True)
    return bool(known)


def _suggest_keys(key: str, keys: list[str]) -> str:
    from difflib import get_close_matches

    if not keys:
        return "there was nothing at all"
    near = get_close_matches(key, keys, n=SUGGESTIONS_MAX, cutoff=0.0)
    return f"the nearest of {len(keys):,} names there were: {', '.join(map(escaped, near))}"


def _escape_lines(text: str) -> str:
    return "\n".join(escaped(line) for line in text.split("\n"))


def _shrink_and_save(shown: Shown, asked: SimulationRequest, manner: RunOptions, run: RunResult) -> bool:
    """Was it interrupted? What was found by then is saved and told before this returns."""
    from remit.cli.session.source_revision import revision
    from remit.simulate.seed_runner import RUN_LOST_CHECK
    from remit.simulate.shrink import NotReproduced, shrink

    again = f"remit simulate {asked.words} --seed {run.seed}"
    if asked.plan is not None:
        return False
    if not manner.shrinks or run.violations[0].check == RUN_LOST_CHECK:
        shown.again(again)
        return False
    kept = _ReplaySaver(manner.save)
    try:
        with shown.waiting("looking for the least that breaks it") as tell:
            shrunk = shrink(run, asked.until_s, revision=revision(), on_progress=tell, on_smaller=kept)
    except NotReproduced as error:
        shown.unsteady(str(error))
        shown.again(again)
        return False
    shown.shrunk(run, shrunk)
    if kept.path is None:
        shown.unsaved(str(kept.error))
        shown.again(again)
    else:
        shown.again(f"remit simulate --replay {shlex.quote(str(kept.path))}")
    return shrunk.interrupted


class _ReplaySaver:
    """The replay on disk: the best so far, from the first on. A disk that refuses takes nothing from what was found."""

    def __init__(self, directory: Path) -> None:
        self.path: Path | None = None
        self.error: OSError | None = None
        self._directory = directory

    def __call__(self, replay: Replay) -> None:
        from remit.simulate.shrink import save

        try:
            self.path = save(replay, self._directory)
        except OSError as error:
            self.error = error
