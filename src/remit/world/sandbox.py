"""What does a program see that may change almost nothing? The words for bubblewrap; they are not run here: see spawning.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from remit.world.promises import Mounted, Order
from remit.world.users import closed_above

PROGRAM: Final = "bwrap"
_STEERING: Final = frozenset(
    (
        "GCONV_PATH", "GETCONF_DIR", "GLIBC_TUNABLES", "HOSTALIASES", "LOCALDOMAIN", "LOCPATH", "MALLOC_ARENA_MAX",
        "MALLOC_CHECK_", "MALLOC_PERTURB_", "MALLOC_TRACE", "NIS_PATH", "NLSPATH", "RESOLV_HOST_CONF", "RES_OPTIONS", "TMPDIR",
        "TZDIR",
    )
)  # fmt: skip
"""What the C library does not heed in programs that have more rights than whoever starts them; and LD_ anything."""

_PRIVATE: Final = (Path("/tmp"), Path("/dev"), Path("/proc"))  # noqa: S108 - each sandbox has its own


def sandboxed(order: Order, program: str, *, other: bool = False) -> tuple[str, ...]:
    """The arguments that run `order.argv` with all of the machine, or of its own root, to read, and to change only
    `order.writable`, what is mounted to be written, and a /tmp.

    It has a process number space of its own, so that whatever it begins ends with it; the network is the machine's. `other`: it
    runs as another user than we do, who can neither see nor cover what is below a directory that is closed to others.
    """
    words = [program, *(("--ro-bind", "/", "/") if order.root is None else _root(order.root))]
    words += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]  # noqa: S108
    words += ["--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL"]
    if order.with_parent:
        words.append("--die-with-parent")
    covered = [place for place in sorted(order.hidden) if order.root is None and place.is_dir()]
    hidden = [str(place) for place in covered if not other or closed_above(place) is None]
    for place in hidden:
        words += ["--tmpfs", place]
    shown = [*order.mounts, *(Mounted(place, place, writable=True) for place in order.writable if order.root is None)]
    # Outer ones first: an inner one that came before would be covered.
    for one in sorted(shown, key=lambda one: one.at):
        words += ["--bind" if one.writable else "--ro-bind", str(one.source), str(one.at)]
    for place in (*hidden, *(("/",) if order.root is not None else ())):
        words += ["--remount-ro", place]
    if order.directory is not None:  # as the sandbox has it: whoever names what it covers must not be shown that for it
        words += ["--chdir", str(order.directory)]
    kept = outside(order.env)
    for name in sorted(name for name in order.env if name not in kept):
        words += ["--setenv", name, order.env[name]]
    return (*words, "--", *order.argv)


def _root(root: Path) -> list[str]:
    """All that is in it, each by itself: so bubblewrap can make places beside them in the empty root that it begins with, and
    needs neither an overlay nor to write where it may not. What the sandbox has of its own is left out.
    """
    words: list[str] = []
    for entry in sorted(root.iterdir()):
        at = Path("/") / entry.name
        if at in _PRIVATE:
            continue
        if entry.is_symlink():
            words += ["--symlink", str(entry.readlink()), str(at)]
        elif entry.is_dir() or entry.is_file():
            words += ["--ro-bind", str(entry), str(at)]
    return words


def outer_directory(order: Order) -> Path | None:
    """Where it begins on the machine: `directory` is one of its own root, if it has that."""
    return order.directory if order.root is None else Path("/")


def outside(env: Mapping[str, str]) -> dict[str, str]:
    """What of work's environment bubblewrap itself may be started with. It is not in its sandbox: what makes a loader or a
    library run or write something else would do so with the rights of whoever starts it. The rest it only passes on.
    """
    return {name: text for name, text in env.items() if name not in _STEERING and not name.startswith("LD_")}
