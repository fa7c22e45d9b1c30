"""Contract of a world's interfaces: one suite, run on every implementation in `WORLDS`."""

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
def twin(request: pytest.FixtureRequest, tmp_path: Path) -> WorldTwin:
    make: type[WorldTwin] = request.param
    return make(tmp_path)


def run_in(twin: WorldTwin, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def run_scenario() -> None:
        world = twin.world()
        try:
            await scenario(world)
        finally:
            await world.offload.close()

    twin.run(run_scenario())


# ---------------------------------------------------------------------------------------------------------------- clock


def test_clock_never_goes_back(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
        seen = []
        for turn in range(2_000):
            seen.append(world.clock.now_ms())
            if turn % 100 == 0:
                await world.clock.sleep_ms(1)
        assert seen == sorted(seen)
        assert seen[-1] > seen[0]

    run_in(twin, scenario)


@pytest.mark.parametrize("ms", [0, 1, 7, 40])
def test_sleep_lasts_at_least_as_long_as_requested(twin: WorldTwin, ms: int) -> None:
    async def scenario(world: World) -> None:
        for _ in range(5):
            began_ms = world.clock.now_ms()
            await world.clock.sleep_ms(ms)
            assert world.clock.now_ms() - began_ms >= ms

    run_in(twin, scenario)


def test_other_tasks_run_during_sleep_of_zero(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
        order: list[str] = []

        async def other() -> None:
            order.append("other")

        async with asyncio.TaskGroup() as group:
            group.create_task(other())
            await world.clock.sleep_ms(0)
            order.append("sleeper")
        assert order == ["other", "sleeper"]

    run_in(twin, scenario)


def test_sleepers_wake_in_order_of_their_times(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
        woken: list[int] = []

        async def sleeper(ms: int) -> None:
            await world.clock.sleep_ms(ms)
            woken.append(ms)

        async with asyncio.TaskGroup() as group:
            for ms in (120, 0, 60):
                group.create_task(sleeper(ms))
        assert woken == [0, 60, 120]

    run_in(twin, scenario)


def test_timeout_ends_long_wait_and_not_short_one(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(TimeoutError):
            async with world.clock.timeout_ms(20):
                await world.clock.sleep_ms(60_000)
        async with world.clock.timeout_ms(60_000):
            await world.clock.sleep_ms(1)

    run_in(twin, scenario)


def test_negative_sleep_raises(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(ValueError, match="-1"):
            await world.clock.sleep_ms(-1)

    run_in(twin, scenario)


def test_boot_id_is_same_in_every_world_of_machine(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
        assert world.clock.boot()
        assert world.clock.boot() == world.clock.boot() == twin.world().clock.boot()

    run_in(twin, scenario)


def test_wall_time_is_rfc_3339_utc_with_milliseconds(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
        wall = world.clock.wall()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", wall)
        assert datetime.fromisoformat(wall).utcoffset() is not None

    run_in(twin, scenario)


# ------------------------------------------------------------------------------------------------------ randomness, ids


def draws(randomness: Randomness) -> list[object]:
    return [
        *(randomness.randrange(1_000) for _ in range(50)),
        *(randomness.jitter_ms(1_000) for _ in range(50)),
        randomness.choice(["a", "b", "c"]),
        randomness.shuffled(range(50)),
        randomness.stream("other").randrange(1 << 60),
    ]


def test_seed_determines_random_stream(twin: WorldTwin) -> None:
    assert draws(twin.chance("7")) == draws(twin.chance("7"))
    assert draws(twin.chance("7")) != draws(twin.chance("8"))


def test_streams_are_independent(twin: WorldTwin) -> None:
    drained, fresh = twin.chance("7"), twin.chance("7")
    draws(drained)
    assert draws(drained.stream("probe")) == draws(fresh.stream("probe"))
    assert draws(fresh.stream("probe")) != draws(fresh.stream("jitter"))


def test_random_values_cover_their_range(twin: WorldTwin) -> None:
    randomness = twin.chance("7")
    assert {randomness.randrange(3) for _ in range(300)} == {0, 1, 2}
    assert {randomness.jitter_ms(2) for _ in range(300)} == {0, 1, 2}
    assert {randomness.choice("ab") for _ in range(100)} == {"a", "b"}
    assert randomness.jitter_ms(0) == 0
    assert randomness.randrange(1) == 0
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="range"):
            randomness.randrange(wrong)


def test_shuffle_keeps_all_items_and_original_order(twin: WorldTwin) -> None:
    items = list(range(100))
    shuffled = twin.chance("7").shuffled(items)
    assert items == list(range(100))
    assert sorted(shuffled) == items != shuffled


def test_ids_are_unique_and_safe_in_urls_and_file_names(twin: WorldTwin) -> None:
    ids = twin.world().ids
    nonces = [ids.nonce() for _ in range(20_000)]
    incarnations = [ids.incarnation() for _ in range(500)]
    for names in (nonces, incarnations):
        assert len(set(names)) == len(names)
        assert all(re.fullmatch("[a-z2-7]{8,32}", name) for name in names)


# ----------------------------------------------------------------------------------------------------------------- disk


def test_written_content_is_read_back(twin: WorldTwin, tmp_path: Path) -> None:
    disk, path = twin.world().disk, tmp_path / "journal"
    assert not disk.exists(path)
    for data in (b"", b"one", b"two" * 100_000, b"3"):
        disk.write_atomically(path, data)
        assert disk.read(path) == data
    assert disk.exists(path)
    assert disk.list(tmp_path) == ("journal",)


def test_missing_file_or_directory_raises_file_missing(twin: WorldTwin, tmp_path: Path) -> None:
    disk = twin.world().disk
    for operation in (lambda: disk.read(tmp_path / "no"), lambda: disk.list(tmp_path / "no")):
        with pytest.raises(FileMissing) as caught:
            operation()
        assert str(tmp_path / "no") in caught.value.cause
        assert caught.value.cure
    with pytest.raises(FileMissing):
        disk.write_atomically(tmp_path / "no" / "file", b"")


def test_read_over_size_limit_raises(twin: WorldTwin, tmp_path: Path) -> None:
    disk, path = twin.world().disk, tmp_path / "large"
    disk.write_atomically(path, b"x" * 11)
    assert disk.read(path, bytes_max=11) == b"x" * 11
    with pytest.raises(FileTooLarge):
        disk.read(path, bytes_max=10)


def test_remove_is_idempotent(twin: WorldTwin, tmp_path: Path) -> None:
    disk, path = twin.world().disk, tmp_path / "file"
    disk.write_atomically(path, b"x")
    disk.remove(path)
    disk.remove(path)
    disk.remove(tmp_path / "no" / "file")
    assert not disk.exists(path)
    assert disk.list(tmp_path) == ()


def test_directories_are_created_with_parents(twin: WorldTwin, tmp_path: Path) -> None:
    disk, deep = twin.world().disk, tmp_path / "a" / "b" / "c"
    disk.make_directory(deep)
    disk.make_directory(deep)
    for name in ("z", "a", "m"):
        disk.write_atomically(deep / name, b"")
    assert disk.list(deep) == ("a", "m", "z")
    assert disk.free_bytes(deep) > 0


def test_lock_excludes_others_until_released(twin: WorldTwin, tmp_path: Path) -> None:
    disk, path = twin.world().disk, tmp_path / "lock"
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


def test_write_killed_at_any_moment_leaves_old_or_new_content(tmp_path: Path) -> None:
    """Real processes only. The moment of the kill moves over the duration of a few writes."""
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
    assert cut_off, "no kill hit the middle of a write"
    disk.write_atomically(path, b"after")
    assert disk.read(path) == b"after"
    assert disk.list(tmp_path) == ("journal",)


def test_lock_is_released_when_its_process_dies(tmp_path: Path) -> None:
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


def test_offloaded_work_runs_in_call_order(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
        done: list[int] = []
        waits = [world.offload(lambda turn=turn: done.append(turn)) for turn in range(200)]  # type: ignore[misc]
        for wait in reversed(waits):
            await wait
        assert done == list(range(200))

    run_in(twin, scenario)


def test_offload_passes_results_and_exceptions(twin: WorldTwin) -> None:
    def fail() -> None:
        raise KeyError("mine")

    async def scenario(world: World) -> None:
        assert await world.offload(lambda: 42) == 42
        with pytest.raises(KeyError, match="mine"):
            await world.offload(fail)
        assert await world.offload(lambda: "still there") == "still there"

    run_in(twin, scenario)


def test_offloaded_work_of_cancelled_waiter_still_runs(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
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

    run_in(twin, scenario)


def test_offload_close_waits_for_work_and_refuses_more(twin: WorldTwin) -> None:
    async def scenario(world: World) -> None:
        done: list[int] = []
        wait = world.offload(lambda: done.append(1))
        await world.offload.close()
        assert done == [1]
        await wait
        with pytest.raises(OffloadClosed):
            await world.offload(lambda: done.append(2))
        await world.offload.close()
        assert done == [1]

    run_in(twin, scenario)
