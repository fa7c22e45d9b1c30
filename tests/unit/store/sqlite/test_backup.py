"""Backup archives: complete round trip, or refusal without leftovers."""

from __future__ import annotations

import io
import tarfile
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from remit.store.protocol import Corrupt, NewerSchema
from remit.store.sqlite.backup import LABEL, STORE, BackupLabel, archive_head, archive_tail, extract_backup, file_digest

DATA = b"SQLite format 3\0" + bytes(range(256)) * 700


def label_of(data: bytes = DATA) -> BackupLabel:
    taken = sha256(data).hexdigest()
    return BackupLabel(
        version="1", scope="local", incarnation="i", epoch=3, sequence=9, revision=7, taken="now", bytes=len(data), sha256=taken
    )


def archive(data: bytes = DATA) -> bytes:
    one = label_of(data)
    return archive_head(one) + data + archive_tail(one)


def write_archive(tmp_path: Path, archive_bytes: bytes) -> tuple[Path, Path]:
    (tmp_path / "backup.tar").write_bytes(archive_bytes)
    return tmp_path / "backup.tar", tmp_path / "out"


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 100_000])
def test_archive_round_trips_and_is_readable_tar(tmp_path: Path, size: int) -> None:
    data = (DATA * 2)[:size]
    file, into = write_archive(tmp_path, archive(data))
    assert extract_backup(file, into) == label_of(data)
    assert into.read_bytes() == data and file_digest(into) == (size, sha256(data).hexdigest())
    assert into.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as make_tar:
        assert make_tar.getnames() == [LABEL, STORE]


@pytest.mark.parametrize("cut", [0, 100, 512, 1_024, 2_000, 60_000, len(archive()) - 2_000])
def test_truncated_archive_is_refused_and_leaves_nothing(tmp_path: Path, cut: int) -> None:
    file, into = write_archive(tmp_path, archive()[:cut])
    with pytest.raises(Corrupt):
        extract_backup(file, into)
    assert not into.exists()


@pytest.mark.parametrize("at", [3, 600, 700, 1_030, 5_000, 100_000])
def test_changed_byte_is_detected(tmp_path: Path, at: int) -> None:
    archive_bytes = bytearray(archive())
    archive_bytes[at] ^= 0x20
    file, into = write_archive(tmp_path, bytes(archive_bytes))
    with pytest.raises((Corrupt, NewerSchema)):
        extract_backup(file, into)
    assert not into.exists()


def test_archive_of_later_release_is_refused_with_cure(tmp_path: Path) -> None:
    label_json = msgspec.json.encode({"format": 99, "something": "new"})
    file, into = write_archive(tmp_path, make_tar({LABEL: label_json, STORE: DATA}))
    with pytest.raises(NewerSchema, match="upgrade"):
        extract_backup(file, into)


def test_link_device_or_other_member_is_refused(tmp_path: Path) -> None:
    label_json = msgspec.json.encode(label_of())
    for kind, name in ((tarfile.SYMTYPE, STORE), (tarfile.LNKTYPE, STORE), (tarfile.CHRTYPE, STORE), (tarfile.REGTYPE, "../x")):
        file, into = write_archive(tmp_path, make_tar({LABEL: label_json, name: DATA}, kind))
        with pytest.raises(Corrupt):
            extract_backup(file, into)
        assert not into.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["backup.tar"]


def make_tar(files: dict[str, bytes], last: bytes = tarfile.REGTYPE) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for number, (name, data) in enumerate(files.items()):
            one = tarfile.TarInfo(name)
            one.size = len(data)
            if number == len(files) - 1 and last != tarfile.REGTYPE:
                one.type, one.linkname, one.size = last, "/etc/passwd", 0
            made.addfile(one, io.BytesIO(data))
    return out.getvalue()
