"""HTTP API calls with operation ids; response decoders.

The API's methods are in api.py, retries in retry_loop.py and the HTTP connections in http_transport.py.

As in authority_client.py, **an intent keeps its operation id**. A write gets its id before it is first sent, and every retry
repeats the id, so a write whose response was lost is applied once. A refusal is a final answer: it is raised as `ApiError`,
not retried.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cache
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace

from remit.client.http_transport import HttpResponse, HttpTransport, StreamedResponse, UntrustedCertificate, server_url
from remit.client.retry import RetryPolicy
from remit.client.retry_loop import AttemptFailure, CallProgress, RetryLoop, ServerRotation
from remit.model.claims import Code, OperationID, Verdict, operation_id
from remit.model.kinds.registry import AnyObject
from remit.model.objects import dec_hook
from remit.model.wire.api_types import (
    OPERATION_HEADER,
    ApplyAnswer,
    AuditItem,
    DeleteAnswer,
    EndpointItem,
    HistoryEvent,
    ListOf,
    NodeTop,
    PlanAnswer,
    ProblemAnswer,
    ProblemItem,
    ReplicaTop,
    RotateAnswer,
    ScopeStatus,
    WorkloadProgressItem,
)
from remit.world.interfaces import Clock, Ids, LinkError, NotSent, Randomness, ReplyLost
from remit.world.net.tls import Trust

T = TypeVar("T")

Query = Mapping[str, str]

STATUS_PATH: Final = "/v1/status"
STATUS_AGE_MS_MAX: Final = 30_000
"""Maximum age of a cached status for issuing new ids if the server does not report the length of its id window."""

_BUSY_STATUSES: Final = frozenset({429, 503})
_GATEWAY_STATUSES: Final = frozenset({502, 504})
_TIMEOUT_CODE: Final = "timeout"


class ApiError(Exception):
    """The server refused the request. `code` and `reason` are for programs (docs/refusals.md); `detail` and `cure` are for
    people.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str = "",
        field: str = "",
        cure: str = "",
        problems: Sequence[ProblemItem] = (),
        *,
        revision: int = 0,
        reason: str = "",
    ) -> None:
        self.status, self.code, self.detail, self.field, self.cure = status, code, detail, field, cure
        self.problems = tuple(problems)
        self.revision, self.reason = revision, reason
        message = detail or code or f"HTTP status {status}"
        super().__init__(
            (f"{field}: " if field and not message.startswith(field) else "") + message + (f"; {cure}" if cure else "")
        )

    @classmethod
    def of(cls, problem: ProblemAnswer) -> ApiError:
        return cls(
            problem.status,
            problem.code,
            problem.detail or problem.title,
            problem.field,
            problem.cure,
            problem.problems,
            revision=problem.revision,
            reason=problem.reason,
        )


class Unanswered(Exception):
    """No response arrived before the deadline. If `silent`, the request may have been applied; otherwise it was not.

    To find out, repeat the same call with the same `operation_id`, if there is one. Never use a new id while `silent` is
    set.
    """

    def __init__(self, reason: str, *, silent: bool = False, operation_id: str = "") -> None:
        self.reason, self.silent, self.operation_id = reason, silent, operation_id
        if not operation_id:
            cure = "retry later"
        elif silent:
            cure = f"the request may have been applied: repeat it with operation_id={operation_id!r}"
        else:
            cure = "the request was not applied: retry later"
        super().__init__(f"no response: {reason}; {cure}")


class ServerBusy(Exception):
    """The server did not start the request (429 or 503) and asks to retry later."""

    def __init__(self, problem: ProblemAnswer, retry_after_ms: int) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(problem.detail or problem.title or problem.code)


class _RequestProgress(CallProgress):
    """Progress of one request; with its operation id if it is a write."""

    __slots__ = ("operation",)

    def __init__(self, deadline_ms: int, operation: str = "") -> None:
        super().__init__(deadline_ms)
        self.operation = operation

    def exhausted(self, reason: str) -> Unanswered:
        message = f"{reason} ({self.last_reason})" if self.last_reason else reason
        # A read changes nothing, so its outcome never matters.
        return Unanswered(message, silent=self.unknown_outcomes > 0 and bool(self.operation), operation_id=self.operation)


def _classify(error: Exception) -> AttemptFailure | None:
    match error:
        case ReplyLost():
            return AttemptFailure(error.cause, outcome_unknown=True)
        case UntrustedCertificate():
            return AttemptFailure(str(error))  # the full text names what the user has to change
        case NotSent():
            return AttemptFailure(error.cause)
        case ServerBusy():
            return AttemptFailure(str(error), retry_after_ms=error.retry_after_ms)
        case _:
            return None


class ApiCaller:
    """Sends requests to the servers of one scope, one server at a time. Calls may run concurrently; they share connections and
    the retry budget.
    """

    def __init__(
        self,
        servers: Sequence[str],
        token: str,
        policy: RetryPolicy,
        *,
        clock: Clock,
        randomness: Randomness,
        ids: Ids,
        trust: Trust = Trust(),
    ) -> None:
        if not servers:
            raise ValueError("no server given; name at least one as http://HOST:PORT")
        self._servers = ServerRotation([server_url(server) for server in servers])
        self._transport = HttpTransport(token, trust)
        self._loop = RetryLoop(self._servers, clock, randomness, policy, None, _classify)
        self.clock, self.randomness, self._ids = clock, randomness, ids
        self._status: ScopeStatus | None = None
        self._status_ms = 0

    async def close(self) -> None:
        await self._transport.close()

    # -------------------------------------------------------------------------------------------------- reads and writes

    async def read(
        self,
        path: str,
        query: Query | None = None,
        *,
        method: str = "",
        body: bytes | None = None,
        content_type: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> HttpResponse:
        """Send a request that changes nothing and so needs no operation id. With a body the method defaults to POST."""
        target, verb = _target(path, query), method or ("GET" if body is None else "POST")
        return await self._loop.run(
            lambda server: self._call_once(server, verb, target, body, headers or {}, content_type), self._start_call()
        )

    async def write(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        *,
        body: bytes | None = None,
        content_type: str = "",
        headers: Mapping[str, str] | None = None,
        operation: str | None = None,
    ) -> HttpResponse:
        """Send a request that changes something. A given `operation` id is never replaced, since it may have been sent before
        this call.
        """
        target = _target(path, query)

        async def send(progress: _RequestProgress) -> HttpResponse:
            all_headers = {**(headers or {}), OPERATION_HEADER: progress.operation}
            return await self._loop.run(
                lambda server: self._call_once(server, method, target, body, all_headers, content_type), progress
            )

        progress = self._start_call(operation or await self.new_operation_id())
        try:
            return await send(progress)
        except ApiError as error:
            # The server never executed an expired id and never will, so the write may be sent once more under a new id. That is
            # unsafe after a lost response, because the first attempt may have been applied.
            if operation is not None or progress.unknown_outcomes or error.code != Code.OPERATION_EXPIRED:
                raise
        await self.status(fresh=True)
        return await send(self._start_call(await self.new_operation_id()))

    @asynccontextmanager
    async def open_stream(self, path: str, query: Query | None = None) -> AsyncGenerator[StreamedResponse, None]:
        """Open a streamed response, one attempt. Raises `LinkError`, `ServerBusy` or `ApiError`; after a failure the next call
        uses the next server.
        """
        server = self._servers.current
        try:
            async with self._transport.open_stream("GET", server + _target(path, query)) as reply:
                if reply.status >= 300:
                    _raise_for(await reply.read_all())
                yield reply
        except (LinkError, ServerBusy):
            self._servers.switch_from(server)
            raise

    @asynccontextmanager
    async def open_duplex(
        self, path: str, chunks: AsyncIterable[bytes], content_type: str
    ) -> AsyncGenerator[StreamedResponse, None]:
        """Open a bidirectional stream, one attempt; never retried, because the command may have started. Raises as
        `open_stream` does.
        """
        async with self._transport.open_duplex(self._servers.current + path, chunks, content_type) as reply:
            if reply.status >= 300:
                _raise_for(await reply.read_all())
            yield reply

    async def probe(self, path: str) -> HttpResponse:
        """Send one GET request and return its response with any status."""
        return await self._transport.call("GET", self._servers.current + path)

    # ------------------------------------------------------------------------------------------------------------- status

    async def status(self, *, fresh: bool) -> ScopeStatus:
        """Return the scope's status. Unless `fresh`, a cached one up to half a window old is returned, which is good enough for
        new ids.
        """
        status = self._status
        if not fresh and status is not None:
            age_ms = self.clock.now_ms() - self._status_ms
            if 2 * age_ms < (status.window_ms or STATUS_AGE_MS_MAX):
                return status
        sent_ms = self.clock.now_ms()
        reported = decode_response(_status_decoder, await self.read(STATUS_PATH))
        if status is not None and status.incarnation == reported.incarnation and status.window > reported.window:
            reported = replace(reported, window=status.window)  # a server that lags must not move the window back
        self._status, self._status_ms = reported, sent_ms
        return reported

    async def new_operation_id(self) -> OperationID:
        status = await self.status(fresh=False)
        return operation_id(status.incarnation, status.window, self._ids.nonce())

    # ----------------------------------------------------------------------------------------------------------- one call

    def _start_call(self, operation: str = "") -> _RequestProgress:
        return _RequestProgress(self._loop.start()[1], operation)

    async def _call_once(
        self, server: str, method: str, target: str, body: bytes | None, headers: Mapping[str, str], kind: str
    ) -> HttpResponse:
        answer = await self._transport.call(method, server + target, body, headers=headers, content_type=kind)
        if answer.status >= 300:
            _raise_for(answer)
        return answer


_status_decoder: msgspec.json.Decoder[ScopeStatus] = msgspec.json.Decoder(ScopeStatus, dec_hook=dec_hook)


def decode_response(decoder: msgspec.json.Decoder[T], answer: HttpResponse) -> T:
    """Decode a response. An undecodable response counts as no response."""
    try:
        return decoder.decode(answer.body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise undecodable(error, answer.headers.get(OPERATION_HEADER, "")) from error


def undecodable(error: Exception, operation: str = "") -> Unanswered:
    reason = f"the response cannot be decoded ({error}): check that client and server run the same version"
    return Unanswered(reason, silent=True, operation_id=operation)


def _target(path: str, query: Query | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value}
    return f"{path}?{urlencode(given)}" if given else path


def _raise_for(answer: HttpResponse) -> NoReturn:
    problem = answer.problem()
    if problem.code == _TIMEOUT_CODE or (answer.status in _GATEWAY_STATUSES and not problem.code):
        raise ReplyLost(problem.detail or "the server timed out", problem.cure or "retry with the same operation id")
    if answer.status in _BUSY_STATUSES:
        raise ServerBusy(problem, answer.retry_after_ms())
    raise ApiError.of(replace(problem, status=answer.status))


async def stream_body(caller: ApiCaller, path: str, query: Query | None = None) -> AsyncGenerator[bytes, None]:
    """Yield the response body at a path in chunks of any size. Raises `Unanswered` if the stream breaks off."""
    try:
        async with caller.open_stream(path, query) as reply, aclosing(reply.chunks()) as chunks:
            async for chunk in chunks:
                yield chunk
    except LinkError as error:
        raise Unanswered(error.cause) from error
    except ServerBusy as busy:
        raise Unanswered(str(busy)) from busy


O = TypeVar("O", bound=AnyObject)  # noqa: E741 - the usual letter for an object type


class ItemList(msgspec.Struct):
    """A list response without a revision."""


class NodeTopList(ItemList):
    items: list[NodeTop]


class ReplicaTopList(ItemList):
    items: list[ReplicaTop]


class AccountItemList(ItemList):
    items: list[HistoryEvent]


class AuditItemList(ItemList):
    items: list[AuditItem]


class VerdictList(msgspec.Struct):
    verdicts: list[Verdict]


delete_decoder: msgspec.json.Decoder[DeleteAnswer] = msgspec.json.Decoder(DeleteAnswer)
apply_decoder: msgspec.json.Decoder[ApplyAnswer] = msgspec.json.Decoder(ApplyAnswer)
plan_decoder: msgspec.json.Decoder[PlanAnswer] = msgspec.json.Decoder(PlanAnswer)
rotate_decoder: msgspec.json.Decoder[RotateAnswer] = msgspec.json.Decoder(RotateAnswer)
verdicts_decoder: msgspec.json.Decoder[VerdictList] = msgspec.json.Decoder(VerdictList)
json_object_decoder: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
node_tops_decoder: msgspec.json.Decoder[NodeTopList] = msgspec.json.Decoder(NodeTopList)
replica_tops_decoder: msgspec.json.Decoder[ReplicaTopList] = msgspec.json.Decoder(ReplicaTopList)
accounts_decoder: msgspec.json.Decoder[AccountItemList] = msgspec.json.Decoder(AccountItemList)
audits_decoder: msgspec.json.Decoder[AuditItemList] = msgspec.json.Decoder(AuditItemList)
workload_progress_decoder: msgspec.json.Decoder[WorkloadProgressItem] = msgspec.json.Decoder(WorkloadProgressItem)
workload_progress_list_decoder: msgspec.json.Decoder[ListOf[WorkloadProgressItem]] = msgspec.json.Decoder(
    ListOf[WorkloadProgressItem]
)
endpoint_decoder: msgspec.json.Decoder[EndpointItem] = msgspec.json.Decoder(EndpointItem)
endpoint_list_decoder: msgspec.json.Decoder[ListOf[EndpointItem]] = msgspec.json.Decoder(ListOf[EndpointItem])


@cache
def _decoder(type_: Any) -> Any:
    return msgspec.json.Decoder(type_, dec_hook=dec_hook)


def object_decoder(kind: type[O]) -> msgspec.json.Decoder[O]:
    type_: Any = kind
    decoder: msgspec.json.Decoder[O] = _decoder(type_)
    return decoder


def list_decoder(kind: type[O]) -> msgspec.json.Decoder[ListOf[O]]:
    generic: Any = ListOf
    decoder: msgspec.json.Decoder[ListOf[O]] = _decoder(generic[kind])
    return decoder
