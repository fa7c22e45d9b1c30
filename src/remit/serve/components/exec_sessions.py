"""Exec: authorizes, audits and relays sessions to agents.

Asked, recorded and passed on; the agent runs it.

The asker's body and the answer go on at the same time, in the parts of model/wire/exec_frames.py: one POST, no upgrade.
Before anything is begun it is written down who asks for what, and afterwards how it ended. Nothing that an agent says is
followed, and no part of it is longer than a bound.
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
from remit.model.wire.agent_messages import ExecRequest, ExecInputRequest
from remit.model.wire.api_types import AuditItem
from remit.model.wire.exec_frames import (
    INPUT_BYTES_MAX,
    MEDIA_TYPE,
    FRAME_BYTES_MAX,
    ExecStart,
    ExecFrameReader,
    ExecExit,
    ExecFrameType,
    ExecFrame,
    ExecRejected,
    ExecFrameError,
    decode_start,
    encode_frame,
    decode_terminal_size,
)
from remit.serve.components.replica_logs import AGENT, AGENT_ANSWER_MS, agent_link, agent_unreachable
from remit.serve.http.replies import ApiProblem
from remit.serve.http.request_context import RequestContext
from remit.serve.http.routes import AGENT_COST, ResponseSpec, BodySpec, Route
from remit.serve.http.streams import SEND_MS_MAX
from remit.world.concurrency import one_failure
from remit.world.interfaces import LinkError
from remit.world.net.rpc_client import SocketLink

if TYPE_CHECKING:
    from remit.model.kinds import Node
    from remit.serve.server_context import ServerContext

DRAIN_MS: Final = 5_000
"""So long what an agent has said before it broke off may still take to be told."""
KEEPALIVE_MS: Final = 15_000
EXEC_PHASES: Final = (Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING)
"""In which phases a replica has a process beside which a command could run."""

_STATUSES: Final = {"gone": 409, "overloaded": 429, "not_started": 422}
_encode = msgspec.json.Encoder().encode
_unbegun_decoder: msgspec.json.Decoder[ExecRejected] = msgspec.json.Decoder(ExecRejected)
_over_decoder: msgspec.json.Decoder[ExecExit] = msgspec.json.Decoder(ExecExit)


async def execute(request: RequestContext, server: ServerContext) -> Response:
    ear = _ClientFrames(request)
    begin = await ear.read_start()
    name = request.path["name"]
    replica = server.agents.get_replica(request.tenant, name)
    _check_runs(replica, begin)
    _check_exec_allowed(server, replica)
    session = _AgentSession(server, request, begin, replica, server.agents.node_of(replica))
    try:
        await session.start()
    except BaseException:
        await session.close()
        raise
    return _ExecResponse(session, ear, server)


def _check_runs(replica: Replica, begin: ExecStart) -> None:
    name, status = replica.metadata.name, replica.status
    if status.phase not in EXEC_PHASES:
        detail = f"replica {name} is {status.phase.value}: no command can run beside it"
        cure = f"ask why: remit explain replica/{name}" if status.phase != Phase.RELEASED else "name one that runs"
        raise ApiProblem(409, "phase", detail, field="name", cure=cure)
    if begin.attempt and begin.attempt != status.attempt:
        detail = f"attempt {begin.attempt} of replica {name} is not the one that runs, which is {status.attempt}"
        raise ApiProblem(409, "attempt", detail, field="attempt", cure="look what became of it, then name the one that runs")


def _check_exec_allowed(server: ServerContext, replica: Replica) -> None:
    """The policies in force are those of the highest number; the labels are those that the workload has now."""
    published: list[PolicyRevision] = [row.thing for _, row in server.watch_cache.kind("policyrevision/")]
    if not published:
        return
    tenant, workload = replica.metadata.tenant, replica.spec.workload
    owner = server.watch_cache.get(f"workload/{tenant}/{workload}")
    labels = {WORKLOAD_LABEL: workload, **(owner.metadata.labels if owner is not None else {})}
    policy = exec_denied_by(max(published, key=lambda one: one.spec.number).spec.policies, tenant, labels)
    if policy:
        detail = f"no command may run beside replicas of {workload}, by policy {escaped(policy)}"
        raise ApiProblem(
            403, "policy", detail, field="name", cure="read what it writes: remit logs; or let an admin change the policy"
        )


class _ClientFrames:
    """The asker's side, part by part."""

    def __init__(self, request: RequestContext) -> None:
        if request.receive is None:
            raise RuntimeError("a route that converses gives what is received")
        self._receive: Receive = request.receive
        self._reader = ExecFrameReader()
        self._frames: list[ExecFrame] = []
        self._input_ended = False
        self.disconnected = False
        """The asker is gone."""

    async def read_start(self) -> ExecStart:
        frame = await self.next()
        if frame is None or frame.type != ExecFrameType.START:
            detail = "a session begins with what is to run"
            raise ApiProblem(400, "malformed", detail, cure="use `remit exec`, or see model/wire/exec_frames.py for what is said")
        try:
            return decode_start(frame.body)
        except ExecFrameError as error:
            cure = "give argv as a list of words, the first of them a program"
            raise ApiProblem(422, "invalid", escaped(str(error)), field="argv", cure=cure) from None

    async def next(self) -> ExecFrame | None:
        """None: no more comes. Raises `ExecFrameError`, and as a `ApiProblem` before anything has begun."""
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
        """Until the asker is gone. What it says meanwhile is not heard."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _program(argument: str) -> str:
    """The first of what may be a whole command in quotes, which has its passwords in it."""
    return next(iter(argument.split(maxsplit=1)), "")


class _AgentSession:
    """The agent's side, and what is recorded of it."""

    def __init__(self, server: ServerContext, request: RequestContext, begin: ExecStart, replica: Replica, node: Node) -> None:
        self._server, self._request, self._start, self._replica, self._node = server, request, begin, replica, node
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
        """Returns when it runs. Raises `ApiProblem`: then it does not, and never will."""
        desk, replica = self._server, self._replica
        self._slots.enter_context(desk.agents.connection_slot(self.principal))
        self._slots.enter_context(desk.agents.session_slot(replica.metadata.tenant))
        desk.audit.check_writable()
        self._audit("execBegin", await self._command_for_audit())
        exec_request = ExecRequest(
            token=desk.agents.callback_token(self._node),
            session=self._session_id,
            key=f"replica/{replica.metadata.tenant}/{replica.metadata.name}",
            uid=replica.metadata.uid,
            attempt=replica.status.attempt,
            begin=self._start,
        )
        self._items = self._link.stream(AGENT, _encode(exec_request))
        try:
            async with desk.clock.timeout_ms(AGENT_ANSWER_MS):
                first = await anext(self._items, b"")
        except LinkError as error:
            raise agent_unreachable(self._node, error.cause) from error
        except TimeoutError:
            raise agent_unreachable(self._node, f"it said nothing for {AGENT_ANSWER_MS // 1_000} seconds") from None
        if first[:1] == bytes((ExecFrameType.REFUSED,)):
            raise self._rejection(first[1:])
        if first[:1] != bytes((ExecFrameType.STARTED,)) or len(first) > FRAME_BYTES_MAX:
            raise agent_unreachable(self._node, "it said what is no answer")
        self._first_frame = first

    async def _command_for_audit(self) -> str:
        """What is to run, for the audit: its program alone. What comes after may be a password, and the audit is kept and read;
        the mark tells whether two were the same.
        """
        argv = self._start.argv
        program = _program(argv[0])
        arguments = len(argv) - 1 + (program != argv[0])
        if not arguments:
            return quoted(program)
        seals = await self._server.world.offload(lambda: self._server.keyring.sealing_keys)
        return f"{quoted(program)} and {arguments} word{'s' * (arguments > 1)}, mark {seals.fingerprint(argv)}"

    def _rejection(self, body: bytes) -> ApiProblem:
        try:
            rejected = _unbegun_decoder.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return agent_unreachable(self._node, "it said what is no answer")
        status = _STATUSES.get(rejected.code, 409)
        command = self._start.argv[0]
        cause, cure = (escaped(text.replace(command, _program(command)))[:1_000] for text in (rejected.cause, rejected.cure))
        return ApiProblem(status, rejected.code if rejected.code in _STATUSES else "refused", cause, cure=cure)

    async def output_frames(self) -> AsyncGenerator[bytes, None]:
        """Parts for the asker. The last says how it ended, if the agent says that."""
        yield encode_frame(ExecFrameType.STARTED, self._first_frame[1:])
        if self._items is None:
            return
        try:
            async for item in self._items:
                frame_type, body = item[:1], item[1:]
                if len(item) > FRAME_BYTES_MAX or frame_type not in _OUTPUT_PARTS:
                    raise LinkError("it said what is no part of a session", "do both run the same version?")
                if frame_type == bytes((ExecFrameType.EXITED,)):
                    self.exit = _over_decoder.decode(body)
                    yield encode_frame(ExecFrameType.EXITED, body)
                    return
                self.bytes_out += len(body)
                yield encode_frame(_OUTPUT_PARTS[frame_type], body)
        except (LinkError, msgspec.DecodeError) as error:
            cause = error.cause if isinstance(error, LinkError) else "it said what cannot be read"
            detail = escaped(f"the agent of node {self._node.metadata.name} broke off: {cause}")[:1_000]
            self.exit = ExecExit(why=detail)
            yield encode_frame(ExecFrameType.EXITED, self.exit)

    async def forward_input(self, frames: _ClientFrames) -> None:
        """Until there is no more, or the asker leaves."""
        over = False
        while not over:
            frame = await frames.next()
            over = frame is None or frame.type == ExecFrameType.INPUT_END
            if frames.disconnected:
                return
            if frame is not None and frame.type == ExecFrameType.INPUT:
                for start in range(0, len(frame.body), INPUT_BYTES_MAX):
                    await self._send_to_agent(data=frame.body[start : start + INPUT_BYTES_MAX])
                self.bytes_in += len(frame.body)
            elif frame is not None and frame.type == ExecFrameType.TERMINAL_SIZE:
                await self._send_to_agent(window=decode_terminal_size(frame.body))
            elif not over:
                raise ExecFrameError("that is no part of a session")
        await self._send_to_agent(over=True)

    async def _send_to_agent(self, **fields: Any) -> None:
        await self._link.request(
            AGENT, _encode(ExecInputRequest(token=self._server.agents.callback_token(self._node), session=self._session_id, **fields))
        )

    async def close(self) -> None:
        """Whatever happens: it ends at the agent with our connection there, and what came of it is written down."""
        try:
            if self._items is not None:
                await self._items.aclose()
            await self._link.close()
        finally:
            self._slots.close()
            if self._audited:
                self._audit("execEnd", self._outcome_for_audit())

    def _outcome_for_audit(self) -> str:
        over = self.exit or ExecExit(why="the asker left, or may not ask any more")
        status = f"exit code {over.code}" if over.code is not None else f"signal {over.signal}" if over.signal is not None else ""
        outcome = "; ".join(text for text in (status, escaped(over.why)) if text) if self._first_frame else "it was not begun"
        return f"{outcome}; {self.bytes_in} bytes in, {self.bytes_out} out"

    def _audit(self, action: str, detail: str) -> None:
        """Who, where, what; before it begins, and after it has ended."""
        self._audited = True
        meta, asker = self._replica.metadata, self._request.principal
        where = f"replica/{meta.tenant}/{meta.name} attempt {self._replica.status.attempt} on {self._node.metadata.name}"
        self._server.audit.record(
            AuditItem(
                time=self._server.clock.wall(),
                subject=asker.subject,
                token=asker.token,
                role=asker.role,
                tenant=asker.tenant or meta.tenant,
                action=action,
                target=where,
                detail=detail,
                trace=self._request.trace,
            )
        )


_OUTPUT_PARTS: Final = {bytes((part,)): part for part in (ExecFrameType.STDOUT, ExecFrameType.STDERR, ExecFrameType.EXITED)}


class _ExecResponse(Response):
    """The answer, which goes on with the body of what was asked."""

    def __init__(self, session: _AgentSession, frames: _ClientFrames, server: ServerContext) -> None:
        self._session, self._frames, self._server = session, frames, server
        self.status_code = 200
        self.media_type = MEDIA_TYPE
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with one_failure():
                async with asyncio.TaskGroup() as group:
                    sending = group.create_task(self._send_output(send))
                    receiving = group.create_task(self._forward_input())
                    closing = group.create_task(self._server.closing.wait())
                    beating = group.create_task(self._send_keepalives(send))
                    lapsing = group.create_task(self._server.tokens.wait_until_revoked(self._session.principal))
                    tasks: tuple[asyncio.Task[Any], ...] = (sending, receiving, closing, beating, lapsing)
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in tasks:
                        task.cancel()
            if sending.done() and not sending.cancelled() and sending.result():
                await self._send_piece(send, b"", more=False)
        finally:
            await self._session.close()

    async def _send_output(self, send: Send) -> bool:
        """False: the asker takes nothing any more."""
        try:
            async with aclosing(self._session.output_frames()) as frames:
                async for frame in frames:
                    await self._send_piece(send, frame, more=True)
        except TimeoutError:
            return False
        return True

    async def _forward_input(self) -> None:
        """Returns when the asker leaves, or says what is no part of a session; the end of its input is not the end."""
        try:
            await self._session.forward_input(self._frames)
        except LinkError:
            await self._server.clock.sleep_ms(DRAIN_MS)  # what came before, and why no more does, is told meanwhile
            return
        except (ExecFrameError, ApiProblem):
            return
        if not self._frames.disconnected:
            await self._frames.wait_for_disconnect()

    async def _send_keepalives(self, send: Send) -> None:
        """Nothing, now and then, while the token is good: one whose input is not taken is not listened to, and its leaving
        shows only here.
        """
        while self._server.tokens.is_valid(self._session.principal):
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
        "Run a command beside a replica, in its surroundings. Body and answer go on at the same time, in parts.",
        execute,
        "why",
        body=BodySpec((bytes,), (MEDIA_TYPE,), FRAME_BYTES_MAX, "what is to run, and then its input, in parts; without a bound in all"),
        responses=(ResponseSpec(200, "what it writes, and last how it ended, in parts", bytes, MEDIA_TYPE),),
        streams=True,
        duplex=True,
        waits_for_agent=True,
        cost=AGENT_COST,
    ),
)
