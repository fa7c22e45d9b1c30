"""Interfaces to the operating system (clock, randomness, ids, disk, link, runner, host) and their errors.

Everything that is not a pure function of its arguments goes through these protocols. Production code gets the
implementations built by production.py and the simulator passes its own, which run in virtual time; the components are the
same code in both.

Two kinds of failure are kept apart everywhere. An external failure (of the operating system, a peer or another program) is a
`WorldError` with its cause and a fix. A bug of our own code is a `ValueError` or the like.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from remit.world.files.artifacts import ArtifactFetcher
    from remit.world.process.exec_session import ExecSession, PtySize

T = TypeVar("T")

READ_BYTES_MAX: Final = 64 << 20


class Clock(Protocol):
    """Monotonic time for decisions, and the wall clock for display only."""

    def now_ms(self) -> int:
        """Return the time since boot in milliseconds.

        It never goes back, and it advances while the machine is suspended. Two values can be compared only if they come from
        the same `boot`.
        """
        ...

    def boot(self) -> str:
        """Return the id of the period in which values of `now_ms` are comparable, also between processes."""
        ...

    def wall(self) -> str:
        """Return the wall-clock time as RFC 3339 in UTC with milliseconds, for display.

        It may jump in either direction, so no decision may depend on it.
        """
        ...

    async def sleep_ms(self, ms: int) -> None:
        """Sleep until at least `ms` of `now_ms` have passed. Other tasks get to run even if `ms` is 0."""
        ...

    def timeout_ms(self, ms: int) -> AbstractAsyncContextManager[object]:
        """Cancel the body of the `async with` and raise TimeoutError after about `ms` of the event loop's time.

        This bounds a wait and guarantees no more: the event loop's time may stand still during a suspend. A deadline that
        matters must be checked against `now_ms`.
        """
        ...


class Randomness(Protocol):
    """One stream of pseudo-random numbers. The same seed and the same calls give the same numbers."""

    def randrange(self, limit: int) -> int:
        """Return an integer from 0 up to but not including `limit`, uniformly distributed."""
        ...

    def jitter_ms(self, limit: int) -> int:
        """Return a delay from 0 up to and including `limit` milliseconds, uniformly distributed."""
        ...

    def choice(self, items: Sequence[T], /) -> T: ...

    def shuffled(self, items: Sequence[T], /) -> list[T]:
        """Return a shuffled copy of `items`."""
        ...

    def stream(self, name: str) -> Randomness:
        """Return an independent stream for `name`, so that draws by one component never shift the numbers another one gets."""
        ...


class Ids(Protocol):
    """Unique ids. They use only a to z and 2 to 7, which is safe in a URL, in a file name and between the dots of an operation
    id.
    """

    def nonce(self) -> str: ...

    def incarnation(self) -> str: ...


class Disk(Protocol):
    """Small files that are replaced atomically.

    Calls block: async code calls them through an `Offload`.
    """

    def read(self, path: Path, *, bytes_max: int = READ_BYTES_MAX) -> bytes:
        """Return the content of `path`. Raises `FileMissing`, or `FileTooLarge` before it has read more than `bytes_max`."""
        ...

    def write_atomically(self, path: Path, data: bytes) -> None:
        """Replace the content of `path` so that a crash at any point leaves either the old content or the new one, complete.

        When the call returns, the new content is durable. After any error except `NotDurable` the old content is unchanged.
        Only one writer per path is allowed: a concurrent one gets `FileBusy`.
        """
        ...

    def append(self, path: Path, data: bytes, *, durably: bool) -> None:
        """Append `data` to `path`, which is created if absent.

        If the call is interrupted, or fails because the disk is full, a part of `data` may be in the file. After an append
        with `durably`, this data and everything appended before it survive a crash of the machine.
        """
        ...

    def exists(self, path: Path) -> bool: ...

    def remove(self, path: Path) -> None:
        """Remove the file durably. A file that does not exist counts as removed."""
        ...

    def make_directory(self, path: Path, *, durably: bool = True) -> None:
        """Create the directory and its parents. An existing directory is left as it is."""
        ...

    def remove_tree(self, path: Path) -> None:
        """Remove a directory tree as far as possible. Symbolic links are removed, not followed. The removal is not durable."""
        ...

    def list(self, directory: Path) -> tuple[str, ...]:
        """Return the sorted names in `directory`, without the temporary files of interrupted writes."""
        ...

    def free_bytes(self, path: Path) -> int:
        """Return the bytes available to this process on the file system of `path`."""
        ...

    def lock(self, path: Path) -> AbstractContextManager[object]:
        """Lock `path` (an empty file, created if absent and never removed) against other processes. Raises `FileBusy` if it is
        locked.

        The lock ends with the process, however the process ends.
        """
        ...


class LogChunk(NamedTuple):
    """A part of a log file. `start` is the offset of its first byte, counted over all bytes ever written to that log."""

    start: int
    data: bytes


class LogFiles(Protocol):
    """Log files of unbounded writers, rotated to a bounded size by dropping the oldest bytes.

    Symbolic links are not followed and only regular files are read. Calls block: async code calls them through an `Offload`.
    """

    def rotate(self, directory: Path, name: str, *, bytes_max: int, rotated_max: int) -> bool:
        """If the file is larger than `bytes_max`, move its content to a rotated file and truncate it. Returns whether it did
        so.

        At most `rotated_max` rotated files are kept.
        """
        ...

    def span(self, directory: Path, name: str) -> tuple[int, int]:
        """Return the offsets of the first retained byte and of the end. Raises `FileMissing` if nothing was ever written."""
        ...

    def read(self, directory: Path, name: str, start: int, bytes_max: int) -> LogChunk:
        """Read from offset `start`, or from the first retained byte after it. Raises `FileMissing`."""
        ...

    def prune(self, directory: Path, keep: Collection[str], *, files_max: int, bytes_max: int, age_ms_max: int) -> None:
        """Delete log files older than `age_ms_max`, then the oldest until at most `files_max` and `bytes_max` are left.

        Files are grouped by the part of their name before the last dot, and a group is deleted as a whole. Groups listed in
        `keep` are neither counted nor deleted.
        """
        ...


class Offload(Protocol):
    """Runs blocking work outside of the event loop, one item at a time, in the order of the calls (not of the awaits)."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Return the result of `work`, or raise its exception. If the caller is cancelled, the work still runs, in order."""
        ...

    async def close(self) -> None:
        """Wait for the accepted work, then accept no more: later calls raise `OffloadClosed`."""
        ...


class Service(Protocol):
    """The server side of a `Link`. Calls run concurrently and finish in any order."""

    async def request(self, body: bytes, /) -> bytes: ...

    def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]: ...


class Link(Protocol):
    """Transport of requests and streams to other processes, addressed by name. It does not retry and does not look into bodies.

    Callers must tell two failures apart. After `NotSent` the peer has not received the request. After `ReplyLost` it may
    have received it, or may still receive it. A cancelled request has the same meaning as `ReplyLost`.
    """

    async def request(self, to: str, body: bytes, /) -> bytes:
        """Send one request and return its reply."""
        ...

    def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        """Yield the items that the peer sends until it ends the stream, in order and without gaps. Raises the same errors as
        `request`.

        Closing the generator cancels the stream.
        """
        ...

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        """Serve requests for `at` while the context is open. If the service raises, only that one call is aborted.

        Raises `ListenFailed`. On exit, streams are aborted, and so are requests that do not finish soon.
        """
        ...


class Limits(NamedTuple):
    """Resource limits of a process group; 0 means no limit. `cpu_milli` is a weight: it takes effect only under contention."""

    memory_bytes: int = 0
    cpu_milli: int = 0
    pids: int = 0


class BindMount(NamedTuple):
    """A file or directory of the host that a sandbox shows at another path."""

    source: Path
    at: Path
    writable: bool = False


class ProcessSpec(NamedTuple):
    """A process to start. It is never run through a shell.

    - `env`: the complete environment.
    - `user`: name of the user it runs as; empty means the user of the starting process.
    - `stdout`, `stderr`: files to append to, created if absent; None discards the output.
    - `group`: name of its process group, safe as a file name. All descendants are accounted, limited and killed together.
      A group that still has processes is refused, so that a name runs only once at a time.
    - `writable`: directories given to `user`. In a sandbox, only these can be changed.
    - `with_parent`: kill the process when its starter ends, for whatever reason.
    - `not_after_ms`: do not start the process after this instant of the clock.
    - `root`: directory shown read-only as / in place of the host's. `root` and `mounts` need a sandbox.
    - `hidden`: directories that appear empty in a sandbox, except for their `writable` or mounted parts.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    directory: Path | None = None
    user: str = ""
    stdout: Path | None = None
    stderr: Path | None = None
    limits: Limits = Limits()
    group: str = ""
    sandbox: Literal["none", "bwrap"] = "none"
    writable: tuple[Path, ...] = ()
    with_parent: bool = False
    not_after_ms: int | None = None
    root: Path | None = None
    mounts: tuple[BindMount, ...] = ()
    hidden: tuple[Path, ...] = ()


_GROUP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""No leading dot: these names are reserved for the runner."""


def check_group_name(name: str) -> None:
    if not _GROUP_NAME.fullmatch(name):
        raise ValueError(f"group: {name!r} is invalid; use 1 to 200 of A-Z a-z 0-9 . _ - with a letter or digit first")


def check_process_spec(spec: ProcessSpec) -> None:
    """Raise ValueError for a spec that no runner accepts on any machine. Such a spec is a bug of the caller."""
    if not spec.argv:
        raise ValueError("argv is empty")
    if spec.group:
        check_group_name(spec.group)
    elif any(spec.limits):
        raise ValueError("limits need a process group; set group")
    if (spec.root is not None or spec.mounts) and spec.sandbox == "none":
        raise ValueError("root and mounts need a sandbox; set sandbox")


def check_start_deadline(spec: ProcessSpec, now_ms: int) -> None:
    """Raise `NotStarted` if the start deadline has passed. Call this right before the start, without an await in between."""
    if spec.not_after_ms is not None and now_ms >= spec.not_after_ms:
        raise NotStarted("the start deadline has passed", "look up the state of the process, then order a new start")


class ProcessHandle(NamedTuple):
    """Identity of a started process. A pid is reused over time; a pid with its start time is not.

    `group` is the runner's internal reference to the process group. A caller that stores all three fields can find the
    process again after a restart.
    """

    pid: int
    start_time: str
    group: str = ""


class ExitStatus(NamedTuple):
    """How a process ended: its exit `code`, or the `signal` that killed it. Both are None if it was not our child and is gone.

    `oom`: the kernel killed one of its processes because the group exceeded its memory limit.
    """

    code: int | None = None
    signal: int | None = None
    oom: bool = False


class Usage(NamedTuple):
    """Resource usage of a process with all its descendants: CPU time since the start, memory and process count now."""

    cpu_ms: int = 0
    memory_bytes: int = 0
    pids: int = 0


class IsolationSupport(NamedTuple):
    """Isolation features of a host: the cgroup version, the usable controllers, and the `reason` why others are missing.

    `sandbox`: bubblewrap is installed.
    """

    cgroups: Literal["v2", "v1", "none"]
    controllers: tuple[str, ...]
    reason: str
    sandbox: bool


class Runner(Protocol):
    """Runs processes on this machine, each in its own process group. They outlive their starter unless `with_parent` is set."""

    async def start(self, spec: ProcessSpec, /) -> ProcessHandle:
        """Start a process. Raises `NotStarted`; then nothing is running."""
        ...

    async def wait(self, running: ProcessHandle, /) -> ExitStatus:
        """Return when the process has ended. It may have been started by an earlier process of ours."""
        ...

    def is_alive(self, running: ProcessHandle, /) -> bool: ...

    async def stop(self, running: ProcessHandle, /, *, grace_ms: int) -> None:
        """Send SIGTERM, and SIGKILL after `grace_ms`. Returns when no process of the tree is left.

        Also stops the children of a process that has ended itself.
        """
        ...

    async def start_exec(self, running: ProcessHandle, spec: ProcessSpec, /, *, window: PtySize | None = None) -> ExecSession:
        """Start a command in the environment of a running process: same user, group, limits, directory and sandbox.

        `spec` is the one that the process was started with, changed for the command; only `argv`, `env`, `directory`,
        `user` and `sandbox` are used. With a `window` the command gets a terminal, otherwise three pipes. Raises
        `NotStarted`; then nothing is running.
        """
        ...

    def usage(self, running: ProcessHandle, /) -> Usage:
        """Return the usage of the process tree; all zeros once it is gone."""
        ...

    def isolation_support(self) -> IsolationSupport:
        """Return what limits and sandboxes this host supports. Limits are enforced only by the listed `controllers`."""
        ...

    def live_groups(self) -> tuple[str, ...]:
        """Return the sorted names of groups with live processes, also of earlier starters. Empty groups are removed."""
        ...

    async def kill_group(self, group: str, /) -> None:
        """Kill all processes of the named group, whichever process started them. Returns when none is left."""
        ...


class Gpu(NamedTuple):
    """A GPU: `name` as used by the host (`gpu-0`), `model` as given by the vendor. Empty and 0 if unknown."""

    name: str
    model: str = ""
    memory_bytes: int = 0


class HostInventory(NamedTuple):
    """Hardware of a machine, as far as the limits of this process allow its use."""

    hostname: str
    kernel: str
    boot: str
    cpu_milli: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()


class Host(Protocol):
    """The machine this process runs on."""

    def inventory(self) -> HostInventory:
        """Read the hardware anew. Blocks: async code calls it through an `Offload`."""
        ...


class Ports(Protocol):
    """Allocates free TCP ports of this machine."""

    async def find_free(self, count: int, /) -> list[int]:
        """Return `count` different free ports, none of which was returned within the last minute. Raises `NoFreePorts`."""
        ...


class ProbeResult(NamedTuple):
    """Result of a probe. `detail` is a short text for users."""

    ok: bool
    detail: str


class Prober(Protocol):
    """Probes a replica over the network. Every failure is a result; only cancellation is raised."""

    async def http(self, host: str, port: int, path: str, /, *, timeout_ms: int) -> ProbeResult:
        """GET `path`: 200 to 399 is a success. Redirects are not followed and the body is not read."""
        ...

    async def tcp(self, host: str, port: int, /, *, timeout_ms: int) -> ProbeResult:
        """Open a TCP connection: success if it is accepted."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """All interfaces that a component gets. `dataclasses.replace` exchanges one of them, for example the offload."""

    clock: Clock
    randomness: Randomness
    ids: Ids
    disk: Disk
    offload: Offload
    link: Link
    runner: Runner
    host: Host
    ports: Ports
    prober: Prober
    artifacts: ArtifactFetcher


class WorldError(Exception):
    """An external failure: of the operating system, a peer or another program. `cause` says what happened, `cure` how to fix
    it.
    """

    def __init__(self, cause: str, cure: str) -> None:
        self.cause, self.cure = cause, cure
        super().__init__(f"{cause}; {cure}")


class BootIdUnavailable(WorldError):
    """The boot id cannot be read, so instants of different processes cannot be compared."""


class OffloadClosed(WorldError):
    """The work was not run, because the offload is closed."""


class DiskError(WorldError):
    """A file system call failed. Nothing has changed, except after `NotDurable`."""


class FileMissing(DiskError):
    """The file or directory does not exist."""


class FileTooLarge(DiskError):
    """The file is larger than the reader allows."""


class DiskFull(DiskError):
    """The file system or the quota is full."""


class AccessDenied(DiskError):
    """The path cannot be read or written for lack of permission."""


class FileBusy(DiskError):
    """The file is locked or being written by another process, or the name is taken."""


class NotDurable(DiskError):
    """The change is visible, but may not survive a crash of the machine. Repeat the write before relying on it."""


class LinkError(WorldError):
    """No reply was received."""


class NotSent(LinkError):
    """The peer has not received the request."""


class ReplyLost(LinkError):
    """The peer may have received the request, or may still receive it; its reply did not arrive."""


class ListenFailed(WorldError):
    """Listening failed: the address is in use, or the system refused it."""


class NotStarted(WorldError):
    """Nothing was started: the program does not exist, or the system refused it."""


class NoFreePorts(WorldError):
    """Too few free ports."""
