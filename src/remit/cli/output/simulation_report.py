"""Prints simulation results as text, tables and lines of JSON."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import click
import msgspec
from rich.table import Table
from rich.text import Text

from remit.cli.output.console import console
from remit.commitment.operation_queue import BATCH_LIMITS
from remit.model.problems import escaped
from remit.model.resources import format_duration
from remit.simulate.checkers import judge  # noqa: F401 - registers all checks
from remit.simulate.checkers.judge import checks_by_property
from remit.simulate.checkers.registry import Violation
from remit.simulate.faults.kinds import KINDS
from remit.simulate.scenario_types import Injection, Scenario
from remit.simulate.scenarios import load, names
from remit.simulate.seed_runner import RunTotals
from remit.simulate.shrink import ShrinkResult
from remit.simulate.simulation import RunResult
from remit.world.clock import BootClock

STORY_LINES_MAX: Final = 40
VIOLATIONS_SHOWN_MAX: Final = 3
UNKNOWN_SHOWN_MAX: Final = 10
PLAN_SHOWN_MAX: Final = 12
NAME_WIDTH: Final = 10
NOTE_EVERY_S: Final = 10.0


def checks_of(prefix: str) -> dict[str, list[str]]:
    """Return the names of all safety (S) or liveness (L) checks by property."""
    every = sorted(checks_by_property().items(), key=lambda result: int(result[0][1:]))
    return {guarded: names for guarded, names in every if guarded.startswith(prefix)}


def to_json(run: RunResult) -> str:
    """Format a run as one line of JSON. The fields are a stable interface."""
    return _json(
        {
            "scenario": run.scenario,
            "seed": run.seed,
            "digest": run.digest,
            "simulated_s": run.simulated_s,
            "events": run.events,
            "commits": run.commits,
            "faults": run.faults,
            "violations": [violation._asdict() for violation in run.violations],
            "unknown": list(run.unknown),
        }
    )


def _json(row: Mapping[str, Any]) -> str:
    """Encode as JSON, with C1 control characters escaped, which JSON allows unescaped but terminals interpret."""
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", msgspec.json.encode(row).decode())


class SimulationReport:
    """Prints results to stdout. With --json, stdout contains only JSON and the text goes to stderr."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._errors = console(stderr=True)
        self._console = self._errors if as_json else console()
        self._clock = BootClock()

    # -- results ---------------------------------------------------------------------------------------------------------------

    def scenarios(self) -> None:
        table = Table(box=None, pad_edge=False)
        for heading in ("scenario", "faults covered", "summary"):
            table.add_column(heading, no_wrap=heading == "scenario")
        for name in names():
            scenario = load(name)
            if self.as_json:
                row = {"name": scenario.name, "summary": scenario.summary, "covers": list(scenario.covers)}
                click.echo(_json(row))
            table.add_row(Text(name, "bold"), " ".join(f"F{row:02}" for row in scenario.covers), _text(scenario.summary))
        if not self.as_json:
            self._console.print(table)

    def json_line(self, run: RunResult) -> None:
        click.echo(to_json(run))

    def run(self, run: RunResult) -> None:
        scenario = run.effective_scenario
        self._console.print(Text.assemble(_text(scenario.name, "bold"), _text(f", seed {run.seed}: {scenario.summary}")))
        self._facts({"cluster": _cluster(scenario), "load": _load(scenario)})
        self._facts({"ran": f"{_time(run.simulated_s)} of virtual time: {_amounts(run)}", "digest": run.digest})
        self._faults(run.faults)
        if not run.violations:
            self._passed(scenario, run)
        self._unknown(run)

    def totals(self, scenario: Scenario, totals: RunTotals) -> None:
        seconds = max((self._clock.now_ms() - self._started_ms) / 1000, 0.001)
        self._console.print(Text.assemble(_text(scenario.name, "bold"), _text(f", {totals.seeds:,} seeds: {scenario.summary}")))
        self._facts(
            {
                "cluster": _cluster(scenario),
                "load": _load(scenario),
                "drawn": "for each seed: cluster and load near these values, and the kinds of faults" if scenario.swarm else "",
                "ran": f"{totals.hours:,.1f} simulated hours, {totals.counted_hours:,.1f} of them eventful"
                f" enough to count: {_amounts(totals)}",
                "rate": f"{totals.hours * 60 / seconds:,.1f} simulated hours a minute, {totals.events / seconds:,.0f} events/s",
                "violations": f"{totals.violations:,} in {totals.failing:,} seeds,"
                f" {totals.per_million_commits:,.2f} per million commits",
                "unknown": f"{totals.unknown:,}",
            }
        )
        self._faults(totals.faults)

    def broken(self, run: RunResult) -> None:
        for violation in run.violations[:VIOLATIONS_SHOWN_MAX]:
            self._violation(run.seed, violation)
        if len(run.violations) > VIOLATIONS_SHOWN_MAX:
            self._console.print(f"  and {len(run.violations) - VIOLATIONS_SHOWN_MAX} more at the same time")
        self._story(run.story)

    def _violation(self, seed: int, violation: Violation) -> None:
        place = f" in {violation.scope}" if violation.scope else ""
        head = f" {violation.property} {violation.check}, seed {seed}, at {_time(violation.at_ms / 1000)}"
        self._console.print(Text.assemble(("BROKEN", "bold red"), _text(head)))
        self._facts({"object": f"{violation.key}{place}" if violation.key else "", "why": violation.why})

    def _story(self, story: str) -> None:
        lines = [line for line in story.split("\n") if line]
        heading, rest = lines[:1], lines[1:]
        for line in heading if rest else ():
            self._console.print(_text(f"  {line}", "bold"))
        if len(rest) > STORY_LINES_MAX:
            self._console.print(Text(f"    ... {len(rest) - STORY_LINES_MAX} earlier lines; --story prints all"))
        for line in rest[-STORY_LINES_MAX:]:
            self._console.print(_text(f"  {line}"))

    def shrunk(self, first: RunResult, shrunk: ShrinkResult) -> None:
        replay = shrunk.replay
        cut = "" if shrunk.complete else " (interrupted)"
        self._facts(
            {
                "shrunk": f"from {len(first.plan)} faults to {len(replay.plan)}, from {_time(first.simulated_s)} to"
                f" {_time(shrunk.run.simulated_s)}, in {shrunk.runs} runs{cut}",
            }
        )
        for injection in replay.plan[:PLAN_SHOWN_MAX]:
            self._console.print(_text(f"    {_injection(injection)}"))
        if len(replay.plan) > PLAN_SHOWN_MAX:
            self._console.print(Text(f"    and {len(replay.plan) - PLAN_SHOWN_MAX} more"))
        if shrunk.run.story != first.story:
            self._story(shrunk.run.story)

    def expected(self, check: str, run: RunResult) -> None:
        violated = {violation.check for violation in run.violations}
        text = (
            f"{check} is violated, as when it was saved"
            if check in violated
            else f"{check} was violated when it was saved, but holds now"
        )
        self._facts({"replay": text})

    def other_revision(self, saved: str, this: str, *, changed: bool) -> None:
        reason = "with uncommitted changes: " if changed else ""
        self._errors.print(_text(f"saved at revision {saved}, running {this}: {reason}the run may differ"), soft_wrap=True)

    def not_saved(self, reason: str) -> None:
        self._facts({"not saved": f"{reason}: the replay could not be saved; choose a writable directory with --save DIR"})

    def replay_command(self, command: str) -> None:
        self._console.print(Text.assemble(("  replay  ", "bold"), _text(command)), soft_wrap=True)

    def not_reproducible(self, reason: str) -> None:
        self._facts({"not reproducible": f"{reason}: the run is not determined by its seed, which is a bug in the simulator"})

    # -- parts -----------------------------------------------------------------------------------------------------------------

    def _facts(self, facts: Mapping[str, str]) -> None:
        """Print label and text pairs. Each is a table of its own, because one table would pad all lines to the longest."""
        width = max([NAME_WIDTH, *(len(name) + 2 for name in facts)])
        for name, value in facts.items():
            if value:
                table = Table.grid(padding=(0, 2))
                table.add_column(no_wrap=True, min_width=width)
                table.add_column()
                table.add_row(Text(f"  {name}", "bold"), _text(value))
                self._console.print(table)

    def _faults(self, faults: Mapping[str, int]) -> None:
        if not faults:
            self._facts({"injected": "no faults"})
            return
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(justify="right")
        table.add_column()
        table.add_column()
        first = "  injected"
        for name, count in sorted(faults.items()):
            summary = KINDS[name].summary if name in KINDS else ""
            table.add_row(Text(first, "bold"), f"{count:,}", _text(name), Text(summary, "dim"))
            first = ""
        table.add_row("", f"{sum(faults.values()):,}", "total")
        self._console.print(table)

    def _passed(self, scenario: Scenario, run: RunResult) -> None:
        guarded = checks_of("S")
        safety = f"{', '.join(guarded)}, by {sum(map(len, guarded.values()))} checks at every commit, reply, start and end"
        healed_s = run.simulated_s - scenario.duration_s
        if not scenario.holds.liveness:
            liveness = "not checked: the scenario does not require it"
        elif healed_s <= 0:
            liveness = "not checked: the run ended before its faults"
        else:
            liveness = f"{', '.join(checks_of('L'))}, for {_time(healed_s)} after the last fault ended"
        self._console.print(Text.assemble("  ", ("held", "bold green")))
        self._facts({"  safety": safety, "  liveness": liveness})

    def _unknown(self, run: RunResult) -> None:
        for reason in run.unknown[:UNKNOWN_SHOWN_MAX]:
            self._facts({"unknown": reason})
        if len(run.unknown) > UNKNOWN_SHOWN_MAX:
            self._facts({"": f"and {len(run.unknown) - UNKNOWN_SHOWN_MAX} more undecided checks"})

    # -- progress --------------------------------------------------------------------------------------------------------------

    @contextmanager
    def spinner(self, label: str) -> Iterator[Callable[[str], None]]:
        """Show that a run is in progress: a status line on a terminal, elsewhere an occasional line."""
        if self._errors.is_terminal:
            with self._errors.status(_text(label)) as status:
                yield lambda detail: status.update(_text(f"{label}: {detail}"))
            return
        yield self._occasionally(lambda detail: f"{label}: {detail}")

    @contextmanager
    def progress(self, seeds: int, totals: RunTotals) -> Iterator[Callable[[], None]]:
        """Show progress; call the yielded function when `totals` has changed. A status line on a terminal, elsewhere occasional
        lines.
        """
        self._started_ms = self._clock.now_ms()
        if self._errors.is_terminal:
            with self._errors.status(Text("starting")) as status:
                yield lambda: status.update(Text(self._so_far(seeds, totals)))
            return
        update = self._occasionally(lambda _: self._so_far(seeds, totals))
        yield lambda: update("")

    def _occasionally(self, format_line: Callable[[str], str]) -> Callable[[str], None]:
        last_ms = self._clock.now_ms()

        def update(detail: str) -> None:
            nonlocal last_ms
            if self._clock.now_ms() - last_ms >= NOTE_EVERY_S * 1000:
                last_ms = self._clock.now_ms()
                sys.stderr.write(escaped(format_line(detail)) + "\n")
                sys.stderr.flush()

        return update

    def _so_far(self, seeds: int, totals: RunTotals) -> str:
        seconds = max((self._clock.now_ms() - self._started_ms) / 1000, 0.001)
        frequent = sorted(totals.faults.items(), key=lambda result: (-result[1], result[0]))[:5]
        kinds = ", ".join(f"{name} {count:,}" for name, count in frequent)
        return (
            f"{totals.seeds:,} of {seeds:,} seeds, {totals.hours:,.1f} simulated hours ({totals.hours * 60 / seconds:,.1f} a"
            f" minute), {totals.faults_all:,} faults ({kinds}), {totals.failing:,} failing seeds"
        )


def _text(text: str, style: str = "") -> Text:
    """Return text that may come from a file, with control characters escaped."""
    return Text(escaped(text), style)


def _amounts(result: RunResult | RunTotals) -> str:
    return f"{result.events:,} events, {result.commits:,} commits, {result.decided:,} with decisions"


def _cluster(scenario: Scenario) -> str:
    cluster = scenario.cluster
    scopes = f"scopes {', '.join(cluster.scopes)}; in each " if len(cluster.scopes) > 1 else ""
    batches = f", batches of {cluster.batch}" if cluster.batch < BATCH_LIMITS.operations else ""
    return (
        f"{scopes}{cluster.servers} servers, {cluster.schedulers} schedulers, {cluster.controllers} controllers,"
        f" {cluster.nodes} nodes with {min(cluster.agents, cluster.nodes)} agents, heartbeat every {cluster.beat}{batches}"
    )


def _load(scenario: Scenario) -> str:
    load: Any = scenario.load
    operators = "; operators drain, resize and publish at the same time" if load.operations else ""
    return f"{load.per_minute:g} workloads a minute, {load.standing_max} at once ({', '.join(load.kinds)}){operators}"


def _injection(result: Injection) -> str:
    lasts = f" for {_time(result.lasts_s)}" if result.lasts_s else ""
    where = f" in {result.where}" if result.where else ""
    return f"{_time(result.at_s):>12}  {result.kind}{where}{lasts}"


def _time(seconds: float) -> str:
    return format_duration(max(0, round(seconds * 1000)))
