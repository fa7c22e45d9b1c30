"""Process information from procfs; signals to foreign processes.

Read from /proc; nobody is touched here.

By its number, which whoever asks has from that process's own lock.
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
_NO_MORE: Final = frozenset("ZXx")
"""States of a process that has ended and is only waiting to be reaped."""
_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")
_STAT_BYTES_MAX: Final = 4_096
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Member(NamedTuple):
    """One process as /proc tells it. `ticks`: when it began; `cpu_ticks`: what it took, with its children that have ended."""

    pid: int
    state: str
    group: int
    cpu_ticks: int
    threads: int
    ticks: int
    pages: int

    @property
    def runs(self) -> bool:
        """A first thread that has ended says nothing about the others."""
        return self.state not in _NO_MORE or self.threads > 1

    @property
    def cpu_ms(self) -> int:
        return self.cpu_ticks * 1000 // _TICKS_A_SECOND

    @property
    def memory_bytes(self) -> int:
        return self.pages * _PAGE_BYTES


def member(pid: int) -> Member | None:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - looked at several times for each start
            text = file.read(_STAT_BYTES_MAX)
    except OSError:
        return None
    # The name in parentheses may hold anything, also spaces and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    cpu = sum(int(field) for field in fields[11:15])
    return Member(pid, fields[0].decode(), int(fields[2]), cpu, int(fields[17]), int(fields[19]), int(fields[21]))


def group(number: int) -> list[Member]:
    """Who of a process group still runs."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return []
    except PermissionError:  # it has members that changed their user
        pass
    members = (member(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit())
    return [one for one in members if one is not None and one.group == number and one.runs]


def tree(pid: int) -> list[Member]:
    """A process and all that descends from it by parents who still run; the others cannot be told from anybody's."""
    found, queue = dict[int, Member](), [pid]
    while queue:
        one = member(queue.pop())
        if one is None or one.pid in found:
            continue
        found[one.pid] = one
        queue += _children(one.pid)
    return [one for one in found.values() if one.runs]


def inside(pid: int) -> int:
    """The number of a process in the innermost space of numbers that it is in; 0 if that is the machine's own or unknown."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return int(numbers[-1]) if len(numbers) > 1 else 0


def program(pid: int) -> str:
    """The file that it runs, if that may be known."""
    try:
        return str((_PROC / str(pid) / "exe").readlink())
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    except OSError:
        return found
    return found


def ask_to_go(pid: int, *, at_once: bool = False) -> bool:
    """SIGTERM, or SIGKILL. False if there is nobody of that number. Raises PermissionError if it is somebody else's."""
    try:
        handle = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError, ValueError, OSError):
        return False
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL if at_once else signal.SIGTERM)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


@contextmanager
def watched(pid: int | None) -> Iterator[Callable[[], bool]]:
    """Yields what tells whether the process that has this number now is still there; one that takes the number later is not
    meant. Locks are let go of a moment before their holder has ended.
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
