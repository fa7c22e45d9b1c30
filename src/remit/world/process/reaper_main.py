"""Reaper: kills registered cgroups when its starter dies (standalone).

A process of its own: it waits for that, and kills what is left. It knows no more.

    python -I -S guard.py        with a pipe as its input, of which its starter alone has the other end

A line `+` adds a group and a line `-` takes one away: the number of its directory, and its directory in every hierarchy, with a
tab before each. When the pipe ends its starter has ended, however that was. Then everybody in what is left is killed; a group
whose directory has another number by now is another. Nothing is imported but what every Python has: it runs beside each keeper.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_LOOK_S: Final = 0.01
_LOOK_S_MAX: Final = 1.0


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it ends when its starter has, and not before
    left: dict[str, None] = {}
    for line in sys.stdin:
        word, _, group = line.rstrip("\n").partition("\t")
        if word == "+":
            left[group] = None
        else:
            left.pop(group, None)
    pause_s = _LOOK_S
    while left := {group: None for group in left if not _is_over(group)}:
        time.sleep(pause_s)
        pause_s = min(_LOOK_S_MAX, pause_s * 1.2)
    return 0


def _is_over(group: str) -> bool:
    """Is nobody in there any more? Whoever is has been killed by now, and may take a moment to go."""
    number, *places = group.split("\t")
    first = Path(places[0])
    try:
        if first.stat().st_ino != int(number):
            return True
    except OSError:
        return True
    with suppress(OSError):
        (first / "cgroup.kill").write_text("1")
    for place in places:  # nobody inside has children any more, so that killing one by one comes to an end
        for inside, _, files in os.walk(place):
            if "pids.max" in files:
                with suppress(OSError):
                    (Path(inside) / "pids.max").write_text("0")
    members = _members(first)
    handles: dict[int, int] = {}
    for pid in members:
        with suppress(OSError):
            handles[pid] = os.pidfd_open(pid)
    inside_still = _members(first)  # read again, so that no stranger of that number is hit
    for pid, handle in handles.items():
        if pid in inside_still:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
    return not inside_still


def _members(place: Path) -> frozenset[int]:
    found: set[int] = set()
    for inside, _, _ in os.walk(place):
        with suppress(OSError):
            found.update(int(word) for word in (Path(inside) / "cgroup.procs").read_text().split())
    return frozenset(found)


if __name__ == "__main__":
    sys.exit(main())
