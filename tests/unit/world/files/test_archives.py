"""Archives: nothing is written outside the target directory or beyond the limits, for any content of the archive."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from remit.world.concurrency import StopSignal, WorkStopped
from remit.world.files.archives import Unpacker
from remit.world.interfaces import NotUnpacked, UnpackLimits, UnpackResult

Part = tuple[str, bytes] | tarfile.TarInfo


def entry(name: str, sort: bytes = tarfile.REGTYPE, *, to: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = sort, to, mode
    return info


def link(name: str, to: str) -> tarfile.TarInfo:
    return entry(name, tarfile.SYMTYPE, to=to)


def hard_link(name: str, to: str) -> tarfile.TarInfo:
    return entry(name, tarfile.LNKTYPE, to=to)


def tar(path: Path, *parts: Part, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as out:  # type: ignore[call-overload]
        for part in parts:
            if isinstance(part, tarfile.TarInfo):
                out.addfile(part)
            else:
                info = tarfile.TarInfo(part[0])
                info.size = len(part[1])
                out.addfile(info, io.BytesIO(part[1]))
    return path


def unpack(archive: Path, into: Path, bounds: UnpackLimits = UnpackLimits(), at: str = ".") -> UnpackResult:
    return Unpacker(into, "", bounds, StopSignal(), Path(at)).unpack(archive)


def refused(tmp_path: Path, *parts: Part, message: str, bounds: UnpackLimits = UnpackLimits()) -> None:
    """Assert that unpacking is refused and that nothing was written outside the target directory."""
    room = tmp_path / "around" / "room"
    room.parent.mkdir()
    secret = tmp_path / "secret"
    secret.write_text("as it was")
    with pytest.raises(NotUnpacked, match=message):
        unpack(tar(tmp_path / "a.tar", *parts), room, bounds)
    assert secret.read_text() == "as it was"
    assert list((tmp_path / "around").iterdir()) == [room]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.tar", "around", "secret"]


# -- names ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc/passwd", "a/b/../../../x", ".."])
def test_entry_name_outside_target_is_refused(tmp_path: Path, name: str) -> None:
    refused(tmp_path, ("good", b"x"), (name, b"evil"), message="is outside of the target directory")


def test_entry_deeper_than_limit_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, ("/".join("a" * 70), b""), message="deeper than 64")


# -- links ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../../secret", "..", "/", "sub/../../../secret", "x/../../secret", "a/../..", ""]
)
def test_symlink_out_of_target_is_refused(tmp_path: Path, target: str) -> None:
    refused(tmp_path, link("way", target), message="symbolic link out of the target")


def test_symlink_cannot_escape_through_another_symlink(tmp_path: Path) -> None:
    """`here` is the directory itself, so each `here/..` climbs one level higher than it looks."""
    refused(tmp_path, link("here", "."), link("way", "here/here/../../secret"), message="symbolic link out of the target")


def test_nothing_is_written_through_symlink_of_archive(tmp_path: Path) -> None:
    refused(tmp_path, ("sub/x", b""), link("way", "sub"), ("way/evil", b"evil"), message="contains a symbolic link")


def test_symlink_is_replaced_not_written_through(tmp_path: Path) -> None:
    room = tmp_path / "room"
    unpack(tar(tmp_path / "a.tar", ("target", b"one"), link("way", "target"), ("way", b"two")), room)
    assert (room / "target").read_bytes() == b"one"
    assert not (room / "way").is_symlink()


def test_nonempty_directory_cannot_become_symlink(tmp_path: Path) -> None:
    refused(tmp_path, ("sub/x", b""), link("sub", "."), message="cannot be unpacked")


def test_symlinks_within_target_are_kept(tmp_path: Path) -> None:
    room = tmp_path / "room"
    parts = (("lib/real.so.1", b"x"), link("lib/real.so", "real.so.1"), link("a/b/up", "../../lib/real.so"), link("here", "."))
    unpack(tar(tmp_path / "a.tar", *parts), room)
    assert (room / "a/b/up").read_bytes() == b"x"
    assert (room / "lib/real.so").readlink() == Path("real.so.1")


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "missing", "way"])
def test_hard_link_to_path_not_in_archive_is_refused(tmp_path: Path, target: str) -> None:
    refused(tmp_path, hard_link("way", target), message="hard link|is outside of")


def test_hard_link_to_symlink_is_refused(tmp_path: Path) -> None:
    refused(
        tmp_path,
        ("x", b""),
        link("soft", "x"),
        hard_link("hard", "soft"),
        message="hard link to something that is not a regular file",
    )


def test_hard_link_to_entry_is_kept(tmp_path: Path) -> None:
    room = tmp_path / "room"
    unpack(tar(tmp_path / "a.tar", ("one", b"same"), hard_link("sub/two", "one")), room)
    assert (room / "sub/two").stat().st_ino == (room / "one").stat().st_ino


def test_root_archive_may_contain_any_symlink_but_none_is_followed(tmp_path: Path) -> None:
    room = tmp_path / "room"
    root = UnpackLimits(as_root=True)
    unpack(tar(tmp_path / "a.tar", link("etc/alternatives/x", "/usr/bin/x"), link("up", "../../..")), room, root)
    assert (room / "etc/alternatives/x").readlink() == Path("/usr/bin/x")
    with pytest.raises(NotUnpacked, match="contains a symbolic link"):
        unpack(tar(tmp_path / "b.tar", link("way", "/tmp"), ("way/evil", b"")), tmp_path / "other", root)
    assert not Path("/tmp/evil").exists()


# -- special files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sort", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"Z"])
def test_devices_pipes_and_unknown_entries_are_refused(tmp_path: Path, sort: bytes) -> None:
    refused(tmp_path, entry("dev", sort), message="device or a named pipe")


def test_setuid_and_world_writable_bits_are_removed(tmp_path: Path) -> None:
    room = tmp_path / "room"
    parts = (entry("suid", mode=0o6777), entry("sub", tarfile.DIRTYPE, mode=0o7777), entry("none", mode=0))
    unpack(tar(tmp_path / "a.tar", *parts), room)
    modes = {name: stat.S_IMODE((room / name).stat().st_mode) for name in ("suid", "sub", "none")}
    assert modes == {"suid": 0o755, "sub": 0o755, "none": 0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_unpacked_files_belong_to_work_user(tmp_path: Path) -> None:
    room = tmp_path / "room"
    archive = tar(tmp_path / "a.tar", ("sub/deep/x", b"x"), link("soft", "sub"), entry("d", tarfile.DIRTYPE))
    Unpacker(room, "nobody", UnpackLimits(), StopSignal()).unpack(archive)
    owners = {os.lstat(place).st_uid for place in (room, *room.rglob("*"))}
    assert len(owners) == 1
    assert owners != {0}


# -- limits --------------------------------------------------------------------------------------------------------------------


def test_too_many_entries_are_refused(tmp_path: Path) -> None:
    parts = [(f"f{number}", b"") for number in range(20)]
    refused(tmp_path, *parts, message="more than 10 entries", bounds=UnpackLimits(files_max=10))


def test_too_many_bytes_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, ("big", bytes(2 << 20)), message="unpacks to more than 1 MiB", bounds=UnpackLimits(bytes_max=1 << 20))


@pytest.mark.parametrize("squeeze", [gzip.compress, bz2.compress, lzma.compress])
def test_decompression_bomb_is_refused_early(tmp_path: Path, squeeze: Callable[[bytes], bytes]) -> None:
    inner = tar(tmp_path / "inner.tar", ("zeros", bytes(80 << 20)))
    bomb = tmp_path / "bomb"
    bomb.write_bytes(squeeze(inner.read_bytes()))
    with pytest.raises(NotUnpacked, match="too much for its size"):
        unpack(bomb, tmp_path / "room")


def test_oversized_header_is_refused_without_reading_it(tmp_path: Path) -> None:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 3 << 30
    path = tmp_path / "a.tar"
    path.write_bytes(info.tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    with pytest.raises(NotUnpacked, match="header of the archive is too long"):
        unpack(path, tmp_path / "room")


def test_sparse_file_over_limit_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("sparse")
    info.size = 512
    info.pax_headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.map": "0,512",
        "GNU.sparse.size": str(1 << 40),
    }
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as out:
        out.addfile(info, io.BytesIO(bytes(512)))
    with pytest.raises(NotUnpacked):
        unpack(path, tmp_path / "room", UnpackLimits(bytes_max=1 << 20))


def test_decompressor_with_huge_dictionary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.xz"
    path.write_bytes(_xz_with_dictionary(38))
    with pytest.raises(NotUnpacked, match="cannot be decompressed"):
        unpack(path, tmp_path / "room")


def _xz_with_dictionary(bits: int) -> bytes:
    """A stream that declares this dictionary size (38: 2 GiB), made by changing one byte of a valid one."""
    made = bytearray(lzma.compress(bytes(100), lzma.FORMAT_XZ, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 16}]))
    start = 12
    length = (made[start] + 1) * 4
    block = made[start : start + length]
    at = block.index(0x21) + 2
    block[at] = bits
    block[-4:] = struct.pack("<I", zlib.crc32(bytes(block[:-4])))
    made[start : start + length] = block
    return bytes(made)


def test_stop_signal_ends_unpacking(tmp_path: Path) -> None:
    stop = StopSignal()
    stop.stop()
    with pytest.raises(WorkStopped):
        Unpacker(tmp_path / "room", "", UnpackLimits(), stop).unpack(tar(tmp_path / "a.tar", ("x", b"x")))


# -- formats -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_every_tar_compression_is_read(tmp_path: Path, mode: str) -> None:
    data = os.urandom(300_000)
    found = unpack(tar(tmp_path / "a", ("app/run", data), mode=mode), tmp_path / "room", at="opt")
    assert (tmp_path / "room/opt/app/run").read_bytes() == data
    assert found == UnpackResult(1, 300_000)


def test_second_archive_is_merged_into_same_directory(tmp_path: Path) -> None:
    room = tmp_path / "room"
    unpack(tar(tmp_path / "a", ("app/one", b"1")), room)
    unpack(tar(tmp_path / "b", ("app/two", b"2")), room)
    assert sorted(one.name for one in (room / "app").iterdir()) == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive at all", "not a readable archive"),
        (b"\x28\xb5\x2f\xfd rest", "zstd"),
        (b"PK\x03\x04 rest", "not a readable archive"),
        (b"", "not a readable archive"),
    ],
)
def test_unreadable_archive_is_reported(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(NotUnpacked, match=message):
        unpack(tmp_path / "a", tmp_path / "room")


def test_truncated_archive_is_refused(tmp_path: Path) -> None:
    complete = tar(tmp_path / "a", ("x", os.urandom(100_000)), mode="w:xz").read_bytes()
    (tmp_path / "b").write_bytes(complete[: len(complete) // 2])
    with pytest.raises(NotUnpacked):
        unpack(tmp_path / "b", tmp_path / "room")


# -- zip -----------------------------------------------------------------------------------------------------------------------


def zipped(path: Path, name: str, content: bytes = b"x", mode: int = 0o100644) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        info = zipfile.ZipInfo("placeholder")
        info.filename, info.external_attr, info.compress_type = name, mode << 16, zipfile.ZIP_DEFLATED
        out.writestr(info, content)
    return path


def test_zip_is_unpacked(tmp_path: Path) -> None:
    found = unpack(zipped(tmp_path / "a", "app/run", b"#!", 0o100755), tmp_path / "room")
    assert stat.S_IMODE((tmp_path / "room/app/run").stat().st_mode) == 0o755
    assert found == UnpackResult(1, 2)


@pytest.mark.parametrize(
    ("name", "content", "mode", "message"),
    [
        ("../secret", b"x", 0o100644, "is outside of"),
        ("/etc/passwd", b"x", 0o100644, "is outside of"),
        ("way", b"/etc", stat.S_IFLNK | 0o777, "symbolic link out of the target"),
        ("way", b"../..", stat.S_IFLNK | 0o777, "symbolic link out of the target"),
        ("dev", b"", stat.S_IFCHR | 0o644, "device or a named pipe"),
    ],
)
def test_zip_entry_outside_target_is_refused(tmp_path: Path, name: str, content: bytes, mode: int, message: str) -> None:
    with pytest.raises(NotUnpacked, match=message):
        unpack(zipped(tmp_path / "a", name, content, mode), tmp_path / "room")


def test_zip_bomb_is_refused_early(tmp_path: Path) -> None:
    with pytest.raises(NotUnpacked, match="too much for its size"):
        unpack(zipped(tmp_path / "a", "zeros", bytes(80 << 20)), tmp_path / "room")


def test_zip_with_oversized_directory_is_refused_before_reading(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a", "x")
    data = bytearray(path.read_bytes())
    end = data.rfind(b"PK\x05\x06")
    data[end + 12 : end + 16] = struct.pack("<I", 0x7FFFFFFF)
    path.write_bytes(data)
    with pytest.raises(NotUnpacked, match="too many entries"):
        unpack(path, tmp_path / "room")


# -- single files --------------------------------------------------------------------------------------------------------------


def test_file_is_copied_and_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "tool").write_bytes(b"#!/bin/sh\n")
    made = Unpacker(tmp_path / "room", "", UnpackLimits(), StopSignal())
    made.copy(tmp_path / "tool", Path("bin/tool"))
    assert stat.S_IMODE((tmp_path / "room/bin/tool").stat().st_mode) == 0o755
    with pytest.raises(NotUnpacked, match="cannot write"):
        made.copy(tmp_path / "tool", Path("bin/tool"))


def test_file_is_not_copied_through_symlink(tmp_path: Path) -> None:
    room = tmp_path / "room"
    unpack(tar(tmp_path / "a.tar", ("real/x", b""), link("way", "real")), room)
    with pytest.raises(NotUnpacked, match="contains a symbolic link"):
        Unpacker(room, "", UnpackLimits(), StopSignal()).copy(tmp_path / "a.tar", Path("way/tool"))
