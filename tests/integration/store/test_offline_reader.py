"""A copy of a store in use is one consistent state, and copying does not disturb the owner."""

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


def test_every_copy_of_store_being_written_is_one_state(tmp_path: Path) -> None:
    """The owner commits, checkpoints and restarts its log as fast as possible. Its file grows with every commit, so that copies
    take ever longer on a busy machine: the test stops once it has enough.
    """
    data = tmp_path / "data"
    data.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(data / FILE_NAME)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    seen, failed_copies, until = list[int](), 0, time.monotonic() + 8
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        for _ in range(60):
            if time.monotonic() > until and len(set(seen)) > 5:
                break
            scratch = tmp_path / "copy"
            scratch.mkdir()
            try:
                with OfflineReader(data, scratch) as reader:
                    first, last = reader.get("first"), reader.get("last")
                    assert (first is None) == (last is None)
                    if first is not None and last is not None:
                        assert (first.value, first.revision) == (last.value, last.revision)
                        assert reader.revision == first.revision
                        rows = list(reader.rows("many/"))
                        assert max(row.revision for row in rows) == reader.revision
                        assert all(int(row.value[: len(row.value) // 200]) == row.revision for row in rows)
                        seen.append(reader.revision)
            except Unavailable as error:
                assert "changes faster than it can be copied" in str(error)
                failed_copies += 1
            shutil.rmtree(scratch)
        assert owner.poll() is None
    finally:
        owner.kill()
        owner.communicate()
    assert seen == sorted(seen)
    assert len(set(seen)) > 5, (len(seen), failed_copies)


@pytest.mark.smoke
def test_closed_store_is_read_without_being_changed(tmp_path: Path) -> None:
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    data.mkdir()
    scratch.mkdir()
    create_database(data / FILE_NAME)
    file = DatabaseFile(data / FILE_NAME)
    file.write([Commit(puts=(("a", b"1"), ("b", b"2")))])
    file.close()
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in data.iterdir()}
    with OfflineReader(data, scratch) as reader:
        assert [row.key for row in reader.rows("")] == ["a", "b"]
        assert reader.head() is None
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in data.iterdir()} == before


@pytest.mark.smoke
def test_remaining_log_of_killed_owner_is_read(tmp_path: Path) -> None:
    """The owner was killed: its commits are in the log only."""
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    data.mkdir()
    scratch.mkdir()
    text = WRITER.replace("while sys.stdin is not None:", "for _ in range(7):").replace("if count % 20 == 0:", "if False:")
    done = subprocess.run(
        [sys.executable, "-c", text + "\nimport os; os._exit(9)", str(data / FILE_NAME)], check=False, capture_output=True
    )
    assert done.returncode == 9
    assert (data / f"{FILE_NAME}-wal").stat().st_size > 0
    with OfflineReader(data, scratch) as reader:
        found = reader.get("last")
        assert found is not None and found.value == b"7"
    assert (data / f"{FILE_NAME}-wal").stat().st_size > 0


@pytest.mark.parametrize("contents", ["nothing", "file", "empty", "text"])
def test_directory_without_store_is_reported(tmp_path: Path, contents: str) -> None:
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    scratch.mkdir()
    if contents == "file":
        data.write_text("x")
    elif contents != "nothing":
        data.mkdir()
    if contents == "text":
        (data / FILE_NAME).write_text("not a database" * 20)
    with pytest.raises(Corrupt if contents == "text" else StoreNotFound) as caught:
        OfflineReader(data, scratch)
    assert str(data) in str(caught.value)
