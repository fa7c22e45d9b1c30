"""Sandbox arguments (bubblewrap) and per-tenant users.

A root agent must not run every tenant's code as root, nor let tenants reach each other's processes and files when there is
no sandbox. So a replica without a user runs as an unprivileged user of its tenant, with a uid derived from the tenant's name
in a range that nothing else on the machine uses.

A replica of another user must be able to reach its own directory. If a parent of the data directory is closed to others, as
home directories are, the replica directories are kept in `/var/lib/remit-rooms`, and a symbolic link takes their place.

This module only builds arguments; spawn.py starts the processes.
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

from remit.world.interfaces import AccessDenied, BindMount, NotStarted, ProcessSpec

AGENT_USER: Final = ""
"""Run as the user of the agent."""

USER_PER_TENANT: Final = "each-tenant"
"""Run as a separate user for each tenant."""

UNPRIVILEGED: Final = "nobody"
UID_FIRST, UID_COUNT = 0x7000_0000, 0x0FF0_0000
"""Range of uids that neither distributions nor container runtimes use, large enough that two tenants hardly ever collide."""

REACHABLE_DIRECTORY: Final = Path("/var/lib/remit-rooms")
"""Replica directories of agents whose data directory others cannot reach. Owned by root, since only root switches users."""

_TRAVERSABLE: Final = 0o711
_UID_MAP: Final = Path("/proc/self/uid_map")


def default_user(said: str) -> str:
    """Return the user of replicas that name none. `said`: the --work-user option, or empty. Raises `NotStarted`."""
    if os.geteuid() != 0:
        if said and said != _own_name():
            raise NotStarted(
                f"{_own_name()} has no permission to run processes as {said!r}",
                "run the agent as root, or leave out --work-user",
            )
        return AGENT_USER
    if said == USER_PER_TENANT or (not said and _is_mapped(UID_FIRST) and _is_mapped(UID_FIRST + UID_COUNT - 1)):
        return USER_PER_TENANT
    wanted = said or UNPRIVILEGED
    try:
        uid = pwd.getpwnam(wanted).pw_uid
    except (KeyError, ValueError):
        raise NotStarted(f"user {wanted!r} does not exist on this machine", "create the user, or name another") from None
    if not said and not _is_mapped(uid):
        return AGENT_USER  # root of a user namespace without other users, which is unprivileged outside of it
    return AGENT_USER if uid == 0 else wanted


def tenant_user(tenant: str) -> str:
    """Return the tenant's user: the same on every node and after every restart."""
    return f"#{UID_FIRST + int.from_bytes(sha256(b'remit user of ' + tenant.encode()).digest()[:8], 'big') % UID_COUNT}"


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _is_mapped(uid: int) -> bool:
    """Return whether this user namespace contains the uid."""
    try:
        lines = [[int(word) for word in line.split()] for line in _UID_MAP.read_text().splitlines()]
    except (OSError, ValueError):
        return True
    return not lines or any(first <= uid < first + count for first, _, count in lines)


def closed_parent(place: Path) -> Path | None:
    """Return the outermost parent directory that other users cannot traverse, or None."""
    for one in reversed(place.absolute().parents):
        if not one.stat().st_mode & stat.S_IXOTH:
            return one
    return None


def make_reachable(place: Path) -> None:
    """As root, make `place` reachable for replicas of other users, if necessary by replacing it with a link to another
    directory.

    Raises OSError and `AccessDenied`.
    """
    if os.geteuid() != 0 or closed_parent(place) is None:
        return
    elsewhere = REACHABLE_DIRECTORY / sha256(os.fsencode(place.absolute())).hexdigest()[:16]
    _make_traversable(REACHABLE_DIRECTORY)
    if place.is_dir() and not place.is_symlink():
        _move(place, elsewhere)
    if not place.is_dir():
        _make_traversable(elsewhere)
    if not place.exists() and not place.is_symlink():
        place.symlink_to(elsewhere)


def _move(place: Path, elsewhere: Path) -> None:
    """Move the directory and leave a symbolic link, so that running replicas continue in it.

    Only an empty directory can be moved between file systems. Otherwise it stays, and new replicas fail to enter their
    directory.
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


def _make_traversable(there: Path) -> None:
    """Create a directory that other users can traverse. It must be owned by root, so that no other user can replace its
    content.
    """
    there.mkdir(mode=_TRAVERSABLE, parents=True, exist_ok=True)
    found = there.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0:
        raise AccessDenied(
            f"{there} is not owned by root", "remove it: replica directories must not be under another user's control"
        )
    there.chmod(_TRAVERSABLE)


BUBBLEWRAP: Final = "bwrap"
_LIBC_VARIABLES: Final = frozenset(
    (
        "GCONV_PATH", "GETCONF_DIR", "GLIBC_TUNABLES", "HOSTALIASES", "LOCALDOMAIN", "LOCPATH", "MALLOC_ARENA_MAX",
        "MALLOC_CHECK_", "MALLOC_PERTURB_", "MALLOC_TRACE", "NIS_PATH", "NLSPATH", "RESOLV_HOST_CONF", "RES_OPTIONS", "TMPDIR",
        "TZDIR",
    )
)  # fmt: skip
"""Variables that the C library ignores in setuid programs; LD_* are handled separately."""

_PRIVATE: Final = (Path("/tmp"), Path("/dev"), Path("/proc"))  # noqa: S108 - each sandbox has its own


def bubblewrap_args(order: ProcessSpec, program: str, *, other: bool = False) -> tuple[str, ...]:
    """Return the bubblewrap arguments that run `order.argv`.

    The sandbox sees the host, or the spec's own root, read-only; it can write to `order.writable`, to writable mounts, and
    to its own /tmp. It has its own pid namespace, so that all its processes end with it, and shares the host's network.
    `other`: it runs as another user, who can neither see nor mount over anything below a directory that is closed to others.
    """
    words = [program, *(("--ro-bind", "/", "/") if order.root is None else _bind_root(order.root))]
    words += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]  # noqa: S108
    words += ["--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL"]
    if order.with_parent:
        words.append("--die-with-parent")
    covered = [place for place in sorted(order.hidden) if order.root is None and place.is_dir()]
    hidden = [str(place) for place in covered if not other or closed_parent(place) is None]
    for place in hidden:
        words += ["--tmpfs", place]
    shown = [*order.mounts, *(BindMount(place, place, writable=True) for place in order.writable if order.root is None)]
    # Outer directories first: an inner mount made earlier would be hidden.
    for one in sorted(shown, key=lambda one: one.at):
        words += ["--bind" if one.writable else "--ro-bind", str(one.source), str(one.at)]
    for place in (*hidden, *(("/",) if order.root is not None else ())):
        words += ["--remount-ro", place]
    if order.directory is not None:  # resolved inside the sandbox, so a hidden directory cannot be reached this way
        words += ["--chdir", str(order.directory)]
    kept = bubblewrap_env(order.env)
    for name in sorted(name for name in order.env if name not in kept):
        words += ["--setenv", name, order.env[name]]
    return (*words, "--", *order.argv)


def _bind_root(root: Path) -> list[str]:
    """Bind each entry of the root separately.

    So bubblewrap can create mount points next to them in its own empty root, without an overlay and without write access to
    `root`. Directories that the sandbox provides itself are left out.
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


def host_directory(order: ProcessSpec) -> Path | None:
    """Return the directory to start bubblewrap in: with its own root, `directory` exists only inside."""
    return order.directory if order.root is None else Path("/")


def bubblewrap_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the environment that bubblewrap itself is started with.

    bubblewrap runs outside of its sandbox, so variables that make the loader or the C library load code or write files would
    act with the permissions of its user. These are passed to the sandboxed process only.
    """
    return {name: text for name, text in env.items() if name not in _LIBC_VARIABLES and not name.startswith("LD_")}
