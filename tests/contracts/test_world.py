"""Does a world keep its promises? One suite over the Protocols, run on each twin in `WORLDS`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from remit.world.interfaces import FileBusy, FileMissing, FileTooLarge, OffloadClosed, Randomness, World
from remit.world.production import production
from tests.contracts.worlds import WORLDS, WorldTwin


@pytest.fixture(params=WORLDS, ids=lambda twin: twin.__name__)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> WorldTwin:
    make: type[WorldTwin] = request.param
    return make(tmp_path)


def play(stage: WorldTwin, scene: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        world = stage.world()
        try:
            await scene(world)
        finally:
            await world.offload.close()

    stage.run(whole())


# ---------------------------------------------------------------------------------------------------------------- clock


def test_the_clock_never_goes_back(stage: WorldTwin) -> None:
    async def scene(world: World) -> None:
        seen = []
        for turn in range(2_000):
            seen.append(world.clock.now_ms())
            if turn % 100 == 0:
                await world.clock.sleep_ms(1)
        assert seen == sorted(seen)
        assert seen[-1] > seen[0]

    play(stage, scene)


@pytest.mark.parametrize("ms", [0, 1, 7, 40])
def test_a_sleep_lasts_at_least_that_long(stage: WorldTwin, ms: int) -> None:
    async def scene(world: World) -> None:
        for _ in range(5):
            began_ms = world.clock.now_ms()
            await world.clock.sleep_ms(ms)
            assert world.clock.now_ms() - began_ms >= ms

    play(stage, scene)


def test_others_run_while_one_sleeps_even_for_nothing(stage: WorldTwin) -> None:
    async def scene(world: World) -> None:
        told: list[str] = []

        async def other() -> None:
            told.append("other")

        async with asyncio.TaskGroup() as group:
            group.create_task(other())
            await world.clock.sleep_ms(0)
            told.append("sleeper")
        assert told == ["other", "sleeper"]

    play(stage, scene)


def test_sleepers_wake_in_the_order_of_their_alarms(stage: WorldTwin) -> None:
    async def scene(world: World) -> None:
        woken: list[int] = []

        async def sleeper(ms: int) -> None:
            await world.clock.sleep_ms(ms)
            woken.append(ms)

        async with asyncio.TaskGroup() as group:
            for ms in (120, 0, 60):
                group.create_task(sleeper(ms))
        assert woken == [0, 60, 120]

    play(stage, scene)


def test_a_timeout_ends_a_wait_and_lets_a_quick_one_pass(stage: WorldTwin) -> None:
    async def scene(world: World) -> None:
        with pytest.raises(TimeoutError):
            async with world.clock.timeout_ms(20):
                await world.clock.sleep_ms(60_000)
        async with world.clock.timeout_ms(60_000):
            await world.clock.sleep_ms(1)

    play(stage, scene)


def test_no_sleep_is_negative(stage: WorldTwin) -> None:
    async def scene(world: World) -> None:
        with pytest.raises(ValueError, match="-1"):
            await world.clock.sleep_ms(-1)

    play(stage, scene)


def test_the_boot_has_one_name_in_every_world_of_it(stage: WorldTwin) -> None:
    async def scene(world: World) -> None:
        assert world.clock.boot()
        assert world.clock.boot() == world.clock.boot() == stage.world().clock.boot()

    play(stage, scene)


def test_the_wall_is_rfc_3339_in_utc_with_milliseconds(stage: WorldTwin) -> None:
    async def scene(world: World) -> None:
        wall = world.clock.wall()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", wall)
        assert datetime.fromisoformat(wall).utcoffset() is not None

    play(stage, scene)


# ----------------------------------------------------------------------------------------------------------- chance, ids


def draws(chance: Randomness) -> list[object]:
    return [
        *(chance.randrange(1_000) for _ in range(50)),
        *(chance.jitter_ms(1_000) for _ in range(50)),
        chance.choice(["a", "b", "c"]),
        chance.shuffled(range(50)),
        chance.stream("other").randrange(1 << 60),
    ]


def test_one_seed_is_one_stream(stage: WorldTwin) -> None:
    assert draws(stage.chance("7")) == draws(stage.chance("7"))
    assert draws(stage.chance("7")) != draws(stage.chance("8"))


def test_what_one_stream_draws_does_not_shift_another(stage: WorldTwin) -> None:
    drained, fresh = stage.chance("7"), stage.chance("7")
    draws(drained)
    assert draws(drained.stream("probe")) == draws(fresh.stream("probe"))
    assert draws(fresh.stream("probe")) != draws(fresh.stream("jitter"))


def test_lots_stay_in_range_and_reach_its_ends(stage: WorldTwin) -> None:
    chance = stage.chance("7")
    assert {chance.randrange(3) for _ in range(300)} == {0, 1, 2}
    assert {chance.jitter_ms(2) for _ in range(300)} == {0, 1, 2}
    assert {chance.choice("ab") for _ in range(100)} == {"a", "b"}
    assert chance.jitter_ms(0) == 0
    assert chance.randrange(1) == 0
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="range"):
            chance.randrange(wrong)


def test_shuffling_keeps_everything_and_leaves_the_original(stage: WorldTwin) -> None:
    items = list(range(100))
    shuffled = stage.chance("7").shuffled(items)
    assert items == list(range(100))
    assert sorted(shuffled) == items != shuffled


def test_ids_are_unique_and_fit_between_dots_in_urls_and_in_file_names(stage: WorldTwin) -> None:
    ids = stage.world().ids
    nonces = [ids.nonce() for _ in range(20_000)]
    incarnations = [ids.incarnation() for _ in range(500)]
    for names in (nonces, incarnations):
        assert len(set(names)) == len(names)
        assert all(re.fullmatch("[a-z2-7]{8,32}", name) for name in names)


# ----------------------------------------------------------------------------------------------------------------- disk


def test_what_was_written_is_read(stage: WorldTwin, tmp_path: Path) -> None:
    disk, path = stage.world().disk, tmp_path / "journal"
    assert not disk.exists(path)
    for data in (b"", b"one", b"two" * 100_000, b"3"):
        disk.write_atomically(path, data)
        assert disk.read(path) == data
    assert disk.exists(path)
    assert disk.list(tmp_path) == ("journal",)


def test_what_is_not_there_is_missing(stage: WorldTwin, tmp_path: Path) -> None:
    disk = stage.world().disk
    for deed in (lambda: disk.read(tmp_path / "no"), lambda: disk.list(tmp_path / "no")):
        with pytest.raises(FileMissing) as caught:
            deed()
        assert str(tmp_path / "no") in caught.value.cause
        assert caught.value.cure
    with pytest.raises(FileMissing):
        disk.write_atomically(tmp_path / "no" / "file", b"")


def test_a_read_is_bounded(stage: WorldTwin, tmp_path: Path) -> None:
    disk, path = stage.world().disk, tmp_path / "large"
    disk.write_atomically(path, b"x" * 11)
    assert disk.read(path, bytes_max=11) == b"x" * 11
    with pytest.raises(FileTooLarge):
        disk.read(path, bytes_max=10)


def test_removing_twice_is_removing(stage: WorldTwin, tmp_path: Path) -> None:
    disk, path = stage.world().disk, tmp_path / "file"
    disk.write_atomically(path, b"x")
    disk.remove(path)
    disk.remove(path)
    disk.remove(tmp_path / "no" / "file")
    assert not disk.exists(path)
    assert disk.list(tmp_path) == ()


def test_directories_are_made_with_their_parents(stage: WorldTwin, tmp_path: Path) -> None:
    disk, deep = stage.world().disk, tmp_path / "a" / "b" / "c"
    disk.make_directory(deep)
    disk.make_directory(deep)
    for name in ("z", "a", "m"):
        disk.write_atomically(deep / name, b"")
    assert disk.list(deep) == ("a", "m", "z")
    assert disk.free_bytes(deep) > 0


def test_a_lock_keeps_others_out_until_it_is_let_go(stage: WorldTwin, tmp_path: Path) -> None:
    disk, path = stage.world().disk, tmp_path / "lock"
    with disk.lock(path), pytest.raises(FileBusy), disk.lock(path):
        pass
    with disk.lock(path):
        pass


WRITER = """
import sys
from pathlib import Path
from remit.world.production import production

disk, path = production().disk, Path(sys.argv[1])
print("go", flush=True)
for turn in range(1_000_000_000):
    disk.write_atomically(path, (b"%010d" % turn) * 50_000)
"""


def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new_content_whole(tmp_path: Path) -> None:
    """Only where there are real processes. The moment of the kill moves over a few writes' time."""
    disk, path = production().disk, tmp_path / "journal"
    command = [sys.executable, "-c", WRITER, str(path)]
    cut_off = 0
    for turn in range(25):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=_env()) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"go\n"
            time.sleep(0.02 + turn * 0.0013)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        cut_off += (tmp_path / ".journal.writing").exists()
        if disk.exists(path):
            data = disk.read(path)
            assert len(data) == 500_000
            assert data == data[:10] * 50_000
    assert cut_off, "no kill hit the middle of a write, so nothing was shown"
    disk.write_atomically(path, b"after")
    assert disk.read(path) == b"after"
    assert disk.list(tmp_path) == ("journal",)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = (
        "import sys, time\nfrom pathlib import Path\nfrom remit.world.production import production\n"
        "with production().disk.lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)\n"
    )
    disk = production().disk
    with subprocess.Popen([sys.executable, "-c", holder, str(path)], stdout=subprocess.PIPE, env=_env()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(FileBusy), disk.lock(path):
            pass
        process.kill()
        process.wait()
    with disk.lock(path):
        pass


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# -------------------------------------------------------------------------------------------------------------- offload


def test_work_runs_in_the_order_of_the_calls_whoever_awaits_first(stage: WorldTwin) -> None:
    async def scene(world: World) -> None:
        done: list[int] = []
        waits = [world.offload(lambda turn=turn: done.append(turn)) for turn in range(200)]  # type: ignore[misc]
        for wait in reversed(waits):
            await wait
        assert done == list(range(200))

    play(stage, scene)


def test_results_and_exceptions_pass_through(stage: WorldTwin) -> None:
    def fail() -> None:
        raise KeyError("mine")

    async def scene(world: World) -> None:
        assert await world.offload(lambda: 42) == 42
        with pytest.raises(KeyError, match="mine"):
            await world.offload(fail)
        assert await world.offload(lambda: "still there") == "still there"

    play(stage, scene)


def test_work_is_done_though_its_waiter_is_cancelled(stage: WorldTwin) -> None:
    async def scene(world: World) -> None:
        done: list[str] = []

        async def wait() -> None:
            await world.offload(lambda: done.append("first"))
            await world.offload(lambda: done.append("second"))

        waiter = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await world.offload(lambda: done.append("third"))
        assert done[0] == "first"
        assert done[-1] == "third"

    play(stage, scene)


def test_closing_waits_for_the_work_and_takes_no_more(stage: WorldTwin) -> None:
    async def scene(world: World) -> None:
        done: list[int] = []
        wait = world.offload(lambda: done.append(1))
        await world.offload.close()
        assert done == [1]
        await wait
        with pytest.raises(OffloadClosed):
            await world.offload(lambda: done.append(2))
        await world.offload.close()
        assert done == [1]

    play(stage, scene)
