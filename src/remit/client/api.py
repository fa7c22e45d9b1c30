"""Typed async client of the HTTP API (`Api`, the SDK).

Requests and responses are typed objects. Retries, operation ids and deadlines are in api_caller.py.

    async with Api("http://127.0.0.1:7420", token, tenant="risk") as api:
        await api.apply([workload])
        async for event in api.watch(Replica):
            ...

A call uses the `tenant` of its `Api` unless it is given one. Calls that read several objects accept an empty tenant
(`ALL_TENANTS`), which means all tenants. `expect` is the revision that the object must have; 0 means that it must not exist
yet. Calls raise `ApiError` when the server refuses the request and `Unanswered` when no response arrived in time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, Literal, Self, TypeVar
from urllib.parse import quote

from msgspec.structs import replace

from remit.client import api_caller
from remit.client.api_caller import ApiCaller, ApiError, Unanswered, decode_response, stream_body
from remit.client.exec_session import ExecClientSession, open_exec_session
from remit.client.http_transport import HttpResponse
from remit.client.retry import RetryPolicy
from remit.client.watch import (
    SILENCE_MS,
    Bookmark,
    Changed,
    Deleted,
    ListResult,
    Synced,
    Watcher,
    WatchSource,
    WatchUpdate,
    list_all,
)
from remit.model.claims import Operation, OperationID, Verdict
from remit.model.kinds import Workload
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.validation import to_manifest
from remit.model.metadata import Object
from remit.model.objects import TENANTED, collection_path, encode, object_path
from remit.model.records import Replica
from remit.model.wire.api_types import (
    PATCH_TYPE,
    ApplyAnswer,
    AuditItem,
    DeleteAnswer,
    EndpointItem,
    HistoryEvent,
    NodeTop,
    PlanAnswer,
    ReplicaTop,
    RotateAnswer,
    ScopeStatus,
    WorkloadProgressItem,
)
from remit.model.wire.exec_frames import ExecStart, TerminalSize
from remit.world.clock import BootClock
from remit.world.interfaces import LinkError
from remit.world.net.tls import Trust
from remit.world.randomness import RandomIds, system_seeded

__all__ = [
    "ALL_TENANTS", "Api", "ApiError", "Bookmark", "Changed", "Deleted", "Gone", "ListResult", "NotYet", "Synced", "Trust",
    "Unanswered", "WatchUpdate",
]  # fmt: skip

O = TypeVar("O", bound=AnyObject)  # noqa: E741 - the usual letter for an object type
T = TypeVar("T")

Selector = str | Mapping[str, str]
"""A selector as text (`app=web,tier!=x`), or a mapping of labels to the values they must equal."""

Stream = Literal["stdout", "stderr", "both"]

ALL_TENANTS: Final = ""


class NotYet(TimeoutError):
    """The condition of `wait` did not become true in time. `last` is the last observed object; None if there was none."""

    def __init__(self, message: str, last: AnyObject | None) -> None:
        self.last = last
        super().__init__(message)


class Gone(ApiError):
    """The write succeeded and removed the object: it dropped the last finalizer of an object that was being deleted."""


class Api:
    """Client of one scope's API, at one server or at several that are tried in turn. Calls may run concurrently in one event
    loop.

    `timeout_s` bounds each call including its retries. It does not bound watches and logs, which run until the caller closes
    them. For `https://` the server's certificate must be signed by the CA in `trust` (`Trust(ca_file=...)`), or by a CA of
    the system.
    """

    def __init__(
        self, server: str | Sequence[str], token: str, *, tenant: str = "default", timeout_s: float = 30, try_s: float = 15,
        trust: Trust = Trust(),
    ) -> None:  # fmt: skip
        deadline_ms = max(1, int(timeout_s * 1000))
        self.tenant = tenant
        self._caller = ApiCaller(
            (server,) if isinstance(server, str) else server,
            token,
            RetryPolicy(deadline_ms=deadline_ms, try_ms=max(1, min(int(try_s * 1000), deadline_ms))),
            clock=BootClock(), randomness=system_seeded(), ids=RandomIds(), trust=trust,
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection. Watches that are still being read end with an error."""
        await self._caller.close()

    # ------------------------------------------------------------------------------------------------------------- reading

    async def get(self, kind: type[O], name: str, *, tenant: str | None = None) -> O:
        """Return one object. Raises `ApiError` (`not_found`) if there is none of that name."""
        answer = await self._caller.read(object_path(kind.__name__, name, self._tenant_for(kind, tenant)))
        return decode_response(api_caller.object_decoder(kind), answer)

    async def list(
        self, kind: type[O], *, tenant: str | None = None, labels: Selector = "", fields: Selector = ""
    ) -> ListResult[O]:
        """Return all matching objects as of one revision. Reads page by page and returns the complete list."""
        return await list_all(self._caller, self._source(kind, tenant, labels, fields))

    def watch(
        self,
        kind: type[O],
        *,
        name: str = "",
        tenant: str | None = None,
        labels: Selector = "",
        fields: Selector = "",
        after: ListResult[O] | int | None = None,
        silence_s: float = SILENCE_MS / 1000,
        lost: Callable[[str], None] | None = None,
    ) -> AsyncGenerator[WatchUpdate[O], None]:
        """Yield all matching objects, then `Synced`, then every change, until the caller closes the generator.

        After an interruption the watch lists again and yields only the differences, then `Synced` once more; `lost` is
        called with the reason. With `after` set to a previous `list` result, objects of that list are not repeated. With a
        bare revision, changes since that revision are yielded, but deletions only from now on.
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
        """Wait until `holds(object)` is true and return the object. `holds` gets None while there is no object. Raises
        `NotYet`.
        """
        last: O | None = None
        try:
            async with (
                self._caller.clock.timeout_ms(int(timeout_s * 1000)),
                aclosing(self.watch(kind, name=name, tenant=tenant)) as events,
            ):
                synced = False
                async for event in events:
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
            raise NotYet(f"{kind.__name__} {name} did not meet the condition within {timeout_s:g} s", last) from None
        raise AssertionError("a watch generator does not end by itself")

    # ------------------------------------------------------------------------------------------------------------- writing

    async def create(self, obj: O, *, dry_run: bool = False, operation_id: str | None = None) -> O:
        """Create an object. Raises `ApiError` (`exists`) if there already is one of that name."""
        obj = self._with_tenant(obj)
        path = collection_path(type(obj).__name__, obj.metadata.tenant)
        return await self._write_object(type(obj), "POST", path, _manifest(obj), {}, dry_run, operation_id)

    async def replace(self, obj: O, *, expect: int | None = None, dry_run: bool = False, operation_id: str | None = None) -> O:
        """Create the object, or replace the existing one."""
        obj = self._with_tenant(obj)
        path = object_path(type(obj).__name__, obj.metadata.name, obj.metadata.tenant)
        return await self._write_object(type(obj), "PUT", path, _manifest(obj), _precondition(expect), dry_run, operation_id)

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
        """Apply a JSON merge patch (RFC 7396): a value of None removes a field, lists are replaced as a unit."""
        path = object_path(kind.__name__, name, self._tenant_for(kind, tenant))
        return await self._write_object(
            kind, "PATCH", path, encode(patch), _precondition(expect), dry_run, operation_id, PATCH_TYPE
        )

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
        """Delete an object. The action `marked` means that it is removed once its finalizers and replicas are gone.

        To wait for that, call `wait` with a condition that holds for None.
        """
        path = object_path(kind.__name__, name, self._tenant_for(kind, tenant))
        return decode_response(
            api_caller.delete_decoder, await self._send("DELETE", path, None, _precondition(expect), dry_run, operation_id)
        )

    async def apply(
        self,
        objects: Sequence[AnyObject],
        *,
        if_unchanged: int | None = None,
        dry_run: bool = False,
        operation_id: str | None = None,
    ) -> ApplyAnswer:
        """Create or replace several objects; one result per object, in order. If any has problems (`ApiError.problems`), none
        is written.

        `if_unchanged` is a revision, such as that of a plan. If one of the objects was changed after it, nothing is written
        (`precondition`).
        """
        query = {} if if_unchanged is None else {"ifUnchanged": str(if_unchanged)}
        body = self._manifests(objects)
        return decode_response(
            api_caller.apply_decoder, await self._send("POST", "/v1/apply", body, {}, dry_run, operation_id, query=query)
        )

    async def plan(self, objects: Sequence[AnyObject]) -> PlanAnswer:
        """Return what an apply would change and where its new replicas would be placed. Writes nothing."""
        return decode_response(api_caller.plan_decoder, await self._caller.read("/v1/plan", body=self._manifests(objects)))

    async def claims(self, operations: Sequence[Operation]) -> Sequence[Verdict]:
        """Submit claims directly, for programs that act as schedulers or controllers. Each operation carries its own id
        (`issue`) and gets its own verdict.
        """
        body = encode({"operations": operations})
        answer = await self._caller.write("POST", "/v1/claims", body=body, operation=operations[0].id if operations else None)
        return decode_response(api_caller.verdicts_decoder, answer).verdicts

    async def rotate_secrets(self, *, new_key: bool = False, after: str = "", forget: bool = False) -> RotateAnswer:
        """Re-encrypt a batch of secrets. Call again with `after` of the answer until that is empty."""
        query = {"newKey": "true" if new_key else "", "after": after, "forget": "true" if forget else ""}
        given = {name: value for name, value in query.items() if value}
        return decode_response(api_caller.rotate_decoder, await self._caller.write("POST", "/v1/secrets/rotate", given))

    async def issue(self) -> OperationID:
        """Return a new operation id, for callers that record the id before they send the request."""
        return await self._caller.new_operation_id()

    # ------------------------------------------------------------------------------------------------------------- diagnostics

    async def status(self) -> ScopeStatus:
        """Return the state of the scope: its leader, its revision, and its nodes and replicas by phase."""
        return await self._caller.status(fresh=True)

    async def ready(self) -> str:
        """Return an empty string if the server is ready, else the reason why it is not. Sends one request without retries."""
        try:
            answer = await self._caller.probe("/readyz")
        except LinkError as error:
            return error.cause
        problem = answer.problem()
        return "" if answer.status == 200 else problem.detail or problem.code

    async def explain(
        self, kind: type[Workload] | type[Replica], name: str, *, tenant: str | None = None, node: str = ""
    ) -> dict[str, Any]:
        """Return why a workload or replica is pending, or why it was placed where it is. Same content as `remit explain -o
        json`.
        """
        path = object_path(kind.__name__, name, self._tenant_for(kind, tenant)) + "/explain"
        return decode_response(api_caller.json_object_decoder, await self._caller.read(path, {"node": node}))

    async def workload_progress(self, name: str, *, tenant: str | None = None) -> WorkloadProgressItem:
        """Return the progress of a workload and what limits it, as the server computes it from its watch cache."""
        path = object_path("Workload", name, self._tenant_for(Workload, tenant)) + "/progress"
        return decode_response(api_caller.workload_progress_decoder, await self._caller.read(path))

    async def list_workload_progress(self, *, tenant: str | None = None) -> ListResult[WorkloadProgressItem]:
        """Return the progress of each workload of a tenant, or of all tenants. Pages may be of different revisions; the result
        has the revision of the last one.
        """
        source = WatchSource(
            "WorkloadProgress",
            "/v1/workloads/progress",
            {"tenant": self._tenant_for(Workload, tenant)},
            api_caller.workload_progress_list_decoder,
            api_caller.workload_progress_decoder,
            lambda item: (item.tenant, item.name),
            lambda item: item,
        )
        return await list_all(self._caller, source)

    async def capacity(self, workload: Workload, count: int | None = None) -> dict[str, Any]:
        """Return how many replicas of a workload would fit and what limits their number. Same content as `remit capacity -o
        json`.
        """
        query = {} if count is None else {"count": str(count)}
        return decode_response(
            api_caller.json_object_decoder,
            await self._caller.read("/v1/capacity", query, body=_manifest(self._with_tenant(workload))),
        )

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
        """Yield a replica's output in chunks of any size. Raises `Unanswered` if the stream breaks off."""
        query = {
            "stream": stream,
            "follow": "true" if follow else "",
            "tail": "" if tail is None else str(tail),
            "attempt": "" if attempt is None else str(attempt),
            "previous": "true" if previous else "",
        }
        path = object_path("Replica", replica, self._tenant_for(Replica, tenant)) + "/logs"
        return stream_body(self._caller, path, query)

    async def read(self, path: str) -> bytes:
        """Return the response body at a path, undecoded."""
        return (await self._caller.read(path)).body

    def backup(self) -> AsyncGenerator[bytes, None]:
        """Yield a backup of the complete store as a tar archive in chunks of any size. Raises `Unanswered` if the stream breaks
        off.
        """
        return stream_body(self._caller, "/v1/backup")

    @asynccontextmanager
    async def exec(
        self,
        replica: str,
        argv: Sequence[str],
        *,
        tenant: str | None = None,
        attempt: int = 0,
        stdin: bool = False,
        window: TerminalSize | None = None,
        terminal: str = "",
    ) -> AsyncGenerator[ExecClientSession, None]:
        """Run a command in the environment of a running replica, without a shell. Leaving the context stops the command.

        With a `window` the command gets a terminal of that size. Raises `ApiError`, and `Unanswered` if the connection
        breaks off.
        """
        begin = ExecStart(tuple(argv), attempt, stdin, window, terminal)
        path = object_path("Replica", replica, self._tenant_for(Replica, tenant)) + "/exec"
        async with open_exec_session(self._caller, path, begin) as session:
            yield session

    async def endpoints(self, service: str = "", *, tenant: str | None = None) -> ListResult[EndpointItem]:
        """Return the addresses of serving replicas: of one service, of a tenant, or of all tenants."""
        return await list_all(self._caller, self._endpoint_source(service, tenant))

    def watch_endpoints(
        self, service: str = "", *, tenant: str | None = None, lost: Callable[[str], None] | None = None
    ) -> AsyncGenerator[WatchUpdate[EndpointItem], None]:
        """Like `watch`, for endpoints. Each endpoint is identified by its replica's name."""
        return Watcher(self._caller, self._endpoint_source(service, tenant), lost=lost).events()

    async def top_nodes(self) -> Sequence[NodeTop]:
        """Return the resource usage that each node last reported."""
        return decode_response(api_caller.node_tops_decoder, await self._caller.read("/v1/top/nodes")).items

    async def top_replicas(self, *, tenant: str | None = None) -> Sequence[ReplicaTop]:
        """Return the resource usage of each running replica, as last reported by its node."""
        home = self._tenant_for(Replica, tenant)
        return decode_response(
            api_caller.replica_tops_decoder, await self._caller.read("/v1/top/replicas", {"tenant": home})
        ).items

    async def account(self, regarding: str = "", *, limit: int | None = None) -> Sequence[HistoryEvent]:
        """Return recorded events, the newest last; only those of one object if `regarding` is given
        (`replica/risk/risk-api-0`).
        """
        query = {"regarding": regarding, "limit": "" if limit is None else str(limit)}
        return decode_response(api_caller.accounts_decoder, await self._caller.read("/v1/account", query)).items

    async def audit(
        self, *, tenant: str = "", subject: str = "", action: str = "", since: str = "", limit: int | None = None
    ) -> Sequence[AuditItem]:
        """Return audit records, the newest first, including refused requests. A token of one tenant sees only that tenant's
        records.
        """
        query = {"tenant": tenant, "subject": subject, "action": action, "since": since}
        query["limit"] = "" if limit is None else str(limit)
        return decode_response(api_caller.audits_decoder, await self._caller.read("/v1/audit", query)).items

    # ------------------------------------------------------------------------------------------------------------- sources

    def _source(self, kind: type[O], tenant: str | None, labels: Selector, fields: Selector, name: str = "") -> WatchSource[O]:
        field_selector = _selector_text(fields)
        if name:
            field_selector = f"metadata.name={name}" + (f",{field_selector}" if field_selector else "")
        return WatchSource(
            kind.__name__,
            collection_path(kind.__name__, self._tenant_for(kind, tenant)),
            {"labelSelector": _selector_text(labels), "fieldSelector": field_selector},
            api_caller.list_decoder(kind),
            api_caller.object_decoder(kind),
            lambda item: (item.metadata.tenant, item.metadata.name),
            lambda item: item.metadata.revision,
        )

    def _endpoint_source(self, service: str, tenant: str | None) -> WatchSource[EndpointItem]:
        tenant_name = self.tenant if tenant is None else tenant
        path = f"/v1/tenants/{quote(tenant_name, safe='')}/endpoints" if tenant_name else "/v1/endpoints"
        if service:
            path += f"/{quote(service, safe='')}"
        return WatchSource(
            "Endpoint",
            path,
            {},
            api_caller.endpoint_list_decoder,
            api_caller.endpoint_decoder,
            lambda item: (item.tenant, item.replica),
            lambda item: item,
        )

    # --------------------------------------------------------------------------------------------------------------- helpers

    def _tenant_for(self, kind: type[Object], tenant: str | None) -> str:
        """Return the tenant to use in a path; empty for kinds that belong to no tenant."""
        if kind.__name__ not in TENANTED:
            return ""
        return self.tenant if tenant is None else tenant

    def _with_tenant(self, obj: O) -> O:
        """Set the default tenant on an object that names none, if its kind belongs to a tenant."""
        if obj.metadata.tenant or type(obj).__name__ not in TENANTED:
            return obj
        return replace(obj, metadata=replace(obj.metadata, tenant=self.tenant))

    def _manifests(self, objects: Sequence[AnyObject]) -> bytes:
        return encode([to_manifest(self._with_tenant(obj)) for obj in objects])

    async def _write_object(
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
        answer = await self._send(method, path, body, headers, dry_run, operation, media)
        if answer.status == 200 and b'"action"' in answer.body[:256]:
            gone = decode_response(api_caller.delete_decoder, answer)
            raise Gone(410, "gone", f"{gone.kind} {gone.name} was being deleted; this write removed it", revision=gone.revision)
        return decode_response(api_caller.object_decoder(kind), answer)

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        dry_run: bool,
        operation: str | None,
        media: str = "",
        query: Mapping[str, str] = {},
    ) -> HttpResponse:
        if dry_run:
            dry_run_query = {**query, "dryRun": "true"}
            return await self._caller.read(path, dry_run_query, method=method, body=body, content_type=media, headers=headers)
        return await self._caller.write(
            method, path, query, body=body, content_type=media, headers=headers, operation=operation
        )


def _manifest(obj: AnyObject) -> bytes:
    return encode(to_manifest(obj))


def _precondition(revision: int | None) -> dict[str, str]:
    if revision is None:
        return {}
    return {"If-Match": f'"{revision}"'} if revision else {"If-None-Match": "*"}


def _selector_text(selector: Selector) -> str:
    return selector if isinstance(selector, str) else ",".join(f"{name}={value}" for name, value in selector.items())
