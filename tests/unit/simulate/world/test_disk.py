"""What is on a simulated disk after its process or its machine died, and what do its faults refuse?"""

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


def test_the_disk_outlives_its_process_and_its_machine(disk: SimDisk) -> None:
    first = Process(disk)
    first.disk.write_atomically(JOURNAL, b"one")
    first.alive = False
    assert Process(disk).disk.read(JOURNAL) == b"one"
    disk.crash(SEEDS[0])
    assert Process(disk).disk.read(JOURNAL) == b"one"


def test_nothing_that_a_killed_process_does_reaches_the_disk(disk: SimDisk) -> None:
    killed, other = Process(disk), Process(disk)
    killed.disk.write_atomically(JOURNAL, b"one")
    killed.alive = False
    deeds: list[Callable[[], object]] = [
        lambda: killed.disk.write_atomically(JOURNAL, b"two"),
        lambda: killed.disk.remove(JOURNAL),
        lambda: killed.disk.make_directory(HOME / "more"),
        lambda: killed.disk.read(JOURNAL),
        lambda: killed.disk.lock(HOME / "lock").__enter__(),
    ]
    for deed in deeds:
        with pytest.raises(ProcessKilled):
            deed()
    assert other.disk.list(HOME) == ("journal",)
    assert other.disk.read(JOURNAL) == b"one"


def test_a_killed_process_lets_go_of_its_locks_and_never_of_anothers(disk: SimDisk) -> None:
    killed, other, third = Process(disk), Process(disk), Process(disk)
    dead_hold = killed.disk.lock(HOME / "lock")
    dead_hold.__enter__()
    with pytest.raises(FileBusy), other.disk.lock(HOME / "lock"):
        pass
    killed.alive = False
    with other.disk.lock(HOME / "lock"):
        dead_hold.__exit__(None, None, None)  # its finally block, which runs late
        with pytest.raises(FileBusy), third.disk.lock(HOME / "lock"):
            pass
    with third.disk.lock(HOME / "lock"):
        pass


def test_a_crash_of_the_machine_ends_every_lock(disk: SimDisk) -> None:
    hold = Process(disk).disk.lock(HOME / "lock")
    hold.__enter__()
    with pytest.raises(FileBusy), Process(disk).disk.lock(HOME / "lock"):
        pass
    disk.crash(SEEDS[0])
    with Process(disk).disk.lock(HOME / "lock"):
        hold.__exit__(None, None, None)


def test_what_was_not_forced_is_any_of_what_it_was_after_a_crash() -> None:
    found = set()
    for chance in SEEDS:
        disk = SimDisk()
        process = Process(disk)
        process.disk.make_directory(HOME)
        process.disk.write_atomically(JOURNAL, b"old")
        disk.not_syncing = True
        for data in (b"newer", b"newest"):
            with pytest.raises(NotDurable):
                process.disk.write_atomically(JOURNAL, data)
        assert process.disk.read(JOURNAL) == b"newest"
        disk.crash(chance)
        found.add(Process(disk).disk.read(JOURNAL))
    assert found == {b"old", b"newer", b"newest"}


def test_what_was_written_again_is_settled() -> None:
    for chance in SEEDS:
        disk = SimDisk()
        process = Process(disk)
        process.disk.make_directory(HOME)
        disk.not_syncing = True
        with pytest.raises(NotDurable):
            process.disk.write_atomically(JOURNAL, b"new")
        disk.not_syncing = False
        process.disk.write_atomically(JOURNAL, b"new")
        disk.crash(chance)
        assert process.disk.read(JOURNAL) == b"new"


def test_an_unsettled_removal_or_directory_may_be_undone_whole() -> None:
    found = set()
    for chance in SEEDS:
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
        disk.crash(chance)
        after = Process(disk).disk
        found.add(after.list(HOME))
        if after.exists(HOME / "more"):
            assert after.list(HOME / "more") == ("inside",)
        else:
            with pytest.raises(FileMissing):
                after.read(HOME / "more" / "inside")
    assert found == {(), ("journal",), ("more",), ("journal", "more")}


def test_one_seed_is_one_crash() -> None:
    def after(seed: str) -> list[tuple[str, ...]]:
        disk, listings = SimDisk(), list[tuple[str, ...]]()
        process = Process(disk)
        process.disk.make_directory(HOME)
        chance = SeededRandomness(seed)
        for turn in range(20):
            disk.not_syncing = True
            with pytest.raises(NotDurable):
                process.disk.write_atomically(HOME / f"{turn}", b"x")
            disk.crash(chance)
            listings.append(process.disk.list(HOME))
        return listings

    assert after("7") == after("7")
    assert after("7") != after("8")


def test_a_full_disk_refuses_and_keeps_what_it_has(disk: SimDisk) -> None:
    process = Process(disk)
    process.disk.write_atomically(JOURNAL, b"x" * 60)
    assert process.disk.free_bytes(HOME) == 40
    with pytest.raises(DiskFull):  # the new content lies beside the old one until it is whole
        process.disk.write_atomically(JOURNAL, b"y" * 41)
    assert process.disk.read(JOURNAL) == b"x" * 60
    disk.full = True
    assert process.disk.free_bytes(HOME) == 0
    refused: list[Callable[[], object]] = [
        lambda: process.disk.write_atomically(JOURNAL, b""),
        lambda: process.disk.make_directory(HOME / "more"),
        lambda: process.disk.lock(HOME / "lock").__enter__(),
    ]
    for deed in refused:
        with pytest.raises(DiskFull):
            deed()
    process.disk.make_directory(HOME)
    process.disk.remove(JOURNAL)
    disk.full = False
    assert process.disk.list(HOME) == ()
    assert process.disk.free_bytes(HOME) == 100


def test_a_failing_disk_refuses_everything_and_nothing_changes(disk: SimDisk) -> None:
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
    for deed in refused:
        with pytest.raises(DiskError) as caught:
            deed()
        assert not isinstance(caught.value, (FileMissing, DiskFull, NotDurable))
    disk.failing = False
    assert process.disk.list(HOME) == ("journal",)
    assert process.disk.read(JOURNAL) == b"old"


def test_a_relative_path_is_our_bug(disk: SimDisk) -> None:
    with pytest.raises(ValueError, match="relative"):
        Process(disk).disk.read(Path("journal"))
