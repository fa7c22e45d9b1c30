"""Does a backup arrive as it was sent, or not at all?"""

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


def label(data: bytes = DATA) -> BackupLabel:
    taken = sha256(data).hexdigest()
    return BackupLabel(
        version="1", scope="local", incarnation="i", epoch=3, sequence=9, revision=7, taken="now", bytes=len(data), sha256=taken
    )


def packed(data: bytes = DATA) -> bytes:
    one = label(data)
    return archive_head(one) + data + archive_tail(one)


def put(tmp_path: Path, whole: bytes) -> tuple[Path, Path]:
    (tmp_path / "backup.tar").write_bytes(whole)
    return tmp_path / "backup.tar", tmp_path / "out"


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 100_000])
def test_what_is_sent_arrives_and_any_tar_can_read_it(tmp_path: Path, size: int) -> None:
    data = (DATA * 2)[:size]
    file, into = put(tmp_path, packed(data))
    assert extract_backup(file, into) == label(data)
    assert into.read_bytes() == data and file_digest(into) == (size, sha256(data).hexdigest())
    assert into.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as tar:
        assert tar.getnames() == [LABEL, STORE]


@pytest.mark.parametrize("cut", [0, 100, 512, 1_024, 2_000, 60_000, len(packed()) - 2_000])
def test_one_that_was_cut_off_is_refused_and_leaves_nothing(tmp_path: Path, cut: int) -> None:
    file, into = put(tmp_path, packed()[:cut])
    with pytest.raises(Corrupt):
        extract_backup(file, into)
    assert not into.exists()


@pytest.mark.parametrize("at", [3, 600, 700, 1_030, 5_000, 100_000])
def test_one_changed_byte_is_noticed(tmp_path: Path, at: int) -> None:
    whole = bytearray(packed())
    whole[at] ^= 0x20
    file, into = put(tmp_path, bytes(whole))
    with pytest.raises((Corrupt, NewerSchema)):
        extract_backup(file, into)
    assert not into.exists()


def test_one_of_a_later_remit_says_so(tmp_path: Path) -> None:
    said = msgspec.json.encode({"format": 99, "something": "new"})
    file, into = put(tmp_path, tar({LABEL: said, STORE: DATA}))
    with pytest.raises(NewerSchema, match="upgrade"):
        extract_backup(file, into)


def test_a_link_or_a_device_or_another_name_is_not_followed(tmp_path: Path) -> None:
    said = msgspec.json.encode(label())
    for kind, name in ((tarfile.SYMTYPE, STORE), (tarfile.LNKTYPE, STORE), (tarfile.CHRTYPE, STORE), (tarfile.REGTYPE, "../x")):
        file, into = put(tmp_path, tar({LABEL: said, name: DATA}, kind))
        with pytest.raises(Corrupt):
            extract_backup(file, into)
        assert not into.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["backup.tar"]


def tar(files: dict[str, bytes], last: bytes = tarfile.REGTYPE) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for number, (name, data) in enumerate(files.items()):
            one = tarfile.TarInfo(name)
            one.size = len(data)
            if number == len(files) - 1 and last != tarfile.REGTYPE:
                one.type, one.linkname, one.size = last, "/etc/passwd", 0
            made.addfile(one, io.BytesIO(data))
    return out.getvalue()
