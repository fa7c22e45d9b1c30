"""Prepared HTTP requests, load runs, baseline measurements.

Requests written out whole, and a load that sends them. No aims here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from remit.bench.load.bench_processes import CLOCK, PartFailed, Parts, micros, quantile, spent
from remit.bench.load.load_generator import Found, ToSend
from remit.cli.local.server import TOKEN_NAME
from remit.cli.session.token_files import new_token
from remit.client.http_transport import Wire
from remit.model.identity import Token, TokenRole, TokenSpec, digest_of, expiry
from remit.model.kinds import Tenant, TenantSpec
from remit.model.manifests.validation import written
from remit.model.metadata import Metadata
from remit.model.objects import AnyObject
from remit.model.policies import TenantLimits
from remit.model.resources import Amount
from remit.store.protocol import Commit
from remit.store.sqlite.store import SqliteStore
from remit.world.production import production
from remit.world.randomness import RandomIds

TENANT: Final = "bench"
SHAPES: Final = 40
"""Classes of jobs: so many different specs take turns."""

PATIENCE_MS: Final = 300_000
COMMITS: Final = 300
ROWS: Final = 256
TERM_MS: Final = 86_400_000
KNOWN_MS: Final = 500


class Server:
    """Where it answers, and with which token."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self.url, self.token = url, token
        self.host, self.port = parts.hostname or "", parts.port or 0

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\nauthorization: Bearer {self.token}\r\n"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body


def job(name: str, index: int, *, own: bool = False) -> dict[str, Any]:
    """A job of one replica, of one of so many shapes. `own`: no other has a spec like it."""
    shape = index % SHAPES
    resources = {"cpu": f"{20 + shape}m", "memory": f"{64 + 8 * (shape % 8)}Mi"}
    env = {"JOB": name} if own else {"MODE": "batch"}
    return {
        "apiVersion": "remit/v1",
        "kind": "Workload",
        "metadata": {"name": name, "tenant": TENANT, "labels": {"app": "bench", "shape": str(shape)}},
        "spec": {
            "type": "job",
            "replicas": 1,
            "template": {"command": ["work", "--input", "batch"], "env": env, "resources": resources},
        },
    }


def created(server: Server, jobs: Iterable[dict[str, Any]]) -> list[bytes]:
    """One request a job."""
    path = f"/v1/tenants/{TENANT}/workloads"
    return [server.request("POST", path, msgspec.json.encode(one)) for one in jobs]


def applied(server: Server, jobs: Sequence[dict[str, Any]], each: int) -> list[bytes]:
    """So many jobs a request."""
    pieces = [jobs[start : start + each] for start in range(0, len(jobs), each)]
    return [server.request("POST", "/v1/apply", msgspec.json.encode(piece)) for piece in pieces]


class Loads:
    """Starts loads, each a process of its own; several at once have names of their own."""

    def __init__(self, running: Parts, directory: Path) -> None:
        self._running, self._directory, self._born = running, directory, 0

    async def ready(
        self,
        server: Server,
        requests: Sequence[bytes],
        *,
        connections: int,
        per_s: float = 0.0,
        for_s: float = 0.0,
        name: str = "load",
    ) -> Loading:
        self._born += 1
        at = self._directory / f"load-{self._born}"
        at.mkdir()
        (at / "requests").write_bytes(msgspec.msgpack.encode(list(requests)))
        found = at / "found"
        plan = ToSend(server.host, server.port, str(at / "requests"), str(found), connections, per_s, for_s)
        (at / "plan").write_bytes(msgspec.json.encode(plan))
        part = await self._running.start(name, str(at / "plan"), module="remit.bench.load.load_generator")
        if await part.line() != "ready":
            raise PartFailed("the load does not begin as it should")
        return Loading(self._running, found, name)


class Loading:
    """One load that waits to begin."""

    def __init__(self, running: Parts, found: Path, name: str = "load") -> None:
        self._running, self._found, self._name = running, found, name
        self._part = running.by_name[name]

    def begin(self) -> None:
        gc.collect()
        self._part.tell("go")

    async def done(self) -> Found:
        await self._part.line(PATIENCE_MS)
        return msgspec.msgpack.decode(self._found.read_bytes(), type=Found)

    async def end(self) -> None:
        """Its name is free for the next."""
        await self._part.end()
        del self._running.by_name[self._name]


async def asked(
    loads: Loads, running: Parts, server: Server, what: str, requests: Sequence[bytes], **how: Any
) -> dict[str, Any]:
    """One row: how many a second were answered, and what each cost every process."""
    load = await loads.ready(server, requests, **how)
    before = running.cpu_s()
    load.begin()
    found = await load.done()
    cpu = spent(before, running.cpu_s())
    await load.end()
    wrong = [status for status in found.status if status >= 300]
    if wrong:
        raise PartFailed(f"{what}: {len(wrong)} of {len(found.status)} were answered with {wrong[0]}: {found.problem}")
    count, waits = len(found.status), found.latencies_ms()
    seconds = (max(found.done_ns) - min(found.sent_ns)) / 1e9
    return {
        "what": what,
        "requests": count,
        "per_s": count / seconds,
        "p50_ms": quantile(waits, 0.5),
        "p99_ms": quantile(waits, 0.99),
        **micros(cpu, count),
    }


async def started(running: Parts, directory: Path, beat_ms: int) -> Server:
    """A server with an empty store on a real disk, and the tenant that all is asked for."""
    data = directory / "data"
    part = await running.start("server", "server", "--data", str(data), "--listen", "127.0.0.1:0", "--beat", f"{beat_ms}ms")
    url = (await part.line()).partition(" at ")[2].partition(",")[0]
    server = Server(url, (data / TOKEN_NAME).read_text().strip())
    quota = Amount({"cpu": 10**12, "memory": 10**16})
    limits = TenantLimits(workloads=10**7, replicas=10**7, bytes=1 << 40, requests_per_second=10**6, requests_burst=10**7)
    await _declare(server, [Tenant(metadata=Metadata(name=TENANT), spec=TenantSpec(quota=quota, limits=limits))])
    return server


async def tokens(server: Server, wanted: Sequence[tuple[TokenRole, Sequence[str]]]) -> list[str]:
    """New ones of these roles, each with its nodes, once the server knows them."""
    ids = RandomIds()
    made, declared = list[str](), list[AnyObject]()
    for role, nodes in wanted:
        made.append(new_token(ids))
        spec = TokenSpec(role=role, digest=digest_of(made[-1]), expires=expiry(CLOCK.wall(), TERM_MS), nodes=tuple(nodes))
        declared.append(Token(metadata=Metadata(name=f"bench-{role}-{ids.nonce()}"), spec=spec))
    await _declare(server, declared)
    await CLOCK.sleep_ms(KNOWN_MS)  # the server looks them up on its board, which follows
    return made


async def _declare(server: Server, things: Sequence[AnyObject]) -> None:
    wire = Wire(server.token)
    try:
        answer = await wire.call("POST", f"{server.url}/v1/apply", msgspec.json.encode([written(thing) for thing in things]))
    finally:
        await wire.close()
    if answer.status != 200 or b'"refused"' in answer.body:
        raise PartFailed(f"{answer.status}: {answer.body[:300]!r}")


# ------------------------------------------------------------------------------------------------------------ yardsticks


async def echoes(loads: Loads, running: Parts, count: int) -> dict[str, Any]:
    """The plainest application on the same parser, asked by the same load."""
    part = await running.start("echo", module="remit.bench.load.echo_server")
    server = Server(f"http://127.0.0.1:{int(await part.line())}", "none")
    row = await asked(
        loads, running, server, "yardstick: plain ASGI echo", created(server, jobs("echo", count)), connections=64
    )
    await part.end()
    del running.by_name["echo"]
    return row


def jobs(prefix: str, count: int, *, own: bool = False) -> list[dict[str, Any]]:
    return [job(f"{prefix}-{index}", index, own=own) for index in range(count)]


async def commits(directory: Path) -> dict[str, Any]:
    """The raw store on the same disk, with the same sync: one row at a time, and a batch at a time."""
    world = production()
    store = await SqliteStore.open(directory, offload=world.offload, holder="bench", incarnation="bench")
    value = msgspec.json.encode(job("yardstick", 0))
    try:
        start = CLOCK.now_ns()
        for index in range(COMMITS):
            await store.commit(Commit(puts=((f"one/{index}", value),)))
        middle = CLOCK.now_ns()
        for index in range(COMMITS // 10):
            await store.commit(Commit(puts=tuple((f"many/{index}/{row}", value) for row in range(ROWS))))
        end = CLOCK.now_ns()
    finally:
        await store.close()
        await world.offload.close()
    return {
        "what": "yardstick: raw store",
        "commits_per_s": COMMITS / ((middle - start) / 1e9),
        "rows_per_s": COMMITS // 10 * ROWS / ((end - middle) / 1e9),
    }
