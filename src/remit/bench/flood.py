"""`bench flood`: isolation of tenants under overload.

A real server, asked by three processes at once; nothing is decided here.

One tenant creates as fast as it is told to, evenly, whatever it is answered; another asks gently, for a list, an object and a
new one in turn; and agents beat, each by a request of its own. Before the flood, during it, and after it.
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
from remit.bench.load.bench_processes import CLOCK, PartFailed, Parts, parts, quantile, spent
from remit.bench.load.http_load import Loads, Server, job
from remit.bench.load.load_generator import Found
from remit.bench.report import Aim, Report, say
from remit.cli.local.server import TOKEN_NAME
from remit.cli.session.token_files import new_token
from remit.client.api import Api
from remit.client.http_link import Connected
from remit.client.rpc import Call
from remit.law.timing import Tempo
from remit.model.claims import Accepted, Acquire, Actor, Role
from remit.model.identity import Token, TokenRole, TokenSpec, digest_of, expiry
from remit.model.kinds import Tenant, TenantSpec
from remit.model.metadata import Metadata
from remit.model.objects import enc_hook
from remit.model.resources import Amount, Duration
from remit.model.wire.agent_messages import Beat, NodeState
from remit.world.randomness import RandomIds

RATE: Final = 1_000
GENTLE_PER_S: Final = 20
AGENTS: Final = 50
BEAT_MS: Final = 500
CONNECTIONS: Final = 128
P99_MS: Final = 1_000
TOKEN_MS: Final = 3_600_000
FLOODER, OTHER = "flooder", "other"
GOODPUT: Final = 0.9
"""Of what is asked gently, so much is answered again after a flood."""


class Sizes(NamedTuple):
    calm_s: float
    flood_s: float


FULL: Final = Sizes(5.0, 20.0)
QUICK: Final = Sizes(2.0, 5.0)


class Asking(NamedTuple):
    """One server, and with whose tokens it is asked."""

    running: Parts
    loads: Loads
    agents: Server
    flooder: Server
    other: Server
    beats: Sequence[bytes]


def measure(quick: bool, data: Path | None, rate: int = RATE) -> Report:
    with (
        tempfile.TemporaryDirectory(prefix="remit-bench-", dir=data) as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_measure(QUICK if quick else FULL, Path(directory), rate))


async def _measure(sizes: Sizes, directory: Path, rate: int) -> Report:
    async with _asking(directory) as asking:
        rows = []
        for what, seconds, flood in (("before", sizes.calm_s, 0), ("flood", sizes.flood_s, rate), ("after", sizes.calm_s, 0)):
            say(f"{what}: for {seconds} s ...")
            rows.append(await _stretch(asking, what, seconds, flood))
    _, during, after = rows
    aims = [
        Aim("others' p99 during the flood", "ms", P99_MS, during["others_p99_ms"], "lower"),
        Aim("p99 of heartbeats during the flood", "ms", P99_MS, during["beats_p99_ms"], "lower"),
        Aim("others answered after the flood", "of all", GOODPUT, after["others_answered"], "higher"),
        Aim("refused of the flood, with 429", "1", 1, during["flood_refused"], "higher"),
    ]
    return Report("flood", rows, aims)


@asynccontextmanager
async def _asking(directory: Path) -> AsyncIterator[Asking]:
    async with parts(directory) as running:
        data = directory / "data"
        part = await running.start("server", "server", "--data", str(data), "--listen", "127.0.0.1:0")
        url = (await part.line()).partition(" at ")[2].partition(",")[0]
        async with Api(url, (data / TOKEN_NAME).read_text().strip()) as api:
            flooder, other = [await _member(api, url, name) for name in (FLOODER, OTHER)]
            nodes = tuple(f"node-{index}" for index in range(AGENTS))
            agents = await _holder(api, url, "agent", nodes=nodes)
        yield Asking(running, Loads(running, directory), agents, flooder, other, await _beats(agents, nodes))


async def _member(api: Api, url: str, tenant: str) -> Server:
    quota = Amount({"cpu": 10**12, "memory": 10**16})
    await api.create(Tenant(metadata=Metadata(name=tenant), spec=TenantSpec(quota=quota)))
    return await _holder(api, url, "member", tenant=tenant)


async def _holder(api: Api, url: str, role: TokenRole, **whose: Any) -> Server:
    """The server, as whoever holds a token of this role asks it."""
    token = new_token(RandomIds())
    spec = TokenSpec(role=role, digest=digest_of(token), expires=expiry(CLOCK.wall(), TOKEN_MS), **whose)
    await api.create(Token(metadata=Metadata(name=f"{role}-{whose.get('tenant', 'nodes')}"), spec=spec))
    return Server(url, token)


async def _beats(server: Server, nodes: Sequence[str]) -> list[bytes]:
    """A beat of each agent, as it is sent."""
    async with component_world((server.url,), server.token) as connected:
        return await _first_beats(server, connected, nodes)


async def _first_beats(server: Server, connected: Connected, nodes: Sequence[str]) -> list[bytes]:
    client = connected.client_for(Actor("hollow", Role.AGENT))
    leases = [f"{Role.AGENT}/{name}" for name in nodes]
    ttl, requests = Duration(Tempo(60_000).lease_ms), list[bytes]()
    for lease, verdict in zip(leases, await client.ask_many([Acquire(lease, ttl) for lease in leases]), strict=True):
        if not isinstance(verdict, Accepted):
            raise PartFailed(f"{lease}: {verdict.detail}")
        beat = Beat(Actor("hollow", Role.AGENT, lease, verdict.number), NodeState(lease.partition("/")[2], client.incarnation))
        requests.append(server.request("POST", "/v1/ask", msgspec.json.encode(Call(beats=(beat,)), enc_hook=enc_hook)))
    return requests


async def _stretch(asking: Asking, what: str, seconds: float, rate: int) -> dict[str, Any]:
    """All at once, for so long."""
    loads, running = asking.loads, asking.running
    plans = {
        "others": (asking.other, _gentle(asking.other, what, int(seconds * GENTLE_PER_S)), 8, GENTLE_PER_S, 0.0),
        "beats": (asking.agents, asking.beats, 16, AGENTS * 1_000 / BEAT_MS, seconds),
    }
    if rate:
        plans["flood"] = (asking.flooder, _creates(asking.flooder, int(seconds * rate)), CONNECTIONS, rate, 0.0)
    ready = {
        name: await loads.ready(server, requests, connections=connections, per_s=per_s, for_s=for_s, name=name)
        for name, (server, requests, connections, per_s, for_s) in plans.items()
    }
    before = running.cpu_s()
    for load in ready.values():
        load.begin()
    found = {name: await load.done() for name, load in ready.items()}
    cpu = spent(before, running.cpu_s())
    for load in ready.values():
        await load.end()
    return {"what": what, "seconds": seconds, "server_cores": cpu["server"] / seconds, **_told(found)}


def _told(found: dict[str, Found]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in ("others", "beats"):
        one = found[name]
        waits, good = one.latencies_ms(), sum(status < 300 for status in one.status)
        row[f"{name}_answered"] = good / len(one.status)
        row |= {f"{name}_p50_ms": quantile(waits, 0.5), f"{name}_p99_ms": quantile(waits, 0.99)}
        if good < len(one.status):
            say(f"{name}: {len(one.status) - good} of {len(one.status)} were not answered as asked: {one.problem[-300:]}")
    flood = found.get("flood")
    if flood is not None:
        span_s = (max(flood.done_ns) - min(flood.sent_ns)) / 1e9
        row["flood_per_s"] = len(flood.status) / span_s
        row["flood_created"] = sum(status == 201 for status in flood.status)
        row["flood_refused"] = sum(status == 429 for status in flood.status)
        row["flood_other"] = len(flood.status) - row["flood_created"] - row["flood_refused"]
        row["flood_p99_ms"] = quantile(flood.latencies_ms(), 0.99)
    return row


def _creates(server: Server, count: int) -> list[bytes]:
    return [_create(server, FLOODER, f"flood-{index}", index) for index in range(count)]


def _gentle(server: Server, prefix: str, count: int) -> list[bytes]:
    at = f"/v1/tenants/{OTHER}/workloads"
    reads = server.request("GET", at), server.request("GET", f"/v1/tenants/{OTHER}")
    return [
        _create(server, OTHER, f"{prefix}-{index}", index) if index % 3 == 0 else reads[index % 2] for index in range(count)
    ]


def _create(server: Server, tenant: str, name: str, index: int) -> bytes:
    thing = job(name, index)
    thing["metadata"]["tenant"] = tenant
    return server.request("POST", f"/v1/tenants/{tenant}/workloads", msgspec.json.encode(thing))
