"""Do files come whole or not at all, are archives unpacked inside of their directory, and does publishing replace nothing?"""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from remit.world.interfaces import DiskError, FetchPermissions, FileBusy, NotFetched, NotUnpacked, UnpackLimits
from tests.contracts.worlds import CARRIERS, CarrierTwin


@pytest.fixture(params=CARRIERS, ids=lambda twin: twin.__name__)
def twin(request: pytest.FixtureRequest, tmp_path: Path) -> CarrierTwin:
    make: type[CarrierTwin] = request.param
    return make(tmp_path)


def tarball(*names: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    return out.getvalue()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_what_is_fetched_has_its_digest__and_else_nothing_is_there(twin: CarrierTwin, tmp_path: Path) -> None:
    async def scene() -> None:
        world, told = twin.world(), list[tuple[int, int]]()
        source, reach = (
            twin.offer(world, tmp_path / "lent" / "a", b"content"),
            FetchPermissions(directories=(tmp_path / "lent",)),
        )
        to = tmp_path / "a"
        size = await world.artifacts.fetch(
            source, to, sha256=digest(b"content"), permissions=reach, on_progress=lambda *now: told.append(now)
        )
        assert (size, world.disk.read(to), told[-1]) == (7, b"content", (7, 7))
        assert await world.artifacts.digest(to) == digest(b"content")
        with pytest.raises(NotFetched, match="has digest") as wrong:
            await world.artifacts.fetch(source, tmp_path / "b", sha256="0" * 64, permissions=reach, on_progress=lambda *_: None)
        assert not wrong.value.retryable
        assert not world.disk.exists(tmp_path / "b")

    twin.run(scene())


def test_nothing_is_fetched_from_where_it_may_not_be(twin: CarrierTwin, tmp_path: Path) -> None:
    async def scene() -> None:
        world = twin.world()
        source = twin.offer(world, tmp_path / "lent" / "a", b"content")
        for refused in (source, "http://127.0.0.1/a", "http://169.254.169.254/a", "http://localhost/", "ftp://example.org/a"):
            with pytest.raises(NotFetched):
                await world.artifacts.fetch(
                    refused,
                    tmp_path / "b",
                    sha256=digest(b"content"),
                    permissions=FetchPermissions(),
                    on_progress=lambda *_: None,
                )
            assert not world.disk.exists(tmp_path / "b")

    twin.run(scene())


def test_an_archive_is_unpacked_where_it_is_to_be(twin: CarrierTwin, tmp_path: Path) -> None:
    async def scene() -> None:
        world, room = twin.world(), tmp_path / "room"
        world.disk.make_directory(room)
        world.disk.write_atomically(tmp_path / "a", tarball("bin/run", "conf"))
        found = await world.artifacts.unpack(tmp_path / "a", room / "opt" / "app", below=room)
        assert found == (2, len("bin/run") + len("conf"))
        assert world.disk.read(room / "opt/app/bin/run") == b"bin/run"
        assert await world.artifacts.size(room) > 0

    twin.run(scene())


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out"])
def test_no_part_of_an_archive_is_outside(twin: CarrierTwin, tmp_path: Path, name: str) -> None:
    async def scene() -> None:
        world, room = twin.world(), tmp_path / "room"
        world.disk.make_directory(room)
        world.disk.write_atomically(tmp_path / "a", tarball("good", name))
        with pytest.raises(NotUnpacked):
            await world.artifacts.unpack(tmp_path / "a", room, below=room)
        assert world.disk.list(tmp_path) == ("a", "room")

    twin.run(scene())


def test_no_archive_comes_to_more_than_it_may(twin: CarrierTwin, tmp_path: Path) -> None:
    async def scene() -> None:
        world, room = twin.world(), tmp_path / "room"
        world.disk.make_directory(room)
        world.disk.write_atomically(tmp_path / "a", tarball("one", "two", "three"))
        with pytest.raises(NotUnpacked):
            await world.artifacts.unpack(tmp_path / "a", room, below=room, limits=UnpackLimits(files_max=2))
        world.disk.write_atomically(tmp_path / "b", b"no archive")
        with pytest.raises(NotUnpacked):
            await world.artifacts.unpack(tmp_path / "b", room, below=room)

    twin.run(scene())


def test_a_file_is_put_in_its_place_and_replaces_nothing(twin: CarrierTwin, tmp_path: Path) -> None:
    async def scene() -> None:
        world, room = twin.world(), tmp_path / "room"
        world.disk.make_directory(room)
        world.disk.write_atomically(tmp_path / "a", b"tool")
        await world.artifacts.place(tmp_path / "a", room / "bin" / "tool", below=room)
        await world.artifacts.make_directory(room / "data" / "tmp", below=room)
        await world.artifacts.make_directory(room / "data" / "tmp", below=room)
        assert world.disk.read(room / "bin/tool") == b"tool"
        assert world.disk.list(room) == ("bin", "data")
        with pytest.raises(NotUnpacked):
            await world.artifacts.place(tmp_path / "a", room / "bin" / "tool", below=room)

    twin.run(scene())


def test_what_is_published_is_there_whole_under_its_name_and_replaces_nothing(twin: CarrierTwin, tmp_path: Path) -> None:
    async def scene() -> None:
        world, made, to = twin.world(), tmp_path / "made", tmp_path / "to"
        world.disk.make_directory(made / "sub")
        world.disk.write_atomically(made / "sub" / "x", b"x")
        await world.artifacts.publish(made, to)
        assert (world.disk.list(tmp_path), world.disk.read(to / "sub" / "x")) == (("to",), b"x")
        world.disk.make_directory(made)
        with pytest.raises(FileBusy):
            await world.artifacts.publish(made, to)
        with pytest.raises(DiskError):
            await world.artifacts.publish(tmp_path / "missing", tmp_path / "other")

    twin.run(scene())


def test_a_stamp_changes_with_its_file(twin: CarrierTwin, tmp_path: Path) -> None:
    async def scene() -> None:
        world, path = twin.world(), tmp_path / "a"
        assert await world.artifacts.change_stamp(path) == ""
        assert await world.artifacts.change_stamp(tmp_path) == ""
        world.disk.write_atomically(path, b"one")
        first = await world.artifacts.change_stamp(path)
        assert first
        assert await world.artifacts.change_stamp(path) == first
        world.disk.write_atomically(path, b"two")
        assert await world.artifacts.change_stamp(path) != first
        with pytest.raises(DiskError):
            await world.artifacts.digest(tmp_path / "missing")

    twin.run(scene())


def test_a_directory_stands_where_it_is_lent(twin: CarrierTwin, tmp_path: Path) -> None:
    async def scene() -> None:
        world, lent = twin.world(), tmp_path / "lent"
        world.disk.make_directory(lent / "sub")
        world.disk.make_directory(tmp_path / "lent-too")
        assert await world.artifacts.resolve_allowed(lent / "sub", (lent,)) == lent / "sub"
        assert await world.artifacts.resolve_allowed(lent, (lent,)) == lent
        for refused in (tmp_path, tmp_path / "lent-too", lent / "missing"):
            assert await world.artifacts.resolve_allowed(refused, (lent,)) is None
        assert await world.artifacts.resolve_allowed(lent, ()) is None

    twin.run(scene())
