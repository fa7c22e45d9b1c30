"""Is a copy of a store that somebody owns one state of it, whatever the owner does meanwhile, and does he notice nothing?"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from remit.store.protocol import Commit, Corrupt, Unavailable
from remit.store.sqlite.database_file import FILE_NAME, DatabaseFile, create_database
from remit.store.sqlite.offline_reader import OfflineReader, StoreNotFound

WRITER = """
import sys
from pathlib import Path
from remit.store.sqlite import database_file as files
from remit.store.protocol import Commit
from remit.store.sqlite.maintenance import Maintenance

path = Path(sys.argv[1])
files.create_database(path)
made = files.DatabaseFile(path)
maintenance = Maintenance(made)
print("ready", flush=True)
count = 0
while sys.stdin is not None:
    count += 1
    value = str(count).encode()
    rows = [(f"many/{count % 50:03}/{n}", value * 200) for n in range(20)]
    made.write([Commit(puts=(("first", value), *rows, ("last", value)))])
    if count % 20 == 0:
        made.checkpoint()
    if maintenance.is_due():
        maintenance.step(500)
"""


def test_while_it_is_written_every_copy_is_one_state(tmp_path: Path) -> None:
    """The owner commits, carries its log over and begins it anew as fast as it can. Its file grows with every commit, so on a
    busy machine copies take ever longer: enough is enough.
    """
    data = tmp_path / "data"
    data.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(data / FILE_NAME)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    seen, missed, until = list[int](), 0, time.monotonic() + 8
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        for _ in range(60):
            if time.monotonic() > until and len(set(seen)) > 5:
                break
            scratch = tmp_path / "copy"
            scratch.mkdir()
            try:
                with OfflineReader(data, scratch) as glimpse:
                    first, last = glimpse.get("first"), glimpse.get("last")
                    assert (first is None) == (last is None)
                    if first is not None and last is not None:
                        assert (first.value, first.revision) == (last.value, last.revision)
                        assert glimpse.revision == first.revision
                        rows = list(glimpse.rows("many/"))
                        assert max(row.revision for row in rows) == glimpse.revision
                        assert all(int(row.value[: len(row.value) // 200]) == row.revision for row in rows)
                        seen.append(glimpse.revision)
            except Unavailable as error:
                assert "changes faster than it can be copied" in str(error)
                missed += 1
            shutil.rmtree(scratch)
        assert owner.poll() is None
    finally:
        owner.kill()
        owner.communicate()
    assert seen == sorted(seen)
    assert len(set(seen)) > 5, (len(seen), missed)


@pytest.mark.smoke
def test_what_its_owner_left_is_read_and_not_touched(tmp_path: Path) -> None:
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    data.mkdir()
    scratch.mkdir()
    create_database(data / FILE_NAME)
    file = DatabaseFile(data / FILE_NAME)
    file.write([Commit(puts=(("a", b"1"), ("b", b"2")))])
    file.close()
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in data.iterdir()}
    with OfflineReader(data, scratch) as glimpse:
        assert [row.key for row in glimpse.rows("")] == ["a", "b"]
        assert glimpse.head() is None
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in data.iterdir()} == before


@pytest.mark.smoke
def test_a_log_that_was_left_behind_counts(tmp_path: Path) -> None:
    """The owner was killed: what it committed is in the log alone."""
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    data.mkdir()
    scratch.mkdir()
    text = WRITER.replace("while sys.stdin is not None:", "for _ in range(7):").replace("if count % 20 == 0:", "if False:")
    done = subprocess.run(
        [sys.executable, "-c", text + "\nimport os; os._exit(9)", str(data / FILE_NAME)], check=False, capture_output=True
    )
    assert done.returncode == 9
    assert (data / f"{FILE_NAME}-wal").stat().st_size > 0
    with OfflineReader(data, scratch) as glimpse:
        found = glimpse.get("last")
        assert found is not None and found.value == b"7"
    assert (data / f"{FILE_NAME}-wal").stat().st_size > 0


@pytest.mark.parametrize("made", ["nothing", "file", "empty", "text"])
def test_what_is_no_store_is_said_to_be_none(tmp_path: Path, made: str) -> None:
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    scratch.mkdir()
    if made == "file":
        data.write_text("x")
    elif made != "nothing":
        data.mkdir()
    if made == "text":
        (data / FILE_NAME).write_text("not a database" * 20)
    with pytest.raises(Corrupt if made == "text" else StoreNotFound) as caught:
        OfflineReader(data, scratch)
    assert str(data) in str(caught.value)
