"""`bench api`: requests, watches, heartbeats.

One server on a real disk, without scheduler and controllers, under load from other processes. CPU time is that of the server
process with all its threads, from /proc, next to that of the load generator. Each agent sends its heartbeats in requests of
its own, as if every agent had its own machine.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import uvloop

from remit.assembly import component_world
from remit.bench.load.bench_processes import CLOCK, BenchProcessError, BenchProcesses, bench_processes, cpu_spent
from remit.bench.load.hollow_agents import split_nodes
from remit.bench.load.http_load import (
    TENANT,
    LoadLauncher,
    ServerTarget,
    create_requests,
    create_tokens,
    job_manifests,
    measure_echo,
    measure_load,
    measure_raw_store,
    start_server,
)
from remit.bench.report import BenchAim, BenchReport, print_progress
from remit.client.rpc import EndpointCall
from remit.law.timing import Timing
from remit.model.claims import Accepted, Acquire, Actor
from remit.model.objects import enc_hook
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.model.wire.agent_messages import NodeHeartbeat, NodeState

WATCHERS: Final = 500
AGENTS: Final = 5_000
TOKENS: Final = 50
"""Number of tokens that the agents share. The lookup costs the same for each."""
BEAT_MS: Final = 2_000
CONNECTIONS: Final = 64
LIST_LIMIT: Final = 100
CHANGES_PER_S: Final = 40
DELIVERY_MS_MAX: Final = 30_000
CPU_TICK_S: Final = 0.01
"""Resolution of CPU time. Smaller values cannot be measured."""


class ApiSizes(NamedTuple):
    creates: int
    reads_s: float
    changes: int
    beats_s: float


FULL: Final = ApiSizes(10_000, 5.0, 200, 20.0)
QUICK: Final = ApiSizes(2_000, 1.5, 60, 5.0)


def measure(quick: bool, data: Path | None) -> BenchReport:
    with (
        tempfile.TemporaryDirectory(prefix="remit-bench-", dir=data) as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_measure(QUICK if quick else FULL, Path(directory)))


async def _measure(sizes: ApiSizes, directory: Path) -> BenchReport:
    rows: list[dict[str, Any]] = [await measure_raw_store(directory / "yardstick")]
    async with bench_processes(directory) as processes:
        launcher = LoadLauncher(processes, directory)
        rows.append(await measure_echo(launcher, processes, sizes.creates))
        server = await start_server(processes, directory, BEAT_MS)
        rows += await _requests(launcher, processes, server, sizes)
        rows += await _fan_out(launcher, processes, server, sizes)
        rows.append(await _heartbeats(launcher, processes, server, sizes))
    named = {row["what"]: row for row in rows}
    heartbeats = named["heartbeats"]
    aims = [
        BenchAim(
            f"deliveries to {WATCHERS} watchers", "1/CPU-s", 45_000, named["fan-out, one at a time"]["per_cpu_s"], "higher"
        ),
        BenchAim(f"p99 of {AGENTS:,} agents' heartbeats", "ms", 200, heartbeats["p99_ms"], "lower"),
        BenchAim("processor for them", "cores", 0.5, heartbeats["cores"], "lower"),
    ]
    return BenchReport("api", rows, aims)


async def _requests(
    launcher: LoadLauncher, processes: BenchProcesses, server: ServerTarget, sizes: ApiSizes
) -> list[dict[str, Any]]:
    path = f"/v1/tenants/{TENANT}/workloads"
    print_progress(f"create: {sizes.creates:,} workloads, one request each ...")
    rows = [
        await measure_load(
            launcher,
            processes,
            server,
            "create",
            create_requests(server, job_manifests("new", sizes.creates)),
            connections=CONNECTIONS,
        )
    ]
    gets = [server.request("GET", f"{path}/new-{index}") for index in range(sizes.creates)]
    lists = [server.request("GET", f"{path}?limit={LIST_LIMIT}")]
    for name, requests in (("get", gets), (f"list, {LIST_LIMIT} at a time", lists)):
        print_progress(f"{name}: for {sizes.reads_s} s ...")
        rows.append(
            await measure_load(launcher, processes, server, name, requests, connections=CONNECTIONS, for_s=sizes.reads_s)
        )
    return rows


async def _fan_out(
    launcher: LoadLauncher, processes: BenchProcesses, server: ServerTarget, sizes: ApiSizes
) -> list[dict[str, Any]]:
    """Measure changes one at a time, each delivered to all watchers before the next; then as many as possible, which are
    batched.
    """
    path = f"/v1/tenants/{TENANT}/workloads?watch=true"
    args = server.host, str(server.port), server.token, path, str(WATCHERS)
    watchers = await processes.start("watchers", *args, module="remit.bench.load.watch_clients")
    await watchers.read_line()
    rows = []
    for name, prefix, per_s in (("fan-out, one at a time", "slow", CHANGES_PER_S), ("fan-out, a flood", "fast", 0)):
        print_progress(f"{name}: {sizes.changes} changes to {WATCHERS} watchers ...")
        load = await launcher.prepare(
            server, create_requests(server, job_manifests(prefix, sizes.changes)), connections=8, per_s=per_s
        )
        watchers.send_line("count")
        count_before, before, start = int(await watchers.read_line()), processes.cpu_s(), CLOCK.now_ns()
        load.start()
        await load.result()
        expected, until = count_before + sizes.changes * WATCHERS, CLOCK.now_ns() + DELIVERY_MS_MAX * 1_000_000
        count = count_before
        while count < expected:
            await asyncio.sleep(0.01)
            watchers.send_line("count")
            count = int(await watchers.read_line())
            if CLOCK.now_ns() > until:
                raise BenchProcessError(f"{name}: only {count - count_before} of {expected - count_before} deliveries arrived")
        cpu, seconds = cpu_spent(before, processes.cpu_s()), (CLOCK.now_ns() - start) / 1e9
        await load.stop()
        deliveries = expected - count_before
        rows.append(
            {
                "what": name,
                "deliveries": deliveries,
                "per_s": deliveries / seconds,
                "per_cpu_s": deliveries / max(cpu["server"], CPU_TICK_S),
                "server_us": cpu["server"] * 1e6 / deliveries,
                "watchers_us": cpu["watchers"] * 1e6 / deliveries,
            }
        )
    await watchers.stop()
    del processes.by_name["watchers"]
    return rows


async def _heartbeats(
    launcher: LoadLauncher, processes: BenchProcesses, server: ServerTarget, sizes: ApiSizes
) -> dict[str, Any]:
    """Measure heartbeats of all agents at the usual rate, one request per agent."""
    print_progress(f"heartbeats: {AGENTS:,} agents for {sizes.beats_s} s ...")
    node_groups = [[node.metadata.name for node in group] for group in split_nodes(AGENTS, min(TOKENS, AGENTS))]
    requests = []
    for token, nodes in zip(await create_tokens(server, [("agent", nodes) for nodes in node_groups]), node_groups, strict=True):
        agent = ServerTarget(server.url, token)
        requests += [agent.request("POST", "/v1/ask", body) for body in await _heartbeat_bodies(agent, nodes)]
    per_s = AGENTS * 1000 / BEAT_MS
    row = await measure_load(
        launcher, processes, server, "heartbeats", requests, connections=4 * CONNECTIONS, per_s=per_s, for_s=sizes.beats_s
    )
    return {**row, "cores": row["server_us"] * per_s / 1e6}  # at the nominal rate, even if the load fell behind it


async def _heartbeat_bodies(agent: ServerTarget, nodes: Sequence[str]) -> list[bytes]:
    """Acquire the leases of these nodes. Returns the heartbeat body of each."""
    async with component_world((agent.url,), agent.token) as connected:
        client = connected.client_for(Actor("hollow", Role.AGENT))
        leases = [f"{Role.AGENT}/{node}" for node in nodes]
        ttl = Duration(Timing(10 * BEAT_MS).lease_ms)
        bodies = []
        for node, lease, verdict in zip(
            nodes, leases, await client.submit_many([Acquire(lease, ttl) for lease in leases]), strict=True
        ):
            if not isinstance(verdict, Accepted):
                raise BenchProcessError(f"{lease}: {verdict.detail}")
            heartbeat = NodeHeartbeat(Actor("hollow", Role.AGENT, lease, verdict.number), NodeState(node, client.incarnation))
            bodies.append(msgspec.json.encode(EndpointCall(beats=(heartbeat,)), enc_hook=enc_hook))
    return bodies
