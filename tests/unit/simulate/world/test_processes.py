"""Simulated processes: what survives a restart, what runs on without them, and what a power cut ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from remit.simulate.world.clock import SimClock
from remit.simulate.world.event_loop import SimLoop
from remit.simulate.world.network import Network
from remit.simulate.world.processes import ProcessMain, SimMachine, SimProcess
from remit.simulate.world.runner import SimProgram, parse_program
from remit.world.interfaces import ExitStatus, NotStarted, ProcessHandle, ProcessSpec

PATH = Path("/note")


class MachineScene:
    """One machine with processes; it records what ran when."""

    made: ClassVar[list[MachineScene]] = []

    def __init__(self) -> None:
        self.loop = SimLoop.seeded("house")
        self.network = Network(self.loop, "house")
        self.machine = SimMachine(self.loop, "machine", self, start_ms=5_000, rate=1.0)
        self.record: list[tuple[str, int, float]] = []
        self.stop_requests: list[tuple[int, str]] = []
        self.ends: list[tuple[str, str]] = []
        self.loop.call_at(1e6, self.loop.stop)
        self.made.append(self)

    def program_started(self, machine: str, order: ProcessSpec, pid: int) -> None:
        self.record.append(("started", pid, round(self.loop.time(), 3)))

    def program_stop_requested(self, machine: str, pid: int, by: str) -> None:
        self.stop_requests.append((pid, by))

    def program_ended(self, machine: str, pid: int) -> None:
        self.record.append(("ended", pid, round(self.loop.time(), 3)))

    def process(self, main: ProcessMain, name: str = "anna") -> SimProcess:
        process = SimProcess(self.loop, self.network, name, self.machine, "house", main)
        process.on_end = lambda ended, failure: self.ends.append((ended.name, repr(failure)))
        return process

    def run(self, for_s: float) -> None:
        self.loop.run(self.loop.time() + for_s)
        assert not self.loop.failures, self.loop.failures


@pytest.fixture
def scene() -> Iterator[MachineScene]:
    yield MachineScene()
    while MachineScene.made:
        MachineScene.made.pop().loop.finish()


# Processes


def test_each_start_has_new_ids_on_same_disk_and_clock(scene: MachineScene) -> None:
    worlds, ids, chances, found = [], [], [], []

    async def main(process: SimProcess) -> None:
        world = process.world
        worlds.append(world)
        ids.append((world.ids.incarnation(), world.ids.nonce()))
        chances.append(world.randomness.randrange(1 << 60))
        found.append(world.disk.read(PATH) if world.disk.exists(PATH) else b"")
        world.disk.write_atomically(PATH, b"%d" % process.starts)
        await asyncio.Event().wait()

    process = scene.process(main)
    for _ in range(3):
        process.start()
        process.start()
        scene.run(10.0)
        process.kill()
        scene.run(10.0)
    assert process.starts == 3
    assert found == [b"", b"1", b"2"]
    assert len(set(ids)) == len(set(chances)) == 3
    assert all(world.clock is scene.machine.clock for world in worlds)
    assert (scene.machine.clock.now_ms(), scene.machine.clock.boot()) == (65_000, "machine-0")


def test_seed_determines_ids() -> None:
    def ids() -> list[str]:
        scene, found = MachineScene(), list[str]()

        async def main(process: SimProcess) -> None:
            found.append(process.world.ids.nonce())
            found.append(process.world.ids.incarnation())
            await asyncio.Event().wait()

        for name in ("anna", "ben"):
            scene.process(main, name).start()
        scene.run(1.0)
        scene.loop.finish()
        return sorted(found)

    assert ids() == ids()
    assert len(set(ids())) == 4


def test_ended_or_failed_process_is_reported_and_can_restart(scene: MachineScene) -> None:
    async def main(process: SimProcess) -> None:
        await asyncio.sleep(1.0)
        if process.starts == 1:
            raise ValueError("no")

    process = scene.process(main)
    for _ in range(2):
        process.start()
        scene.run(5.0)
        assert not process.alive
    assert scene.ends == [("anna", "ValueError('no')"), ("anna", "None")]


def test_killed_process_is_reported_unresponsive_not_ended(scene: MachineScene) -> None:
    silenced = []

    async def main(process: SimProcess) -> None:
        await asyncio.sleep(1.0)

    process = scene.process(main)
    process.on_unresponsive = lambda silent: silenced.append(silent.name)
    process.start()
    process.kill()
    process.kill()
    scene.run(5.0)
    assert scene.ends == []
    assert silenced == ["anna"]


def test_process_killed_while_frozen_restarts_awake(scene: MachineScene) -> None:
    steps = []

    async def main(process: SimProcess) -> None:
        while True:
            steps.append(process.starts)
            await process.world.clock.sleep_ms(1_000)

    process = scene.process(main)
    process.start()
    scene.run(0.5)
    process.freeze()
    scene.run(5.0)
    process.kill()
    process.start()
    scene.run(2.5)
    assert steps == [1, 2, 2, 2]


# Programs on a machine


def test_program_outlives_its_parent_and_is_found_after_restart(scene: MachineScene) -> None:
    left: list[ProcessHandle] = []
    results: list[Any] = []

    async def main(process: SimProcess) -> None:
        runner = process.world.runner
        if process.starts == 1:
            left.append(await runner.start(ProcessSpec(("work", "30000", "3"))))
            await asyncio.Event().wait()
        results.append(runner.is_alive(left[0]))
        results.append(await runner.wait(left[0]))
        results.append(runner.is_alive(left[0]))

    process = scene.process(main)
    process.start()
    scene.run(5.0)
    process.kill()
    scene.run(5.0)
    process.start()
    scene.run(60.0)
    pid = left[0].pid
    assert results == [True, ExitStatus(), False], "only its parent gets the exit status"
    assert scene.record == [("started", pid, 0.005), ("ended", pid, 30.005)]


def test_parent_gets_exit_status(scene: MachineScene) -> None:
    results: list[ExitStatus] = []

    async def main(process: SimProcess) -> None:
        runner = process.world.runner
        for arguments in (("work", "1000", "3"), ("work", "-", "0", "200"), ("work", "-", "0", "-")):
            running = await runner.start(ProcessSpec(arguments))
            if arguments[1] == "-":
                await runner.stop(running, grace_ms=2_000)
            results.append(await runner.wait(running))

    scene.process(main).start()
    scene.run(60.0)
    assert results == [ExitStatus(code=3), ExitStatus(signal=15), ExitStatus(signal=9)]
    spans = [round(end[2] - begin[2], 3) for begin, end in zip(scene.record[::2], scene.record[1::2], strict=True)]
    assert spans == [1.0, 0.2, 2.0]
    assert scene.stop_requests == [(102, "anna#1"), (103, "anna#1")], "a program that ends by itself got no stop request"


def test_power_cut_ends_all_programs_and_resets_clock(scene: MachineScene) -> None:
    async def main(process: SimProcess) -> None:
        for _ in range(3):
            await process.world.runner.start(ProcessSpec(("work", "-", "0")))
        await asyncio.Event().wait()

    process = scene.process(main)
    process.start()
    scene.run(10.0)
    process.kill()
    scene.machine.processes.power_cut()
    scene.machine.clock.reboot()
    assert scene.machine.processes.runs == {}
    assert [what for what, _, _ in scene.record] == ["started"] * 3 + ["ended"] * 3
    assert scene.stop_requests == []
    assert (scene.machine.clock.now_ms(), scene.machine.clock.boot()) == (0, "machine-1")
    scene.run(60.0)
    assert scene.machine.clock.now_ms() == 60_000
    assert len(scene.record) == 6, "no program ends twice"


def test_reused_pid_is_another_process(scene: MachineScene) -> None:
    results = []

    async def main(process: SimProcess) -> None:
        runner = process.world.runner
        running = await runner.start(ProcessSpec(("work", "-", "0")))
        other = ProcessHandle(running.pid, "another time")
        await runner.stop(other, grace_ms=10)
        results.append((runner.is_alive(running), runner.is_alive(other), await runner.wait(other)))

    scene.process(main).start()
    scene.run(5.0)
    assert results == [(True, False, ExitStatus())]


# Programs


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        (("work",), SimProgram(0, 0, 0)),
        (("work", "30000"), SimProgram(30_000, 0, 0)),
        (("work", "30000", "2"), SimProgram(30_000, 2, 0)),
        (("work", "-", "0"), SimProgram(None, 0, 0)),
        (("work", "-", "0", "5000"), SimProgram(None, 0, 5_000)),
        (("work", "-", "0", "-"), SimProgram(None, 0, None)),
    ],
)
def test_program_words_parse_and_format(arguments: tuple[str, ...], program: SimProgram) -> None:
    assert parse_program(arguments) == program
    assert parse_program(program.argv()) == program


@pytest.mark.parametrize(
    "arguments",
    [
        ("",),
        ("sleep", "5"),
        ("work", "soon"),
        ("work", ""),
        ("work", "-5"),
        ("work", "1.5"),
        ("work", "1", "zero"),
        ("work", "1", "-"),
        ("work", "1", "0", "-1"),
        ("work", "1", "0", "0", "0"),
        ("work", "1", "ready=soon"),
        ("work", "1", "colour=5"),
    ],
)
def test_invalid_program_words_do_not_start(scene: MachineScene, arguments: tuple[str, ...]) -> None:
    results = []

    async def main(process: SimProcess) -> None:
        try:
            await process.world.runner.start(ProcessSpec(arguments))
        except NotStarted as error:
            results.append(error.cure)

    scene.process(main).start()
    scene.run(1.0)
    assert results == ["use work MS CODE STOP_MS"]
    assert scene.ends == [("anna", "None")]
    assert scene.record == []


# Clocks


def clock_run(loop: SimLoop, work: Coroutine[Any, Any, None]) -> None:
    loop.spawn(work, name="clock", unit=loop.new_unit("anna"))
    loop.call_at(1e6, loop.stop)
    loop.run(1e5)
    assert not loop.failures, loop.failures


def test_clock_starts_at_given_time() -> None:
    loop = SimLoop.seeded("clock")
    loop.call_at(100.0, loop.stop)
    loop.run(200.0)
    assert SimClock(loop, "late", start_ms=7_000).now_ms() == 7_000


def test_clock_rate_change_keeps_reading_and_never_goes_back() -> None:
    loop = SimLoop.seeded("clock")
    clock = SimClock(loop, "m", start_ms=1_000, rate=1.01)
    seen = []

    async def main() -> None:
        for rate in (0.99, 1.0, 1.5, 0.996):
            await asyncio.sleep(10.0)
            seen.append(clock.now_ms())
            clock.drift(rate)
            seen.append(clock.now_ms())

    clock_run(loop, main())
    assert seen == sorted(seen)
    assert [later - before for before, later in zip(seen[::2], seen[1::2], strict=True)] == [0, 0, 0, 0]
    assert seen[0] == 11_100
    assert seen[-1] == 1_000 + 10_100 + 9_900 + 10_000 + 15_000


def test_sleep_and_timeout_follow_clock_rate() -> None:
    loop = SimLoop.seeded("clock")
    fast = SimClock(loop, "fast", rate=1.25)
    seen: list[float] = []

    async def main() -> None:
        await fast.sleep_ms(10_000)
        seen.append(loop.time())
        try:
            async with fast.timeout_ms(10_000):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append(loop.time())

    clock_run(loop, main())
    assert seen == pytest.approx([8.0, 16.0])


def test_sleep_on_slowed_clock_lasts_full_time() -> None:
    loop = SimLoop.seeded("clock")
    clock = SimClock(loop, "m")
    seen: list[int] = []

    async def main() -> None:
        await clock.sleep_ms(10_000)
        seen.append(clock.now_ms())

    loop.call_at(1.0, clock.drift, 0.5)
    clock_run(loop, main())
    assert seen[0] in (10_000, 10_001)


def test_wall_clock_jump_does_not_move_monotonic_time() -> None:
    loop = SimLoop.seeded("clock")
    clock = SimClock(loop, "m", start_ms=1_000)
    assert clock.wall() == "2026-01-01T00:00:00.000Z"
    clock.wall_offset_ms -= 3_600_000
    assert clock.wall() == "2025-12-31T23:00:00.000Z"
    assert clock.now_ms() == 1_000
