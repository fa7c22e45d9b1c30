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

from remit.agent.assignments import WAITING_FOR_SLOT
from remit.agent.attempts import AttemptId
from remit.agent.hosted_node import HostedNode, LeaseContinuity
from remit.agent.keeper.protocol import KeeperClient, ProcessRecord, ProcessUsage
from remit.agent.runtime import AgentRuntime
from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.lease_holder import LeaseHold
from remit.law.timing import Timing
from remit.model.claims import Accepted, Acquire, Actor, Apply, Evidence, Refused, Verdict
from remit.model.kinds import Node
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.model.wire.agent_messages import NodeHeartbeat, NodeState, RunState
from remit.world.interfaces import LinkError

MEASURE_HEARTBEATS: Final = 3
"""Interval between two usage measurements, in heartbeat intervals."""


class UsageMeter:
    def __init__(self) -> None:
        self._measured_ms: int | None = None
        self._last: dict[tuple[str, int], tuple[int, int]] = {}
        self._cpu_milli: dict[tuple[str, int], int] = {}

    def is_due(self, now_ms: int, timing: Timing) -> bool:
        return self._measured_ms is None or now_ms - self._measured_ms >= MEASURE_HEARTBEATS * timing.heartbeat_ms

    def record(self, now_ms: int, usages: Sequence[ProcessUsage]) -> None:
        elapsed_ms = 0 if self._measured_ms is None else now_ms - self._measured_ms
        last, self._last, self._cpu_milli = self._last, {}, {}
        for usage in usages:
            key = usage.uid, usage.attempt
            self._last[key] = usage.cpu_ms, usage.memory_bytes
            before = last.get(key)
            if before is not None and elapsed_ms > 0:
                self._cpu_milli[key] = max(0, usage.cpu_ms - before[0]) * 1000 // elapsed_ms
        self._measured_ms = now_ms

    def usage_of(self, attempt: AttemptId) -> tuple[int, int]:
        """Return the CPU usage in thousandths of a processor, and the memory in bytes."""
        key = attempt.uid, attempt.number
        return self._cpu_milli.get(key, 0), self._last.get(key, (0, 0))[1]


MESSAGE_CHARS_MAX = 200


class HeartbeatSender:
    """Leases and heartbeats of all nodes an agent hosts. `on_failure` is called when no server answered a request."""

    def __init__(
        self,
        runtime: AgentRuntime,
        client: AuthorityClient,
        keeper: KeeperClient,
        continuity: LeaseContinuity,
        *,
        on_failure: Callable[[RetriesExhausted], None] | None = None,
    ) -> None:
        self._runtime, self._client, self._keeper = runtime, client, keeper
        self._continuity, self._on_failure = continuity, on_failure
        self._world, self._timing, self._nodes, self._assignments = (
            runtime.world,
            runtime.timing,
            runtime.nodes,
            runtime.assignments,
        )
        self._usage = UsageMeter()
        self._rng = runtime.world.randomness.stream(f"standing {runtime.name}")
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

    # -- leases --------------------------------------------------------------------------------------------------------

    async def run_leases(self) -> None:
        """Acquire missing leases and register nodes, until cancelled."""
        while True:
            now_ms = self._world.clock.now_ms()
            missing = [hosted for hosted in self._registered() if not hosted.holds_lease(now_ms)]
            if missing:
                await self._acquire(missing)
            if self._assignments.is_loaded:
                await self._register([hosted for hosted in self._registered() if hosted.lease_hold is not None])
            pause_ms = self._timing.heartbeat_ms // (2 if missing else 1)
            await self._world.clock.sleep_ms(pause_ms // 2 + self._rng.jitter_ms(max(1, pause_ms // 2)))

    def _registered(self) -> list[HostedNode]:
        return [hosted for hosted in self._nodes.values() if hosted.node is not None]

    async def _acquire(self, nodes: Sequence[HostedNode]) -> None:
        sent_ms = self._world.clock.now_ms()
        claims = [Acquire(hosted.lease_name, Duration(self._timing.lease_ms)) for hosted in nodes]
        verdicts = await self.submit(claims, [Actor(self._runtime.name, Role.AGENT)] * len(nodes))
        epochs: dict[str, int] = {}
        revisions: dict[str, int] = {}
        for hosted, verdict in zip(nodes, verdicts or (), strict=False):
            self._log_refusal(hosted.lease_name, verdict)
            if isinstance(verdict, Accepted):
                epochs[hosted.name], revisions[hosted.name] = verdict.number, verdict.revision
        continuous = await self._continuity.record_acquired(epochs)
        for name, epoch in epochs.items():
            hosted, now_ms = self._nodes[name], self._world.clock.now_ms()
            hosted.reconciler.on_lease_acquired(now_ms, continuous=name in continuous, revision=revisions[name])
            hosted.lease_hold = LeaseHold(
                Actor(self._runtime.name, Role.AGENT, hosted.lease_name, epoch), self._timing.lease_ms, sent_ms
            )
        self._on_renewed(dict.fromkeys(epochs, sent_ms))
        for name in epochs:
            self._runtime.enqueue(name)

    async def _register(self, nodes: Sequence[HostedNode]) -> None:
        """Register nodes that do not exist yet or whose capacity, devices or address changed. Fields set by operators stay as
        they are.
        """
        claims: list[Apply] = []
        actors: list[Actor] = []
        for hosted in nodes:
            registration = None if hosted.node is None else _registration(hosted.node, self._assignments.node(hosted.name))
            if registration is not None and hosted.lease_hold is not None:
                claims.append(registration)
                actors.append(hosted.lease_hold.actor)
        for claim, verdict in zip(claims, await self.submit(claims, actors) or () if claims else (), strict=False):
            self._log_refusal(f"node {claim.thing.metadata.name}", verdict)

    def _log_refusal(self, subject: str, verdict: Verdict) -> None:
        """Log a refusal once per reason, because an operator may have to act on it. Refusals that resolve themselves are not
        logged.
        """
        code = f"{verdict.code}" if isinstance(verdict, Refused) else ""
        if isinstance(verdict, Refused) and code != self._refusals.get(subject) and code not in _TRANSIENT_REFUSALS:
            self._runtime.log(f"{subject}: {verdict.detail}")
        self._refusals[subject] = code

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    async def run_heartbeats(self) -> None:
        """Send heartbeats at a fixed rate, until cancelled."""
        while True:
            started_ms = self._world.clock.now_ms()
            waiting = self._runtime.start_queue.waiting_by_node()
            heartbeats = [
                heartbeat
                for hosted in self._registered()
                if (heartbeat := self._heartbeat_of(hosted, waiting.get(hosted.name, ()))) is not None
            ]
            if heartbeats:
                await self._send(heartbeats)
            elapsed_ms = self._world.clock.now_ms() - started_ms
            await self._world.clock.sleep_ms(
                max(1, self._timing.heartbeat_ms - elapsed_ms - self._rng.jitter_ms(self._timing.heartbeat_ms // 16))
            )

    async def _send(self, heartbeats: Sequence[NodeHeartbeat]) -> None:
        try:
            holds, sent_ms = await self._client.heartbeat(heartbeats, deadline_ms=max(500, 2 * self._timing.heartbeat_ms))
        except RetriesExhausted:
            return
        renewed = {}
        for heartbeat, is_held in zip(heartbeats, holds, strict=True):
            hosted = self._nodes[heartbeat.state.node]
            if hosted.lease_hold is None or hosted.lease_hold.actor != heartbeat.actor:
                continue
            if is_held:
                held_before = hosted.holds_lease(self._world.clock.now_ms())
                hosted.lease_hold.on_renewed(sent_ms)
                renewed[hosted.name] = sent_ms
                if not held_before:  # what changed while the lease was not held could not be reported: reconcile again
                    self._runtime.enqueue(hosted.name)
            else:
                hosted.lease_hold.mark_lost()
        self._on_renewed(renewed)

    def _heartbeat_of(self, hosted: HostedNode, waiting: Sequence[AttemptId]) -> NodeHeartbeat | None:
        if hosted.lease_hold is None:
            return None
        alive = [record for record in hosted.records.values() if record.alive]
        incarnation = self._assignments.incarnation
        if hosted.settled_incarnation != incarnation and all(
            hosted.reconciler.is_assigned(self._assignments, record.attempt_id) for record in alive
        ):
            hosted.settled_incarnation = incarnation
        runs = tuple(self._run_state(hosted, record) for record in alive)
        if hosted.reconciler.preparations:
            runs += tuple(
                RunState(*attempt, said=preparation.message[:MESSAGE_CHARS_MAX])
                for attempt, preparation in hosted.reconciler.preparations.items()
                if not preparation.is_done and not ((record := hosted.records.get(attempt)) is not None and record.alive)
            )
        runs += tuple(
            RunState(*attempt, said=WAITING_FOR_SLOT)
            for attempt in waiting
            if hosted.reconciler.should_run(self._assignments, attempt)
        )
        cpu, memory = sum(run.cpu_milli for run in runs), sum(run.memory_bytes for run in runs)
        settled = incarnation if hosted.settled_incarnation == incarnation else ""
        return NodeHeartbeat(hosted.lease_hold.actor, NodeState(hosted.name, settled, cpu, memory, runs))

    def _run_state(self, hosted: HostedNode, record: ProcessRecord) -> RunState:
        cpu_milli, memory = self._usage.usage_of(record.attempt_id)
        progress = hosted.reconciler.progress.get(record.attempt_id)
        message = (
            progress.health.failure_message[:MESSAGE_CHARS_MAX] if progress is not None and progress.health is not None else ""
        )
        return RunState(record.key, record.uid, record.attempt, record.pid, record.number, cpu_milli, memory, message)

    async def run_usage(self) -> None:
        """Measure resource usage, until cancelled. A task of its own, so that a stopped keeper delays no heartbeat."""
        while True:
            await self._measure_usage(self._world.clock.now_ms())
            await self._world.clock.sleep_ms(self._timing.heartbeat_ms)

    async def _measure_usage(self, now_ms: int) -> None:
        if (
            self.keeper_is_reachable
            and self._usage.is_due(now_ms, self._timing)
            and any(hosted.records for hosted in self._nodes.values())
        ):
            with suppress(LinkError):
                self._usage.record(now_ms, await self._keeper.usage(timeout_ms=self._timing.heartbeat_ms))

    # -- forwarding renewals to the keeper -----------------------------------------------------------------------------

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
                reachable = True
            except LinkError:
                self._renewed_ms = {**sent_ms, **self._renewed_ms}
                reachable = False
            if reachable != self.keeper_is_reachable:
                self.keeper_is_reachable = reachable
                self._runtime.log(
                    "the keeper answers again"
                    if reachable
                    else "the keeper does not answer: no process can be started or stopped until it does"
                )
                for name in self._nodes:
                    self._runtime.enqueue(name)


_TRANSIENT_REFUSALS = frozenset({"revision", "exists", "stale_epoch", "lease_expired"})
"""Refusals that the next attempt resolves by itself."""


def _registration(node: Node, current: tuple[Node, int] | None) -> Apply | None:
    if current is None:
        return Apply(node, expect=0)
    existing, revision = current
    declared, spec = node.spec, existing.spec
    desired = replace(spec, capacity=declared.capacity, devices=declared.devices, address=declared.address, port=declared.port)
    if desired == spec or existing.metadata.deleting:
        return None
    return Apply(replace(existing, spec=desired), expect=revision)
