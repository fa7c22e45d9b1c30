"""Where does an agent keep what, and who may look there? Places in its one directory; what is in them is not known here.

    run/      for the two processes alone: locks, the keeper's socket and journal, which leases were held, their own logs
    logs/     what work says, a directory a node
    work/     a directory a copy: where it begins, and with a sandbox the only place that it can change
    cache/    files from elsewhere, by digest and tenant; and roots that were unpacked of them

Work that runs as a user of its own must reach its directory, so one may pass through the root, `work`
and the roots in `cache`; no more is open. Where a directory above is closed, `work` is a link (world/users.py). What each of
them holds, and each node's logs, has nothing to do with the others: a file system that can keeps them apart.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from remit.world.disk import keep_apart
from remit.world.promises import Disk, DiskError
from remit.world.users import open_rooms

KEEPER: Final = "keeper"
"""What a keeper is called on its agent's link."""

SOCKET_BYTES_MAX: Final = 107
"""The longest path of a Unix socket."""

FILES: Final = "files"
TREES: Final = "trees"
"""What is in the cache: files as they came, and roots unpacked."""

PRIVATE, PASSABLE = 0o700, 0o711


class Directory(NamedTuple):
    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def work(self) -> Path:
        """Where it truly is: work of another user could not come there by a link below what is closed to it."""
        return self._work.readlink() if self._work.is_symlink() else self._work

    @property
    def _work(self) -> Path:
        return self.root / "work"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def vault(self) -> Path:
        """What work reads and no disk should keep, on a machine that has no memory for it (world/vault.py)."""
        return self.root / "vault"

    @property
    def socket(self) -> Path:
        return self.run / "keeper.sock"

    @property
    def keeper_lock(self) -> Path:
        return self.run / "keeper.lock"

    @property
    def agent_lock(self) -> Path:
        return self.run / "agent.lock"

    @property
    def keeper_pid(self) -> Path:
        """The number of the keeper's process, for people and tools: the lock is what counts."""
        return self.run / "keeper.pid"

    @property
    def agent_pid(self) -> Path:
        return self.run / "agent.pid"

    @property
    def keeper_log(self) -> Path:
        return self.run / "keeper.log"

    @property
    def journal(self) -> Path:
        return self.run / "journal"

    @property
    def epochs(self) -> Path:
        return self.run / "epochs"

    @property
    def identity(self) -> Path:
        """What tells this directory from any other of the same name: a lease is held by a name and this."""
        return self.run / "identity"

    @property
    def addresses(self) -> dict[str, str]:
        """For a link: whom it reaches, and where."""
        return {KEEPER: f"unix:{self.socket}"}

    def tell_pid(self, disk: Disk, path: Path, pid: int) -> None:
        """Who runs here, for people and tools. On a full disk nobody is told, and that is no reason not to run: but no number
        of an earlier one may stay there, since somebody else may have that by now.
        """
        try:
            disk.write_atomically(path, f"{pid}\n".encode())
        except DiskError:
            with suppress(DiskError):
                disk.remove(path)

    def tidy(self) -> None:
        """When nothing runs any more: a place elsewhere that is empty goes, and is made again at the next start."""
        if self._work.is_symlink():
            with suppress(OSError):
                self.work.rmdir()
                self._work.unlink()

    def make(self) -> None:
        """All of it. Raises OSError and `DiskError`; and ValueError for a path that is too long, with the cure."""
        if len(str(self.socket).encode()) > SOCKET_BYTES_MAX:
            raise ValueError(f"{self.socket} has more than {SOCKET_BYTES_MAX} bytes, which no socket may; use a shorter --data")
        private = (self.run, self.logs, self.cache / FILES)
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(PASSABLE)
        open_rooms(self._work)
        passable = (self.root, self.work, self.cache, self.cache / TREES)
        for place, mode in (*((one, PASSABLE) for one in passable), *((one, PRIVATE) for one in private)):
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(mode)
            if place in (self.root, self.logs):
                keep_apart(place)
