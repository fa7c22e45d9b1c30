"""Files after simulated power loss, sector by sector, and what a killed process can still do."""

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


def open_file(path: Path) -> apsw.VFSFile:
    path.with_name(path.name.removesuffix("-wal")).touch()  # SQLite creates a journal with the mode of its database
    return apsw.VFSFile("remit-torn", str(path), [WAL, 0])


def synced_file(path: Path, content: bytes) -> apsw.VFSFile:
    file = open_file(path)
    file.xTruncate(0)
    file.xWrite(content, 0)
    file.xSync(apsw.SQLITE_SYNC_NORMAL)
    return file


def test_synced_content_stays_and_unsynced_content_is_torn_by_sector(disk: TornDisk) -> None:
    path, found = disk.directory / "file-wal", set[bytes]()
    for seed in range(SEEDS):
        file = synced_file(path, OLD)
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
def test_unsynced_length_may_be_anything_between(disk: TornDisk, before: bytes, after: bytes) -> None:
    path, lengths = disk.directory / "file-wal", set[int]()
    for seed in range(SEEDS):
        file = synced_file(path, before)
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


def test_file_name_is_durable_once_synced(disk: TornDisk) -> None:
    made, kept, removed = (disk.directory / name for name in ("made-wal", "kept-wal", "removed-wal"))
    after = set[tuple[bool, bool]]()
    for seed in range(SEEDS):
        for path in (made, kept, removed):
            path.unlink(missing_ok=True)
        files = [synced_file(kept, OLD), synced_file(removed, OLD)]
        _delete(removed)
        files.append(open_file(made))
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


def test_removal_is_durable_when_next_journal_is_synced(disk: TornDisk) -> None:
    first, second = disk.directory / "first-wal", disk.directory / "second-wal"
    for seed in range(SEEDS // 4):
        files = [synced_file(first, OLD)]
        _delete(first)
        files.append(synced_file(second, NEW))
        disk.crash(SeededRandomness(f"{seed}"))
        for file in files:
            file.xClose()
        assert not first.exists()
        assert second.read_bytes() == NEW


def _delete(path: Path) -> None:
    """Delete through the VFS, as SQLite does."""
    power_loss._registered_vfs[0].xDelete(str(path), False)


def test_killed_process_keeps_its_writes_until_power_loss(disk: TornDisk) -> None:
    path, found = disk.directory / "file-wal", set[bytes]()
    for seed in range(SEEDS // 4):
        file = synced_file(path, OLD)
        file.xWrite(NEW, 0)
        disk.kill()
        assert path.read_bytes() == NEW
        with pytest.raises(PowerCut):
            file.xWrite(OLD, 0)
        with pytest.raises(PowerCut):
            file.xSync(apsw.SQLITE_SYNC_NORMAL)
        assert path.read_bytes() == NEW
        open_file(path).xClose()
        disk.crash(SeededRandomness(f"{seed}"))
        file.xClose()
        found.add(path.read_bytes())
    assert {OLD, NEW} < found


def test_power_is_cut_in_chosen_call(disk: TornDisk) -> None:
    file, cuts = synced_file(disk.directory / "file-wal", OLD), list[str]()
    disk.cut_after(2, lambda: cuts.append("dark"))
    file.xWrite(NEW, 0)
    assert not cuts
    with pytest.raises(PowerCut):
        file.xSync(apsw.SQLITE_SYNC_NORMAL)
    assert cuts == ["dark"]
    with pytest.raises(PowerCut):
        file.xRead(1, 0)
    with pytest.raises(PowerCut):
        open_file(disk.directory / "other-wal")
    disk.crash(SeededRandomness("1"))
    open_file(disk.directory / "other-wal").xClose()
    file.xClose()
    with pytest.raises(ValueError, match="not 0"):
        disk.cut_after(0)


def test_seed_determines_contents_after_crash(tmp_path: Path) -> None:
    def after(place: str, seed: str) -> bytes:
        with TornDisk(tmp_path / place) as disk:
            path = disk.directory / "file-wal"
            file = synced_file(path, OLD * 20)
            for at in range(40):
                file.xWrite(bytes([at]) * 700, at * 900)
            disk.crash(SeededRandomness(seed))
            file.xClose()
            return path.read_bytes()

    seeds = [f"{seed}" for seed in range(10)]
    first, second = ([after(f"{turn}-{seed}", seed) for seed in seeds] for turn in ("a", "b"))
    assert first == second
    assert len(set(first)) > 3, "kept, lost and several mixtures occur"


def test_files_elsewhere_are_not_affected(disk: TornDisk, tmp_path: Path) -> None:
    db = apsw.Connection(str(tmp_path / "elsewhere.sqlite"))
    try:
        disk.cut_after(1)
        db.execute("CREATE TABLE t(x); INSERT INTO t VALUES(1)")
        assert disk.calls == 0
        disk.crash(SeededRandomness("1"))
        assert db.execute("SELECT x FROM t").get == 1
    finally:
        db.close()


def test_vfs_is_unregistered_with_last_disk_unless_in_use(tmp_path: Path) -> None:
    def vfs_names() -> str:
        db = apsw.Connection(str(tmp_path / "asked.sqlite"))
        try:
            return str(db.vfsname("main"))
        finally:
            db.close()

    with TornDisk(tmp_path / "one"), TornDisk(tmp_path / "two"):
        assert "_PassThroughFile" in vfs_names()
        left_open = apsw.Connection(str(tmp_path / "elsewhere.sqlite"))
    left_open.execute("CREATE TABLE t(x)")
    assert "_PassThroughFile" in vfs_names()
    left_open.close()
    with TornDisk(tmp_path / "one"):
        pass
    assert "_PassingFile" not in vfs_names()
    assert "cksm" in vfs_names()


def test_crashed_store_is_unusable_and_next_one_owns_directory(disk: TornDisk) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_checksums_detect_damage_below_torn_vfs(disk: TornDisk) -> None:
    """A byte changed below the VFS shim is detected by it."""

    async def scenario() -> None:
        store = await SqliteStore.open(disk.directory, offload=InlineOffload(), holder="me", incarnation="one")
        for number in range(200):
            await store.commit(Commit(puts=((f"key/{number:03}", b"x" * 1_000),)))
        await store.close()

    asyncio.run(scenario())
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
