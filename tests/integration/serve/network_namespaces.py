"""Three machines in network namespaces, the first connected to both others; invisible from outside. Contains no tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

HERE, THERE, YONDER = "10.99.0.1", "10.99.0.2", "10.99.1.2"
_OTHER = "10.99.1.1"
"""Address of the first machine on its second link."""
TOOLS = ("unshare", "nsenter", "ip")


class Machines(NamedTuple):
    """Command prefixes that run a command on each machine."""

    here: list[str]
    there: list[str]
    yonder: list[str]


def unsupported_reason() -> str:
    """Empty if network namespaces can be created, otherwise the reason."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} on this machine"
    if os.geteuid() != 0:
        return "only root may make network namespaces here"
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"network namespaces may not be made: {tried.stderr.strip()}"


@contextmanager
def machines() -> Iterator[Machines]:
    """The namespaces end with the processes that hold them."""
    held = [subprocess.Popen(["unshare", "-n", "sh", "-c", "ip link set lo up; echo; exec sleep 600"], stdout=subprocess.PIPE)
            for _ in range(3)]  # fmt: skip
    try:
        for one in held:
            assert one.stdout is not None
            one.stdout.readline()
        here, there, yonder = ([*["nsenter", "-n", "-t"], str(one.pid)] for one in held)
        for words in (
            [*here, *f"ip link add wire type veth peer name wire netns {held[1].pid}".split()],
            [*here, *f"ip addr add {HERE}/24 dev wire".split()],
            [*there, *f"ip addr add {THERE}/24 dev wire".split()],
            [*here, *["ip", "link", "set", "wire", "up"]],
            [*there, *["ip", "link", "set", "wire", "up"]],
            [*here, *f"ip link add other type veth peer name wire netns {held[2].pid}".split()],
            [*here, *f"ip addr add {_OTHER}/24 dev other".split()],
            [*yonder, *f"ip addr add {YONDER}/24 dev wire".split()],
            [*here, *["ip", "link", "set", "other", "up"]],
            [*yonder, *["ip", "link", "set", "wire", "up"]],
            [*yonder, *f"ip route add {HERE}/32 via {_OTHER}".split()],
        ):
            subprocess.run(words, check=True, capture_output=True)
        yield Machines(here, there, yonder)
    finally:
        for one in held:
            one.kill()
            one.wait()
            if one.stdout is not None:
                one.stdout.close()
