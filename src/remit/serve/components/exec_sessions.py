"""Exec: authorizes, audits and relays sessions to agents.

The request body and the response run at the same time, in the frames of model/wire/exec_frames.py: one POST without an
upgrade. The audit log records who runs what before a session starts, and how it ended. Data from an agent is bounded and
relayed, never interpreted as an instruction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from remit.law.requirements import WORKLOAD_LABEL, exec_denied_by
from remit.model.problems import escaped, quoted
from remit.model.records import Phase, PolicyRevision, Replica
from remit.model.wire.agent_messages import ExecInputRequest, ExecRequest
from remit.model.wire.api_types import AuditItem
from remit.model.wire.exec_frames import (
    FRAME_BYTES_MAX,
    INPUT_BYTES_MAX,
    MEDIA_TYPE,
    ExecExit,
    ExecFrame,
    ExecFrameError,
    ExecFrameReader,
    ExecFrameType,
    ExecRejected,
    ExecStart,
    decode_start,
    decode_terminal_size,
    encode_frame,
)
from remit.observation.watch_cache import WatchCache
from remit.serve.components.replica_logs import AGENT, AGENT_ANSWER_MS, agent_link, agent_unreachable
from remit.serve.http.replies import ApiProblem
from remit.serve.http.routes import AGENT_COST, BodySpec, RequestContext, ResponseSpec, Route
from remit.serve.http.streams import SEND_MS_MAX
from remit.serve.server_context import ServerContext
from remit.world.concurrency import first_failure
from remit.world.interfaces import LinkError
from remit.world.net.rpc_client import SocketLink

if TYPE_CHECKING:
    from remit.model.kinds import Node

DRAIN_MS: Final = 5_000
"""How long output that an agent sent before it failed may take to reach the client."""
KEEPALIVE_MS: Final = 15_000
EXEC_PHASES: Final = (Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING)
"""Phases in which a replica has a process that a command can join."""

_REJECTION_STATUSES: Final = {"gone": 409, "overloaded": 429, "not_started": 422}
_encode = msgspec.json.Encoder().encode
_rejected_decoder: msgspec.json.Decoder[ExecRejected] = msgspec.json.Decoder(ExecRejected)
_exit_decoder: msgspec.json.Decoder[ExecExit] = msgspec.json.Decoder(ExecExit)


async def execute(request: RequestContext, server: ServerContext) -> Response:
    frames = _ClientFrames(request)
    start = await frames.read_start()
    name = request.path["name"]
    replica = server.agents.get_replica(request.tenant, name)
    _check_running(replica, start)
    _check_exec_allowed(server.watch_cache, replica)
    session = _AgentSession(server, request, start, replica, server.agents.node_of(replica))
    try:
        await session.start()
    except BaseException:
        await session.close()
        raise
    return _ExecResponse(session, frames, server)


def _check_running(replica: Replica, start: ExecStart) -> None:
    name, status = replica.metadata.name, replica.status
    if status.phase not in EXEC_PHASES:
        detail = f"replica {name} is {status.phase.value}: it has no process to run a command in"
        cure = f"find out why: remit explain replica/{name}" if status.phase != Phase.RELEASED else "choose a running replica"
        raise ApiProblem(409, "phase", detail, field="name", cure=cure)
    if start.attempt and start.attempt != status.attempt:
        detail = f"attempt {start.attempt} of replica {name} is not running, the current attempt is {status.attempt}"
        raise ApiProblem(
            409, "attempt", detail, field="attempt", cure="check what happened to that attempt, or use the current one"
        )


def _check_exec_allowed(watch_cache: WatchCache, replica: Replica) -> None:
    """Check that no policy forbids exec. The policies in force are those of the latest revision, and the labels are the
    workload's current ones.
    """
    published: list[PolicyRevision] = [row.obj for _, row in watch_cache.of_kind("policyrevision/")]
    if not published:
        return
    tenant, workload = replica.metadata.tenant, replica.spec.workload
    owner = watch_cache.get(f"workload/{tenant}/{workload}")
    labels = {WORKLOAD_LABEL: workload, **(owner.metadata.labels if owner is not None else {})}
    policy = exec_denied_by(max(published, key=lambda revision: revision.spec.number).spec.policies, tenant, labels)
    if policy:
        detail = f"policy {escaped(policy)} forbids exec in replicas of {workload}"
        raise ApiProblem(
            403,
            "policy",
            detail,
            field="name",
            cure="use `remit logs` to read its output, or ask an admin to change the policy",
        )


class _ClientFrames:
    """Frames from the client."""

    def __init__(self, request: RequestContext) -> None:
        if request.receive is None:
            raise RuntimeError("an exec route must be duplex: request.receive is missing")
        self._receive: Receive = request.receive
        self._reader = ExecFrameReader()
        self._frames: list[ExecFrame] = []
        self._input_ended = False
        self.disconnected = False
        """The client has disconnected."""

    async def read_start(self) -> ExecStart:
        frame = await self.next()
        if frame is None or frame.type != ExecFrameType.START:
            detail = "the session does not begin with a start frame"
            raise ApiProblem(
                400, "malformed", detail, cure="use `remit exec`, or see model/wire/exec_frames.py for the protocol"
            )
        try:
            return decode_start(frame.body)
        except ExecFrameError as error:
            cure = "send argv as a list of strings that begins with a program"
            raise ApiProblem(422, "invalid", escaped(str(error)), field="argv", cure=cure) from None

    async def next(self) -> ExecFrame | None:
        """Return the next frame; None: there are no more. Raises `ApiProblem` for a malformed frame."""
        while not self._frames:
            if self._input_ended:
                return None
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._input_ended = self.disconnected = True
                return None
            try:
                self._frames += self._reader.feed(message.get("body", b""))
            except ExecFrameError as error:
                raise ApiProblem(400, "malformed", str(error), cure="use `remit exec`") from None
            self._input_ended = not message.get("more_body", False)
        return self._frames.pop(0)

    async def wait_for_disconnect(self) -> None:
        """Wait until the client disconnects, and discard what it sends."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _program(argument: str) -> str:
    """Return the program of an argument that may be a whole quoted command line, with passwords in it."""
    return next(iter(argument.split(maxsplit=1)), "")


class _AgentSession:
    """The agent's side of a session, and its audit entries."""

    def __init__(self, server: ServerContext, request: RequestContext, start: ExecStart, replica: Replica, node: Node) -> None:
        self._server, self._request, self._start, self._replica, self._node = server, request, start, replica, node
        self.principal = request.principal
        self._session_id = server.world.ids.nonce().replace("-", "")
        self._link: SocketLink = agent_link(node, server.agents.tls)
        self._items: AsyncGenerator[bytes, None] | None = None
        self._slots = ExitStack()
        self._first_frame = b""
        self._audited = False
        self.exit: ExecExit | None = None
        self.bytes_in = self.bytes_out = 0

    async def start(self) -> None:
        """Start the command; returns when it runs. Raises `ApiProblem`: it does not run and never will."""
        server, replica = self._server, self._replica
        self._slots.enter_context(server.agents.connection_slot(self.principal))
        self._slots.enter_context(server.agents.session_slot(replica.metadata.tenant))
        server.audit.check_writable()
        self._audit("execBegin", await self._command_for_audit())
        exec_request = ExecRequest(
            token=server.agents.callback_token(self._node),
            session=self._session_id,
            key=f"replica/{replica.metadata.tenant}/{replica.metadata.name}",
            uid=replica.metadata.uid,
            attempt=replica.status.attempt,
            begin=self._start,
        )
        self._items = self._link.stream(AGENT, _encode(exec_request))
        try:
            async with server.clock.timeout_ms(AGENT_ANSWER_MS):
                first_frame = await anext(self._items, b"")
        except LinkError as error:
            raise agent_unreachable(self._node, error.cause) from error
        except TimeoutError:
            raise agent_unreachable(self._node, f"no answer within {AGENT_ANSWER_MS // 1_000} seconds") from None
        if first_frame[:1] == bytes((ExecFrameType.REFUSED,)):
            raise self._rejection(first_frame[1:])
        if first_frame[:1] != bytes((ExecFrameType.STARTED,)) or len(first_frame) > FRAME_BYTES_MAX:
            raise agent_unreachable(self._node, "it sent an invalid reply")
        self._first_frame = first_frame

    async def _command_for_audit(self) -> str:
        """Describe the command for the audit log: the program, the number of arguments and a keyed fingerprint. Arguments may
        contain passwords, and the audit log is kept and read; the fingerprint shows whether two commands were the same.
        """
        argv = self._start.argv
        program = _program(argv[0])
        arguments = len(argv) - 1 + (program != argv[0])
        if not arguments:
            return quoted(program)
        sealing_keys = await self._server.world.offload(lambda: self._server.auth.keyring.sealing_keys)
        return (
            f"{quoted(program)} and {arguments} argument{'s' * (arguments > 1)}, fingerprint {sealing_keys.fingerprint(argv)}"
        )

    def _rejection(self, body: bytes) -> ApiProblem:
        try:
            rejected = _rejected_decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return agent_unreachable(self._node, "it sent an invalid reply")
        status = _REJECTION_STATUSES.get(rejected.code, 409)
        command = self._start.argv[0]
        cause, cure = (escaped(text.replace(command, _program(command)))[:1_000] for text in (rejected.cause, rejected.cure))
        return ApiProblem(status, rejected.code if rejected.code in _REJECTION_STATUSES else "refused", cause, cure=cure)

    async def output_frames(self) -> AsyncGenerator[bytes, None]:
        """Yield frames for the client. The last one has the exit status, unless the agent failed to send it."""
        yield encode_frame(ExecFrameType.STARTED, self._first_frame[1:])
        if self._items is None:
            return
        try:
            async for item in self._items:
                frame_type, body = item[:1], item[1:]
                if len(item) > FRAME_BYTES_MAX or frame_type not in _OUTPUT_FRAME_TYPES:
                    raise LinkError("it sent an invalid frame", "run the same version of agent and server")
                if frame_type == bytes((ExecFrameType.EXITED,)):
                    self.exit = _exit_decoder.decode(body)
                    yield encode_frame(ExecFrameType.EXITED, body)
                    return
                self.bytes_out += len(body)
                yield encode_frame(_OUTPUT_FRAME_TYPES[frame_type], body)
        except (LinkError, msgspec.DecodeError) as error:
            cause = error.cause if isinstance(error, LinkError) else "it sent a message that cannot be decoded"
            detail = escaped(f"the agent of node {self._node.metadata.name} ended the session: {cause}")[:1_000]
            self.exit = ExecExit(why=detail)
            yield encode_frame(ExecFrameType.EXITED, self.exit)

    async def forward_input(self, frames: _ClientFrames) -> None:
        """Relay input to the agent until it ends or the client disconnects."""
        input_ended = False
        while not input_ended:
            frame = await frames.next()
            input_ended = frame is None or frame.type == ExecFrameType.INPUT_END
            if frames.disconnected:
                return
            if frame is not None and frame.type == ExecFrameType.INPUT:
                for start in range(0, len(frame.body), INPUT_BYTES_MAX):
                    await self._send_to_agent(data=frame.body[start : start + INPUT_BYTES_MAX])
                self.bytes_in += len(frame.body)
            elif frame is not None and frame.type == ExecFrameType.TERMINAL_SIZE:
                await self._send_to_agent(window=decode_terminal_size(frame.body))
            elif not input_ended:
                raise ExecFrameError("unexpected frame type in an exec session")
        await self._send_to_agent(over=True)

    async def _send_to_agent(self, **fields: Any) -> None:
        await self._link.request(
            AGENT,
            _encode(ExecInputRequest(token=self._server.agents.callback_token(self._node), session=self._session_id, **fields)),
        )

    async def close(self) -> None:
        """End the session at the agent by closing the connection, release the limits, and audit the outcome."""
        try:
            if self._items is not None:
                await self._items.aclose()
            await self._link.close()
        finally:
            self._slots.close()
            if self._audited:
                self._audit("execEnd", self._outcome_for_audit())

    def _outcome_for_audit(self) -> str:
        exit_ = self.exit or ExecExit(why="the client disconnected, or its token is no longer valid")
        status = (
            f"exit code {exit_.code}"
            if exit_.code is not None
            else f"signal {exit_.signal}"
            if exit_.signal is not None
            else ""
        )
        outcome = "; ".join(text for text in (status, escaped(exit_.why)) if text) if self._first_frame else "not started"
        return f"{outcome}; {self.bytes_in} bytes in, {self.bytes_out} out"

    def _audit(self, action: str, detail: str) -> None:
        """Write an audit entry: before the session starts, and after it ended."""
        self._audited = True
        meta, principal = self._replica.metadata, self._request.principal
        target = f"replica/{meta.tenant}/{meta.name} attempt {self._replica.status.attempt} on {self._node.metadata.name}"
        self._server.audit.record(
            AuditItem(
                time=self._server.clock.wall(),
                subject=principal.subject,
                token=principal.token,
                role=principal.role,
                tenant=principal.tenant or meta.tenant,
                action=action,
                target=target,
                detail=detail,
                trace=self._request.trace,
            )
        )


_OUTPUT_FRAME_TYPES: Final = {
    bytes((part,)): part for part in (ExecFrameType.STDOUT, ExecFrameType.STDERR, ExecFrameType.EXITED)
}


class _ExecResponse(Response):
    """Response that is sent while the request body is still being received."""

    def __init__(self, session: _AgentSession, frames: _ClientFrames, server: ServerContext) -> None:
        self._session, self._frames, self._server = session, frames, server
        self.status_code = 200
        self.media_type = MEDIA_TYPE
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with first_failure():
                async with asyncio.TaskGroup() as group:
                    sending = group.create_task(self._send_output(send))
                    receiving = group.create_task(self._forward_input())
                    closing = group.create_task(self._server.streams.closing.wait())
                    beating = group.create_task(self._send_keepalives(send))
                    lapsing = group.create_task(self._server.auth.tokens.wait_until_revoked(self._session.principal))
                    tasks: tuple[asyncio.Task[Any], ...] = (sending, receiving, closing, beating, lapsing)
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in tasks:
                        task.cancel()
            if sending.done() and not sending.cancelled() and sending.result():
                await self._send_piece(send, b"", more=False)
        finally:
            await self._session.close()

    async def _send_output(self, send: Send) -> bool:
        """Send output frames. False: the client no longer reads."""
        try:
            async with aclosing(self._session.output_frames()) as frames:
                async for frame in frames:
                    await self._send_piece(send, frame, more=True)
        except TimeoutError:
            return False
        return True

    async def _forward_input(self) -> None:
        """Relay input. Returns when the client disconnects or sends an invalid frame; the end of its input does not end the
        session.
        """
        try:
            await self._session.forward_input(self._frames)
        except LinkError:
            await self._server.clock.sleep_ms(
                DRAIN_MS
            )  # output sent before the failure, and its reason, reach the client in the meantime
            return
        except (ExecFrameError, ApiProblem):
            return
        if not self._frames.disconnected:
            await self._frames.wait_for_disconnect()

    async def _send_keepalives(self, send: Send) -> None:
        """Send empty output frames while the token is valid. A client that sends nothing is not read from, so its disconnect
        shows only here.
        """
        while self._server.auth.tokens.is_valid(self._session.principal):
            await self._server.clock.sleep_ms(KEEPALIVE_MS)
            await self._send_piece(send, encode_frame(ExecFrameType.STDOUT), more=True)

    async def _send_piece(self, send: Send, piece: bytes, *, more: bool) -> None:
        async with self._server.clock.timeout_ms(SEND_MS_MAX):
            await send({"type": "http.response.body", "body": piece, "more_body": more})


ROUTES: Final = (
    Route(
        "POST",
        "/v1/tenants/{tenant}/replicas/{name}/exec",
        "exec",
        "Run a command in the environment of a replica. Request and response bodies stream at the same time, as frames.",
        execute,
        "diagnostics",
        body=BodySpec(
            (bytes,), (MEDIA_TYPE,), FRAME_BYTES_MAX, "a start frame with the command, then input frames; unlimited in total"
        ),
        responses=(ResponseSpec(200, "output frames, then a frame with the exit status", bytes, MEDIA_TYPE),),
        streams=True,
        duplex=True,
        waits_for_agent=True,
        cost=AGENT_COST,
    ),
)
