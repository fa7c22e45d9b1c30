"""The keeper starts, keeps and ends processes (simulated machine, virtual time)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace as with_part
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from msgspec.structs import replace

from remit.agent.attempts import AttemptId
from remit.agent.keeper.journal import Journal
from remit.agent.keeper.protocol import (
    NO_START,
    BlockStart,
    ConfirmRenewals,
    ForgetProcess,
    GetUsage,
    ProcessTable,
    Shutdown,
    StopProcess,
)
from remit.world.files.disk import FileDisk
from remit.world.interfaces import Clock, ExitStatus, ProcessHandle
from tests.unit.agent.virtual_machines import NODE, FullDisk, Machine, UnsyncedDisk, running_keeper, world_on
from tests.unit.world.virtual_world import InlineOffload, run_virtually

T = TypeVar("T")
ONE, TWO = AttemptId("replica/t/a-0", "u1", 1), AttemptId("replica/t/b-0", "u2", 1)


def test_concurrent_and_repeated_starts_run_one_process(tmp_path: Path) -> None:
    """F37."""
    machine = Machine()

    async def scene() -> None:
        async with running_keeper(machine, tmp_path / "journal") as keeper:
            first = await keeper.begin(ONE)
            again = await asyncio.gather(*(keeper.begin(ONE) for _ in range(5)))
            assert first is not None
            assert all(answer == first for answer in again)
            assert list(machine.runs) == [first.pid]
            assert (await keeper.begin(ONE, number=1)) == first, "the next start is refused while this one runs"
            machine.end(first.pid, ExitStatus(code=3))
            ended = await keeper.until_ended(ONE)
            assert ended.ended == ExitStatus(code=3)
            assert (await keeper.begin(ONE)) == ended
            second = await keeper.begin(ONE, number=1)
            assert second is not None
            assert second.pid != first.pid

    run_virtually(scene())


def test_blocked_attempt_is_not_started_and_running_attempt_not_blocked(tmp_path: Path) -> None:
    """F37: a requested start arrives late, after the end of the attempt was reported."""
    machine = Machine()

    async def scene() -> None:
        async with running_keeper(machine, tmp_path / "journal") as keeper:
            assert (await keeper.send(BlockStart(*ONE))).kept is None
            late = await keeper.begin(ONE)
            assert late is not None and late.failed and not late.alive and not machine.runs
            runs = await keeper.begin(TWO)
            assert runs is not None
            assert (await keeper.send(BlockStart(*TWO))).kept == runs
            machine.end(runs.pid, ExitStatus(code=1))
            await keeper.until_ended(TWO)
            assert (await keeper.begin(TWO, number=1)) is not None and len(machine.runs) == 1, "the block had no effect"
            machine.end(next(iter(machine.runs)), ExitStatus(code=1))
            ended = await keeper.until_ended(TWO)
            assert (await keeper.send(BlockStart(*TWO))).kept == ended
            again = await keeper.begin(TWO, number=2)
            assert again is not None and again.failed and not again.alive and not machine.runs

    run_virtually(scene())


def test_repeated_start_after_forget_is_not_begun(tmp_path: Path) -> None:
    """F37: the first start was not acknowledged for long, and its repetition arrives after the process was forgotten."""
    machine = Machine()

    async def scene() -> None:
        async with running_keeper(machine, tmp_path / "journal") as keeper:
            first = await keeper.begin(ONE)
            assert first is not None
            machine.end(first.pid, ExitStatus(code=0))
            await keeper.until_ended(ONE)
            await keeper.send(ForgetProcess(*ONE))
            late = await keeper.begin(ONE)
            assert late is not None and late.failed and not late.alive and not machine.runs
            assert not await keeper.table()

    run_virtually(scene())


def test_block_during_start_waits_and_reports_running_process(tmp_path: Path) -> None:
    """F37."""
    machine = Machine()

    async def scene() -> None:
        async with running_keeper(machine, tmp_path / "journal") as keeper:
            begun, logged = await asyncio.gather(keeper.begin(ONE), keeper.send(BlockStart(*ONE)))
            assert begun is not None and logged.kept == begun and logged.kept.alive

    run_virtually(scene())


def test_start_whose_record_fails_to_sync_is_not_begun(tmp_path: Path) -> None:
    """F14."""
    machine = Machine()

    async def scene() -> None:
        world = world_on(machine)
        world = with_part(world, disk=UnsyncedDisk(world.disk))
        async with running_keeper(machine, tmp_path / "journal", world=world) as keeper:
            refused = await keeper.begin(ONE)
            assert refused is not None
            assert (refused.number, refused.failed) == (NO_START, "the disk fails to sync")
            assert not machine.runs
            assert not await keeper.table()

    run_virtually(scene())


@pytest.mark.parametrize("turns", range(6))
def test_keeper_survives_consecutive_slow_journal_writes(tmp_path: Path, turns: int) -> None:
    """A writer woken during a write must not write again what is on the disk by its turn."""
    machine = Machine()

    async def scene() -> None:
        world = world_on(machine)
        calls = 0

        class Slow(InlineOffload):
            async def __call__(self, work: Callable[[], T], /) -> T:
                nonlocal calls
                calls += 1
                late = turns if calls % 2 else 0
                await world.clock.sleep_ms(5)
                for _ in range(late):
                    await asyncio.sleep(0)
                return work()

        async with running_keeper(machine, tmp_path / "journal", world=with_part(world, offload=Slow())) as keeper:
            for number in range(3):
                records = await asyncio.gather(keeper.begin(ONE, number=number), keeper.begin(TWO, number=number))
                for record in records:
                    assert record is not None
                    machine.end(record.pid, ExitStatus(code=0))
                await asyncio.gather(keeper.until_ended(ONE), keeper.until_ended(TWO))

    run_virtually(scene())


@pytest.mark.parametrize("number", [0, 1])
def test_journal_compaction_keeps_start_recorded_during_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Also a later start of the same attempt: the newest record wins."""
    monkeypatch.setattr("remit.agent.keeper.journal.COMPACT_LINES", -10)
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        world = world_on(machine)
        delayed = asyncio.Event()

        class DelayedReply(InlineOffload):
            """Works at once, but delays the answer to the write that records the start."""

            async def __call__(self, work: Callable[[], T], /) -> T:
                result = work()
                records = Journal(FileDisk(), journal).read().get(TWO)
                if not delayed.is_set() and records is not None and records.number == number:
                    delayed.set()
                    await world.clock.sleep_ms(1_000)
                return result

        async with running_keeper(machine, journal, world=with_part(world, offload=DelayedReply())) as keeper:
            first = await keeper.begin(ONE)
            assert first is not None
            for before in range(number):
                again = await keeper.begin(TWO, number=before)
                assert again is not None
                machine.end(again.pid, ExitStatus(code=1))
                await keeper.until_ended(TWO)
            second = asyncio.create_task(keeper.begin(TWO, number=number))
            await delayed.wait()
            machine.end(first.pid, ExitStatus(code=0))
            await keeper.until_ended(ONE)
            assert Journal(FileDisk(), journal).read()[TWO].number == number
            assert await second is not None


class ImmediateOffload:
    """Does work at once, but answers no earlier than `until_ms`."""

    def __init__(self, clock: Clock) -> None:
        self.until_ms: int | None = None
        self._clock = clock

    async def __call__(self, work: Callable[[], T], /) -> T:
        done = work()
        if self.until_ms is not None and self.until_ms > self._clock.now_ms():
            await self._clock.sleep_ms(self.until_ms - self._clock.now_ms())
        return done

    async def close(self) -> None:
        return


def test_keeper_survives_deadline_check_during_journal_write(tmp_path: Path) -> None:
    """A keeper that ends takes all fenced processes of its machine with it."""
    machine, journal = Machine(), tmp_path / "journal"
    world = world_on(machine)
    disk = ImmediateOffload(world.clock)

    async def scene() -> None:
        async with running_keeper(machine, journal, world=with_part(world, offload=disk)) as keeper:
            clock = keeper.world.clock
            await keeper.send(ConfirmRenewals({NODE: clock.now_ms()}))
            assert await keeper.begin(ONE, fence_ms=60_000) is not None
            check_ms = clock.now_ms() + 1_000
            await clock.sleep_ms(1)
            disk.until_ms = check_ms  # the write ends at the instant of the deadline check
            await keeper.send(StopProcess(*ONE, 500))
            await clock.sleep_ms(2_000)
            disk.until_ms = None
            assert (await keeper.begin(TWO)) is not None
            assert list(Journal(FileDisk(), journal).read()) == [ONE, TWO]

    run_virtually(scene())


def test_concurrent_changes_are_journaled_once_each(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"
    world = world_on(machine)
    disk = ImmediateOffload(world.clock)
    copies = [AttemptId(f"replica/t/a-{number}", f"u{number}", 1) for number in range(50)]

    async def scene() -> None:
        async with running_keeper(machine, journal, world=with_part(world, offload=disk)) as keeper:
            disk.until_ms = keeper.world.clock.now_ms() + 100
            await asyncio.gather(*(keeper.begin(copy) for copy in copies))
            disk.until_ms = keeper.world.clock.now_ms() + 100
            for pid in tuple(machine.runs):
                machine.end(pid, ExitStatus(code=0))
            for copy in copies:
                await keeper.until_ended(copy)
        assert journal.read_text().count("\n") == 3 * len(copies), "start, process and exit of each"

    run_virtually(scene())


def test_unwritten_changes_reach_journal_when_disk_has_room(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"
    world = world_on(machine)
    disk = FullDisk(world.disk)

    async def scene() -> None:
        async with running_keeper(machine, journal, world=with_part(world, disk=disk)) as keeper:
            first, second = await keeper.begin(ONE), await keeper.begin(TWO)
            assert first is not None
            assert second is not None
            disk.full = True
            machine.end(first.pid, ExitStatus(code=3))
            machine.end(second.pid, ExitStatus(code=4))
            for copy in (ONE, TWO):
                await keeper.until_ended(copy)
            await keeper.send(ForgetProcess(*TWO))
            assert Journal(FileDisk(), journal).read()[ONE].alive
            disk.full = False
            await keeper.world.clock.sleep_ms(2_500)
            records = Journal(FileDisk(), journal).read()
            assert list(records) == [ONE]
            assert records[ONE].ended == ExitStatus(code=3)

    run_virtually(scene())


def test_next_keeper_adopts_running_process_and_reports_its_exit(tmp_path: Path) -> None:
    """F36."""
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with running_keeper(machine, journal) as keeper:
            first = await keeper.begin(ONE)
            assert first is not None
        assert first.pid in machine.runs
        async with running_keeper(machine, journal) as keeper:
            assert (await keeper.table())[ONE] == first
            assert (await keeper.begin(ONE)) == first
            assert len(machine.runs) == 1
            machine.end(first.pid, ExitStatus(code=0))
            assert (await keeper.until_ended(ONE)).ended == ExitStatus(), "no child of this keeper: exit status unknown"

    run_virtually(scene())


def test_orphaned_child_of_dead_process_is_killed_before_exit_is_reported(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with running_keeper(machine, journal) as keeper:
            record = await keeper.begin(ONE)
            assert record is not None
            child = machine.begin(machine.runs[record.pid])
            machine.children[record.pid] = [child]
        machine.end(record.pid, ExitStatus(signal=9))
        machine.deaf = True
        async with running_keeper(machine, journal) as keeper:
            assert (await keeper.table())[ONE].alive, "alive while a process of its group runs"
            await keeper.until_ended(ONE)
            assert child not in machine.runs
            assert machine.signals == [(child, "term"), (child, "kill")]

    run_virtually(scene())


def test_interrupted_start_is_cleared_and_counts_as_begun(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with running_keeper(machine, journal) as keeper:
            record = await keeper.begin(ONE)
            assert record is not None
        Journal(FileDisk(), journal).write([replace(record, pid=0, began="", group="")], durably=True)
        async with running_keeper(machine, journal) as keeper:
            await keeper.until_ended(ONE)
            assert machine.signals == [(record.pid, "clear")]
            assert not machine.runs

    run_virtually(scene())


def test_process_lost_from_damaged_journal_is_killed(tmp_path: Path) -> None:
    """F36: left running, it would run twice after the next start."""
    machine, journal, rooms = Machine(), tmp_path / "journal", tmp_path / "work"
    for name in (ONE.file_name, TWO.file_name, "lost+records", ".hidden"):
        (rooms / name).mkdir(parents=True)

    async def scene() -> None:
        async with running_keeper(machine, journal, rooms=rooms) as keeper:
            known = await keeper.begin(TWO)
            lost = await keeper.begin(ONE)
            assert known is not None
            assert lost is not None
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join(b"\x00" * 9 + b"\n" if b'"uid":"u1"' in line else line for line in lines))
        async with running_keeper(machine, journal, rooms=rooms) as keeper:
            assert list(await keeper.table()) == [TWO]
            assert machine.signals == [(lost.pid, "clear")]
            assert list(machine.runs) == [known.pid]

    run_virtually(scene())


def test_unreadable_journal_is_logged_once_and_retried(tmp_path: Path) -> None:
    """F14."""
    machine, journal = Machine(), tmp_path / "journal"
    journal.mkdir()
    logged: list[str] = []

    async def scene() -> None:
        async with running_keeper(machine, journal, log=logged.append) as keeper:
            await keeper.world.clock.sleep_ms(5_000)
            assert len(logged) == 1
            assert f"{journal} cannot be used" in logged[0]
            journal.rmdir()
            assert await keeper.table() == {}

    run_virtually(scene())


def test_processes_of_previous_boot_are_ended_with_valid_times(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with running_keeper(machine, journal) as keeper:
            record = await keeper.begin(ONE)
            assert record is not None
        late = replace(record, boot="another", since_ms=10**12)
        other = replace(late, key=TWO.key, uid="u2", ended=ExitStatus(code=1), ended_ms=10**12)
        Journal(FileDisk(), journal).write([late, other], durably=True)
        async with running_keeper(machine, journal) as keeper:
            table = await keeper.table()
            now_ms = keeper.world.clock.now_ms()
            assert table[ONE].ended == ExitStatus()
            assert table[TWO].ended == ExitStatus(code=1)
            assert all(row.ended_ms <= now_ms and row.since_ms <= now_ms for row in table.values())

    run_virtually(scene())


def test_fenced_start_needs_renewal_and_process_is_killed_at_fence(tmp_path: Path) -> None:
    """F18 F34."""
    machine = Machine()

    async def scene() -> None:
        async with running_keeper(machine, tmp_path / "journal") as keeper:
            clock = keeper.world.clock
            assert await keeper.begin(ONE, fence_ms=1_000) is None, "no lease renewal of its node is known"
            sent_ms = clock.now_ms()
            await clock.sleep_ms(300)
            await keeper.send(ConfirmRenewals({NODE: sent_ms, "other": sent_ms + 10**6}))
            record = await keeper.begin(ONE, fence_ms=1_000)
            eager = await keeper.begin(TWO)
            assert record is not None
            assert eager is not None
            ended = await keeper.until_ended(ONE)
            assert ended.fenced
            assert ended.ended_ms - sent_ms in range(1_000, 1_100), "counted from the send time of the renewal"
            assert list(machine.runs) == [eager.pid]
            assert await keeper.begin(ONE, number=1, fence_ms=1_000) is None, "nor is it restarted"

    run_virtually(scene())


def test_renewal_extends_fence_and_future_renewal_does_not(tmp_path: Path) -> None:
    machine = Machine()

    async def scene() -> None:
        async with running_keeper(machine, tmp_path / "journal") as keeper:
            clock, began_ms = keeper.world.clock, keeper.world.clock.now_ms()
            await keeper.send(ConfirmRenewals({NODE: began_ms}))
            await keeper.begin(ONE, fence_ms=1_000)
            for _ in range(5):
                await clock.sleep_ms(500)
                await keeper.send(ConfirmRenewals({NODE: clock.now_ms()}))
                await keeper.send(ConfirmRenewals({NODE: began_ms}))  # a late renewal does not shorten the deadline
            assert (await keeper.table())[ONE].alive
            last_ms = clock.now_ms()
            await keeper.send(ConfirmRenewals({NODE: last_ms + 60_000}))
            assert (await keeper.until_ended(ONE)).ended_ms < last_ms + 1_100

    run_virtually(scene())


def test_next_keeper_kills_orphaned_fenced_process(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with running_keeper(machine, journal) as keeper:
            await keeper.send(ConfirmRenewals({NODE: keeper.world.clock.now_ms()}))
            await keeper.begin(ONE, fence_ms=600_000)
        assert machine.runs
        async with running_keeper(machine, journal) as keeper:
            assert (await keeper.until_ended(ONE)).fenced
            assert not machine.runs

    run_virtually(scene())


def test_stop_sends_term_then_kill_and_shorter_grace_wins(tmp_path: Path) -> None:
    machine = Machine()
    machine.deaf = True

    async def scene() -> None:
        async with running_keeper(machine, tmp_path / "journal") as keeper:
            record = await keeper.begin(ONE)
            assert record is not None
            began_ms = keeper.world.clock.now_ms()
            await keeper.send(StopProcess(*ONE, 30_000, "timeout"))
            await keeper.send(StopProcess(*ONE, 60_000))
            await keeper.world.clock.sleep_ms(100)
            assert machine.signals == [(record.pid, "term")]
            await keeper.send(StopProcess(*ONE, 200))
            ended = await keeper.until_ended(ONE)
            assert ended.why == "timeout"
            assert ended.ended_ms - began_ms in range(300, 400)
            assert ended.ended == ExitStatus(signal=9)

    run_virtually(scene())


def test_failed_stop_is_retried(tmp_path: Path) -> None:
    machine = Machine()

    async def scene() -> None:
        async with running_keeper(machine, tmp_path / "journal") as keeper:
            await keeper.begin(ONE)
            machine.stuck = True
            await keeper.send(StopProcess(*ONE, 0))
            await keeper.world.clock.sleep_ms(5_000)
            assert (await keeper.table())[ONE].alive
            machine.stuck = False
            await keeper.until_ended(ONE)

    run_virtually(scene())


def test_start_of_missing_program_fails_with_cause_and_cure(tmp_path: Path) -> None:
    machine = Machine()
    machine.refuses = "no such program"

    async def scene() -> None:
        async with running_keeper(machine, tmp_path / "journal") as keeper:
            record = await keeper.begin(ONE)
            assert record is not None
            assert (record.failed, record.cure, record.number) == ("no such program", "install it", 0)
            machine.refuses = ""
            assert (await keeper.begin(ONE)) == record, "a failed start is not retried under the same number"

    run_virtually(scene())


def test_only_ended_process_is_forgotten_and_stream_reports_it(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with running_keeper(machine, journal) as keeper:
            stream = keeper.keeper.stream(b"")
            assert msgspec.json.decode(await anext(stream), type=ProcessTable).whole
            record = await keeper.begin(ONE)
            assert record is not None
            await keeper.send(ForgetProcess(*ONE))
            assert ONE in await keeper.table()
            machine.end(record.pid, ExitStatus(code=0))
            await keeper.until_ended(ONE)
            await keeper.send(ForgetProcess(*ONE))
            assert not await keeper.table()
            update = msgspec.json.decode(await anext(stream), type=ProcessTable)
            assert update.gone == (tuple(ONE),), "only the latest change of each attempt"
            await stream.aclose()
        assert Journal(FileDisk(), journal).read() == {}

    run_virtually(scene())


def test_shutdown_kills_processes_refuses_starts_and_exits(tmp_path: Path) -> None:
    machine = Machine()
    machine.deaf = True

    async def scene() -> None:
        async with running_keeper(machine, tmp_path / "journal") as keeper:
            await keeper.begin(ONE)
            await keeper.begin(TWO)
            began_ms = keeper.world.clock.now_ms()
            shutdown = asyncio.create_task(keeper.send(Shutdown(1_000)))
            await keeper.world.clock.sleep_ms(100)
            late = await keeper.begin(AttemptId("replica/t/c-0", "u3", 1))
            assert late is not None
            assert late.number == NO_START
            await shutdown
            assert not machine.runs
            assert keeper.world.clock.now_ms() - began_ms in range(1_000, 1_300)

    run_virtually(scene())


def test_usage_covers_running_processes_only(tmp_path: Path) -> None:
    machine = Machine()

    async def scene() -> None:
        async with running_keeper(machine, tmp_path / "journal") as keeper:
            record = await keeper.begin(ONE)
            await keeper.begin(TWO)
            assert record is not None
            machine.end(record.pid, ExitStatus(code=0))
            await keeper.until_ended(ONE)
            uses = (await keeper.send(GetUsage())).uses
            assert [(use.uid, use.cpu_ms, use.memory_bytes) for use in uses] == [("u2", 1_000, 1 << 20)]

    run_virtually(scene())


def test_reused_pid_is_not_mistaken_for_kept_process(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with running_keeper(machine, journal) as keeper:
            record = await keeper.begin(ONE)
            assert record is not None
        reused = replace(record, began="virtual/long ago")
        Journal(FileDisk(), journal).write([reused], durably=True)
        machine.stuck = False
        async with running_keeper(machine, journal) as keeper:
            assert not keeper.world.runner.is_alive(ProcessHandle(reused.pid, reused.began))
            await keeper.until_ended(ONE)

    run_virtually(scene())


@pytest.mark.parametrize("body", [b"", b"{}", b'{"type":"sing"}', b"[" * 10_000])
def test_malformed_message_fails_one_request_only(tmp_path: Path, body: bytes) -> None:
    async def scene() -> None:
        async with running_keeper(Machine(), tmp_path / "journal") as keeper:
            with pytest.raises((msgspec.DecodeError, RecursionError)):
                await keeper.keeper.request(body)
            assert await keeper.begin(ONE) is not None

    run_virtually(scene())
