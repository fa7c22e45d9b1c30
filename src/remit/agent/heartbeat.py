"""Node leases, node registration, and heartbeats carrying the full node state and usage.

The processes of a node are decided on in reconciler.py.

A heartbeat carries the full state of every node at a fixed rate, so recovery costs no more than steady operation. Heartbeats
do not depend on the keeper: a keeper that does not answer cannot start or stop processes, but those it started still run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from msgspec.structs import replace

from remit.agent.assignments import WAITING_FOR_SLOT, Assignments, StartQueue
from remit.agent.attempts import AttemptId
from remit.agent.hosted_node import LeaseContinuity, HostedNode
from remit.agent.keeper.protocol import ProcessRecord, KeeperClient, ProcessUsage
from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.lease_holder import LeaseHold
from remit.law.timing import Timing
from remit.model.claims import Accepted, Acquire, Actor, Apply, Evidence, Refused, Role, Verdict
from remit.model.kinds import Node
from remit.model.resources import Duration
from remit.model.wire.agent_messages import NodeHeartbeat, NodeState, RunState
from remit.world.interfaces import LinkError, World

MEASURE_HEARTBEATS: Final = 3
"""Interval between two usage measurements, in heartbeat intervals."""


class UsageMeter:
    def __init__(self) -> None:
        self._at_ms: int | None = None
        self._last: dict[tuple[str, int], tuple[int, int]] = {}
        self._milli: dict[tuple[str, int], int] = {}

    def due(self, now_ms: int, tempo: Timing) -> bool:
        return self._at_ms is None or now_ms - self._at_ms >= MEASURE_HEARTBEATS * tempo.heartbeat_ms

    def take(self, now_ms: int, uses: Sequence[ProcessUsage]) -> None:
        passed_ms = 0 if self._at_ms is None else now_ms - self._at_ms
        last, self._last, self._milli = self._last, {}, {}
        for use in uses:
            one = use.uid, use.attempt
            self._last[one] = use.cpu_ms, use.memory_bytes
            before = last.get(one)
            if before is not None and passed_ms > 0:
                self._milli[one] = max(0, use.cpu_ms - before[0]) * 1000 // passed_ms
        self._at_ms = now_ms

    def of(self, copy: AttemptId) -> tuple[int, int]:
        """Return the CPU usage in thousandths of a processor, and the memory in bytes."""
        one = copy.uid, copy.attempt
        return self._milli.get(one, 0), self._last.get(one, (0, 0))[1]


MESSAGE_CHARS_MAX = 200


class HeartbeatSender:
    """Leases and heartbeats of all nodes an agent hosts.

    `touch(node)` schedules a reconcile of a node; `tell` writes a line for operators.
    """

    def __init__(
        self,
        world: World,
        client: AuthorityClient,
        keeping: KeeperClient,
        orders: Assignments,
        sites: Mapping[str, HostedNode],
        continuity: LeaseContinuity,
        lineup: StartQueue,
        *,
        name: str,
        tempo: Timing,
        touch: Callable[[str], None],
        tell: Callable[[str], None],
        failed: Callable[[RetriesExhausted], None] | None = None,
    ) -> None:
        self._world, self._client, self._keeping, self._orders = world, client, keeping, orders
        self._sites, self._continuity, self._name, self._tempo = sites, continuity, name, tempo
        self._lineup = lineup
        self._touch, self._tell, self._failed = touch, tell, failed
        self._meter = UsageMeter()
        self._chance = world.chance.stream(f"standing {name}")
        self._sent_ms: dict[str, int] = {}
        self._answered = asyncio.Event()
        self._refusals: dict[str, str] = {}
        self.keeper_answers = True

    async def ask(self, claims: Sequence[Any], actors: Sequence[Actor]) -> list[Verdict] | None:
        """Submit claims. Returns None if no server answered."""
        evidence = Evidence(self._orders.revision, self._orders.age_ms())
        try:
            return await self._client.submit_many(claims, evidence=evidence, actors=actors)
        except RetriesExhausted as error:
            if self._failed is not None:
                self._failed(error)
            return None

    # -- leases ----------------------------------------------------------------------------------------------------------

    async def hold(self) -> None:
        """Acquire missing leases and register nodes, until cancelled."""
        while True:
            now_ms = self._world.clock.now_ms()
            without = [site for site in self._own() if not site.may_act(now_ms)]
            if without:
                await self._acquire(without)
            if self._orders.known:
                await self._declare([site for site in self._own() if site.tenure is not None])
            pause_ms = self._tempo.heartbeat_ms // (2 if without else 1)
            await self._world.clock.sleep_ms(pause_ms // 2 + self._chance.uniform_ms(max(1, pause_ms // 2)))

    def _own(self) -> list[HostedNode]:
        return [site for site in self._sites.values() if site.node is not None]

    async def _acquire(self, sites: Sequence[HostedNode]) -> None:
        sent_ms = self._world.clock.now_ms()
        claims = [Acquire(site.lease, Duration(self._tempo.lease_ms)) for site in sites]
        verdicts = await self.ask(claims, [Actor(self._name, Role.AGENT)] * len(sites))
        taken: dict[str, int] = {}
        since: dict[str, int] = {}
        for site, verdict in zip(sites, verdicts or (), strict=False):
            self._refused(site.lease, verdict)
            if isinstance(verdict, Accepted):
                taken[site.name], since[site.name] = verdict.number, verdict.revision
        follows = await self._continuity.took_over(taken)
        for name, epoch in taken.items():
            site, now_ms = self._sites[name], self._world.clock.now_ms()
            site.mind.took_over(now_ms, follows=name in follows, revision=since[name])
            site.tenure = LeaseHold(Actor(self._name, Role.AGENT, site.lease, epoch), self._tempo.lease_ms, sent_ms)
        self._renewed(dict.fromkeys(taken, sent_ms))
        for name in taken:
            self._touch(name)

    async def _declare(self, sites: Sequence[HostedNode]) -> None:
        """Register nodes that do not exist yet or whose capacity, devices or address changed. Fields set by operators stay as
        they are.
        """
        claims: list[Apply] = []
        actors: list[Actor] = []
        for site in sites:
            declared = None if site.node is None else _registration(site.node, self._orders.node(site.name))
            if declared is not None and site.tenure is not None:
                claims.append(declared)
                actors.append(site.tenure.actor)
        for claim, verdict in zip(claims, await self.ask(claims, actors) or () if claims else (), strict=False):
            self._refused(f"node {claim.thing.metadata.name}", verdict)

    def _refused(self, what: str, verdict: Verdict) -> None:
        """Log a refusal once per reason, because an operator may have to act on it. Refusals that resolve themselves are not
        logged.
        """
        code = f"{verdict.code}" if isinstance(verdict, Refused) else ""
        if isinstance(verdict, Refused) and code != self._refusals.get(what) and code not in _TRANSIENT_REFUSALS:
            self._tell(f"{what}: {verdict.detail}")
        self._refusals[what] = code

    # -- heartbeats ------------------------------------------------------------------------------------------------------------

    async def beat(self) -> None:
        """Send heartbeats at a fixed rate, until cancelled."""
        while True:
            began_ms = self._world.clock.now_ms()
            waiting = self._lineup.waiting()
            beats = [beat for site in self._own() if (beat := self._state(site, waiting.get(site.name, ()))) is not None]
            if beats:
                await self._say_how_it_is(beats)
            passed_ms = self._world.clock.now_ms() - began_ms
            await self._world.clock.sleep_ms(
                max(1, self._tempo.heartbeat_ms - passed_ms - self._chance.uniform_ms(self._tempo.heartbeat_ms // 16))
            )

    async def _say_how_it_is(self, beats: Sequence[NodeHeartbeat]) -> None:
        try:
            held, sent_ms = await self._client.heartbeat(beats, deadline_ms=max(500, 2 * self._tempo.heartbeat_ms))
        except RetriesExhausted:
            return
        renewed = {}
        for beat, mine in zip(beats, held, strict=True):
            site = self._sites[beat.state.node]
            if site.tenure is None or site.tenure.actor != beat.actor:
                continue
            if mine:
                could_act = site.may_act(self._world.clock.now_ms())
                site.tenure.on_renewed(sent_ms)
                renewed[site.name] = sent_ms
                if not could_act:  # what changed while the lease was not held could not be reported: reconcile again
                    self._touch(site.name)
            else:
                site.tenure.mark_lost()
        self._renewed(renewed)

    def _state(self, site: HostedNode, waiting: Sequence[AttemptId]) -> NodeHeartbeat | None:
        if site.tenure is None:
            return None
        alive = [kept for kept in site.kept.values() if kept.alive]
        incarnation = self._orders.incarnation
        if site.settled != incarnation and all(site.mind.ordered(self._orders, kept.copy) for kept in alive):
            site.settled = incarnation
        runs = tuple(self._run(site, kept) for kept in alive)
        if site.mind.making:
            runs += tuple(
                RunState(*copy, said=one.said[:MESSAGE_CHARS_MAX])
                for copy, one in site.mind.making.items()
                if not one.is_over and not ((kept := site.kept.get(copy)) is not None and kept.alive)
            )
        runs += tuple(RunState(*copy, said=WAITING_FOR_SLOT) for copy in waiting if site.mind.wanted(self._orders, copy))
        cpu, memory = sum(run.cpu_milli for run in runs), sum(run.memory_bytes for run in runs)
        settled = incarnation if site.settled == incarnation else ""
        return NodeHeartbeat(site.tenure.actor, NodeState(site.name, settled, cpu, memory, runs))

    def _run(self, site: HostedNode, kept: ProcessRecord) -> RunState:
        cpu_milli, memory = self._meter.of(kept.copy)
        course = site.mind.courses.get(kept.copy)
        said = course.health.said[:MESSAGE_CHARS_MAX] if course is not None and course.health is not None else ""
        return RunState(kept.key, kept.uid, kept.attempt, kept.pid, kept.number, cpu_milli, memory, said)

    async def measure(self) -> None:
        """Measure resource usage, until cancelled. A task of its own, so that a stopped keeper delays no heartbeat."""
        while True:
            await self._measure(self._world.clock.now_ms())
            await self._world.clock.sleep_ms(self._tempo.heartbeat_ms)

    async def _measure(self, now_ms: int) -> None:
        if self.keeper_answers and self._meter.due(now_ms, self._tempo) and any(site.kept for site in self._sites.values()):
            with suppress(LinkError):
                self._meter.take(now_ms, await self._keeping.uses(within_ms=self._tempo.heartbeat_ms))

    # -- forwarding renewals to the keeper
    # --------------------------------------------------------------------------------------

    def _renewed(self, sent_ms: Mapping[str, int]) -> None:
        for name, at_ms in sent_ms.items():
            self._sites[name].mind.renewed(at_ms)
        if sent_ms:
            self._sent_ms |= sent_ms
            self._answered.set()

    async def pass_on(self) -> None:
        """Forward accepted renewals to the keeper, until cancelled. A task of its own, so that a stopped keeper delays no
        heartbeat.
        """
        while True:
            await self._answered.wait()
            self._answered.clear()
            sent_ms, self._sent_ms = self._sent_ms, {}
            try:
                await self._keeping.renewed(sent_ms, within_ms=2 * self._tempo.heartbeat_ms)
                answers = True
            except LinkError:
                self._sent_ms = {**sent_ms, **self._sent_ms}
                answers = False
            if answers != self.keeper_answers:
                self.keeper_answers = answers
                self._tell(
                    "the keeper answers again"
                    if answers
                    else "the keeper does not answer: no process can be started or stopped until it does"
                )
                for name in self._sites:
                    self._touch(name)


_TRANSIENT_REFUSALS = frozenset({"revision", "exists", "stale_epoch", "lease_expired"})
"""Refusals that the next attempt resolves by itself."""


def _registration(node: Node, found: tuple[Node, int] | None) -> Apply | None:
    if found is None:
        return Apply(node, expect=0)
    there, revision = found
    own, spec = node.spec, there.spec
    wanted = replace(spec, capacity=own.capacity, devices=own.devices, address=own.address, port=own.port)
    if wanted == spec or there.metadata.deleting:
        return None
    return Apply(replace(there, spec=wanted), expect=revision)
