"""Append logs: bounded in size, readable backwards, and intact after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from remit.world.files.log_files import FileAppendLog
from remit.world.interfaces import DiskError


def test_lines_are_read_newest_first_across_segments_and_oldest_segment_is_dropped(tmp_path: Path) -> None:
    log = FileAppendLog(tmp_path / "t", "t", segment_bytes=100, segments_max=3)
    for n in range(60):
        log.add(b"line %03d\n" % n)
    log.sync()
    found = list(log.read_backwards())
    assert found == [b"line %03d" % n for n in range(59, 59 - len(found), -1)] and 20 <= len(found) <= 33
    assert len(list((tmp_path / "t").iterdir())) == 3
    log.close()
    again = FileAppendLog(tmp_path / "t", "t", segment_bytes=100, segments_max=3)
    again.add(b"after\n")
    assert list(again.read_backwards())[:2] == [b"after", b"line 059"]
    again.close()


def test_line_cut_short_by_kill_does_not_swallow_next(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"whole\ncut sho")
    log = FileAppendLog(tmp_path, "t")
    log.add(b"next\n")
    assert list(log.read_backwards()) == [b"next", b"cut sho", b"whole"]
    assert (tmp_path / "t").stat().st_mode & 0o777 in (0o644, 0o600)
    log.close()


def test_log_is_private_to_owner_and_links_are_not_followed(tmp_path: Path) -> None:
    log = FileAppendLog(tmp_path / "t", "t")
    assert (tmp_path / "t" / "t").stat().st_mode & 0o777 == 0o600 and (tmp_path / "t").stat().st_mode & 0o777 == 0o700
    log.close()
    (tmp_path / "link").symlink_to(tmp_path / "t" / "t")
    with pytest.raises(DiskError):
        FileAppendLog(tmp_path, "link")


def test_lines_longer_than_read_buffer_are_complete(tmp_path: Path) -> None:
    log = FileAppendLog(tmp_path, "t")
    lines = [b"x" * 700_000 + b"%d" % n for n in range(4)]
    for line in lines:
        log.add(line + b"\n")
    assert list(log.read_backwards()) == lines[::-1]
    log.close()
