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
        self._measured_ms: int | None = None
        self._last: dict[tuple[str, int], tuple[int, int]] = {}
        self._cpu_milli: dict[tuple[str, int], int] = {}

    def is_due(self, now_ms: int, tempo: Timing) -> bool:
        return self._measured_ms is None or now_ms - self._measured_ms >= MEASURE_HEARTBEATS * tempo.heartbeat_ms

    def record(self, now_ms: int, uses: Sequence[ProcessUsage]) -> None:
        passed_ms = 0 if self._measured_ms is None else now_ms - self._measured_ms
        last, self._last, self._cpu_milli = self._last, {}, {}
        for use in uses:
            one = use.uid, use.attempt
            self._last[one] = use.cpu_ms, use.memory_bytes
            before = last.get(one)
            if before is not None and passed_ms > 0:
                self._cpu_milli[one] = max(0, use.cpu_ms - before[0]) * 1000 // passed_ms
        self._measured_ms = now_ms

    def usage_of(self, copy: AttemptId) -> tuple[int, int]:
        """Return the CPU usage in thousandths of a processor, and the memory in bytes."""
        one = copy.uid, copy.number
        return self._cpu_milli.get(one, 0), self._last.get(one, (0, 0))[1]


MESSAGE_CHARS_MAX = 200


class HeartbeatSender:
    """Leases and heartbeats of all nodes an agent hosts.

    `touch(node)` schedules a reconcile of a node; `tell` writes a line for operators.
    """

    def __init__(
        self,
        world: World,
        client: AuthorityClient,
        keeper: KeeperClient,
        assignments: Assignments,
        nodes: Mapping[str, HostedNode],
        continuity: LeaseContinuity,
        start_queue: StartQueue,
        *,
        name: str,
        timing: Timing,
        enqueue: Callable[[str], None],
        log: Callable[[str], None],
        on_failure: Callable[[RetriesExhausted], None] | None = None,
    ) -> None:
        self._world, self._client, self._keeper, self._assignments = world, client, keeper, assignments
        self._nodes, self._continuity, self._name, self._timing = nodes, continuity, name, timing
        self._start_queue = start_queue
        self._enqueue, self._log, self._on_failure = enqueue, log, on_failure
        self._usage = UsageMeter()
        self._rng = world.randomness.stream(f"standing {name}")
        self._renewed_ms: dict[str, int] = {}
        self._renewals_pending = asyncio.Event()
        self._refusals: dict[str, str] = {}
        self.keeper_is_reachable = True

    async def submit(self, claims: Sequence[Any], actors: Sequence[Actor]) -> list[Verdict] | None:
        """Submit claims. Returns None if no server answered."""
        evidence = Evidence(self._assignments.revision, self._assignments.age_ms())
        try:
            return await self._client.submit_many(claims, evidence=evidence, actors=actors)
        except RetriesExhausted as error:
            if self._on_failure is not None:
                self._on_failure(error)
            return None

    # -- leases ----------------------------------------------------------------------------------------------------------

    async def run_leases(self) -> None:
        """Acquire missing leases and register nodes, until cancelled."""
        while True:
            now_ms = self._world.clock.now_ms()
            without = [site for site in self._registered() if not site.holds_lease(now_ms)]
            if without:
                await self._acquire(without)
            if self._assignments.is_loaded:
                await self._register([site for site in self._registered() if site.lease_hold is not None])
            pause_ms = self._timing.heartbeat_ms // (2 if without else 1)
            await self._world.clock.sleep_ms(pause_ms // 2 + self._rng.jitter_ms(max(1, pause_ms // 2)))

    def _registered(self) -> list[HostedNode]:
        return [site for site in self._nodes.values() if site.node is not None]

    async def _acquire(self, sites: Sequence[HostedNode]) -> None:
        sent_ms = self._world.clock.now_ms()
        claims = [Acquire(site.lease_name, Duration(self._timing.lease_ms)) for site in sites]
        verdicts = await self.submit(claims, [Actor(self._name, Role.AGENT)] * len(sites))
        taken: dict[str, int] = {}
        since: dict[str, int] = {}
        for site, verdict in zip(sites, verdicts or (), strict=False):
            self._log_refusal(site.lease_name, verdict)
            if isinstance(verdict, Accepted):
                taken[site.name], since[site.name] = verdict.number, verdict.revision
        follows = await self._continuity.record_acquired(taken)
        for name, epoch in taken.items():
            site, now_ms = self._nodes[name], self._world.clock.now_ms()
            site.reconciler.on_lease_acquired(now_ms, continuous=name in follows, revision=since[name])
            site.lease_hold = LeaseHold(Actor(self._name, Role.AGENT, site.lease_name, epoch), self._timing.lease_ms, sent_ms)
        self._on_renewed(dict.fromkeys(taken, sent_ms))
        for name in taken:
            self._enqueue(name)

    async def _register(self, sites: Sequence[HostedNode]) -> None:
        """Register nodes that do not exist yet or whose capacity, devices or address changed. Fields set by operators stay as
        they are.
        """
        claims: list[Apply] = []
        actors: list[Actor] = []
        for site in sites:
            declared = None if site.node is None else _registration(site.node, self._assignments.node(site.name))
            if declared is not None and site.lease_hold is not None:
                claims.append(declared)
                actors.append(site.lease_hold.actor)
        for claim, verdict in zip(claims, await self.submit(claims, actors) or () if claims else (), strict=False):
            self._log_refusal(f"node {claim.thing.metadata.name}", verdict)

    def _log_refusal(self, what: str, verdict: Verdict) -> None:
        """Log a refusal once per reason, because an operator may have to act on it. Refusals that resolve themselves are not
        logged.
        """
        code = f"{verdict.code}" if isinstance(verdict, Refused) else ""
        if isinstance(verdict, Refused) and code != self._refusals.get(what) and code not in _TRANSIENT_REFUSALS:
            self._log(f"{what}: {verdict.detail}")
        self._refusals[what] = code

    # -- heartbeats ------------------------------------------------------------------------------------------------------------

    async def run_heartbeats(self) -> None:
        """Send heartbeats at a fixed rate, until cancelled."""
        while True:
            began_ms = self._world.clock.now_ms()
            waiting = self._start_queue.waiting_by_node()
            beats = [beat for site in self._registered() if (beat := self._heartbeat_of(site, waiting.get(site.name, ()))) is not None]
            if beats:
                await self._send(beats)
            passed_ms = self._world.clock.now_ms() - began_ms
            await self._world.clock.sleep_ms(
                max(1, self._timing.heartbeat_ms - passed_ms - self._rng.jitter_ms(self._timing.heartbeat_ms // 16))
            )

    async def _send(self, beats: Sequence[NodeHeartbeat]) -> None:
        try:
            held, sent_ms = await self._client.heartbeat(beats, deadline_ms=max(500, 2 * self._timing.heartbeat_ms))
        except RetriesExhausted:
            return
        renewed = {}
        for beat, mine in zip(beats, held, strict=True):
            site = self._nodes[beat.state.node]
            if site.lease_hold is None or site.lease_hold.actor != beat.actor:
                continue
            if mine:
                could_act = site.holds_lease(self._world.clock.now_ms())
                site.lease_hold.on_renewed(sent_ms)
                renewed[site.name] = sent_ms
                if not could_act:  # what changed while the lease was not held could not be reported: reconcile again
                    self._enqueue(site.name)
            else:
                site.lease_hold.mark_lost()
        self._on_renewed(renewed)

    def _heartbeat_of(self, site: HostedNode, waiting: Sequence[AttemptId]) -> NodeHeartbeat | None:
        if site.lease_hold is None:
            return None
        alive = [kept for kept in site.records.values() if kept.alive]
        incarnation = self._assignments.incarnation
        if site.settled_incarnation != incarnation and all(site.reconciler.is_assigned(self._assignments, kept.attempt_id) for kept in alive):
            site.settled_incarnation = incarnation
        runs = tuple(self._run_state(site, kept) for kept in alive)
        if site.reconciler.preparations:
            runs += tuple(
                RunState(*copy, said=one.message[:MESSAGE_CHARS_MAX])
                for copy, one in site.reconciler.preparations.items()
                if not one.is_done and not ((kept := site.records.get(copy)) is not None and kept.alive)
            )
        runs += tuple(RunState(*copy, said=WAITING_FOR_SLOT) for copy in waiting if site.reconciler.should_run(self._assignments, copy))
        cpu, memory = sum(run.cpu_milli for run in runs), sum(run.memory_bytes for run in runs)
        settled = incarnation if site.settled_incarnation == incarnation else ""
        return NodeHeartbeat(site.lease_hold.actor, NodeState(site.name, settled, cpu, memory, runs))

    def _run_state(self, site: HostedNode, kept: ProcessRecord) -> RunState:
        cpu_milli, memory = self._usage.usage_of(kept.attempt_id)
        course = site.reconciler.progress.get(kept.attempt_id)
        said = course.health.failure_message[:MESSAGE_CHARS_MAX] if course is not None and course.health is not None else ""
        return RunState(kept.key, kept.uid, kept.attempt, kept.pid, kept.number, cpu_milli, memory, said)

    async def run_usage(self) -> None:
        """Measure resource usage, until cancelled. A task of its own, so that a stopped keeper delays no heartbeat."""
        while True:
            await self._measure(self._world.clock.now_ms())
            await self._world.clock.sleep_ms(self._timing.heartbeat_ms)

    async def _measure(self, now_ms: int) -> None:
        if self.keeper_is_reachable and self._usage.is_due(now_ms, self._timing) and any(site.records for site in self._nodes.values()):
            with suppress(LinkError):
                self._usage.record(now_ms, await self._keeper.usage(timeout_ms=self._timing.heartbeat_ms))

    # -- forwarding renewals to the keeper
    # --------------------------------------------------------------------------------------

    def _on_renewed(self, sent_ms: Mapping[str, int]) -> None:
        for name, at_ms in sent_ms.items():
            self._nodes[name].reconciler.on_lease_renewed(at_ms)
        if sent_ms:
            self._renewed_ms |= sent_ms
            self._renewals_pending.set()

    async def run_renewals(self) -> None:
        """Forward accepted renewals to the keeper, until cancelled. A task of its own, so that a stopped keeper delays no
        heartbeat.
        """
        while True:
            await self._renewals_pending.wait()
            self._renewals_pending.clear()
            sent_ms, self._renewed_ms = self._renewed_ms, {}
            try:
                await self._keeper.confirm_renewals(sent_ms, timeout_ms=2 * self._timing.heartbeat_ms)
                answers = True
            except LinkError:
                self._renewed_ms = {**sent_ms, **self._renewed_ms}
                answers = False
            if answers != self.keeper_is_reachable:
                self.keeper_is_reachable = answers
                self._log(
                    "the keeper answers again"
                    if answers
                    else "the keeper does not answer: no process can be started or stopped until it does"
                )
                for name in self._nodes:
                    self._enqueue(name)


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
