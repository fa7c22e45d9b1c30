"""Contract of a world's interfaces: one suite, run on every implementation in `WORLDS`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from remit.world.interfaces import FileBusy, Randomness, World
from remit.world.production import production
from tests.contracts.disk_contract import DISK_CONTRACT
from tests.contracts.offload_contract import OFFLOAD_CONTRACT
from tests.contracts.worlds import WORLDS, WorldTwin, run_in


@pytest.fixture(params=WORLDS, ids=lambda twin: twin.__name__)
def twin(request: pytest.FixtureRequest, tmp_path: Path) -> WorldTwin:
    make: type[WorldTwin] = request.param
    return make(tmp_path)


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


@pytest.mark.parametrize("promise", DISK_CONTRACT, ids=lambda promise: promise.__name__)
def test_disk_keeps_contract(promise: Callable[[Any, Path], None], twin: WorldTwin, tmp_path: Path) -> None:
    promise(twin, tmp_path)


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


@pytest.mark.parametrize("promise", OFFLOAD_CONTRACT, ids=lambda promise: promise.__name__)
def test_offload_keeps_contract(promise: Callable[[Any], None], twin: WorldTwin) -> None:
    promise(twin)
