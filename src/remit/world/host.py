"""Host inventory (CPU, memory, GPUs), free ports, TCP and HTTP probes.

This module only reads. agent/probes.py decides what a probe result means.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from remit.world.interfaces import Clock, Gpu, HostInventory, NoFreePorts, ProbeResult
from remit.world.process.cgroup_discovery import own_groups

_MEMORY: Final = Path("/proc/meminfo")
_DEVICES: Final = Path("/dev")
_GPU_TOOL: Final = "nvidia-smi"
_GPU_ARGS: Final = ("--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits")
_GPU_TIMEOUT_S: Final = 10
_GPUS_MAX: Final = 64

PORT_REUSE_MS_MIN: Final = 60_000
"""For this long a port that was returned is not returned again: the caller needs time to listen on it."""
_TRIES_MAX: Final = 20


class LocalHost:
    """Inventory of the machine this process runs on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def inventory(self) -> HostInventory:
        system = os.uname()
        return HostInventory(
            hostname=system.nodename,
            kernel=f"{system.sysname} {system.release} {system.machine}",
            boot=self._clock.boot(),
            cpu_milli=_cpu_milli(),
            memory_bytes=_memory_bytes(),
            gpus=list_gpus(),
        )


class KernelPorts:
    """Free ports as chosen by the kernel. All ports of one call stay bound until the call returns, so that they differ."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._allocated: dict[int, int] = {}

    async def find_free(self, count: int, /) -> list[int]:
        if count < 0:
            raise ValueError(f"count: must not be negative, is {count}")
        now_ms = self._clock.now_ms()
        self._allocated = {port: at_ms for port, at_ms in self._allocated.items() if now_ms - at_ms < PORT_REUSE_MS_MIN}
        sockets: list[socket.socket] = []
        ports: list[int] = []
        try:
            for _ in range(count * _TRIES_MAX):
                if len(ports) == count:
                    break
                sockets.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
                # Bind on all interfaces: a port that is free on the loopback interface may be in use on another one.
                sockets[-1].bind(("", 0))
                port: int = sockets[-1].getsockname()[1]
                if port not in self._allocated:
                    ports.append(port)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise NoFreePorts(
                f"cannot allocate {count} ports ({reason})",
                "raise the limit of open files (ulimit -n), or stop processes that listen",
            ) from error
        finally:
            for bound in sockets:
                bound.close()
        if len(ports) < count:
            cause = f"only {len(ports)} of {count} ports are free and were not allocated in the last minute"
            raise NoFreePorts(cause, "widen net.ipv4.ip_local_port_range, or allocate fewer ports at a time")
        self._allocated |= dict.fromkeys(ports, now_ms)
        return ports


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server could listen on this port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: ports in TIME_WAIT count as free
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


# -- limits of this process ----------------------------------------------------------------------------------------------------


def _cpu_milli() -> int:
    """Return the CPUs this process may run on, reduced to the smallest quota of the cgroups it is in."""
    quotas = (_quota_milli(group) for _, groups in own_groups() for group in groups)
    return min([len(os.sched_getaffinity(0)) * 1000, *(quota for quota in quotas if quota > 0)])


def _quota_milli(group: Path) -> int:
    """Return the CPU quota of a cgroup; 0 means no quota."""
    fields = _text(group / "cpu.max").split()  # cgroup v2: "max 100000" or "150000 100000"
    if not fields:
        fields = [_text(group / "cpu.cfs_quota_us").strip(), _text(group / "cpu.cfs_period_us").strip()]
    quota, period = (int(field) if field.isdigit() else 0 for field in (*fields, "", "")[:2])
    return max(1, quota * 1000 // period) if quota and period else 0


def _memory_bytes() -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB$", _text(_MEMORY), re.MULTILINE)
    total = int(match[1]) * 1024 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    names = ("memory.max", "memory.limit_in_bytes")
    limits = (_text(group / name).strip() for _, groups in own_groups() for group in groups for name in names)
    return min([total, *(int(limit) for limit in limits if limit.isdigit())])


# -- GPUs ----------------------------------------------------------------------------------------------------------------------


def list_gpus() -> tuple[Gpu, ...]:
    """List GPUs with nvidia-smi. If it is missing or fails, list the device files, which give neither model nor memory."""
    return parse_nvidia_smi(_run_nvidia_smi()) or gpus_of_devices(_names(_DEVICES))


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    gpus = []
    for line in text.splitlines()[:_GPUS_MAX]:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].isdigit():
            gpus.append(Gpu(f"gpu-{fields[0]}", fields[1], int(fields[2]) << 20 if fields[2].isdigit() else 0))
    return tuple(gpus)


def gpus_of_devices(names: Iterable[str]) -> tuple[Gpu, ...]:
    numbers = sorted(int(name.removeprefix("nvidia")) for name in names if re.fullmatch(r"nvidia\d{1,4}", name))
    return tuple(Gpu(f"gpu-{number}") for number in numbers[:_GPUS_MAX])


def _run_nvidia_smi() -> str:
    tool = shutil.which(_GPU_TOOL)
    if tool is None:
        return ""
    return tool_output((tool, *_GPU_ARGS), timeout_s=_GPU_TIMEOUT_S)


def tool_output(args: tuple[str, ...], *, timeout_s: float, uid: int | None = None) -> str:
    """Return the standard output of a tool; empty if it fails or does not end within `timeout_s`.

    The timeout keeps a hanging driver from blocking the caller. With `uid` the tool runs as that user, which needs root.
    """
    who: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": (), "cwd": "/"}
    try:
        done = subprocess.run(  # noqa: S603
            args, capture_output=True, timeout=timeout_s, check=False, text=True, errors="replace", **who
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _names(directory: Path) -> list[str]:
    try:
        return [entry.name for entry in directory.iterdir()]
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


HEAD_BYTES_MAX: Final = 16 << 10
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})(?: ([^\r\n]{0,100}))?\r?\n")
_INVALID_IN_PATH: Final = re.compile(r"[\x00-\x20\x7f]")


class SocketProber:
    """Probes over real connections, a new one for each probe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def http(self, host: str, port: int, path: str, /, *, timeout_ms: int) -> ProbeResult:
        if _INVALID_IN_PATH.search(path) or not path.startswith("/"):
            return ProbeResult(ok=False, detail="the probe path is invalid")
        head = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUser-Agent: remit-probe\r\nConnection: close\r\n\r\n"
        return await self._probe(host, port, head.encode(), timeout_ms)

    async def tcp(self, host: str, port: int, /, *, timeout_ms: int) -> ProbeResult:
        return await self._probe(host, port, b"", timeout_ms)

    async def _probe(self, host: str, port: int, head: bytes, timeout_ms: int) -> ProbeResult:
        try:
            async with self._clock.timeout_ms(timeout_ms), _connection(host, port) as (reader, writer):
                if not head:
                    return ProbeResult(ok=True, detail=f"port {port} accepts connections")
                writer.write(head)
                return _probe_result(await _first_line(reader))
        except TimeoutError:
            return ProbeResult(ok=False, detail=f"no answer within {timeout_ms} ms")
        except OSError as error:
            # The text of asyncio's connection errors repeats the address and adds nothing.
            reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
            return ProbeResult(ok=False, detail=f"port {port} cannot be reached ({reason})")


@asynccontextmanager
async def _connection(host: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(host, port, limit=HEAD_BYTES_MAX)
    try:
        yield reader, writer
    finally:
        # Abort instead of close: a peer that never reads must not delay the probe.
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


async def _first_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError:
        return b"too long"


def _probe_result(line: bytes) -> ProbeResult:
    if not line:
        return ProbeResult(ok=False, detail="the connection was closed without an answer")
    match = _STATUS.fullmatch(line)
    if match is None:
        return ProbeResult(ok=False, detail="the answer is not HTTP")
    status, phrase = int(match[1]), (match[2] or b"").decode("ascii", "replace").strip()
    printable = "".join(char if char.isprintable() else "?" for char in phrase)
    return ProbeResult(ok=200 <= status < 400, detail=f"status {status} {printable}".strip())
