"""SQLite maintenance: bounded file size, short slices, no loss when interrupted between slices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from remit.store.protocol import Commit, Row
from remit.store.sqlite import maintenance
from remit.store.sqlite.database_file import DatabaseFile, create_database, first_id
from remit.store.sqlite.maintenance import Maintenance, set_compacted, sweep


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"INDEX_SLICE_KEYS": 7, "SWEEP_SLICE_ROWS": 5, "SWEEP_READ_ROWS": 11, "SWEEP_KEYS_MAX": 13}.items():
        monkeypatch.setattr(maintenance, name, value)
    create_database(tmp_path / "store.sqlite")
    return tmp_path / "store.sqlite"


def fill(file: DatabaseFile, commits: int = 60) -> dict[str, Row]:
    for n in range(commits):
        deletes = [f"k{(n + 3) % 10}"] if n % 4 == 0 else []
        file.write([Commit(puts=[(f"k{n % 10}", b"%d" % n), (f"once/{n:03}", b"")], deletes=deletes)])
        if n % 9 == 0:
            file.write([Commit()])
    file.write([Commit(deletes=["once/000", "never"])])
    return everything(file)


def everything(file: DatabaseFile) -> dict[str, Row]:
    return {row.key: row for row in file.range("", "", 10_000, 0).rows}


def compaction(file: DatabaseFile, revision: int) -> Iterator[None]:
    set_compacted(file, revision)
    maintenance_run = Maintenance(file)
    while not maintenance_run.index_below(first_id(revision + 1)):
        yield
    yield from sweep(file)


def test_compaction_leaves_one_version_of_each_live_key(path: Path) -> None:
    file = DatabaseFile(path)
    rows = fill(file)
    for _ in compaction(file, file.revision):
        assert everything(file) == rows
    assert file.db.execute("SELECT count(*) FROM log").get == len(rows)
    assert file.db.execute("SELECT count(*) FROM keys").get == len(rows)
    assert file.recent.count == 0
    file.close()
    again = DatabaseFile(path)
    assert everything(again) == rows
    assert again.revision == file.revision
    again.close()


def test_interrupted_compaction_loses_nothing_and_is_finished_later(path: Path) -> None:
    cut, finished = 0, False
    rows: dict[str, Row] = {}
    while not finished:
        file = DatabaseFile(path)
        if not cut:
            rows = fill(file)
        assert everything(file) == rows
        slices = compaction(file, file.revision)
        for _ in range(cut):
            if next(slices, "end") == "end":
                finished = True
                break
        file.close()
        cut += 1
    assert cut > 10
    file = DatabaseFile(path)
    assert everything(file) == rows
    assert file.db.execute("SELECT count(*) FROM log").get == len(rows)
    assert file.db.execute("SELECT count(*) FROM keys").get == len(rows)
    file.close()


def test_freed_space_is_reused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    file, sizes = DatabaseFile(path), []
    for round_ in range(8):
        for n in range(200):
            file.write([Commit(puts=[(f"k{n % 20}", b"%d" % round_ * 1_000)])])
        for _ in compaction(file, file.revision):
            continue
        file.checkpoint()
        sizes.append(path.stat().st_size)
    file.close()
    assert sizes[-1] <= sizes[1] * 1.2, sizes


def test_indexing_keeps_up_with_writes_and_stays_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "RECENT_VERSIONS_MAX", 50)
    file = DatabaseFile(path)
    maintenance_run = Maintenance(file)
    counts = []
    for n in range(300):
        file.write([Commit(puts=[(f"k{n * 7919 % 500}/{m}", b"") for m in range(5)])])
        if maintenance_run.is_due():
            maintenance_run.step(5)
        counts.append(file.recent.count)
    assert max(counts) < 150
    assert len(everything(file)) == file.db.execute("SELECT count(DISTINCT key) FROM log").get
    file.close()


def test_key_rewritten_during_index_pass_is_read_at_new_value(path: Path) -> None:
    """The pass indexes the version it started with; the newer one must stay in memory, in order."""
    file = DatabaseFile(path)
    file.write([Commit(puts=[(f"k{n}", b"old") for n in range(6)])])
    walk = maintenance.IndexPass(file)
    assert not walk.step(2)
    file.write([Commit(puts=[("k1", b"new"), ("k4", b"new"), ("k9", b"new")], deletes=["k5"])])
    expected = {"k0": b"old", "k1": b"new", "k2": b"old", "k3": b"old", "k4": b"new", "k9": b"new"}
    for done in (False, True):
        assert {key: row.value for key, row in everything(file).items()} == expected
        assert walk.step(3 if not done else 100) is done
    assert {key: row.value for key, row in everything(file).items()} == expected
    assert file.recent.count == 4
    file.close()
