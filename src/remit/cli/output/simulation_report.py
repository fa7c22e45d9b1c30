"""Prints simulation results.

Words, tables and lines of JSON; nothing is run here.
"""

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
from remit.simulate.checkers import judge  # noqa: F401 - with it every check is in its register
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


def checks(letter: str) -> dict[str, list[str]]:
    """Every check of safety (S) or liveness (L), by the property that it guards."""
    every = sorted(checks_by_property().items(), key=lambda one: int(one[0][1:]))
    return {guarded: names for guarded, names in every if guarded.startswith(letter)}


def for_programs(run: RunResult) -> str:
    """One line; its shape is promised to those who read it."""
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
    """JSON leaves some letters as they are that steer a terminal; within text it has another way to write them."""
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", msgspec.json.encode(row).decode())


class Shown:
    """Results go to stdout. With --json that has nothing but JSON on it, and what is for people goes to stderr."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._errors = console(stderr=True)
        self._told = self._errors if as_json else console()
        self._clock = BootClock()

    # -- what is told ----------------------------------------------------------------------------------------------------

    def scenarios(self) -> None:
        table = Table(box=None, pad_edge=False)
        for heading in ("scenario", "faults covered", "what is tried"):
            table.add_column(heading, no_wrap=heading == "scenario")
        for name in names():
            scenario = load(name)
            if self.as_json:
                row = {"name": scenario.name, "summary": scenario.summary, "covers": list(scenario.covers)}
                click.echo(_json(row))
            table.add_row(Text(name, "bold"), " ".join(f"F{row:02}" for row in scenario.covers), _text(scenario.summary))
        if not self.as_json:
            self._told.print(table)

    def line(self, run: RunResult) -> None:
        click.echo(for_programs(run))

    def run(self, run: RunResult) -> None:
        scenario = run.effective_scenario
        self._told.print(Text.assemble(_text(scenario.name, "bold"), _text(f", seed {run.seed}: {scenario.summary}")))
        self._facts({"cluster": _cluster(scenario), "load": _load(scenario)})
        self._facts({"ran": f"{_time(run.simulated_s)} of virtual time: {_amounts(run)}", "digest": run.digest})
        self._faults(run.faults)
        if not run.violations:
            self._held(scenario, run)
        self._unknown(run)

    def totals(self, scenario: Scenario, totals: RunTotals) -> None:
        seconds = max((self._clock.now_ms() - self._began_ms) / 1000, 0.001)
        self._told.print(Text.assemble(_text(scenario.name, "bold"), _text(f", {totals.seeds:,} seeds: {scenario.summary}")))
        self._facts(
            {
                "cluster": _cluster(scenario),
                "load": _load(scenario),
                "drawn": "cluster and load around these, and the kinds of fault, for each seed" if scenario.swarm else "",
                "ran": f"{totals.hours:,.1f} simulated hours, of which {totals.counted_hours:,.1f} had enough in them to"
                f" count: {_amounts(totals)}",
                "rate": f"{totals.hours * 60 / seconds:,.1f} simulated hours a minute, {totals.events / seconds:,.0f} events/s",
                "violations": f"{totals.violations:,} in {totals.failing:,} seeds,"
                f" {totals.per_million_commits:,.2f} in a million commits",
                "unknown": f"{totals.unknown:,}",
            }
        )
        self._faults(totals.faults)

    def broken(self, run: RunResult) -> None:
        for violation in run.violations[:VIOLATIONS_SHOWN_MAX]:
            self._violation(run.seed, violation)
        if len(run.violations) > VIOLATIONS_SHOWN_MAX:
            self._told.print(f"  and {len(run.violations) - VIOLATIONS_SHOWN_MAX} more at the same moment")
        self._story(run.story)

    def _violation(self, seed: int, violation: Violation) -> None:
        place = f" in {violation.scope}" if violation.scope else ""
        head = f" {violation.property} {violation.check}, seed {seed}, at {_time(violation.at_ms / 1000)}"
        self._told.print(Text.assemble(("BROKEN", "bold red"), _text(head)))
        self._facts({"object": f"{violation.key}{place}" if violation.key else "", "why": violation.why})

    def _story(self, story: str) -> None:
        lines = [line for line in story.split("\n") if line]
        heading, rest = lines[:1], lines[1:]
        for line in heading if rest else ():
            self._told.print(_text(f"  {line}", "bold"))
        if len(rest) > STORY_LINES_MAX:
            self._told.print(Text(f"    ... {len(rest) - STORY_LINES_MAX} lines before these; --story tells all"))
        for line in rest[-STORY_LINES_MAX:]:
            self._told.print(_text(f"  {line}"))

    def shrunk(self, first: RunResult, shrunk: ShrinkResult) -> None:
        replay = shrunk.replay
        cut = "" if shrunk.complete else " (the search was cut short)"
        self._facts(
            {
                "shrunk": f"from {len(first.plan)} faults to {len(replay.plan)}, from {_time(first.simulated_s)} to"
                f" {_time(shrunk.run.simulated_s)}, in {shrunk.runs} runs{cut}",
            }
        )
        for one in replay.plan[:PLAN_SHOWN_MAX]:
            self._told.print(_text(f"    {_injection(one)}"))
        if len(replay.plan) > PLAN_SHOWN_MAX:
            self._told.print(Text(f"    and {len(replay.plan) - PLAN_SHOWN_MAX} more"))
        if shrunk.run.story != first.story:
            self._story(shrunk.run.story)

    def expected(self, check: str, run: RunResult) -> None:
        seen = {violation.check for violation in run.violations}
        said = "it breaks as it did when it was saved" if check in seen else f"when it was saved {check} was broken: not so now"
        self._facts({"replay": said})

    def other_revision(self, saved: str, this: str, *, changed: bool) -> None:
        why = "by code that is in no commit, and may have been another: " if changed else ""
        self._errors.print(_text(f"saved at revision {saved}, this is {this}: {why}it may go otherwise"), soft_wrap=True)

    def unsaved(self, why: str) -> None:
        self._facts({"unsaved": f"{why}: the replay could not be saved; --save DIR names a directory that can be written"})

    def again(self, command: str) -> None:
        self._told.print(Text.assemble(("  replay  ", "bold"), _text(command)), soft_wrap=True)

    def unsteady(self, why: str) -> None:
        self._facts({"unsteady": f"{why}: something in this run does not follow from its seed, which is a bug of its own"})

    # -- parts -----------------------------------------------------------------------------------------------------------

    def _facts(self, facts: Mapping[str, str]) -> None:
        """Each a table of its own: in one table all would be filled up with blanks to the longest."""
        width = max([NAME_WIDTH, *(len(name) + 2 for name in facts)])
        for name, value in facts.items():
            if value:
                table = Table.grid(padding=(0, 2))
                table.add_column(no_wrap=True, min_width=width)
                table.add_column()
                table.add_row(Text(f"  {name}", "bold"), _text(value))
                self._told.print(table)

    def _faults(self, faults: Mapping[str, int]) -> None:
        if not faults:
            self._facts({"injected": "nothing"})
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
        table.add_row("", f"{sum(faults.values()):,}", "in all")
        self._told.print(table)

    def _held(self, scenario: Scenario, run: RunResult) -> None:
        guarded = checks("S")
        safety = f"{', '.join(guarded)}, by {sum(map(len, guarded.values()))} checks at every commit, answer, start and end"
        healed_s = run.simulated_s - scenario.duration_s
        if not scenario.holds.liveness:
            liveness = "not judged: the scenario does not ask for it"
        elif healed_s <= 0:
            liveness = "not judged: the run ended before its faults did"
        else:
            liveness = f"{', '.join(checks('L'))}, for {_time(healed_s)} after the faults had ended"
        self._told.print(Text.assemble("  ", ("held", "bold green")))
        self._facts({"  safety": safety, "  liveness": liveness})

    def _unknown(self, run: RunResult) -> None:
        for why in run.unknown[:UNKNOWN_SHOWN_MAX]:
            self._facts({"unknown": why})
        if len(run.unknown) > UNKNOWN_SHOWN_MAX:
            self._facts({"": f"and {len(run.unknown) - UNKNOWN_SHOWN_MAX} more that could not be decided"})

    # -- while it runs ---------------------------------------------------------------------------------------------------

    @contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[str], None]]:
        """A sign of life: on a terminal one line that changes, elsewhere a line now and then."""
        if self._errors.is_terminal:
            with self._errors.status(_text(what)) as status:
                yield lambda more: status.update(_text(f"{what}: {more}"))
            return
        yield self._now_and_then(lambda more: f"{what}: {more}")

    @contextmanager
    def progress(self, seeds: int, totals: RunTotals) -> Iterator[Callable[[], None]]:
        """Call what it yields when `totals` has changed. On a terminal one line that changes, elsewhere a line now and then."""
        self._began_ms = self._clock.now_ms()
        if self._errors.is_terminal:
            with self._errors.status(Text("starting")) as status:
                yield lambda: status.update(Text(self._so_far(seeds, totals)))
            return
        note = self._now_and_then(lambda _: self._so_far(seeds, totals))
        yield lambda: note("")

    def _now_and_then(self, line: Callable[[str], str]) -> Callable[[str], None]:
        told_ms = self._clock.now_ms()

        def note(more: str) -> None:
            nonlocal told_ms
            if self._clock.now_ms() - told_ms >= NOTE_EVERY_S * 1000:
                told_ms = self._clock.now_ms()
                sys.stderr.write(escaped(line(more)) + "\n")
                sys.stderr.flush()

        return note

    def _so_far(self, seeds: int, totals: RunTotals) -> str:
        seconds = max((self._clock.now_ms() - self._began_ms) / 1000, 0.001)
        most = sorted(totals.faults.items(), key=lambda one: (-one[1], one[0]))[:5]
        kinds = ", ".join(f"{name} {count:,}" for name, count in most)
        return (
            f"{totals.seeds:,} of {seeds:,} seeds, {totals.hours:,.1f} simulated hours ({totals.hours * 60 / seconds:,.1f} a"
            f" minute), {totals.faults_all:,} faults ({kinds}), {totals.failing:,} broken"
        )


def _text(text: str, style: str = "") -> Text:
    """For whatever may be from a file: it cannot steer the terminal."""
    return Text(escaped(text), style)


def _amounts(one: RunResult | RunTotals) -> str:
    return f"{one.events:,} events, {one.commits:,} commits, {one.decided:,} of them with decisions"


def _cluster(scenario: Scenario) -> str:
    cluster = scenario.cluster
    scopes = f"scopes {', '.join(cluster.scopes)}; in each " if len(cluster.scopes) > 1 else ""
    batches = f", batches of {cluster.batch}" if cluster.batch < BATCH_LIMITS.operations else ""
    return (
        f"{scopes}{cluster.servers} servers, {cluster.schedulers} schedulers, {cluster.controllers} controllers,"
        f" {cluster.nodes} nodes with {min(cluster.agents, cluster.nodes)} agents, a beat every {cluster.beat}{batches}"
    )


def _load(scenario: Scenario) -> str:
    load: Any = scenario.load
    operators = "; operators drain, resize and publish meanwhile" if load.operations else ""
    return f"{load.per_minute:g} workloads a minute, {load.standing_max} at once ({', '.join(load.kinds)}){operators}"


def _injection(one: Injection) -> str:
    lasts = f" for {_time(one.lasts_s)}" if one.lasts_s else ""
    where = f" in {one.where}" if one.where else ""
    return f"{_time(one.at_s):>12}  {one.kind}{where}{lasts}"


def _time(seconds: float) -> str:
    return format_duration(max(0, round(seconds * 1000)))
