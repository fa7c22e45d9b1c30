"""Boot clock: names its boot, sleeps as long as it says, and formats wall time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from remit.world import clock
from remit.world.clock import BootClock
from remit.world.interfaces import BootIdUnavailable


def test_times_are_comparable_between_processes_of_one_boot() -> None:
    script = "from remit.world.clock import BootClock; c = BootClock(); print(c.boot(), c.now_ms())"
    before_ms = BootClock().now_ms()
    env = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
    boot, now_ms = output.stdout.split()
    assert boot == BootClock().boot()
    assert before_ms <= int(now_ms) <= BootClock().now_ms()


def test_other_time_namespace_is_other_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = BootClock().boot()
    monkeypatch.setattr(clock, "_TIME_NAMESPACE", tmp_path)
    assert BootClock().boot() == f"{usual}-{tmp_path.stat().st_ino:x}"
    monkeypatch.setattr(clock, "_TIME_NAMESPACE", tmp_path / "none")
    assert BootClock().boot() == usual


@pytest.mark.parametrize("text", [None, "\n"])
def test_missing_boot_id_raises(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is not None:
        (tmp_path / "boot_id").write_text(text)
    monkeypatch.setattr(clock, "_BOOT_ID", tmp_path / "boot_id")
    with pytest.raises(BootIdUnavailable, match="/proc"):
        BootClock()


def test_timer_firing_early_does_not_end_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    now_ns, naps = 10**12, list[float]()

    async def early(seconds: float) -> None:
        nonlocal now_ns
        naps.append(seconds)
        now_ns += round(seconds * 1e9) - (1_000_000 if len(naps) == 2 else 0)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", early)
    monkeypatch.setattr(time, "clock_gettime_ns", lambda _: now_ns)
    asyncio.run(BootClock().sleep_ms(20))
    assert now_ns - 10**12 == 20_000_000
    assert naps == [0, 0.02, 0.001]


def test_sleeper_wakes_within_second_after_suspend(monkeypatch: pytest.MonkeyPatch) -> None:
    """During a suspend CLOCK_BOOTTIME continues while the loop's timers stop."""
    real, sleep = time.clock_gettime_ns, asyncio.sleep
    suspended_ns, naps = 0, list[float]()

    async def nap(seconds: float) -> None:
        nonlocal suspended_ns
        naps.append(seconds)
        if len(naps) == 3:
            suspended_ns = 3_600 * 10**9
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", nap)
    monkeypatch.setattr(time, "clock_gettime_ns", lambda which: real(which) + suspended_ns)
    asyncio.run(BootClock().sleep_ms(600_000))
    assert naps == [0, 1.0, 1.0]


def test_wall_clock_has_millisecond_precision() -> None:
    clock_ = BootClock()
    for _ in range(200):
        before = datetime.now(UTC)
        wall = datetime.fromisoformat(clock_.wall())
        assert before - timedelta(milliseconds=1) <= wall <= datetime.now(UTC)


def test_wall_clock_rolls_over_seconds_and_may_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_, at_ns = BootClock(), 0
    monkeypatch.setattr(time, "time_ns", lambda: at_ns)
    eve = datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC)
    second = int(eve.timestamp()) * 1_000_000_000
    for after_ns, text in (
        (0, "2026-12-31T23:59:59.000Z"),
        (999_999_999, "2026-12-31T23:59:59.999Z"),
        (1_000_000_000, "2027-01-01T00:00:00.000Z"),
        (1_045_000_000, "2027-01-01T00:00:00.045Z"),
        (-1, "2026-12-31T23:59:58.999Z"),
    ):
        at_ns = second + after_ns
        assert clock_.wall() == text
