"""Program: many agents whose nodes start no processes.

Leases, node registration, assignments and heartbeats are real; no process is started.

    python -m remit.bench.load.hollow_agents SERVER TOKENS_FILE NODES BEAT_MS

Each agent has a token and a share of the nodes, like `remit agent` with several nodes. It holds a lease per node, sends the
heartbeats of all in one request at the scope's rate, and follows their assignments in one stream without decoding them. The
process prints `ready` once every node is registered. For `stats` on its stdin it prints heartbeat statistics. For `start` it
reports all replicas bound to its nodes as starting: otherwise they would be released after a minute and placed again, in the
middle of another run.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from remit.bench.load.bench_processes import quantile
from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.http_link import ScopeConnection, connect
from remit.law.timing import Timing
from remit.model.claims import Accepted, Acquire, Actor, Apply, Move
from remit.model.kinds import Node, NodeSpec
from remit.model.metadata import Metadata
from remit.model.records import Phase
from remit.model.resources import Amount, Duration
from remit.model.roles import Role
from remit.model.wire.agent_messages import AssignmentsRequest, NodeHeartbeat, NodeState, decode_assignments
from remit.world.interfaces import LinkError
from remit.world.production import production

ZONES: Final = ("eu-a", "eu-b", "eu-c")
CLAIM_BATCH_MAX: Final = 500
CAPACITY: Final = Amount({"cpu": 32_000, "memory": 64 << 30})


def node(index: int) -> Node:
    spec = NodeSpec(region="eu", zone=ZONES[index % len(ZONES)], capacity=CAPACITY)
    return Node(metadata=Metadata(name=f"node-{index}"), spec=spec)


def split_nodes(nodes: int, agents: int) -> list[list[Node]]:
    """Return the nodes of each agent."""
    all_nodes, share = [node(index) for index in range(nodes)], -(-nodes // agents)
    return [all_nodes[start : start + share] for start in range(0, nodes, share)]


class HollowAgent:
    """One agent with several nodes."""

    def __init__(self, connected: ScopeConnection, name: str, nodes: list[Node], timing: Timing) -> None:
        self._connected, self._name, self._nodes, self._timing = connected, name, nodes, timing
        self._client: AuthorityClient = connected.client_for(Actor(name, Role.AGENT))
        self._actors: list[Actor] = []
        self.latencies_ms: list[float] = []
        self.lost_heartbeats = 0
        self._received: list[bytes] = []

    @property
    def received(self) -> int:
        return len(self._received)

    async def register(self) -> None:
        ttl = Duration(self._timing.lease_ms)
        leases = [f"{Role.AGENT}/{node_.metadata.name}" for node_ in self._nodes]
        for lease, verdict in zip(
            leases, await self._client.submit_many([Acquire(lease, ttl) for lease in leases]), strict=True
        ):
            if not isinstance(verdict, Accepted):
                raise RuntimeError(f"{lease}: {verdict.detail}")
            self._actors.append(Actor(self._name, Role.AGENT, lease, verdict.number))
        for verdict in await self._client.submit_many([Apply(node_, expect=0) for node_ in self._nodes], actors=self._actors):
            if not isinstance(verdict, Accepted):
                raise RuntimeError(verdict.detail)

    async def run_heartbeats(self, first_ms: int) -> None:
        clock = self._connected.world.clock
        await clock.sleep_ms(first_ms)
        settled = self._client.incarnation
        heartbeats = [
            NodeHeartbeat(actor, NodeState(node_.metadata.name, settled))
            for actor, node_ in zip(self._actors, self._nodes, strict=True)
        ]
        next_ms = clock.now_ms()
        while True:
            next_ms += self._timing.heartbeat_ms
            sent_ms = clock.now_ms()
            try:
                holds, _ = await self._client.heartbeat(heartbeats, deadline_ms=2 * self._timing.heartbeat_ms)
                self.lost_heartbeats += holds.count(False) if isinstance(holds, (list, tuple)) else 0
            except RetriesExhausted:
                self.lost_heartbeats += len(heartbeats)
            self.latencies_ms.append(clock.now_ms() - sent_ms)
            await clock.sleep_ms(max(1, next_ms - clock.now_ms()))

    async def follow_assignments(self) -> None:
        request = msgspec.json.encode(AssignmentsRequest(tuple(node_.metadata.name for node_ in self._nodes)))
        while True:
            try:
                async with aclosing(self._connected.link.stream(self._connected.names[0], request)) as lines:
                    async for line in lines:
                        self._received.append(line)
            except LinkError:
                await self._connected.world.clock.sleep_ms(self._timing.heartbeat_ms)

    async def report_started(self) -> int:
        """Report all bound replicas received so far as starting. Returns how many were accepted."""
        rows = {row.key: row for line in self._received for row in decode_assignments(line).replicas}
        self._received.clear()
        bound = [row for row in rows.values() if row.replica.status.phase is Phase.BOUND]
        actors = {node_.metadata.name: actor for node_, actor in zip(self._nodes, self._actors, strict=True)}
        started = 0
        for first in range(0, len(bound), CLAIM_BATCH_MAX):
            batch = bound[first : first + CLAIM_BATCH_MAX]
            verdicts = await self._client.submit_many(
                [Move(row.key, row.revision, "start", row.replica.status.attempt) for row in batch],
                actors=[actors[row.replica.status.node] for row in batch],
            )
            started += sum(isinstance(node_, Accepted) for node_ in verdicts)
        return started


class HeartbeatStats(msgspec.Struct):
    """Heartbeat statistics of all agents."""

    beats: int
    p50_ms: float
    p99_ms: float
    lost: int
    told: int


async def main(server: str, tokens: list[str], nodes: int, beat_ms: int) -> None:
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    timing, world = Timing(beat_ms), production()
    async with AsyncExitStack() as open_, asyncio.TaskGroup() as group:
        open_.push_async_callback(world.offload.close)
        hosted = list(zip(tokens, split_nodes(nodes, len(tokens)), strict=True))
        agents = [
            HollowAgent(await open_.enter_async_context(connect((server,), token, world)), f"hollow-{index}", own_nodes, timing)
            for index, (token, own_nodes) in enumerate(hosted)
        ]
        tasks = []
        for index, agent in enumerate(agents):
            await agent.register()
            tasks += [
                group.create_task(agent.run_heartbeats(beat_ms * index // len(agents))),
                group.create_task(agent.follow_assignments()),
            ]
        _print_line("ready")
        while command := (await stdin.readline()).strip():
            if command == b"start":
                _print_line(str(sum([await agent.report_started() for agent in agents])))
                continue
            waits = [wait for agent in agents for wait in agent.latencies_ms] or [0.0]
            lost, received = sum(agent.lost_heartbeats for agent in agents), sum(agent.received for agent in agents)
            stats = HeartbeatStats(len(waits), quantile(waits, 0.5), quantile(waits, 0.99), lost, received)
            _print_line(msgspec.json.encode(stats).decode())
            for agent in agents:
                agent.latencies_ms.clear()
        for task in tasks:
            task.cancel()


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    server, tokens_file, nodes, beat_ms = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(server, Path(tokens_file).read_text().split(), int(nodes), int(beat_ms)))
