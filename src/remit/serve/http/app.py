"""ASGI application: dispatch, checks and limits of every request.

The checks run in this order: Host and Origin, authentication, route lookup, authorization, query parameters, the limit of
open watches, rate limit and queue of the caller's flow (fair_queue.py), body size. Errors of a handler become problem
documents (RFC 9457); only a bug of ours becomes a 500. Actions of users, and every refusal, are written to the audit log
before the response is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from remit.client.authority_client import RetriesExhausted
from remit.client.endpoint import EndpointError
from remit.client.rpc import UnreadableRequest
from remit.model.claims import Code
from remit.model.problems import closest_name, did_you_mean, escaped, one_of, quoted
from remit.model.wire.api_types import OPERATION_HEADER, AuditItem
from remit.serve.auth.enrollment import check_certificate
from remit.serve.http.connection_limits import SharedLimit
from remit.serve.http.fair_queue import FairQueue, Flow, Rate, RequestCost, body_cost, request_cost
from remit.serve.http.path_tree import PathTree
from remit.serve.http.replies import (
    ApiProblem,
    BytesResponse,
    endpoint_problem,
    problem_response,
    store_problem,
    unanswered_problem,
)
from remit.serve.http.request_checks import Headers, QueryFields, authorize, check_origin, read_query
from remit.serve.http.request_telemetry import NO_ROUTE, AccessLine, AccessLog
from remit.serve.http.routes import ANONYMOUS, RequestContext, Route
from remit.serve.http.streams import LARGE_BYTES, SEND_MS_MAX, StreamResponse, abort_connection
from remit.serve.server_context import ServerContext
from remit.store.protocol import StoreError
from remit.world.net.http_server import SendResponse

REQUEST_MS_MAX: Final = 30_000
PATH_BYTES_MAX: Final = 4 << 10
BODIES_BYTES_MAX: Final = 256 << 20
"""Limit of all request bodies held in memory at once, and of all large responses being sent."""
DRAINED_BYTES_MAX: Final = 64 << 10
"""A rejected body up to this size is read and discarded, so that the connection stays usable: a client that must reconnect
costs more than reading the body.
"""
COMPRESSED: Final = frozenset({"gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress"})
NOT_FOUND: Final = 404
_WHOLE_RESPONSES: Final = (Response, BytesResponse)
_OPERATION: Final = OPERATION_HEADER.lower().encode()
_NO_WATCH: Final = nullcontext()
TRACE: Final = re.compile(r"[!-~]{1,128}")

ReportBug = Callable[[str, BaseException], None]
"""Receives bugs of ours: the request line and the exception."""


class Application:
    """The ASGI application of one server."""

    def __init__(self, routes: Sequence[Route], server: ServerContext, report_bug: ReportBug) -> None:
        self._paths = PathTree()
        for route in routes:
            self._paths.add(route)
        self.query_fields = {route.name: QueryFields(route.parameters) for route in routes}
        self._path_words = sorted({part for route in routes for part in route.path.split("/") if part and part[0] != "{"})
        self._server = server
        self._report_bug = report_bug
        self.bodies, self.large_replies = SharedLimit(BODIES_BYTES_MAX), SharedLimit(BODIES_BYTES_MAX)
        self.queue = FairQueue(server.clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"unsupported ASGI scope type {scope['type']}: only http and lifespan are served")
        await _Exchange(self, scope, receive, send).run()

    def find_route(self, scope: Scope) -> tuple[Route, dict[str, str]] | ApiProblem:
        """Return the route and its path variables, or the problem to report. The problem is returned and not raised because
        callers without a valid token must get 401, not learn which paths exist.
        """
        path, method = scope["raw_path"].decode("latin-1"), scope["method"]
        match = self._paths.find(path) if len(path) <= PATH_BYTES_MAX else None
        if match is None:
            return self._unknown_path(path)
        node, values = match
        route = node.routes.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = [*node.routes, *(["HEAD"] if "GET" in node.routes else [])]
            detail = f"{quoted(method)} is not allowed at {quoted(path)}"
            return ApiProblem(405, "method", detail, cure=f"use {one_of(allowed)}", headers={"Allow": ", ".join(allowed)})
        return route, dict(zip(route.variables, values, strict=True))

    def _unknown_path(self, path: str) -> ApiProblem:
        for part in path.split("/"):
            if part and part not in self._path_words and (suggestion := closest_name(part, self._path_words)):
                return ApiProblem(404, "no_such_path", f"no such path: {quoted(path)}", cure=did_you_mean(suggestion))
        cure = "see /openapi.json for all paths; objects of a tenant are below /v1/tenants/{tenant}/"
        return ApiProblem(404, "no_such_path", f"no such path: {quoted(path)}", cure=cure)

    @property
    def server(self) -> ServerContext:
        return self._server

    async def dispatch(self, request: RequestContext, flow: Flow | None, cost: RequestCost | None) -> Response:
        """Run the handler when the fair queue grants seats. The body is complete by now: a slow upload holds no seats. Routes
        without a flow (heartbeats, leases, claims) are not queued, and those that wait for an agent hold no seats either.
        """
        if flow is None or cost is None or request.route.waits_for_agent:
            return await _call_handler(request.route, request, self._server)
        with await self.queue.acquire(flow, cost.cost, cost.seats):
            response = await _call_handler(request.route, request, self._server)
        if request.extra_cost and cost.rate is not None:
            flow.charge(request.extra_cost, cost.rate)
        return response

    def report_bug(self, request_line: str, error: BaseException) -> None:
        self._report_bug(request_line, error)


class _Exchange:
    """One request and its response."""

    def __init__(self, app: Application, scope: Scope, receive: Receive, send: Send) -> None:
        self._app, self._scope, self._receive, self._send = app, scope, receive, send
        self._headers = Headers.of(scope)
        self._trace = ""
        self._principal = ANONYMOUS
        self._authorized = False
        self._route: Route | None = None
        self._reply_started = False
        self._body_read = not _has_body(self._headers)
        """Whether the body was read to its end. If not, the connection is closed after the response, since the rest would be
        parsed as the next request.
        """
        self._body_bytes = 0
        self._status = 0
        self._streams = False
        self._code = ""
        self._request: RequestContext | None = None
        self._pays_for_body: tuple[Flow, Rate] | None = None
        """Flow and rate to charge for the body once its size is known, if the request had no Content-Length."""

    async def run(self) -> None:
        metrics = self._app.server.telemetry.requests
        started_ns = metrics.begin()
        try:
            await self._run_and_report()
        finally:
            if self._body_bytes:
                self._app.bodies.release(self._principal, self._body_bytes)
            name = NO_ROUTE if self._route is None else self._route.name
            duration_s = metrics.end(started_ns, name, self._scope["method"], self._status, streams=self._streams)
            access_log = self._app.server.telemetry.access_log
            if access_log is not None and access_log.should_log(self._status, duration_s, streams=self._streams):
                self._log_access(access_log, name, duration_s)

    def _log_access(self, access_log: AccessLog, route: str, duration_s: float) -> None:
        line = AccessLine(self._scope["method"], self._scope["path"])
        line.route, line.trace, line.code, line.status = route, self._trace, self._code, self._status
        line.duration_s, line.streams = duration_s, self._streams
        if self._request is not None:
            line.actor, line.tenant = self._request.actor.name, self._request.tenant
        access_log.write(line)

    async def _run_and_report(self) -> None:
        try:
            await self._run()
        except ApiProblem as problem:
            # The traceback refers to the body and to the exception, a cycle that would keep both alive until the next GC run.
            problem.__traceback__ = None
            self._code = problem.document.code
            self._app.server.telemetry.requests.count_problem(
                self._code, problem.document.status, "" if self._route is None else self._route.flow_class
            )
            await self._reply(problem_response(problem), problem)
        except _ClientGone:
            abort_connection(self._scope)
            return
        except Exception as error:  # a bug of ours: report it; only this request fails
            self._app.report_bug(f"{self._scope['method']} {escaped(self._scope['path'])}", error)
            self._code = Code.INTERNAL_ERROR.value
            if self._reply_started:
                raise
            detail = "internal error: a bug in Remit"
            bug = ApiProblem(500, self._code, detail, cure="report it, with the Remit-Trace header of this response")
            await self._reply(problem_response(bug), bug)

    async def _run(self) -> None:
        self._trace = self._trace_id()
        check_origin(self._scope, self._headers, self._app.server.auth.hosts)
        route, path = self._authorize()
        server = self._app.server
        query = read_query(self._scope["query_string"], self._app.query_fields[route.name])
        streams = route.streams or bool(route.streams_if and query[route.streams_if])
        self._streams = streams
        with server.streams.slot(self._principal) if streams else _NO_WATCH:
            try:
                async with server.clock.timeout_ms(REQUEST_MS_MAX):
                    flow, cost = await self._admit(route, query)
                    body, media = await self._read_body(route)
                    if self._pays_for_body is not None:
                        self._pays_for_body[0].charge(body_cost(len(body)), self._pays_for_body[1])
                    receive = self._receive if route.duplex else None
                    request = self._request = RequestContext(
                        route, path, query, self._headers, self._trace, body, media, self._principal, receive
                    )
                    response = await self._app.dispatch(request, flow, cost)
            except TimeoutError:
                if not self._body_read:
                    detail = f"the request body was not received within {REQUEST_MS_MAX // 1000} seconds"
                    raise ApiProblem(
                        408, "timeout", detail, cure="nothing was done; send the whole body without pauses"
                    ) from None
                detail = f"the request took more than {REQUEST_MS_MAX // 1000} seconds"
                raise ApiProblem(
                    504, "timeout", detail, cure="check whether it took effect; then retry, or request less"
                ) from None
            if isinstance(response, StreamResponse) and not route.anonymous:
                response.principal = self._principal
            await self._reply(response)

    def _authorize(self) -> tuple[Route, dict[str, str]]:
        match, server = self._app.find_route(self._scope), self._app.server
        if isinstance(match, ApiProblem) or not match[0].anonymous:
            self._principal = server.auth.tokens.authenticate(self._headers.get("authorization", ""))
        if isinstance(match, ApiProblem):
            raise match
        route, path = match
        self._route = route
        if not route.anonymous:
            authorize(route, self._principal, path)
            check_certificate(server.auth.tls, self._principal, self._scope.get("bearer"))
        if self._is_user_action(route):
            server.audit.check_writable()
        self._authorized = True
        return route, path

    def _is_user_action(self, route: Route) -> bool:
        """Return whether a person is accountable for this request, so that it is audited. Actions of components are in the
        store already, and would flood the audit log.
        """
        return self._principal.audience in ("user", "join") and not route.anonymous and (route.audited or not route.is_read)

    def _audit(self, response: Response, problem: ApiProblem | None) -> None:
        route, server, principal = self._route, self._app.server, self._principal
        is_action = route is not None and self._is_user_action(route)
        is_empty_read = problem is not None and problem.document.status == NOT_FOUND and self._authorized and not is_action
        if (
            problem is None and not is_action
        ) or is_empty_read:  # a permitted read of something that does not exist is not a refusal
            return
        client = self._scope.get("client")
        item = AuditItem(
            time=server.clock.wall(),
            subject=principal.subject,
            token=principal.token,
            role=principal.role if principal.token else "",
            tenant=principal.tenant,
            address=client[0] if client else "",
            action=route.name if route is not None else "",
            target=f"{self._scope['method']} {escaped(self._scope['path'])}",
            status=response.status_code,
            code=problem.document.code if problem is not None else "",
            detail=problem.document.detail if problem is not None else "",
            operation=next((value.decode("latin-1") for name, value in response.raw_headers if name == _OPERATION), ""),
            trace=self._trace,
        )
        (server.audit.record if is_action and principal.token and response.status_code < 400 else server.audit.record_refusal)(
            item
        )

    async def _admit(self, route: Route, query: dict[str, Any]) -> tuple[Flow | None, RequestCost | None]:
        """Charge the request to its flow and return the flow and the cost. Raises `ApiProblem` before the body is read, which
        is cheap, if the flow is over its limit. The flow is None for routes that are not queued.
        """
        if route.unqueued and (route.anonymous or "user" not in route.audience):
            return None, None
        if route.body is not None:
            self._check_content_length(route.body.bytes_max)  # before tokens are taken for a body that will be rejected anyway
        cost = request_cost(route, self._principal, query, self._headers, self._app.server.watch_cache)
        try:
            flow = self._app.queue.admit(cost.flow, cost.tokens, cost.rate)
            self._pays_for_body = None if "content-length" in self._headers or cost.rate is None else (flow, cost.rate)
            return (None if route.unqueued else flow), cost  # an unqueued stream would hold its seats for as long as it lasts
        except ApiProblem:
            content_length = self._headers.get("content-length", "")
            if not self._body_read and content_length.isdigit() and int(content_length[:20]) <= DRAINED_BYTES_MAX:
                await self._receive_body(DRAINED_BYTES_MAX)
            raise

    def _trace_id(self) -> str:
        trace = self._headers.get("remit-trace")
        if trace is None:
            return self._app.server.world.ids.nonce()
        if not TRACE.fullmatch(trace):
            cure = "use 1 to 128 printable ASCII characters without spaces, or omit the header"
            raise ApiProblem(400, "malformed", "Remit-Trace: invalid value", field="Remit-Trace", cure=cure)
        return trace

    async def _read_body(self, route: Route) -> tuple[bytes, str]:
        spec = route.body
        if spec is None:
            if not self._body_read:
                await self._receive_body(0)
            return b"", ""
        encoding = self._headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            # The expanded size of a compressed body is unknown until it is read, so compressed bodies are rejected with 413.
            status, code = (413, "too_large") if encoding in COMPRESSED else (415, "media_type")
            raise ApiProblem(
                status, code, f"Content-Encoding {quoted(encoding)} is not supported", cure="send the body uncompressed"
            )
        media = self._headers.get("content-type", spec.media[0]).partition(";")[0].strip().lower()
        if media not in spec.media:
            headers = {"Accept-Patch": spec.media[0]} if route.method == "PATCH" else {}
            cure = f"set Content-Type to {one_of(spec.media)}"
            raise ApiProblem(
                415, "media_type", f"Content-Type {quoted(media)} is not supported here", cure=cure, headers=headers
            )
        return b"" if route.duplex else await self._receive_body(spec.bytes_max), media

    async def _receive_body(self, bytes_max: int) -> bytes:
        """Receive the whole body, with or without a Content-Length. Raises `ApiProblem` once it exceeds `bytes_max`."""
        self._check_content_length(bytes_max)
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _ClientGone
            piece = message.get("body", b"")
            size += len(piece)
            if size > bytes_max:
                raise _too_large(bytes_max)
            self._reserve_body_bytes(len(piece))
            pieces.append(piece)
            if not message.get("more_body", False):
                self._body_read = True
                return b"".join(pieces)

    def _check_content_length(self, bytes_max: int) -> None:
        content_length = self._headers.get("content-length", "")
        if content_length.isdigit() and int(content_length[:20]) > bytes_max:
            raise _too_large(bytes_max)

    def _reserve_body_bytes(self, size: int) -> None:
        if not self._app.bodies.acquire(self._principal, size):
            detail = "too many large request bodies are being received"
            raise ApiProblem(429, "overloaded", detail, cure="nothing was done; retry later", retry_after_ms=1_000)
        self._body_bytes += size

    async def _reply(self, response: Response, problem: ApiProblem | None = None) -> None:
        size = 0 if isinstance(response, StreamResponse) else len(getattr(response, "body", b""))
        if size < LARGE_BYTES:
            await self._send_reply(response, problem)
            return
        if not self._app.large_replies.acquire(self._principal, size):
            if self._route is not None and self._route.is_read:  # the response to a write is always sent
                detail = "too many large responses are being sent"
                raise ApiProblem(
                    429, "overloaded", detail, cure="read the responses requested so far; then retry, or request less"
                )
            size = 0
        try:
            await self._send_reply(response, problem)
        finally:
            self._app.large_replies.release(self._principal, size)

    async def _send_reply(self, response: Response, problem: ApiProblem | None) -> None:
        self._audit(response, problem)
        response.raw_headers.append((b"remit-trace", (self._trace or "-").encode()))
        if not self._body_read:
            response.raw_headers.append((b"connection", b"close"))
        send_whole: SendResponse | None = self._scope.get("whole")
        if send_whole is not None and type(response) in _WHOLE_RESPONSES and len(response.body) < LARGE_BYTES:
            self._reply_started = send_whole(self._scope, response.status_code, response.raw_headers, bytes(response.body))
            if self._reply_started:
                self._status = response.status_code
                return
        await response(self._scope, self._receive, self._send_message)

    async def _send_message(self, message: Message) -> None:
        """Send a message of the response. A large body is sent in chunks, each after the previous one was taken, without a
        second copy. A client that takes nothing for `SEND_MS_MAX` is disconnected.
        """
        self._reply_started = True
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
                async with self._app.server.clock.timeout_ms(SEND_MS_MAX):
                    await self._send({**message, "body": body[start:end], "more_body": more or end < len(body)})
        except TimeoutError:
            raise _ClientGone from None


class _ClientGone(Exception):
    """The client disconnected, or no longer reads the response."""


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _too_large(bytes_max: int) -> ApiProblem:
    if not bytes_max:
        return ApiProblem(413, "too_large", "this request takes no body", cure="send no body")
    return ApiProblem(413, "too_large", f"the body is larger than {bytes_max} bytes", cure="split it into smaller requests")


async def _call_handler(route: Route, request: RequestContext, server: ServerContext) -> Response:
    """Call the handler and turn errors of the authority, the store and message decoding into problems, the same for every
    route.
    """
    try:
        return await route.handler(request, server)
    except RetriesExhausted as error:
        raise unanswered_problem(error) from error
    except EndpointError as error:
        raise endpoint_problem(error) from error
    except StoreError as error:
        raise store_problem(error) from error
    except UnreadableRequest as error:
        raise ApiProblem(400, "malformed", str(error), cure="send a message that this version of Remit supports") from error


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
