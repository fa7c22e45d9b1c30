"""Blocking variant of `Api` for programs without an event loop.

Each call runs to its end before it returns; the module starts no threads.

    with BlockingApi("http://127.0.0.1:7420", token) as api:
        for event in api.watch(Replica):
            ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Self, TypeVar

from remit.client.api import Api, O, Selector, Stream, Trust
from remit.client.watch import SILENCE_MS, ListResult, WatchUpdate
from remit.model.claims import Operation, OperationID, Verdict
from remit.model.kinds import Workload
from remit.model.metadata import Object
from remit.model.objects import AnyObject
from remit.model.records import Replica
from remit.model.wire.api_types import (
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
)

T = TypeVar("T")


class BlockingApi:
    """The calls of `Api`, blocking. It owns an event loop, so it cannot be used inside a running one. Use it from one thread
    only.

    An iterator (`watch`, `logs`) may be abandoned at any time. Closing the iterator or the client releases its connection.
    """

    def __init__(
        self,
        server: str | Sequence[str],
        token: str,
        *,
        tenant: str = "default",
        timeout_s: float = 30,
        try_s: float = 15,
        trust: Trust = Trust(),
    ) -> None:
        self._api = Api(server, token, tenant=tenant, timeout_s=timeout_s, try_s=try_s, trust=trust)
        self._runner = asyncio.Runner()
        self._open_streams: dict[int, AsyncGenerator[Any, None]] = {}

    @property
    def tenant(self) -> str:
        return self._api.tenant

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            while self._open_streams:
                self._run(_close(self._open_streams.popitem()[1]))
            self._run(self._api.close())
        finally:
            self._runner.close()

    # ------------------------------------------------------------------------------------------------------------- reading

    def get(self, kind: type[O], name: str, *, tenant: str | None = None) -> O:
        return self._run(self._api.get(kind, name, tenant=tenant))

    def list(self, kind: type[O], *, tenant: str | None = None, labels: Selector = "", fields: Selector = "") -> ListResult[O]:
        return self._run(self._api.list(kind, tenant=tenant, labels=labels, fields=fields))

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
    ) -> Generator[WatchUpdate[O], None, None]:
        events = self._api.watch(
            kind, name=name, tenant=tenant, labels=labels, fields=fields, after=after, silence_s=silence_s, lost=lost
        )
        return self._iterate(events)

    def wait(
        self,
        kind: type[O],
        name: str,
        holds: Callable[[O | None], bool],
        *,
        tenant: str | None = None,
        timeout_s: float = 60,
    ) -> O | None:
        return self._run(self._api.wait(kind, name, holds, tenant=tenant, timeout_s=timeout_s))

    # ------------------------------------------------------------------------------------------------------------- writing

    def create(self, obj: O, *, dry_run: bool = False, operation_id: str | None = None) -> O:
        return self._run(self._api.create(obj, dry_run=dry_run, operation_id=operation_id))

    def replace(self, obj: O, *, expect: int | None = None, dry_run: bool = False, operation_id: str | None = None) -> O:
        return self._run(self._api.replace(obj, expect=expect, dry_run=dry_run, operation_id=operation_id))

    def patch(
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
        return self._run(
            self._api.patch(kind, name, patch, tenant=tenant, expect=expect, dry_run=dry_run, operation_id=operation_id)
        )

    def delete(
        self,
        kind: type[Object],
        name: str,
        *,
        tenant: str | None = None,
        expect: int | None = None,
        dry_run: bool = False,
        operation_id: str | None = None,
    ) -> DeleteAnswer:
        return self._run(self._api.delete(kind, name, tenant=tenant, expect=expect, dry_run=dry_run, operation_id=operation_id))

    def apply(
        self,
        objects: Sequence[AnyObject],
        *,
        if_unchanged: int | None = None,
        dry_run: bool = False,
        operation_id: str | None = None,
    ) -> ApplyAnswer:
        return self._run(self._api.apply(objects, if_unchanged=if_unchanged, dry_run=dry_run, operation_id=operation_id))

    def plan(self, objects: Sequence[AnyObject]) -> PlanAnswer:
        return self._run(self._api.plan(objects))

    def claims(self, operations: Sequence[Operation]) -> Sequence[Verdict]:
        return self._run(self._api.claims(operations))

    def rotate_secrets(self, *, new_key: bool = False, after: str = "", forget: bool = False) -> RotateAnswer:
        return self._run(self._api.rotate_secrets(new_key=new_key, after=after, forget=forget))

    def issue(self) -> OperationID:
        return self._run(self._api.issue())

    # ------------------------------------------------------------------------------------------------------------- diagnostics

    def status(self) -> ScopeStatus:
        return self._run(self._api.status())

    def ready(self) -> str:
        return self._run(self._api.ready())

    def explain(
        self, kind: type[Workload] | type[Replica], name: str, *, tenant: str | None = None, node: str = ""
    ) -> dict[str, Any]:
        return self._run(self._api.explain(kind, name, tenant=tenant, node=node))

    def capacity(self, workload: Workload, count: int | None = None) -> dict[str, Any]:
        return self._run(self._api.capacity(workload, count))

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
    ) -> Generator[bytes, None, None]:
        chunks = self._api.logs(
            replica, tenant=tenant, stream=stream, follow=follow, tail=tail, attempt=attempt, previous=previous
        )
        return self._iterate(chunks)

    def read(self, path: str) -> bytes:
        return self._run(self._api.read(path))

    def backup(self) -> Generator[bytes, None, None]:
        return self._iterate(self._api.backup())

    def endpoints(self, service: str = "", *, tenant: str | None = None) -> ListResult[EndpointItem]:
        return self._run(self._api.endpoints(service, tenant=tenant))

    def watch_endpoints(
        self, service: str = "", *, tenant: str | None = None, lost: Callable[[str], None] | None = None
    ) -> Generator[WatchUpdate[EndpointItem], None, None]:
        return self._iterate(self._api.watch_endpoints(service, tenant=tenant, lost=lost))

    def top_nodes(self) -> Sequence[NodeTop]:
        return self._run(self._api.top_nodes())

    def top_replicas(self, *, tenant: str | None = None) -> Sequence[ReplicaTop]:
        return self._run(self._api.top_replicas(tenant=tenant))

    def account(self, regarding: str = "", *, limit: int | None = None) -> Sequence[HistoryEvent]:
        return self._run(self._api.account(regarding, limit=limit))

    def audit(
        self, *, tenant: str = "", subject: str = "", action: str = "", since: str = "", limit: int | None = None
    ) -> Sequence[AuditItem]:
        return self._run(self._api.audit(tenant=tenant, subject=subject, action=action, since=since, limit=limit))

    # ------------------------------------------------------------------------------------------------------------- event loop

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)

    def _iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Run the event loop until the next item arrives, once per item.

        Nothing runs between two items, so a slow reader applies backpressure to the server.
        """
        self._open_streams[id(items)] = items
        try:
            while True:
                try:
                    item = self._run(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if self._open_streams.pop(id(items), None) is not None:
                self._run(_close(items))


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()
