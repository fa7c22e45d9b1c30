"""Process information from procfs; signals to foreign processes.

Callers of the signal functions get the pid from that process's own lock file.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_ENDED_STATES: Final = frozenset("ZXx")
"""States of a process that has ended and was not reaped."""
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_STAT_BYTES_MAX: Final = 4_096
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class ProcessInfo(NamedTuple):
    """One process in /proc. `start_ticks`: its start time; `cpu_ticks`: CPU time, including children that have been reaped."""

    pid: int
    state: str
    pgid: int
    cpu_ticks: int
    threads: int
    start_ticks: int
    pages: int

    @property
    def is_running(self) -> bool:
        """Whether any thread runs: the main thread may have ended before the others."""
        return self.state not in _ENDED_STATES or self.threads > 1

    @property
    def cpu_ms(self) -> int:
        return self.cpu_ticks * 1000 // _TICKS_PER_SECOND

    @property
    def memory_bytes(self) -> int:
        return self.pages * _PAGE_BYTES


def process_info(pid: int) -> ProcessInfo | None:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - must be fast
            text = file.read(_STAT_BYTES_MAX)
    except OSError:
        return None
    # The command name in parentheses may contain anything, also spaces and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    cpu = sum(int(field) for field in fields[11:15])
    return ProcessInfo(pid, fields[0].decode(), int(fields[2]), cpu, int(fields[17]), int(fields[19]), int(fields[21]))


def process_group(pgid: int) -> list[ProcessInfo]:
    """Return the running processes of a process group."""
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return []
    except PermissionError:  # it has members of another user
        pass
    members = (process_info(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit())
    return [process for process in members if process is not None and process.pgid == pgid and process.is_running]


def process_tree(pid: int) -> list[ProcessInfo]:
    """Return a process and its running descendants. Orphans, whose parent has ended, cannot be attributed and are missing."""
    processes, queue = dict[int, ProcessInfo](), [pid]
    while queue:
        process = process_info(queue.pop())
        if process is None or process.pid in processes:
            continue
        processes[process.pid] = process
        queue += _children(process.pid)
    return [process for process in processes.values() if process.is_running]


def namespace_pid(pid: int) -> int:
    """Return the pid of a process in its innermost pid namespace; 0 if that is the host's namespace or unknown."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return int(numbers[-1]) if len(numbers) > 1 else 0


def executable(pid: int) -> str:
    """Return the path of the executable; empty if it cannot be read."""
    try:
        return str((_PROC / str(pid) / "exe").readlink())
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    pids: list[int] = []
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            pids += [int(text) for text in (task / "children").read_text().split()]
    except OSError:
        return pids
    return pids


def send_termination(pid: int, *, kill: bool = False) -> bool:
    """Send SIGTERM, or SIGKILL with `kill`. Returns False if there is no such process. Raises PermissionError if it is
    another user's.
    """
    try:
        handle = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError, ValueError, OSError):
        return False
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL if kill else signal.SIGTERM)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


@contextmanager
def watch_process(pid: int | None) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the process that has this pid now still runs, even if the pid is reused later.

    Use this to wait for the end of a process: its locks are released a moment before it has ended.
    """
    try:
        handle = os.pidfd_open(pid or 0)
    except (OverflowError, ValueError, OSError):
        yield lambda: False
        return
    ends = select.poll()
    ends.register(handle, select.POLLIN)
    try:
        yield lambda: not ends.poll(0)
    finally:
        os.close(handle)
