"""Tests of `remit simulate`: report, JSON, replays, usage errors and interrupts."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from remit.cli.main import remit
from remit.cli.output.simulation_report import checks_of
from remit.cli.session.source_revision import revision
from remit.model.problems import escaped
from remit.simulate.checkers import liveness_checks
from remit.simulate.checkers.judge import EVENT_CHECKS
from remit.simulate.checkers.reference.history import CommitStep
from remit.simulate.checkers.reference.rows import phase_of
from remit.simulate.checkers.registry import CHECKS, Check, Findings
from remit.simulate.scenarios import Replay, Scenario, names
from remit.simulate.seed_runner import SeedResult, SeedTask
from remit.simulate.shrink import save, shrink
from remit.simulate.simulation import RunResult
from remit.simulate.simulation import simulate as simulated
from tests.unit.simulate.fake_runs import fake_result

SHORT = ("--until", "20s")
SOME = "exclusive_device_has_one_owner"
KEYS = ["scenario", "seed", "digest", "simulated_s", "events", "commits", "faults", "violations", "unknown"]


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(remit, ["simulate", *arguments], prog_name="remit")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register a check that every run violates: it reports each bind."""

    def nothing_is_ever_bound(step: CommitStep) -> Findings:
        for key, _, new in step.moves:
            if phase_of(new) == "bound":
                yield key, "it is bound"

    monkeypatch.setitem(CHECKS, "nothing_is_ever_bound", Check("S1", nothing_is_ever_bound))
    return "nothing_is_ever_bound"


def test_passing_run_prints_cluster_load_and_passed_checks() -> None:
    result = simulate("calm", "--seed", "3", *SHORT)
    assert result.exit_code == 0, result.output
    for word in ("calm, seed 3", "cluster", "load", "20s of virtual time", "digest", "injected", "held", "safety", "liveness"):
        assert word in result.output
    assert "not checked: the run ended before its faults" in result.output
    assert "unknown" in result.output


def test_json_output_is_one_line_with_stable_fields() -> None:
    result = simulate("calm", "--json", *SHORT)
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    row = json.loads(line)
    assert list(row) == KEYS
    assert (row["scenario"], row["seed"], row["simulated_s"]) == ("calm", 1, 20.0)
    assert len(row["digest"]) == 64
    assert row["events"] > 0
    assert row["violations"] == []


def test_seed_range_prints_the_same_line_per_seed_as_a_single_run() -> None:
    result = simulate("calm", "--json", "--seeds", "1-3", *SHORT)
    assert result.exit_code == 0, result.output
    row = {row["seed"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert sorted(row) == [1, 2, 3]
    assert row[2] == json.loads(simulate("calm", "--json", "--seed", "2", *SHORT).stdout)
    assert len({row["digest"] for row in row.values()}) == 3


def test_seed_range_prints_totals() -> None:
    result = simulate("calm", "--seeds", "1-2", *SHORT)
    assert result.exit_code == 0, result.output
    for word in ("calm, 2 seeds", "simulated hours a minute", "0 in 0 seeds"):
        assert word in result.output


def test_list_prints_all_scenarios_as_text_and_json() -> None:
    rows = [json.loads(line) for line in simulate("--list", "--json").stdout.splitlines()]
    assert [row["name"] for row in rows] == list(names())
    assert all(list(row) == ["name", "summary", "covers"] for row in rows)
    warning = simulate("--list").output
    assert all(name in warning for name in names())


def test_longer_until_extends_the_faults_of_a_scenario_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'summary = "mine"\nduration = "10s"\nheal = "10s"\n[[faults]]\nkind = "loss"\nevery = "2s"\nlasts = "1s"\n'
        "[holds]\nliveness = false\n"
    )
    short, long = (json.loads(simulate(str(path), "--json", "--until", until).stdout) for until in ("20s", "60s"))
    assert (short["scenario"], short["simulated_s"], long["simulated_s"]) == ("mine", 20.0, 60.0)
    assert long["faults"]["loss"] > short["faults"]["loss"] > 0


def test_trace_and_story_are_printed() -> None:
    trace = simulate("calm", "--trace", *SHORT)
    assert trace.exit_code == 0
    assert " commit " in trace.output
    story = simulate("calm", "--story", "node/local-n1", *SHORT)
    assert "history of node/local-n1 in local:" in story.output


def test_story_of_an_unknown_object_exits_with_2_and_suggestions() -> None:
    result = simulate("calm", "--story", "node/local-n", *SHORT)
    assert result.exit_code == 2, result.output
    assert re.search(
        r"^--story: no object node/local-n existed in this run; similar ones among \d+:"
        r" node/local-n\d, node/local-n\d, node/local-n\d$",
        result.stderr,
        re.M,
    )
    assert "held" in result.stdout
    empty = simulate("calm", "--story", "x", "--until", "1ms")
    assert empty.exit_code == 2
    assert "--story: no object x existed in this run; the run created no objects" in empty.stderr


@pytest.mark.usefixtures("planted")
def test_violation_overrides_the_exit_code_of_an_unknown_story(tmp_path: Path) -> None:
    result = simulate("calm", "--story", "x", "--no-shrink", "--save", str(tmp_path))
    assert result.exit_code == 1, result.output
    assert "--story: no object x existed in this run" in result.stderr


@pytest.mark.usefixtures("planted")
def test_output_to_a_pipe_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")  # forced colours, as for a pager, do not enable wrapping
    warning = re.sub(r"\x1b\[[0-9;]*m", "", simulate("calm", "--no-shrink").stdout).splitlines()
    first = next(number for number, line in enumerate(warning) if line.startswith("  history of replica/"))
    story = warning[first + 1 : -1]
    assert story
    assert all(re.match(r"    \d+ ms, ", line) for line in story)
    assert max(map(len, story)) > 128
    assert any("heartbeat every 2s" in line and "servers" in line for line in warning)


# -- violations ------------------------------------------------------------------------------------------------------------ ---


def test_violation_is_reported_shrunk_and_replayed(planted: str, tmp_path: Path) -> None:
    result = simulate("swarm", "--seed", "2", "--save", str(tmp_path))
    assert result.exit_code == 1, result.output
    for word in ("BROKEN S1 nothing_is_ever_bound, seed 2", "object", "it is bound", "history of replica/", "shrunk"):
        assert word in result.output
    path = tmp_path / "remit-replay-swarm-2.json"
    assert f"remit simulate --replay {path}" in result.output.replace("\n", "")
    others = simulate("--replay", str(path))
    assert others.exit_code == 1
    assert f"{planted} is violated, as when it was saved" in others.output
    violations = json.loads(simulate("--replay", str(path), "--json").stdout)["violations"]
    assert {violation["check"] for violation in violations} == {planted}  # a gang is bound at once
    assert all(list(violation) == ["check", "property", "scope", "key", "why", "at_ms"] for violation in violations)


def test_json_keeps_the_report_on_stderr(planted: str, tmp_path: Path) -> None:
    result = simulate("calm", "--json", "--save", str(tmp_path))
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["violations"][0]["check"] == planted
    assert "remit simulate --replay" in result.stderr.replace("\n", "")


@pytest.mark.usefixtures("planted")
def test_no_shrink_saves_no_replay(tmp_path: Path) -> None:
    result = simulate("calm", "--no-shrink", "--save", str(tmp_path), "--until", "4m")
    assert result.exit_code == 1
    assert "remit simulate calm --until 4m --seed 1" in result.output
    assert not list(tmp_path.iterdir())


def test_replay_that_now_passes_reports_it(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHECKS, SOME, Check("S1", lambda step: iter([("head", "there is a head")])))
        assert simulate("calm", "--save", str(tmp_path)).exit_code == 1
    result = simulate("--replay", str(tmp_path / "remit-replay-calm-1.json"))
    assert result.exit_code == 0
    assert f"{SOME} was violated when it was saved, but holds now" in result.output


@pytest.mark.usefixtures("planted")
def test_unwritable_directory_does_not_hide_the_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = tmp_path / "here"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()  # not even root can write to a removed directory
    result = simulate("calm", "--until", "4m")
    monkeypatch.chdir(tmp_path)
    assert result.exit_code == 1, result.output
    warning = " ".join(result.output.split())
    for word in ("BROKEN S1", "history of replica/", "shrunk", "could not be saved; choose a writable directory"):
        assert word in warning
    assert "remit simulate calm --until 4m --seed 1" in warning


@pytest.mark.usefixtures("planted")
def test_interrupted_shrinking_saves_the_smallest_replay_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_sizes: list[int] = []

    def interrupted(scenario: Scenario, seed: int, *, plan: Any, until_s: float | None) -> RunResult:
        plan_sizes.append(len(plan))
        if len(plan_sizes) > 1:
            signal.raise_signal(signal.SIGINT)
        return simulated(scenario, seed, plan=plan, until_s=until_s)

    defaults: Any = shrink.__kwdefaults__
    monkeypatch.setitem(defaults, "simulate", interrupted)
    result = simulate("swarm", "--seed", "2", "--save", str(tmp_path))
    assert result.exit_code == 130, result.output
    assert "(interrupted)" in " ".join(result.output.split())
    assert result.output.splitlines()[-1] == "interrupted"
    (path,) = tmp_path.iterdir()
    assert f"remit simulate --replay {path}" in result.output.replace("\n", "")
    assert simulate("--replay", str(path)).exit_code == 1


@pytest.mark.usefixtures("planted")
def test_shrinking_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.cli.output.simulation_report.NOTE_EVERY_S", 0.0)
    result = simulate("calm", "--json", "--save", str(tmp_path))
    assert re.search(r"^shrinking the failing run: run 1: \d+ faults left, ends after", result.stderr, re.M)
    assert len(result.stdout.splitlines()) == 1


def run_replay(revision: str, directory: Path) -> Result:
    result = simulate("--replay", str(save(Replay(Scenario("x", "y", heal="1s"), 1, 2.0, (), revision=revision), directory)))
    assert result.exit_code == 0, result.output
    return result


def test_replay_of_another_revision_warns(tmp_path: Path) -> None:
    this = revision()
    warning = run_replay("0ld\x1b", tmp_path).stderr.splitlines()
    assert f"saved at revision 0ld\\x1b, running {this}: the run may differ" in warning
    assert "saved at revision" not in run_replay("", tmp_path).output


def test_replay_of_uncommitted_code_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.cli.session.source_revision.revision", lambda: "abc+changes")
    warning = run_replay("abc+changes", tmp_path).stderr
    assert "saved at revision abc+changes, running abc+changes: with uncommitted changes:" in warning
    assert "saved at revision abc, running abc+changes: the run may differ" in run_replay("abc", tmp_path).stderr
    monkeypatch.setattr("remit.cli.session.source_revision.revision", lambda: "abc")
    assert "saved at revision" not in run_replay("abc", tmp_path).output


# -- terminals and pipes ----------------------------------------------------------------------------------------------------- -

ESCAPE = "\x1b]0;mine\x07\x9b2J"


def test_control_characters_from_files_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / f"{ESCAPE}.toml"
    path.write_text('summary = "\\u001b]0;mine\\u0007"\nduration = "1s"\nheal = "1s"\n[holds]\nliveness = false\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHECKS, "never", Check("S1", lambda step: iter([(f"head{ESCAPE}", f"there is a head{ESCAPE}")])))
        option_sets = (("--trace", "--no-shrink"), ("--json",), ())
        broken = [simulate(str(path), "--save", str(tmp_path), *options) for options in option_sets]
    (saved,) = tmp_path.glob("*.json")
    replay = msgspec.json.decode(saved.read_bytes(), type=Replay)
    save(msgspec.structs.replace(replay, violation=SOME, revision=ESCAPE), tmp_path)
    others = [simulate("--replay", str(saved)), simulate(str(path), "--story", ESCAPE), simulate(str(path), "--seeds", "1-2")]
    save(msgspec.structs.replace(replay, violation=f"never{ESCAPE}"), tmp_path)
    others.append(simulate("--replay", str(saved)))
    assert [result.exit_code for result in broken] == [1, 1, 1], broken[0].output
    assert [result.exit_code for result in others] == [0, 2, 0, 2]
    for result in (*broken, *others):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", result.output)
    assert "\\x1b]0;mine\\x07" in others[0].output
    assert f"no object {escaped(ESCAPE)} existed" in others[1].output
    assert "violation: there is no check 'never" in others[3].output


@pytest.mark.parametrize("options", [("calm", "--trace"), ("calm", "--json", "--seeds", "1-3"), ("calm",), ("--list",)])
def test_closed_pipe_exits_like_sigpipe_without_output(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "remit.cli.main", "simulate", "--until", "2s", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("options", [("calm",), ("calm", "--json"), ("calm", "--seeds", "1-2"), ("--list",)])
def test_closed_stdout_exits_with_2_not_1(options: tuple[str, ...]) -> None:
    done = run_in_shell("simulate", "--until", "2s", *options, redirected=">&-")
    assert (done.returncode, done.stderr) == (2, "remit: stdout is closed; use >/dev/null to discard the output\n")
    assert run_in_shell("simulate", "--until", "2s", *options, redirected=">&- 2>&-").returncode == 2


@pytest.mark.parametrize("redirected", ["2>&-", "<&- 2>&-"])
def test_closed_stderr_does_not_change_stdout(redirected: str) -> None:
    for options in ("--json", "--seed=1", "--seeds=1-2"):
        done = run_in_shell("simulate", "calm", "--until", "2s", options, redirected=redirected)
        assert (done.returncode, done.stderr) == (0, "")
        assert "calm" in done.stdout
    assert run_in_shell("simulate", "clam", redirected=redirected).returncode == 2


def run_in_shell(*arguments: str, redirected: str) -> subprocess.CompletedProcess[str]:
    command = f"{shlex.join([sys.executable, '-m', 'remit.cli', *arguments])} {redirected}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)


def test_json_lines_are_in_the_order_of_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(tasks: Iterable[SeedTask], _: int) -> Iterator[SeedResult]:
        for task in reversed(list(tasks)):
            yield SeedResult(task, fake_result(task.seed), 0.0)

    monkeypatch.setattr("remit.simulate.seed_runner.run_seeds", backwards)
    lines = simulate("calm", "--json", "--seeds", "8-12").stdout.splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [8, 9, 10, 11, 12]


# -- usage errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give exactly one of SCENARIO, --list and --replay FILE"),
        (("calm", "--list"), "give exactly one of"),
        (("clam",), "there is no scenario 'clam'; `remit simulate --list` lists all"),
        (("nowhere.toml",), "there is no scenario 'nowhere.toml'"),
        (("calm", "--seed", "1", "--seeds", "1-2"), "--seed and --seeds cannot be combined"),
        (("calm", "--seeds", "5"), "--seeds: 5 is not a range; write the first and the last seed, such as 1-200"),
        (("calm", "--seeds", "5-2"), "--seeds: 5-2 is not an ascending range"),
        (("calm", "--seed", "-1"), "--seed"),
        (("calm", "--until", "soon"), "--until: soon: not a duration"),
        (("calm", "--until", "0s"), "--until: the time must be more than 0s"),
        (("calm", "--jobs", "0"), "--jobs"),
        (("calm", "--trace", "--json"), "--trace and --story need a single --seed"),
        (("calm", "--story", "x", "--seeds", "1-2"), "--trace and --story need a single --seed"),
        (("--replay", "nowhere.json"), "--replay: nowhere.json: No such file or directory"),
        (("--replay", "nowhere.json", "--seed", "2"), "--replay takes seed and time from its file"),
        (("calm", "--save", "/nowhere/at/all"), "--save"),
    ],
)
def test_usage_error_names_the_option_and_a_fix(arguments: tuple[str, ...], message: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("summary = ", "not TOML"),
        ("", "missing required field `summary`"),
        ('summary = "x"\nduration = "long"', "duration: not a duration"),
        ('summary = "x"\n[[faults]]\nkind = "meteor"\nat = "1s"', "faults[0].kind: there is no fault 'meteor'"),
        ('summary = "x"\n[cluster]\nnodes = 0', "cluster.nodes"),
        ('summary = "x"\ncovers = [1, 46]', "covers[1]: there is no fault 46; use numbers from 1 to 45"),
        ('summary = "x"\ncovers = [0]', "covers[0]: there is no fault 0"),
        ('summary = "x"\nduration = "1m"\n[[faults]]\nkind = "loss"\nat = "60s"', "faults[0].at: 60s is after the end; use"),
        ('summary = "x"\n[[faults]]\nkind = "loss"\nat = "1s"\nsize = 1e300', "faults[0].size: must be from 0"),
    ],
)
def test_invalid_scenario_file_is_a_usage_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    result = simulate(str(path))
    assert result.exit_code == 2, result.output
    assert message in result.output


@pytest.mark.parametrize("after_s", [0.15, 0.3, 0.4, 0.5, 0.8, 1.2])
def test_interrupt_at_any_time_exits_with_130(after_s: float, tmp_path: Path) -> None:
    """Before modules are loaded, while they are loaded, and in the middle of a run."""
    command = [sys.executable, "-m", "remit.cli", "simulate", "swarm", "--until", "20h", "--save", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "", "interrupted\n")


def test_interrupted_seed_range_leaves_no_processes_or_files(tmp_path: Path) -> None:
    on_disk = tmp_path / "on-disk.toml"
    on_disk.write_text('summary = "x"\nduration = "10s"\nheal = "10s"\n[cluster]\nstore = "sqlite"\n')
    leftovers = tmp_path / "left"
    leftovers.mkdir()
    command = [sys.executable, "-m", "remit.cli.main", "simulate", str(on_disk), "--seeds", "1-100000", "--json", *SHORT]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(leftovers)},
    )
    assert process.stdout is not None
    process.stdout.readline()  # the run has started
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, also to the workers
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode().splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors.decode()
    assert not list(leftovers.iterdir())
    for _ in range(100):  # the resource tracker of multiprocessing ends last
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a process is still running")


# -- list of checks ------------------------------------------------------------------------------------------------------------


def test_reported_checks_are_the_registered_checks() -> None:
    registered = [name for letter in "SL" for group in checks_of(letter).values() for name in group]
    assert set(CHECKS) | set(liveness_checks.LIVENESS_CHECKS) | set(EVENT_CHECKS) == set(registered)
    assert len(registered) == len(set(registered))
