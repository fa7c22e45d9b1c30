"""`bench api`: requests, watches, heartbeats.

One server on a real disk, asked by processes that do little else.

CPU time is the server's own, from /proc, all its threads; the load's stands beside it. Nothing else runs: no scheduler, no
controllers. A heartbeat is one request of one agent, as when each has a machine of its own.
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
from remit.bench.load.bench_processes import CLOCK, PartFailed, Parts, parts, spent
from remit.bench.load.hollow_agents import shares
from remit.bench.load.http_load import TENANT, Loads, Server, asked, commits, created, echoes, jobs, started, tokens
from remit.bench.report import Aim, Report, say
from remit.client.rpc import Call
from remit.law.timing import Tempo
from remit.model.claims import Accepted, Acquire, Actor, Role
from remit.model.objects import enc_hook
from remit.model.resources import Duration
from remit.model.wire.agent_messages import Beat, NodeState

WATCHERS: Final = 500
AGENTS: Final = 5_000
HOSTS: Final = 50
"""Tokens that they share: which one is looked up costs the same."""
BEAT_MS: Final = 2_000
CONNECTIONS: Final = 64
LISTED: Final = 100
CHANGES_PER_S: Final = 40
TOLD_MS_MAX: Final = 30_000
TICK_S: Final = 0.01
"""CPU time is counted in these: of less nothing is known."""


class Sizes(NamedTuple):
    creates: int
    reads_s: float
    changes: int
    beats_s: float


FULL: Final = Sizes(10_000, 5.0, 200, 20.0)
QUICK: Final = Sizes(2_000, 1.5, 60, 5.0)


def measure(quick: bool, data: Path | None) -> Report:
    with (
        tempfile.TemporaryDirectory(prefix="remit-bench-", dir=data) as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_measure(QUICK if quick else FULL, Path(directory)))


async def _measure(sizes: Sizes, directory: Path) -> Report:
    rows: list[dict[str, Any]] = [await commits(directory / "yardstick")]
    async with parts(directory) as running:
        loads = Loads(running, directory)
        rows.append(await echoes(loads, running, sizes.creates))
        server = await started(running, directory, BEAT_MS)
        rows += await _requests(loads, running, server, sizes)
        rows += await _fan_out(loads, running, server, sizes)
        rows.append(await _beats(loads, running, server, sizes))
    named = {row["what"]: row for row in rows}
    beats = named["heartbeats"]
    aims = [
        Aim(f"deliveries to {WATCHERS} watchers", "1/CPU-s", 45_000, named["fan-out, one at a time"]["per_cpu_s"], "higher"),
        Aim(f"p99 of {AGENTS:,} agents' heartbeats", "ms", 200, beats["p99_ms"], "lower"),
        Aim("processor for them", "cores", 0.5, beats["cores"], "lower"),
    ]
    return Report("api", rows, aims)


async def _requests(loads: Loads, running: Parts, server: Server, sizes: Sizes) -> list[dict[str, Any]]:
    at = f"/v1/tenants/{TENANT}/workloads"
    say(f"create: {sizes.creates:,} workloads, one request each ...")
    rows = [await asked(loads, running, server, "create", created(server, jobs("new", sizes.creates)), connections=CONNECTIONS)]
    gets = [server.request("GET", f"{at}/new-{index}") for index in range(sizes.creates)]
    lists = [server.request("GET", f"{at}?limit={LISTED}")]
    for what, requests in (("get", gets), (f"list, {LISTED} at a time", lists)):
        say(f"{what}: for {sizes.reads_s} s ...")
        rows.append(await asked(loads, running, server, what, requests, connections=CONNECTIONS, for_s=sizes.reads_s))
    return rows


async def _fan_out(loads: Loads, running: Parts, server: Server, sizes: Sizes) -> list[dict[str, Any]]:
    """Changes one at a time, each told to everybody before the next; and as many as can be made, which are told together."""
    path = f"/v1/tenants/{TENANT}/workloads?watch=true"
    words = server.host, str(server.port), server.token, path, str(WATCHERS)
    listening = await running.start("watchers", *words, module="remit.bench.load.watch_clients")
    await listening.line()
    rows = []
    for what, prefix, per_s in (("fan-out, one at a time", "slow", CHANGES_PER_S), ("fan-out, a flood", "fast", 0)):
        say(f"{what}: {sizes.changes} changes to {WATCHERS} watchers ...")
        load = await loads.ready(server, created(server, jobs(prefix, sizes.changes)), connections=8, per_s=per_s)
        listening.tell("count")
        known, before, start = int(await listening.line()), running.cpu_s(), CLOCK.now_ns()
        load.begin()
        await load.done()
        wanted, until = known + sizes.changes * WATCHERS, CLOCK.now_ns() + TOLD_MS_MAX * 1_000_000
        count = known
        while count < wanted:
            await asyncio.sleep(0.01)
            listening.tell("count")
            count = int(await listening.line())
            if CLOCK.now_ns() > until:
                raise PartFailed(f"{what}: {count - known} of {wanted - known} deliveries came")
        cpu, seconds = spent(before, running.cpu_s()), (CLOCK.now_ns() - start) / 1e9
        await load.end()
        told = wanted - known
        rows.append(
            {
                "what": what,
                "deliveries": told,
                "per_s": told / seconds,
                "per_cpu_s": told / max(cpu["server"], TICK_S),
                "server_us": cpu["server"] * 1e6 / told,
                "watchers_us": cpu["watchers"] * 1e6 / told,
            }
        )
    await listening.end()
    del running.by_name["watchers"]
    return rows


async def _beats(loads: Loads, running: Parts, server: Server, sizes: Sizes) -> dict[str, Any]:
    """Every agent beats at the usual rate, each by a request of its own."""
    say(f"heartbeats: {AGENTS:,} agents for {sizes.beats_s} s ...")
    hosts = [[one.metadata.name for one in host] for host in shares(AGENTS, min(HOSTS, AGENTS))]
    requests = []
    for token, nodes in zip(await tokens(server, [("agent", nodes) for nodes in hosts]), hosts, strict=True):
        agent = Server(server.url, token)
        requests += [agent.request("POST", "/v1/ask", body) for body in await _beating(agent, nodes)]
    per_s = AGENTS * 1000 / BEAT_MS
    row = await asked(
        loads, running, server, "heartbeats", requests, connections=4 * CONNECTIONS, per_s=per_s, for_s=sizes.beats_s
    )
    return {**row, "cores": row["server_us"] * per_s / 1e6}  # at the rate that was due, also where it was not held


async def _beating(agent: Server, nodes: Sequence[str]) -> list[bytes]:
    """What the agents of these nodes say, once they have their leases."""
    async with component_world((agent.url,), agent.token) as connected:
        client = connected.client_for(Actor("hollow", Role.AGENT))
        leases = [f"{Role.AGENT}/{node}" for node in nodes]
        ttl = Duration(Tempo(10 * BEAT_MS).lease_ms)
        bodies = []
        for node, lease, verdict in zip(
            nodes, leases, await client.ask_many([Acquire(lease, ttl) for lease in leases]), strict=True
        ):
            if not isinstance(verdict, Accepted):
                raise PartFailed(f"{lease}: {verdict.detail}")
            beat = Beat(Actor("hollow", Role.AGENT, lease, verdict.number), NodeState(node, client.incarnation))
            bodies.append(msgspec.json.encode(Call(beats=(beat,)), enc_hook=enc_hook))
    return bodies
