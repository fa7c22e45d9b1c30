"""Sandbox arguments (bubblewrap) and per-tenant users.

Asked of the system.

An agent that is root must not make everybody root who may declare work, nor let tenants at each other's processes and files
where no sandbox stands between them. So what names no user runs as one that owns nothing: one for each tenant, by a number that
follows from its name, and that machines give to nobody else.

Whoever runs work as another user must also let it reach its own directory: where one above it is closed to others, as a home
directory is, the rooms are kept in a place that is not, and a link stands where they would have been.

The words for bubblewrap; they are not run here: see spawning.py.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from remit.world.interfaces import Forbidden, Mounted, NotStarted, Order

OWN: Final = ""
"""As whoever runs the agent."""

EACH: Final = "each-tenant"
"""As a user of its tenant's own."""

UNPRIVILEGED: Final = "nobody"
FIRST, COUNT = 0x7000_0000, 0x0FF0_0000
"""Numbers that neither distributions nor containers give out: so many that two tenants hardly ever have the same."""

ROOMS: Final = Path("/var/lib/remit-rooms")
"""Where rooms are whose own place others cannot reach; of root alone, who alone runs work as others."""

_PASSABLE: Final = 0o711
_UID_MAP: Final = Path("/proc/self/uid_map")


def work_user(said: str) -> str:
    """As whom work runs that names nobody. `said`: by whoever runs the agent; empty: nothing. Raises `NotStarted`."""
    if os.geteuid() != 0:
        if said and said != _own_name():
            raise NotStarted(f"{_own_name()} may not run anything as {said!r}", "run the agent as root, or leave it out")
        return OWN
    if said == EACH or (not said and _is_mapped(FIRST) and _is_mapped(FIRST + COUNT - 1)):
        return EACH
    wanted = said or UNPRIVILEGED
    try:
        uid = pwd.getpwnam(wanted).pw_uid
    except (KeyError, ValueError):
        raise NotStarted(f"there is no user {wanted!r} on this machine", "make that user, or name another") from None
    if not said and not _is_mapped(uid):
        return OWN  # root of a namespace that has nobody else: outside of it, it is somebody without rights
    return OWN if uid == 0 else wanted


def user_of_tenant(tenant: str) -> str:
    """The same on every node, and after every restart."""
    return f"#{FIRST + int.from_bytes(sha256(b'remit user of ' + tenant.encode()).digest()[:8], 'big') % COUNT}"


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _is_mapped(uid: int) -> bool:
    """Has this user namespace such a user?"""
    try:
        lines = [[int(word) for word in line.split()] for line in _UID_MAP.read_text().splitlines()]
    except (OSError, ValueError):
        return True
    return not lines or any(first <= uid < first + count for first, _, count in lines)


def closed_above(place: Path) -> Path | None:
    """The outermost directory above that not everybody may pass; None: all may."""
    for one in reversed(place.absolute().parents):
        if not one.stat().st_mode & stat.S_IXOTH:
            return one
    return None


def open_rooms(place: Path) -> None:
    """See to it that work of other users can reach what is in `place`, if this is root: through all that is above it, or by a
    link that stands there instead. Raises OSError, and `Forbidden`.
    """
    if os.geteuid() != 0 or closed_above(place) is None:
        return
    elsewhere = ROOMS / sha256(os.fsencode(place.absolute())).hexdigest()[:16]
    _make_open(ROOMS)
    if place.is_dir() and not place.is_symlink():
        _move(place, elsewhere)
    if not place.is_dir():
        _make_open(elsewhere)
    if not place.exists() and not place.is_symlink():
        place.symlink_to(elsewhere)


def _move(place: Path, elsewhere: Path) -> None:
    """What runs there goes on in it, and finds it by the link. From one disk to another only what is empty is moved: of the
    rest, what begins is told that it cannot enter its directory.
    """
    with suppress(OSError):
        elsewhere.rmdir()
    try:
        place.rename(elsewhere)
    except OSError:
        with suppress(OSError):
            place.rmdir()
    if elsewhere.is_dir():
        place.symlink_to(elsewhere)


def _make_open(there: Path) -> None:
    """It must be root's own: work is not put where another may change what it finds."""
    there.mkdir(mode=_PASSABLE, parents=True, exist_ok=True)
    found = there.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0:
        raise Forbidden(f"{there} is somebody else's", "remove it: work is not put where another may change it")
    there.chmod(_PASSABLE)


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
