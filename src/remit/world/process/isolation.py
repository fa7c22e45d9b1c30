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


def default_user(option: str) -> str:
    """Return the user of replicas that name none. `option`: the --work-user option, or empty. Raises `NotStarted`."""
    if os.geteuid() != 0:
        if option and option != _own_name():
            raise NotStarted(
                f"{_own_name()} has no permission to run processes as {option!r}",
                "run the agent as root, or leave out --work-user",
            )
        return AGENT_USER
    if option == USER_PER_TENANT or (not option and _is_mapped(UID_FIRST) and _is_mapped(UID_FIRST + UID_COUNT - 1)):
        return USER_PER_TENANT
    user = option or UNPRIVILEGED
    try:
        uid = pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise NotStarted(f"user {user!r} does not exist on this machine", "create the user, or name another") from None
    if not option and not _is_mapped(uid):
        return AGENT_USER  # root of a user namespace without other users, which is unprivileged outside of it
    return AGENT_USER if uid == 0 else user


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
        lines = [[int(field) for field in line.split()] for line in _UID_MAP.read_text().splitlines()]
    except (OSError, ValueError):
        return True
    return not lines or any(first <= uid < first + count for first, _, count in lines)


def closed_parent(path: Path) -> Path | None:
    """Return the outermost parent directory that other users cannot traverse, or None."""
    for parent in reversed(path.absolute().parents):
        if not parent.stat().st_mode & stat.S_IXOTH:
            return parent
    return None


def make_reachable(directory: Path) -> None:
    """As root, make `directory` reachable for replicas of other users, if necessary by replacing it with a link to another
    directory.

    Raises OSError and `AccessDenied`.
    """
    if os.geteuid() != 0 or closed_parent(directory) is None:
        return
    elsewhere = REACHABLE_DIRECTORY / sha256(os.fsencode(directory.absolute())).hexdigest()[:16]
    _make_traversable(REACHABLE_DIRECTORY)
    if directory.is_dir() and not directory.is_symlink():
        _move(directory, elsewhere)
    if not directory.is_dir():
        _make_traversable(elsewhere)
    if not directory.exists() and not directory.is_symlink():
        directory.symlink_to(elsewhere)


def _move(directory: Path, elsewhere: Path) -> None:
    """Move the directory and leave a symbolic link, so that running replicas continue in it.

    Only an empty directory can be moved between file systems. Otherwise it stays, and new replicas fail to enter their
    directory.
    """
    with suppress(OSError):
        elsewhere.rmdir()
    try:
        directory.rename(elsewhere)
    except OSError:
        with suppress(OSError):
            directory.rmdir()
    if elsewhere.is_dir():
        directory.symlink_to(elsewhere)


def _make_traversable(directory: Path) -> None:
    """Create a directory that other users can traverse. It must be owned by root, so that no other user can replace its
    content.
    """
    directory.mkdir(mode=_TRAVERSABLE, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0:
        raise AccessDenied(
            f"{directory} is not owned by root", "remove it: replica directories must not be under another user's control"
        )
    directory.chmod(_TRAVERSABLE)


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


def bubblewrap_args(spec: ProcessSpec, program: str, *, other: bool = False) -> tuple[str, ...]:
    """Return the bubblewrap arguments that run `spec.argv`.

    The sandbox sees the host, or the spec's own root, read-only; it can write to `spec.writable`, to writable mounts, and
    to its own /tmp. It has its own pid namespace, so that all its processes end with it, and shares the host's network.
    `other`: it runs as another user, who can neither see nor mount over anything below a directory that is closed to others.
    """
    args = [program, *(("--ro-bind", "/", "/") if spec.root is None else _bind_root(spec.root))]
    args += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]  # noqa: S108
    args += ["--unshare-pid", "--unshare-ipc", "--cap-drop", "ALL"]
    if spec.with_parent:
        args.append("--die-with-parent")
    covered = [path for path in sorted(spec.hidden) if spec.root is None and path.is_dir()]
    hidden = [str(path) for path in covered if not other or closed_parent(path) is None]
    for path in hidden:
        args += ["--tmpfs", path]
    mounts = [*spec.mounts, *(BindMount(path, path, writable=True) for path in spec.writable if spec.root is None)]
    # Outer directories first: an inner mount made earlier would be hidden.
    for mount in sorted(mounts, key=lambda bind: bind.at):
        args += ["--bind" if mount.writable else "--ro-bind", str(mount.source), str(mount.at)]
    for path in (*hidden, *(("/",) if spec.root is not None else ())):
        args += ["--remount-ro", path]
    if spec.directory is not None:  # resolved inside the sandbox, so a hidden directory cannot be reached this way
        args += ["--chdir", str(spec.directory)]
    outer_env = bubblewrap_env(spec.env)
    for name in sorted(name for name in spec.env if name not in outer_env):
        args += ["--setenv", name, spec.env[name]]
    return (*args, "--", *spec.argv)


def _bind_root(root: Path) -> list[str]:
    """Bind each entry of the root separately.

    So bubblewrap can create mount points next to them in its own empty root, without an overlay and without write access to
    `root`. Directories that the sandbox provides itself are left out.
    """
    args: list[str] = []
    for entry in sorted(root.iterdir()):
        at = Path("/") / entry.name
        if at in _PRIVATE:
            continue
        if entry.is_symlink():
            args += ["--symlink", str(entry.readlink()), str(at)]
        elif entry.is_dir() or entry.is_file():
            args += ["--ro-bind", str(entry), str(at)]
    return args


def host_directory(spec: ProcessSpec) -> Path | None:
    """Return the directory to start bubblewrap in. With a root of its own, `directory` exists only inside the sandbox."""
    return spec.directory if spec.root is None else Path("/")


def bubblewrap_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the environment that bubblewrap itself is started with.

    bubblewrap runs outside of its sandbox, so variables that make the loader or the C library load code or write files would
    act with the permissions of its user. These are passed to the sandboxed process only.
    """
    return {name: text for name, text in env.items() if name not in _LIBC_VARIABLES and not name.startswith("LD_")}
