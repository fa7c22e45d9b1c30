"""Host checks of `remit doctor`, and stack dumps of this process.

Everything is tried, not read off; what it means others decide.

Where each thread and each task stands, by file and line; nothing of what they hold.
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
from remit.world.host import KernelPorts, ThisHost, port_is_free, said_by
from remit.world.interfaces import Clock, WorldError
from remit.world.process.isolation import FIRST, PROGRAM
from remit.world.process.runner import ProcessRunner

FILES_MIN: Final = 4_096
ROOM_MIN: Final = 1 << 30
SYNC_MS_SLOW: Final = 50
SYNCS: Final = 5
PORTS: Final = 32
UNSANDBOXED: Final = "makes no sandbox for users without rights, as whom work runs"
NAMESPACES: Final = (
    "allow them user namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), "
    "or run the agent with --sandbox none or --work-user root"
)
_TRY_S: Final = 10
_UNSYNCHRONISED: Final = 5
"""What adjtimex(2) answers while nobody keeps the wall clock right (TIME_ERROR)."""
_ADJTIMEX_BYTES: Final = 512

State = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """One thing that was looked at. `warn`: work runs, and something is not to be had; `fail`: it does not run."""

    name: str
    state: State
    found: str
    cure: str = ""


def examined(data: Path, port: int) -> list[Finding]:
    """All findings, in the order in which people should mend them. It blocks for about a second."""
    looks: tuple[Callable[[], Finding], ...] = (
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
    return [look() for look in looks]


def _system() -> Finding:
    system = os.uname()
    if not hasattr(os, "pidfd_open"):
        return Finding("system", "fail", f"{system.sysname} {system.release}", "run on Linux 5.3 or newer")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return Finding("system", "fail", f"{system.sysname} {system.release} has no pidfd", "run on Linux 5.3 or newer")
    return Finding("system", "ok", f"{system.sysname} {system.release} {system.machine}")


def _clock() -> Finding:
    try:
        clock = BootClock()
    except WorldError as error:
        return Finding("clock", "fail", error.cause, error.cure)
    before, began_s = clock.now_ns(), time.monotonic()
    time.sleep(0.05)
    passed_ms, counted_ms = (time.monotonic() - began_s) * 1000, (clock.now_ns() - before) / 1e6
    if abs(passed_ms - counted_ms) > 1 + passed_ms / 100:
        return Finding("clock", "fail", f"{counted_ms:.0f} ms were counted in {passed_ms:.0f} ms", "mend the machine's timer")
    return Finding("clock", "ok", f"boot clock at {clock.now_ms() // 1000} s, running on through suspend")


def _wall_clock() -> Finding:
    """It is only shown to people; but they compare it between machines."""
    shown = BootClock().wall()
    if synchronised() is False:
        cure = "run chrony or systemd-timesyncd; only times that are shown depend on it"
        return Finding("wall clock", "warn", f"{shown}, which nothing keeps right", cure)
    return Finding("wall clock", "ok", shown)


def synchronised() -> bool | None:
    """Does somebody keep the wall clock right? None if the machine does not say."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_ADJTIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else bool(state != _UNSYNCHRONISED)


def _directory(data: Path) -> Finding:
    """Can it be written durably, how quickly, and how much more? What is not there is tried where it would be made."""
    place = next(one for one in (data, *data.absolute().parents) if one.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".remit-doctor-") as file:
            times = sorted(_synced_ms(file.fileno()) for _ in range(SYNCS))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        return Finding(
            "data directory", "fail", f"{place} cannot be written ({why})", "name another with --data, or change its owner"
        )
    free = shutil.disk_usage(place).free
    found = f"{place}: {free >> 30} GiB free, a durable write takes {times[SYNCS // 2]:.1f} ms"
    if free < ROOM_MIN:
        return Finding("data directory", "warn", found, "free at least 1 GiB: without room nothing more is committed")
    if times[SYNCS // 2] > SYNC_MS_SLOW:
        return Finding("data directory", "warn", found, "use a faster disk: every commit waits for one such write")
    return Finding("data directory", "ok", found)


def _synced_ms(descriptor: int) -> float:
    began_s = time.monotonic()
    os.write(descriptor, b"x" * 4096)
    os.fdatasync(descriptor)
    return (time.monotonic() - began_s) * 1000


def _api_port(port: int) -> Finding:
    if port_is_free(port):
        return Finding("API port", "ok", f"127.0.0.1:{port} is free")
    cure = "if that is Remit, all is well (`remit get nodes`); else name another with --listen 127.0.0.1:PORT"
    return Finding("API port", "warn", f"somebody listens at 127.0.0.1:{port}", cure)


def _ports() -> Finding:
    try:
        found = asyncio.run(KernelPorts(BootClock()).free(PORTS))
    except WorldError as error:
        return Finding("ports for work", "fail", error.cause, error.cure)
    return Finding("ports for work", "ok", f"{len(found)} of {PORTS} asked for were free")


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES_MIN:
        most = "unlimited" if hard == resource.RLIM_INFINITY else hard
        return Finding("open files", "warn", f"{soft} at most", f"run `ulimit -n 65536` first (allowed here: {most})")
    return Finding("open files", "ok", f"{soft} at most")


def _cgroups() -> Finding:
    found = ProcessRunner(BootClock()).confinement()
    missing = [name for name in ("cpu", "memory", "pids") if name not in found.controllers]
    if not missing:
        return Finding("cgroups", "ok", f"{found.cgroups}: cpu, memory and pids are limited, and whole trees ended")
    cure = "run the agent as root, or let systemd delegate them: systemd-run --user --scope -p Delegate=yes remit agent ..."
    return Finding("cgroups", "warn", f"{found.cgroups}: {found.why}", cure)


def _sandbox() -> Finding:
    program = shutil.which(PROGRAM)
    if program is None:
        cure = "apt-get install bubblewrap; until then work runs without a sandbox, and `sandbox: bwrap` is refused"
        return Finding("bubblewrap", "warn", "not installed", cure)
    if not makes_sandboxes(program):
        cure = "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or run the agent as root"
        return Finding("bubblewrap", "warn", f"{program} is there and makes no sandbox", cure)
    if os.geteuid() == 0 and not makes_sandboxes(program, FIRST):
        return Finding("bubblewrap", "warn", f"{program} {UNSANDBOXED}", NAMESPACES)
    return Finding("bubblewrap", "ok", f"{program} makes sandboxes")


def makes_sandboxes(program: str, uid: int | None = None) -> bool:
    """For us, or for the user of this number, as whom it is run then."""
    words = (program, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid", "--", "echo", "inside")
    return "inside" in (said_by(words, wait_s=_TRY_S) if uid is None else said_by(words, wait_s=_TRY_S, uid=uid))


def _machine() -> Finding:
    clock: Clock = BootClock()
    found = ThisHost(clock).equipment()
    gpus = f", {len(found.gpus)} GPUs" if found.gpus else ", no GPU"
    return Finding("machine", "ok", f"{found.hostname}: {found.cpu_milli / 1000:g} CPUs, {found.memory_bytes >> 20} MiB{gpus}")


STANDS_MAX: Final = 200
DEPTH_MAX: Final = 30


def threads() -> dict[str, list[str]]:
    """By name, the innermost place first."""
    names = {one.ident: one.name for one in threading.enumerate()}
    frames = list(sys._current_frames().items())[:STANDS_MAX]
    return {f"{names.get(ident, 'unknown')} {ident}": _places(frame) for ident, frame in frames}


def tasks() -> list[str]:
    """Of the running event loop: what each is called, and where it waits."""
    found = sorted((_task(one) for one in asyncio.all_tasks()), key=str)
    return found[:STANDS_MAX] + ([f"and {len(found) - STANDS_MAX} more"] if len(found) > STANDS_MAX else [])


def _task(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    where = _place(frames[-1]) if frames else "done"
    coroutine = getattr(task.get_coro(), "__qualname__", "")
    # Tasks are named after what they do, and a name may hold an object's: no words of people here.
    return f"{coroutine} at {where}"


def _places(frame: FrameType | None) -> list[str]:
    found: list[str] = []
    while frame is not None and len(found) < DEPTH_MAX:
        found.append(_place(frame))
        frame = frame.f_back
    return found


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return (
        f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}"
    )
