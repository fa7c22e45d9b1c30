"""Does the simulated disk keep the promise that the real one keeps? The same tests, and both side by side where they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remit.simulate.world.disk import SimDisk
from remit.world.files.disk import FileDisk
from remit.world.interfaces import Disk, DiskError
from tests.contracts import test_world as promised

PROMISES: list[Callable[[Any, Path], None]] = [
    promised.test_what_was_written_is_read,
    promised.test_what_is_not_there_is_missing,
    promised.test_a_read_is_bounded,
    promised.test_removing_twice_is_removing,
    promised.test_directories_are_made_with_their_parents,
    promised.test_a_lock_keeps_others_out_until_it_is_let_go,
]


def mounted(place: Path) -> Disk:
    """As a test has it with real files: the temporary directory is there, and nothing is in it."""
    disk = SimDisk().mount(lambda: True)
    disk.make_directory(place)
    return disk


@pytest.mark.parametrize("promise", PROMISES, ids=lambda test: test.__name__.removeprefix("test_"))
def test_the_simulated_disk_keeps_the_promise(promise: Callable[[Any, Path], None], tmp_path: Path) -> None:
    disk = mounted(tmp_path)
    promise(SimpleNamespace(world=lambda: SimpleNamespace(disk=disk)), tmp_path)


DEEDS: dict[str, Callable[[Disk, Path], object]] = {
    "read": lambda disk, path: disk.read(path),
    "write": lambda disk, path: disk.write_atomically(path, b"new"),
    "exists": lambda disk, path: disk.exists(path),
    "remove": lambda disk, path: disk.remove(path),
    "make": lambda disk, path: disk.make_directory(path),
    "list": lambda disk, path: disk.list(path),
    "free": lambda disk, path: disk.free_bytes(path) > 0,
    "lock": lambda disk, path: disk.lock(path).__enter__() and None,
}


WHERE = ["file", "directory", "absent", "file/under", "absent/under", "directory/../file", ".x.writing"]


def outcome(disk: Disk, deed: Callable[[Disk, Path], object], path: Path) -> object:
    try:
        return deed(disk, path)
    except DiskError as error:
        return type(error)


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize(
    "where", ["file", "directory", "absent", "file/under", "absent/under", "directory/../file", ".x.writing"]
)
def test_both_disks_answer_alike(deed: str, where: str, tmp_path: Path) -> None:
    told = []
    for disk in (FileDisk(), mounted(tmp_path)):
        disk.make_directory(tmp_path / "directory")
        disk.write_atomically(tmp_path / "file", b"old")
        told.append((outcome(disk, DEEDS[deed], tmp_path / where), outcome(disk, DEEDS["list"], tmp_path)))
    assert told[0] == told[1]
