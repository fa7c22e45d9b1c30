"""What is left of a file after a power cut, byte by byte, and what can a dead process still do?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import apsw
import pytest

from remit.simulate.world import power_loss
from remit.simulate.world.power_loss import SECTOR_BYTES, PowerCut, TornDisk
from remit.store.protocol import Commit, Committed, StoreError, StoreInUse
from remit.store.sqlite.store import SqliteStore
from remit.world.randomness import SeededRandomness
from tests.unit.world.virtual_world import InlineOffload

SEEDS = 60
WAL = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
OLD, NEW = b"o" * SECTOR_BYTES * 6, b"n" * SECTOR_BYTES * 6


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[TornDisk]:
    with TornDisk(tmp_path / "disk") as disk:
        yield disk


def opened(path: Path) -> apsw.VFSFile:
    path.with_name(path.name.removesuffix("-wal")).touch()  # SQLite makes a journal with the mode of its database
    return apsw.VFSFile("remit-torn", str(path), [WAL, 0])


def forced(path: Path, content: bytes) -> apsw.VFSFile:
    file = opened(path)
    file.xTruncate(0)
    file.xWrite(content, 0)
    file.xSync(apsw.SQLITE_SYNC_NORMAL)
    return file


def test_what_was_forced_stays_and_the_rest_is_torn_by_sectors(disk: TornDisk) -> None:
    path, found = disk.directory / "file-wal", set[bytes]()
    for seed in range(SEEDS):
        file = forced(path, OLD)
        file.xWrite(NEW[: 2 * SECTOR_BYTES], SECTOR_BYTES)
        file.xWrite(b"m" * SECTOR_BYTES, SECTOR_BYTES)
        disk.crash(SeededRandomness(f"{seed}"))
        file.xClose()
        content = path.read_bytes()
        assert len(content) == len(OLD)
        assert content[:SECTOR_BYTES] == OLD[:SECTOR_BYTES]
        assert content[3 * SECTOR_BYTES :] == OLD[3 * SECTOR_BYTES :]
        sectors = [content[at * SECTOR_BYTES : (at + 1) * SECTOR_BYTES] for at in (1, 2)]
        assert all(sector == sector[:1] * SECTOR_BYTES for sector in sectors)
        found.add(sectors[0][:1] + sectors[1][:1])
    assert found == {b"oo", b"on", b"no", b"nn", b"mo", b"mn"}


@pytest.mark.parametrize(("before", "after"), [(OLD, OLD + NEW), (OLD + NEW, OLD), (OLD, b"")])
def test_a_length_that_was_not_forced_is_anything_between(disk: TornDisk, before: bytes, after: bytes) -> None:
    path, lengths = disk.directory / "file-wal", set[int]()
    for seed in range(SEEDS):
        file = forced(path, before)
        if len(after) > len(before):
            file.xWrite(after[len(before) :], len(before))
        else:
            file.xTruncate(len(after))
        disk.crash(SeededRandomness(f"{seed}"))
        file.xClose()
        content = path.read_bytes()
        lengths.add(len(content))
        shared = min(len(before), len(after), len(content))
        assert content[:shared] == before[:shared]
        if len(after) < len(before):
            assert content == before[: len(content)]
        else:
            assert set(content[len(before) :]) <= set(b"n\0")
    assert {len(before), len(after)} < lengths
    assert all(min(len(before), len(after)) <= length <= max(len(before), len(after)) for length in lengths)


def test_a_name_lasts_once_it_was_forced(disk: TornDisk) -> None:
    made, kept, removed = (disk.directory / name for name in ("made-wal", "kept-wal", "removed-wal"))
    after = set[tuple[bool, bool]]()
    for seed in range(SEEDS):
        for path in (made, kept, removed):
            path.unlink(missing_ok=True)
        files = [forced(kept, OLD), forced(removed, OLD)]
        _delete(removed)
        files.append(opened(made))
        assert made.exists()
        assert not removed.exists()
        disk.crash(SeededRandomness(f"{seed}"))
        for file in files:
            file.xClose()
        assert kept.read_bytes() == OLD
        if removed.exists():
            assert removed.read_bytes() == OLD
        after.add((made.exists(), removed.exists()))
    assert after == {(False, False), (False, True), (True, False), (True, True)}


def test_a_removal_is_settled_when_the_next_journal_is_forced(disk: TornDisk) -> None:
    first, second = disk.directory / "first-wal", disk.directory / "second-wal"
    for seed in range(SEEDS // 4):
        files = [forced(first, OLD)]
        _delete(first)
        files.append(forced(second, NEW))
        disk.crash(SeededRandomness(f"{seed}"))
        for file in files:
            file.xClose()
        assert not first.exists()
        assert second.read_bytes() == NEW


def _delete(path: Path) -> None:
    """As SQLite does it: through the layer."""
    power_loss._registered_vfs[0].xDelete(str(path), False)


def test_a_killed_process_leaves_what_it_wrote_and_a_later_cut_may_take_it(disk: TornDisk) -> None:
    path, found = disk.directory / "file-wal", set[bytes]()
    for seed in range(SEEDS // 4):
        file = forced(path, OLD)
        file.xWrite(NEW, 0)
        disk.kill()
        assert path.read_bytes() == NEW
        with pytest.raises(PowerCut):
            file.xWrite(OLD, 0)
        with pytest.raises(PowerCut):
            file.xSync(apsw.SQLITE_SYNC_NORMAL)
        assert path.read_bytes() == NEW
        opened(path).xClose()
        disk.crash(SeededRandomness(f"{seed}"))
        file.xClose()
        found.add(path.read_bytes())
    assert {OLD, NEW} < found


def test_the_power_goes_in_the_call_that_was_named(disk: TornDisk) -> None:
    file, told = forced(disk.directory / "file-wal", OLD), list[str]()
    disk.cut_after(2, lambda: told.append("dark"))
    file.xWrite(NEW, 0)
    assert not told
    with pytest.raises(PowerCut):
        file.xSync(apsw.SQLITE_SYNC_NORMAL)
    assert told == ["dark"]
    with pytest.raises(PowerCut):
        file.xRead(1, 0)
    with pytest.raises(PowerCut):
        opened(disk.directory / "other-wal")
    disk.crash(SeededRandomness("1"))
    opened(disk.directory / "other-wal").xClose()
    file.xClose()
    with pytest.raises(ValueError, match="not 0"):
        disk.cut_after(0)


def test_one_seed_is_one_crash(tmp_path: Path) -> None:
    def after(place: str, seed: str) -> bytes:
        with TornDisk(tmp_path / place) as disk:
            path = disk.directory / "file-wal"
            file = forced(path, OLD * 20)
            for at in range(40):
                file.xWrite(bytes([at]) * 700, at * 900)
            disk.crash(SeededRandomness(seed))
            file.xClose()
            return path.read_bytes()

    seeds = [f"{seed}" for seed in range(10)]
    first, second = ([after(f"{turn}-{seed}", seed) for seed in seeds] for turn in ("a", "b"))
    assert first == second
    assert len(set(first)) > 3, "kept, lost, and more than one mixture"


def test_files_elsewhere_are_left_alone(disk: TornDisk, tmp_path: Path) -> None:
    db = apsw.Connection(str(tmp_path / "elsewhere.sqlite"))
    try:
        disk.cut_after(1)
        db.execute("CREATE TABLE t(x); INSERT INTO t VALUES(1)")
        assert disk.calls == 0
        disk.crash(SeededRandomness("1"))
        assert db.execute("SELECT x FROM t").get == 1
    finally:
        db.close()


def test_the_layer_is_gone_with_the_last_disk_unless_somebody_still_uses_it(tmp_path: Path) -> None:
    def layers() -> str:
        db = apsw.Connection(str(tmp_path / "asked.sqlite"))
        try:
            return str(db.vfsname("main"))
        finally:
            db.close()

    with TornDisk(tmp_path / "one"), TornDisk(tmp_path / "two"):
        assert "_PassThroughFile" in layers()
        left_open = apsw.Connection(str(tmp_path / "elsewhere.sqlite"))
    left_open.execute("CREATE TABLE t(x)")
    assert "_PassThroughFile" in layers()
    left_open.close()
    with TornDisk(tmp_path / "one"):
        pass
    assert "_PassingFile" not in layers()
    assert "cksm" in layers()


def test_a_dead_store_can_do_nothing_and_the_next_one_owns_the_place(disk: TornDisk) -> None:
    async def scene() -> None:
        dead = await SqliteStore.open(disk.directory, offload=InlineOffload(), holder="me", incarnation="one")
        assert isinstance(await dead.commit(Commit(puts=(("a", b"1"),))), Committed)
        with pytest.raises(StoreInUse):
            await SqliteStore.open(disk.directory, offload=InlineOffload(), holder="other", incarnation="one")
        disk.crash(SeededRandomness("1"))
        store = await SqliteStore.open(disk.directory, offload=InlineOffload(), holder="me", incarnation="one")
        with pytest.raises(StoreError):
            await dead.commit(Commit(puts=(("a", b"2"),)))
        with pytest.raises(StoreError):
            await dead.get("a")
        with suppress(StoreError):
            await dead.close()
        assert isinstance(await store.commit(Commit(puts=(("b", b"3"),))), Committed)
        found = await store.get("a")
        assert found is not None
        assert found.value == b"1"
        await store.close()

    asyncio.run(scene())


def test_the_checksums_are_above_the_tearing(disk: TornDisk) -> None:
    """A byte that is wrong below the shim is noticed by it."""

    async def scene() -> None:
        store = await SqliteStore.open(disk.directory, offload=InlineOffload(), holder="me", incarnation="one")
        for number in range(200):
            await store.commit(Commit(puts=((f"key/{number:03}", b"x" * 1_000),)))
        await store.close()

    asyncio.run(scene())
    path = disk.directory / "store.sqlite"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    db = apsw.Connection(str(path))
    try:
        with pytest.raises(apsw.IOError) as caught:
            list(db.execute("SELECT * FROM log"))
        assert getattr(caught.value, "extendedresult", 0) == apsw.SQLITE_IOERR_DATA
    finally:
        db.close()
