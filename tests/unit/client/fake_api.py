"""A scope's HTTP API in memory: configs by tenant and name, with revisions, pages, watches and ids; and faults as told.

It knows as much of the real one as the asking side relies on; tests/integration/client/ asks the real one.
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
from tests.unit.client.raw_http import Cut, Said, raw_server

TOKEN = "a-token"
Fault = Literal["cut before", "cut after", "busy", "away", "late"]


def config(name: str, text: str = "1", tenant: str = "default") -> Config:
    return Config(metadata=Metadata(name=name, tenant=tenant), spec=DataSpec(data={"text": text}))


@dataclass
class FakeApi:
    """`faults` are used up, one a request (watches and statuses excepted). `done` are the writes that took place."""

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
    said: list[Said] = field(default_factory=list)
    silent: bool = False
    """Do watches say nothing any more?"""
    ending: str = ""
    """Why every watch is to end now."""
    watchers: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

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
        news, self._news = self._news, asyncio.Event()
        news.set()

    def end_watches(self, why: str) -> None:
        self.ending = why
        self.wake()

    def writes(self) -> list[Said]:
        return [one for one in self.said if one.method != "GET"]

    # ------------------------------------------------------------------------------------------------------------ answering

    async def handle_one(self, said: Said) -> None:
        self.said.append(said)
        if said.headers.get("authorization") != f"Bearer {TOKEN}":
            said.problem(401, "unauthenticated", "the token is not the one of this server")
        elif said.path == "/v1/status":
            said.answer(200, {"scope": "eu", "incarnation": self.incarnation, "window": self.window, "windowMs": 60_000})
        elif said.query.get("watch") == "true":
            await self._watch(said)
        else:
            await self._faulty(said)

    async def _faulty(self, said: Said) -> None:
        fault = self.faults.popleft() if self.faults else None
        match fault:
            case "cut before":
                raise Cut
            case "busy":
                said.problem(429, "overloaded", "too much", retry_after=1)
            case "away":
                said.problem(503, "unavailable", "nobody leads")
            case "cut after":
                self._answer(replace(said, writer=_Nowhere()))  # type: ignore[arg-type]
                raise Cut
            case "late":
                await asyncio.sleep(0.5)
                self._answer(said)
            case None:
                self._answer(said)

    def _answer(self, said: Said) -> None:
        if said.method == "GET" and said.path.endswith("/configs"):
            self._list(said)
        elif said.method == "GET":
            _, _, _, tenant, _, name = said.path.split("/")
            row = self.rows.get((tenant, name))
            said.answer(200, row) if row is not None else said.problem(404, "not_found", "there is none", cure="make one")
        else:
            operation = said.headers["remit-operation-id"]
            if operation not in self.outcomes:
                self.outcomes[operation] = self._write(said, operation)
            said.answer(*self.outcomes[operation])

    def _write(self, said: Said, operation: str) -> tuple[int, Any]:
        if int(operation.split(".")[1]) < self.window:
            return 409, {"status": 409, "code": "operation_expired", "detail": "too old"}
        body = msgspec.json.decode(said.body)
        tenant, name = body["metadata"]["tenant"], body["metadata"]["name"]
        if said.method == "POST" and (tenant, name) in self.rows:
            return 409, {"status": 409, "code": "exists", "detail": f"there is a {name}", "cure": "replace it"}
        self.done.append(operation)
        self.put(name, body["spec"]["data"]["text"], tenant)
        return 201, self.rows[tenant, name]

    def _list(self, said: Said) -> None:
        at = int(said.query.get("continue", "").split("/")[0] or self.revision)
        after = said.query.get("continue", "").partition("/")[2]
        if at < self.oldest:
            said.problem(410, "compacted", "that revision is gone")
            return
        tenant = said.path.split("/")[3] if said.path.startswith("/v1/tenants/") else ""
        names = sorted(f"{one}/{name}" for one, name in self.rows if tenant in ("", one))
        left = [name for name in names if name > after]
        size = min(self.page, int(said.query["limit"]))
        meta: dict[str, Any] = {"revision": at}
        if len(left) > size:
            meta["continue"] = f"{at}/{left[size - 1]}"
        wanted = [self.rows[tuple(name.split("/"))] for name in left[:size]]  # type: ignore[index]
        said.answer(200, {"apiVersion": "remit/v1", "kind": "ConfigList", "metadata": meta, "items": wanted})

    async def _watch(self, said: Said) -> None:
        after = int(said.query["after"])
        if after < self.oldest:
            said.problem(410, "compacted", "that revision is gone")
            return
        self.ending = ""
        self.watchers += 1
        said.begin()
        said.line({"type": "bookmark", "revision": after})
        try:
            while not self.ending:
                news = self._news
                for revision, (tenant, name), row in self.log:
                    if revision > after and not self.silent:
                        after = revision
                        gone = {"kind": "Config", "metadata": {"name": name, "tenant": tenant}}
                        kind = "deleted" if row is None else "changed"
                        said.line({"type": kind, "revision": revision, "object": row or gone})
                await said.writer.drain()
                await news.wait()
        finally:
            self.watchers -= 1
        if self.ending == "cut":
            raise Cut
        said.line({"type": "resync", "reason": self.ending, "cure": "list again"})
        said.end()


class _Nowhere:
    """Where an answer is written that nobody is to hear."""

    def write(self, data: bytes) -> None:
        """It is gone."""


@asynccontextmanager
async def serving(api: FakeApi, port: int = 0) -> AsyncGenerator[str, None]:
    async with raw_server(api.handle_one, port) as url:
        yield url
