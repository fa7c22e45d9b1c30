"""Agent main loop: follows assignments, reconciles its nodes and performs the actions that follow.

One process may host many nodes, for example in tests of a large cluster. Each node has its own lease and its own reconciler
(reconciler.py); claims, heartbeats and assignments of all nodes share the same requests.

Losing contact with the servers does not stop running processes. Reconciling continues on the last known assignments; only
claims wait until a server answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Final

from remit.agent.assignments import Assignments
from remit.agent.attempts import AttemptId
from remit.agent.callbacks import RunningAttempt
from remit.agent.heartbeat import HeartbeatSender
from remit.agent.hosted_node import ALL_KEYS, HostedNode, HostedNodeSpec, LeaseContinuity
from remit.agent.keeper.protocol import KeeperClient, ProcessRecord
from remit.agent.keeper_calls import KeeperCalls, KeeperTable
from remit.agent.preparation.preparation_tasks import PreparationTasks
from remit.agent.preparation.preparer import Preparer
from remit.agent.preparation.volumes import enforce_scratch_limits
from remit.agent.probe_runner import ProbeTarget, run_due_probes
from remit.agent.reconciler import AgentAction, ForgetAction, PrepareAction, ReportAction, StartAction, StopAction
from remit.agent.run_spec import build_process_spec
from remit.agent.runtime import AgentRuntime, Log, discard_log
from remit.agent.transition_reports import Report, TransitionReports
from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.law.timing import Timing
from remit.model.claims import Actor
from remit.model.counters import BoundedCounter, Histogram
from remit.model.records import GenerationSpec, Replica
from remit.model.wire.agent_messages import AssignmentsUpdate
from remit.world.concurrency import BatchedOffload
from remit.world.interfaces import DiskError, LinkError, NotStarted, World

RESYNC_HEARTBEATS: Final = 10
"""A full resync of each node runs at least once in this many heartbeat intervals, even without a change."""

BURST_KEYS, BURST_DELAY_MS = 4, 10
"""After reconciling at least the first number of keys in one pass, the loop sleeps for the second number of milliseconds, so
that the claims of a burst share a request.
"""

AssignmentFeed = Callable[[Sequence[str]], AsyncGenerator[AssignmentsUpdate, None]]
"""Streams the assignments of the given nodes from one of the servers. Ends when that server is gone."""


class Agent:
    """The agent of one process. `run` does not return.

    `launch_keeper` is called when the keeper does not answer and starts a new one if necessary. `log` writes a line for
    operators, `log_debug` a debug line. `epochs` is the file that records the lease epochs this agent held (hosted_node.py).
    """

    def __init__(
        self,
        world: World,
        client: AuthorityClient,
        feed: AssignmentFeed,
        keeper: KeeperClient,
        hosted: Sequence[HostedNodeSpec],
        *,
        name: str,
        timing: Timing,
        preparer: Preparer | None = None,
        epochs: Path | None = None,
        launch_keeper: Callable[[], Awaitable[None]] | None = None,
        on_failure: Callable[[RetriesExhausted], None] | None = None,
        log: Log = discard_log,
        log_debug: Log = discard_log,
    ) -> None:
        self._world, self._client, self._feed, self._keeper, self._timing = world, client, feed, keeper, timing
        self._runtime = AgentRuntime(world, hosted, name=name, timing=timing, log=log, log_debug=log_debug)
        self._nodes = self._runtime.nodes
        self._preparations = PreparationTasks(self._runtime, preparer or Preparer(world, ()))
        self._table = KeeperTable(self._runtime, keeper, launch_keeper)
        self._keeper_calls = KeeperCalls(self._runtime, keeper, self._table, self._on_forgotten)
        self._heartbeats = HeartbeatSender(self._runtime, client, keeper, LeaseContinuity(world, epochs), on_failure=on_failure)
        self._reports = TransitionReports(self._runtime, self._heartbeats.submit)
        self._batched_offload = BatchedOffload(world.offload)

    @property
    def assignments(self) -> Assignments:
        return self._runtime.assignments

    @property
    def starts(self) -> BoundedCounter:
        """Starts of processes, by result."""
        return self._keeper_calls.starts

    @property
    def fetches(self) -> Histogram:
        """Duration of artifact and rootfs preparation."""
        return self._preparations.fetches

    def actor(self, node: str) -> Actor | None:
        """Return the actor for claims about `node`, or None while its lease is not held."""
        lease_hold = self._nodes[node].lease_hold
        return lease_hold.actor if lease_hold is not None and lease_hold.is_valid(self._world.clock.now_ms()) else None

    def log_directories(self, attempt: AttemptId) -> tuple[list[Path], bool]:
        """Return the directories that may contain the logs of an attempt, and whether more output can follow (it runs or is
        assigned).
        """
        for hosted in self._nodes.values():
            record, is_assigned = hosted.records.get(attempt), hosted.reconciler.is_assigned(self.assignments, attempt)
            if record is not None or is_assigned:
                return [hosted.settings.logs], is_assigned or (record is not None and record.alive)
        return [hosted.settings.logs for hosted in self._nodes.values()], False

    @property
    def held_nodes(self) -> int:
        return sum(hosted.lease_hold is not None for hosted in self._nodes.values())

    def running_attempts(self) -> int:
        """Number of attempts with a live process, according to the keeper's last table."""
        return sum(record.alive for hosted in self._nodes.values() for record in hosted.records.values())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._runtime.tasks = group
            group.create_task(self._table.follow(), name="keeper")
            await self._table.wait_until_received()
            await self._preparations.remove_orphans()
            group.create_task(self._follow_assignments(), name="orders")
            group.create_task(self._heartbeats.run_leases(), name="leases")
            group.create_task(self._heartbeats.run_heartbeats(), name="beats")
            group.create_task(self._heartbeats.run_usage(), name="uses")
            group.create_task(self._heartbeats.run_renewals(), name="renewals")
            group.create_task(enforce_scratch_limits(self._runtime, self._keeper), name="scratch")
            await self._reconcile_due()

    # -- following assignments -----------------------------------------------------------------------------------------

    async def _follow_assignments(self) -> None:
        nodes = tuple(hosted.name for hosted in self._nodes.values() if hosted.node is not None)
        while True:
            with suppress(LinkError, TimeoutError):
                async with aclosing(self._feed(nodes)) as updates:
                    while True:
                        # Servers send at least one message per heartbeat interval. On timeout, drop the stream even if the
                        # connection is still open.
                        async with self._world.clock.timeout_ms(self._timing.unknown_ms):
                            update = await anext(updates, None)
                        if update is None or not self._is_newer(update):
                            break  # the stream ended, or this server is behind what the agent has already seen
                        self._apply_assignments(update)
            await self._runtime.sleep_with_jitter(self._timing.heartbeat_ms // 4)

    def _is_newer(self, update: AssignmentsUpdate) -> bool:
        """Return whether these assignments may replace the current ones.

        A lower revision is accepted only in a full list from a new store: a restored store continues after its last
        revision, so only a store created from scratch restarts at one. The incarnation must be the one that answers this
        agent's claims, so that a stale server cannot roll the agent back.
        """
        if update.revision >= self.assignments.revision:
            return True
        return update.whole and self.assignments.incarnation != update.incarnation == self._client.incarnation

    def _apply_assignments(self, update: AssignmentsUpdate) -> None:
        if update.revision < self.assignments.revision:
            self._reports.reset_unconfirmed()
        for key, node in self.assignments.apply(update).items():
            self._reports.reset_backoff(key)
            self._runtime.enqueue(node, key)
        for node in (*update.nodes, *update.nodes_gone) if not update.whole else tuple(self._nodes):
            self._runtime.enqueue(node)
        if update.whole:
            self.assignments.drop_unused_generations()
        for key, node in self._reports.pop_confirmed():
            self._runtime.enqueue(node, key)

    # -- reconciling ---------------------------------------------------------------------------------------------------

    async def _reconcile_due(self) -> None:
        """Reconcile every node with a due key, and resync every node periodically."""
        clock, runtime = self._world.clock, self._runtime
        while True:
            runtime.wake.clear()
            now_ms, reconciled = clock.now_ms(), 0
            reports: list[Report] = []
            for hosted in tuple(self._nodes.values()):
                if (next_ms := hosted.next_run_ms()) is not None and next_ms <= now_ms:
                    reconciled += self._reconcile_node(hosted, now_ms, reports)
            self._reports.send(reports)
            for node, attempt in runtime.start_queue.admit():
                runtime.enqueue(node, attempt.key)
            if reconciled >= BURST_KEYS:  # collect the changes of a burst into one request; a single change is handled at once
                await clock.sleep_ms(BURST_DELAY_MS)
            due_ms = runtime.next_reconcile_ms()
            until_ms = now_ms + self._timing.heartbeat_ms if due_ms is None else due_ms
            with suppress(TimeoutError):
                async with clock.timeout_ms(max(1, until_ms - now_ms)):
                    await runtime.wake.wait()

    def _reconcile_node(self, hosted: HostedNode, now_ms: int, reports: list[Report]) -> int:
        """Reconcile the due keys of one node. Returns their number, or 0 for a full resync."""
        keys = hosted.pop_due(now_ms)
        if keys is None:
            resync_ms = RESYNC_HEARTBEATS * self._timing.heartbeat_ms
            hosted.enqueue(ALL_KEYS, now_ms + resync_ms - self._runtime.rng.jitter_ms(resync_ms // 4))
        for action in hosted.reconciler.reconcile(
            now_ms, self.assignments, hosted.records, holds_lease=hosted.holds_lease(now_ms), keys=keys
        ):
            self._perform_action(hosted, action, now_ms, reports)
        for key, at_ms in hosted.reconciler.requeue_at_ms.items():
            hosted.enqueue(key, at_ms)
        if hosted.reconciler.preparations:
            self._preparations.abandon_unneeded(hosted)
        self._run_probes(hosted, keys)
        return 0 if keys is None else len(keys)

    def _perform_action(self, hosted: HostedNode, action: AgentAction, now_ms: int, reports: list[Report]) -> None:
        match action:
            case ReportAction(_, move) if move.transition == "start" and not self._heartbeats.keeper_is_reachable:
                # Without the keeper the start cannot be performed. If the start is not claimed, the replica is placed
                # elsewhere after a timeout.
                pass
            case ReportAction(attempt, _):
                if (
                    hosted.lease_hold is not None
                    and self._reports.may_report(hosted, attempt.key, now_ms)
                    and self._keeper_calls.is_end_certain(hosted, action, now_ms)
                ):
                    self._reports.mark_in_flight(attempt.key)
                    reports.append((hosted.lease_hold.actor, action))
            case PrepareAction():
                self._preparations.start(hosted, action)
            case StartAction():
                self._keeper_calls.start(hosted, action, now_ms)
            case StopAction():
                self._keeper_calls.stop(hosted, action, now_ms)
            case ForgetAction(attempt):
                self._keeper_calls.forget(hosted, attempt, now_ms)

    async def _on_forgotten(self, hosted: HostedNode, attempt: AttemptId) -> None:
        self._preparations.forget(hosted, attempt)
        self._reports.reset_backoff(attempt.key)
        with suppress(DiskError):
            await self._batched_offload(lambda: self._world.disk.remove_tree(hosted.settings.attempt_directory(attempt)))

    # -- running attempts ----------------------------------------------------------------------------------------------

    def running_attempt(self, attempt: AttemptId) -> RunningAttempt | None:
        """Return the process of an attempt and the spec it was started with, for exec.

        None: it does not run on this agent, or should no longer run. Raises `NotStarted` while its inputs are being looked
        up again.
        """
        for hosted in self._nodes.values():
            record = hosted.records.get(attempt)
            assigned = None if record is None else self._assigned_spec(hosted, record)
            if record is not None and assigned is not None:
                replica, generation = assigned
                inputs = self._preparations.inputs_of(hosted, attempt, replica, generation)
                if inputs is None:
                    cause = "its secrets and configs are being fetched again after a restart of the agent"
                    raise NotStarted(cause, "retry in a few seconds")
                spec = build_process_spec(hosted.settings, attempt, replica, generation, record.ports, inputs)
                return RunningAttempt(hosted.name, record.running, spec)
        return None

    def _run_probes(self, hosted: HostedNode, keys: Collection[str] | None) -> None:
        """Run the probes that are due for the running attempts among `keys` (None: all)."""
        runtime = self._runtime
        for attempt, record in hosted.records.items():
            if keys is not None and attempt.key not in keys:
                continue
            assigned = self._assigned_spec(hosted, record)
            inputs = None if assigned is None else self._preparations.inputs_of(hosted, attempt, *assigned)
            if assigned is not None and inputs is not None:
                target = ProbeTarget(hosted.settings, record, *assigned, hosted.reconciler.progress_of(attempt), inputs)
                on_result = partial(runtime.enqueue, hosted.name, attempt.key)
                next_ms = run_due_probes(self._world, target, runtime.spawn, on_result)
                if next_ms is not None:
                    runtime.enqueue(hosted.name, attempt.key, next_ms)

    def _assigned_spec(self, hosted: HostedNode, record: ProcessRecord) -> tuple[Replica, GenerationSpec] | None:
        """Return the replica and the spec of a running process, or None if it ended, or should no longer run."""
        attempt = record.attempt_id
        assignment = self.assignments.get(attempt.key)
        if (
            not record.alive
            or not record.pid
            or assignment is None
            or not hosted.reconciler.is_assigned(self.assignments, attempt)
        ):
            return None
        generation = self.assignments.spec_of(assignment.replica)
        return None if generation is None else (assignment.replica, generation)
