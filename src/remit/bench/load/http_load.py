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

from remit.bench.load.bench_processes import CLOCK, BenchProcessError, BenchProcesses, cpu_micros, cpu_spent, quantile
from remit.bench.load.load_generator import LoadPlan, LoadResult
from remit.cli.local.server import TOKEN_FILE_NAME
from remit.cli.session.token_files import generate_token
from remit.client.http_transport import HttpTransport
from remit.model.identity import expiry_after, token_digest
from remit.model.kinds import Tenant, TenantLimits, TenantSpec, Token, TokenRole, TokenSpec
from remit.model.kinds.registry import AnyObject
from remit.model.manifests.validation import to_manifest
from remit.model.metadata import Metadata
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
        parsed = urlsplit(url)
        self.url, self.token = url, token
        self.host, self.port = parsed.hostname or "", parsed.port or 0

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\nauthorization: Bearer {self.token}\r\n"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body


def job_manifest(name: str, index: int, *, unique: bool = False) -> dict[str, Any]:
    """Return the manifest of a job with one replica and one of SPECS specs. `unique`: with a spec that no other job has."""
    shape = index % SPECS
    resources = {"cpu": f"{20 + shape}m", "memory": f"{64 + 8 * (shape % 8)}Mi"}
    env = {"JOB": name} if unique else {"MODE": "batch"}
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


def create_requests(server: ServerTarget, manifests: Iterable[dict[str, Any]]) -> list[bytes]:
    """Return one create request per job."""
    path = f"/v1/tenants/{TENANT}/workloads"
    return [server.request("POST", path, msgspec.json.encode(manifest)) for manifest in manifests]


def apply_requests(server: ServerTarget, manifests: Sequence[dict[str, Any]], per_request: int) -> list[bytes]:
    """Return apply requests with `per_request` jobs in each."""
    pieces = [manifests[start : start + per_request] for start in range(0, len(manifests), per_request)]
    return [server.request("POST", "/v1/apply", msgspec.json.encode(piece)) for piece in pieces]


class LoadLauncher:
    """Starts load generators, each in its own process. Concurrent ones need different names."""

    def __init__(self, processes: BenchProcesses, directory: Path) -> None:
        self._processes, self._directory, self._count = processes, directory, 0

    async def prepare(
        self,
        server: ServerTarget,
        requests: Sequence[bytes],
        *,
        connections: int,
        per_s: float = 0.0,
        for_s: float = 0.0,
        name: str = "load",
    ) -> LoadProcess:
        self._count += 1
        directory = self._directory / f"load-{self._count}"
        directory.mkdir()
        (directory / "requests").write_bytes(msgspec.msgpack.encode(list(requests)))
        result_file = directory / "found"
        plan = LoadPlan(server.host, server.port, str(directory / "requests"), str(result_file), connections, per_s, for_s)
        (directory / "plan").write_bytes(msgspec.json.encode(plan))
        process = await self._processes.start(name, str(directory / "plan"), module="remit.bench.load.load_generator")
        if await process.read_line() != "ready":
            raise BenchProcessError("the load generator did not report that it is ready")
        return LoadProcess(self._processes, result_file, name)


class LoadProcess:
    """One load generator that waits for its start."""

    def __init__(self, processes: BenchProcesses, result_file: Path, name: str = "load") -> None:
        self._processes, self._result_file, self._name = processes, result_file, name
        self._process = processes.by_name[name]

    def start(self) -> None:
        gc.collect()
        self._process.send_line("go")

    async def result(self) -> LoadResult:
        await self._process.read_line(LOAD_TIMEOUT_MS)
        return msgspec.msgpack.decode(self._result_file.read_bytes(), type=LoadResult)

    async def stop(self) -> None:
        """Stop the process; its name can be used again."""
        await self._process.stop()
        del self._processes.by_name[self._name]


async def measure_load(
    launcher: LoadLauncher,
    processes: BenchProcesses,
    server: ServerTarget,
    name: str,
    requests: Sequence[bytes],
    **load_options: Any,
) -> dict[str, Any]:
    """Run a load. Returns a row with the request rate, latencies, and CPU time of every process per request."""
    load = await launcher.prepare(server, requests, **load_options)
    before = processes.cpu_s()
    load.start()
    result = await load.result()
    cpu = cpu_spent(before, processes.cpu_s())
    await load.stop()
    failures = [status for status in result.status if status >= 300]
    if failures:
        raise BenchProcessError(
            f"{name}: {len(failures)} of {len(result.status)} requests failed with status {failures[0]}: {result.problem}"
        )
    count, waits = len(result.status), result.latencies_ms()
    seconds = (max(result.done_ns) - min(result.sent_ns)) / 1e9
    return {
        "what": name,
        "requests": count,
        "per_s": count / seconds,
        "p50_ms": quantile(waits, 0.5),
        "p99_ms": quantile(waits, 0.99),
        **cpu_micros(cpu, count),
    }


async def start_server(processes: BenchProcesses, directory: Path, beat_ms: int) -> ServerTarget:
    """Start a server with an empty store on a real disk, and create the benchmark's tenant."""
    data = directory / "data"
    process = await processes.start(
        "server", "server", "--data", str(data), "--listen", "127.0.0.1:0", "--heartbeat-interval", f"{beat_ms}ms"
    )
    url = (await process.read_line()).partition(" at ")[2].partition(",")[0]
    server = ServerTarget(url, (data / TOKEN_FILE_NAME).read_text().strip())
    quota = Amount({"cpu": 10**12, "memory": 10**16})
    limits = TenantLimits(workloads=10**7, replicas=10**7, bytes=1 << 40, requests_per_second=10**6, requests_burst=10**7)
    await _declare(server, [Tenant(metadata=Metadata(name=TENANT), spec=TenantSpec(quota=quota, limits=limits))])
    return server


async def create_tokens(server: ServerTarget, specs: Sequence[tuple[TokenRole, Sequence[str]]]) -> list[str]:
    """Create tokens with these roles and nodes. Returns them once the server accepts them."""
    ids = RandomIds()
    tokens, declared = list[str](), list[AnyObject]()
    for role, nodes in specs:
        tokens.append(generate_token(ids))
        spec = TokenSpec(
            role=role, digest=token_digest(tokens[-1]), expires=expiry_after(CLOCK.wall(), TOKEN_TTL_MS), nodes=tuple(nodes)
        )
        declared.append(Token(metadata=Metadata(name=f"bench-{role}-{ids.nonce()}"), spec=spec))
    await _declare(server, declared)
    await CLOCK.sleep_ms(TOKEN_CACHE_MS)  # the server looks tokens up in its watch cache, which lags behind the store
    return tokens


async def _declare(server: ServerTarget, objects: Sequence[AnyObject]) -> None:
    transport = HttpTransport(server.token)
    try:
        response = await transport.call(
            "POST", f"{server.url}/v1/apply", msgspec.json.encode([to_manifest(obj) for obj in objects])
        )
    finally:
        await transport.close()
    if response.status != 200 or b'"refused"' in response.body:
        raise BenchProcessError(f"{response.status}: {response.body[:300]!r}")


# ------------------------------------------------------------------------------------------------------------- baselines


async def measure_echo(launcher: LoadLauncher, processes: BenchProcesses, count: int) -> dict[str, Any]:
    """Measure the echo server, on the same HTTP parser and with the same load generator."""
    process = await processes.start("echo", module="remit.bench.load.echo_server")
    server = ServerTarget(f"http://127.0.0.1:{int(await process.read_line())}", "none")
    row = await measure_load(
        launcher,
        processes,
        server,
        "yardstick: plain ASGI echo",
        create_requests(server, job_manifests("echo", count)),
        connections=64,
    )
    await process.stop()
    del processes.by_name["echo"]
    return row


def job_manifests(prefix: str, count: int, *, unique: bool = False) -> list[dict[str, Any]]:
    return [job_manifest(f"{prefix}-{index}", index, unique=unique) for index in range(count)]


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
