"""Simulated disk: contents after process and machine crashes, and errors of its faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from remit.simulate.world.disk import ProcessKilled, SimDisk
from remit.world.interfaces import Disk, DiskError, DiskFull, FileBusy, FileMissing, NotDurable
from remit.world.randomness import SeededRandomness

HOME = Path("/var/lib/remit")
JOURNAL = HOME / "journal"
SEEDS = [SeededRandomness(str(seed)) for seed in range(40)]


class Process:
    """One run of a process on a machine."""

    def __init__(self, disk: SimDisk) -> None:
        self.alive = True
        self.disk: Disk = disk.mount(lambda: self.alive)


@pytest.fixture
def disk() -> SimDisk:
    disk = SimDisk(capacity_bytes=100)
    disk.mount(lambda: True).make_directory(HOME)
    return disk


def test_disk_survives_process_and_machine_crash(disk: SimDisk) -> None:
    first = Process(disk)
    first.disk.write_atomically(JOURNAL, b"one")
    first.alive = False
    assert Process(disk).disk.read(JOURNAL) == b"one"
    disk.crash(SEEDS[0])
    assert Process(disk).disk.read(JOURNAL) == b"one"


def test_killed_process_cannot_write(disk: SimDisk) -> None:
    killed, other = Process(disk), Process(disk)
    killed.disk.write_atomically(JOURNAL, b"one")
    killed.alive = False
    operations: list[Callable[[], object]] = [
        lambda: killed.disk.write_atomically(JOURNAL, b"two"),
        lambda: killed.disk.remove(JOURNAL),
        lambda: killed.disk.make_directory(HOME / "more"),
        lambda: killed.disk.read(JOURNAL),
        lambda: killed.disk.lock(HOME / "lock").__enter__(),
    ]
    for operation in operations:
        with pytest.raises(ProcessKilled):
            operation()
    assert other.disk.list(HOME) == ("journal",)
    assert other.disk.read(JOURNAL) == b"one"


def test_locks_of_killed_process_are_released_and_others_kept(disk: SimDisk) -> None:
    killed, other, third = Process(disk), Process(disk), Process(disk)
    dead_lock = killed.disk.lock(HOME / "lock")
    dead_lock.__enter__()
    with pytest.raises(FileBusy), other.disk.lock(HOME / "lock"):
        pass
    killed.alive = False
    with other.disk.lock(HOME / "lock"):
        dead_lock.__exit__(None, None, None)  # its finally block runs late
        with pytest.raises(FileBusy), third.disk.lock(HOME / "lock"):
            pass
    with third.disk.lock(HOME / "lock"):
        pass


def test_machine_crash_releases_every_lock(disk: SimDisk) -> None:
    hold = Process(disk).disk.lock(HOME / "lock")
    hold.__enter__()
    with pytest.raises(FileBusy), Process(disk).disk.lock(HOME / "lock"):
        pass
    disk.crash(SEEDS[0])
    with Process(disk).disk.lock(HOME / "lock"):
        hold.__exit__(None, None, None)


def test_unsynced_write_may_be_any_version_after_crash() -> None:
    found = set()
    for randomness in SEEDS:
        disk = SimDisk()
        process = Process(disk)
        process.disk.make_directory(HOME)
        process.disk.write_atomically(JOURNAL, b"old")
        disk.not_syncing = True
        for data in (b"newer", b"newest"):
            with pytest.raises(NotDurable):
                process.disk.write_atomically(JOURNAL, data)
        assert process.disk.read(JOURNAL) == b"newest"
        disk.crash(randomness)
        found.add(Process(disk).disk.read(JOURNAL))
    assert found == {b"old", b"newer", b"newest"}


def test_rewritten_file_is_durable() -> None:
    for randomness in SEEDS:
        disk = SimDisk()
        process = Process(disk)
        process.disk.make_directory(HOME)
        disk.not_syncing = True
        with pytest.raises(NotDurable):
            process.disk.write_atomically(JOURNAL, b"new")
        disk.not_syncing = False
        process.disk.write_atomically(JOURNAL, b"new")
        disk.crash(randomness)
        assert process.disk.read(JOURNAL) == b"new"


def test_unsynced_removal_or_directory_may_be_undone_whole() -> None:
    found = set()
    for randomness in SEEDS:
        disk = SimDisk()
        process = Process(disk)
        process.disk.make_directory(HOME)
        process.disk.write_atomically(JOURNAL, b"old")
        disk.not_syncing = True
        with pytest.raises(NotDurable):
            process.disk.remove(JOURNAL)
        with pytest.raises(NotDurable):
            process.disk.make_directory(HOME / "more")
        disk.not_syncing = False
        process.disk.write_atomically(HOME / "more" / "inside", b"")
        disk.crash(randomness)
        after = Process(disk).disk
        found.add(after.list(HOME))
        if after.exists(HOME / "more"):
            assert after.list(HOME / "more") == ("inside",)
        else:
            with pytest.raises(FileMissing):
                after.read(HOME / "more" / "inside")
    assert found == {(), ("journal",), ("more",), ("journal", "more")}


def test_seed_determines_crash_outcome() -> None:
    def after(seed: str) -> list[tuple[str, ...]]:
        disk, listings = SimDisk(), list[tuple[str, ...]]()
        process = Process(disk)
        process.disk.make_directory(HOME)
        randomness = SeededRandomness(seed)
        for turn in range(20):
            disk.not_syncing = True
            with pytest.raises(NotDurable):
                process.disk.write_atomically(HOME / f"{turn}", b"x")
            disk.crash(randomness)
            listings.append(process.disk.list(HOME))
        return listings

    assert after("7") == after("7")
    assert after("7") != after("8")


def test_full_disk_refuses_writes_and_keeps_contents(disk: SimDisk) -> None:
    process = Process(disk)
    process.disk.write_atomically(JOURNAL, b"x" * 60)
    assert process.disk.free_bytes(HOME) == 40
    with pytest.raises(DiskFull):  # the new content needs space beside the old one until it is complete
        process.disk.write_atomically(JOURNAL, b"y" * 41)
    assert process.disk.read(JOURNAL) == b"x" * 60
    disk.full = True
    assert process.disk.free_bytes(HOME) == 0
    refused: list[Callable[[], object]] = [
        lambda: process.disk.write_atomically(JOURNAL, b""),
        lambda: process.disk.make_directory(HOME / "more"),
        lambda: process.disk.lock(HOME / "lock").__enter__(),
    ]
    for operation in refused:
        with pytest.raises(DiskFull):
            operation()
    process.disk.make_directory(HOME)
    process.disk.remove(JOURNAL)
    disk.full = False
    assert process.disk.list(HOME) == ()
    assert process.disk.free_bytes(HOME) == 100


def test_failing_disk_refuses_everything_and_changes_nothing(disk: SimDisk) -> None:
    process = Process(disk)
    process.disk.write_atomically(JOURNAL, b"old")
    disk.failing = True
    refused: list[Callable[[], object]] = [
        lambda: process.disk.write_atomically(JOURNAL, b"new"),
        lambda: process.disk.read(JOURNAL),
        lambda: process.disk.remove(JOURNAL),
        lambda: process.disk.exists(JOURNAL),
        lambda: process.disk.list(HOME),
        lambda: process.disk.make_directory(HOME / "more"),
        lambda: process.disk.lock(HOME / "lock").__enter__(),
    ]
    for operation in refused:
        with pytest.raises(DiskError) as caught:
            operation()
        assert not isinstance(caught.value, (FileMissing, DiskFull, NotDurable))
    disk.failing = False
    assert process.disk.list(HOME) == ("journal",)
    assert process.disk.read(JOURNAL) == b"old"


def test_relative_path_raises(disk: SimDisk) -> None:
    with pytest.raises(ValueError, match="relative"):
        Process(disk).disk.read(Path("journal"))
