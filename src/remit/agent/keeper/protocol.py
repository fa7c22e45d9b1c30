"""Messages between agent and keeper, the agent's client stub, and the keeper launcher.

Agent and keeper are processes on one machine: they share the boot clock, and no network lies between them. Both ends of the
protocol may run different versions during an upgrade, so message tags and field names are fixed. The keeper itself is in
keeper.py.

The launcher starts a keeper if none runs. A keeper holds its lock as long as it lives, also while it is stopped (SIGSTOP). A
keeper that does not answer but holds its lock is therefore left alone: a second one would start the same processes again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from remit.agent.attempts import AttemptId
from remit.world.interfaces import (
    Clock,
    Disk,
    ExitStatus,
    FileBusy,
    FileMissing,
    Link,
    LinkError,
    ProcessHandle,
    ProcessSpec,
    ReplyLost,
    World,
    WorldError,
)

NO_START: Final = -1
"""The `number` of a record of a start that did not happen. The start may be requested again. In the journal it marks a
forgotten attempt.
"""

REPLY_TIMEOUT_MS: Final = 10_000
"""How long a reply of the keeper is waited for. A stopped keeper replies after it continues; the agent has repeated the request
by then.
"""


class ProcessRecord(Struct, frozen=True, omit_defaults=True):
    """The keeper's record of one process of an attempt.

    `number` counts the restarts within the attempt; 0 is the first start. `ended` is set once the process has exited.
    `since_ms` is the time of the start on the clock of `boot`. If the process never ran, `failed` and `cure` explain it. If
    it was stopped for a reason other than a missing assignment, `why` is that reason.
    """

    node: str
    scope: str
    key: str
    uid: str
    attempt: int
    number: int = 0
    pid: int = 0
    began: str = ""
    group: str = ""
    since_ms: int = 0
    fence_ms: int = 0
    grace_ms: int = 0
    ports: dict[str, int] = {}
    ended: ExitStatus | None = None
    ended_ms: int = 0
    fenced: bool = False
    """It was stopped because its node's lease had not been renewed within the fence."""
    failed: str = ""
    cure: str = ""
    why: str = ""
    boot: str = ""

    @property
    def attempt_id(self) -> AttemptId:
        return AttemptId(self.key, self.uid, self.attempt)

    @property
    def running(self) -> ProcessHandle:
        return ProcessHandle(self.pid, self.began, self.group)

    @property
    def alive(self) -> bool:
        return self.ended is None

    @property
    def stage(self) -> tuple[int, bool, bool]:
        """How far the process has come. Of two records of one attempt, the one with the higher stage is newer."""
        return self.number, self.ended is not None, self.pid != 0


class ProcessUsage(Struct, frozen=True):
    """Resources used by an attempt: cumulative CPU time and current memory."""

    uid: str
    attempt: int
    cpu_ms: int
    memory_bytes: int


class StartProcess(Struct, frozen=True, tag="begin"):
    """Start a process, unless this start was performed before or its fencing deadline has passed.

    `rooms` are directories that the process needs; missing ones are created.
    """

    order: ProcessSpec
    number: int
    fence_ms: int
    grace_ms: int
    ports: dict[str, int]
    rooms: tuple[Path, ...] = ()


class StopProcess(Struct, frozen=True, tag="halt"):
    """Stop a process and its descendants: SIGTERM, then SIGKILL after `grace_ms`. `why` is recorded as the result."""

    key: str
    uid: str
    attempt: int
    grace_ms: int
    why: str = ""


class BlockStart(Struct, frozen=True, tag="bar"):
    """Unless the attempt runs now, perform no further start of it, whether requested before or after this message."""

    key: str
    uid: str
    attempt: int


class ForgetProcess(Struct, frozen=True, tag="drop"):
    """Forget an attempt that has ended. It will not be requested again."""

    key: str
    uid: str
    attempt: int


class ConfirmRenewals(Struct, frozen=True, tag="renewed"):
    """Renewals of these nodes' leases, sent at the given times, were accepted."""

    sent_ms: dict[str, int]


class GetUsage(Struct, frozen=True, tag="uses"):
    """Request the resource usage of all attempts."""


class Shutdown(Struct, frozen=True, tag="quit"):
    """Stop all processes as `StopProcess` does, then exit. The reply is sent once no process is left."""

    grace_ms: int


KeeperMessage = StartProcess | StopProcess | BlockStart | ForgetProcess | ConfirmRenewals | GetUsage | Shutdown


class KeeperReply(Struct, frozen=True, omit_defaults=True):
    """Reply to a message.

    After `StartProcess`, `kept` is the record of the start; None: the fencing deadline has passed and nothing was started.
    After `BlockStart`, `kept` is the record of the attempt, if any.
    """

    kept: ProcessRecord | None = None
    uses: tuple[ProcessUsage, ...] = ()


class ProcessTable(Struct, frozen=True, omit_defaults=True):
    """Changes of the process table. The first message of a stream is the full table (`whole`)."""

    whole: bool = False
    kept: tuple[ProcessRecord, ...] = ()
    gone: tuple[tuple[str, str, int], ...] = ()


def _encode_hook(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to a keeper")


def _decode_hook(type_: type, value: object) -> object:
    if type_ is Path:
        return Path(str(value))
    raise ValueError(f"expected a {type_.__name__}")


_encoder = msgspec.json.Encoder(enc_hook=_encode_hook)
_message_decoder: msgspec.json.Decoder[KeeperMessage] = msgspec.json.Decoder(KeeperMessage, dec_hook=_decode_hook)
_reply_decoder: msgspec.json.Decoder[KeeperReply] = msgspec.json.Decoder(KeeperReply)
_table_decoder: msgspec.json.Decoder[ProcessTable] = msgspec.json.Decoder(ProcessTable)


def encode(message: KeeperMessage | KeeperReply | ProcessTable) -> bytes:
    return _encoder.encode(message)


def decode_message(body: bytes) -> KeeperMessage:
    return _message_decoder.decode(body)


class KeeperClient:
    """Client of the keeper. Raises `LinkError` if no reply arrives in time; the process table then shows the outcome."""

    def __init__(self, link: Link, keeper: str, clock: Clock) -> None:
        self._link, self._keeper, self._clock = link, keeper, clock

    async def start(
        self,
        spec: ProcessSpec,
        *,
        restarts: int,
        fence_ms: int,
        grace_ms: int,
        ports: Mapping[str, int],
        directories: Sequence[Path] = (),
    ) -> ProcessRecord | None:
        return (await self._send(StartProcess(spec, restarts, fence_ms, grace_ms, dict(ports), tuple(directories)))).kept

    async def stop(self, attempt: AttemptId, grace_ms: int, result: str = "") -> None:
        await self._send(StopProcess(*attempt, grace_ms, result))

    async def block_start(self, attempt: AttemptId) -> ProcessRecord | None:
        """Block further starts of an attempt. If the returned record is None or not alive, the attempt does not run and never
        will.
        """
        return (await self._send(BlockStart(*attempt))).kept

    async def forget(self, attempt: AttemptId) -> None:
        await self._send(ForgetProcess(*attempt))

    async def confirm_renewals(self, sent_ms: Mapping[str, int], timeout_ms: int = REPLY_TIMEOUT_MS) -> None:
        await self._send(ConfirmRenewals(dict(sent_ms)), timeout_ms)

    async def usage(self, timeout_ms: int = REPLY_TIMEOUT_MS) -> Sequence[ProcessUsage]:
        return (await self._send(GetUsage(), timeout_ms)).uses

    async def shut_down(self, grace_ms: int) -> None:
        """Stop all processes and the keeper. Returns once all have ended."""
        await self._send(Shutdown(grace_ms), timeout_ms=2 * grace_ms + REPLY_TIMEOUT_MS)

    async def watch_table(self) -> AsyncGenerator[ProcessTable, None]:
        """Stream the full table, then its changes, until the keeper is gone."""
        async for item in self._link.stream(self._keeper, b""):
            yield _table_decoder.decode(item)

    async def _send(self, message: KeeperMessage, timeout_ms: int = REPLY_TIMEOUT_MS) -> KeeperReply:
        try:
            async with self._clock.timeout_ms(timeout_ms):
                body = await self._link.request(self._keeper, encode(message))
        except TimeoutError:
            cure = "check whether its process is stopped, and continue it with SIGCONT"
            raise ReplyLost(f"the keeper did not answer for {timeout_ms} ms", cure) from None
        try:
            return _reply_decoder.decode(body)
        except msgspec.DecodeError as error:
            cure = "run agent and keeper at the same version"
            raise LinkError(f"the keeper's reply cannot be decoded ({error})", cure) from error


BACKOFF_MS: Final = 250
BACKOFF_MS_MAX: Final = 15_000
STABLE_MS: Final = 60_000
"""A keeper that lived this long had started properly: the backoff is reset."""


class KeeperLauncher:
    """Starts a keeper if none runs. Called whenever the keeper does not answer.

    It is started with `spec` in a session of its own, so that it outlives the agent.
    """

    def __init__(self, world: World, spec: ProcessSpec, lock: Path, log: Callable[[str], None]) -> None:
        self._world, self._spec, self._lock, self._log = world, spec, lock, log
        self._process: ProcessHandle | None = None
        self._started_ms = 0
        self._failures = 0
        self._not_before_ms = 0

    async def __call__(self) -> None:
        if self._process is not None and not self._world.runner.is_alive(self._process):
            status = await self._world.runner.wait(self._process)
            self._log(
                f"the keeper (process {self._process.pid}) has ended: {status.code if status.signal is None else status.signal}"
            )
            self._process = None
        now_ms = self._world.clock.now_ms()
        if now_ms < self._not_before_ms or await self._world.offload(lambda: is_locked(self._world.disk, self._lock)):
            return
        self._failures = 0 if now_ms - self._started_ms > STABLE_MS else self._failures + 1
        self._not_before_ms = now_ms + min(BACKOFF_MS_MAX, BACKOFF_MS << min(self._failures, 10))
        self._started_ms = now_ms
        try:
            self._process = await self._world.runner.start(self._spec)
        except WorldError as error:
            self._log(f"the keeper cannot be started: {error}")


def is_locked(disk: Disk, lock: Path) -> bool:
    """Return whether another process holds this lock."""
    try:
        with disk.lock(lock):
            return False
    except FileBusy:
        return True
    except FileMissing:  # its directory does not exist
        return False
