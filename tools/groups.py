"""Runs the groups of checks behind `make test` and `make verify` and prints what each cost.

    tools/groups.py              the groups of `make test`
    tools/groups.py --verify     the groups of `make verify`: all tests with real processes, sockets and disks
    tools/groups.py static unit  only these groups

Every group runs even if one before it failed. The last line is the sum: `N passed, N failed`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
MINUTES_AIM = {"test": 12, "verify": 45}
MINUTES_MAX = {"test": 24, "verify": 50}
"""Past this time everything is stopped. Machines differ by a factor of two, so a run past the aim only prints a warning."""
PYTEST_NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Step:
    """One command of a group. A pytest step has `folders`; folders without tests are skipped."""

    name: str
    command: tuple[str, ...]
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tally:
    """The result of one step. A step that is not pytest counts as one check."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    note: str = ""


@dataclass
class Row:
    """One line of the table at the end."""

    name: str
    tally: Tally
    seconds: float


def tool(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(BIN / name), *arguments)


def tests(name: str, *folders: str, workers: int = 2, marked: str = "") -> Step:
    # worksteal: property tests differ in length far more than a fixed split could even out.
    spread = ("-n", str(workers), "--dist", "worksteal") if workers else ()
    chosen = ("-m", marked) if marked else ()
    return Step(name, tool("python", "-m", "pytest", "--color=auto", *spread, *chosen), folders)


GROUPS: dict[str, tuple[Step, ...]] = {
    "static": (
        Step("lint", tool("ruff", "check", "--quiet", "--output-format=concise", ".")),
        Step("format", tool("ruff", "format", "--check", "--quiet", ".")),
        Step("types", tool("mypy", "--no-error-summary")),
        Step("layers", tool("lint-imports", "--no-logo")),
        Step("docs", tool("python", "-m", "remit.docgen.generate", "--check")),
        tests("tidy", "tests/tidy", workers=0),
    ),
    "unit": (tests("unit", "tests/unit", "tests/properties"),),
    "contracts": (tests("contracts", "tests/contracts"),),
    # One worker more than there are processors: these tests mostly wait for leases to expire and processes to start.
    "smoke": (tests("smoke", "tests/integration", workers=3, marked="smoke"),),
    "integration": (tests("integration", "tests/integration", workers=3),),
    # The standing runs are simulated once, on two processes of their own, for both of these folders.
    "simulation": (tests("standing", "tests/scenarios", "tests/determinism", workers=0), tests("planted", "tests/planted")),
}
VERBS = {"test": ("static", "unit", "contracts", "smoke", "simulation"), "verify": ("integration",)}
"""The groups of each verb: `make test` runs one real test for each capability (`smoke`), `make verify` all of them."""


@dataclass
class Run:
    """One pass over the groups, with the time at which everything is stopped."""

    verb: str
    deadline: float
    rows: list[Row] = field(default_factory=list)

    def step(self, step: Step) -> Tally:
        folders = [folder for folder in step.folders if any((ROOT / folder).rglob("test_*.py"))]
        if step.folders and not folders:
            return Tally(note="empty")
        if not step.folders:
            code = self.execute(step.command)
            return Tally(passed=1) if code == 0 else Tally(failed=1, note=outcome(code, self.verb))
        with tempfile.TemporaryDirectory(prefix="remit-groups-") as scratch:
            report = Path(scratch) / "report.xml"
            code = self.execute((*step.command, f"--junit-xml={report}", *folders))
            return read_report(report, code, self.verb)

    def execute(self, command: tuple[str, ...]) -> int | None:
        """Return the exit code, or None if the time was over. A hung command is killed with its whole session."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            return None
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            return process.wait(timeout=left)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def group(self, name: str) -> None:
        for step in GROUPS[name]:
            label = step.name if step.name == name else f"{name}: {step.name}"
            print(f"\n=== {label}", flush=True)
            began = time.monotonic()
            tally = self.step(step)
            self.rows.append(Row(label, tally, time.monotonic() - began))


def environment() -> dict[str, str]:
    """The environment without PYTHONDONTWRITEBYTECODE.

    Tests start hundreds of Remit processes; without bytecode each of them would spend half a second compiling its imports.
    """
    return {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def outcome(code: int | None, verb: str) -> str:
    if code is None:
        return f"stopped: {MINUTES_MAX[verb]} minutes are over"
    return f"exit {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def read_report(report: Path, code: int | None, verb: str) -> Tally:
    """Counts from pytest's own report. A crash or hang that pytest could not report counts as one failure more."""
    if code == PYTEST_NOTHING_COLLECTED:
        return Tally(note="empty")
    if not report.exists():
        return Tally(failed=1, note=outcome(code, verb))
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    total = failed = skipped = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    passed = max(0, total - failed - skipped)
    if code != 0 and failed == 0:
        return Tally(passed, 1, skipped, outcome(code, verb))
    return Tally(passed, failed, skipped, "" if code == 0 else outcome(code, verb))


def show(rows: list[Row], seconds: float, minutes: int) -> None:
    width = max(len(row.name) for row in rows)
    print(f"\n{'group':<{width}}  passed  failed  skipped    time")
    for row in rows:
        tally = row.tally
        line = f"{row.name:<{width}}  {tally.passed:6}  {tally.failed:6}  {tally.skipped:7}  {row.seconds:5.1f}s  {tally.note}"
        print(line.rstrip())
    print(f"{'total':<{width}}  {'':6}  {'':6}  {'':7}  {seconds:5.1f}s  of {minutes * 60}s")
    if seconds > minutes * 60:
        print(f"longer than the {minutes} minutes aimed at: the machine is busy, or a group has grown")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the groups of checks, one after another.")
    parser.add_argument("--verify", action="store_true", help="run the groups of `make verify`")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"only these: {', '.join(GROUPS)}")
    options = parser.parse_args()
    verb = "verify" if options.verify else "test"
    names = options.groups or list(VERBS[verb])
    for name in names:
        if name not in GROUPS:
            parser.error(f"there is no group {name!r}; the groups are {', '.join(GROUPS)}")
    # A process started in the background ignores SIGINT and its children inherit that, so tests that interrupt one would hang.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    run = Run(verb, deadline=began + MINUTES_MAX[verb] * 60)
    for name in names:
        run.group(name)
    show(run.rows, time.monotonic() - began, MINUTES_AIM[verb])
    passed = sum(row.tally.passed for row in run.rows)
    failed = sum(row.tally.failed for row in run.rows)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
