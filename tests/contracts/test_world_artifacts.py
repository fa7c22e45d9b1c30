"""Contract of artifacts: files arrive whole or not at all, archives stay in their directory, publishing replaces nothing."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from remit.world.files.artifacts import FetchPermissions, NotFetched, NotUnpacked, UnpackLimits
from remit.world.interfaces import DiskError, FileBusy
from tests.contracts.worlds import ARTIFACTS, ArtifactsTwin


@pytest.fixture(params=ARTIFACTS, ids=lambda twin: twin.__name__)
def twin(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactsTwin:
    make: type[ArtifactsTwin] = request.param
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


def test_fetched_file_has_its_digest_and_wrong_digest_leaves_no_file(twin: ArtifactsTwin, tmp_path: Path) -> None:
    async def scenario() -> None:
        world, progress = twin.world(), list[tuple[int, int]]()
        source, permissions = (
            twin.offer(world, tmp_path / "lent" / "a", b"content"),
            FetchPermissions(directories=(tmp_path / "lent",)),
        )
        to = tmp_path / "a"
        size = await world.artifacts.fetch(
            source, to, sha256=digest(b"content"), permissions=permissions, on_progress=lambda *now: progress.append(now)
        )
        assert (size, world.disk.read(to), progress[-1]) == (7, b"content", (7, 7))
        assert await world.artifacts.digest(to) == digest(b"content")
        with pytest.raises(NotFetched, match="has digest") as wrong:
            await world.artifacts.fetch(
                source, tmp_path / "b", sha256="0" * 64, permissions=permissions, on_progress=lambda *_: None
            )
        assert not wrong.value.retryable
        assert not world.disk.exists(tmp_path / "b")

    twin.run(scenario())


def test_source_without_permission_is_not_fetched(twin: ArtifactsTwin, tmp_path: Path) -> None:
    async def scenario() -> None:
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

    twin.run(scenario())


def test_archive_is_unpacked_in_target_directory(twin: ArtifactsTwin, tmp_path: Path) -> None:
    async def scenario() -> None:
        world, work_dir = twin.world(), tmp_path / "room"
        world.disk.make_directory(work_dir)
        world.disk.write_atomically(tmp_path / "a", tarball("bin/run", "conf"))
        found = await world.artifacts.unpack(tmp_path / "a", work_dir / "opt" / "app", below=work_dir)
        assert found == (2, len("bin/run") + len("conf"))
        assert world.disk.read(work_dir / "opt/app/bin/run") == b"bin/run"
        assert await world.artifacts.size(work_dir) > 0

    twin.run(scenario())


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out"])
def test_archive_entry_outside_target_is_refused(twin: ArtifactsTwin, tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        world, work_dir = twin.world(), tmp_path / "room"
        world.disk.make_directory(work_dir)
        world.disk.write_atomically(tmp_path / "a", tarball("good", name))
        with pytest.raises(NotUnpacked):
            await world.artifacts.unpack(tmp_path / "a", work_dir, below=work_dir)
        assert world.disk.list(tmp_path) == ("a", "room")

    twin.run(scenario())


def test_archive_over_limits_is_refused(twin: ArtifactsTwin, tmp_path: Path) -> None:
    async def scenario() -> None:
        world, work_dir = twin.world(), tmp_path / "room"
        world.disk.make_directory(work_dir)
        world.disk.write_atomically(tmp_path / "a", tarball("one", "two", "three"))
        with pytest.raises(NotUnpacked):
            await world.artifacts.unpack(tmp_path / "a", work_dir, below=work_dir, limits=UnpackLimits(files_max=2))
        world.disk.write_atomically(tmp_path / "b", b"no archive")
        with pytest.raises(NotUnpacked):
            await world.artifacts.unpack(tmp_path / "b", work_dir, below=work_dir)

    twin.run(scenario())


def test_file_is_placed_and_replaces_nothing(twin: ArtifactsTwin, tmp_path: Path) -> None:
    async def scenario() -> None:
        world, work_dir = twin.world(), tmp_path / "room"
        world.disk.make_directory(work_dir)
        world.disk.write_atomically(tmp_path / "a", b"tool")
        await world.artifacts.place(tmp_path / "a", work_dir / "bin" / "tool", below=work_dir)
        await world.artifacts.make_directory(work_dir / "data" / "tmp", below=work_dir)
        await world.artifacts.make_directory(work_dir / "data" / "tmp", below=work_dir)
        assert world.disk.read(work_dir / "bin/tool") == b"tool"
        assert world.disk.list(work_dir) == ("bin", "data")
        with pytest.raises(NotUnpacked):
            await world.artifacts.place(tmp_path / "a", work_dir / "bin" / "tool", below=work_dir)

    twin.run(scenario())


def test_publish_is_atomic_and_replaces_nothing(twin: ArtifactsTwin, tmp_path: Path) -> None:
    async def scenario() -> None:
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

    twin.run(scenario())


def test_change_stamp_changes_with_file(twin: ArtifactsTwin, tmp_path: Path) -> None:
    async def scenario() -> None:
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

    twin.run(scenario())


def test_directory_is_resolved_only_below_permitted_ones(twin: ArtifactsTwin, tmp_path: Path) -> None:
    async def scenario() -> None:
        world, permitted = twin.world(), tmp_path / "lent"
        world.disk.make_directory(permitted / "sub")
        world.disk.make_directory(tmp_path / "lent-too")
        assert await world.artifacts.resolve_allowed(permitted / "sub", (permitted,)) == permitted / "sub"
        assert await world.artifacts.resolve_allowed(permitted, (permitted,)) == permitted
        for refused in (tmp_path, tmp_path / "lent-too", permitted / "missing"):
            assert await world.artifacts.resolve_allowed(refused, (permitted,)) is None
        assert await world.artifacts.resolve_allowed(permitted, ()) is None

    twin.run(scenario())
