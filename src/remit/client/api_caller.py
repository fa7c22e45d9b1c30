"""HTTP API calls with operation ids, retries and deadlines; response decoders.

Ids, retries, patience; what is asked is api.py's, how bytes travel wire.py's.

The rule of client.py holds here as well: **a deed keeps its id.** A write takes its operation id before it is first sent, and
every retry repeats it, so that a write whose answer was lost is done once. A refusal is an answer, and is told, not retried.

A decoder for each shape, and one for any kind. Nothing is asked here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cache
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace

from remit.client.http_transport import Answered, Reply, Untrusted, Wire, server_url
from remit.client.retry import RetryBudget, RetryShape
from remit.model.claims import Code, OperationID, Verdict, operation_id
from remit.model.objects import AnyObject, dec_hook
from remit.model.wire.api_types import (
    OPERATION_HEADER,
    AccountItem,
    ApplyAnswer,
    AuditItem,
    DeleteAnswer,
    EndpointItem,
    ListOf,
    NodeTop,
    PlanAnswer,
    ProblemAnswer,
    ProblemItem,
    ReplicaTop,
    RotateAnswer,
    ScopeStatus,
)
from remit.world.interfaces import Chance, Clock, Ids, LinkError, Unheard, Unreached
from remit.world.net.tls import Trust

T = TypeVar("T")

Query = Mapping[str, str]

STATUS_PATH: Final = "/v1/status"
STATUS_MS_MAX: Final = 30_000
"""For how long a status is good for new ids if the server does not tell how long a window is."""

_HELD: Final = frozenset({429, 503})
_SILENT: Final = frozenset({502, 504})
_TIMEOUT: Final = "timeout"


class ApiError(Exception):
    """The server's answer is no. `code` is for programs (docs/refusals.md); `detail` and `cure` are for people."""

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
    ) -> None:
        self.status, self.code, self.detail, self.field, self.cure = status, code, detail, field, cure
        self.problems = tuple(problems)
        self.revision = revision
        words = detail or code or f"HTTP status {status}"
        super().__init__(
            (f"{field}: " if field and not words.startswith(field) else "") + words + (f"; {cure}" if cure else "")
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
        )


class Unanswered(Exception):
    """Patience ended without an answer. `silent`: what was asked may have happened; else it has not.

    To be sure, ask the same again under the same `operation_id`, if there is one; never under a new one while `silent`.
    """

    def __init__(self, why: str, *, silent: bool = False, operation_id: str = "") -> None:
        self.why, self.silent, self.operation_id = why, silent, operation_id
        if not operation_id:
            cure = "ask again later"
        elif silent:
            cure = f"it may have happened: ask the same again, with operation_id={operation_id!r}"
        else:
            cure = "nothing has happened: ask again later"
        super().__init__(f"no answer: {why}; {cure}")


class Held(Exception):
    """The server has not begun, and says when to come back."""

    def __init__(self, problem: ProblemAnswer, retry_after_ms: int) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(problem.detail or problem.title or problem.code)


class _Course:
    """How one call has fared so far."""

    __slots__ = ("failures", "last_why", "operation", "silences", "until_ms")

    def __init__(self, until_ms: int, operation: str = "") -> None:
        self.until_ms, self.operation = until_ms, operation
        self.failures = self.silences = 0
        self.last_why = ""

    def failed(self, error: Exception) -> None:
        self.failures += 1
        # What a certificate wants is done by whoever gave it: the cure is theirs to hear.
        brief = error.cause if isinstance(error, LinkError) and not isinstance(error, Untrusted) else str(error)
        self.last_why = brief or self.last_why

    def ended(self, why: str) -> Unanswered:
        said = f"{why} ({self.last_why})" if self.last_why else why
        # What only reads has done nothing, whoever heard it.
        return Unanswered(said, silent=self.silences > 0 and bool(self.operation), operation_id=self.operation)


class Caller:
    """Asks the servers of one scope, one after another. Its calls may run side by side; they share connections and budget."""

    def __init__(
        self,
        servers: Sequence[str],
        token: str,
        shape: RetryShape,
        *,
        clock: Clock,
        chance: Chance,
        ids: Ids,
        trust: Trust = Trust(),
    ) -> None:
        if not servers:
            raise ValueError("name at least one server, as http://HOST:PORT")
        self._servers = [server_url(server) for server in servers]
        self._wire = Wire(token, trust)
        self._shape, self._budget = shape, RetryBudget()
        self.clock, self.chance, self._ids = clock, chance, ids
        self._at = 0
        self._status: ScopeStatus | None = None
        self._status_ms = 0

    async def close(self) -> None:
        await self._wire.close()

    # -------------------------------------------------------------------------------------------------- reading, writing

    async def read(
        self,
        path: str,
        query: Query | None = None,
        *,
        method: str = "",
        body: bytes | None = None,
        kind: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Answered:
        """What nothing changes by, and so needs no id; with a body it is a POST, unless told otherwise."""
        target, how = _target(path, query), method or ("GET" if body is None else "POST")
        return await self._reach(lambda server: self._once(server, how, target, body, headers or {}, kind), self._begin())

    async def write(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        *,
        body: bytes | None = None,
        kind: str = "",
        headers: Mapping[str, str] | None = None,
        operation: str | None = None,
    ) -> Answered:
        """What something changes by. A given `operation` is kept whatever happens: it may have been sent before this call."""
        target = _target(path, query)

        async def send(course: _Course) -> Answered:
            carried = {**(headers or {}), OPERATION_HEADER: course.operation}
            return await self._reach(lambda server: self._once(server, method, target, body, carried, kind), course)

        course = self._begin(operation or await self.issue())
        try:
            return await send(course)
        except ApiError as error:
            # An id that was never executed and never will be may be replaced, once; after silence none may.
            if operation is not None or course.silences or error.code != Code.OPERATION_EXPIRED:
                raise
        await self.status(fresh=True)
        return await send(self._begin(await self.issue()))

    @asynccontextmanager
    async def opened(self, path: str, query: Query | None = None) -> AsyncGenerator[Reply, None]:
        """One try of a long answer. Raises `LinkError`, `Held` or `ApiError`; after a failure the next server is asked."""
        server = self._servers[self._at]
        try:
            async with self._wire.opened("GET", server + _target(path, query)) as reply:
                if reply.status >= 300:
                    _raise_for(await reply.whole())
                yield reply
        except (LinkError, Held):
            self._turn_from(server)
            raise

    @asynccontextmanager
    async def conversing(self, path: str, pieces: AsyncIterable[bytes], kind: str) -> AsyncGenerator[Reply, None]:
        """One try of an answer that goes on with what is sent: it is never begun twice. Raises as `opened` does."""
        async with self._wire.conversing(self._servers[self._at] + path, pieces, kind) as reply:
            if reply.status >= 300:
                _raise_for(await reply.whole())
            yield reply

    async def probe(self, path: str) -> Answered:
        """One try, whatever the answer."""
        return await self._wire.call("GET", self._servers[self._at] + path)

    # ------------------------------------------------------------------------------------------------------------- status

    async def status(self, *, fresh: bool) -> ScopeStatus:
        """Where the scope stands; not `fresh` may be as old as half a window, which is good enough for new ids."""
        status = self._status
        if not fresh and status is not None:
            age_ms = self.clock.now_ms() - self._status_ms
            if 2 * age_ms < (status.window_ms or STATUS_MS_MAX):
                return status
        sent_ms = self.clock.now_ms()
        told = decoded(_statuses, await self.read(STATUS_PATH))
        if status is not None and status.incarnation == told.incarnation and status.window > told.window:
            told = replace(told, window=status.window)  # a server that lags does not turn windows back
        self._status, self._status_ms = told, sent_ms
        return told

    async def issue(self) -> OperationID:
        status = await self.status(fresh=False)
        return operation_id(status.incarnation, status.window, self._ids.nonce())

    # ----------------------------------------------------------------------------------------------------------- reaching

    def _begin(self, operation: str = "") -> _Course:
        now_ms = self.clock.now_ms()
        self._budget.first_try(now_ms)
        return _Course(now_ms + self._shape.deadline_ms, operation)

    async def _once(
        self, server: str, method: str, target: str, body: bytes | None, headers: Mapping[str, str], kind: str
    ) -> Answered:
        answer = await self._wire.call(method, server + target, body, headers=headers, kind=kind)
        if answer.status >= 300:
            _raise_for(answer)
        return answer

    async def _reach(self, once: Callable[[str], Awaitable[T]], course: _Course) -> T:
        """Try one server after another until one answers. Ends with an answer or `Unanswered`, by the deadline."""
        while (left_ms := course.until_ms - self.clock.now_ms()) > 0:
            server, rest_ms = self._servers[self._at], 0
            try:
                async with self.clock.timeout_ms(min(self._shape.try_ms, left_ms)):
                    return await once(server)
            except (Unheard, TimeoutError) as error:
                course.failed(error)
                course.silences += 1
            except Unreached as error:
                course.failed(error)
            except Held as held:
                course.failed(held)
                rest_ms = held.retry_after_ms
            self._turn_from(server)
            await self._pause(course, rest_ms)
        raise course.ended("the deadline passed")

    async def _pause(self, course: _Course, rest_ms: int) -> None:
        now_ms = self.clock.now_ms()
        left_ms = course.until_ms - now_ms
        if course.failures >= self._shape.attempts_max:
            raise course.ended(f"{course.failures} tries failed")
        pause_ms = rest_ms + self._shape.pause_ms(course.failures, left_ms - rest_ms, self.chance)
        if pause_ms >= left_ms:
            raise course.ended("the deadline passes before another try may be made")
        wait_ms = self._budget.take(now_ms, left_ms - 1)
        if wait_ms is None:
            raise course.ended("the retry budget is used up")
        await self.clock.sleep_ms(max(pause_ms, wait_ms))

    def _turn_from(self, server: str) -> None:
        if self._servers[self._at] == server:  # else another call has turned already: go where it went
            self._at = (self._at + 1) % len(self._servers)


_statuses: msgspec.json.Decoder[ScopeStatus] = msgspec.json.Decoder(ScopeStatus, dec_hook=dec_hook)


def decoded(decoder: msgspec.json.Decoder[T], answer: Answered) -> T:
    """What an answer says. One that cannot be read is no answer."""
    try:
        return decoder.decode(answer.body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise unread(error, answer.headers.get(OPERATION_HEADER, "")) from error


def unread(error: Exception, operation: str = "") -> Unanswered:
    why = f"an answer that cannot be read ({error}): do both run the same version?"
    return Unanswered(why, silent=True, operation_id=operation)


def _target(path: str, query: Query | None) -> str:
    kept = {name: value for name, value in (query or {}).items() if value}
    return f"{path}?{urlencode(kept)}" if kept else path


def _raise_for(answer: Answered) -> NoReturn:
    problem = answer.problem()
    if problem.code == _TIMEOUT or (answer.status in _SILENT and not problem.code):
        raise Unheard(problem.detail or "the server gave up", problem.cure or "ask again under the same id")
    if answer.status in _HELD:
        raise Held(problem, answer.retry_after_ms())
    raise ApiError.of(replace(problem, status=answer.status))


async def pieces_at(caller: Caller, path: str, query: Query | None = None) -> AsyncGenerator[bytes, None]:
    """What is sent at a path, in pieces of any size. Raises `Unanswered` if it breaks off."""
    try:
        async with caller.opened(path, query) as reply, aclosing(reply.pieces()) as pieces:
            async for piece in pieces:
                yield piece
    except LinkError as error:
        raise Unanswered(error.cause) from error
    except Held as held:
        raise Unanswered(str(held)) from held


O = TypeVar("O", bound=AnyObject)  # noqa: E741 - it stands for an object


class Items(msgspec.Struct):
    """Many that were listed without a revision of their own."""


class NodeTops(Items):
    items: list[NodeTop]


class ReplicaTops(Items):
    items: list[ReplicaTop]


class Accounts(Items):
    items: list[AccountItem]


class Audits(Items):
    items: list[AuditItem]


class Verdicts(msgspec.Struct):
    verdicts: list[Verdict]


deleted: msgspec.json.Decoder[DeleteAnswer] = msgspec.json.Decoder(DeleteAnswer)
applied: msgspec.json.Decoder[ApplyAnswer] = msgspec.json.Decoder(ApplyAnswer)
planned: msgspec.json.Decoder[PlanAnswer] = msgspec.json.Decoder(PlanAnswer)
rotated: msgspec.json.Decoder[RotateAnswer] = msgspec.json.Decoder(RotateAnswer)
judged: msgspec.json.Decoder[Verdicts] = msgspec.json.Decoder(Verdicts)
plain: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
node_tops: msgspec.json.Decoder[NodeTops] = msgspec.json.Decoder(NodeTops)
replica_tops: msgspec.json.Decoder[ReplicaTops] = msgspec.json.Decoder(ReplicaTops)
accounts: msgspec.json.Decoder[Accounts] = msgspec.json.Decoder(Accounts)
audits: msgspec.json.Decoder[Audits] = msgspec.json.Decoder(Audits)
endpoint_ones: msgspec.json.Decoder[EndpointItem] = msgspec.json.Decoder(EndpointItem)
endpoint_lists: msgspec.json.Decoder[ListOf[EndpointItem]] = msgspec.json.Decoder(ListOf[EndpointItem])


@cache
def _decoder(of: Any) -> Any:
    return msgspec.json.Decoder(of, dec_hook=dec_hook)


def ones(kind: type[O]) -> msgspec.json.Decoder[O]:
    of: Any = kind
    decoder: msgspec.json.Decoder[O] = _decoder(of)
    return decoder


def lists(kind: type[O]) -> msgspec.json.Decoder[ListOf[O]]:
    generic: Any = ListOf
    decoder: msgspec.json.Decoder[ListOf[O]] = _decoder(generic[kind])
    return decoder
