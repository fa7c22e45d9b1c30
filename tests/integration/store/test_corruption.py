"""Damage is noticed, reported and never served as data. Bytes are flipped in real files, and SQLite's file layer fails."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from remit.store import chain
from remit.store.protocol import (
    HEAD,
    Commit,
    CommitOutcomeUnknown,
    Committed,
    Corrupt,
    NewerSchema,
    Row,
    StoreError,
    Unavailable,
)
from remit.store.sqlite import maintenance
from remit.store.sqlite.backup import restore
from remit.store.sqlite.database_file import FILE_NAME, SCHEMA
from remit.store.sqlite.store import SqliteStore
from tests.contracts.stores import put, run
from tests.integration.store.failing_disks import failing_files, open_store

pytestmark = pytest.mark.smoke

PAGE = 8192


async def create_filled(directory: Path, rows: int = 400) -> dict[str, Row]:
    """A store whose rows are all in the database file: indexed, and its write-ahead log checkpointed by closing."""
    async with open_store(directory) as store:
        for n in range(rows):
            await put(store, (f"key/{n:05}", b"needle-%05d" % n * 20))
        await store.compact(await store.revision())
        return {row.key: row for row in (await store.range("key/")).rows}


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


async def read_all(directory: Path, rows: dict[str, Row]) -> list[StoreError]:
    """Open the store and read every row. An answer must be right, and everything else an error."""
    errors: list[StoreError] = []
    try:
        async with open_store(directory) as store:
            for key, row in rows.items():
                try:
                    assert await store.get(key) == row
                except StoreError as error:
                    errors.append(error)
            if errors:
                with pytest.raises(Corrupt):
                    await put(store, ("more", b""))
    except StoreError as error:
        errors.append(error)
    return errors


def assert_corrupt_with_fix(errors: list[StoreError]) -> None:
    assert errors
    for error in errors:
        assert type(error) is Corrupt, repr(error)
        assert "restore a backup" in str(error)


@pytest.mark.parametrize("text", [b"needle-00123", b"key/00123"])
def test_flipped_byte_in_row_is_noticed(tmp_path: Path, text: bytes) -> None:
    """F13."""
    rows = run(create_filled(tmp_path))
    content = (tmp_path / FILE_NAME).read_bytes()
    places = [at for at in range(len(content)) if content.startswith(text, at)]
    assert places
    for at in places[:1] + places[-1:]:
        flip(tmp_path / FILE_NAME, at)
        assert_corrupt_with_fix(run(read_all(tmp_path, rows)))
        flip(tmp_path / FILE_NAME, at)
    assert run(read_all(tmp_path, rows)) == []


def test_flipped_byte_on_any_page_is_noticed_or_harmless(tmp_path: Path) -> None:
    """F13."""
    rows = run(create_filled(tmp_path / "sound", rows=150))
    size = (tmp_path / "sound" / FILE_NAME).stat().st_size
    noticed = 0
    for page in range(size // PAGE):
        shutil.copytree(tmp_path / "sound", tmp_path / "hurt")
        flip(tmp_path / "hurt" / FILE_NAME, page * PAGE + 200 + 37 * page % 7_900)
        if errors := run(read_all(tmp_path / "hurt", rows)):
            assert_corrupt_with_fix(errors)
            noticed += 1
        shutil.rmtree(tmp_path / "hurt")
    assert noticed >= 3


def test_zeroed_page_is_noticed(tmp_path: Path) -> None:
    rows = run(create_filled(tmp_path))
    with (tmp_path / FILE_NAME).open("r+b") as file:
        at = (tmp_path / FILE_NAME).read_bytes().find(b"needle-00200") // PAGE * PAGE
        file.seek(at)
        file.write(b"\0" * PAGE)
    assert_corrupt_with_fix(run(read_all(tmp_path, rows)))


def test_truncated_file_is_noticed(tmp_path: Path) -> None:
    rows = run(create_filled(tmp_path))
    with (tmp_path / FILE_NAME).open("r+b") as file:
        file.truncate(PAGE * 6)
    assert_corrupt_with_fix(run(read_all(tmp_path, rows)))


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 100, b"SQLite format 3\0" + b"\0" * 200])
def test_file_that_is_no_store_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert_corrupt_with_fix(run(read_all(tmp_path, {})))
    assert (tmp_path / FILE_NAME).read_bytes() == content


def test_missing_database_with_remaining_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"{FILE_NAME}-wal").write_bytes(b"left behind")
    assert_corrupt_with_fix(run(read_all(tmp_path, {})))
    assert not (tmp_path / FILE_NAME).exists()


def test_newer_schema_is_refused_and_files_untouched(tmp_path: Path) -> None:
    run(create_filled(tmp_path))
    path = tmp_path / FILE_NAME
    with path.open("r+b") as file:
        file.seek(60)
        file.write((SCHEMA + 1).to_bytes(4, "big"))
    before = {place.name: place.read_bytes() for place in tmp_path.iterdir()}

    async def refused() -> None:
        with pytest.raises(NewerSchema, match="nothing was changed: upgrade Remit"):
            async with open_store(tmp_path):
                pass

    run(refused())
    (tmp_path / "other").mkdir()
    with pytest.raises(NewerSchema, match="upgrade Remit"):
        restore(path, tmp_path / "other", incarnation="second")
    after = {place.name: place.read_bytes() for place in tmp_path.iterdir() if place.is_file()}
    assert {**after, "owner": b""} == {**before, "owner": b""}


def test_damaged_backup_does_not_replace_intact_store(tmp_path: Path) -> None:
    rows = run(create_filled(tmp_path / "data"))
    backup = tmp_path / "backup.sqlite"
    shutil.copy(tmp_path / "data" / FILE_NAME, backup)
    flip(backup, backup.read_bytes().find(b"needle-00123"))
    with pytest.raises(Corrupt, match="the store was not changed: use another backup"):
        restore(backup, tmp_path / "data", incarnation="second")
    assert run(read_all(tmp_path / "data", rows)) == []
    assert {place.name for place in (tmp_path / "data").iterdir()} == {FILE_NAME, "owner"}


@pytest.mark.parametrize("place", ["data", "data/deeper/still", "there", "owned"])
def test_damaged_backup_leaves_nothing_at_restore_target(tmp_path: Path, place: str) -> None:
    run(create_filled(tmp_path))
    backup = tmp_path / FILE_NAME
    flip(backup, backup.read_bytes().find(b"needle-00123"))
    (tmp_path / "there").mkdir()
    (tmp_path / "owned").mkdir()
    (tmp_path / "owned" / "owner").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Corrupt, match="use another backup"):
        restore(backup, tmp_path / place, incarnation="second")
    assert sorted(tmp_path.rglob("*")) == before


def test_damaged_store_is_replaced_by_restore_and_kept_aside(tmp_path: Path) -> None:
    rows = run(create_filled(tmp_path / "data"))
    backup = tmp_path / "backup.sqlite"
    shutil.copy(tmp_path / "data" / FILE_NAME, backup)
    damaged = b"no database any more" * 1_000
    (tmp_path / "data" / FILE_NAME).write_bytes(damaged)
    (tmp_path / "data" / f"{FILE_NAME}-wal").write_bytes(b"its log")
    restored = restore(backup, tmp_path / "data", incarnation="second")
    assert restored.replaced is not None
    assert restored.replaced.revision is None
    assert "not a SQLite database" in restored.replaced.unreadable
    assert Path(restored.replaced.kept_at).read_bytes() == damaged
    assert Path(restored.replaced.kept_at + "-wal").read_bytes() == b"its log"
    assert run(read_all(tmp_path / "data", rows)) == []


# The disk fails under an open store


async def settle_one(store: SqliteStore, place: chain.ChainPosition, value: bytes) -> chain.ChainPosition:
    """Write one batch of the chain as an authority does; a lost answer is settled."""
    pairs = (("settled", value),)
    head = chain.advance(place.head, pairs, ())
    try:
        answer = await store.commit(chain.batch(place, head, pairs))
    except CommitOutcomeUnknown:
        settled = await chain.settle(store, place, head)
        assert isinstance(settled, chain.ChainPosition)
        return settled
    assert isinstance(answer, Committed)
    return chain.ChainPosition(head, answer.revision)


@pytest.mark.parametrize("call", ["wal sync", "wal write"])
def test_disk_error_during_commit_is_outcome_unknown_and_settled_by_chain(tmp_path: Path, call: str) -> None:
    """F01, F12."""

    async def scenario() -> None:
        with failing_files() as faults:
            async with open_store(tmp_path) as store:
                first = await put(store, ("a", b"1"))
                faults.arm(call)
                with pytest.raises(CommitOutcomeUnknown, match="settle the commit, and check the disk"):
                    await put(store, ("a", b"2"))
                assert faults.failed_calls == [call]
                row = await store.get("a")
                assert row is not None
                assert row.value in (b"1", b"2")
                faults.arm(call)
                place = await settle_one(store, store.position, b"3")
                assert await chain.read_position(store) == place
                place = await settle_one(store, place, b"4")
                last = await put(store, ("a", b"5"))
                assert last > first
            async with open_store(tmp_path) as store:
                assert await store.get("a") == Row("a", b"5", last)
                row = await store.get("settled")
                assert row is not None
                assert row.value == b"4"

    run(scenario())


def test_disk_error_fails_every_commit_of_group(tmp_path: Path) -> None:
    async def scenario() -> None:
        with failing_files() as faults:
            async with open_store(tmp_path) as store:
                faults.arm("wal sync")
                commits = [Commit(puts=((f"k{n}", b""),)) for n in range(10)]
                answers = await asyncio.gather(*(store.commit(commit) for commit in commits), return_exceptions=True)
                assert [type(answer) for answer in answers] == [CommitOutcomeUnknown] * 10
                assert faults.failed_calls == ["wal sync"], "one group, one fsync"
                assert await put(store, ("after", b"")) == store.position.revision + 1

    run(scenario())


def test_disk_error_during_checkpoint_loses_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "WAL_PAGES_DUE", 4)

    async def scenario() -> None:
        with failing_files() as faults:
            async with open_store(tmp_path) as store:
                kept = {}
                for n in range(60):
                    if n % 10 == 0:
                        faults.arm(("db sync", "db write")[n // 10 % 2])
                    kept[f"k{n}"] = await put(store, (f"k{n}", b"v" * 9_000))
                assert len(faults.failed_calls) >= 4
            async with open_store(tmp_path) as store:
                assert {row.key: row.revision for row in (await store.range("k")).rows} == kept

    run(scenario())


def test_disk_error_during_read_is_unavailable_and_later_read_works(tmp_path: Path) -> None:
    async def scenario() -> None:
        rows = await create_filled(tmp_path)
        with failing_files() as faults:
            async with open_store(tmp_path) as store:
                faults.arm("db read")
                with pytest.raises(Unavailable, match="check the disk"):
                    await store.range("key/")
                assert {row.key: row for row in (await store.range("key/")).rows} == rows
                assert await store.get(HEAD) is not None

    run(scenario())
