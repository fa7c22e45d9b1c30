"""Command `simulate`: runs scenarios under injected faults, and shrinks and saves failing runs.

The printed report is in cli/output/simulation_report.py.
"""

from __future__ import annotations

import re
import shlex
import signal  # noqa: TID251 - SIGTERM must stop worker processes too
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from remit.cli.main import examples
from remit.model.problems import escaped

if TYPE_CHECKING:
    from remit.cli.output.simulation_report import SimulationReport
    from remit.simulate.scenarios import Injection, Replay, Scenario
    from remit.simulate.simulation import RunResult, Simulation

PASSED, VIOLATED, MISUSE = 0, 1, 2
"""Exit codes. MISUSE is also that of click; `--story` with an unknown key is detected only after the run."""

SEED_MAX: Final = 2**63 - 1
SHRUNK_MAX: Final = 5
"""Maximum number of failing seeds that are shrunk per command, one for each violated check."""

SUGGESTIONS_MAX: Final = 3
"""Maximum number of suggestions for an unknown key."""


class SimulationRequest(NamedTuple):
    """A validated request of the command line."""

    scenario: Scenario
    seeds: range
    until_s: float | None
    plan: tuple[Injection, ...] | None = None
    expected: str = ""
    """The check that a replay violated when it was saved."""
    revision: str = ""
    """The source revision at which a replay was saved."""
    args: str = ""
    """Command-line arguments that select the scenario."""


class RunOptions(NamedTuple):
    """How the runs are executed and reported."""

    jobs: int
    as_json: bool
    trace: bool
    story: str
    shrinks: bool
    save: Path


@click.command(
    epilog=examples(
        "remit simulate --list                        list the scenarios",
        "remit simulate swarm                         run one seed and show which properties held",
        "remit simulate swarm --seeds 1-200 --jobs 2  run 200 seeds in two processes",
        "remit simulate swarm --seed 7 --until 2h     extend the faults to a total of two hours",
        "remit simulate mine.toml --json              a scenario file; one line of JSON per seed",
        "remit simulate swarm --seed 7 --story replica/acme/web-0",
        "remit simulate --replay remit-replay-swarm-7.json",
    )
)
@click.argument("scenario", required=False)
@click.option("--list", "list_scenarios", is_flag=True, help="Print the scenarios that come with Remit.")
@click.option("--replay", type=click.Path(path_type=Path), help="Replay a saved run.")
@click.option("--seed", type=click.IntRange(0, SEED_MAX), default=None, help="Seed of the run.  [default: 1]")
@click.option("--seeds", metavar="A-B", default=None, help="Run all seeds from A to B.")
@click.option("--jobs", type=click.IntRange(1, 256), default=2, show_default=True, help="Processes for many seeds.")
@click.option("--until", metavar="TIME", default=None, help="Virtual time to run for, such as 90s or 2h.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per seed.")
@click.option("--trace", is_flag=True, help="Print every event.")
@click.option("--story", metavar="KEY", default="", help="Print the history of one object, such as replica/acme/web-0.")
@click.option("--no-shrink", is_flag=True, help="Do not shrink failing runs.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    default=None,  # the current directory is checked only when a replay is saved
    help="Directory for replays.  [default: current directory]",
)
def simulate(
    scenario: str | None,
    list_scenarios: bool,
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
    """Run Remit's own code in a simulated world with injected faults, and check all invariants.

    SCENARIO is the name of a built-in scenario or a .toml file. A seed determines a run completely: it is the same on every
    machine. A run that violates an invariant is shrunk and saved as a replay file.

    Exit codes: 0 if all checks held, 1 if one was violated, 2 on a usage error.
    """
    if sum((scenario is not None, list_scenarios, replay is not None)) != 1:
        raise click.UsageError(
            "give exactly one of SCENARIO, --list and --replay FILE; `remit simulate --list` lists the scenarios"
        )
    from remit.cli.output.console import until_broken_pipe
    from remit.cli.output.simulation_report import SimulationReport  # imported late: it loads the whole simulator

    report = SimulationReport(as_json)
    if list_scenarios:
        with until_broken_pipe():
            report.scenarios()
        return
    request = (
        _read_replay(replay, seed, seeds, until) if replay is not None else _parse_request(str(scenario), seed, seeds, until)
    )
    if (trace or story) and (as_json or len(request.seeds) > 1):
        raise click.UsageError("--trace and --story need a single --seed, and cannot be combined with --json")
    options = RunOptions(jobs, as_json, trace, story, not no_shrink and replay is None, save or Path())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with until_broken_pipe():
        code = _run_many(report, request, options) if len(request.seeds) > 1 else _run_one(report, request, options)
    sys.exit(code)


# ---------------------------------------------------------------------------------------------------------- what was asked


def _parse_request(name: str, seed: int | None, seeds: str | None, until: str | None) -> SimulationRequest:
    from remit.simulate.scenarios import BadScenario, load

    if seed is not None and seeds is not None:
        raise click.UsageError("--seed and --seeds cannot be combined; leave one of them out")
    try:
        scenario = load(name)
    except BadScenario as error:
        raise click.UsageError(escaped(str(error))) from None
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{escaped(name)}: {escaped(str(error))}") from None
    args = shlex.join([name, *(("--until", until) if until else ())])
    return SimulationRequest(*_apply_until(scenario, until, _parse_seeds(seed, seeds)), args=args)


def _parse_seeds(seed: int | None, seeds: str | None) -> range:
    if seeds is None:
        return range(1, 2) if seed is None else range(seed, seed + 1)
    match = re.fullmatch(r"([0-9]{1,19})-([0-9]{1,19})", seeds)
    if match is None:
        raise click.UsageError(f"--seeds: {escaped(seeds)} is not a range; write the first and the last seed, such as 1-200")
    first, last = int(match[1]), int(match[2])
    if not first <= last <= SEED_MAX:
        raise click.UsageError(f"--seeds: {escaped(seeds)} is not an ascending range; write the smaller seed first")
    return range(first, last + 1)


def _apply_until(scenario: Scenario, until: str | None, seeds: range) -> tuple[Scenario, range, float | None]:
    """Apply --until: a longer time extends the phase with faults, a shorter one ends the run early, possibly undecided."""
    from msgspec.structs import replace

    from remit.model.resources import format_duration, parse_duration

    if until is None:
        return scenario, seeds, None
    try:
        until_ms = parse_duration(until)
    except ValueError as error:
        raise click.UsageError(f"--until: {escaped(until)}: {error}") from None
    if until_ms <= 0:
        raise click.UsageError("--until: the time must be more than 0s")
    heal_ms = round(scenario.heal_s * 1000)
    if until_ms > round(scenario.duration_s * 1000) + heal_ms:
        return replace(scenario, duration=format_duration(until_ms - heal_ms)), seeds, None
    return scenario, seeds, until_ms / 1000


def _read_replay(path: Path, seed: int | None, seeds: str | None, until: str | None) -> SimulationRequest:
    from remit.simulate.scenarios import BadScenario
    from remit.simulate.shrink import read_replay

    if seed is not None or seeds is not None or until is not None:
        raise click.UsageError("--replay takes seed and time from its file; leave out --seed, --seeds and --until")
    try:
        replay = read_replay(path)
    except BadScenario as error:
        raise click.UsageError(f"--replay: {escaped(str(error))}") from None
    except OSError as error:
        reason = escaped(error.strerror or str(error))
        raise click.UsageError(f"--replay: {escaped(str(path))}: {reason}; give a file that a failed run saved") from None
    return SimulationRequest(
        replay.scenario, range(replay.seed, replay.seed + 1), replay.until_s, replay.plan, replay.violation, replay.revision
    )


# ----------------------------------------------------------------------------------------------------------------- running


def _run_one(report: SimulationReport, request: SimulationRequest, options: RunOptions) -> int:
    from remit.cli.interrupts import persistent_interrupts
    from remit.cli.session.source_revision import CHANGED, revision

    with persistent_interrupts():
        from remit.simulate.simulation import Simulation

    if request.revision and (request.revision != (this := revision()) or request.revision.endswith(CHANGED)):
        report.other_revision(request.revision, this, changed=request.revision.endswith(CHANGED))
    simulation = Simulation(request.scenario, request.seeds[0], plan=request.plan, until_s=request.until_s, trace=options.trace)
    with report.spinner(f"{request.scenario.name}, seed {request.seeds[0]}"), persistent_interrupts():
        run = simulation.run()
    if options.as_json:
        report.json_line(run)
    else:
        for line in run.trace:
            click.echo(escaped(line))
        report.run(run)
    found_object = not options.story or _print_story(simulation, options.story)
    if request.expected:
        report.expected(request.expected, run)
    if run.violations:
        report.broken(run)
        if _shrink_and_save(report, request, options, run):
            raise KeyboardInterrupt
        return VIOLATED
    return PASSED if found_object else MISUSE


def _run_many(report: SimulationReport, request: SimulationRequest, options: RunOptions) -> int:
    from remit.simulate.seed_runner import RunTotals, SeedTask, run_seeds

    def tasks() -> Iterator[SeedTask]:
        return (SeedTask(request.scenario, seed, request.until_s) for seed in request.seeds)

    totals = RunTotals()
    failing: list[RunResult] = []
    finished: dict[int, RunResult] = {}
    seeds = iter(request.seeds)
    next_seed = next(seeds)
    with report.progress(len(request.seeds), totals) as update:
        for done in run_seeds(tasks(), min(options.jobs, len(request.seeds))):
            totals.add(done.run, done.cpu_s)
            if options.as_json:
                finished[done.run.seed] = done.run
                while next_seed in finished:  # printed in the order of seeds
                    report.json_line(finished.pop(next_seed))
                    next_seed = next(seeds, -1)
            if done.run.violations:
                failing.append(done.run)
            update()
    report.totals(request.scenario, totals)
    _report_failing(report, request, options, sorted(failing, key=lambda run: run.seed))
    return VIOLATED if failing else PASSED


def _report_failing(
    report: SimulationReport, request: SimulationRequest, options: RunOptions, failing: list[RunResult]
) -> None:
    """Report and shrink failing runs. After an interrupt the remaining runs are still reported, but not shrunk."""
    checks: dict[str, None] = {}
    interrupted = False
    for run in failing:
        is_new_check = run.violations[0].check not in checks and len(checks) < SHRUNK_MAX and not interrupted
        checks.setdefault(run.violations[0].check)
        report.broken(run)
        interrupted |= _shrink_and_save(report, request, options if is_new_check else options._replace(shrinks=False), run)
    if interrupted:
        raise KeyboardInterrupt


def _print_story(simulation: Simulation, key: str) -> bool:
    """Print the history of an object in every scope that knew it. Returns False if none did."""
    histories = simulation.judge.histories
    scopes = [scope for scope, history in histories.items() if key in history.versions]
    for scope in scopes:
        click.echo(_escape_lines(simulation.judge.story(scope, key)))
    if not scopes:
        keys = sorted({key for history in histories.values() for key in history.versions})
        click.echo(f"--story: no object {escaped(key)} existed in this run; {_suggest_keys(key, keys)}", err=True)
    return bool(scopes)


def _suggest_keys(key: str, keys: list[str]) -> str:
    from difflib import get_close_matches

    if not keys:
        return "the run created no objects"
    similar = get_close_matches(key, keys, n=SUGGESTIONS_MAX, cutoff=0.0)
    return f"similar ones among {len(keys):,}: {', '.join(map(escaped, similar))}"


def _escape_lines(text: str) -> str:
    return "\n".join(escaped(line) for line in text.split("\n"))


def _shrink_and_save(report: SimulationReport, request: SimulationRequest, options: RunOptions, run: RunResult) -> bool:
    """Shrink a failing run and save its replay, also after an interrupt. Returns whether it was interrupted."""
    from remit.cli.session.source_revision import revision
    from remit.simulate.seed_runner import RUN_LOST_CHECK
    from remit.simulate.shrink import NotReproduced, shrink

    command = f"remit simulate {request.args} --seed {run.seed}"
    if request.plan is not None:
        return False
    if not options.shrinks or run.violations[0].check == RUN_LOST_CHECK:
        report.replay_command(command)
        return False
    saver = _ReplaySaver(options.save)
    try:
        with report.spinner("shrinking the failing run") as on_progress:
            shrunk = shrink(run, request.until_s, revision=revision(), on_progress=on_progress, on_smaller=saver)
    except NotReproduced as error:
        report.not_reproducible(str(error))
        report.replay_command(command)
        return False
    report.shrunk(run, shrunk)
    if saver.path is None:
        report.not_saved(str(saver.error))
        report.replay_command(command)
    else:
        report.replay_command(f"remit simulate --replay {shlex.quote(str(saver.path))}")
    return shrunk.interrupted


class _ReplaySaver:
    """Saves the smallest replay found so far. A write error is recorded, and shrinking continues."""

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
