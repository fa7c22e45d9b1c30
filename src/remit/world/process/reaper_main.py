"""Reaper: kills registered cgroups when its starter dies (standalone).

    python -I -S reaper_main.py

stdin is a pipe whose other end only its starter has. A line that begins with `+` adds a group and one with `-` removes it:
the inode of its directory, and its directory in every hierarchy, each after a tab. When the pipe closes, the starter has
ended, for whatever reason. Then all processes in the remaining groups are killed. A directory with another inode is another
group and is skipped. Only the standard library is imported: a reaper runs next to every keeper.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.01
_POLL_S_MAX: Final = 1.0


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it ends when its starter has ended, and not before
    groups: dict[str, None] = {}
    for line in sys.stdin:
        sign, _, group = line.rstrip("\n").partition("\t")
        if sign == "+":
            groups[group] = None
        else:
            groups.pop(group, None)
    pause_s = _POLL_S
    while groups := {group: None for group in groups if not _kill(group)}:
        time.sleep(pause_s)
        pause_s = min(_POLL_S_MAX, pause_s * 1.2)
    return 0


def _kill(group: str) -> bool:
    """Kill all members of a group. Returns whether none is left; killed processes may take a moment to end."""
    inode, *directories = group.split("\t")
    first = Path(directories[0])
    try:
        if first.stat().st_ino != int(inode):
            return True
    except OSError:
        return True
    with suppress(OSError):
        (first / "cgroup.kill").write_text("1")
    for directory in directories:  # forbid forks, so that killing the processes one by one comes to an end
        for inside, _, files in os.walk(directory):
            if "pids.max" in files:
                with suppress(OSError):
                    (Path(inside) / "pids.max").write_text("0")
    members = _members(first)
    handles: dict[int, int] = {}
    for pid in members:
        with suppress(OSError):
            handles[pid] = os.pidfd_open(pid)
    inside_still = _members(first)  # read again, so that a reused pid is not hit
    for pid, handle in handles.items():
        if pid in inside_still:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
    return not inside_still


def _members(directory: Path) -> frozenset[int]:
    pids: set[int] = set()
    for inside, _, _ in os.walk(directory):
        with suppress(OSError):
            pids.update(int(pid) for pid in (Path(inside) / "cgroup.procs").read_text().split())
    return frozenset(pids)


if __name__ == "__main__":
    sys.exit(main())
