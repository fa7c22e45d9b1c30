"""Interfaces: clock, randomness, ids, disk, link, runner, host; their errors.

Promises only: production.py keeps them for real, the simulator in virtual time.

Everything that is not a pure function of its arguments comes through here, so that a component which was given another
world runs the same code. Two failures are told apart everywhere: what the outside did to us (`WorldError`, with its cause
and its cure), and our own bugs (`ValueError` and the like).
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from remit.world.files.artifacts import Carrier
    from remit.world.process.exec_session import Session, Window

T = TypeVar("T")

READ_BYTES_MAX: Final = 64 << 20


class Clock(Protocol):
    """Durations decide; the wall clock is only displayed."""

    def now_ms(self) -> int:
        """Never goes back, and goes on while the machine is suspended. Compare two instants only within one `boot`."""
        ...

    def boot(self) -> str:
        """Names the stretch of time in which instants are comparable, also between processes."""
        ...

    def wall(self) -> str:
        """RFC 3339 in UTC with milliseconds, for people. It may jump either way: nothing may be decided by it."""
        ...

    async def sleep_ms(self, ms: int) -> None:
        """At least `ms` of `now_ms` pass. Others run meanwhile, even for 0."""
        ...

    def timeout_ms(self, ms: int) -> AbstractAsyncContextManager[object]:
        """Cancels its body and raises TimeoutError after about `ms` of the event loop's time.

        It bounds a wait and proves nothing: the loop's time may stand still during a suspend. What must not happen after an
        instant is checked against `now_ms`.
        """
        ...


class Chance(Protocol):
    """One stream of lots. The same seed and the same calls give the same lots."""

    def below(self, limit: int) -> int:
        """From 0 up to but not including `limit`, each as likely."""
        ...

    def uniform_ms(self, limit: int) -> int:
        """From 0 up to and including `limit`."""
        ...

    def choice(self, items: Sequence[T], /) -> T: ...

    def shuffled(self, items: Sequence[T], /) -> list[T]:
        """A new list; `items` stays as it is."""
        ...

    def stream(self, name: str) -> Chance:
        """A stream of its own for `name`: what one component draws then never shifts what another gets."""
        ...


class Ids(Protocol):
    """Names that nobody else has. Only a to z and 2 to 7: safe in a URL, in a file name, and between the dots of an id."""

    def nonce(self) -> str: ...

    def incarnation(self) -> str: ...


class Disk(Protocol):
    """Small files that must be whole. It blocks: from async code, call it through an `Offload`."""

    def read(self, path: Path, *, bytes_max: int = READ_BYTES_MAX) -> bytes:
        """Raises `Missing`, or `TooLarge` before it has read more than `bytes_max`."""
        ...

    def write_atomically(self, path: Path, data: bytes) -> None:
        """Whenever this is cut off, `path` has its old content or the new, whole. When it returns, the new one is durable.

        After any error the old content stands, except `Unsettled`. One writer a path: a second at once gets `Busy`.
        """
        ...

    def append(self, path: Path, data: bytes, *, durably: bool) -> None:
        """Add to the end of `path`, made if absent. If this is cut off, or refused for want of room, a part of `data` may be
        there. What was added durably outlives a crash of the machine, with all that was added before it.
        """
        ...

    def exists(self, path: Path) -> bool: ...

    def remove(self, path: Path) -> None:
        """Durably. What is gone already is removed."""
        ...

    def make_directory(self, path: Path, *, durably: bool = True) -> None:
        """With its parents. One that exists stays."""
        ...

    def remove_tree(self, path: Path) -> None:
        """A directory with all that is in it, as far as that is possible; links are removed, not followed. Not durably."""
        ...

    def list(self, directory: Path) -> tuple[str, ...]:
        """The names inside, sorted; half-written files are not among them."""
        ...

    def free_bytes(self, path: Path) -> int:
        """What is left for us on the file system of `path`."""
        ...

    def lock(self, path: Path) -> AbstractContextManager[object]:
        """Hold `path` (an empty file, made if absent, and left behind) against other processes; `Busy` if another holds it.

        It ends with the process, however that ends.
        """
        ...


class Piece(NamedTuple):
    """Some of what was written to a file of a spool, from the byte `start` on, counted from the first that ever was."""

    start: int
    data: bytes


class Spool(Protocol):
    """Files that work adds to for as long as it likes, held to a size: bytes that are too old are gone. No link is followed,
    and what is no plain file is not read. It blocks: from async code, call it through an `Offload`.
    """

    def rotate(self, directory: Path, name: str, *, bytes_max: int, older: int) -> bool:
        """If the file is longer than `bytes_max`, begin it anew and keep so many `older` pieces of it. Was it?"""
        ...

    def span(self, directory: Path, name: str) -> tuple[int, int]:
        """From which byte to which it is there. Raises `Missing` if it never was."""
        ...

    def read(self, directory: Path, name: str, start: int, bytes_max: int) -> Piece:
        """From `start` on, or from the first byte after it that is still there. Raises `Missing`."""
        ...

    def sweep(self, directory: Path, keep: Collection[str], *, files: int, bytes_max: int, age_ms: int) -> None:
        """Remove what is too old, and then the oldest until no more than that is left. Files whose names begin like one of
        `keep`, up to the last dot, are neither counted nor removed; the others are taken together by that beginning.
        """
        ...


class Offload(Protocol):
    """Runs blocking work elsewhere, one piece at a time, in the order of the calls (not of the awaits)."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """What `work` returns or raises. If the waiter is cancelled the work still runs to its end, in its turn."""
        ...

    async def close(self) -> None:
        """Wait for the work that was accepted, then take no more: later calls raise `OffloadClosed`."""
        ...


class Service(Protocol):
    """What a process answers to others. It is asked for several things at once, each in its own time."""

    async def request(self, body: bytes, /) -> bytes: ...

    def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]: ...


class Link(Protocol):
    """How bytes reach another process, by its name. Nothing is tried twice here, and no body is looked at.

    Two failures must never be confused: after `Unreached` nobody has heard it; after `Unheard` somebody may have, or may still.
    A request may be cancelled at any time, which says the same as `Unheard`.
    """

    async def request(self, to: str, body: bytes, /) -> bytes:
        """The reply to one request."""
        ...

    def stream(self, to: str, body: bytes, /) -> AsyncGenerator[bytes, None]:
        """What the far side sends until it ends, in order and without a gap; close it to leave. Raises as `request` does."""
        ...

    def serve(self, at: str, service: Service, /) -> AbstractAsyncContextManager[object]:
        """Answer what is sent to `at` as long as this lasts. A service that raises breaks off that one call.

        Raises `NotServed`. At its end, streams are broken off, and so are requests that take much longer.
        """
        ...


class Limits(NamedTuple):
    """What a run may take; 0 is no limit. `cpu_milli` is a weight: it bites only where others want the processor too."""

    memory_bytes: int = 0
    cpu_milli: int = 0
    pids: int = 0


class Mounted(NamedTuple):
    """A file or directory of the machine that a sandbox shows at another place."""

    source: Path
    at: Path
    writable: bool = False


class Order(NamedTuple):
    """What is to run: never through a shell. `env` is all that it gets.

    `user`: its name; empty is whoever starts it. `stdout`, `stderr`: files that are added to, made if absent; None is nowhere.
    `group`: a name, safe as a file name, under which all that comes of it is kept together and limited, however it forks;
    a name in which somebody still runs is refused, so that a name is run once at a time. `writable`: directories of
    its own: they are given to its `user`, and with a sandbox they are all that it can change. `with_parent`: it is killed when
    its starter ends, however that ends. `not_after_ms`: past this instant of the clock it is not started any more. `root`: what
    it sees as /, to read, in place of the machine; with that, or with `mounts`, it needs a sandbox. `hidden`: directories that
    a sandbox shows nothing of, but what of them is `writable` or mounted.
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
    mounts: tuple[Mounted, ...] = ()
    hidden: tuple[Path, ...] = ()


_GROUP_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""No dot at the beginning: such names are a runner's own."""


def check_group(name: str) -> None:
    if not _GROUP_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a group")


def check_order(order: Order) -> None:
    """What no runner takes, whatever the machine is like: our own mistakes."""
    if not order.argv:
        raise ValueError("an order without a program")
    if order.group:
        check_group(order.group)
    elif any(order.limits):
        raise ValueError("limits are those of a group: name one")
    if (order.root is not None or order.mounts) and order.sandbox == "none":
        raise ValueError("a root or a mount is a sandbox's")


def check_in_time(order: Order, now_ms: int) -> None:
    """Looked at in the same step in which it is started."""
    if order.not_after_ms is not None and now_ms >= order.not_after_ms:
        raise NotStarted("it is too late for it to be started", "ask what has become of it, then order it anew")


class Running(NamedTuple):
    """One process that was started: a pid is used again one day, a pid and a beginning are not.

    `group` is the runner's own word for where the others of its tree are found. Write down all three to find it again.
    """

    pid: int
    began: str
    group: str = ""


class Ended(NamedTuple):
    """How it ended: `code` as it exited, or the `signal` that killed it. Neither, if it was not our child and is gone.

    `oom`: the system killed one of its processes because the memory that it may take was used up.
    """

    code: int | None = None
    signal: int | None = None
    oom: bool = False


class Usage(NamedTuple):
    """What a run and all its children take: processor time since the beginning, memory and processes now."""

    cpu_ms: int = 0
    memory_bytes: int = 0
    pids: int = 0


class Confinement(NamedTuple):
    """How far a machine can hold work back: by which cgroups, for what, and why no more. `sandbox`: is there bubblewrap?"""

    cgroups: Literal["v2", "v1", "none"]
    controllers: tuple[str, ...]
    why: str
    sandbox: bool


class Runner(Protocol):
    """Runs work on this machine, each in a group of its own. It goes on when its starter dies, unless ordered otherwise."""

    async def start(self, order: Order, /) -> Running:
        """Raises `NotStarted`; then nothing runs."""
        ...

    async def wait(self, running: Running, /) -> Ended:
        """Returns when it has ended; also for one that an earlier process has started."""
        ...

    def alive(self, running: Running, /) -> bool: ...

    async def stop(self, running: Running, /, *, grace_ms: int) -> None:
        """Ask it to end, and after `grace_ms` make it. Returns when nothing of its tree is left; at once if all was gone.

        Also for one that has ended and left children behind.
        """
        ...

    async def enter(self, running: Running, order: Order, /, *, window: Window | None = None) -> Session:
        """Start a command in the surroundings of a run that was started by a like order: its user, group, limits, directory and
        sandbox. Of the order it takes `argv`, `env`, `directory`, `user` and `sandbox`. With a `window` it has a terminal, else
        three pipes. Raises `NotStarted`; then nothing runs.
        """
        ...

    def usage(self, running: Running, /) -> Usage:
        """All zeros once it is gone."""
        ...

    def confinement(self) -> Confinement:
        """What limits and sandboxes are worth here. An order's limits are not enforced by what is not among `controllers`."""
        ...

    def leftovers(self) -> tuple[str, ...]:
        """The names of groups in which somebody runs, sorted; also of earlier starters. Empty ones are removed."""
        ...

    async def clear(self, group: str, /) -> None:
        """Kill all that runs under this name of an order, whoever started it. Returns when nobody is left."""
        ...


class Gpu(NamedTuple):
    """`name` as the machine calls it (`gpu-0`); `model` as its maker does; empty and 0 where that cannot be told."""

    name: str
    model: str = ""
    memory_bytes: int = 0


class Equipment(NamedTuple):
    """What a machine has for us: no more than the limits allow under which we run ourselves."""

    hostname: str
    kernel: str
    boot: str
    cpu_milli: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()


class Host(Protocol):
    """The machine that we run on."""

    def equipment(self) -> Equipment:
        """It looks every time, and blocks: from async code, call it through an `Offload`."""
        ...


class Ports(Protocol):
    """Numbers of TCP ports of this machine at which nobody listens."""

    async def free(self, count: int, /) -> list[int]:
        """So many different ones, none of which was given out here within the last minute. Raises `NoPorts`."""
        ...


class Probed(NamedTuple):
    """Was the answer a good one? `detail` says what it was, in a few words for people."""

    ok: bool
    detail: str


class Prober(Protocol):
    """Asks work how it is. Whatever happens is an answer: nothing is raised but cancellation."""

    async def http(self, host: str, port: int, path: str, /, *, timeout_ms: int) -> Probed:
        """GET: 200 to 399 is good. Redirects are not followed, and what comes after the head is not read."""
        ...

    async def tcp(self, host: str, port: int, /, *, timeout_ms: int) -> Probed:
        """That a connection is taken is good."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """All that a component is given of the outside. `dataclasses.replace` changes one promise, say another offload."""

    clock: Clock
    chance: Chance
    ids: Ids
    disk: Disk
    offload: Offload
    link: Link
    runner: Runner
    host: Host
    ports: Ports
    prober: Prober
    carrier: Carrier


class WorldError(Exception):
    """The outside failed. `cause` says what happened, `cure` what the reader can do."""

    def __init__(self, cause: str, cure: str) -> None:
        self.cause, self.cure = cause, cure
        super().__init__(f"{cause}; {cure}")


class NoBoot(WorldError):
    """The machine does not say which boot this is, so no instant could be compared safely."""


class OffloadClosed(WorldError):
    """The work was not run."""


class DiskError(WorldError):
    """The file system refused. Nothing changed, unless it is `Unsettled`."""


class Missing(DiskError):
    """There is no such file or directory."""


class TooLarge(DiskError):
    """The file is larger than the reader allows."""


class NoRoom(DiskError):
    """The file system or the quota is full."""


class Forbidden(DiskError):
    """The place may not be read or written."""


class Busy(DiskError):
    """Another writer or holder is at it."""


class Unsettled(DiskError):
    """The change is visible, but may not survive a crash of the machine. Write it again before relying on it."""


class LinkError(WorldError):
    """There is no reply."""


class Unreached(LinkError):
    """Nobody has heard it."""


class Unheard(LinkError):
    """It may have been heard, or may be heard still; the reply was not."""


class NotServed(WorldError):
    """Nothing is answered there: somebody else does already, or the machine refused."""


class NotStarted(WorldError):
    """Nothing runs: there is no such program, or the machine refused."""


class NoPorts(WorldError):
    """The machine has no port left to give, or too few."""
