"""Kills the process that owns a store, again and again, and checks that nothing acknowledged is lost.

python tests/integration/store/kill_writer_main.py --kills 300 --seed 7

SIGKILL ends the process at any instruction; what it handed to the system survives. So this shows that answers are not given too
early within the process and that recovery works, not that the disk keeps what fsync promised.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import apsw

ROOT = Path(__file__).resolve().parents[3]
# Run as a file, Python searches imports beside it and not in the repository.
sys.path[:0] = [place for place in (str(ROOT), str(ROOT / "src")) if place not in sys.path]

from remit.store import chain  # noqa: E402
from remit.store.protocol import Commit, Committed, Guard, Head, Store, StoreError, WatchEvent  # noqa: E402
from remit.store.sqlite import maintenance  # noqa: E402
from remit.store.sqlite.database_file import FILE_NAME, load_checksums  # noqa: E402
from remit.store.sqlite.store import SqliteStore  # noqa: E402
from tests.contracts.stores import OneThread  # noqa: E402

COMMITTERS = 4
KEPT = 3
"""Each commit deletes the rows of the commit this many before, so that deletions are in progress at every kill too."""
LIFE_S_MAX = 0.4
START_S_MAX = 60.0


class Report(NamedTuple):
    kills: int
    commits_acknowledged: int
    violations: list[str]


class Acknowledged(NamedTuple):
    """Acknowledgements of one life of the child: the last commit of each committer, with its revision."""

    last: dict[int, tuple[int, int]]
    head_sequence: int
    commits: int
    errors: list[str]


def rows_of(committer: int, number: int) -> list[tuple[str, bytes]]:
    """The rows of a commit are derived from its number, so that the parent can compute them."""
    size = 1 + (committer * 7 + number * 3) % 9
    return [(f"w{committer}/{number:08}/{n}", b"%d of %d" % (n, size) * (1 + number % 40)) for n in range(size)]


# The child


def emit(line: str) -> None:
    os.write(1, line.encode() + b"\n")


async def committer(store: Store, which: int) -> None:
    row = await store.get(f"w{which}/last")
    number, revision = (int(row.value), row.revision) if row else (0, 0)
    while True:
        number += 1
        puts = (*rows_of(which, number), (f"w{which}/last", b"%d" % number))
        deletes = tuple(key for key, _ in rows_of(which, number - KEPT)) if number > KEPT else ()
        answer = await store.commit(Commit((Guard(f"w{which}/last", revision),), puts, deletes))
        if not isinstance(answer, Committed):
            emit(f"V committer {which} was refused: {answer}")
            return
        revision = answer.revision
        emit(f"A {which} {number} {revision}")


async def chain_writer(store: Store, place: chain.ChainPosition) -> None:
    while True:
        pairs = (("chained", b"%d" % place.head.sequence),)
        head = chain.advance(place.head, pairs, ())
        answer = await store.commit(chain.batch(place, head, pairs))
        if not isinstance(answer, Committed):
            emit(f"V the chain was refused: {answer}")
            return
        place = chain.ChainPosition(head, answer.revision)
        emit(f"H {head.sequence} {answer.revision}")
        await asyncio.sleep(0.001)


async def watcher(store: Store, after: int) -> None:
    async for event in await store.watch("w1/", after=after):
        if event.after != after:
            emit(f"V the watch went from {after} to {event.after}")
        after = event.revision


async def compactor(store: Store, up_to: int, rng: random.Random) -> None:
    while True:
        await asyncio.sleep(rng.uniform(0.02, 0.2))
        await store.compact(max(0, up_to - rng.randrange(100)))


async def child(directory: Path, seed: int, compact_up_to: int) -> None:
    # Small limits, so that indexing, sweeping and checkpoints are in progress at many of the kills.
    maintenance.RECENT_VERSIONS_MAX, maintenance.INDEX_SLICE_KEYS, maintenance.WAL_PAGES_DUE = 300, 40, 60
    maintenance.SWEEP_SLICE_ROWS, maintenance.SWEEP_READ_ROWS, maintenance.SWEEP_KEYS_MAX = 20, 50, 100
    store = await SqliteStore.open(directory, offload=OneThread(), holder=f"child {seed}", incarnation="killed")
    emit("S")
    async with asyncio.TaskGroup() as group:
        for which in range(COMMITTERS):
            group.create_task(committer(store, which))
        group.create_task(chain_writer(store, store.position))
        group.create_task(watcher(store, compact_up_to))
        group.create_task(compactor(store, compact_up_to, random.Random(seed)))


# The parent


def run_and_kill(directory: Path, seed: int, compact_up_to: int, life_s: float) -> Acknowledged:
    """Start a child, read its output, and kill it `life_s` after its store opened."""
    command = [sys.executable, __file__, "--child", str(directory), "--seed", str(seed), "--compact", str(compact_up_to)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        fd, acknowledged_, deadline = process.stdout.fileno(), b"", time.monotonic() + START_S_MAX
        started = ended = False
        while not ended and (left := deadline - time.monotonic()) > 0:
            if select.select([fd], [], [], left)[0]:
                piece = os.read(fd, 1 << 16)
                ended, acknowledged_ = not piece, acknowledged_ + piece
                if not started and b"S\n" in acknowledged_:
                    started, deadline = True, time.monotonic() + life_s
        process.send_signal(signal.SIGKILL)
        while piece := os.read(fd, 1 << 16):
            acknowledged_ += piece
        process.wait()
    errors = [] if started and not ended else [f"the child did not live until its kill (started: {started})"]
    return parse_output(acknowledged_, errors)


def parse_output(acknowledged_: bytes, errors: list[str]) -> Acknowledged:
    last: dict[int, tuple[int, int]] = {}
    sequence = commits = 0
    # A line that the kill cut short does not count: only complete lines do.
    for line in acknowledged_.decode().split("\n")[:-1]:
        kind, *rest = line.split(" ", 3)
        if kind == "A":
            last[int(rest[0])] = (int(rest[1]), int(rest[2]))
            commits += 1
        elif kind == "H":
            sequence = int(rest[0])
            commits += 1
        elif kind == "V":
            errors.append(line)
    return Acknowledged(last, sequence, commits, errors)


async def check_committer(store: Store, which: int, acknowledged: tuple[int, int] | None) -> list[str]:
    """The rows are one complete prefix of the committer's commits, at least up to the last acknowledged one."""
    problems: list[str] = []
    found = {row.key: row for row in (await store.range(f"w{which}/")).rows}
    last = found.pop(f"w{which}/last", None)
    durable = int(last.value) if last else 0
    if acknowledged is not None:
        number, revision = acknowledged
        if not number <= durable <= number + 1:
            problems.append(f"committer {which}: {number} was acknowledged, {durable} is there")
        if last is not None and durable == number and last.revision != revision:
            problems.append(f"committer {which}: {number} was answered revision {revision}, it has {last.revision}")
    expected = dict(pair for n in range(max(1, durable - KEPT + 1), durable + 1) for pair in rows_of(which, n))
    if {key: row.value for key, row in found.items()} != expected:
        problems.append(f"committer {which}: half a transaction at {durable}: {sorted(found)}, not {sorted(expected)}")
    return problems


async def check_history(store: Store, after: int, seen: Head | None) -> tuple[list[str], Head | None]:
    """Replay the history since the last check: no revision is missing, and the chain's sequence is unbroken."""
    problems: list[str] = []
    now = await store.revision()
    watch = await store.watch("", after=after)
    stream = aiter(watch)
    while after < now:
        event: WatchEvent = await anext(stream)
        if event.after != after:
            problems.append(f"the history goes from {after} to {event.after}")
        if event.head is not None and event.span is not None:
            if seen is not None and event.span.first != seen.sequence + 1:
                problems.append(f"the chain goes from {seen.sequence} to {event.span.first}")
            seen = event.head
        after = event.revision
    await watch.close()
    return problems, seen


def check_file(directory: Path) -> list[str]:
    load_checksums()
    db = apsw.Connection(str(directory / FILE_NAME))
    try:
        verdict = db.execute("PRAGMA integrity_check").get
    finally:
        db.close()
    return [] if verdict == "ok" else [f"integrity_check: {verdict}"]


class Parent:
    """Remembers over many kills how far the history was checked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.checked = 0
        self.seen: Head | None = None

    async def check(self, acknowledged_: Acknowledged) -> list[str]:
        thread = OneThread()
        try:
            store = await SqliteStore.open(self.directory, offload=thread, holder="parent", incarnation="killed")
            try:
                return await self._check(store, acknowledged_)
            finally:
                await store.close()
        except StoreError as error:
            return [f"{type(error).__name__}: {error}"]
        finally:
            thread.close()

    async def _check(self, store: SqliteStore, acknowledged_: Acknowledged) -> list[str]:
        problems = list(acknowledged_.errors)
        for which in range(COMMITTERS):
            problems += await check_committer(store, which, acknowledged_.last.get(which))
        if acknowledged_.head_sequence and store.position.head.sequence - acknowledged_.head_sequence not in (1, 2):
            problems.append(
                f"head {acknowledged_.head_sequence} was acknowledged; reopening made {store.position.head.sequence}"
            )
        history, self.seen = await check_history(store, self.checked, self.seen)
        self.checked = await store.revision()
        return problems + history


def kill_loop(kills: int, seed: int, directory: Path) -> Report:
    """Kill a writer `kills` times on one store in `directory`; a seed determines the moments, as far as clocks do."""
    rng, parent = random.Random(seed), Parent(directory)
    acknowledged, violations = 0, list[str]()
    for kill in range(1, kills + 1):
        acknowledged_ = run_and_kill(directory, seed * 1_000_003 + kill, parent.checked, rng.uniform(0, LIFE_S_MAX))
        acknowledged += acknowledged_.commits
        problems = asyncio.run(parent.check(acknowledged_)) + check_file(directory)
        violations += [f"kill {kill}: {problem}" for problem in problems]
        if kill % 10 == 0 or problems:
            print(f"{kill} kills, {acknowledged} commits acknowledged, {len(violations)} violations", file=sys.stderr)
    return Report(kills, acknowledged, violations)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="keep the store here; a temporary one if not given")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compact", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        asyncio.run(child(options.child, options.seed, options.compact))
        return 1
    with tempfile.TemporaryDirectory(prefix="remit-kills-") as place:
        report = kill_loop(options.kills, options.seed, options.directory or Path(place))
    print(f"kills {report.kills}, commits acknowledged {report.commits_acknowledged}, violations {len(report.violations)}")
    for violation in report.violations:
        print(violation)
    counts = {"kills": report.kills, "operations": report.commits_acknowledged, "violations": len(report.violations)}
    print(json.dumps(counts))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
