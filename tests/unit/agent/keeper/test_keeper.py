"""What does a keeper start, hold and end? On a machine that is only written down, in a time that leaps."""

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
from tests.unit.agent.virtual_machines import NODE, BadDisk, FullDisk, Machine, keeping, world_on
from tests.unit.world.virtual_world import InlineOffload, run_virtually

T = TypeVar("T")
ONE, TWO = AttemptId("replica/t/a-0", "u1", 1), AttemptId("replica/t/b-0", "u2", 1)


def test_a_start_is_begun_once_whoever_asks_and_however_often(tmp_path: Path) -> None:
    """F37."""
    machine = Machine()

    async def scene() -> None:
        async with keeping(machine, tmp_path / "journal") as talk:
            first = await talk.begin(ONE)
            again = await asyncio.gather(*(talk.begin(ONE) for _ in range(5)))
            assert first is not None
            assert all(one == first for one in again)
            assert list(machine.runs) == [first.pid]
            assert (await talk.begin(ONE, number=1)) == first, "while it runs, the next start is not begun either"
            machine.end(first.pid, ExitStatus(code=3))
            ended = await talk.until_ended(ONE)
            assert ended.ended == ExitStatus(code=3)
            assert (await talk.begin(ONE)) == ended
            second = await talk.begin(ONE, number=1)
            assert second is not None
            assert second.pid != first.pid

    run_virtually(scene())


def test_nothing_more_is_begun_of_a_copy_that_is_barred_but_what_runs_is_not_barred(tmp_path: Path) -> None:
    """F37: a requested start arrives late, after the end of the attempt was reported."""
    machine = Machine()

    async def scene() -> None:
        async with keeping(machine, tmp_path / "journal") as talk:
            assert (await talk.say(BlockStart(*ONE))).kept is None
            late = await talk.begin(ONE)
            assert late is not None and late.failed and not late.alive and not machine.runs
            runs = await talk.begin(TWO)
            assert runs is not None
            assert (await talk.say(BlockStart(*TWO))).kept == runs
            machine.end(runs.pid, ExitStatus(code=1))
            await talk.until_ended(TWO)
            assert (await talk.begin(TWO, number=1)) is not None and len(machine.runs) == 1, "it was barred in vain"
            machine.end(next(iter(machine.runs)), ExitStatus(code=1))
            ended = await talk.until_ended(TWO)
            assert (await talk.say(BlockStart(*TWO))).kept == ended
            again = await talk.begin(TWO, number=2)
            assert again is not None and again.failed and not again.alive and not machine.runs

    run_virtually(scene())


def test_a_start_that_was_asked_for_twice_is_not_begun_after_it_was_forgotten(tmp_path: Path) -> None:
    """F37: whoever asked first heard nothing for long, and the second asking comes when all is over."""
    machine = Machine()

    async def scene() -> None:
        async with keeping(machine, tmp_path / "journal") as talk:
            first = await talk.begin(ONE)
            assert first is not None
            machine.end(first.pid, ExitStatus(code=0))
            await talk.until_ended(ONE)
            await talk.say(ForgetProcess(*ONE))
            late = await talk.begin(ONE)
            assert late is not None and late.failed and not late.alive and not machine.runs
            assert not await talk.table()

    run_virtually(scene())


def test_a_bar_waits_for_the_start_that_is_under_way(tmp_path: Path) -> None:
    """F37."""
    machine = Machine()

    async def scene() -> None:
        async with keeping(machine, tmp_path / "journal") as talk:
            begun, said = await asyncio.gather(talk.begin(ONE), talk.say(BlockStart(*ONE)))
            assert begun is not None and said.kept == begun and said.kept.alive

    run_virtually(scene())


def test_what_was_not_surely_written_down_is_not_begun(tmp_path: Path) -> None:
    """F14."""
    machine = Machine()

    async def scene() -> None:
        world = world_on(machine)
        async with keeping(machine, tmp_path / "journal", world=with_part(world, disk=BadDisk(world.disk))) as talk:
            refused = await talk.begin(ONE)
            assert refused is not None
            assert (refused.number, refused.failed) == (NO_START, "the disk fails to sync")
            assert not machine.runs
            assert not await talk.table()

    run_virtually(scene())


@pytest.mark.parametrize("turns", range(6))
def test_writes_that_end_one_after_another_end_no_keeper(tmp_path: Path, turns: int) -> None:
    """One that is told of news while a write is under way must not write again what is written by the time it comes to it."""
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

        async with keeping(machine, tmp_path / "journal", world=with_part(world, offload=Slow())) as talk:
            for number in range(3):
                both = await asyncio.gather(talk.begin(ONE, number=number), talk.begin(TWO, number=number))
                for kept in both:
                    assert kept is not None
                    machine.end(kept.pid, ExitStatus(code=0))
                await asyncio.gather(talk.until_ended(ONE), talk.until_ended(TWO))

    run_virtually(scene())


@pytest.mark.parametrize("number", [0, 1])
def test_a_journal_that_is_written_anew_keeps_a_start_that_was_just_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Also one within an attempt that has been started before: of two words on a copy the later stands."""
    monkeypatch.setattr("remit.agent.keeper.journal.COMPACT_LINES", -10)
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        world = world_on(machine)
        held = asyncio.Event()

        class Held(InlineOffload):
            """The work is done at once; of a start's promise the answer comes late."""

            async def __call__(self, work: Callable[[], T], /) -> T:
                result = work()
                found = Journal(FileDisk(), journal).read().get(TWO)
                if not held.is_set() and found is not None and found.number == number:
                    held.set()
                    await world.clock.sleep_ms(1_000)
                return result

        async with keeping(machine, journal, world=with_part(world, offload=Held())) as talk:
            first = await talk.begin(ONE)
            assert first is not None
            for before in range(number):
                again = await talk.begin(TWO, number=before)
                assert again is not None
                machine.end(again.pid, ExitStatus(code=1))
                await talk.until_ended(TWO)
            second = asyncio.create_task(talk.begin(TWO, number=number))
            await held.wait()
            machine.end(first.pid, ExitStatus(code=0))
            await talk.until_ended(ONE)
            assert Journal(FileDisk(), journal).read()[TWO].number == number
            assert await second is not None


class AtOnce:
    """Work that is done when it is asked for, but for some that takes until an instant."""

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


def test_a_keeper_goes_on_whatever_is_being_written_when_it_looks_at_its_deadlines(tmp_path: Path) -> None:
    """One that ends takes all fenced work of its machine with it."""
    machine, journal = Machine(), tmp_path / "journal"
    world = world_on(machine)
    disk = AtOnce(world.clock)

    async def scene() -> None:
        async with keeping(machine, journal, world=with_part(world, offload=disk)) as talk:
            clock = talk.world.clock
            await talk.say(ConfirmRenewals({NODE: clock.now_ms()}))
            assert await talk.begin(ONE, fence_ms=60_000) is not None
            looks_ms = clock.now_ms() + 1_000
            await clock.sleep_ms(1)
            disk.until_ms = looks_ms  # it is written down in the very moment of that look
            await talk.say(StopProcess(*ONE, 500))
            await clock.sleep_ms(2_000)
            disk.until_ms = None
            assert (await talk.begin(TWO)) is not None
            assert list(Journal(FileDisk(), journal).read()) == [ONE, TWO]

    run_virtually(scene())


def test_what_is_written_at_the_same_time_is_written_once_each(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"
    world = world_on(machine)
    disk = AtOnce(world.clock)
    copies = [AttemptId(f"replica/t/a-{number}", f"u{number}", 1) for number in range(50)]

    async def scene() -> None:
        async with keeping(machine, journal, world=with_part(world, offload=disk)) as talk:
            disk.until_ms = talk.world.clock.now_ms() + 100
            await asyncio.gather(*(talk.begin(copy) for copy in copies))
            disk.until_ms = talk.world.clock.now_ms() + 100
            for pid in tuple(machine.runs):
                machine.end(pid, ExitStatus(code=0))
            for copy in copies:
                await talk.until_ended(copy)
        assert journal.read_text().count("\n") == 3 * len(copies), "begun, what runs, and how it ended"

    run_virtually(scene())


def test_what_could_not_be_written_is_written_as_it_stands_when_it_can_be(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"
    world = world_on(machine)
    disk = FullDisk(world.disk)

    async def scene() -> None:
        async with keeping(machine, journal, world=with_part(world, disk=disk)) as talk:
            first, second = await talk.begin(ONE), await talk.begin(TWO)
            assert first is not None
            assert second is not None
            disk.full = True
            machine.end(first.pid, ExitStatus(code=3))
            machine.end(second.pid, ExitStatus(code=4))
            for copy in (ONE, TWO):
                await talk.until_ended(copy)
            await talk.say(ForgetProcess(*TWO))
            assert Journal(FileDisk(), journal).read()[ONE].alive
            disk.full = False
            await talk.world.clock.sleep_ms(2_500)
            found = Journal(FileDisk(), journal).read()
            assert list(found) == [ONE]
            assert found[ONE].ended == ExitStatus(code=3)

    run_virtually(scene())


def test_the_next_keeper_finds_what_runs_and_how_it_ended_is_told(tmp_path: Path) -> None:
    """F36."""
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with keeping(machine, journal) as talk:
            first = await talk.begin(ONE)
            assert first is not None
        assert first.pid in machine.runs
        async with keeping(machine, journal) as talk:
            assert (await talk.table())[ONE] == first
            assert (await talk.begin(ONE)) == first
            assert len(machine.runs) == 1
            machine.end(first.pid, ExitStatus(code=0))
            assert (await talk.until_ended(ONE)).ended == ExitStatus(), "nobody's child: only that it ended is known"

    run_virtually(scene())


def test_what_is_left_of_work_whose_first_process_died_with_its_keeper_is_ended_before_that_is_told(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with keeping(machine, journal) as talk:
            kept = await talk.begin(ONE)
            assert kept is not None
            child = machine.begin(machine.runs[kept.pid])
            machine.children[kept.pid] = [child]
        machine.end(kept.pid, ExitStatus(signal=9))
        machine.deaf = True
        async with keeping(machine, journal) as talk:
            assert (await talk.table())[ONE].alive, "not while anything of it runs"
            await talk.until_ended(ONE)
            assert child not in machine.runs
            assert machine.told == [(child, "term"), (child, "kill")]

    run_virtually(scene())


def test_a_start_that_was_cut_off_is_cleared_and_counts_as_begun(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with keeping(machine, journal) as talk:
            kept = await talk.begin(ONE)
            assert kept is not None
        Journal(FileDisk(), journal).write([replace(kept, pid=0, began="", group="")], durably=True)
        async with keeping(machine, journal) as talk:
            await talk.until_ended(ONE)
            assert machine.told == [(kept.pid, "clear")]
            assert not machine.runs

    run_virtually(scene())


def test_what_a_damaged_journal_does_not_know_any_more_is_ended_and_not_left_to_run_for_ever(tmp_path: Path) -> None:
    """F36: whoever is asked for it would say that nothing runs, and it would be begun again."""
    machine, journal, rooms = Machine(), tmp_path / "journal", tmp_path / "work"
    for name in (ONE.file_name, TWO.file_name, "lost+found", ".hidden"):
        (rooms / name).mkdir(parents=True)

    async def scene() -> None:
        async with keeping(machine, journal, rooms=rooms) as talk:
            known = await talk.begin(TWO)
            lost = await talk.begin(ONE)
            assert known is not None
            assert lost is not None
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join(b"\x00" * 9 + b"\n" if b'"uid":"u1"' in line else line for line in lines))
        async with keeping(machine, journal, rooms=rooms) as talk:
            assert list(await talk.table()) == [TWO]
            assert machine.told == [(lost.pid, "clear")]
            assert list(machine.runs) == [known.pid]

    run_virtually(scene())


def test_a_keeper_whose_journal_cannot_be_read_says_so_once_and_waits(tmp_path: Path) -> None:
    """F14."""
    machine, journal = Machine(), tmp_path / "journal"
    journal.mkdir()
    said: list[str] = []

    async def scene() -> None:
        async with keeping(machine, journal, tell=said.append) as talk:
            await talk.world.clock.sleep_ms(5_000)
            assert len(said) == 1
            assert f"{journal} cannot be used" in said[0]
            journal.rmdir()
            assert await talk.table() == {}

    run_virtually(scene())


def test_after_a_reboot_all_is_gone_and_no_instant_of_before_counts(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with keeping(machine, journal) as talk:
            kept = await talk.begin(ONE)
            assert kept is not None
        late = replace(kept, boot="another", since_ms=10**12)
        other = replace(late, key=TWO.key, uid="u2", ended=ExitStatus(code=1), ended_ms=10**12)
        Journal(FileDisk(), journal).write([late, other], durably=True)
        async with keeping(machine, journal) as talk:
            table = await talk.table()
            now_ms = talk.world.clock.now_ms()
            assert table[ONE].ended == ExitStatus()
            assert table[TWO].ended == ExitStatus(code=1)
            assert all(one.ended_ms <= now_ms and one.since_ms <= now_ms for one in table.values())

    run_virtually(scene())


def test_without_a_renewal_nothing_fenced_begins_and_what_runs_is_ended_when_its_fence_has_passed(tmp_path: Path) -> None:
    """F18 F34."""
    machine = Machine()

    async def scene() -> None:
        async with keeping(machine, tmp_path / "journal") as talk:
            clock = talk.world.clock
            assert await talk.begin(ONE, fence_ms=1_000) is None, "no renewal of its node is known"
            sent_ms = clock.now_ms()
            await clock.sleep_ms(300)
            await talk.say(ConfirmRenewals({NODE: sent_ms, "other": sent_ms + 10**6}))
            kept = await talk.begin(ONE, fence_ms=1_000)
            eager = await talk.begin(TWO)
            assert kept is not None
            assert eager is not None
            ended = await talk.until_ended(ONE)
            assert ended.fenced
            assert ended.ended_ms - sent_ms in range(1_000, 1_100), "counted from when the renewal was sent"
            assert list(machine.runs) == [eager.pid]
            assert await talk.begin(ONE, number=1, fence_ms=1_000) is None, "nor is it started again"

    run_virtually(scene())


def test_a_renewal_puts_the_deadline_off_and_one_from_the_future_does_not(tmp_path: Path) -> None:
    machine = Machine()

    async def scene() -> None:
        async with keeping(machine, tmp_path / "journal") as talk:
            clock, began_ms = talk.world.clock, talk.world.clock.now_ms()
            await talk.say(ConfirmRenewals({NODE: began_ms}))
            await talk.begin(ONE, fence_ms=1_000)
            for _ in range(5):
                await clock.sleep_ms(500)
                await talk.say(ConfirmRenewals({NODE: clock.now_ms()}))
                await talk.say(ConfirmRenewals({NODE: began_ms}))  # one that came late does not bring the deadline nearer
            assert (await talk.table())[ONE].alive
            last_ms = clock.now_ms()
            await talk.say(ConfirmRenewals({NODE: last_ms + 60_000}))
            assert (await talk.until_ended(ONE)).ended_ms < last_ms + 1_100

    run_virtually(scene())


def test_fenced_work_that_outlived_its_keeper_is_ended_by_the_next(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with keeping(machine, journal) as talk:
            await talk.say(ConfirmRenewals({NODE: talk.world.clock.now_ms()}))
            await talk.begin(ONE, fence_ms=600_000)
        assert machine.runs
        async with keeping(machine, journal) as talk:
            assert (await talk.until_ended(ONE)).fenced
            assert not machine.runs

    run_virtually(scene())


def test_an_end_is_asked_for_then_made_and_one_who_has_less_patience_shortens_it(tmp_path: Path) -> None:
    machine = Machine()
    machine.deaf = True

    async def scene() -> None:
        async with keeping(machine, tmp_path / "journal") as talk:
            kept = await talk.begin(ONE)
            assert kept is not None
            began_ms = talk.world.clock.now_ms()
            await talk.say(StopProcess(*ONE, 30_000, "timeout"))
            await talk.say(StopProcess(*ONE, 60_000))
            await talk.world.clock.sleep_ms(100)
            assert machine.told == [(kept.pid, "term")]
            await talk.say(StopProcess(*ONE, 200))
            ended = await talk.until_ended(ONE)
            assert ended.why == "timeout"
            assert ended.ended_ms - began_ms in range(300, 400)
            assert ended.ended == ExitStatus(signal=9)

    run_virtually(scene())


def test_what_cannot_be_ended_now_is_tried_again(tmp_path: Path) -> None:
    machine = Machine()

    async def scene() -> None:
        async with keeping(machine, tmp_path / "journal") as talk:
            await talk.begin(ONE)
            machine.stuck = True
            await talk.say(StopProcess(*ONE, 0))
            await talk.world.clock.sleep_ms(5_000)
            assert (await talk.table())[ONE].alive
            machine.stuck = False
            await talk.until_ended(ONE)

    run_virtually(scene())


def test_a_program_that_is_not_there_has_ended_with_its_cause_and_cure(tmp_path: Path) -> None:
    machine = Machine()
    machine.refuses = "no such program"

    async def scene() -> None:
        async with keeping(machine, tmp_path / "journal") as talk:
            kept = await talk.begin(ONE)
            assert kept is not None
            assert (kept.failed, kept.cure, kept.number) == ("no such program", "install it", 0)
            machine.refuses = ""
            assert (await talk.begin(ONE)) == kept, "under this number it is not begun again"

    run_virtually(scene())


def test_only_what_has_ended_is_forgotten_and_readers_hear_of_each_change(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with keeping(machine, journal) as talk:
            stream = talk.keeper.stream(b"")
            assert msgspec.json.decode(await anext(stream), type=ProcessTable).whole
            kept = await talk.begin(ONE)
            assert kept is not None
            await talk.say(ForgetProcess(*ONE))
            assert ONE in await talk.table()
            machine.end(kept.pid, ExitStatus(code=0))
            await talk.until_ended(ONE)
            await talk.say(ForgetProcess(*ONE))
            assert not await talk.table()
            heard = msgspec.json.decode(await anext(stream), type=ProcessTable)
            assert heard.gone == (tuple(ONE),), "of each copy the last"
            await stream.aclose()
        assert Journal(FileDisk(), journal).read() == {}

    run_virtually(scene())


def test_a_keeper_that_is_told_to_quit_ends_everything_begins_nothing_and_then_ends_itself(tmp_path: Path) -> None:
    machine = Machine()
    machine.deaf = True

    async def scene() -> None:
        async with keeping(machine, tmp_path / "journal") as talk:
            await talk.begin(ONE)
            await talk.begin(TWO)
            began_ms = talk.world.clock.now_ms()
            quitting = asyncio.create_task(talk.say(Shutdown(1_000)))
            await talk.world.clock.sleep_ms(100)
            late = await talk.begin(AttemptId("replica/t/c-0", "u3", 1))
            assert late is not None
            assert late.number == NO_START
            await quitting
            assert not machine.runs
            assert talk.world.clock.now_ms() - began_ms in range(1_000, 1_300)

    run_virtually(scene())


def test_uses_are_those_of_what_runs(tmp_path: Path) -> None:
    machine = Machine()

    async def scene() -> None:
        async with keeping(machine, tmp_path / "journal") as talk:
            kept = await talk.begin(ONE)
            await talk.begin(TWO)
            assert kept is not None
            machine.end(kept.pid, ExitStatus(code=0))
            await talk.until_ended(ONE)
            uses = (await talk.say(GetUsage())).uses
            assert [(use.uid, use.cpu_ms, use.memory_bytes) for use in uses] == [("u2", 1_000, 1 << 20)]

    run_virtually(scene())


def test_a_process_of_the_same_number_that_is_another_one_is_not_taken_for_it(tmp_path: Path) -> None:
    machine, journal = Machine(), tmp_path / "journal"

    async def scene() -> None:
        async with keeping(machine, journal) as talk:
            kept = await talk.begin(ONE)
            assert kept is not None
        stranger = replace(kept, began="virtual/long ago")
        Journal(FileDisk(), journal).write([stranger], durably=True)
        machine.stuck = False
        async with keeping(machine, journal) as talk:
            assert not talk.world.runner.is_alive(ProcessHandle(stranger.pid, stranger.began))
            await talk.until_ended(ONE)

    run_virtually(scene())


@pytest.mark.parametrize("body", [b"", b"{}", b'{"type":"sing"}', b"[" * 10_000])
def test_words_that_are_none_break_off_one_call(tmp_path: Path, body: bytes) -> None:
    async def scene() -> None:
        async with keeping(Machine(), tmp_path / "journal") as talk:
            with pytest.raises((msgspec.DecodeError, RecursionError)):
                await talk.keeper.request(body)
            assert await talk.begin(ONE) is not None

    run_virtually(scene())
