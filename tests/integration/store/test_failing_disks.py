"""Stores on a full disk, on a read-only one, and with another owner. Real mounts and real processes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from remit.store.protocol import Commit, Committed, NoSpace, ReadOnly, StoreInUse
from remit.store.sqlite.backup import restore
from remit.store.sqlite.database_file import FILE_NAME
from remit.store.sqlite.directory_lock import LOCK_NAME, DirectoryLock
from tests.contracts.stores import put, run
from tests.integration.store.failing_disks import open_store, read_only_view, small_disk

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).resolve().parents[3]
HOLD = """
import asyncio, sys
from pathlib import Path
from tests.integration.store.failing_disks import open_store

async def hold():
    async with open_store(Path(sys.argv[1])):
        print("open", flush=True)
        await asyncio.sleep(600)

asyncio.run(hold())
"""


@pytest.mark.mounts
def test_full_disk_refuses_writes_until_space_is_freed(tmp_path: Path) -> None:
    """F11."""

    async def scenario(disk: Path) -> None:
        ballast = disk / "ballast"
        ballast.write_bytes(b"x" * (14 << 20))
        async with open_store(disk / "data") as store:
            kept: dict[str, int] = {}
            with pytest.raises(NoSpace, match="free space"):
                for n in range(1_000):
                    kept[f"k{n:04}"] = await put(store, (f"k{n:04}", b"v" * 50_000))
            assert len(kept) > 100
            last = f"k{len(kept):04}"
            now = await store.revision()
            assert now == max(kept.values())
            for _ in range(5):
                with pytest.raises(NoSpace):
                    await put(store, (last, b"v" * 50_000))
            assert await store.get(last) is None
            assert {row.key: row.revision for row in (await store.range("k")).rows} == kept
            ballast.unlink()
            assert await put(store, (last, b"v" * 50_000)) == now + 1
            watch = await store.watch("k", after=now)
            assert (await anext(aiter(watch))).revision == now + 1
        async with open_store(disk / "data") as store:
            assert {row.key: row.revision for row in (await store.range("k")).rows} == {**kept, last: now + 1}

    with small_disk(tmp_path / "disk", "32m") as disk:
        run(scenario(disk))


@pytest.mark.mounts
def test_full_disk_refuses_waiting_commits_as_a_whole(tmp_path: Path) -> None:
    async def scenario(disk: Path) -> None:
        async with open_store(disk / "data") as store:
            commits = [Commit(puts=[(f"{n}/{part}", b"v" * 40_000) for part in range(4)]) for n in range(100)]
            answers = await asyncio.gather(*(store.commit(commit) for commit in commits), return_exceptions=True)
            there = {row.key.split("/")[0] for row in (await store.range("")).rows} - {"head"}
            answered = {str(n) for n, answer in enumerate(answers) if isinstance(answer, Committed)}
            assert there == answered
            assert all(isinstance(answer, (Committed, NoSpace)) for answer in answers)
            assert 0 < len(answered) < 100
            rows = (await store.range("")).rows
            assert len(rows) == 1 + 4 * len(answered)

    with small_disk(tmp_path / "disk", "12m") as disk:
        run(scenario(disk))


@pytest.mark.mounts
def test_compaction_reuses_space_beyond_disk_size(tmp_path: Path) -> None:
    async def scenario(disk: Path) -> None:
        async with open_store(disk / "data") as store:
            for round_ in range(400):
                await put(store, ("same", b"v" * 60_000))
                if round_ % 20 == 19:
                    await store.compact(await store.revision())
            wal = (disk / "data" / f"{FILE_NAME}-wal").stat().st_size
            assert wal < 16 << 20
            row = await store.get("same")
            assert row is not None

    with small_disk(tmp_path / "disk", "32m") as disk:
        run(scenario(disk))


@pytest.mark.mounts
def test_backup_without_space_fails_and_leaves_no_partial_file(tmp_path: Path) -> None:
    async def scenario(disk: Path) -> None:
        async with open_store(tmp_path / "data") as store:
            for n in range(60):
                revision = await put(store, (f"k{n}", b"v" * 50_000))
            with pytest.raises(NoSpace, match="free space"):
                await store.backup(disk / "backup.sqlite")
            assert await put(store, ("after", b"")) == revision + 1
            await store.backup(tmp_path / "backup.sqlite")

    with small_disk(tmp_path / "disk", "1m") as disk:
        run(scenario(disk))
        assert list(disk.iterdir()) == []


@pytest.mark.mounts
def test_read_only_directory_is_reported_and_unchanged(tmp_path: Path) -> None:
    async def fill() -> None:
        async with open_store(tmp_path / "data") as store:
            await put(store, ("a", b"1"))

    async def refused(view: Path) -> None:
        with pytest.raises(ReadOnly, match="make it writable, or use another --data directory"):
            async with open_store(view):
                pass
        with pytest.raises(ReadOnly, match="make it writable"):
            async with open_store(view / "deeper"):
                pass

    run(fill())
    before = (tmp_path / "data" / FILE_NAME).read_bytes()
    with read_only_view(tmp_path / "data", tmp_path / "view") as view:
        run(refused(view))
        with pytest.raises(ReadOnly):
            restore(tmp_path / "data" / FILE_NAME, view, incarnation="second")
    assert (tmp_path / "data" / FILE_NAME).read_bytes() == before


def test_second_owner_is_refused_also_in_same_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_store(tmp_path) as store:
            revision = await put(store, ("a", b"1"))
            with pytest.raises(StoreInUse, match="stop it, or use another --data directory") as caught:
                async with open_store(tmp_path):
                    pass
            assert caught.value.pid == os.getpid()
            with pytest.raises(StoreInUse):
                restore(tmp_path / FILE_NAME, tmp_path, incarnation="second")
            assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
            assert await put(store, ("a", b"2")) == revision + 1
        async with open_store(tmp_path) as store:
            assert await store.get("a") is not None

    run(scenario())


def test_owner_process_is_named_and_its_death_frees_store(tmp_path: Path) -> None:
    """F02."""

    async def refused(pid: int) -> None:
        with pytest.raises(StoreInUse, match=f"in use by process {pid};") as caught:
            async with open_store(tmp_path):
                pass
        assert caught.value.pid == pid

    async def free() -> None:
        async with open_store(tmp_path) as store:
            assert store.position.head.epoch == 2

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"open\n"
            run(refused(process.pid))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    run(free())


def test_lock_file_removed_while_waiting_is_recreated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused restore removes its own lock file: a lock on that file would exclude nothing."""
    path, first, flock = tmp_path / LOCK_NAME, DirectoryLock(tmp_path), fcntl.flock

    def late(fd: int, how: int) -> None:
        first.undo()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    second = DirectoryLock(tmp_path)
    assert path.read_text() == f"{os.getpid()}\n"
    with pytest.raises(StoreInUse):
        DirectoryLock(tmp_path)
    second.undo()
    assert not path.exists()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_files_created_by_remit_are_private_to_owner(tmp_path: Path, umask: int) -> None:
    """Rows hold what tenants declare; backups and files set aside by a restore hold the same."""
    data, backup = tmp_path / "deep" / "data", tmp_path / "backup.sqlite"

    async def fill() -> None:
        async with open_store(data) as store:
            await put(store, ("a", b"1"))
            assert {path.name for path in data.iterdir()} == {FILE_NAME, f"{FILE_NAME}-wal", LOCK_NAME}
            assert {oct(mode(path)) for path in data.iterdir()} == {"0o600"}
            await store.backup(backup)

    before = os.umask(umask)
    try:
        run(fill())
        assert (mode(data), mode(backup)) == (0o700, 0o600)
        assert mode(data.parent) == 0o777 & ~umask, "parent directories keep their mode"
        (data / FILE_NAME).chmod(0o644)  # as an older Remit created it
        restored = restore(backup, data, incarnation="second")
    finally:
        os.umask(before)
    assert restored.replaced is not None
    assert Path(restored.replaced.kept_at) in list(data.iterdir())
    assert {oct(mode(path)) for path in data.iterdir()} == {"0o600"}


def test_existing_directory_keeps_mode_and_leftover_draft_is_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_store(tmp_path / "data") as store:
            await put(store, ("a", b"1"))
            part = tmp_path / "backup.sqlite.part"
            part.write_bytes(b"left over")
            part.chmod(0o644)
            await store.backup(tmp_path / "backup.sqlite")

    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o750)
    (tmp_path / "data" / f"{FILE_NAME}.new").write_bytes(b"left over")
    (tmp_path / "data" / f"{FILE_NAME}.new").chmod(0o644)
    run(scenario())
    assert mode(tmp_path / "data") == 0o750
    assert mode(tmp_path / "data" / FILE_NAME) == mode(tmp_path / "backup.sqlite") == 0o600
