"""Is a file that is only added to kept within bounds, read backwards, and whole after a kill?"""

from __future__ import annotations

from pathlib import Path

import pytest

from remit.world.files.log_files import FileAppendLog
from remit.world.interfaces import DiskError


def test_lines_are_read_newest_first_over_all_pieces__and_the_oldest_piece_goes(tmp_path: Path) -> None:
    trail = FileAppendLog(tmp_path / "t", "t", segment_bytes=100, segments_max=3)
    for n in range(60):
        trail.add(b"line %03d\n" % n)
    trail.sync()
    found = list(trail.read_backwards())
    assert found == [b"line %03d" % n for n in range(59, 59 - len(found), -1)] and 20 <= len(found) <= 33
    assert len(list((tmp_path / "t").iterdir())) == 3
    trail.close()
    again = FileAppendLog(tmp_path / "t", "t", segment_bytes=100, segments_max=3)
    again.add(b"after\n")
    assert list(again.read_backwards())[:2] == [b"after", b"line 059"]
    again.close()


def test_a_line_that_a_kill_cut_short_does_not_swallow_the_next(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"whole\ncut sho")
    trail = FileAppendLog(tmp_path, "t")
    trail.add(b"next\n")
    assert list(trail.read_backwards()) == [b"next", b"cut sho", b"whole"]
    assert (tmp_path / "t").stat().st_mode & 0o777 in (0o644, 0o600)
    trail.close()


def test_nobody_else_reads_it__and_no_link_is_followed(tmp_path: Path) -> None:
    trail = FileAppendLog(tmp_path / "t", "t")
    assert (tmp_path / "t" / "t").stat().st_mode & 0o777 == 0o600 and (tmp_path / "t").stat().st_mode & 0o777 == 0o700
    trail.close()
    (tmp_path / "link").symlink_to(tmp_path / "t" / "t")
    with pytest.raises(DiskError):
        FileAppendLog(tmp_path, "link")


def test_lines_longer_than_one_read_are_whole(tmp_path: Path) -> None:
    trail = FileAppendLog(tmp_path, "t")
    lines = [b"x" * 700_000 + b"%d" % n for n in range(4)]
    for line in lines:
        trail.add(line + b"\n")
    assert list(trail.read_backwards()) == lines[::-1]
    trail.close()
