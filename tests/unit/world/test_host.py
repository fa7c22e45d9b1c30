"""Host inventory: correct, and never more than affinity and cgroup limits allow."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from remit.world import host
from remit.world.clock import BootClock
from remit.world.host import KernelPorts, LocalHost, gpus_of_devices, parse_nvidia_smi, port_is_free, tool_output
from remit.world.interfaces import Gpu, NoFreePorts
from remit.world.process.cgroup_discovery import CgroupMount


def limited(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    monkeypatch.setattr(host, "own_groups", lambda: [(CgroupMount(2, places[0], ()), list(places))])


def test_cpu_is_limited_by_affinity_and_every_parent_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    outer.mkdir()
    inner.mkdir()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    limited(monkeypatch, outer, inner)
    assert LocalHost(BootClock()).inventory().cpu_milli == 8_000
    (inner / "cpu.max").write_text("max 100000\n")
    (outer / "cpu.max").write_text("150000 100000\n")
    assert LocalHost(BootClock()).inventory().cpu_milli == 1_500
    (outer / "cpu.max").unlink()
    (outer / "cpu.cfs_quota_us").write_text("-1\n")
    (outer / "cpu.cfs_period_us").write_text("100000\n")
    assert LocalHost(BootClock()).inventory().cpu_milli == 8_000
    (outer / "cpu.cfs_quota_us").write_text("25000\n")
    assert LocalHost(BootClock()).inventory().cpu_milli == 250


def test_memory_is_limited_by_every_parent_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, tmp_path)
    total_bytes = LocalHost(BootClock()).inventory().memory_bytes
    assert total_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert LocalHost(BootClock()).inventory().memory_bytes == total_bytes
    (tmp_path / "memory.max").write_text("1048576\n")
    assert LocalHost(BootClock()).inventory().memory_bytes == 1 << 20


def test_gpus_are_found_by_nvidia_smi_and_devices() -> None:
    text = "0, NVIDIA A10, 23028\n1, NVIDIA A10, [N/A]\nsome warning\n"
    assert parse_nvidia_smi(text) == (Gpu("gpu-0", "NVIDIA A10", 23028 << 20), Gpu("gpu-1", "NVIDIA A10"))
    assert gpus_of_devices(["nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"]) == (Gpu("gpu-2"), Gpu("gpu-10"))


def test_failing_hanging_or_missing_tool_returns_nothing() -> None:
    assert tool_output(("/bin/echo", "hello"), timeout_s=5) == "hello\n"
    assert tool_output(("/bin/sh", "-c", "echo half; exit 9"), timeout_s=5) == ""
    assert tool_output(("/bin/sleep", "60"), timeout_s=0.05) == ""
    assert tool_output(("/no/such/tool",), timeout_s=5) == ""


def test_port_is_reused_only_after_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = [1_000]
    clock = BootClock()
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms[0])
    ports = KernelPorts(clock)
    monkeypatch.setattr(socket.socket, "getsockname", lambda _: ("", 40_000))
    assert asyncio.run(ports.find_free(1)) == [40_000]
    with pytest.raises(NoFreePorts) as caught:
        asyncio.run(ports.find_free(1))
    assert caught.value.cure
    now_ms[0] += host.PORT_REUSE_MS_MIN
    assert asyncio.run(ports.find_free(1)) == [40_000]


def test_port_in_use_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not port_is_free(port)
    assert port_is_free(port)
