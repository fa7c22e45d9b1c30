"""Property: the SQLite store keeps every acknowledged batch when power fails inside any disk call.

A scenario opens a store, writes groups of batches, compacts and maintains it. Power fails in one of the disk calls, unsynced
data is torn at random, and the next process must find every acknowledged batch, and all or nothing of the group in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import apsw
import pytest

from remit.simulate.world.clock import SimOffload
from remit.simulate.world.power_loss import TornDisk
from remit.store import chain
from remit.store.chain import ChainPosition
from remit.store.protocol import HEAD, Commit, Committed, Corrupt, StoreError
from remit.store.sqlite import maintenance
from remit.store.sqlite.database_file import FILE_NAME
from remit.store.sqlite.store import SqliteStore
from remit.world.interfaces import Randomness
from remit.world.randomness import SeededRandomness

Rows = dict[str, bytes]

STEPS = 7


class LostData(Exception):
    """The store lacks acknowledged data."""


@pytest.fixture(autouse=True)
def eager_maintenance(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short scenario includes indexing and several checkpoints."""
    monkeypatch.setattr(maintenance, "WAL_PAGES_DUE", 12)
    monkeypatch.setattr(maintenance, "RECENT_VERSIONS_MAX", 20)


class Process:
    """One run of a process on one machine's disk."""

    def __init__(self, disk: TornDisk) -> None:
        self.alive = True
        self.disk = disk
        self.store: SqliteStore | None = None
        self.offload = SimOffload(lambda: 0, lambda: self.alive)

    def die(self) -> None:
        self.alive = False

    async def open(self) -> SqliteStore:
        place = self.disk.directory / "store"
        self.store = await SqliteStore.open(place, offload=self.offload, holder="me", incarnation="one")
        return self.store

    async def close_dead(self) -> None:
        """Run what finally blocks of a dead process still attempt."""
        self.die()
        if self.store is not None:
            with suppress(asyncio.CancelledError):
                await self.store.close()


class AcknowledgedState:
    """Acknowledged rows, and the rows of a group in flight."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        self.place: ChainPosition | None = None
        self.under_way: Rows | None = None

    async def write(self, store: SqliteStore, chance: Randomness) -> None:
        """Write one group of one to four batches, each on top of the previous one."""
        assert self.place is not None
        place, rows, group = self.place, dict(self.rows), list[Commit]()
        for _ in range(1 + chance.randrange(4)):
            puts, deletes = _changes(rows, chance)
            head = chain.advance(place.head, puts, deletes)
            group.append(chain.batch(place, head, puts, deletes))
            place = ChainPosition(head, place.revision + 1)
            rows.update(puts)
            for key in deletes:
                del rows[key]
        self.under_way = rows
        answers = await asyncio.gather(*(store.commit(commit) for commit in group), return_exceptions=True)
        for number, answer in enumerate(answers, self.place.revision + 1):
            if isinstance(answer, BaseException):
                raise answer
            if answer != Committed(number):
                raise LostData(f"{answer}, not {number}")
        self.rows, self.place, self.under_way = rows, place, None

    async def check(self, store: SqliteStore) -> bool:
        """Raise `LostData`, or return whether the group in flight was found, and acknowledge what was found."""
        page = await store.range("", limit=10_000)
        found = {row.key: row.value for row in page.rows if row.key != HEAD}
        landed = self.under_way is not None and found == self.under_way
        if not landed and found != self.rows:
            raise LostData(f"{sorted(found.items() ^ self.rows.items())[:5]}")
        if self.place is not None:
            await _follow(store, self.place)
        self.rows, self.place, self.under_way = found, store.position, None
        return landed


async def _follow(store: SqliteStore, place: ChainPosition) -> None:
    """Check every batch since `place`, and the digest of its rows on top of the previous one."""
    watch, seen, revision = await store.watch("", after=place.revision), place.head, place.revision
    try:
        async with asyncio.timeout(20):
            events = aiter(watch)
            while revision < store.position.revision:
                event = await anext(events)
                if (gap := chain.gap(seen, event)) is not None or event.head is None:
                    raise LostData(f"{gap}")
                seen, revision = event.head, event.revision
    finally:
        await watch.close()
    if seen != store.position.head:
        raise LostData(f"the chain ends at {seen}, not at {store.position.head}")


def _changes(rows: Rows, chance: Randomness) -> tuple[list[tuple[str, bytes]], list[str]]:
    keys = chance.shuffled([f"key/{number:02}" for number in range(30)])
    sizes = (10, 300, 2_000, 12_000)
    puts = [
        (key, bytes([chance.randrange(256)]) * (1 + chance.randrange(chance.choice(sizes))))
        for key in keys[: 1 + chance.randrange(6)]
    ]
    return puts, [key for key in keys[6:8] if key in rows]


class Outcome(NamedTuple):
    """Result of a scenario: disk calls, whether power failed, whether the group in flight was found."""

    calls: int
    cut: bool
    landed: bool


async def _live(process: Process, known: AcknowledgedState, chance: Randomness) -> None:
    store = await process.open()
    await known.check(store)
    for _ in range(STEPS):
        assert known.place is not None
        if chance.randrange(5) == 0:
            await store.compact(known.place.revision - chance.randrange(2))
        await known.write(store, chance)
    if chance.randrange(2):
        await store.close()


async def run_scenario(disk: TornDisk, seed: str, cut_at: int) -> Outcome:
    """Power fails in call `cut_at` (0: at the end); then check what the next two processes find."""
    chance, known = SeededRandomness(seed), AcknowledgedState()
    before = disk.calls
    process = Process(disk)
    if cut_at:
        disk.cut_after(cut_at, process.die)
    try:
        await _live(process, known, chance.stream("story"))
    except (asyncio.CancelledError, StoreError):
        if process.alive:
            raise
    calls, cut = disk.calls - before, disk.power_off
    assert cut == (not process.alive)
    disk.crash(chance.stream(f"crash in {cut_at}"))
    await process.close_dead()
    landed = False
    for life in ("second", "third"):
        process = Process(disk)
        store = await process.open()
        landed |= await known.check(store)
        await known.write(store, chance.stream(life))
        disk.crash(chance.stream(f"crash of the {life}"))
        await process.close_dead()
    process = Process(disk)
    await known.check(await process.open())
    assert process.store is not None
    await process.store.close()
    check_file(disk.directory / "store" / FILE_NAME)
    return Outcome(calls, cut, landed)


def check_file(path: Path) -> None:
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        assert db.execute("PRAGMA checksum_verification").get == "1"
        assert db.execute("PRAGMA integrity_check").get == "ok"
    finally:
        db.close()


def play(place: Path, seed: str, cut_at: int, *, lying: bool = False) -> Outcome:
    with TornDisk(place, lying=lying) as disk:
        return asyncio.run(run_scenario(disk, seed, cut_at))


def sweep(place: Path, seed: str) -> Iterator[Outcome]:
    """Power fails in each call of one scenario in turn."""
    for number in range(1, play(place / "whole", seed, 0).calls + 1):
        yield play(place / f"{number}", seed, number)


def test_power_failure_in_each_call_keeps_acknowledged_data(tmp_path: Path) -> None:
    ends = list(sweep(tmp_path, "3"))
    assert len(ends) > 100
    assert all(end.cut for end in ends)
    assert {end.landed for end in ends} == {True, False}, "both outcomes of a group in flight must occur"


@pytest.mark.parametrize("seed", range(60))
def test_power_failure_anywhere_keeps_acknowledged_data(seed: int, tmp_path: Path) -> None:
    cut_at = 1 + SeededRandomness(f"{seed}/cut").randrange(200)
    play(tmp_path, f"{seed}", cut_at)


def test_same_seed_gives_same_outcome(tmp_path: Path) -> None:
    ends = [[play(tmp_path / f"{turn}-{at}", "5", at) for at in range(40, 80)] for turn in range(2)]
    assert ends[0] == ends[1]


def test_disk_that_ignores_sync_is_detected(tmp_path: Path) -> None:
    """Control: on such a disk some acknowledged data is lost or damaged, and the checks report it."""
    noticed = set[str]()
    for seed in range(12):
        try:
            play(tmp_path / f"{seed}", f"{seed}", 0, lying=True)
        except (LostData, Corrupt) as error:
            noticed.add(type(error).__name__)
    assert "LostData" in noticed
    assert noticed <= {"LostData", "Corrupt"}
