"""`bench flood`: isolation of tenants under overload.

Three load generators run against a real server. One tenant creates objects at a fixed rate, even when rejected; another
sends a moderate mix of list, get and create requests; and agents send heartbeats, one request each. Measured before, during
and after the flood.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import uvloop

from remit.assembly import component_world
from remit.bench.load.bench_processes import CLOCK, BenchProcessError, BenchProcesses, bench_processes, cpu_spent, quantile
from remit.bench.load.http_load import LoadLauncher, ServerTarget, job_manifest
from remit.bench.load.load_generator import LoadResult
from remit.bench.report import BenchAim, BenchReport, print_progress
from remit.cli.local.server import TOKEN_FILE_NAME
from remit.cli.session.token_files import generate_token
from remit.client.api import Api
from remit.client.http_link import ScopeConnection
from remit.client.rpc import EndpointCall
from remit.law.timing import Timing
from remit.model.claims import Accepted, Acquire, Actor
from remit.model.identity import expiry_after, token_digest
from remit.model.kinds import Tenant, TenantSpec, Token, TokenRole, TokenSpec
from remit.model.metadata import Metadata
from remit.model.objects import enc_hook
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from remit.model.wire.agent_messages import NodeHeartbeat, NodeState
from remit.world.randomness import RandomIds

RATE: Final = 1_000
MODERATE_PER_S: Final = 20
AGENTS: Final = 50
BEAT_MS: Final = 500
CONNECTIONS: Final = 128
P99_MS: Final = 1_000
TOKEN_MS: Final = 3_600_000
FLOODER, OTHER = "flooder", "other"
RECOVERED_SHARE: Final = 0.9
"""Part of the moderate load that must succeed after the flood."""


class FloodSizes(NamedTuple):
    calm_s: float
    flood_s: float


FULL: Final = FloodSizes(5.0, 20.0)
QUICK: Final = FloodSizes(2.0, 5.0)


class FloodSetup(NamedTuple):
    """One server with its load generators, and the tokens they use."""

    processes: BenchProcesses
    launcher: LoadLauncher
    agents: ServerTarget
    flooder: ServerTarget
    other: ServerTarget
    heartbeats: Sequence[bytes]


def measure(quick: bool, data: Path | None, rate: int = RATE) -> BenchReport:
    with (
        tempfile.TemporaryDirectory(prefix="remit-bench-", dir=data) as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_measure(QUICK if quick else FULL, Path(directory), rate))


async def _measure(sizes: FloodSizes, directory: Path, rate: int) -> BenchReport:
    async with _setup(directory) as setup:
        rows = []
        for phase, seconds, flood in (("before", sizes.calm_s, 0), ("flood", sizes.flood_s, rate), ("after", sizes.calm_s, 0)):
            print_progress(f"{phase}: for {seconds} s ...")
            rows.append(await _run_phase(setup, phase, seconds, flood))
    _, during, after = rows
    aims = [
        BenchAim("others' p99 during the flood", "ms", P99_MS, during["others_p99_ms"], "lower"),
        BenchAim("p99 of heartbeats during the flood", "ms", P99_MS, during["beats_p99_ms"], "lower"),
        BenchAim("others answered after the flood", "of all", RECOVERED_SHARE, after["others_answered"], "higher"),
        BenchAim("refused of the flood, with 429", "1", 1, during["flood_refused"], "higher"),
    ]
    return BenchReport("flood", rows, aims)


@asynccontextmanager
async def _setup(directory: Path) -> AsyncIterator[FloodSetup]:
    async with bench_processes(directory) as processes:
        data = directory / "data"
        server_process = await processes.start("server", "server", "--data", str(data), "--listen", "127.0.0.1:0")
        url = (await server_process.read_line()).partition(" at ")[2].partition(",")[0]
        async with Api(url, (data / TOKEN_FILE_NAME).read_text().strip()) as api:
            flooder, other = [await _create_tenant(api, url, name) for name in (FLOODER, OTHER)]
            nodes = tuple(f"node-{index}" for index in range(AGENTS))
            agents = await _create_token(api, url, "agent", nodes=nodes)
        yield FloodSetup(
            processes, LoadLauncher(processes, directory), agents, flooder, other, await _heartbeat_requests(agents, nodes)
        )


async def _create_tenant(api: Api, url: str, tenant: str) -> ServerTarget:
    quota = Amount({"cpu": 10**12, "memory": 10**16})
    await api.create(Tenant(metadata=Metadata(name=tenant), spec=TenantSpec(quota=quota)))
    return await _create_token(api, url, "member", tenant=tenant)


async def _create_token(api: Api, url: str, role: TokenRole, **spec_fields: Any) -> ServerTarget:
    """Create a token of this role. Returns the server with it."""
    token = generate_token(RandomIds())
    spec = TokenSpec(role=role, digest=token_digest(token), expires=expiry_after(CLOCK.wall(), TOKEN_MS), **spec_fields)
    await api.create(Token(metadata=Metadata(name=f"{role}-{spec_fields.get('tenant', 'nodes')}"), spec=spec))
    return ServerTarget(url, token)


async def _heartbeat_requests(server: ServerTarget, nodes: Sequence[str]) -> list[bytes]:
    """Return the heartbeat request of each agent."""
    async with component_world((server.url,), server.token) as connected:
        return await _build_heartbeats(server, connected, nodes)


async def _build_heartbeats(server: ServerTarget, connected: ScopeConnection, nodes: Sequence[str]) -> list[bytes]:
    client = connected.client_for(Actor("hollow", Role.AGENT))
    leases = [f"{Role.AGENT}/{name}" for name in nodes]
    ttl, requests = Duration(Timing(60_000).lease_ms), list[bytes]()
    for lease, verdict in zip(leases, await client.submit_many([Acquire(lease, ttl) for lease in leases]), strict=True):
        if not isinstance(verdict, Accepted):
            raise BenchProcessError(f"{lease}: {verdict.detail}")
        heartbeat = NodeHeartbeat(
            Actor("hollow", Role.AGENT, lease, verdict.number), NodeState(lease.partition("/")[2], client.incarnation)
        )
        requests.append(
            server.request("POST", "/v1/ask", msgspec.json.encode(EndpointCall(beats=(heartbeat,)), enc_hook=enc_hook))
        )
    return requests


async def _run_phase(setup: FloodSetup, phase: str, seconds: float, rate: int) -> dict[str, Any]:
    """Run all loads at once, for `seconds`."""
    launcher, processes = setup.launcher, setup.processes
    plans = {
        "others": (setup.other, _moderate_requests(setup.other, phase, int(seconds * MODERATE_PER_S)), 8, MODERATE_PER_S, 0.0),
        "beats": (setup.agents, setup.heartbeats, 16, AGENTS * 1_000 / BEAT_MS, seconds),
    }
    if rate:
        plans["flood"] = (setup.flooder, _flood_requests(setup.flooder, int(seconds * rate)), CONNECTIONS, rate, 0.0)
    ready = {
        name: await launcher.prepare(server, requests, connections=connections, per_s=per_s, for_s=for_s, name=name)
        for name, (server, requests, connections, per_s, for_s) in plans.items()
    }
    before = processes.cpu_s()
    for load in ready.values():
        load.start()
    results = {name: await load.result() for name, load in ready.items()}
    cpu = cpu_spent(before, processes.cpu_s())
    for load in ready.values():
        await load.stop()
    return {"what": phase, "seconds": seconds, "server_cores": cpu["server"] / seconds, **_phase_row(results)}


def _phase_row(results: dict[str, LoadResult]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in ("others", "beats"):
        result = results[name]
        waits, good = result.latencies_ms(), sum(status < 300 for status in result.status)
        row[f"{name}_answered"] = good / len(result.status)
        row |= {f"{name}_p50_ms": quantile(waits, 0.5), f"{name}_p99_ms": quantile(waits, 0.99)}
        if good < len(result.status):
            print_progress(
                f"{name}: {len(result.status) - good} of {len(result.status)} requests failed: {result.problem[-300:]}"
            )
    flood = results.get("flood")
    if flood is not None:
        span_s = (max(flood.done_ns) - min(flood.sent_ns)) / 1e9
        row["flood_per_s"] = len(flood.status) / span_s
        row["flood_created"] = sum(status == 201 for status in flood.status)
        row["flood_refused"] = sum(status == 429 for status in flood.status)
        row["flood_other"] = len(flood.status) - row["flood_created"] - row["flood_refused"]
        row["flood_p99_ms"] = quantile(flood.latencies_ms(), 0.99)
    return row


def _flood_requests(server: ServerTarget, count: int) -> list[bytes]:
    return [_create_request(server, FLOODER, f"flood-{index}", index) for index in range(count)]


def _moderate_requests(server: ServerTarget, prefix: str, count: int) -> list[bytes]:
    path = f"/v1/tenants/{OTHER}/workloads"
    reads = server.request("GET", path), server.request("GET", f"/v1/tenants/{OTHER}")
    return [
        _create_request(server, OTHER, f"{prefix}-{index}", index) if index % 3 == 0 else reads[index % 2]
        for index in range(count)
    ]


def _create_request(server: ServerTarget, tenant: str, name: str, index: int) -> bytes:
    manifest = job_manifest(name, index)
    manifest["metadata"]["tenant"] = tenant
    return server.request("POST", f"/v1/tenants/{tenant}/workloads", msgspec.json.encode(manifest))
