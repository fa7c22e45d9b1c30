"""Searches for violations for minutes with fresh seeds: chaos on real processes, then simulated hours on two processes, then
two lanes of crash and state machine tests side by side.

The chaos kills and stops a server, a scheduler, controllers and agents under load, for half of the given time but at most five
minutes, which are added to it. Its jobs record their own starts and ends, and are judged by these records.

One lane kills writers in the middle of a write, the other runs state machines. Each starts one run after another until the
time is over; every run is a child process with its own seed. All seeds derive from the first one, which is printed. A violation
is printed with the command that replays it; a violation in the simulator is shrunk and saved first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from remit.cli.session.source_revision import revision
from remit.simulate.scenarios import load, names
from remit.simulate.seed_runner import RUN_LOST_CHECK, RunTotals, SeedResult, SeedTask, run_seeds
from remit.simulate.shrink import NotReproduced, save, shrink
from remit.simulate.simulation import RunResult

ROOT = Path(__file__).resolve().parent.parent
KILLS_SCRIPT = "tests/integration/store/kill_writer_main.py"
CHAOS_MODULE = "tests.integration.chaos.driver"
CHAOS_MINUTES_MAX = 5
CHAOS_SETTLES_S = 300
"""What it may take beyond its time, until all that was submitted has ended."""
KILLS_PER_RUN = 25
SEED_MAX = 2**31
OVERTIME_S_MAX = 120
"""A run under way when the time is over may end by itself within this time; then it is stopped and not counted."""
CONSECUTIVE_FAILURES_MAX = 3
"""A lane that does nothing but fail has said what it has to say."""
LANES_SHARE = 0.2
PROCESSES = 2
SOAKED = "src/remit/simulate/files/_soak.toml"
SOAKED_SHARE = 0.9
"""So many of the simulated runs are this one, the others any scenario that comes with Remit."""
HOURS_AIM, FAULTS_AIM, AIM_MINUTES = 300, 20_000, 10
REPORT_EVERY_S = 20
SHRUNK_MAX = 3
SHRINK_CPU_S_MAX = 60.0
"""Shrinking comes on top of the time: a soak that found something may take a little longer."""


@dataclass(frozen=True)
class Outcome:
    """What one run came to. `story` is the end of its output, kept for a violation."""

    counts: dict[str, int]
    violations: int
    story: str = ""
    unfinished: bool = False


@dataclass
class Soak:
    """One soak: when it began and ends, and all that was counted. Both lanes write here, under one lock."""

    seed: int
    deadline: float
    scratch: Path
    began: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    seeds: dict[str, list[int]] = field(default_factory=dict)
    replays: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    children: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    stopping: bool = False
    totals: RunTotals = field(default_factory=RunTotals)
    broken: list[SeedResult] = field(default_factory=list)
    chaos: dict[str, object] = field(default_factory=dict)
    flood: str = ""
    repeats: str = ""
    fuzz: dict[str, str] = field(default_factory=dict)

    def over(self) -> bool:
        return self.stopping or time.monotonic() >= self.deadline

    def say(self, line: str) -> None:
        elapsed = int(time.monotonic() - self.began)
        with self.lock:
            print(f"[{elapsed // 60:3d}:{elapsed % 60:02d}] {line}", flush=True)

    def child(self, command: list[str], env: dict[str, str] | None = None) -> tuple[int | None, str, str]:
        """Exit code (None: stopped because the time was over), stdout, stderr. The child leads its own process group."""
        timeout = max(1.0, self.deadline - time.monotonic()) + OVERTIME_S_MAX
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with self.lock:
            self.children[process.pid] = process
        try:
            out, err = process.communicate(timeout=timeout)
            return (None if self.stopping else process.returncode), out, err
        except subprocess.TimeoutExpired:
            end(process)
            out, err = process.communicate()
            return None, out, err
        finally:
            with self.lock:
                del self.children[process.pid]

    def stop(self) -> None:
        """End what is still under way: only processes that this soak started."""
        self.stopping = True
        with self.lock:
            under_way = list(self.children.values())
        for process in under_way:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def kills_command(seed: int) -> list[str]:
    return [sys.executable, KILLS_SCRIPT, "--kills", str(KILLS_PER_RUN), "--seed", str(seed)]


def machines_command(seed: int) -> list[str]:
    options = ["--hypothesis-seed", str(seed), "-p", "no:cacheprovider", "-o", "timeout=0"]
    return [sys.executable, "-m", "pytest", "tests/properties", *options]


def replay(command: list[str], profile: str = "") -> str:
    short = [str(Path(command[0]).relative_to(ROOT)) if Path(command[0]).is_relative_to(ROOT) else command[0], *command[1:]]
    return (f"HYPOTHESIS_PROFILE={profile} " if profile else "") + shlex.join(short)


def run_kills(soak: Soak, seed: int) -> Outcome:
    """Its last line of output is JSON: kills, operations, violations. Without that line the run itself failed."""
    code, out, err = soak.child(kills_command(seed))
    if code is None:
        return Outcome({}, 0, unfinished=True)
    try:
        found = json.loads(out.strip().splitlines()[-1])
        counts = {"kills": int(found["kills"]), "operations": int(found["operations"])}
        violations = int(found["violations"])
    except (IndexError, KeyError, TypeError, ValueError):
        return Outcome({}, 1, tail(f"{out}\n{err}\nexit {code}, and no JSON on the last line"))
    if code != 0 and violations == 0:
        return Outcome(counts, 1, tail(f"{out}\n{err}\nexit {code}"))
    return Outcome(counts, violations, tail(f"{out}\n{err}") if violations else "")


def run_machines(soak: Soak, seed: int) -> Outcome:
    """Property tests under the soak profile. They count into a file, for pytest's own output names no examples or steps."""
    counters = soak.scratch / f"machines-{seed}.jsonl"
    env = {"HYPOTHESIS_PROFILE": "soak", "REMIT_SOAK_COUNTERS": str(counters)}
    code, out, err = soak.child(machines_command(seed), env)
    counts: Counter[str] = Counter(property_runs=1)
    if counters.exists():
        for line in counters.read_text().splitlines():
            counts.update(json.loads(line))
        counters.unlink()
    if code is None:
        return Outcome({name: count for name, count in counts.items() if name != "property_runs"}, 0, unfinished=True)
    if code == 0:
        return Outcome(dict(counts), 0)
    return Outcome(dict(counts), 1, tail(f"{out}\n{err}\nexit {code}"))


def tail(text: str, lines: int = 60) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def lane(soak: Soak, name: str, salt: int, run: Callable[[Soak, int], Outcome], again: Callable[[int], str]) -> None:
    chance = random.Random(soak.seed * 2 + salt)
    failures = 0
    while not soak.over() and failures < CONSECUTIVE_FAILURES_MAX:
        seed = chance.randrange(SEED_MAX)
        outcome = run(soak, seed)
        with soak.lock:
            soak.counts.update(outcome.counts)
            soak.counts.update(violations=outcome.violations)
            soak.seeds.setdefault(name, []).append(seed)
        plain = {word: count for word, count in outcome.counts.items() if word.isidentifier()}
        summary_text = ", ".join(f"{count:,} {word.replace('_', ' ')}" for word, count in sorted(plain.items())) or "nothing"
        if outcome.unfinished:
            soak.say(f"{name} seed {seed}: stopped, the time is over; until then {summary_text}")
        elif not outcome.violations:
            failures = 0
            soak.say(f"{name} seed {seed}: {summary_text}, 0 violations")
        else:
            failures += 1
            command = again(seed)
            with soak.lock:
                soak.replays.append(command)
            soak.say(f"{name} seed {seed}: {summary_text}, {outcome.violations} VIOLATIONS\n{outcome.story}\nreplay: {command}")


# ------------------------------------------------------------------------------------------------------- real processes


def chaos_command(seed: int, seconds: float) -> list[str]:
    return [sys.executable, "-m", CHAOS_MODULE, "--seconds", f"{seconds:g}", "--seed", str(seed)]


def run_chaos(soak: Soak, seconds: float) -> None:
    """Alone: what else runs meanwhile would be one more fault, and not one that is counted."""
    seed = random.Random(f"{soak.seed}/chaos").randrange(SEED_MAX)
    soak.say(f"chaos seed {seed}: {seconds:.0f} s of kills and stops on real processes")
    soak.deadline = time.monotonic() + seconds + CHAOS_SETTLES_S
    code, out, err = soak.child(chaos_command(seed, seconds))
    try:
        soak.chaos = json.loads(out.strip().splitlines()[-1])
        violations = max(int(str(soak.chaos["violations"])), int(code != 0))
    except (IndexError, KeyError, TypeError, ValueError):
        violations = 1
    soak.counts.update(violations=violations)
    soak.say(f"chaos seed {seed}: {describe_chaos(soak.chaos)}")
    if violations:
        command = replay(chaos_command(seed, seconds))
        soak.replays.append(command)
        soak.say(f"{tail(err)}\nreplay: {command}")


def describe_chaos(found: dict[str, object]) -> str:
    if not found:
        return "it told nothing"
    words = ("faults", "jobs", "attempts", "lost", "doubled", "cut", "leaked")
    return ", ".join(f"{found.get(word, 0)} {word}" for word in words)


# ------------------------------------------------------------------------------------------------------- simulated hours


FLOOD_COMMAND = [sys.executable, "-m", "remit.cli", "bench", "flood", "--json"]


def run_flood(soak: Soak) -> None:
    """One tenant's thousand creates a second: the others, and heartbeats, are answered within a second."""
    soak.deadline = time.monotonic() + CHAOS_SETTLES_S
    code, out, err = soak.child(FLOOD_COMMAND)
    try:
        found = json.loads(out.strip().splitlines()[-1])
        soak.flood = "; ".join(f"{aim['name']}: {aim['value']:.3g} {aim['unit']}" for aim in found["aims"])
    except (IndexError, ValueError, KeyError):
        soak.flood = f"ended with {code}"
        print(tail(out + err), file=sys.stderr)
    soak.say(f"flood: {soak.flood}")
    if code:
        soak.counts["violations"] += 1
        soak.replays.append(replay(FLOOD_COMMAND))


FUZZED_BODIES = 20_000
FUZZED_S_SHARE, FUZZED_S_MAX = 0.1, 120
FUZZ_S_MAX = 900
"""What 20,000 bodies may take on a slow day."""


def fuzz_commands(soak: Soak, minutes: float) -> dict[str, list[str]]:
    seed = random.Random(f"{soak.seed}/fuzz").randrange(SEED_MAX)
    module, seconds = "tests.integration.attacks.fuzz_", min(FUZZED_S_MAX, minutes * 60 * FUZZED_S_SHARE)
    return {
        "bodies": [sys.executable, "-m", f"{module}bodies", "--bodies", str(FUZZED_BODIES), "--seed", str(seed)],
        "decoders": [sys.executable, "-m", f"{module}decoders", "--seconds", f"{seconds:g}", "--seed", str(seed)],
    }


def run_fuzz(soak: Soak, minutes: float) -> None:
    """Spoilt bodies to a real server, and spoilt bytes to every decoder; with a guide, if atheris is installed."""
    for name, command in fuzz_commands(soak, minutes).items():
        soak.deadline = time.monotonic() + FUZZ_S_MAX
        code, out, err = soak.child(command)
        try:
            found = json.loads(out.strip().splitlines()[-1])
            wrong, summary_text = (
                found.pop("wrong", ""),
                ", ".join(f"{word} {value}" for word, value in found.items() if word != "data"),
            )
        except (IndexError, ValueError):
            found, wrong, summary_text = {}, tail(out + err), f"ended with {code}"
        soak.fuzz[name] = summary_text
        soak.say(f"fuzzed {name}: {summary_text}")
        if code != 0:
            soak.counts["violations"] += 1
            soak.replays.append(replay(command))
            soak.say(f"{wrong}\n{found.get('data', '')}")


REPEATS_COMMAND = [sys.executable, "-m", "pytest", "tests/determinism", "-p", "no:cacheprovider", "-o", "timeout=0"]
REPEATS_S_MAX = 900


def run_repeats(soak: Soak) -> None:
    """Every scenario whole and once more, under another hash seed: one seed is one run. `make test` has a part of them."""
    soak.deadline = time.monotonic() + REPEATS_S_MAX
    code, out, err = soak.child(REPEATS_COMMAND, {"HYPOTHESIS_PROFILE": "soak"})
    soak.repeats = (out.strip().splitlines() or ["nothing"])[-1] if code == 0 else f"ended with {code}"
    soak.say(f"repeated: {soak.repeats}")
    if code:
        print(tail(out + err), file=sys.stderr)
        soak.counts["violations"] += 1
        soak.replays.append(replay(REPEATS_COMMAND, "soak"))


def tasks(soak: Soak) -> Iterator[SeedTask]:
    chance = random.Random(f"{soak.seed}/simulation")
    soaked, listed = load(str(ROOT / SOAKED)), [load(name) for name in names()]
    while not soak.over():
        scenario = soaked if chance.random() < SOAKED_SHARE else chance.choice(listed)
        yield SeedTask(scenario, chance.randrange(SEED_MAX))


def run_simulation(soak: Soak) -> None:
    """Until its part of the time is over."""
    reported_s = time.monotonic()
    for done in run_seeds(tasks(soak), PROCESSES):
        soak.totals.add(done.run, done.cpu_s)
        soak.seeds.setdefault("simulation", []).append(done.run.seed)
        for violation in done.run.violations[:1]:
            soak.broken.append(done)
            soak.say(f"simulation {done.run.scenario} seed {done.run.seed}: BROKE {violation}")
        if time.monotonic() - reported_s >= REPORT_EVERY_S:
            reported_s = time.monotonic()
            soak.say(f"simulation: {so_far(soak.totals)}")


def shrink_all(soak: Soak) -> None:
    """What broke, the first of each check; the others are replayed whole."""
    checks: dict[str, None] = {}
    for done in soak.broken:
        check = done.run.violations[0].check
        fresh = check not in checks and check != RUN_LOST_CHECK and len(checks) < SHRUNK_MAX
        checks.setdefault(check)
        soak.replays.append(shrunk(soak, done) if fresh else seed_command(done.run))


def shrunk(soak: Soak, done: SeedResult) -> str:
    """The command that replays the least that breaks."""
    try:
        found = shrink(done.run, cpu_s_max=SHRINK_CPU_S_MAX, revision=revision())
    except NotReproduced as error:
        soak.say(f"NOT DETERMINISTIC: {error}")
        return seed_command(done.run)
    path = save(found.replay, Path.cwd())
    kinds = ", ".join(f"{one.kind} at {one.at_s:.1f} s" for one in found.replay.plan[:10]) or "no fault at all"
    soak.say(f"shrunk from {len(done.run.plan)} faults to {len(found.replay.plan)}: {kinds}\n{found.run.story}")
    return f"remit simulate --replay {shlex.quote(str(path))}"


def seed_command(run: RunResult) -> str:
    return f"remit simulate {run.scenario if run.scenario in names() else SOAKED} --seed {run.seed}"


def so_far(totals: RunTotals) -> str:
    return (
        f"{totals.seeds:,} seeds, {totals.hours:,.1f} hours of which {totals.counted_hours:,.1f} count,"
        f" {totals.faults_all:,} faults, {totals.commits:,} commits, {totals.violations:,} violations"
    )


def simulated(totals: RunTotals, minutes: float) -> list[tuple[str, str]]:
    """The rows of the summary; the aims are for ten minutes on a quiet machine, and here in proportion."""
    aimed = minutes / AIM_MINUTES
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(totals.faults.items()))
    return [
        ("simulated", so_far(totals)),
        ("counted hours", f"{totals.counted_hours:,.1f}, aim {HOURS_AIM * aimed:,.0f} in {minutes:.1f} minutes"),
        ("beat", f"{load(str(ROOT / SOAKED)).cluster.beat} in {SOAKED_SHARE:.0%} of the runs, 2s or less in the others"),
        ("faults", f"{totals.faults_all:,}, aim {FAULTS_AIM * aimed:,.0f}: {kinds}"),
        ("commits", f"{totals.commits:,}, {totals.decided:,} of them with decisions; {totals.events:,} events"),
        ("cost", f"{totals.cpu_s:,.0f} CPU-s, {totals.events / totals.cpu_s if totals.cpu_s else 0:,.0f} events a CPU-s"),
        ("broken", f"{totals.violations} violations, {totals.per_million_commits:,.2f} in a million commits"),
        ("unknown", f"{totals.unknown:,} that no check could decide"),
    ]


# ---------------------------------------------------------------------------------------------------------------- the soak


def summary(soak: Soak, minutes_requested: float) -> None:
    counts = soak.counts
    rows = (
        ("minutes", f"{(time.monotonic() - soak.began) / 60:.1f} of {minutes_requested:g} requested"),
        ("revision", revision(ROOT)),
        ("first seed", str(soak.seed)),
        *((f"{name} seeds", f"{len(seeds)}: {' '.join(map(str, seeds))}") for name, seeds in sorted(soak.seeds.items())),
        ("chaos", describe_chaos(soak.chaos) if soak.chaos else "not requested"),
        ("flood", soak.flood or "not requested"),
        ("repeated", soak.repeats or "not requested"),
        *((f"fuzzed {name}", summary_text) for name, summary_text in soak.fuzz.items()),
        ("kills", f"{counts['kills']:,}"),
        ("operations", f"{counts['operations']:,}"),
        ("property runs", f"{counts['property_runs']:,}"),
        ("examples", f"{counts['examples']:,}"),
        ("state machines", f"{counts['machines']:,} runs, {counts['steps']:,} steps"),
        *simulated(soak.totals, minutes_requested),
        ("violations", str(counts["violations"] + soak.totals.violations)),
        *(("replay", command) for command in soak.replays),
    )
    print("\nsoak")
    for name, value in rows:
        print(f"  {name:<15} {value}")


def run_lanes(soak: Soak) -> None:
    plan = (
        ("kills", run_kills, lambda n: replay(kills_command(n))),
        ("machines", run_machines, lambda n: replay(machines_command(n), "soak")),
    )
    lanes = [threading.Thread(target=lane, args=(soak, name, salt, *how)) for salt, (name, *how) in enumerate(plan)]
    for thread in lanes:
        thread.start()
    try:
        for thread in lanes:
            thread.join()
    except KeyboardInterrupt:
        soak.stop()
        for thread in lanes:
            thread.join()
        raise


def proved_nothing(soak: Soak, lanes: float) -> str:
    if lanes > 0 and not (soak.counts["kills"] and soak.counts["examples"]):
        return "a lane counted neither a kill nor an example"
    if lanes < 1 and not soak.totals.decided:
        return "no simulated run decided anything"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill writers, run state machines and simulate hours, all with fresh seeds.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--lanes", type=float, default=LANES_SHARE, help="the share of the time that is the lanes', 0 to 1")
    parser.add_argument(
        "--chaos",
        type=float,
        help="minutes of kills on real processes, before flood, fuzz and repeats (default: half, 5 at most); 0: none",
    )
    parser.add_argument("--seed", type=int, help="the first seed, from which all others follow (default: a fresh one)")
    options = parser.parse_args()
    if not 0 <= options.lanes <= 1:
        parser.error("--lanes is a share of the time: 0 for the simulator alone, 1 for the lanes alone")
    chaos = min(CHAOS_MINUTES_MAX, options.minutes / 2) if options.chaos is None else options.chaos
    seed = random.SystemRandom().randrange(SEED_MAX) if options.seed is None else options.seed
    # Whoever asks this soak to end must not leave its children behind: they lead process groups of their own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="remit-soak-") as scratch:
        soak = Soak(seed, 0, Path(scratch))
        soak.say(f"{options.minutes:g} minutes from seed {seed}, {options.lanes:.0%} of it in lanes, revision {revision(ROOT)}")
        try:
            if chaos > 0:
                run_chaos(soak, chaos * 60)
                run_flood(soak)
                run_fuzz(soak, options.minutes)
                run_repeats(soak)
            end_s = time.monotonic() + options.minutes * 60
            soak.deadline = time.monotonic() + options.minutes * 60 * (1 - options.lanes)
            if options.lanes < 1:
                run_simulation(soak)
            soak.deadline = end_s
            if options.lanes > 0:
                run_lanes(soak)
            shrink_all(soak)
        except KeyboardInterrupt:
            soak.say("interrupted; what was under way has ended")
            soak.stop()
            soak.replays += [seed_command(done.run) for done in soak.broken]
        summary(soak, options.minutes)
    nothing = "" if soak.stopping else proved_nothing(soak, options.lanes)
    if nothing:
        print(f"  this soak proved nothing: {nothing}", file=sys.stderr)
    return 1 if soak.counts["violations"] or soak.totals.violations or nothing else 0


if __name__ == "__main__":
    sys.exit(main())
