"""Layout of an agent's data directory. Light: the keeper process loads it.

    run/      private to agent and keeper: locks, keeper socket and journal, held lease epochs, their own logs
    logs/     output of replicas, one directory per node
    work/     one directory per attempt: its working directory, and inside a sandbox the only writable one
    cache/    fetched artifacts by digest and tenant, and root file systems unpacked from them

Processes that run as another user must reach their directory. So the root, `work` and the unpacked trees in `cache` are
passable (mode 711) and everything else is private. If a parent directory is closed to others, `work` is a symbolic link to a
place outside (world/process/isolation.py). The root and `logs` are marked with `hint_unrelated_subdirectories`, because the
contents of their subdirectories are unrelated.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from remit.world.files.disk import hint_unrelated_subdirectories
from remit.world.interfaces import Disk, DiskError
from remit.world.process.isolation import make_reachable

KEEPER: Final = "keeper"
"""The keeper's name on the agent's link."""

SOCKET_BYTES_MAX: Final = 107
"""Maximum length of a Unix socket path."""

CACHE_FILES: Final = "files"
CACHE_TREES: Final = "trees"
"""Subdirectories of the cache: files as fetched, and unpacked root file systems."""

PRIVATE, PASSABLE = 0o700, 0o711


class AgentDirectory(NamedTuple):
    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def work(self) -> Path:
        """The real directory. A process of another user could not reach it through a link below a closed directory."""
        return self._work_path.readlink() if self._work_path.is_symlink() else self._work_path

    @property
    def _work_path(self) -> Path:
        return self.root / "work"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def secrets(self) -> Path:
        """Fallback directory for secrets, on a machine without memory-backed storage (world/files/secret_files.py)."""
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
        """Process id of the keeper, for people and tools. Only the lock proves that it runs."""
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
        """Random identity of this data directory. Leases are held under the agent's name plus this, so that two directories
        with the same node name do not share a lease.
        """
        return self.run / "identity"

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses for a link, by name."""
        return {KEEPER: f"unix:{self.socket}"}

    def write_pid(self, disk: Disk, path: Path, pid: int) -> None:
        """Write a pid file, for people and tools. A full disk must not prevent the start, but then an old pid is removed:
        another process may have that number by now.
        """
        try:
            disk.write_atomically(path, f"{pid}\n".encode())
        except DiskError:
            with suppress(DiskError):
                disk.remove(path)

    def remove_work_link(self) -> None:
        """Remove an empty work directory outside the data directory, once nothing runs. The next start creates it again."""
        if self._work_path.is_symlink():
            with suppress(OSError):
                self.work.rmdir()
                self._work_path.unlink()

    def create(self) -> None:
        """Create all directories. Raises OSError and `DiskError`, and ValueError with the fix if the path is too long."""
        if len(str(self.socket).encode()) > SOCKET_BYTES_MAX:
            raise ValueError(f"{self.socket}: a Unix socket path has at most {SOCKET_BYTES_MAX} bytes; use a shorter --data")
        private = (self.run, self.logs, self.cache / CACHE_FILES)
        self.root.mkdir(parents=True, exist_ok=True)
        self.root.chmod(PASSABLE)
        make_reachable(self._work_path)
        passable = (self.root, self.work, self.cache, self.cache / CACHE_TREES)
        for path, mode in (
            *((directory, PASSABLE) for directory in passable),
            *((directory, PRIVATE) for directory in private),
        ):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(mode)
            if path in (self.root, self.logs):
                hint_unrelated_subdirectories(path)
