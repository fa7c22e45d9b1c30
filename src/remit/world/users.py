"""As whom does work run that names nobody, and how does that user get to its room? Asked of the system.

An agent that is root must not make everybody root who may declare work, nor let tenants at each other's processes and files
where no sandbox stands between them. So what names no user runs as one that owns nothing: one for each tenant, by a number that
follows from its name, and that machines give to nobody else.

Whoever runs work as another user must also let it reach its own directory: where one above it is closed to others, as a home
directory is, the rooms are kept in a place that is not, and a link stands where they would have been.
"""

from __future__ import annotations

import os
import pwd
import stat
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from remit.world.promises import Forbidden, NotStarted

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
