"""Requests from API servers to the agent: log streaming and exec sessions.

Both services check the callback token that the agent announces to servers. The message type selects the service.

Names in requests never become paths unchecked: a uid is looked up, or must have the form of a uid.

Log streams carry raw bytes, cut at line ends where lines are not too long. With both streams requested, stdout is sent
before stderr: they are two files, and the order of lines between them is not recorded. Followed logs are sent as they are
written.

An exec session runs like its attempt: same user, environment, directory, limits and sandbox, and no shell parses its
command. It ends with the attempt, when the caller disconnects, after IDLE_MS_MAX without traffic, and after SESSION_MS_MAX.
Processes it left running end with it.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from remit.agent.attempts import AttemptId
from remit.model.wire.agent_messages import ExecInputRequest, ExecRequest, LogsRequest
from remit.model.wire.exec_frames import ExecExit, ExecFrameType, ExecRejected, ExecStarted
from remit.model.wire.exec_frames import TerminalSize as RequestedSize
from remit.world.interfaces import (
    CommandOutput,
    ExecSession,
    ExitStatus,
    FileMissing,
    LogChunk,
    LogFiles,
    NotStarted,
    ProcessHandle,
    ProcessSpec,
    PtySize,
    World,
)

CHUNK_BYTES: Final = 64 << 10
TAIL_LINES_MAX: Final = 1_000_000
LOG_POLL_MS: Final = 200
"""Interval at which followed log files are polled."""

_UID: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9.-]{0,99}")
_logs_decoder: msgspec.json.Decoder[LogsRequest] = msgspec.json.Decoder(LogsRequest)

FindLogs = Callable[[AttemptId], tuple[Iterable[Path], bool]]
"""Returns the directories that may contain the log files of an attempt, and whether more output can follow."""


class CallbackRejected(Exception):
    """The request is rejected: its token is wrong, or it names no attempt."""


class LogService:
    """Serves log files. Implements `world.interfaces.Service`."""

    def __init__(self, world: World, log_files: LogFiles, token: str, find_logs: FindLogs) -> None:
        self._world, self._log_files, self._token, self._find_logs = world, log_files, token.encode(), find_logs

    async def request(self, body: bytes, /) -> bytes:
        raise CallbackRejected("logs are streamed; open a stream instead of a request")

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        request = self._decode_request(body)
        attempt = AttemptId(request.key, request.uid, request.attempt)
        names = [
            name for name, end in zip(attempt.log_names, ("stdout", "stderr"), strict=True) if request.stream in (end, "both")
        ]
        directory = await self._find_directory(attempt, names, follow=request.follow)
        yield b""  # an empty item tells the caller that the request was accepted
        if directory is None:
            yield f"-- no logs of attempt {attempt.number} are stored: it has not started, or is too old --\n".encode()
            return
        positions = {name: await self._tail_offset(directory, name, request.tail) for name in names}
        while True:
            # Checked before the files are read, so that the last output is not missed.
            is_last = not request.follow or not self._find_logs(attempt)[1]
            for name in names:
                async for data in self._new_output(directory, name, positions):
                    yield data
            if is_last:
                return
            await self._world.clock.sleep_ms(LOG_POLL_MS)

    def _decode_request(self, body: bytes) -> LogsRequest:
        try:
            request = _logs_decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise CallbackRejected(
                f"the request cannot be decoded ({error}); run server and agent at the same version"
            ) from error
        if not hmac.compare_digest(request.token.encode(), self._token):
            raise CallbackRejected("the token is not this agent's callback token")
        if not _UID.fullmatch(request.uid) or request.attempt < 0:
            raise CallbackRejected("key, uid and attempt do not name an attempt of a replica")
        return request

    async def _find_directory(self, attempt: AttemptId, names: list[str], *, follow: bool) -> Path | None:
        """Return the directory that contains any of these files, or None. With `follow`, wait until one appears."""
        while True:
            directories, may_continue = self._find_logs(attempt)
            for directory in directories:
                for name in names:
                    with suppress(FileMissing):
                        await self._world.offload(partial(self._log_files.span, directory, name))
                        return directory
            if not may_continue or not follow:
                return None
            await self._world.clock.sleep_ms(LOG_POLL_MS)

    async def _new_output(self, directory: Path, name: str, positions: dict[str, int]) -> AsyncGenerator[bytes, None]:
        """Yield the bytes written since the last call. `positions` holds the offset up to which each file was sent."""
        while True:
            chunk = await self._read(directory, name, positions[name])
            if not chunk.data:
                return
            if chunk.start > positions[name]:
                yield f"-- {chunk.start - positions[name]} bytes were removed by log rotation --\n".encode()
            # End at the last complete line, so that lines of the two streams do not mix. The rest follows with the next chunk.
            complete = chunk.data.rfind(b"\n") + 1 if len(chunk.data) == CHUNK_BYTES else len(chunk.data)
            data = chunk.data[: complete or len(chunk.data)]
            positions[name] = chunk.start + len(data)
            yield data

    async def _tail_offset(self, directory: Path, name: str, tail: int | None) -> int:
        """Return the offset at which the last `tail` lines begin."""
        try:
            first, end = await self._world.offload(partial(self._log_files.span, directory, name))
        except FileMissing:
            return 0
        if tail is None:
            return first
        remaining, position, last = min(max(tail, 0), TAIL_LINES_MAX), end, True
        while remaining and position > first:
            start = max(first, position - CHUNK_BYTES)
            data = await self._read_range(directory, name, start, position)
            # The newline at the end of the file starts no line.
            cut = len(data) - 1 if last and data.endswith(b"\n") else len(data)
            last = False
            while (cut := data.rfind(b"\n", 0, cut)) >= 0:
                remaining -= 1
                if not remaining:
                    return start + cut + 1
            position = start
        return first if remaining else end

    async def _read_range(self, directory: Path, name: str, start: int, end: int) -> bytes:
        """Read a range, also across rotated files. Stops where bytes were removed by rotation."""
        data = b""
        while start + len(data) < end:
            chunk = await self._read(directory, name, start + len(data))
            if not chunk.data or chunk.start != start + len(data):
                break
            data += chunk.data
        return data[: end - start]

    async def _read(self, directory: Path, name: str, start: int) -> LogChunk:
        try:
            return await self._world.offload(partial(self._log_files.read, directory, name, start, CHUNK_BYTES))
        except FileMissing:
            return LogChunk(start, b"")


SESSIONS_MAX: Final = 64
TENANT_SESSIONS_MAX: Final = 16
IDLE_MS_MAX: Final = 30 * 60_000
"""Maximum time without input or output."""
SESSION_MS_MAX: Final = 8 * 3_600_000
OUTPUT_DRAIN_MS: Final = 5_000
"""How long output written before the end is still read."""

GONE: Final = "gone"
FULL: Final = "overloaded"
NOT_STARTED: Final = "not_started"

_exec_decoder: msgspec.json.Decoder[ExecRequest] = msgspec.json.Decoder(ExecRequest)
_feed_decoder: msgspec.json.Decoder[ExecInputRequest] = msgspec.json.Decoder(ExecInputRequest)
_encode = msgspec.json.Encoder().encode


class RunningAttempt(NamedTuple):
    """A running attempt: its node, its process, and the spec it was started with."""

    node: str
    process: ProcessHandle
    spec: ProcessSpec


FindAttempt = Callable[[AttemptId], RunningAttempt | None]
"""Looks up a running attempt; None if it does not run here. Raises `NotStarted` while that is unknown."""


class _ExecState:
    """One exec session. `session` is None while it starts; the entry reserves its slot meanwhile."""

    def __init__(self, tenant: str, now_ms: int) -> None:
        self.tenant = tenant
        self.started_ms = self.active_ms = now_ms
        self.session: ExecSession | None = None


class ExecService:
    """Serves exec sessions of this agent's attempts."""

    def __init__(self, world: World, token: str, find: FindAttempt) -> None:
        self._world, self._token, self._find = world, token.encode(), find
        self._sessions: dict[str, _ExecState] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    async def request(self, body: bytes, /) -> bytes:
        message = self._decode_request(_feed_decoder, body)
        state = self._sessions.get(message.session)
        if state is None or state.session is None:
            return b""  # the session has ended meanwhile, as its stream reports
        state.active_ms = self._world.clock.now_ms()
        if message.window is not None:
            state.session.resize(_window(message.window))
        await state.session.write(message.data)
        if message.over:
            state.session.close_input()
        return b""

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        request = self._decode_request(_exec_decoder, body)
        if request.session in self._sessions:
            raise CallbackRejected("a session of that name is in progress")
        attempt = AttemptId(request.key, request.uid, request.attempt)
        tenant = request.key.split("/")[1] if request.key.count("/") == 2 else ""
        if (rejection := self._limit_reached(tenant)) is not None:
            yield _frame(ExecFrameType.REFUSED, rejection)
            return
        state = self._sessions[request.session] = _ExecState(tenant, self._world.clock.now_ms())
        try:
            try:
                running = self._find(attempt)
                if running is not None:
                    state.session = await self._start(running, request)
            except NotStarted as error:
                yield _frame(ExecFrameType.REFUSED, ExecRejected(NOT_STARTED, error.cause, error.cure))
                return
            if running is None or state.session is None:
                cause, cure = (
                    f"attempt {attempt.number} does not run on this node",
                    "look up its node (remit get replicas), and retry",
                )
                yield _frame(ExecFrameType.REFUSED, ExecRejected(GONE, cause, cure))
                return
            yield _frame(ExecFrameType.STARTED, ExecStarted(request.key.rpartition("/")[2], attempt.number, running.node))
            async for item in self._output(state, state.session, running.process):
                yield item
        finally:
            del self._sessions[request.session]
            if state.session is not None:
                await state.session.close()

    def _decode_request(self, decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
        try:
            request = decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise CallbackRejected(
                f"the request cannot be decoded ({error}); run server and agent at the same version"
            ) from error
        if not hmac.compare_digest(request.token.encode(), self._token):
            raise CallbackRejected("the token is not this agent's callback token")
        return request

    def _limit_reached(self, tenant: str) -> ExecRejected | None:
        cure = "end a session that is not needed, or retry later"
        if len(self._sessions) >= SESSIONS_MAX:
            return ExecRejected(FULL, f"this node has reached its limit of {SESSIONS_MAX} exec sessions", cure)
        if sum(state.tenant == tenant for state in self._sessions.values()) >= TENANT_SESSIONS_MAX:
            return ExecRejected(FULL, f"this tenant has reached its limit of {TENANT_SESSIONS_MAX} sessions on this node", cure)
        return None

    async def _start(self, running: RunningAttempt, request: ExecRequest) -> ExecSession:
        command, env = request.begin, dict(running.spec.env)
        if command.window is not None and command.terminal:
            env["TERM"] = command.terminal
        spec = running.spec._replace(argv=command.argv, env=env, stdout=None, stderr=None)
        window = None if command.window is None else _window(command.window)
        session = await self._world.runner.start_exec(running.process, spec, window=window)
        if not command.stdin and window is None:
            session.close_input()
        return session

    async def _output(self, state: _ExecState, session: ExecSession, process: ProcessHandle) -> AsyncGenerator[bytes, None]:
        """Yield output frames until the session has ended and its output is complete, then the exit status."""
        clock, reason, ended_ms, output_closed = self._world.clock, "", 0, False
        reading: asyncio.Future[CommandOutput | None] = asyncio.ensure_future(session.read())
        waiting: asyncio.Future[ExitStatus] = asyncio.ensure_future(session.wait())
        try:
            while not (output_closed and ended_ms):
                now_ms = clock.now_ms()
                if not ended_ms and (waiting.done() or now_ms >= _limit_ms(state)):
                    reason = "" if waiting.done() else _limit_reason(state, now_ms)
                    ended_ms = now_ms
                    await session.kill_all()  # also its descendants, which may hold its output streams open
                until_ms = ended_ms + OUTPUT_DRAIN_MS if ended_ms else _limit_ms(state)
                await self._wait_until(until_ms, [*([] if output_closed else [reading]), *([] if ended_ms else [waiting])])
                if not output_closed and reading.done():
                    output = reading.result()
                    if output is None:
                        output_closed = True  # it closed its output and may still run
                        continue
                    state.active_ms = clock.now_ms()
                    yield bytes((ExecFrameType.STDERR if output.stream == "stderr" else ExecFrameType.STDOUT,)) + output.data
                    reading = asyncio.ensure_future(session.read())
                elif ended_ms and clock.now_ms() >= until_ms:
                    break
            status = await session.wait()
            if not reason and status.signal is not None and not self._world.runner.is_alive(process):
                reason = "its replica ended"
            yield _frame(ExecFrameType.EXITED, ExecExit(status.code, status.signal, reason))
        finally:
            for task in (reading, waiting):
                task.cancel()
            await asyncio.wait((reading, waiting))

    async def _wait_until(self, at_ms: int, tasks: list[asyncio.Future[Any]]) -> None:
        if not tasks:
            return
        with suppress(TimeoutError):
            async with self._world.clock.timeout_ms(max(1, at_ms - self._world.clock.now_ms())):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


def _limit_ms(state: _ExecState) -> int:
    return min(state.active_ms + IDLE_MS_MAX, state.started_ms + SESSION_MS_MAX)


def _limit_reason(state: _ExecState, now_ms: int) -> str:
    if now_ms >= state.started_ms + SESSION_MS_MAX:
        return f"the session reached its limit of {SESSION_MS_MAX // 3_600_000} hours"
    return f"no input or output for {IDLE_MS_MAX // 60_000} minutes"


def _frame(frame_type: ExecFrameType, payload: msgspec.Struct) -> bytes:
    return bytes((frame_type,)) + _encode(payload)


def _window(request: RequestedSize) -> PtySize:
    return PtySize(request.rows, request.columns)


MESSAGE_BYTES_MAX: Final = 4 << 20


class _TaggedMessage(Struct):
    type: str = ""


_tag_decoder: msgspec.json.Decoder[_TaggedMessage] = msgspec.json.Decoder(_TaggedMessage)


class CallbackService:
    """Dispatches requests to the log or exec service by message type. Implements `world.interfaces.Service`. Each service
    checks the token itself.
    """

    def __init__(self, log_service: LogService, exec_service: ExecService) -> None:
        self._log_service, self._exec_service = log_service, exec_service

    async def request(self, body: bytes, /) -> bytes:
        if _message_type(body) == "feed":
            return await self._exec_service.request(body)
        return await self._log_service.request(body)

    async def stream(self, body: bytes, /) -> AsyncGenerator[bytes, None]:
        service_stream = self._exec_service.stream(body) if _message_type(body) == "exec" else self._log_service.stream(body)
        async with aclosing(service_stream) as items:
            async for item in items:
                yield item


def _message_type(body: bytes) -> str:
    if len(body) > MESSAGE_BYTES_MAX:
        raise CallbackRejected(f"the request has {len(body)} bytes, more than the maximum of {MESSAGE_BYTES_MAX}")
    try:
        return _tag_decoder.decode(body).type
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CallbackRejected(f"the request cannot be decoded ({error}); run server and agent at the same version") from error
