"""Prepared HTTP requests, load runs, baseline measurements.

Requests are encoded before a run and sent by a load generator process. Goals are set by the benchmarks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from remit.bench.load.bench_processes import CLOCK, BenchProcessError, BenchProcesses, cpu_micros, quantile, cpu_spent
from remit.bench.load.load_generator import LoadResult, LoadPlan
from remit.cli.local.server import TOKEN_NAME
from remit.cli.session.token_files import new_token
from remit.client.http_transport import HttpTransport
from remit.model.identity import Token, TokenRole, TokenSpec, token_digest, expiry_after
from remit.model.kinds import Tenant, TenantSpec
from remit.model.manifests.validation import to_manifest
from remit.model.metadata import Metadata
from remit.model.objects import AnyObject
from remit.model.policies import TenantLimits
from remit.model.resources import Amount
from remit.store.protocol import Commit
from remit.store.sqlite.store import SqliteStore
from remit.world.production import production
from remit.world.randomness import RandomIds

TENANT: Final = "bench"
SPECS: Final = 40
"""Number of distinct specs that jobs cycle through."""

LOAD_TIMEOUT_MS: Final = 300_000
COMMITS: Final = 300
ROWS: Final = 256
TOKEN_TTL_MS: Final = 86_400_000
TOKEN_CACHE_MS: Final = 500


class ServerTarget:
    """Address and token of a server."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self.url, self.token = url, token
        self.host, self.port = parts.hostname or "", parts.port or 0

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\nauthorization: Bearer {self.token}\r\n"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body


def job_manifest(name: str, index: int, *, own: bool = False) -> dict[str, Any]:
    """Return the manifest of a job with one replica and one of SHAPES specs. `own`: with a spec that no other job has."""
    shape = index % SPECS
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


def create_requests(server: ServerTarget, jobs: Iterable[dict[str, Any]]) -> list[bytes]:
    """Return one create request per job."""
    path = f"/v1/tenants/{TENANT}/workloads"
    return [server.request("POST", path, msgspec.json.encode(one)) for one in jobs]


def apply_requests(server: ServerTarget, jobs: Sequence[dict[str, Any]], each: int) -> list[bytes]:
    """Return apply requests with `each` jobs per request."""
    pieces = [jobs[start : start + each] for start in range(0, len(jobs), each)]
    return [server.request("POST", "/v1/apply", msgspec.json.encode(piece)) for piece in pieces]


class LoadLauncher:
    """Starts load generators, each in its own process. Concurrent ones need different names."""

    def __init__(self, running: BenchProcesses, directory: Path) -> None:
        self._running, self._directory, self._born = running, directory, 0

    async def ready(
        self,
        server: ServerTarget,
        requests: Sequence[bytes],
        *,
        connections: int,
        per_s: float = 0.0,
        for_s: float = 0.0,
        name: str = "load",
    ) -> LoadProcess:
        self._born += 1
        at = self._directory / f"load-{self._born}"
        at.mkdir()
        (at / "requests").write_bytes(msgspec.msgpack.encode(list(requests)))
        found = at / "found"
        plan = LoadPlan(server.host, server.port, str(at / "requests"), str(found), connections, per_s, for_s)
        (at / "plan").write_bytes(msgspec.json.encode(plan))
        part = await self._running.start(name, str(at / "plan"), module="remit.bench.load.load_generator")
        if await part.line() != "ready":
            raise BenchProcessError("the load generator did not report that it is ready")
        return LoadProcess(self._running, found, name)


class LoadProcess:
    """One load generator that waits for its start."""

    def __init__(self, running: BenchProcesses, found: Path, name: str = "load") -> None:
        self._running, self._found, self._name = running, found, name
        self._part = running.by_name[name]

    def begin(self) -> None:
        gc.collect()
        self._part.tell("go")

    async def done(self) -> LoadResult:
        await self._part.line(LOAD_TIMEOUT_MS)
        return msgspec.msgpack.decode(self._found.read_bytes(), type=LoadResult)

    async def end(self) -> None:
        """Stop the process; its name can be used again."""
        await self._part.end()
        del self._running.by_name[self._name]


async def measure_load(
    loads: LoadLauncher, running: BenchProcesses, server: ServerTarget, what: str, requests: Sequence[bytes], **how: Any
) -> dict[str, Any]:
    """Run a load. Returns a row with the request rate, latencies, and CPU time of every process per request."""
    load = await loads.ready(server, requests, **how)
    before = running.cpu_s()
    load.begin()
    found = await load.done()
    cpu = cpu_spent(before, running.cpu_s())
    await load.end()
    wrong = [status for status in found.status if status >= 300]
    if wrong:
        raise BenchProcessError(f"{what}: {len(wrong)} of {len(found.status)} requests failed with status {wrong[0]}: {found.problem}")
    count, waits = len(found.status), found.latencies_ms()
    seconds = (max(found.done_ns) - min(found.sent_ns)) / 1e9
    return {
        "what": what,
        "requests": count,
        "per_s": count / seconds,
        "p50_ms": quantile(waits, 0.5),
        "p99_ms": quantile(waits, 0.99),
        **cpu_micros(cpu, count),
    }


async def start_server(running: BenchProcesses, directory: Path, beat_ms: int) -> ServerTarget:
    """Start a server with an empty store on a real disk, and create the benchmark's tenant."""
    data = directory / "data"
    part = await running.start("server", "server", "--data", str(data), "--listen", "127.0.0.1:0", "--beat", f"{beat_ms}ms")
    url = (await part.line()).partition(" at ")[2].partition(",")[0]
    server = ServerTarget(url, (data / TOKEN_NAME).read_text().strip())
    quota = Amount({"cpu": 10**12, "memory": 10**16})
    limits = TenantLimits(workloads=10**7, replicas=10**7, bytes=1 << 40, requests_per_second=10**6, requests_burst=10**7)
    await _declare(server, [Tenant(metadata=Metadata(name=TENANT), spec=TenantSpec(quota=quota, limits=limits))])
    return server


async def create_tokens(server: ServerTarget, wanted: Sequence[tuple[TokenRole, Sequence[str]]]) -> list[str]:
    """Create tokens with these roles and nodes. Returns them once the server accepts them."""
    ids = RandomIds()
    made, declared = list[str](), list[AnyObject]()
    for role, nodes in wanted:
        made.append(new_token(ids))
        spec = TokenSpec(role=role, digest=token_digest(made[-1]), expires=expiry_after(CLOCK.wall(), TOKEN_TTL_MS), nodes=tuple(nodes))
        declared.append(Token(metadata=Metadata(name=f"bench-{role}-{ids.nonce()}"), spec=spec))
    await _declare(server, declared)
    await CLOCK.sleep_ms(TOKEN_CACHE_MS)  # the server looks tokens up in its watch cache, which lags behind the store
    return made


async def _declare(server: ServerTarget, things: Sequence[AnyObject]) -> None:
    wire = HttpTransport(server.token)
    try:
        answer = await wire.call("POST", f"{server.url}/v1/apply", msgspec.json.encode([to_manifest(thing) for thing in things]))
    finally:
        await wire.close()
    if answer.status != 200 or b'"refused"' in answer.body:
        raise BenchProcessError(f"{answer.status}: {answer.body[:300]!r}")


# ------------------------------------------------------------------------------------------------------------- baselines


async def measure_echo(loads: LoadLauncher, running: BenchProcesses, count: int) -> dict[str, Any]:
    """Measure the echo server, on the same HTTP parser and with the same load generator."""
    part = await running.start("echo", module="remit.bench.load.echo_server")
    server = ServerTarget(f"http://127.0.0.1:{int(await part.line())}", "none")
    row = await measure_load(
        loads, running, server, "yardstick: plain ASGI echo", create_requests(server, job_manifests("echo", count)), connections=64
    )
    await part.end()
    del running.by_name["echo"]
    return row


def job_manifests(prefix: str, count: int, *, own: bool = False) -> list[dict[str, Any]]:
    return [job_manifest(f"{prefix}-{index}", index, own=own) for index in range(count)]


async def measure_raw_store(directory: Path) -> dict[str, Any]:
    """Measure the raw store on the same disk with the same sync: one row per commit, and a batch per commit."""
    world = production()
    store = await SqliteStore.open(directory, offload=world.offload, holder="bench", incarnation="bench")
    value = msgspec.json.encode(job_manifest("yardstick", 0))
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
