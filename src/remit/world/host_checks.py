"""Host checks of `remit doctor`, and stack dumps of this process.

Checks try each facility instead of reading its configuration. Stack dumps contain file names and line numbers, never the
values of variables.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, NamedTuple

from remit.world.clock import BootClock
from remit.world.host import KernelPorts, LocalHost, port_is_free, tool_output
from remit.world.interfaces import Clock, WorldError
from remit.world.process.isolation import BUBBLEWRAP, UID_FIRST
from remit.world.process.runner import ProcessRunner

OPEN_FILES_MIN: Final = 4_096
FREE_BYTES_MIN: Final = 1 << 30
SYNC_MS_SLOW: Final = 50
SYNC_SAMPLES: Final = 5
TEST_PORTS: Final = 32
NO_UNPRIVILEGED_SANDBOX: Final = "cannot create a sandbox for an unprivileged user, and replicas run as one"
USER_NAMESPACES_FIX: Final = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), "
    "or run the agent with --sandbox none or --work-user root"
)
_TRY_S: Final = 10
_UNSYNCHRONISED: Final = 5
"""Return value of adjtimex(2) while no service synchronises the wall clock (TIME_ERROR)."""
_ADJTIMEX_BYTES: Final = 512

State = Literal["ok", "warn", "fail"]


class HostCheck(NamedTuple):
    """Result of one check. `warn`: replicas run, but some feature is missing. `fail`: replicas cannot run."""

    name: str
    state: State
    found: str
    cure: str = ""


def run_host_checks(data: Path, port: int) -> list[HostCheck]:
    """Run all checks, in the order in which problems should be fixed. Blocks for about a second."""
    checks: tuple[Callable[[], HostCheck], ...] = (
        _system,
        _clock,
        _wall_clock,
        lambda: _directory(data),
        lambda: _api_port(port),
        _ports,
        _files,
        _cgroups,
        _sandbox,
        _machine,
    )
    return [check() for check in checks]


def _system() -> HostCheck:
    system = os.uname()
    if not hasattr(os, "pidfd_open"):
        return HostCheck("system", "fail", f"{system.sysname} {system.release}", "run on Linux 5.3 or newer")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return HostCheck("system", "fail", f"{system.sysname} {system.release} has no pidfd", "run on Linux 5.3 or newer")
    return HostCheck("system", "ok", f"{system.sysname} {system.release} {system.machine}")


def _clock() -> HostCheck:
    try:
        clock = BootClock()
    except WorldError as error:
        return HostCheck("clock", "fail", error.cause, error.cure)
    before, began_s = clock.now_ns(), time.monotonic()
    time.sleep(0.05)
    passed_ms, counted_ms = (time.monotonic() - began_s) * 1000, (clock.now_ns() - before) / 1e6
    if abs(passed_ms - counted_ms) > 1 + passed_ms / 100:
        return HostCheck(
            "clock",
            "fail",
            f"CLOCK_BOOTTIME advanced {counted_ms:.0f} ms while {passed_ms:.0f} ms passed",
            "check the machine's clock source",
        )
    return HostCheck("clock", "ok", f"CLOCK_BOOTTIME works, {clock.now_ms() // 1000} s since boot")


def _wall_clock() -> HostCheck:
    """The wall clock decides only when tokens and certificates expire, but users compare displayed times between machines."""
    now = BootClock().wall()
    if wall_clock_synchronised() is False:
        cure = "run chrony or systemd-timesyncd; displayed times and the expiry of tokens depend on it"
        return HostCheck("wall clock", "warn", f"{now}, not synchronised", cure)
    return HostCheck("wall clock", "ok", now)


def wall_clock_synchronised() -> bool | None:
    """Return whether the wall clock is synchronised; None if the system does not report it."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_ADJTIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else bool(state != _UNSYNCHRONISED)


def _directory(data: Path) -> HostCheck:
    """Check that the data directory can be written durably, how fast, and its free space. If it is absent, its nearest existing
    parent is checked.
    """
    directory = next(path for path in (data, *data.absolute().parents) if path.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".remit-doctor-") as file:
            times = sorted(_synced_ms(file.fileno()) for _ in range(SYNC_SAMPLES))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return HostCheck(
            "data directory",
            "fail",
            f"{directory} cannot be written ({reason})",
            "choose another directory with --data, or change its owner",
        )
    free = shutil.disk_usage(directory).free
    summary = f"{directory}: {free >> 30} GiB free, a durable write takes {times[SYNC_SAMPLES // 2]:.1f} ms"
    if free < FREE_BYTES_MIN:
        return HostCheck("data directory", "warn", summary, "free at least 1 GiB: commits fail when the disk is full")
    if times[SYNC_SAMPLES // 2] > SYNC_MS_SLOW:
        return HostCheck("data directory", "warn", summary, "use a faster disk: every commit waits for one durable write")
    return HostCheck("data directory", "ok", summary)


def _synced_ms(descriptor: int) -> float:
    began_s = time.monotonic()
    os.write(descriptor, b"x" * 4096)
    os.fdatasync(descriptor)
    return (time.monotonic() - began_s) * 1000


def _api_port(port: int) -> HostCheck:
    if port_is_free(port):
        return HostCheck("API port", "ok", f"127.0.0.1:{port} is free")
    cure = "if that is Remit, all is well (check with `remit get nodes`); else choose another with --listen 127.0.0.1:PORT"
    return HostCheck("API port", "warn", f"127.0.0.1:{port} is in use", cure)


def _ports() -> HostCheck:
    try:
        ports = asyncio.run(KernelPorts(BootClock()).find_free(TEST_PORTS))
    except WorldError as error:
        return HostCheck("replica ports", "fail", error.cause, error.cure)
    return HostCheck("replica ports", "ok", f"{len(ports)} of {TEST_PORTS} test ports were free")


def _files() -> HostCheck:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES_MIN:
        most = "unlimited" if hard == resource.RLIM_INFINITY else hard
        return HostCheck("open files", "warn", f"limit is {soft}", f"run `ulimit -n 65536` first (hard limit: {most})")
    return HostCheck("open files", "ok", f"limit is {soft}")


def _cgroups() -> HostCheck:
    support = ProcessRunner(BootClock()).isolation_support()
    missing = [name for name in ("cpu", "memory", "pids") if name not in support.controllers]
    if not missing:
        return HostCheck("cgroups", "ok", f"{support.cgroups}: limits on cpu, memory and pids, process trees can be killed")
    cure = "run the agent as root, or let systemd delegate: systemd-run --user --scope -p Delegate=yes remit agent ..."
    return HostCheck("cgroups", "warn", f"{support.cgroups}: {support.reason}", cure)


def _sandbox() -> HostCheck:
    program = shutil.which(BUBBLEWRAP)
    if program is None:
        cure = (
            "apt-get install bubblewrap; until then replicas run without a sandbox, and those with `sandbox: bwrap` or a "
            "rootfs end as `not started`"
        )
        return HostCheck("bubblewrap", "warn", "not installed", cure)
    if not can_create_sandbox(program):
        cure = "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or run the agent as root"
        return HostCheck("bubblewrap", "warn", f"{program} is installed but cannot create a sandbox", cure)
    if os.geteuid() == 0 and not can_create_sandbox(program, UID_FIRST):
        return HostCheck("bubblewrap", "warn", f"{program} {NO_UNPRIVILEGED_SANDBOX}", USER_NAMESPACES_FIX)
    return HostCheck("bubblewrap", "ok", f"{program} can create sandboxes")


def can_create_sandbox(program: str, uid: int | None = None) -> bool:
    """Return whether bubblewrap can create a sandbox, for this process's user or for the user `uid`."""
    args = (program, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid", "--", "echo", "inside")
    return "inside" in (tool_output(args, timeout_s=_TRY_S) if uid is None else tool_output(args, timeout_s=_TRY_S, uid=uid))


def _machine() -> HostCheck:
    clock: Clock = BootClock()
    inventory = LocalHost(clock).inventory()
    gpus = f", {len(inventory.gpus)} GPUs" if inventory.gpus else ", no GPU"
    return HostCheck(
        "machine", "ok", f"{inventory.hostname}: {inventory.cpu_milli / 1000:g} CPUs, {inventory.memory_bytes >> 20} MiB{gpus}"
    )


STACKS_MAX: Final = 200
DEPTH_MAX: Final = 30


def thread_stacks() -> dict[str, list[str]]:
    """Return the stack of each thread by thread name, innermost frame first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = list(sys._current_frames().items())[:STACKS_MAX]
    return {f"{names.get(ident, 'unknown')} {ident}": _frames(frame) for ident, frame in frames}


def task_stacks() -> list[str]:
    """Return, for each task of the running event loop, its coroutine and where it waits."""
    stacks = sorted((_task(task) for task in asyncio.all_tasks()), key=str)
    return stacks[:STACKS_MAX] + ([f"and {len(stacks) - STACKS_MAX} more"] if len(stacks) > STACKS_MAX else [])


def _task(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = _frame(frames[-1]) if frames else "done"
    coroutine = getattr(task.get_coro(), "__qualname__", "")
    # Not the task's name, which may contain the name of an object: a dump must hold no user data.
    return f"{coroutine} at {where}"


def _frames(frame: FrameType | None) -> list[str]:
    frames: list[str] = []
    while frame is not None and len(frames) < DEPTH_MAX:
        frames.append(_frame(frame))
        frame = frame.f_back
    return frames


def _frame(frame: FrameType) -> str:
    code = frame.f_code
    return (
        f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}"
    )
