"""Fake HTTP API of a scope in memory: configs with revisions, pages, watches, operation ids and injected faults.

It covers what the client relies on; tests/integration/client/ uses the real API.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from remit.model.kinds import Config, DataSpec
from remit.model.metadata import Metadata
from tests.unit.client.raw_http import Cut, RawRequest, raw_server

TOKEN = "a-token"
Fault = Literal["cut before", "cut after", "busy", "away", "late"]


def config(name: str, text: str = "1", tenant: str = "default") -> Config:
    return Config(metadata=Metadata(name=name, tenant=tenant), spec=DataSpec(data={"text": text}))


@dataclass
class FakeApi:
    """`faults` are consumed one a request, except by watches and statuses. `done` holds the applied writes."""

    incarnation: str = "inc1"
    window: int = 7
    revision: int = 10
    oldest: int = 0
    page: int = 1_000
    rows: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    log: list[tuple[int, tuple[str, str], dict[str, Any] | None]] = field(default_factory=list)
    faults: deque[Fault] = field(default_factory=deque)
    done: list[str] = field(default_factory=list)
    outcomes: dict[str, tuple[int, Any]] = field(default_factory=dict)
    requests: list[RawRequest] = field(default_factory=list)
    silent: bool = False
    """Watches deliver no events while set."""
    ending: str = ""
    """Reason for which all watches end now."""
    watchers: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, name: str, text: str = "1", tenant: str = "default") -> int:
        self.revision += 1
        meta = {"name": name, "tenant": tenant, "revision": self.revision}
        row = {"apiVersion": "remit/v1", "kind": "Config", "metadata": meta, "spec": {"data": {"text": text}}}
        self.rows[tenant, name] = row
        self.log.append((self.revision, (tenant, name), row))
        self.wake()
        return self.revision

    def drop(self, name: str, tenant: str = "default") -> None:
        self.revision += 1
        del self.rows[tenant, name]
        self.log.append((self.revision, (tenant, name), None))
        self.wake()

    def wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def end_watches(self, why: str) -> None:
        self.ending = why
        self.wake()

    def writes(self) -> list[RawRequest]:
        return [request for request in self.requests if request.method != "GET"]

    # ------------------------------------------------------------------------------------------------------------ responses

    async def handle_one(self, request: RawRequest) -> None:
        self.requests.append(request)
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            request.problem(401, "unauthenticated", "the token is not the one of this server")
        elif request.path == "/v1/status":
            request.answer(200, {"scope": "eu", "incarnation": self.incarnation, "window": self.window, "windowMs": 60_000})
        elif request.query.get("watch") == "true":
            await self._watch(request)
        else:
            await self._faulty(request)

    async def _faulty(self, request: RawRequest) -> None:
        fault = self.faults.popleft() if self.faults else None
        match fault:
            case "cut before":
                raise Cut
            case "busy":
                request.problem(429, "overloaded", "too much", retry_after=1)
            case "away":
                request.problem(503, "unavailable", "nobody leads")
            case "cut after":
                self._answer(replace(request, writer=DiscardingWriter()))  # type: ignore[arg-type]
                raise Cut
            case "late":
                await asyncio.sleep(0.5)
                self._answer(request)
            case None:
                self._answer(request)

    def _answer(self, request: RawRequest) -> None:
        if request.method == "GET" and request.path.endswith("/configs"):
            self._list(request)
        elif request.method == "GET":
            _, _, _, tenant, _, name = request.path.split("/")
            row = self.rows.get((tenant, name))
            request.answer(200, row) if row is not None else request.problem(404, "not_found", "there is none", cure="make one")
        else:
            operation = request.headers["remit-operation-id"]
            if operation not in self.outcomes:
                self.outcomes[operation] = self._write(request, operation)
            request.answer(*self.outcomes[operation])

    def _write(self, request: RawRequest, operation: str) -> tuple[int, Any]:
        if int(operation.split(".")[1]) < self.window:
            return 409, {"status": 409, "code": "operation_expired", "detail": "too old"}
        body = msgspec.json.decode(request.body)
        tenant, name = body["metadata"]["tenant"], body["metadata"]["name"]
        if request.method == "POST" and (tenant, name) in self.rows:
            return 409, {"status": 409, "code": "exists", "detail": f"there is a {name}", "cure": "replace it"}
        self.done.append(operation)
        self.put(name, body["spec"]["data"]["text"], tenant)
        return 201, self.rows[tenant, name]

    def _list(self, request: RawRequest) -> None:
        at = int(request.query.get("continue", "").split("/")[0] or self.revision)
        after = request.query.get("continue", "").partition("/")[2]
        if at < self.oldest:
            request.problem(410, "compacted", "that revision is gone")
            return
        tenant = request.path.split("/")[3] if request.path.startswith("/v1/tenants/") else ""
        names = sorted(f"{one}/{name}" for one, name in self.rows if tenant in ("", one))
        left = [name for name in names if name > after]
        size = min(self.page, int(request.query["limit"]))
        meta: dict[str, Any] = {"revision": at}
        if len(left) > size:
            meta["continue"] = f"{at}/{left[size - 1]}"
        page = [self.rows[tuple(name.split("/"))] for name in left[:size]]  # type: ignore[index]
        request.answer(200, {"apiVersion": "remit/v1", "kind": "ConfigList", "metadata": meta, "items": page})

    async def _watch(self, request: RawRequest) -> None:
        after = int(request.query["after"])
        if after < self.oldest:
            request.problem(410, "compacted", "that revision is gone")
            return
        self.ending = ""
        self.watchers += 1
        request.begin()
        request.line({"type": "bookmark", "revision": after})
        try:
            while not self.ending:
                changed = self._changed
                for revision, (tenant, name), row in self.log:
                    if revision > after and not self.silent:
                        after = revision
                        gone = {"kind": "Config", "metadata": {"name": name, "tenant": tenant}}
                        kind = "deleted" if row is None else "changed"
                        request.line({"type": kind, "revision": revision, "object": row or gone})
                await request.writer.drain()
                await changed.wait()
        finally:
            self.watchers -= 1
        if self.ending == "cut":
            raise Cut
        request.line({"type": "resync", "reason": self.ending, "cure": "list again"})
        request.end()


class DiscardingWriter:
    """Discards a response that the client must not receive."""

    def write(self, data: bytes) -> None:
        """Drop the data."""


@asynccontextmanager
async def serving(api: FakeApi, port: int = 0) -> AsyncGenerator[str, None]:
    async with raw_server(api.handle_one, port) as url:
        yield url
