"""The simulated disk passes the tests of the real one, and both give the same errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remit.simulate.world.disk import SimDisk
from remit.world.files.disk import FileDisk
from remit.world.interfaces import Disk, DiskError
from tests.contracts.disk_contract import DISK_CONTRACT


def sim_disk(place: Path) -> Disk:
    """An empty simulated disk with the test's temporary directory, as a test has it with real files."""
    disk = SimDisk().mount(lambda: True)
    disk.make_directory(place)
    return disk


@pytest.mark.parametrize("promise", DISK_CONTRACT, ids=lambda promise: promise.__name__)
def test_simulated_disk_keeps_contract(promise: Callable[[Any, Path], None], tmp_path: Path) -> None:
    disk = sim_disk(tmp_path)
    promise(SimpleNamespace(world=lambda: SimpleNamespace(disk=disk)), tmp_path)


OPERATIONS: dict[str, Callable[[Disk, Path], object]] = {
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


def outcome(disk: Disk, operation: Callable[[Disk, Path], object], path: Path) -> object:
    try:
        return operation(disk, path)
    except DiskError as error:
        return type(error)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "where", ["file", "directory", "absent", "file/under", "absent/under", "directory/../file", ".x.writing"]
)
def test_real_and_simulated_disk_give_same_outcome(operation: str, where: str, tmp_path: Path) -> None:
    outcomes = []
    for disk in (FileDisk(), sim_disk(tmp_path)):
        disk.make_directory(tmp_path / "directory")
        disk.write_atomically(tmp_path / "file", b"old")
        outcomes.append((outcome(disk, OPERATIONS[operation], tmp_path / where), outcome(disk, OPERATIONS["list"], tmp_path)))
    assert outcomes[0] == outcomes[1]
