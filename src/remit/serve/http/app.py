"""ASGI application: dispatch, checks and limits of every request.

The table of routes, and the bounds of every request.

In this order: was it meant for this server, who asks, is there such a path, may this asker ask it, does the route know the
query, is there room for one more watcher, has its flow asked for too much (turns.py), is the body within its bound. Whatever is
raised after that becomes a problem document; only a bug of ours becomes a 500. What somebody did, and what anybody was refused,
is written down before it is answered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final
from urllib.parse import unquote

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from remit.client.authority_client import NoAnswer
from remit.client.endpoint import NoVerdict
from remit.client.rpc import Unread
from remit.model.problems import did_you_mean, escaped, meant, one_of, shown
from remit.model.wire.api_types import OPERATION_HEADER, AuditItem
from remit.serve.auth.access_control import enter
from remit.serve.auth.enrollment import check_bearer
from remit.serve.http.connection_limits import Shares
from remit.serve.http.fair_queue import Flow, Rate, Spending, Turns, sized, spending
from remit.serve.http.replies import Failure, Reply, no_verdict, problem, store_failed, unanswered
from remit.serve.http.request_context import NOBODY, Asked, Fields, Headers, check_origin, read_query
from remit.serve.http.request_telemetry import NOWHERE, Access, AccessLine
from remit.serve.http.routes import Route
from remit.serve.http.streams import LARGE_BYTES, SEND_MS_MAX, Streamed, cut
from remit.serve.server_context import Desk
from remit.store.protocol import StoreError
from remit.world.net.http_server import Whole

REQUEST_MS_MAX: Final = 30_000
PATH_BYTES_MAX: Final = 4 << 10
BODIES_BYTES_MAX: Final = 256 << 20
"""Of all bodies that are held at once; and of all large answers that are on their way."""
SPILLED_BYTES_MAX: Final = 64 << 10
"""So much of a body is read although nothing will be done about it: the connection can go on then. One that is refused and must
connect anew costs more than one that is refused."""
INFLATING: Final = frozenset({"gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress"})
NOT_FOUND: Final = 404
_PLAIN: Final = (Response, Reply)
_OPERATION: Final = OPERATION_HEADER.lower().encode()
_NO_WATCHER: Final = nullcontext()
TRACE: Final = re.compile(r"[!-~]{1,128}")

Complain = Callable[[str, BaseException], None]
"""Hears of our own bugs: what was asked, and what was raised."""


class _Place:
    """What stands below one part of a path: routes by method, and further parts, of which one may be a variable."""

    __slots__ = ("parts", "routes", "variable")

    def __init__(self) -> None:
        self.parts: dict[str, _Place] = {}
        self.variable: _Place | None = None
        self.routes: dict[str, Route] = {}

    def add(self, route: Route) -> None:
        place = self
        for part in route.path.split("/")[1:]:
            if part.startswith("{"):
                place.variable = place.variable or _Place()
                place = place.variable
            else:
                place = place.parts.setdefault(part, _Place())
        if place.routes.setdefault(route.method, route) is not route:
            raise ValueError(f"two routes for {route.method} {route.path}")

    def find(self, parts: Sequence[str], values: tuple[str, ...] = ()) -> tuple[_Place, tuple[str, ...]] | None:
        """A part that is spelt out goes before a variable; if it leads nowhere, the variable is tried."""
        place = self
        for at, part in enumerate(parts):
            spelt, variable = place.parts.get(part), place.variable
            if variable is None or not part:
                if spelt is None:
                    return None
                place = spelt
            elif spelt is None:
                place, values = variable, (*values, part)
            else:
                return spelt.find(parts[at + 1 :], values) or variable.find(parts[at + 1 :], (*values, part))
        return (place, values) if place.routes else None


class Application:
    """The ASGI application of one server."""

    def __init__(self, routes: Sequence[Route], desk: Desk, complain: Complain) -> None:
        self._root = _Place()
        for route in routes:
            self._root.add(route)
        self.fields = {route.name: Fields(route.parameters) for route in routes}
        self._words = sorted({part for route in routes for part in route.path.split("/") if part and part[0] != "{"})
        self._desk = desk
        self._complain = complain
        self.bodies, self.answers = Shares(BODIES_BYTES_MAX), Shares(BODIES_BYTES_MAX)
        self.turns = Turns(desk.clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"nothing but HTTP is answered here, and this is {scope['type']}")
        await _Exchange(self, scope, receive, send).run()

    def find(self, scope: Scope) -> tuple[Route, dict[str, str]] | Failure:
        """The route and the variables of the path; or that there is none, which nobody without a token is to learn."""
        # As it was sent: a name may have a slash in it, written %2F, and that is no part of the path.
        path, method = scope["raw_path"].decode("latin-1"), scope["method"]
        found = self._root.find(_parts(path)) if len(path) <= PATH_BYTES_MAX else None
        if found is None:
            return self._no_path(path)
        place, values = found
        route = place.routes.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = [*place.routes, *(["HEAD"] if "GET" in place.routes else [])]
            detail = f"{shown(method)} does nothing at {shown(path)}"
            return Failure(405, "method", detail, cure=f"use {one_of(allowed)}", headers={"Allow": ", ".join(allowed)})
        return route, dict(zip(route.variables, values, strict=True))

    def _no_path(self, path: str) -> Failure:
        for part in path.split("/"):
            if part and part not in self._words and (word := meant(part, self._words)):
                return Failure(404, "no_such_path", f"there is nothing at {shown(path)}", cure=did_you_mean(word))
        cure = "/openapi.json describes every path; names within a tenant stand below /v1/tenants/{tenant}/"
        return Failure(404, "no_such_path", f"there is nothing at {shown(path)}", cure=cure)

    @property
    def desk(self) -> Desk:
        return self._desk

    async def in_turn(self, asked: Asked, flow: Flow | None, spending: Spending | None) -> Response:
        """A flood waits here, and not in front of the beats of agents. One whose body was still coming would hold up others."""
        if flow is None or spending is None or asked.route.elsewhere:
            return await _answered(asked.route, asked, self._desk)
        with await self.turns.turn(flow, spending.cost, spending.seats):
            answer = await _answered(asked.route, asked, self._desk)
        if asked.more_cost and spending.rate is not None:
            flow.owe(asked.more_cost, spending.rate)
        return answer

    def complain(self, asked: str, error: BaseException) -> None:
        self._complain(asked, error)


class _Exchange:
    """One request and its answer."""

    def __init__(self, app: Application, scope: Scope, receive: Receive, send: Send) -> None:
        self._app, self._scope, self._receive, self._send = app, scope, receive, send
        self._headers = Headers.of(scope)
        self._trace = ""
        self._principal = NOBODY
        self._entered = False
        self._route: Route | None = None
        self._begun = False
        self._read = not _has_body(self._headers)
        """Has the whole body been read? What was left of one would be taken for the next request."""
        self._held = 0
        self._status = 0
        self._streams = False
        self._code = ""
        self._asked: Asked | None = None
        self._unannounced: tuple[Flow, Rate] | None = None
        """Who pays for a body of which nobody said how large it is."""

    async def run(self) -> None:
        requests = self._app.desk.requests
        began_ns = requests.began()
        try:
            await self._answered()
        finally:
            if self._held:
                self._app.bodies.give_back(self._principal, self._held)
            name = NOWHERE if self._route is None else self._route.name
            took_s = requests.ended(began_ns, name, self._scope["method"], self._status, streams=self._streams)
            access = self._app.desk.access
            if access is not None and access.concerns(self._status, took_s, streams=self._streams):
                self._tell(access, name, took_s)

    def _tell(self, access: Access, route: str, took_s: float) -> None:
        one = AccessLine(self._scope["method"], self._scope["path"])
        one.route, one.trace, one.code, one.status = route, self._trace, self._code, self._status
        one.took_s, one.streams = took_s, self._streams
        if self._asked is not None:
            one.actor, one.tenant = self._asked.actor.name, self._asked.tenant
        access.told(one)

    async def _answered(self) -> None:
        try:
            await self._run()
        except Failure as failure:
            failure.__traceback__ = None  # it leads to the body, and from there to itself: both would stay for long
            self._code = failure.document.code
            self._app.desk.requests.refused(self._code, failure.document.status, self._route)
            await self._answer(problem(failure), failure)
        except _Gone:
            cut(self._scope)
            return
        except Exception as error:  # our own bug, whatever it is: it is told, and ends this request alone
            self._app.complain(f"{self._scope['method']} {escaped(self._scope['path'])}", error)
            self._code = "fault"
            if self._begun:
                raise
            detail = "answering this tripped over a bug of Remit's own"
            ours = Failure(500, "fault", detail, cure="report it, with the trace")
            await self._answer(problem(ours), ours)

    async def _run(self) -> None:
        self._trace = self._traced()
        check_origin(self._scope, self._headers, self._app.desk.hosts)
        route, path = self._enter()
        desk = self._app.desk
        query = read_query(self._scope["query_string"], self._app.fields[route.name])
        streams = route.streams or bool(route.streams_if and query[route.streams_if])
        self._streams = streams
        with desk.watching(self._principal) if streams else _NO_WATCHER:
            try:
                async with desk.clock.timeout_ms(REQUEST_MS_MAX):
                    flow, spent = await self._admitted(route, query)
                    body, media = await self._body(route)
                    if self._unannounced is not None:
                        self._unannounced[0].owe(sized(len(body)), self._unannounced[1])
                    receive = self._receive if route.converses else None
                    asked = self._asked = Asked(
                        route, path, query, self._headers, self._trace, body, media, self._principal, receive
                    )
                    answer = await self._app.in_turn(asked, flow, spent)
            except TimeoutError:
                if not self._read:
                    detail = f"the body did not come within {REQUEST_MS_MAX // 1000} seconds"
                    raise Failure(408, "timeout", detail, cure="nothing was done; send it at once") from None
                detail = f"it took more than {REQUEST_MS_MAX // 1000} seconds"
                raise Failure(504, "timeout", detail, cure="look what has come of it; then ask again, or for less") from None
            if isinstance(answer, Streamed) and not route.open:
                answer.principal = self._principal
            await self._answer(answer)

    def _enter(self) -> tuple[Route, dict[str, str]]:
        found, desk = self._app.find(self._scope), self._app.desk
        if isinstance(found, Failure) or not found[0].open:
            self._principal = desk.identities.principal(self._headers.get("authorization", ""))
        if isinstance(found, Failure):
            raise found
        route, path = found
        self._route = route
        if not route.open:
            enter(route, self._principal, path)
            check_bearer(desk, self._principal, self._scope.get("bearer"))
        if self._is_deed(route):
            desk.audit.check()
        self._entered = True
        return route, path

    def _is_deed(self, route: Route) -> bool:
        """Is it something that a person answers for? What components do, they do again and again; the store has all of it."""
        return self._principal.audience in ("user", "join") and not route.open and (route.audited or not route.reading)

    def _written_down(self, answer: Response, failure: Failure | None) -> None:
        route, desk, asker = self._route, self._app.desk, self._principal
        deed = route is not None and self._is_deed(route)
        absent = failure is not None and failure.document.status == NOT_FOUND and self._entered and not deed
        if (failure is None and not deed) or absent:  # whoever may look, and finds nothing, was refused nothing
            return
        client = self._scope.get("client")
        item = AuditItem(
            time=desk.clock.wall(),
            subject=asker.subject,
            token=asker.token,
            role=asker.role if asker.token else "",
            tenant=asker.tenant,
            address=client[0] if client else "",
            action=route.name if route is not None else "",
            target=f"{self._scope['method']} {escaped(self._scope['path'])}",
            status=answer.status_code,
            code=failure.document.code if failure is not None else "",
            detail=failure.document.detail if failure is not None else "",
            operation=next((value.decode("latin-1") for name, value in answer.raw_headers if name == _OPERATION), ""),
            trace=self._trace,
        )
        (desk.audit.note if deed and asker.token and answer.status_code < 400 else desk.audit.refused)(item)

    async def _admitted(self, route: Route, query: dict[str, Any]) -> tuple[Flow | None, Spending | None]:
        """Whose request it is, and what it costs; nobody's, if it goes before all others. Raises `Failure`, at little cost, if
        that one asks for too much.
        """
        if route.first and (route.open or "user" not in route.audience):
            return None, None
        if route.body is not None:
            self._check_announced(route.body.bytes_max)  # before anything is drawn for what would never be read
        found = spending(route, self._principal, query, self._headers, self._app.desk)
        try:
            flow = self._app.turns.admit(found.flow, found.drawn, found.rate)
            self._unannounced = None if "content-length" in self._headers or found.rate is None else (flow, found.rate)
            return (None if route.first else flow), found  # what lasts as long as somebody talks would keep its seat
        except Failure:
            announced = self._headers.get("content-length", "")
            if not self._read and announced.isdigit() and int(announced[:20]) <= SPILLED_BYTES_MAX:
                await self._take(SPILLED_BYTES_MAX)
            raise

    def _traced(self) -> str:
        given = self._headers.get("remit-trace")
        if given is None:
            return self._app.desk.world.ids.nonce()
        if not TRACE.fullmatch(given):
            cure = "use 1 to 128 visible ASCII signs, or leave it out"
            raise Failure(400, "malformed", "the header Remit-Trace cannot be used", field="Remit-Trace", cure=cure)
        return given

    async def _body(self, route: Route) -> tuple[bytes, str]:
        wanted = route.body
        if wanted is None:
            if not self._read:
                await self._take(0)
            return b"", ""
        encoding = self._headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            # Of what inflates nobody can say how large it is before it is too late: it counts as too large.
            status, code = (413, "too_large") if encoding in INFLATING else (415, "media_type")
            raise Failure(status, code, f"the body is encoded as {shown(encoding)}", cure="send it as it is, not compressed")
        media = self._headers.get("content-type", wanted.media[0]).partition(";")[0].strip().lower()
        if media not in wanted.media:
            headers = {"Accept-Patch": wanted.media[0]} if route.method == "PATCH" else {}
            cure = f"send the header Content-Type: {one_of(wanted.media)}"
            raise Failure(415, "media_type", f"the body is {shown(media)}, which is not read here", cure=cure, headers=headers)
        return b"" if route.converses else await self._take(wanted.bytes_max), media

    async def _take(self, bytes_max: int) -> bytes:
        """All of it, whether or not its length was announced; never more than may be."""
        self._check_announced(bytes_max)
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            piece = message.get("body", b"")
            size += len(piece)
            if size > bytes_max:
                raise _too_large(bytes_max)
            self._hold(len(piece))
            pieces.append(piece)
            if not message.get("more_body", False):
                self._read = True
                return b"".join(pieces)

    def _check_announced(self, bytes_max: int) -> None:
        announced = self._headers.get("content-length", "")
        if announced.isdigit() and int(announced[:20]) > bytes_max:
            raise _too_large(bytes_max)

    def _hold(self, size: int) -> None:
        if not self._app.bodies.take(self._principal, size):
            detail = "too many large bodies are being read at once"
            raise Failure(429, "overloaded", detail, cure="nothing was done; ask again later", retry_after_ms=1_000)
        self._held += size

    async def _answer(self, answer: Response, failure: Failure | None = None) -> None:
        size = 0 if isinstance(answer, Streamed) else len(getattr(answer, "body", b""))
        if size < LARGE_BYTES:
            await self._told(answer, failure)
            return
        if not self._app.answers.take(self._principal, size):
            if self._route is not None and self._route.reading:  # what was done is told, whatever it takes
                detail = "too many large answers are on their way at once, and are not taken"
                raise Failure(429, "overloaded", detail, cure="read those that were asked for; then ask again, or for less")
            size = 0
        try:
            await self._told(answer, failure)
        finally:
            self._app.answers.give_back(self._principal, size)

    async def _told(self, answer: Response, failure: Failure | None) -> None:
        self._written_down(answer, failure)
        answer.raw_headers.append((b"remit-trace", (self._trace or "-").encode()))
        if not self._read:
            answer.raw_headers.append((b"connection", b"close"))
        whole: Whole | None = self._scope.get("whole")
        if whole is not None and type(answer) in _PLAIN and len(answer.body) < LARGE_BYTES:
            self._begun = whole(self._scope, answer.status_code, answer.raw_headers, bytes(answer.body))
            if self._begun:
                self._status = answer.status_code
                return
        await answer(self._scope, self._receive, self._sent)

    async def _sent(self, message: Message) -> None:
        """What is small is on its way at once. What is large leaves in pieces, each once the one before has been taken: who
        takes nothing is not waited for for ever, and there is no second copy of it.
        """
        self._begun = True
        if not self._status:
            self._status = message["status"]
        body = message.get("body", b"")
        if len(body) < LARGE_BYTES:
            await self._send(message)
            return
        more = message.get("more_body", False)
        try:
            for start in range(0, len(body), LARGE_BYTES):
                end = start + LARGE_BYTES
                async with self._app.desk.clock.timeout_ms(SEND_MS_MAX):
                    await self._send({**message, "body": body[start:end], "more_body": more or end < len(body)})
        except TimeoutError:
            raise _Gone from None


def _parts(path: str) -> list[str]:
    parts = path.split("/")[1:]
    return [unquote(part) for part in parts] if "%" in path else parts


class _Gone(Exception):
    """The asker left, or does not listen any more."""


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _too_large(bytes_max: int) -> Failure:
    if not bytes_max:
        return Failure(413, "too_large", "nothing is read from a body here", cure="send none")
    return Failure(413, "too_large", f"the body has more than {bytes_max} bytes", cure="send less at a time")


async def _answered(route: Route, asked: Asked, desk: Desk) -> Response:
    """What the outside does to a handler is told alike by all of them."""
    try:
        return await route.handler(asked, desk)
    except NoAnswer as error:
        raise unanswered(error) from error
    except NoVerdict as error:
        raise no_verdict(error) from error
    except StoreError as error:
        raise store_failed(error) from error
    except Unread as error:
        raise Failure(400, "malformed", str(error), cure="send what this version of Remit can read") from error


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
