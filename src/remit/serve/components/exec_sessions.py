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

from remit.law.requirements import WORKLOAD_LABEL, closed_by
from remit.model.problems import escaped, shown
from remit.model.records import Phase, PolicyRevision, Replica
from remit.model.wire.agent_messages import ExecOf, FeedOf
from remit.model.wire.api_types import AuditItem
from remit.model.wire.exec_frames import (
    INPUT_BYTES,
    MEDIA,
    PART_BYTES_MAX,
    Begin,
    Ear,
    Over,
    Part,
    Spoken,
    Unbegun,
    Unspoken,
    begin_of,
    spoken,
    window_of,
)
from remit.serve.components.replica_logs import AGENT, ANSWER_MS, link_to, unanswered
from remit.serve.http.replies import Failure
from remit.serve.http.request_context import Asked
from remit.serve.http.routes import FETCHED, Answer, Body, Route
from remit.serve.http.streams import SEND_MS_MAX
from remit.world.concurrency import one_failure
from remit.world.interfaces import LinkError
from remit.world.net.rpc_client import SocketLink

if TYPE_CHECKING:
    from remit.model.kinds import Node
    from remit.serve.server_context import Desk

LAST_MS: Final = 5_000
"""So long what an agent has said before it broke off may still take to be told."""
BEAT_MS: Final = 15_000
ENTERED: Final = (Phase.STARTING, Phase.RUNNING, Phase.READY, Phase.SERVING)
"""In which phases a replica has a process beside which a command could run."""

_STATUSES: Final = {"gone": 409, "overloaded": 429, "not_started": 422}
_encode = msgspec.json.Encoder().encode
_unbegun: msgspec.json.Decoder[Unbegun] = msgspec.json.Decoder(Unbegun)
_over: msgspec.json.Decoder[Over] = msgspec.json.Decoder(Over)


async def execute(asked: Asked, desk: Desk) -> Response:
    ear = _Hearing(asked)
    begin = await ear.begin()
    name = asked.path["name"]
    replica = desk.agents.replica(asked.tenant, name)
    _check_runs(replica, begin)
    _check_open(desk, replica)
    session = _Session(desk, asked, begin, replica, desk.agents.node_of(replica))
    try:
        await session.begin()
    except BaseException:
        await session.close()
        raise
    return _Conversation(session, ear, desk)


def _check_runs(replica: Replica, begin: Begin) -> None:
    name, status = replica.metadata.name, replica.status
    if status.phase not in ENTERED:
        why = f"replica {name} is {status.phase.value}: no command can run beside it"
        cure = f"ask why: remit explain replica/{name}" if status.phase != Phase.RELEASED else "name one that runs"
        raise Failure(409, "phase", why, field="name", cure=cure)
    if begin.attempt and begin.attempt != status.attempt:
        why = f"attempt {begin.attempt} of replica {name} is not the one that runs, which is {status.attempt}"
        raise Failure(409, "attempt", why, field="attempt", cure="look what became of it, then name the one that runs")


def _check_open(desk: Desk, replica: Replica) -> None:
    """The policies in force are those of the highest number; the labels are those that the workload has now."""
    published: list[PolicyRevision] = [kept.thing for _, kept in desk.board.kind("policyrevision/")]
    if not published:
        return
    tenant, workload = replica.metadata.tenant, replica.spec.workload
    owner = desk.board.get(f"workload/{tenant}/{workload}")
    labels = {WORKLOAD_LABEL: workload, **(owner.metadata.labels if owner is not None else {})}
    found = closed_by(max(published, key=lambda one: one.spec.number).spec.policies, tenant, labels)
    if found:
        why = f"no command may run beside replicas of {workload}, by policy {escaped(found)}"
        raise Failure(
            403, "policy", why, field="name", cure="read what it writes: remit logs; or let an admin change the policy"
        )


class _Hearing:
    """The asker's side, part by part."""

    def __init__(self, asked: Asked) -> None:
        if asked.receive is None:
            raise RuntimeError("a route that converses gives what is received")
        self._receive: Receive = asked.receive
        self._ear = Ear()
        self._parts: list[Spoken] = []
        self._over = False
        self.left = False
        """The asker is gone."""

    async def begin(self) -> Begin:
        said = await self.next()
        if said is None or said.part != Part.BEGIN:
            why = "a session begins with what is to run"
            raise Failure(400, "malformed", why, cure="use `remit exec`, or see model/wire/exec_frames.py for what is said")
        try:
            return begin_of(said.body)
        except Unspoken as error:
            cure = "give argv as a list of words, the first of them a program"
            raise Failure(422, "invalid", escaped(str(error)), field="argv", cure=cure) from None

    async def next(self) -> Spoken | None:
        """None: no more comes. Raises `Unspoken`, and as a `Failure` before anything has begun."""
        while not self._parts:
            if self._over:
                return None
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._over = self.left = True
                return None
            try:
                self._parts += self._ear.hear(message.get("body", b""))
            except Unspoken as error:
                raise Failure(400, "malformed", str(error), cure="use `remit exec`") from None
            self._over = not message.get("more_body", False)
        return self._parts.pop(0)

    async def leaving(self) -> None:
        """Until the asker is gone. What it says meanwhile is not heard."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _program(word: str) -> str:
    """The first of what may be a whole command in quotes, which has its passwords in it."""
    return next(iter(word.split(maxsplit=1)), "")


class _Session:
    """The agent's side, and what is recorded of it."""

    def __init__(self, desk: Desk, asked: Asked, begin: Begin, replica: Replica, node: Node) -> None:
        self._desk, self._asked, self._begin, self._replica, self._node = desk, asked, begin, replica, node
        self.principal = asked.principal
        self._name = desk.world.ids.nonce().replace("-", "")
        self._link: SocketLink = link_to(node, desk.agents.tls)
        self._items: AsyncGenerator[bytes, None] | None = None
        self._held = ExitStack()
        self._first = b""
        self._recorded = False
        self.over: Over | None = None
        self.bytes_in = self.bytes_out = 0

    async def begin(self) -> None:
        """Returns when it runs. Raises `Failure`: then it does not, and never will."""
        desk, replica = self._desk, self._replica
        self._held.enter_context(desk.agents.connection(self.principal))
        self._held.enter_context(desk.agents.session(replica.metadata.tenant))
        desk.audit.check()
        self._record("execBegin", await self._said())
        asked = ExecOf(
            token=desk.agents.callback(self._node),
            session=self._name,
            key=f"replica/{replica.metadata.tenant}/{replica.metadata.name}",
            uid=replica.metadata.uid,
            attempt=replica.status.attempt,
            begin=self._begin,
        )
        self._items = self._link.stream(AGENT, _encode(asked))
        try:
            async with desk.clock.timeout_ms(ANSWER_MS):
                first = await anext(self._items, b"")
        except LinkError as error:
            raise unanswered(self._node, error.cause) from error
        except TimeoutError:
            raise unanswered(self._node, f"it said nothing for {ANSWER_MS // 1_000} seconds") from None
        if first[:1] == bytes((Part.REFUSED,)):
            raise self._refused(first[1:])
        if first[:1] != bytes((Part.BEGUN,)) or len(first) > PART_BYTES_MAX:
            raise unanswered(self._node, "it said what is no answer")
        self._first = first

    async def _said(self) -> str:
        """What is to run, for the audit: its program alone. What comes after may be a password, and the audit is kept and read;
        the mark tells whether two were the same.
        """
        argv = self._begin.argv
        program = _program(argv[0])
        words = len(argv) - 1 + (program != argv[0])
        if not words:
            return shown(program)
        seals = await self._desk.world.offload(lambda: self._desk.keyring.seals)
        return f"{shown(program)} and {words} word{'s' * (words > 1)}, mark {seals.mark(argv)}"

    def _refused(self, body: bytes) -> Failure:
        try:
            told = _unbegun.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return unanswered(self._node, "it said what is no answer")
        status = _STATUSES.get(told.code, 409)
        whole = self._begin.argv[0]
        cause, cure = (escaped(words.replace(whole, _program(whole)))[:1_000] for words in (told.cause, told.cure))
        return Failure(status, told.code if told.code in _STATUSES else "refused", cause, cure=cure)

    async def told(self) -> AsyncGenerator[bytes, None]:
        """Parts for the asker. The last says how it ended, if the agent says that."""
        yield spoken(Part.BEGUN, self._first[1:])
        if self._items is None:
            return
        try:
            async for item in self._items:
                part, body = item[:1], item[1:]
                if len(item) > PART_BYTES_MAX or part not in _TOLD:
                    raise LinkError("it said what is no part of a session", "do both run the same version?")
                if part == bytes((Part.OVER,)):
                    self.over = _over.decode(body)
                    yield spoken(Part.OVER, body)
                    return
                self.bytes_out += len(body)
                yield spoken(_TOLD[part], body)
        except (LinkError, msgspec.DecodeError) as error:
            cause = error.cause if isinstance(error, LinkError) else "it said what cannot be read"
            why = escaped(f"the agent of node {self._node.metadata.name} broke off: {cause}")[:1_000]
            self.over = Over(why=why)
            yield spoken(Part.OVER, self.over)

    async def feed(self, hearing: _Hearing) -> None:
        """Until there is no more, or the asker leaves."""
        over = False
        while not over:
            said = await hearing.next()
            over = said is None or said.part == Part.END
            if hearing.left:
                return
            if said is not None and said.part == Part.INPUT:
                for first in range(0, len(said.body), INPUT_BYTES):
                    await self._feed(data=said.body[first : first + INPUT_BYTES])
                self.bytes_in += len(said.body)
            elif said is not None and said.part == Part.WINDOW:
                await self._feed(window=window_of(said.body))
            elif not over:
                raise Unspoken("that is no part of a session")
        await self._feed(over=True)

    async def _feed(self, **what: Any) -> None:
        await self._link.request(
            AGENT, _encode(FeedOf(token=self._desk.agents.callback(self._node), session=self._name, **what))
        )

    async def close(self) -> None:
        """Whatever happens: it ends at the agent with our connection there, and what came of it is written down."""
        try:
            if self._items is not None:
                await self._items.aclose()
            await self._link.close()
        finally:
            self._held.close()
            if self._recorded:
                self._record("execEnd", self._ended())

    def _ended(self) -> str:
        over = self.over or Over(why="the asker left, or may not ask any more")
        how = f"exit code {over.code}" if over.code is not None else f"signal {over.signal}" if over.signal is not None else ""
        what = "; ".join(word for word in (how, escaped(over.why)) if word) if self._first else "it was not begun"
        return f"{what}; {self.bytes_in} bytes in, {self.bytes_out} out"

    def _record(self, action: str, detail: str) -> None:
        """Who, where, what; before it begins, and after it has ended."""
        self._recorded = True
        meta, asker = self._replica.metadata, self._asked.principal
        where = f"replica/{meta.tenant}/{meta.name} attempt {self._replica.status.attempt} on {self._node.metadata.name}"
        self._desk.audit.note(
            AuditItem(
                time=self._desk.clock.wall(),
                subject=asker.subject,
                token=asker.token,
                role=asker.role,
                tenant=asker.tenant or meta.tenant,
                action=action,
                target=where,
                detail=detail,
                trace=self._asked.trace,
            )
        )


_TOLD: Final = {bytes((part,)): part for part in (Part.STDOUT, Part.STDERR, Part.OVER)}


class _Conversation(Response):
    """The answer, which goes on with the body of what was asked."""

    def __init__(self, session: _Session, hearing: _Hearing, desk: Desk) -> None:
        self._session, self._hearing, self._desk = session, hearing, desk
        self.status_code = 200
        self.media_type = MEDIA
        self.background = None
        self.init_headers({"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with one_failure():
                async with asyncio.TaskGroup() as group:
                    telling = group.create_task(self._tell(send))
                    hearing = group.create_task(self._hear())
                    closing = group.create_task(self._desk.closing.wait())
                    beating = group.create_task(self._beat(send))
                    lapsing = group.create_task(self._desk.identities.lapse(self._session.principal))
                    tasks: tuple[asyncio.Task[Any], ...] = (telling, hearing, closing, beating, lapsing)
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in tasks:
                        task.cancel()
            if telling.done() and not telling.cancelled() and telling.result():
                await self._piece(send, b"", more=False)
        finally:
            await self._session.close()

    async def _tell(self, send: Send) -> bool:
        """False: the asker takes nothing any more."""
        try:
            async with aclosing(self._session.told()) as parts:
                async for part in parts:
                    await self._piece(send, part, more=True)
        except TimeoutError:
            return False
        return True

    async def _hear(self) -> None:
        """Returns when the asker leaves, or says what is no part of a session; the end of its input is not the end."""
        try:
            await self._session.feed(self._hearing)
        except LinkError:
            await self._desk.clock.sleep_ms(LAST_MS)  # what came before, and why no more does, is told meanwhile
            return
        except (Unspoken, Failure):
            return
        if not self._hearing.left:
            await self._hearing.leaving()

    async def _beat(self, send: Send) -> None:
        """Nothing, now and then, while the token is good: one whose input is not taken is not listened to, and its leaving
        shows only here.
        """
        while self._desk.identities.good(self._session.principal):
            await self._desk.clock.sleep_ms(BEAT_MS)
            await self._piece(send, spoken(Part.STDOUT), more=True)

    async def _piece(self, send: Send, piece: bytes, *, more: bool) -> None:
        async with self._desk.clock.timeout_ms(SEND_MS_MAX):
            await send({"type": "http.response.body", "body": piece, "more_body": more})


ROUTES: Final = (
    Route(
        "POST",
        "/v1/tenants/{tenant}/replicas/{name}/exec",
        "exec",
        "Run a command beside a replica, in its surroundings. Body and answer go on at the same time, in parts.",
        execute,
        "why",
        body=Body((bytes,), (MEDIA,), PART_BYTES_MAX, "what is to run, and then its input, in parts; without a bound in all"),
        answers=(Answer(200, "what it writes, and last how it ended, in parts", bytes, MEDIA),),
        streams=True,
        converses=True,
        elsewhere=True,
        cost=FETCHED,
    ),
)
