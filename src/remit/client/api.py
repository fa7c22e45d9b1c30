"""Typed async client of the HTTP API (`Api`, the SDK).

Objects in and out, typed; how often one asks for an answer is calling.py's.

    async with Api("http://127.0.0.1:7420", token, tenant="risk") as api:
        await api.apply([workload])
        async for told in api.watch(Replica):
            ...

`tenant` of a call is the Api's unless given; where several are read, an empty one (`ALL_TENANTS`) means all. A revision in
`expect` is the one that an object must stand at; 0: it must not exist. Raises `ApiError` (the answer is no) and `Unanswered`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, Literal, Self, TypeVar
from urllib.parse import quote

from msgspec.structs import replace

from remit.client import api_caller
from remit.client.api_caller import ApiError, Caller, Unanswered, decoded, pieces_at
from remit.client.exec_session import Session, conversed
from remit.client.http_transport import Answered
from remit.client.retry import RetryShape
from remit.client.watch import SILENCE_MS, Bookmark, Changed, Deleted, Listed, Source, Synced, Watched, Watcher, listed
from remit.model.claims import Operation, OperationID, Verdict
from remit.model.kinds import Workload
from remit.model.manifests.validation import written
from remit.model.metadata import Object
from remit.model.objects import TENANTED, AnyObject, collection_path, encode, object_path
from remit.model.records import Replica
from remit.model.wire.api_types import (
    PATCH_TYPE,
    AccountItem,
    ApplyAnswer,
    AuditItem,
    DeleteAnswer,
    EndpointItem,
    NodeTop,
    PlanAnswer,
    ReplicaTop,
    RotateAnswer,
    ScopeStatus,
)
from remit.model.wire.exec_frames import Begin, Window
from remit.world.clock import BootClock
from remit.world.interfaces import LinkError
from remit.world.net.tls import Trust
from remit.world.randomness import RandomIds, seeded_by_the_system

__all__ = [
    "ALL_TENANTS", "Api", "ApiError", "Bookmark", "Changed", "Deleted", "Gone", "Listed", "NotYet", "Synced", "Trust",
    "Unanswered", "Watched",
]  # fmt: skip

O = TypeVar("O", bound=AnyObject)  # noqa: E741 - it stands for an object
T = TypeVar("T")

Selector = str | Mapping[str, str]
"""As text (`app=web,tier!=x`), or what must be equal."""

Stream = Literal["stdout", "stderr", "both"]

ALL_TENANTS: Final = ""


class NotYet(TimeoutError):
    """What was waited for has not come true in time. `last` is how the object stood then; None: there was none."""

    def __init__(self, message: str, last: AnyObject | None) -> None:
        self.last = last
        super().__init__(message)


class Gone(ApiError):
    """It was done, and nothing is left to show: it took the last finalizer from an object that was being deleted."""


class Api:
    """The API of one scope, at one server or several that are tried in turn. Its calls may run side by side, in one event loop.

    `timeout_s` bounds each call with all its retries, but not watches and logs, which go on until they are left. At `https://`
    the server must show a certificate of `trust` (`Trust(ca_file=...)`), or of those that the system believes.
    """

    def __init__(
        self, server: str | Sequence[str], token: str, *, tenant: str = "default", timeout_s: float = 30, try_s: float = 15,
        trust: Trust = Trust(),
    ) -> None:  # fmt: skip
        deadline_ms = max(1, int(timeout_s * 1000))
        self.tenant = tenant
        self._caller = Caller(
            (server,) if isinstance(server, str) else server,
            token,
            RetryShape(deadline_ms=deadline_ms, try_ms=max(1, min(int(try_s * 1000), deadline_ms))),
            clock=BootClock(), chance=seeded_by_the_system(), ids=RandomIds(), trust=trust,
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every connection; watches that are still read end with an error."""
        await self._caller.close()

    # ------------------------------------------------------------------------------------------------------------- reading

    async def get(self, kind: type[O], name: str, *, tenant: str | None = None) -> O:
        answer = await self._caller.read(object_path(kind.__name__, name, self._home(kind, tenant)))
        return decoded(api_caller.ones(kind), answer)

    async def list(
        self, kind: type[O], *, tenant: str | None = None, labels: Selector = "", fields: Selector = ""
    ) -> Listed[O]:
        """All that match, as of one revision. It reads page by page, but what it returns is whole."""
        return await listed(self._caller, self._source(kind, tenant, labels, fields))

    def watch(
        self,
        kind: type[O],
        *,
        name: str = "",
        tenant: str | None = None,
        labels: Selector = "",
        fields: Selector = "",
        after: Listed[O] | int | None = None,
        silence_s: float = SILENCE_MS / 1000,
        lost: Callable[[str], None] | None = None,
    ) -> AsyncGenerator[Watched[O], None]:
        """All that match, then `Synced`, then what changes, for ever; close it to leave.

        After a break it lists again by itself and tells what differs, then `Synced` once more; `lost` is told why. With
        `after`, what was listed before is not told again; a bare revision tells changes since, and deletions only from then on.
        """
        source = self._source(kind, tenant, labels, fields, name)
        return Watcher(self._caller, source, silence_ms=int(silence_s * 1000), lost=lost).events(after)

    async def wait(
        self,
        kind: type[O],
        name: str,
        holds: Callable[[O | None], bool],
        *,
        tenant: str | None = None,
        timeout_s: float = 60,
    ) -> O | None:
        """Wait until `holds` of the object as it stands (None: there is none); how it stood then. Raises `NotYet`."""
        last: O | None = None
        try:
            async with (
                self._caller.clock.timeout_ms(int(timeout_s * 1000)),
                aclosing(self.watch(kind, name=name, tenant=tenant)) as told,
            ):
                synced = False
                async for event in told:
                    match event:
                        case Changed():
                            last = event.object
                        case Deleted():
                            last = None
                        case Synced():
                            synced = True
                    if (synced or last is not None) and holds(last):
                        return last
        except TimeoutError:
            raise NotYet(f"{kind.__name__} {name} is not as it should be after {timeout_s:g} s", last) from None
        raise AssertionError("a watch does not end")

    # ------------------------------------------------------------------------------------------------------------- writing

    async def create(self, thing: O, *, dry_run: bool = False, operation_id: str | None = None) -> O:
        """Raises `ApiError` (`exists`) if there is one of that name."""
        thing = self._homed(thing)
        path = collection_path(type(thing).__name__, thing.metadata.tenant)
        return await self._put(type(thing), "POST", path, _manifest(thing), {}, dry_run, operation_id)

    async def replace(
        self, thing: O, *, expect: int | None = None, dry_run: bool = False, operation_id: str | None = None
    ) -> O:
        """Create it, or put it in the place of the one that there is."""
        thing = self._homed(thing)
        path = object_path(type(thing).__name__, thing.metadata.name, thing.metadata.tenant)
        return await self._put(type(thing), "PUT", path, _manifest(thing), _expecting(expect), dry_run, operation_id)

    async def patch(
        self,
        kind: type[O],
        name: str,
        patch: Mapping[str, Any],
        *,
        tenant: str | None = None,
        expect: int | None = None,
        dry_run: bool = False,
        operation_id: str | None = None,
    ) -> O:
        """Change what `patch` names (RFC 7396): a value of None removes, lists are replaced whole."""
        path = object_path(kind.__name__, name, self._home(kind, tenant))
        return await self._put(kind, "PATCH", path, encode(patch), _expecting(expect), dry_run, operation_id, PATCH_TYPE)

    async def delete(
        self,
        kind: type[Object],
        name: str,
        *,
        tenant: str | None = None,
        expect: int | None = None,
        dry_run: bool = False,
        operation_id: str | None = None,
    ) -> DeleteAnswer:
        """`marked`: it goes once its finalizers and its replicas have; `wait` for None to see it gone."""
        path = object_path(kind.__name__, name, self._home(kind, tenant))
        return decoded(api_caller.deleted, await self._asked("DELETE", path, None, _expecting(expect), dry_run, operation_id))

    async def apply(
        self,
        things: Sequence[AnyObject],
        *,
        if_unchanged: int | None = None,
        dry_run: bool = False,
        operation_id: str | None = None,
    ) -> ApplyAnswer:
        """Create or replace many; if any of them has problems (`ApiError.problems`), none. One result each, in this order.

        `if_unchanged`: a revision, such as a plan's; if any of them was changed since, nothing is done (`precondition`).
        """
        query = {} if if_unchanged is None else {"ifUnchanged": str(if_unchanged)}
        body = self._manifests(things)
        return decoded(api_caller.applied, await self._asked("POST", "/v1/apply", body, {}, dry_run, operation_id, query=query))

    async def plan(self, things: Sequence[AnyObject]) -> PlanAnswer:
        """What an apply would do, and where what it adds would go. Nothing is written."""
        return decoded(api_caller.planned, await self._caller.read("/v1/plan", body=self._manifests(things)))

    async def claims(self, operations: Sequence[Operation]) -> Sequence[Verdict]:
        """For programs that propose: each operation has its own id (`issue`), and each its verdict."""
        body = encode({"operations": operations})
        answer = await self._caller.write("POST", "/v1/claims", body=body, operation=operations[0].id if operations else None)
        return decoded(api_caller.judged, answer).verdicts

    async def rotate_secrets(self, *, new_key: bool = False, after: str = "", forget: bool = False) -> RotateAnswer:
        """Seal secrets anew, some at a time: go on from `after` of the answer until that is empty."""
        query = {"newKey": "true" if new_key else "", "after": after, "forget": "true" if forget else ""}
        said = {name: value for name, value in query.items() if value}
        return decoded(api_caller.rotated, await self._caller.write("POST", "/v1/secrets/rotate", said))

    async def issue(self) -> OperationID:
        """A new operation id, for whoever writes it down before asking."""
        return await self._caller.issue()

    # ------------------------------------------------------------------------------------------------------------- looking

    async def status(self) -> ScopeStatus:
        return await self._caller.status(fresh=True)

    async def ready(self) -> str:
        """Empty if the server can serve; else why it cannot. Asked once."""
        try:
            answer = await self._caller.probe("/readyz")
        except LinkError as error:
            return error.cause
        problem = answer.problem()
        return "" if answer.status == 200 else problem.detail or problem.code

    async def explain(
        self, kind: type[Workload] | type[Replica], name: str, *, tenant: str | None = None, node: str = ""
    ) -> dict[str, Any]:
        """What there is to tell of it: why it waits, or why it is where it is. As `remit explain -o json`."""
        path = object_path(kind.__name__, name, self._home(kind, tenant)) + "/explain"
        return decoded(api_caller.plain, await self._caller.read(path, {"node": node}))

    async def capacity(self, workload: Workload, count: int | None = None) -> dict[str, Any]:
        """How many of it there is room for, and what stops more. As `remit capacity -o json`."""
        query = {} if count is None else {"count": str(count)}
        return decoded(api_caller.plain, await self._caller.read("/v1/capacity", query, body=_manifest(self._homed(workload))))

    def logs(
        self,
        replica: str,
        *,
        tenant: str | None = None,
        stream: Stream = "both",
        follow: bool = False,
        tail: int | None = None,
        attempt: int | None = None,
        previous: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """What a replica has written, in pieces of any size. Raises `Unanswered` if it breaks off."""
        query = {
            "stream": stream,
            "follow": "true" if follow else "",
            "tail": "" if tail is None else str(tail),
            "attempt": "" if attempt is None else str(attempt),
            "previous": "true" if previous else "",
        }
        path = object_path("Replica", replica, self._home(Replica, tenant)) + "/logs"
        return pieces_at(self._caller, path, query)

    async def read(self, path: str) -> bytes:
        """What is answered at a path, as it is."""
        return (await self._caller.read(path)).body

    def backup(self) -> AsyncGenerator[bytes, None]:
        """The whole store, as a tar in pieces of any size. Raises `Unanswered` if it breaks off."""
        return pieces_at(self._caller, "/v1/backup")

    @asynccontextmanager
    async def exec(
        self,
        replica: str,
        argv: Sequence[str],
        *,
        tenant: str | None = None,
        attempt: int = 0,
        stdin: bool = False,
        window: Window | None = None,
        terminal: str = "",
    ) -> AsyncGenerator[Session, None]:
        """Run a command beside a replica, in its surroundings; no shell reads it. Leaving ends it. With a `window` it has a
        terminal. Raises `ApiError`, and `Unanswered` if it breaks off.
        """
        begin = Begin(tuple(argv), attempt, stdin, window, terminal)
        path = object_path("Replica", replica, self._home(Replica, tenant)) + "/exec"
        async with conversed(self._caller, path, begin) as session:
            yield session

    async def endpoints(self, service: str = "", *, tenant: str | None = None) -> Listed[EndpointItem]:
        """Where serving replicas are reached: of one service, of a tenant, or of all."""
        return await listed(self._caller, self._endpoints(service, tenant))

    def watch_endpoints(
        self, service: str = "", *, tenant: str | None = None, lost: Callable[[str], None] | None = None
    ) -> AsyncGenerator[Watched[EndpointItem], None]:
        """As `watch`; each is called by its replica."""
        return Watcher(self._caller, self._endpoints(service, tenant), lost=lost).events()

    async def top_nodes(self) -> Sequence[NodeTop]:
        """What each node last said of itself."""
        return decoded(api_caller.node_tops, await self._caller.read("/v1/top/nodes")).items

    async def top_replicas(self, *, tenant: str | None = None) -> Sequence[ReplicaTop]:
        home = self._home(Replica, tenant)
        return decoded(api_caller.replica_tops, await self._caller.read("/v1/top/replicas", {"tenant": home})).items

    async def account(self, regarding: str = "", *, limit: int | None = None) -> Sequence[AccountItem]:
        """What happened, the newest last; `regarding` one object (`replica/risk/risk-api-0`), or all."""
        query = {"regarding": regarding, "limit": "" if limit is None else str(limit)}
        return decoded(api_caller.accounts, await self._caller.read("/v1/account", query)).items

    async def audit(
        self, *, tenant: str = "", subject: str = "", action: str = "", since: str = "", limit: int | None = None
    ) -> Sequence[AuditItem]:
        """Who did what, and who was refused; the newest first. Somebody of a tenant is told of that one's."""
        query = {"tenant": tenant, "subject": subject, "action": action, "since": since}
        query["limit"] = "" if limit is None else str(limit)
        return decoded(api_caller.audits, await self._caller.read("/v1/audit", query)).items

    # ------------------------------------------------------------------------------------------------------------- sources

    def _source(self, kind: type[O], tenant: str | None, labels: Selector, fields: Selector, name: str = "") -> Source[O]:
        chosen = _selector(fields)
        if name:
            chosen = f"metadata.name={name}" + (f",{chosen}" if chosen else "")
        return Source(
            kind.__name__,
            collection_path(kind.__name__, self._home(kind, tenant)),
            {"labelSelector": _selector(labels), "fieldSelector": chosen},
            api_caller.lists(kind),
            api_caller.ones(kind),
            lambda one: (one.metadata.tenant, one.metadata.name),
            lambda one: one.metadata.revision,
        )

    def _endpoints(self, service: str, tenant: str | None) -> Source[EndpointItem]:
        home = self.tenant if tenant is None else tenant
        path = f"/v1/tenants/{quote(home, safe='')}/endpoints" if home else "/v1/endpoints"
        if service:
            path += f"/{quote(service, safe='')}"
        return Source(
            "Endpoint",
            path,
            {},
            api_caller.endpoint_lists,
            api_caller.endpoint_ones,
            lambda one: (one.tenant, one.replica),
            lambda one: one,
        )

    # --------------------------------------------------------------------------------------------------------------- homes

    def _home(self, kind: type[Object], tenant: str | None) -> str:
        """Whose it is; nobody's if the kind has no tenants."""
        if kind.__name__ not in TENANTED:
            return ""
        return self.tenant if tenant is None else tenant

    def _homed(self, thing: O) -> O:
        """A tenant's own object that does not say whose it is, is ours."""
        if thing.metadata.tenant or type(thing).__name__ not in TENANTED:
            return thing
        return replace(thing, metadata=replace(thing.metadata, tenant=self.tenant))

    def _manifests(self, things: Sequence[AnyObject]) -> bytes:
        return encode([written(self._homed(thing)) for thing in things])

    async def _put(
        self,
        kind: type[O],
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        dry_run: bool,
        operation: str | None,
        media: str = "",
    ) -> O:
        answer = await self._asked(method, path, body, headers, dry_run, operation, media)
        if answer.status == 200 and b'"action"' in answer.body[:256]:
            gone = decoded(api_caller.deleted, answer)
            raise Gone(410, "gone", f"{gone.kind} {gone.name} was being deleted; with this it is gone", revision=gone.revision)
        return decoded(api_caller.ones(kind), answer)

    async def _asked(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        dry_run: bool,
        operation: str | None,
        media: str = "",
        query: Mapping[str, str] = {},
    ) -> Answered:
        if dry_run:
            tried = {**query, "dryRun": "true"}
            return await self._caller.read(path, tried, method=method, body=body, kind=media, headers=headers)
        return await self._caller.write(method, path, query, body=body, kind=media, headers=headers, operation=operation)


def _manifest(thing: AnyObject) -> bytes:
    return encode(written(thing))


def _expecting(revision: int | None) -> dict[str, str]:
    if revision is None:
        return {}
    return {"If-Match": f'"{revision}"'} if revision else {"If-None-Match": "*"}


def _selector(wanted: Selector) -> str:
    return wanted if isinstance(wanted, str) else ",".join(f"{name}={value}" for name, value in wanted.items())
