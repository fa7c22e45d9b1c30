"""Contract of `world.disk`: one function for each promise, run on every world and on the simulated disk alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from remit.world.interfaces import FileBusy, FileMissing, FileTooLarge
from tests.contracts.worlds import WorldTwin


def written_content_is_read_back(twin: WorldTwin, tmp_path: Path) -> None:
    disk, path = twin.world().disk, tmp_path / "journal"
    assert not disk.exists(path)
    for data in (b"", b"one", b"two" * 100_000, b"3"):
        disk.write_atomically(path, data)
        assert disk.read(path) == data
    assert disk.exists(path)
    assert disk.list(tmp_path) == ("journal",)


def missing_file_or_directory_raises_file_missing(twin: WorldTwin, tmp_path: Path) -> None:
    disk = twin.world().disk
    for operation in (lambda: disk.read(tmp_path / "no"), lambda: disk.list(tmp_path / "no")):
        with pytest.raises(FileMissing) as caught:
            operation()
        assert str(tmp_path / "no") in caught.value.cause
        assert caught.value.cure
    with pytest.raises(FileMissing):
        disk.write_atomically(tmp_path / "no" / "file", b"")


def read_over_size_limit_raises(twin: WorldTwin, tmp_path: Path) -> None:
    disk, path = twin.world().disk, tmp_path / "large"
    disk.write_atomically(path, b"x" * 11)
    assert disk.read(path, bytes_max=11) == b"x" * 11
    with pytest.raises(FileTooLarge):
        disk.read(path, bytes_max=10)


def remove_is_idempotent(twin: WorldTwin, tmp_path: Path) -> None:
    disk, path = twin.world().disk, tmp_path / "file"
    disk.write_atomically(path, b"x")
    disk.remove(path)
    disk.remove(path)
    disk.remove(tmp_path / "no" / "file")
    assert not disk.exists(path)
    assert disk.list(tmp_path) == ()


def directories_are_created_with_parents(twin: WorldTwin, tmp_path: Path) -> None:
    disk, deep = twin.world().disk, tmp_path / "a" / "b" / "c"
    disk.make_directory(deep)
    disk.make_directory(deep)
    for name in ("z", "a", "m"):
        disk.write_atomically(deep / name, b"")
    assert disk.list(deep) == ("a", "m", "z")
    assert disk.free_bytes(deep) > 0


def lock_excludes_others_until_released(twin: WorldTwin, tmp_path: Path) -> None:
    disk, path = twin.world().disk, tmp_path / "lock"
    with disk.lock(path), pytest.raises(FileBusy), disk.lock(path):
        pass
    with disk.lock(path):
        pass


DISK_CONTRACT: Final[tuple[Callable[[Any, Path], None], ...]] = (
    written_content_is_read_back,
    missing_file_or_directory_raises_file_missing,
    read_over_size_limit_raises,
    remove_is_idempotent,
    directories_are_created_with_parents,
    lock_excludes_others_until_released,
)
