"""Does `remit simulate` say what held, keep its JSON shape, refuse what cannot be meant, and hand out a replay?"""

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
from remit.cli.output.simulation_report import checks
from remit.cli.session.source_revision import revision
from remit.model.problems import escaped
from remit.simulate.checkers import liveness_checks
from remit.simulate.checkers.judge import EVENT_CHECKS
from remit.simulate.checkers.reference.history import CommitStep
from remit.simulate.checkers.reference.rows import phase_of
from remit.simulate.checkers.registry import CHECKS, Check, Findings
from remit.simulate.scenario_types import Replay, Scenario
from remit.simulate.scenarios import names
from remit.simulate.seed_runner import SeedResult, SeedTask
from remit.simulate.shrink import save, shrink
from remit.simulate.simulation import RunResult
from remit.simulate.simulation import simulate as simulated
from tests.unit.simulate.fake_runs import pretended

SHORT = ("--until", "20s")
SOME = "exclusive_device_has_one_owner"
KEYS = ["scenario", "seed", "digest", "simulated_s", "events", "commits", "faults", "violations", "unknown"]


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(remit, ["simulate", *arguments], prog_name="remit")


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> str:
    """A promise that every run breaks: the first bind is told as a violation."""

    def nothing_is_ever_bound(step: CommitStep) -> Findings:
        for key, _, new in step.moves:
            if phase_of(new) == "bound":
                yield key, "it is bound"

    monkeypatch.setitem(CHECKS, "nothing_is_ever_bound", Check("S1", nothing_is_ever_bound))
    return "nothing_is_ever_bound"


def test_a_run_that_holds_says_what_ran_and_what_held() -> None:
    result = simulate("calm", "--seed", "3", *SHORT)
    assert result.exit_code == 0, result.output
    for word in ("calm, seed 3", "cluster", "load", "20s of virtual time", "digest", "injected", "held", "safety", "liveness"):
        assert word in result.output
    assert "not judged: the run ended before its faults did" in result.output
    assert "unknown" in result.output


def test_json_is_exactly_one_line_of_this_shape() -> None:
    result = simulate("calm", "--json", *SHORT)
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert list(found) == KEYS
    assert (found["scenario"], found["seed"], found["simulated_s"]) == ("calm", 1, 20.0)
    assert len(found["digest"]) == 64
    assert found["events"] > 0
    assert found["violations"] == []


def test_many_seeds_give_a_line_each_and_the_same_as_alone() -> None:
    many = simulate("calm", "--json", "--seeds", "1-3", *SHORT)
    assert many.exit_code == 0, many.output
    found = {row["seed"]: row for row in map(json.loads, many.stdout.splitlines())}
    assert sorted(found) == [1, 2, 3]
    assert found[2] == json.loads(simulate("calm", "--json", "--seed", "2", *SHORT).stdout)
    assert len({row["digest"] for row in found.values()}) == 3


def test_many_seeds_are_summed_for_people() -> None:
    result = simulate("calm", "--seeds", "1-2", *SHORT)
    assert result.exit_code == 0, result.output
    for word in ("calm, 2 seeds", "simulated hours a minute", "0 in 0 seeds"):
        assert word in result.output


def test_the_list_for_people_and_for_programs() -> None:
    rows = [json.loads(line) for line in simulate("--list", "--json").stdout.splitlines()]
    assert [row["name"] for row in rows] == list(names())
    assert all(list(row) == ["name", "summary", "covers"] for row in rows)
    told = simulate("--list").output
    assert all(name in told for name in names())


def test_a_longer_time_stretches_the_faults_and_a_file_is_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'summary = "mine"\nduration = "10s"\nheal = "10s"\n[[faults]]\nkind = "loss"\nevery = "2s"\nlasts = "1s"\n'
        "[holds]\nliveness = false\n"
    )
    short, long = (json.loads(simulate(str(path), "--json", "--until", until).stdout) for until in ("20s", "60s"))
    assert (short["scenario"], short["simulated_s"], long["simulated_s"]) == ("mine", 20.0, 60.0)
    assert long["faults"]["loss"] > short["faults"]["loss"] > 0


def test_the_trace_and_a_story_are_told() -> None:
    trace = simulate("calm", "--trace", *SHORT)
    assert trace.exit_code == 0
    assert " commit " in trace.output
    story = simulate("calm", "--story", "node/local-n1", *SHORT)
    assert "history of node/local-n1 in local:" in story.output


def test_the_story_of_what_never_was_is_misuse_and_names_the_nearest() -> None:
    result = simulate("calm", "--story", "node/local-n", *SHORT)
    assert result.exit_code == 2, result.output
    assert re.search(
        r"^--story: nothing named node/local-n ever was in this run; the nearest of \d+ names there were:"
        r" node/local-n\d, node/local-n\d, node/local-n\d$",
        result.stderr,
        re.M,
    )
    assert "held" in result.stdout
    nothing = simulate("calm", "--story", "x", "--until", "1ms")
    assert nothing.exit_code == 2
    assert "--story: nothing named x ever was in this run; there was nothing at all" in nothing.stderr


@pytest.mark.usefixtures("planted")
def test_a_broken_promise_weighs_more_than_a_story_of_nothing(tmp_path: Path) -> None:
    result = simulate("calm", "--story", "x", "--no-shrink", "--save", str(tmp_path))
    assert result.exit_code == 1, result.output
    assert "--story: nothing named x ever was in this run" in result.stderr


@pytest.mark.usefixtures("planted")
def test_what_goes_to_no_terminal_is_not_broken_into_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")  # colours may be for a pager: they make no terminal of a pipe
    told = re.sub(r"\x1b\[[0-9;]*m", "", simulate("calm", "--no-shrink").stdout).splitlines()
    first = next(number for number, line in enumerate(told) if line.startswith("  history of replica/"))
    story = told[first + 1 : -1]
    assert story
    assert all(re.match(r"    \d+ ms, ", line) for line in story)
    assert max(map(len, story)) > 128
    assert any("a beat every 2s" in line and "servers" in line for line in told)


# ---------------------------------------------------------------------------------------------------------- what is broken


def test_a_broken_promise_is_told_shrunk_and_replayed(planted: str, tmp_path: Path) -> None:
    result = simulate("swarm", "--seed", "2", "--save", str(tmp_path))
    assert result.exit_code == 1, result.output
    for word in ("BROKEN S1 nothing_is_ever_bound, seed 2", "object", "it is bound", "history of replica/", "shrunk"):
        assert word in result.output
    path = tmp_path / "remit-replay-swarm-2.json"
    assert f"remit simulate --replay {path}" in result.output.replace("\n", "")
    again = simulate("--replay", str(path))
    assert again.exit_code == 1
    assert "it breaks as it did when it was saved" in again.output
    violations = json.loads(simulate("--replay", str(path), "--json").stdout)["violations"]
    assert {violation["check"] for violation in violations} == {planted}  # a gang is bound at one moment
    assert all(list(violation) == ["check", "property", "scope", "key", "why", "at_ms"] for violation in violations)


def test_with_json_what_is_for_people_goes_elsewhere(planted: str, tmp_path: Path) -> None:
    result = simulate("calm", "--json", "--save", str(tmp_path))
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["violations"][0]["check"] == planted
    assert "remit simulate --replay" in result.stderr.replace("\n", "")


@pytest.mark.usefixtures("planted")
def test_without_shrinking_nothing_is_saved(tmp_path: Path) -> None:
    result = simulate("calm", "--no-shrink", "--save", str(tmp_path), "--until", "4m")
    assert result.exit_code == 1
    assert "remit simulate calm --until 4m --seed 1" in result.output
    assert not list(tmp_path.iterdir())


def test_a_replay_that_breaks_no_more_says_so(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHECKS, SOME, Check("S1", lambda step: iter([("head", "there is a head")])))
        assert simulate("calm", "--save", str(tmp_path)).exit_code == 1
    result = simulate("--replay", str(tmp_path / "remit-replay-calm-1.json"))
    assert result.exit_code == 0
    assert f"when it was saved {SOME} was broken: not so now" in result.output


@pytest.mark.usefixtures("planted")
def test_a_replay_that_cannot_be_saved_hides_no_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()  # not even root can write into it
    result = simulate("calm", "--until", "4m")
    monkeypatch.chdir(tmp_path)
    assert result.exit_code == 1, result.output
    told = " ".join(result.output.split())
    for word in ("BROKEN S1", "history of replica/", "shrunk", "could not be saved; --save DIR names a directory"):
        assert word in told
    assert "remit simulate calm --until 4m --seed 1" in told


@pytest.mark.usefixtures("planted")
def test_shrinking_that_is_interrupted_leaves_the_best_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def interrupted(scenario: Scenario, seed: int, *, plan: Any, until_s: float | None) -> RunResult:
        asked.append(len(plan))
        if len(asked) > 1:
            signal.raise_signal(signal.SIGINT)
        return simulated(scenario, seed, plan=plan, until_s=until_s)

    defaults: Any = shrink.__kwdefaults__
    monkeypatch.setitem(defaults, "simulate", interrupted)
    result = simulate("swarm", "--seed", "2", "--save", str(tmp_path))
    assert result.exit_code == 130, result.output
    assert "(the search was cut short)" in " ".join(result.output.split())
    assert result.output.splitlines()[-1] == "interrupted"
    (path,) = tmp_path.iterdir()
    assert f"remit simulate --replay {path}" in result.output.replace("\n", "")
    assert simulate("--replay", str(path)).exit_code == 1


@pytest.mark.usefixtures("planted")
def test_shrinking_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.cli.output.simulation_report.NOTE_EVERY_S", 0.0)
    result = simulate("calm", "--json", "--save", str(tmp_path))
    assert re.search(r"^looking for the least that breaks it: run 1: \d+ faults left, ends after", result.stderr, re.M)
    assert len(result.stdout.splitlines()) == 1


def replayed(revision: str, directory: Path) -> Result:
    result = simulate("--replay", str(save(Replay(Scenario("x", "y", heal="1s"), 1, 2.0, (), revision=revision), directory)))
    assert result.exit_code == 0, result.output
    return result


def test_a_replay_of_another_revision_says_so(tmp_path: Path) -> None:
    this = revision()
    told = replayed("0ld\x1b", tmp_path).stderr.splitlines()
    assert f"saved at revision 0ld\\x1b, this is {this}: it may go otherwise" in told
    assert "saved at revision" not in replayed("", tmp_path).output


def test_a_replay_of_code_that_is_in_no_commit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.cli.session.source_revision.revision", lambda: "abc+changes")
    told = replayed("abc+changes", tmp_path).stderr
    assert (
        "saved at revision abc+changes, this is abc+changes: by code that is in no commit, and may have been another:" in told
    )
    assert "saved at revision abc, this is abc+changes: it may go otherwise" in replayed("abc", tmp_path).stderr
    monkeypatch.setattr("remit.cli.session.source_revision.revision", lambda: "abc")
    assert "saved at revision" not in replayed("abc", tmp_path).output


# -------------------------------------------------------------------------------------------------- terminals and readers

ESCAPE = "\x1b]0;mine\x07\x9b2J"


def test_what_is_in_a_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / f"{ESCAPE}.toml"
    path.write_text('summary = "\\u001b]0;mine\\u0007"\nduration = "1s"\nheal = "1s"\n[holds]\nliveness = false\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHECKS, "never", Check("S1", lambda step: iter([(f"head{ESCAPE}", f"there is a head{ESCAPE}")])))
        ways = (("--trace", "--no-shrink"), ("--json",), ())
        broken = [simulate(str(path), "--save", str(tmp_path), *more) for more in ways]
    (saved,) = tmp_path.glob("*.json")
    replay = msgspec.json.decode(saved.read_bytes(), type=Replay)
    save(msgspec.structs.replace(replay, violation=SOME, revision=ESCAPE), tmp_path)
    again = [simulate("--replay", str(saved)), simulate(str(path), "--story", ESCAPE), simulate(str(path), "--seeds", "1-2")]
    save(msgspec.structs.replace(replay, violation=f"never{ESCAPE}"), tmp_path)
    again.append(simulate("--replay", str(saved)))
    assert [result.exit_code for result in broken] == [1, 1, 1], broken[0].output
    assert [result.exit_code for result in again] == [0, 2, 0, 2]
    for result in (*broken, *again):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", result.output)
    assert "\\x1b]0;mine\\x07" in again[0].output
    assert f"nothing named {escaped(ESCAPE)} ever was" in again[1].output
    assert "violation: there is no check 'never" in again[3].output


@pytest.mark.parametrize("more", [("calm", "--trace"), ("calm", "--json", "--seeds", "1-3"), ("calm",), ("--list",)])
def test_a_reader_that_has_seen_enough_breaks_nothing(more: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "remit.cli.main", "simulate", "--until", "2s", *more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("more", [("calm",), ("calm", "--json"), ("calm", "--seeds", "1-2"), ("--list",)])
def test_a_closed_stdout_is_told_and_means_no_broken_promise(more: tuple[str, ...]) -> None:
    done = run_in_shell("simulate", "--until", "2s", *more, redirected=">&-")
    assert (done.returncode, done.stderr) == (2, "remit: stdout is closed; write >/dev/null to be told nothing\n")
    assert run_in_shell("simulate", "--until", "2s", *more, redirected=">&- 2>&-").returncode == 2


@pytest.mark.parametrize("redirected", ["2>&-", "<&- 2>&-"])
def test_a_closed_stderr_changes_nothing_on_stdout(redirected: str) -> None:
    for more in ("--json", "--seed=1", "--seeds=1-2"):
        done = run_in_shell("simulate", "calm", "--until", "2s", more, redirected=redirected)
        assert (done.returncode, done.stderr) == (0, "")
        assert "calm" in done.stdout
    assert run_in_shell("simulate", "clam", redirected=redirected).returncode == 2


def run_in_shell(*arguments: str, redirected: str) -> subprocess.CompletedProcess[str]:
    command = f"{shlex.join([sys.executable, '-m', 'remit.cli', *arguments])} {redirected}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)


def test_lines_come_in_the_order_of_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(tasks: Iterable[SeedTask], _: int) -> Iterator[SeedResult]:
        for task in reversed(list(tasks)):
            yield SeedResult(task, pretended(task.seed), 0.0)

    monkeypatch.setattr("remit.simulate.seed_runner.run_seeds", backwards)
    lines = simulate("calm", "--json", "--seeds", "8-12").stdout.splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [8, 9, 10, 11, 12]


# ------------------------------------------------------------------------------------------------------------------ misuse


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name one of: a SCENARIO, --list, --replay FILE"),
        (("calm", "--list"), "name one of"),
        (("clam",), "there is no scenario 'clam'; `remit simulate --list` lists all"),
        (("nowhere.toml",), "there is no scenario 'nowhere.toml'"),
        (("calm", "--seed", "1", "--seeds", "1-2"), "--seed and --seeds exclude each other"),
        (("calm", "--seeds", "5"), "--seeds: 5 names no seeds; write the first and the last, such as 1-200"),
        (("calm", "--seeds", "5-2"), "--seeds: 5-2 has its last before its first"),
        (("calm", "--seed", "-1"), "--seed"),
        (("calm", "--until", "soon"), "--until: soon: not a duration"),
        (("calm", "--until", "0s"), "--until: nothing happens in no time"),
        (("calm", "--jobs", "0"), "--jobs"),
        (("calm", "--trace", "--json"), "--trace and --story tell people about one run"),
        (("calm", "--story", "x", "--seeds", "1-2"), "--trace and --story tell people about one run"),
        (("--replay", "nowhere.json"), "--replay: nowhere.json: No such file or directory"),
        (("--replay", "nowhere.json", "--seed", "2"), "--replay has its seed and its time from its file"),
        (("calm", "--save", "/nowhere/at/all"), "--save"),
    ],
)
def test_misuse_names_the_field_and_the_cure(arguments: tuple[str, ...], said: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_a_bad_file_is_misuse(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    result = simulate(str(path))
    assert result.exit_code == 2, result.output
    assert said in result.output


@pytest.mark.parametrize("after_s", [0.15, 0.3, 0.4, 0.5, 0.8, 1.2])
def test_whoever_interrupts_early_or_late_sees_the_same(after_s: float, tmp_path: Path) -> None:
    """Before anything is loaded, while it is, and in the middle of a run."""
    command = [sys.executable, "-m", "remit.cli", "simulate", "swarm", "--until", "20h", "--save", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "", "interrupted\n")


def test_an_interrupted_swarm_leaves_nothing_behind(tmp_path: Path) -> None:
    on_disk = tmp_path / "on-disk.toml"
    on_disk.write_text('summary = "x"\nduration = "10s"\nheal = "10s"\n[cluster]\nstore = "sqlite"\n')
    left = tmp_path / "left"
    left.mkdir()
    command = [sys.executable, "-m", "remit.cli.main", "simulate", str(on_disk), "--seeds", "1-100000", "--json", *SHORT]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env={**os.environ, "TMPDIR": str(left)}
    )
    assert process.stdout is not None
    process.stdout.readline()  # it is under way
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the workers too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode().splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors.decode()
    assert not list(left.iterdir())
    for _ in range(100):  # whoever keeps account of what the processes share goes after them
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a process is left")


# ---------------------------------------------------------------------------------------------------------------- the list


def test_what_is_said_to_have_held_is_what_is_looked_at() -> None:
    every = [name for letter in "SL" for group in checks(letter).values() for name in group]
    assert set(CHECKS) | set(liveness_checks.LIVENESS_CHECKS) | set(EVENT_CHECKS) == set(every)
    assert len(every) == len(set(every))
