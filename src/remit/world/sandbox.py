"""What does a program see that may change almost nothing? The words for bubblewrap; they are not run here: see spawning.py."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from remit.world.promises import Order

PROGRAM: Final = "bwrap"
_PRIVATE: Final = (Path("/tmp"), Path("/dev"), Path("/proc"))  # noqa: S108 - each sandbox has its own


def sandboxed(order: Order, program: str) -> tuple[str, ...]:
    """The arguments that run `order.argv` with all of the machine to read, and to change only `order.writable` and a /tmp.

    It has a process number space of its own, so that whatever it begins ends with it; the network is the machine's.
    """
    words = [program, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]  # noqa: S108
    words += ["--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL"]
    if order.with_parent:
        words.append("--die-with-parent")
    # Outer ones first: an inner one that came before would be covered.
    for place in sorted(order.writable):
        words += ["--bind", str(place), str(place)]
    if order.directory is not None:
        if _hidden(order.directory, order.writable):
            words += ["--ro-bind", str(order.directory), str(order.directory)]
        words += ["--chdir", str(order.directory)]
    return (*words, "--", *order.argv)


def _hidden(directory: Path, writable: tuple[Path, ...]) -> bool:
    """Would it be covered by what the sandbox has of its own?"""
    inside = any(place == directory or place in directory.parents for place in writable)
    return not inside and any(place in directory.parents for place in _PRIVATE)
