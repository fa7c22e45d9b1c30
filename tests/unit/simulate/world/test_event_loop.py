"""Simulated event loop: a seed determines the order, time only jumps, and killed or frozen processes do not run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from remit.simulate.world.event_loop import Deadlock, ExecutionUnit, Livelock, SimLoop
from remit.simulate.world.network import Network
from remit.simulate.world.processes import SimMachine, SimProcess
from remit.simulate.world.store import StoreService, run_sync
from remit.store.protocol import Commit
from remit.world.interfaces import ProcessHandle, ProcessSpec
from tests.unit.simulate.world_fixtures import Listener

ROOT = Path(__file__).parents[3]


@pytest.fixture
def loop() -> SimLoop:
    return SimLoop.seeded("loop")


def spawn(loop: SimLoop, work: Coroutine[Any, Any, None], name: str = "one") -> ExecutionUnit:
    unit = loop.new_unit(name)
    loop.spawn(work, name=f"task of {name}", unit=unit)
    return unit


def play(loop: SimLoop, until_s: float) -> None:
    """Run up to this time, even while tasks still wait."""
    loop.call_at(until_s + 1, loop.stop)
    loop.run(until_s)


async def forever() -> None:
    await asyncio.Event().wait()


# Time


def test_time_jumps_to_next_timer(loop: SimLoop) -> None:
    seen = []

    async def sleeper() -> None:
        for hours in (1, 1_000, 100_000):
            await asyncio.sleep(hours * 3_600)
            seen.append(loop.time())

    spawn(loop, sleeper())
    play(loop, 1e9)
    assert seen == [3_600.0, 3_603_600.0, 363_603_600.0]
    assert loop.time() == 1e9
    assert loop.events < 20


def test_run_stops_at_end_time_and_due_timers_run_next(loop: SimLoop) -> None:
    seen: list[float] = []
    for at_s in (9.999, 10.0, 10.5):
        loop.call_at(at_s, lambda: seen.append(loop.time()))
    loop.run(10.0)
    assert (seen, loop.time()) == ([9.999], 10.0)
    loop.call_at(30.0, loop.stop)
    loop.run(60.0)
    assert (seen, loop.time()) == ([9.999, 10.0, 10.5], 30.0)


def test_timers_of_same_time_run_in_order_set(loop: SimLoop) -> None:
    seen: list[int] = []
    for n in range(50):
        loop.call_later(1.0, seen.append, n)
    play(loop, 2.0)
    assert seen == list(range(50))


def test_timer_in_past_is_due_now(loop: SimLoop) -> None:
    loop.call_at(5.0, lambda: loop.call_at(1.0, loop.stop))
    loop.call_at(20.0, lambda: None)
    loop.run(10.0)
    assert loop.time() == 5.0


def test_cancelled_timers_do_not_keep_loop_alive(loop: SimLoop) -> None:
    """All tasks wait for each other, though a cancelled timeout would still be due."""
    handles = [loop.call_at(100.0 + n, loop.stop) for n in range(3)]
    unit = loop.new_unit("killed")
    loop.call_later(150.0, loop.stop, context=unit.context)

    async def waits() -> None:
        for handle in handles:
            handle.cancel()
        loop.kill(unit)
        await forever()

    spawn(loop, waits())
    with pytest.raises(Deadlock, match=r"^deadlock at 0\.000 s"):
        loop.run(50.0)


# Order


def orders(seed: str) -> tuple[list[str], str]:
    """The order of all steps of five processes with three alternating tasks each."""
    loop, seen = SimLoop.seeded(seed), list[str]()

    async def steps(name: str) -> None:
        for n in range(4):
            seen.append(f"{name}{n}")
            await asyncio.sleep(0)

    async def main(name: str) -> None:
        async with asyncio.TaskGroup() as group:
            for task in "xyz":
                group.create_task(steps(f"{name}{task}"))

    for name in "abcde":
        spawn(loop, main(name), name)
    play(loop, 2.0)
    return seen, loop.digest()


def test_seed_determines_order_of_steps() -> None:
    assert orders("1") == orders("1")
    (one, one_digest), (other, other_digest) = orders("1"), orders("2")
    assert sorted(one) == sorted(other)
    assert one != other
    assert one_digest != other_digest


def test_callbacks_of_one_process_run_in_scheduled_order() -> None:
    expected = [f"{task}{n}" for n in range(4) for task in "xyz"]
    for seed in range(20):
        seen, _ = orders(f"{seed}")
        for name in "abcde":
            assert [step[1:] for step in seen if step[0] == name] == expected


def test_every_order_between_processes_occurs() -> None:
    assert {next(step[0] for step in orders(f"{seed}")[0] if step[1:] == "x0") for seed in range(60)} == set("abcde")


def test_digest_covers_time_process_and_notes() -> None:
    def digest(at_s: float, name: str, record: bytes) -> str:
        loop = SimLoop.seeded("same")
        units = {name: loop.new_unit(name) for name in "ab"}
        loop.call_later(at_s, loop.add_to_digest, record, context=units[name].context)
        play(loop, 2.0)
        assert loop.digest() == loop.digest()
        return loop.digest()

    base = digest(1.0, "a", b"x")
    assert base == digest(1.0, "a", b"x")
    assert len({base, digest(1.1, "a", b"x"), digest(1.0, "b", b"x"), digest(1.0, "a", b"y")}) == 4


SCRIPT = """
import asyncio, gc, sys
from remit.simulate.world.event_loop import SimLoop

junk = [bytearray(n % 97) for n in range(int(sys.argv[1]))]  # so that addresses differ between runs
del junk[::3]
loop, seen = SimLoop.seeded("hashes"), []

async def child(name):
    try:
        await asyncio.sleep(10)
    except asyncio.CancelledError:
        seen.append(f"cancelled {name}")
        raise

async def bad():
    await asyncio.sleep(0.5)
    raise ValueError

async def main(name):
    try:
        async with asyncio.TaskGroup() as group:
            for n in range(20):
                group.create_task(child(f"{name}{n}"))
            group.create_task(bad())
    except* ValueError:
        pass
    tasks = {asyncio.ensure_future(asyncio.sleep(n % 3, f"{name}{n}")) for n in range(20)}
    while tasks:
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            seen.append(task.result())
    futures = {asyncio.get_running_loop().create_future() for _ in range(20)}
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: seen.append(f"future {number}"))
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)

for name in "abc":
    loop.spawn(main(name), name=name, unit=loop.new_unit(name))
loop.call_later(60.0, loop.stop)
loop.run(100.0)
assert len(seen) == 3 * 60, len(seen)
print(loop.digest(), hash(tuple(seen)) and ",".join(seen))
"""


def test_order_does_not_depend_on_hashes_or_addresses() -> None:
    found = set()
    for hash_seed, junk in (("1", "10"), ("1", "5000"), ("4242", "10")):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-c", SCRIPT, junk]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


# Killed processes


class KillScene:
    """A process with everything it can reach: its disk, a neighbour, a store, and programs on its machine."""

    def __init__(self) -> None:
        self.loop = SimLoop.seeded("death")
        self.network = Network(self.loop, "death")
        self.store = StoreService(self.loop, self.network, "scope", "death", Listener())
        self.requests: list[bytes] = []
        self.stages: list[str] = []
        self.machine = SimMachine(self.loop, "machine", Listener(), start_ms=0, rate=1.0)
        neighbour = self.process("neighbour", self.listen)
        neighbour.start()
        self.loop.call_later(60.0, self.loop.stop)
        self.loop.run(0.1)

    def process(self, name: str, main: Any) -> SimProcess:
        return SimProcess(self.loop, self.network, name, self.machine, "death", main)

    async def listen(self, process: SimProcess) -> None:
        async with process.world.link.serve("neighbour", self):
            await forever()

    async def request(self, body: bytes, /) -> bytes:
        self.requests.append(body)
        return b""

    def stream(self, body: bytes, /) -> Any:
        raise AssertionError("nobody asks for a stream")

    async def leave_traces(self, process: SimProcess, when: str) -> None:
        """Leave a trace everywhere, as far as it gets."""
        self.stages.append(when)
        world, path = process.world, Path(f"/{when}")
        with contextlib.suppress(Exception):
            world.disk.write_atomically(path, b"")
        for action in (
            lambda: world.link.request("neighbour", when.encode()),
            lambda: process.port(self.store).commit(Commit(puts=((when, b""),))),
            lambda: world.runner.start(ProcessSpec(("work", "-", "0"))),
        ):
            with contextlib.suppress(Exception):
                await action()

    async def main(self, process: SimProcess) -> None:
        await self.leave_traces(process, "alive")
        try:
            await self.deeper(process)
        except BaseException:
            await self.leave_traces(process, "except")
            raise
        finally:
            await self.leave_traces(process, "finally")

    async def deeper(self, process: SimProcess) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.sleeper(process))
            group.create_task(asyncio.sleep(7.0))
            await asyncio.sleep(5.0)

    async def sleeper(self, process: SimProcess) -> None:
        try:
            await asyncio.sleep(6.0)
        finally:
            with contextlib.suppress(Exception):
                process.world.disk.write_atomically(Path("/sleeper"), b"")

    def traces(self) -> tuple[list[str], list[bytes], list[str], list[ProcessHandle]]:
        rows = run_sync(self.store.store.range("")).rows
        names = list(self.machine.disk.names(Path("/")))
        return (
            names,
            list(self.requests),
            [row.key for row in rows],
            [run.running for run in self.machine.processes.runs.values()],
        )


def test_killed_process_runs_no_finally_block() -> None:
    scene = KillScene()
    process = scene.process("victim", scene.main)
    process.start()
    scene.loop.run(2.0)
    before = scene.traces()
    assert [len(trace) for trace in before] == [1, 1, 1, 1], "all four places have a trace"
    scene.loop.call_later(0.5, process.kill)
    scene.loop.run(100.0)
    assert scene.stages == ["alive"]
    assert scene.traces() == before
    scene.loop.finish()
    assert "finally" in scene.stages, "finish closes its coroutines"
    assert scene.traces() == before


def test_process_alive_at_end_of_run_leaves_no_traces_afterwards() -> None:
    scene = KillScene()
    scene.process("living", scene.main).start()
    scene.loop.run(2.0)
    before = scene.traces()
    scene.loop.finish()
    assert scene.stages[0] == "alive"
    assert len(scene.stages) > 1
    assert scene.traces() == before


def test_cancelling_task_of_killed_process_wakes_nothing(loop: SimLoop) -> None:
    stages = []

    async def waits() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            stages.append("cancelled")

    unit = loop.new_unit("dead")
    task = unit.context.copy().run(loop.create_task, waits())
    loop.call_later(1.0, loop.kill, unit)
    loop.call_later(2.0, task.cancel)
    play(loop, 10.0)
    assert not stages
    assert not task.done()


def test_ready_task_of_killed_process_is_not_cleaned_up_before_finish(loop: SimLoop) -> None:
    stages = []

    async def waits() -> None:
        try:
            for _ in range(1_000):
                await asyncio.sleep(0)
        finally:
            stages.append("finally")

    unit = spawn(loop, waits())
    loop.call_soon(loop.kill, unit)
    play(loop, 10.0)
    assert not stages
    loop.finish()
    assert stages == ["finally"]


def test_callbacks_of_killed_process_are_dropped_and_others_run(loop: SimLoop) -> None:
    stages: list[str] = []
    units = {name: loop.new_unit(name) for name in ("dead", "living")}
    for name, unit in units.items():
        loop.call_later(2.0, stages.append, f"timer of {name}", context=unit.context)
    loop.call_at(1.0, lambda: [loop.call_soon(stages.append, name, context=unit.context) for name, unit in units.items()])
    loop.call_at(1.0, loop.kill, units["dead"])
    loop.call_at(1.5, lambda: loop.call_soon(stages.append, "too late", context=units["dead"].context))
    play(loop, 5.0)
    assert [stages[0], stages[-1]] in (["living", "timer of living"], ["dead", "timer of living"])
    assert "timer of dead" not in stages
    assert "too late" not in stages


# Frozen processes


def test_frozen_process_catches_up_after_thaw(loop: SimLoop) -> None:
    seen: list[tuple[str, float]] = []

    async def ticks() -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            seen.append(("tick", loop.time()))

    unit = spawn(loop, ticks())
    for at_s in (5.0, 3.0, 4.0):
        loop.call_at(at_s, lambda at_s=at_s: seen.append((f"due {at_s}", loop.time())), context=unit.context)
    loop.call_at(1.5, loop.freeze, unit)
    loop.call_at(10.0, loop.thaw, unit)
    loop.call_at(20.0, loop.stop)
    loop.run(30.0)
    assert seen == [
        ("tick", 1.0),
        ("due 3.0", 10.0),
        ("due 4.0", 10.0),
        ("due 5.0", 10.0),
        ("tick", 10.0),
        ("tick", 11.0),
    ]


def test_process_frozen_twice_needs_two_thaws(loop: SimLoop) -> None:
    seen: list[float] = []
    unit = loop.new_unit("one")
    loop.call_at(2.0, lambda: seen.append(loop.time()), context=unit.context)
    for at_s, operation in ((1.0, loop.freeze), (1.5, loop.freeze), (3.0, loop.thaw), (4.0, loop.thaw)):
        loop.call_at(at_s, operation, unit)
    play(loop, 5.0)
    assert seen == [4.0]


def test_process_killed_while_frozen_stays_dead(loop: SimLoop) -> None:
    stages: list[str] = []
    unit = loop.new_unit("one")
    loop.call_at(2.0, stages.append, "due", context=unit.context)
    for at_s, operation in ((1.0, loop.freeze), (3.0, loop.kill), (4.0, loop.thaw)):
        loop.call_at(at_s, operation, unit)
    play(loop, 5.0)
    assert not stages


# Refused operations and reported errors


def test_threads_and_executors_are_refused(loop: SimLoop) -> None:
    stages = []

    async def tries() -> None:
        running = asyncio.get_running_loop()
        operations: list[Callable[[], Any]] = [
            lambda: running.call_soon_threadsafe(print),
            lambda: running.run_in_executor(None, print),
            lambda: running.subprocess_exec(asyncio.SubprocessProtocol, "true"),
        ]
        for operation in operations:
            try:
                found = operation()
                if asyncio.iscoroutine(found):
                    await found
            except (RuntimeError, NotImplementedError) as error:
                stages.append(type(error).__name__)
        try:
            await asyncio.to_thread(print)
        except RuntimeError as error:
            stages.append(str(error))
        loop.stop()

    spawn(loop, tries())
    loop.run(1.0)
    assert stages == [
        "RuntimeError",
        "RuntimeError",
        "NotImplementedError",
        "threads do not exist in the simulation: use world.offload",
    ]


def test_deadlock_report_names_waiting_tasks(loop: SimLoop) -> None:
    async def inner(event: asyncio.Event) -> None:
        await event.wait()

    async def outer() -> None:
        await inner(asyncio.Event())

    spawn(loop, outer(), "anna")
    spawn(loop, forever(), "ben")
    dead = spawn(loop, forever(), "dead")
    loop.call_later(3.0, loop.kill, dead)
    with pytest.raises(Deadlock) as caught:
        loop.run(10.0)
    text = str(caught.value)
    assert text.startswith("deadlock at 3.000 s: no callback is ready and no timer is set\n")
    assert "anna: task of anna waits at" in text
    assert "inner:" in text
    assert "ben: task of ben waits at forever:" in text
    assert "of dead" not in text


async def spinner() -> None:
    await asyncio.sleep(3.0)
    while True:  # noqa: ASYNC110 - the livelock to be detected
        await asyncio.sleep(0)


def test_livelock_report_names_spinning_task(loop: SimLoop) -> None:
    spawn(loop, spinner(), "anna")
    spawn(loop, forever(), "ben")
    with pytest.raises(Livelock, match=r"^livelock at 3\.000 s: .* anna: task of anna at spinner:\d+"):
        loop.run(10.0)


def test_livelock_report_names_repeating_callback(loop: SimLoop) -> None:
    def again() -> None:
        loop.call_later(0.0, again)

    loop.call_at(1.0, again)
    with pytest.raises(Livelock, match=r"^livelock at 1\.000 s: .* world: .*again"):
        loop.run(10.0)


def test_many_events_without_standing_time_are_no_livelock(loop: SimLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remit.simulate.world.event_loop._LIVELOCK_EVENTS", 50)

    async def steps() -> None:
        for _ in range(100):
            for _ in range(40):
                await asyncio.sleep(0)
            await asyncio.sleep(0.001)

    spawn(loop, steps())
    play(loop, 5.0)
    assert loop.events > 4_000


def test_failing_callback_is_reported_with_process(loop: SimLoop) -> None:
    failures: list[tuple[str, str, str]] = []
    loop.on_failure = lambda unit, error, message: failures.append((unit.name, repr(error), message))

    def bad() -> None:
        raise ValueError("bad")

    loop.call_soon(bad, context=loop.new_unit("anna").context)
    play(loop, 2.0)
    assert failures == [("anna", "ValueError('bad')", "a callback failed")]
    assert [(unit.name, message) for unit, _, message in loop.failures] == [("anna", "a callback failed")]


def test_failing_task_is_reported_with_process_it_runs_in(loop: SimLoop) -> None:
    failures: list[tuple[str, str, str]] = []
    loop.on_failure = lambda unit, error, message: failures.append((unit.name, repr(error), message))

    async def bad() -> None:
        await asyncio.sleep(1.0)
        raise ValueError("bad")

    anna, ben = loop.new_unit("anna"), loop.new_unit("ben")
    loop.spawn(bad(), name="from outside", unit=anna)
    loop.call_soon(lambda: loop.spawn(bad(), name="from ben", unit=anna), context=ben.context)
    loop.call_soon(lambda: loop.spawn(bad(), name="his own"), context=ben.context)
    loop.call_later(0.5, loop.kill, ben)
    play(loop, 5.0)
    assert sorted(failures) == [
        ("anna", "ValueError('bad')", "from ben failed"),
        ("anna", "ValueError('bad')", "from outside failed"),
    ]


def test_cancelled_task_is_no_failure(loop: SimLoop) -> None:
    async def ends() -> None:
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        await asyncio.sleep(1.0)

    spawn(loop, ends())
    play(loop, 5.0)
    assert not loop.failures


def test_nested_generators_are_closed_from_inside_without_warnings(loop: SimLoop, capfd: pytest.CaptureFixture[str]) -> None:
    """A generator whose inner step was closed first would never end, and would log an error when collected."""
    ended = []

    async def inner() -> AsyncGenerator[int, None]:
        try:
            while True:
                await asyncio.sleep(1)
                yield 1
        finally:
            ended.append("inner")

    async def outer() -> AsyncGenerator[int, None]:
        try:
            async with contextlib.aclosing(inner()) as items:
                async for item in items:
                    yield item
        finally:
            ended.append("outer")

    async def reader() -> None:
        async with contextlib.aclosing(outer()) as items:
            while await anext(items, None) is not None:
                pass
        ended.append("not here")

    spawn(loop, reader())
    play(loop, 5.5)
    loop.finish()
    gc.collect()
    assert ended == ["inner", "outer"]
    assert capfd.readouterr().err == ""
