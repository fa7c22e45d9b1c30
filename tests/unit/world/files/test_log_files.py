"""Log files that work appends to: rotated to a size, without following links or returning bytes twice."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from remit.world.files.log_files import FileLogFiles
from remit.world.interfaces import FileMissing, LogChunk

LOG_FILES = FileLogFiles()


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_reader_continues_across_rotations_without_loss(tmp_path: Path) -> None:
    out = os.open(tmp_path / "a.out", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        received, at = b"", 0
        for n in range(50):
            os.write(out, b"line %03d\n" % n)
            cut = LOG_FILES.rotate(tmp_path, "a.out", bytes_max=60, rotated_max=2)
            assert cut == (n % 7 == 6)
            if n % 5 == 0:
                while (piece := LOG_FILES.read(tmp_path, "a.out", at, 13)).data:
                    assert piece.start == at, "nothing was skipped"
                    received, at = received + piece.data, at + len(piece.data)
    finally:
        os.close(out)
    assert received == b"".join(b"line %03d\n" % n for n in range(46))
    assert names(tmp_path) == ["a.out", "a.out@0000000000000315", "a.out@0000000000000378"]
    assert LOG_FILES.span(tmp_path, "a.out") == (315, 450)
    assert LOG_FILES.read(tmp_path, "a.out", 0, 9) == LogChunk(315, b"line 035\n"), "deleted data is skipped"
    assert LOG_FILES.read(tmp_path, "a.out", 10**9, 9) == LogChunk(450, b"")


def test_rotation_during_fast_writes_keeps_lines_complete_and_ordered(tmp_path: Path) -> None:
    out = os.open(tmp_path / "a.out", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    finished = threading.Event()

    def write() -> None:
        for n in range(30_000):
            os.write(out, b"%07d\n" % n)
        finished.set()

    writer = threading.Thread(target=write)
    writer.start()
    received, at = b"", 0
    while True:
        last = finished.is_set()
        LOG_FILES.rotate(tmp_path, "a.out", bytes_max=30_000, rotated_max=3)
        while (piece := LOG_FILES.read(tmp_path, "a.out", at, 1 << 20)).data:
            received, at = received + piece.data, piece.start + len(piece.data)
        if last:
            break
    writer.join()
    os.close(out)
    lines = received.splitlines()
    assert all(len(line) == 7 for line in lines)
    assert lines == sorted(set(lines))
    assert len(lines) > 15_000, "only lines written during a rotation may be lost"


def test_links_pipes_and_directories_are_neither_read_nor_rotated(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret" * 100)
    place = tmp_path / "logs"
    place.mkdir()
    (place / "a.out").symlink_to(secret)
    os.mkfifo(place / "b.out")
    (place / "c.out").mkdir()
    for name in ("a.out", "b.out", "c.out", "d.out"):
        assert not LOG_FILES.rotate(place, name, bytes_max=0, rotated_max=1)
        with pytest.raises(FileMissing):
            LOG_FILES.span(place, name)
        with pytest.raises(FileMissing):
            LOG_FILES.read(place, name, 0, 10)
    (place / "e.out").write_text("mine")
    (place / "e.out@0000000000000000").symlink_to(secret)
    (place / ".e.out.copying").symlink_to(secret)
    assert LOG_FILES.read(place, "e.out", 0, 100).data == b"mine"
    assert LOG_FILES.rotate(place, "e.out", bytes_max=3, rotated_max=1)
    assert secret.read_text() == "secret" * 100
    assert (place / "e.out@0000000000000000").read_text() == "mine"
    (tmp_path / "elsewhere").symlink_to(place)
    with pytest.raises(FileMissing):
        LOG_FILES.span(tmp_path / "elsewhere", "e.out")


def test_sparse_hole_is_not_copied(tmp_path: Path) -> None:
    """A writer that does not append leaves a hole when its file is truncated; a hostile one creates one."""
    with (tmp_path / "a.out").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"the end")
    assert LOG_FILES.rotate(tmp_path, "a.out", bytes_max=1_000, rotated_max=1)
    [piece] = [path for path in tmp_path.iterdir() if "@" in path.name]
    assert piece.stat().st_size < 3_000
    assert piece.read_bytes().endswith(b"the end")


def test_rotation_on_full_disk_drops_content_instead_of_filling_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.out").write_text("x" * 100)

    def full(*_: object) -> int:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("remit.world.files.log_files.os.write", full)
    assert LOG_FILES.rotate(tmp_path, "a.out", bytes_max=10, rotated_max=1)
    assert names(tmp_path) == ["a.out"]
    assert (tmp_path / "a.out").read_bytes() == b""


def test_prune_keeps_newest_and_named_files(tmp_path: Path) -> None:
    for n in range(6):
        for name in (f"u{n}.1.out", f"u{n}.1.err", f"u{n}.1.out@0000000000000000"):
            (tmp_path / name).write_bytes(b"x" * 10)
            os.utime(tmp_path / name, (2_000_000_000 + n, 2_000_000_000 + n))
    (tmp_path / ".u0.1.out.copying").write_bytes(b"left behind")
    os.utime(tmp_path / ".u0.1.out.copying", (1, 1))
    LOG_FILES.prune(tmp_path, ["u1.1"], files_max=3, bytes_max=10**9, age_ms_max=10**15)
    assert {name.removeprefix(".")[:4] for name in names(tmp_path)} == {"u1.1", "u3.1", "u4.1", "u5.1"}
    LOG_FILES.prune(tmp_path, ["u1.1"], files_max=3, bytes_max=60, age_ms_max=10**15)
    assert {name[:4] for name in names(tmp_path)} == {"u1.1", "u4.1", "u5.1"}
    os.utime(tmp_path / "u4.1.out", (1, 1))
    os.utime(tmp_path / "u4.1.err", (1, 1))
    os.utime(tmp_path / "u4.1.out@0000000000000000", (1, 1))
    LOG_FILES.prune(tmp_path, ["u1.1"], files_max=3, bytes_max=10**9, age_ms_max=60_000)
    assert {name[:4] for name in names(tmp_path)} == {"u1.1", "u5.1"}
