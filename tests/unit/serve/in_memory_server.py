"""The real application and a real authority in memory, queried without a socket. Contains no tests."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from remit.assembly import ServerParts, build_server
from remit.law.timing import Timing
from remit.model.kinds import TokenRole
from remit.serve.auth.enrollment import ensure_bootstrap_token
from remit.serve.http.app import Application
from remit.serve.http.route_table import ROUTES
from remit.serve.http.routes import Route
from remit.serve.server_context import ServerContext
from remit.store.memory import MemoryStore
from remit.store.protocol import Store
from remit.world.concurrency import ThreadOffload
from remit.world.interfaces import World
from remit.world.production import production

TOKEN = "a-token-of-a-test"
TOKENS: dict[TokenRole, str] = {
    "admin": TOKEN,
    "agent": "a-token-of-an-agent",
    "scheduler": "a-token-of-a-scheduler",
    "controllers": "a-token-of-controllers",
}
BEAT_MS = 100


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Api:
    """One server. `complaints` are the internal errors that it logged; a test that expects any clears them."""

    def __init__(self, app: Application, server: ServerContext, one: ServerParts, store: Store) -> None:
        self.app, self.server, self.serving, self.store = app, server, one, store
        self.internal_errors: list[str] = []

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        token: str | None = "",
        pieces: list[bytes] | None = None,
    ) -> Reply:
        """Send `body`: bytes as they are, anything else as JSON. `pieces`: a body in several chunks without a length."""
        sent_headers, sent = {"content-type": "application/json"}, _body(body, pieces)
        if token is not None:
            sent_headers["authorization"] = f"Bearer {token or _default_token(path)}"
        if pieces is None and sent[0]:
            sent_headers["content-length"] = str(len(sent[0]))
        elif pieces is not None:
            sent_headers["transfer-encoding"] = "chunked"
        sent_headers |= {name.lower(): value for name, value in (headers or {}).items()}
        gathered = _Gathered(sent)
        await self.app(_scope(method, path, sent_headers), gathered.receive, gathered.send)
        return Reply(gathered.status, gathered.headers, b"".join(gathered.body))

    async def get(self, path: str, **more: Any) -> Reply:
        return await self.ask("GET", path, **more)

    async def must(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        reply = await self.ask(method, path, body, **more)
        assert reply.status < 300, (reply.status, reply.body)
        return reply.json

    @asynccontextmanager
    async def watch(self, path: str, *, token: str = TOKEN) -> AsyncIterator[Watched]:
        watched = _Watching()
        scope = {**_scope("GET", path, {"authorization": f"Bearer {token}"}), "piece": watched.piece}
        task = asyncio.ensure_future(self.app(scope, watched.receive, watched.send))
        try:
            yield Watched(watched)
        finally:
            watched.closed.set()
            await asyncio.wait({task}, timeout=5)
            assert task.done(), "the watch continues although its client has disconnected"
            await task


class Watched:
    def __init__(self, watching: _Watching) -> None:
        self._watching = watching
        self._buffer = b""

    async def next(self) -> Any:
        """The next line; None at the end."""
        async with asyncio.timeout(10):
            while b"\n" not in self._buffer:
                piece = await self._watching.pieces.get()
                if piece is None:
                    return None
                self._buffer += piece
        first, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(first)

    @property
    def at_once(self) -> int:
        return self._watching.at_once

    async def until(self, type_: str, name: str = "") -> Any:
        while True:
            line = await self.next()
            assert line is not None, f"the watch ended before {type_} {name}"
            if line["type"] == type_ and (not name or line["object"]["metadata"]["name"] == name):
                return line


class _Gathered:
    def __init__(self, sent: list[bytes]) -> None:
        self._left = list(sent)
        self.status, self.headers, self.body = 0, dict[str, str](), list[bytes]()

    async def receive(self) -> dict[str, Any]:
        if not self._left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._left.pop(0), "more_body": bool(self._left)}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body.append(message.get("body", b""))


class _Watching:
    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._called = False
        self.at_once = 0
        """Number of attempts to send a piece directly; every third one fails, as for a slow client."""

    def piece(self, scope: Any, data: bytes) -> bool:
        self.at_once += 1
        if self.at_once % 3 == 0:
            return False
        self.pieces.put_nowait(data)
        return True

    async def receive(self) -> dict[str, Any]:
        if not self._called:
            self._called = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.closed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await self.pieces.put(message["body"])
            if not message.get("more_body", False):
                await self.pieces.put(None)


def _default_token(path: str) -> str:
    """The token that clients of this path normally use."""
    return TOKENS["controllers"] if path in ("/v1/ask", "/v1/claims", "/v1/follow") else TOKEN


def _body(body: Any, pieces: list[bytes] | None) -> list[bytes]:
    if pieces is not None:
        return pieces
    if body is None:
        return [b""]
    return [body if isinstance(body, bytes) else json.dumps(body).encode()]


def _scope(method: str, path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    bare, _, query = path.partition("?")
    return {
        "type": "http",
        "method": method,
        "path": bare,
        "raw_path": quote(bare, safe="/%").encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }


@asynccontextmanager
async def api(
    store: Store | None = None, routes: tuple[Route, ...] = ROUTES, *, watchers_max: int = 1_000, lead: bool = True
) -> AsyncIterator[Api]:
    """A server that leads and whose watch cache is current."""
    world, cpu_offload = production(), ThreadOffload("judge")
    store = MemoryStore() if store is None else store
    timing = Timing(BEAT_MS)
    one = build_server(store, world, scope="test", name="server", heartbeat_ms=BEAT_MS, term_ms=3 * BEAT_MS, timing=timing)
    server = ServerContext(
        one.standby,
        store,
        one.cache,
        one.component_service,
        world,
        cpu_offload=cpu_offload,
        timing=timing,
        watches_max=watchers_max,
    )
    client = Api(
        Application(routes, server, lambda what, error: client.internal_errors.append(f"{what}: {error!r}")), server, one, store
    )
    running = asyncio.ensure_future(one.run()) if lead else None
    try:
        if lead:
            async with asyncio.timeout(10):
                while one.standby.leading is None or not one.cache.is_current:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.005)
                for role, token in TOKENS.items():
                    await ensure_bootstrap_token(server, token, role, subject=role, nodes=["n1"] if role == "agent" else ())
        yield client
        assert not client.internal_errors, client.internal_errors
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait({running})
        await cpu_offload.close()
        await world.offload.close()


def http_test(test: Callable[[Api], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Decorate a test that takes an in-memory server."""

    @functools.wraps(test)
    def run() -> None:
        async def main() -> None:
            async with api() as client:
                await test(client)

        asyncio.run(main())

    del run.__wrapped__  # otherwise pytest would look for a fixture
    return run


def world_of(client: Api) -> World:
    return client.server.world


def tenant(name: str = "acme", **spec: Any) -> dict[str, Any]:
    return _manifest("Tenant", {"name": name}, {"quota": {"cpu": "100", "memory": "100Gi"}, **spec})


def workload(name: str, in_tenant: str = "acme", labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    template = {"command": ["/bin/serve"], "resources": {"cpu": "1", "memory": "1Gi"}}
    meta = {"name": name, "tenant": in_tenant, **({"labels": labels} if labels else {})}
    return _manifest("Workload", meta, {"type": "service", "replicas": 1, "template": template, **spec})


def secret(name: str, **data: str) -> dict[str, Any]:
    return _manifest("Secret", {"name": name, "tenant": "acme"}, {"data": data})


def node(name: str, **spec: Any) -> dict[str, Any]:
    return _manifest(
        "Node", {"name": name}, {"region": "eu", "zone": "eu-a", "capacity": {"cpu": "8", "memory": "32Gi"}, **spec}
    )


def _manifest(kind: str, meta: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "remit/v1", "kind": kind, "metadata": meta, "spec": spec}
