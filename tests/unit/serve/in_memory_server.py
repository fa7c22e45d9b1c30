"""How is a server asked in a test, without a socket? The real application and a real authority, in memory. No test here."""

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
    """One server. `complaints` are the bugs that it told of: a test that expects none looks there."""

    def __init__(self, app: Application, desk: ServerContext, one: ServerParts, store: Store) -> None:
        self.app, self.desk, self.serving, self.store = app, desk, one, store
        self.complaints: list[str] = []

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
        """`body`: bytes as they are, anything else as JSON. `pieces`: a body that comes in several, unannounced."""
        told, sent = {"content-type": "application/json"}, _body(body, pieces)
        if token is not None:
            told["authorization"] = f"Bearer {token or _usual(path)}"
        if pieces is None and sent[0]:
            told["content-length"] = str(len(sent[0]))
        elif pieces is not None:
            told["transfer-encoding"] = "chunked"
        told |= {name.lower(): value for name, value in (headers or {}).items()}
        gathered = _Gathered(sent)
        await self.app(_scope(method, path, told), gathered.receive, gathered.send)
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
            watched.left.set()
            await asyncio.wait({task}, timeout=5)
            assert task.done(), "a watch goes on although its listener has left"
            await task


class Watched:
    def __init__(self, watching: _Watching) -> None:
        self._watching = watching
        self._kept = b""

    async def next(self) -> Any:
        """The next line; None at the end."""
        async with asyncio.timeout(10):
            while b"\n" not in self._kept:
                piece = await self._watching.pieces.get()
                if piece is None:
                    return None
                self._kept += piece
        first, _, self._kept = self._kept.partition(b"\n")
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
        self.left = asyncio.Event()
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._asked = False
        self.at_once = 0
        """How often somebody wanted to send a piece so; every third time it cannot be done, as when a listener is slow."""

    def piece(self, scope: Any, data: bytes) -> bool:
        self.at_once += 1
        if self.at_once % 3 == 0:
            return False
        self.pieces.put_nowait(data)
        return True

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await self.pieces.put(message["body"])
            if not message.get("more_body", False):
                await self.pieces.put(None)


def _usual(path: str) -> str:
    """Of whoever asks there usually."""
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
    """A server that leads, and whose board has seen that."""
    world, judging = production(), ThreadOffload("judge")
    store = MemoryStore() if store is None else store
    tempo = Timing(BEAT_MS)
    one = build_server(store, world, scope="test", name="server", heartbeat_ms=BEAT_MS, term_ms=3 * BEAT_MS, timing=tempo)
    desk = ServerContext(
        one.standby, store, one.cache, one.component_service, world, cpu_offload=judging, timing=tempo, watches_max=watchers_max
    )
    asked = Api(Application(routes, desk, lambda what, error: asked.complaints.append(f"{what}: {error!r}")), desk, one, store)
    running = asyncio.ensure_future(one.run()) if lead else None
    try:
        if lead:
            async with asyncio.timeout(10):
                while one.standby.leading is None or not one.cache.is_current:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.005)
                for role, token in TOKENS.items():
                    await ensure_bootstrap_token(desk, token, role, subject=role, nodes=["n1"] if role == "agent" else ())
        yield asked
        assert not asked.complaints, asked.complaints
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait({running})
        await judging.close()
        await world.offload.close()


def story(test: Callable[[Api], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that is given a server."""

    @functools.wraps(test)
    def run() -> None:
        async def main() -> None:
            async with api() as asked:
                await test(asked)

        asyncio.run(main())

    del run.__wrapped__  # else pytest would ask for a fixture
    return run


def world_of(asked: Api) -> World:
    return asked.desk.world


def tenant(name: str = "acme", **spec: Any) -> dict[str, Any]:
    return _thing("Tenant", {"name": name}, {"quota": {"cpu": "100", "memory": "100Gi"}, **spec})


def workload(name: str, in_tenant: str = "acme", labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    template = {"command": ["/bin/serve"], "resources": {"cpu": "1", "memory": "1Gi"}}
    meta = {"name": name, "tenant": in_tenant, **({"labels": labels} if labels else {})}
    return _thing("Workload", meta, {"type": "service", "replicas": 1, "template": template, **spec})


def secret(name: str, **data: str) -> dict[str, Any]:
    return _thing("Secret", {"name": name, "tenant": "acme"}, {"data": data})


def node(name: str, **spec: Any) -> dict[str, Any]:
    return _thing("Node", {"name": name}, {"region": "eu", "zone": "eu-a", "capacity": {"cpu": "8", "memory": "32Gi"}, **spec})


def _thing(kind: str, meta: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "remit/v1", "kind": kind, "metadata": meta, "spec": spec}
