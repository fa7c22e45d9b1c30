"""Do all the groups of checks pass, and what did each cost? Every group runs even if one before it failed.

`tools/groups.py` runs all groups, `tools/groups.py static unit` those named. The last line is the sum: `N passed, N failed`.
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
MINUTES_AIM = 12
MINUTES_MAX = 24
"""Past this everything is stopped. A machine may be half as quick as on another day: that is told, and is no failure."""
PYTEST_NOTHING_COLLECTED = 5


@dataclass(frozen=True)
class Step:
    """One command of a group. A pytest step has `folders`: those without a test are left out, and are no failure."""

    name: str
    command: tuple[str, ...]
    folders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tally:
    """What one step came to. A step that is not pytest counts as one check."""

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


def tests(name: str, *folders: str, workers: int = 2) -> Step:
    # worksteal: property tests differ in length by far more than a fixed split could even out.
    spread = ("-n", str(workers), "--dist", "worksteal") if workers else ()
    return Step(name, tool("python", "-m", "pytest", "--color=auto", *spread), folders)


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
    # One more than there are processors: these tests wait, for terms to end and for processes to begin, more than they work.
    "integration": (tests("integration", "tests/integration", workers=3),),
    # The standing runs are made once, on two processes of their own, for both of these folders.
    "simulation": (tests("standing", "tests/scenarios", "tests/determinism", workers=0), tests("planted", "tests/planted")),
}


@dataclass
class Run:
    """One pass over the groups, with a time by which all of it must be over."""

    deadline: float
    rows: list[Row] = field(default_factory=list)

    def step(self, step: Step) -> Tally:
        folders = [folder for folder in step.folders if any((ROOT / folder).rglob("test_*.py"))]
        if step.folders and not folders:
            return Tally(note="empty")
        if not step.folders:
            code = self.execute(step.command)
            return Tally(passed=1) if code == 0 else Tally(failed=1, note=outcome(code))
        with tempfile.TemporaryDirectory(prefix="remit-groups-") as scratch:
            report = Path(scratch) / "report.xml"
            code = self.execute((*step.command, f"--junit-xml={report}", *folders))
            return read_report(report, code)

    def execute(self, command: tuple[str, ...]) -> int | None:
        """The exit code, or None if the time was over. A hung command is ended with all that it started."""
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
    """Tests start hundreds of processes of ours: without bytecode each would compile all that it imports, for half a second."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def outcome(code: int | None) -> str:
    if code is None:
        return f"stopped: {MINUTES_MAX} minutes are over"
    return f"exit {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def read_report(report: Path, code: int | None) -> Tally:
    """Counts from pytest's own report. Whatever pytest could not report (a crash, a hang) is one failure more."""
    if code == PYTEST_NOTHING_COLLECTED:
        return Tally(note="empty")
    if not report.exists():
        return Tally(failed=1, note=outcome(code))
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    total = failed = skipped = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    passed = max(0, total - failed - skipped)
    if code != 0 and failed == 0:
        return Tally(passed, 1, skipped, outcome(code))
    return Tally(passed, failed, skipped, "" if code == 0 else outcome(code))


def show(rows: list[Row], seconds: float) -> None:
    width = max(len(row.name) for row in rows)
    print(f"\n{'group':<{width}}  passed  failed  skipped    time")
    for row in rows:
        tally = row.tally
        line = f"{row.name:<{width}}  {tally.passed:6}  {tally.failed:6}  {tally.skipped:7}  {row.seconds:5.1f}s  {tally.note}"
        print(line.rstrip())
    print(f"{'total':<{width}}  {'':6}  {'':6}  {'':7}  {seconds:5.1f}s  of {MINUTES_AIM * 60}s")
    if seconds > MINUTES_AIM * 60:
        print(f"this took longer than the {MINUTES_AIM} minutes aimed at: is the machine busy, or has a group grown?")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the groups of checks, one after another.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"one of: {', '.join(GROUPS)} (all if none is named)")
    names = parser.parse_args().groups or list(GROUPS)
    for name in names:
        if name not in GROUPS:
            parser.error(f"there is no group {name!r}; the groups are {', '.join(GROUPS)}")
    # Whoever is started in the background ignores it, and so would all that tests start in order to interrupt it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    run = Run(deadline=began + MINUTES_MAX * 60)
    for name in names:
        run.group(name)
    show(run.rows, time.monotonic() - began)
    passed = sum(row.tally.passed for row in run.rows)
    failed = sum(row.tally.failed for row in run.rows)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
