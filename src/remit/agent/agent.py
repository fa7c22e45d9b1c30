"""Agent main loop: follows assignments, drives the keeper and performs the actions its node reconcilers return.

One process may host many nodes, for example in tests of a large cluster. Each node has its own lease and its own reconciler
(reconciler.py); claims, heartbeats and assignments of all nodes share the same requests.

Losing contact with the servers does not stop running processes. Reconciling continues on the last known assignments; only
claims wait until a server answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from remit.agent.assignments import Assignments, StartQueue, slot_hold_ms
from remit.agent.attempts import AttemptId, log_fields
from remit.agent.callbacks import RunningAttempt
from remit.agent.heartbeat import HeartbeatSender
from remit.agent.hosted_node import ALL_KEYS, HostedNode, HostedNodeSpec, LeaseContinuity, UnconfirmedWrites
from remit.agent.keeper.protocol import NO_START, KeeperClient, ProcessRecord, ProcessTable
from remit.agent.preparation import PreparationProgress, Preparer
from remit.agent.probe_runner import ProbeTarget, run_due_probes
from remit.agent.reconciler import AgentAction, ForgetAction, PrepareAction, ReportAction, StartAction, StopAction
from remit.agent.run_spec import NO_INPUTS, NodeSettings, PreparedInputs, build_process_spec, fence_ms, needs_preparation
from remit.agent.volumes import enforce_scratch_limits
from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.law.timing import Timing
from remit.model.claims import Accepted, Actor, Verdict
from remit.model.counters import LONG_SECONDS_BUCKETS, BoundedCounter, Histogram
from remit.model.records import GenerationSpec, Replica
from remit.model.wire.agent_messages import AssignmentsUpdate
from remit.world.concurrency import BatchedOffload
from remit.world.interfaces import DiskError, LinkError, NotStarted, World, WorldError

KEEPER_RETRY_MS: Final = 5_000
"""Minimum time between two identical calls to the keeper. A call whose effect is not visible by then is repeated."""

BACKOFF_MS: Final = 200
BACKOFF_MS_MAX: Final = 15_000
RESYNC_HEARTBEATS: Final = 10
"""A full resync of each node runs at least once in this many heartbeat intervals, even without a change."""

CLAIM_BATCH_MAX: Final = 1_000
"""Maximum number of claims in one request."""

BURST_KEYS, BURST_DELAY_MS = 4, 10
"""After reconciling at least the first number of keys in one pass, the loop sleeps for the second number of milliseconds, so
that the claims of a burst share a request.
"""

_TERMINAL_TRANSITIONS: Final = ("stopped", "crash", "finish")

KEEPER_CALLS_MAX: Final = 10_000
"""Above this number of remembered keeper calls, entries older than two retry intervals are discarded."""

AssignmentFeed = Callable[[Sequence[str]], AsyncGenerator[AssignmentsUpdate, None]]
"""Streams the assignments of the given nodes from one of the servers. Ends when that server is gone."""


def _discard(_: str, **fields: object) -> None:
    return


START_RESULTS: Final = ("begun", "late", "failed")


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
        log: Callable[..., None] = _discard,
        log_debug: Callable[..., None] = _discard,
    ) -> None:
        self._world, self._client, self._feed, self._keeper = world, client, feed, keeper
        self._timing, self._launch_keeper, self._log, self._log_debug = timing, launch_keeper, log, log_debug
        self._nodes = {spec.node.metadata.name: HostedNode(spec.settings, timing, spec.node) for spec in hosted}
        self._default_settings = hosted[0].settings
        self._preparer = preparer or Preparer(world, ())
        self.assignments = Assignments(world.clock)
        self._start_queue = StartQueue()
        self._heartbeats = HeartbeatSender(
            world, client, keeper, self.assignments, self._nodes, LeaseContinuity(world, epochs), self._start_queue,
            name=name, timing=timing, enqueue=self._enqueue, log=log, on_failure=on_failure,
        )  # fmt: skip
        self._batched_offload = BatchedOffload(world.offload)
        self._wake = asyncio.Event()
        self._table_received = asyncio.Event()
        self._in_flight: dict[str, None] = {}
        self._unconfirmed = UnconfirmedWrites()
        self._backoff_until_ms: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._keeper_calls: dict[tuple[str, AttemptId], int] = {}
        """When each operation was last requested from the keeper, by operation and attempt."""
        self._rng = world.randomness.stream(f"agent {name}")
        self._group: asyncio.TaskGroup | None = None
        self.starts = BoundedCounter(START_RESULTS)
        self.fetches = Histogram(LONG_SECONDS_BUCKETS)
        """Duration of artifact and rootfs preparation, one sample per attempt."""

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

    def running_attempt(self, attempt: AttemptId) -> RunningAttempt | None:
        """Return the process of an attempt and the spec it was started with, for exec.

        None: it does not run on this agent, or should no longer run. Raises `NotStarted` while its inputs are being looked
        up again.
        """
        for hosted in self._nodes.values():
            record, assignment = hosted.records.get(attempt), self.assignments.get(attempt.key)
            if (
                record is None
                or not record.alive
                or not record.pid
                or assignment is None
                or not hosted.reconciler.is_assigned(self.assignments, attempt)
            ):
                continue
            generation = self.assignments.spec_of(assignment.replica)
            if generation is not None:
                inputs = self._inputs_of(hosted, attempt, assignment.replica, generation)
                if inputs is None:
                    cause = "its secrets and configs are being fetched again after a restart of the agent"
                    raise NotStarted(cause, "retry in a few seconds")
                spec = build_process_spec(hosted.settings, attempt, assignment.replica, generation, record.ports, inputs)
                return RunningAttempt(hosted.name, record.running, spec)
        return None

    @property
    def held_nodes(self) -> int:
        return sum(hosted.lease_hold is not None for hosted in self._nodes.values())

    def running_attempts(self) -> int:
        """Number of attempts with a live process, according to the keeper's last table."""
        return sum(record.alive for hosted in self._nodes.values() for record in hosted.records.values())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._follow_keeper(), name="keeper")
            await self._wait_for_table()
            known = {attempt.file_name for hosted in self._nodes.values() for attempt in hosted.records}
            await self._preparer.remove_orphans([hosted.settings.work for hosted in self._nodes.values()], known)
            group.create_task(self._follow_assignments(), name="orders")
            group.create_task(self._heartbeats.run_leases(), name="leases")
            group.create_task(self._heartbeats.run_heartbeats(), name="beats")
            group.create_task(self._heartbeats.run_usage(), name="uses")
            group.create_task(self._heartbeats.run_renewals(), name="renewals")
            group.create_task(
                enforce_scratch_limits(self._world, self._keeper, self.assignments, self._nodes, self._timing), name="scratch"
            )
            await self._reconcile_due()

    async def _wait_for_table(self) -> None:
        """Wait for the first process table of the keeper. No lease is acquired before: until then it is unknown what runs here.

        A delay is logged once, and so is its end.
        """
        try:
            async with self._world.clock.timeout_ms(self._timing.unknown_ms):
                await self._table_received.wait()
        except TimeoutError:
            self._log("the keeper has not sent its process table, so no node lease is acquired yet; see run/keeper.log")
            await self._table_received.wait()
            self._log("the keeper has sent its process table; acquiring node leases")

    # -- following assignments and the keeper --------------------------------------------------------------------------

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
            await self._sleep_with_jitter(self._timing.heartbeat_ms // 4)

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
            self._unconfirmed.clear()
        for key, node in self.assignments.apply(update).items():
            self._backoff_until_ms.pop(key, None)
            self._failures.pop(key, None)
            self._enqueue(node, key)
        for node in (*update.nodes, *update.nodes_gone) if not update.whole else tuple(self._nodes):
            self._enqueue(node)
        if update.whole:
            self.assignments.drop_unused_generations()
        for key, node in self._unconfirmed.pop_confirmed(self.assignments.revision).items():
            self._enqueue(node, key)

    async def _follow_keeper(self) -> None:
        while True:
            with suppress(LinkError):
                async with aclosing(self._keeper.watch_table()) as tables:
                    async for table in tables:
                        self._apply_table(table)
            if self._launch_keeper is not None:
                await self._launch_keeper()
            await self._sleep_with_jitter(self._timing.heartbeat_ms // 8)

    def _apply_table(self, table: ProcessTable) -> None:
        if table.whole:
            for hosted in self._nodes.values():
                hosted.records.clear()
                self._enqueue(hosted.name)
        for record in table.kept:
            self._apply_record(record)
        for gone in table.gone:
            for hosted in self._nodes.values():
                if hosted.records.pop(AttemptId(*gone), None) is not None:
                    self._enqueue(hosted.name, gone[0])
        self._table_received.set()

    def _apply_record(self, record: ProcessRecord) -> None:
        hosted = self._nodes.get(record.node)
        if hosted is None:
            # This node was hosted here under an earlier name. It gets no assignments, so its remaining processes are stopped.
            settings = self._default_settings._replace(node=record.node, logs=self._default_settings.logs.parent / record.node)
            hosted = self._nodes[record.node] = HostedNode(settings, self._timing, None)
            self._log(f"node {record.node} is no longer hosted by this agent; stopping its remaining processes")
        known = hosted.records.get(record.attempt_id)
        # The reply to a start and the table report the same record: only a later stage counts as a change.
        if known is None or (record.stage >= known.stage and record != known):
            hosted.records[record.attempt_id] = record
            self._enqueue(hosted.name, record.key)

    # -- reconciling and claims ----------------------------------------------------------------------------------------

    async def _reconcile_due(self) -> None:
        """Reconcile every node with a due key, and resync every node periodically."""
        clock = self._world.clock
        while True:
            self._wake.clear()
            now_ms, reconciled = clock.now_ms(), 0
            reports: list[tuple[Actor, ReportAction]] = []
            for hosted in tuple(self._nodes.values()):
                if (next_ms := hosted.next_run_ms()) is not None and next_ms <= now_ms:
                    reconciled += self._reconcile_node(hosted, now_ms, reports)
            for first in range(0, len(reports), CLAIM_BATCH_MAX):
                self._spawn(self._report(reports[first : first + CLAIM_BATCH_MAX]), "report")
            for node, attempt in self._start_queue.admit():
                self._enqueue(node, attempt.key)
            if reconciled >= BURST_KEYS:  # collect the changes of a burst into one request; a single change is handled at once
                await clock.sleep_ms(BURST_DELAY_MS)
            due_times_ms = [next_ms for hosted in self._nodes.values() if (next_ms := hosted.next_run_ms()) is not None]
            until_ms = min(due_times_ms, default=now_ms + self._timing.heartbeat_ms)
            with suppress(TimeoutError):
                async with clock.timeout_ms(max(1, until_ms - now_ms)):
                    await self._wake.wait()

    def _reconcile_node(self, hosted: HostedNode, now_ms: int, reports: list[tuple[Actor, ReportAction]]) -> int:
        """Reconcile the due keys of one node. Returns their number, or 0 for a full resync."""
        keys = hosted.pop_due(now_ms)
        if keys is None:
            resync_ms = RESYNC_HEARTBEATS * self._timing.heartbeat_ms
            hosted.enqueue(ALL_KEYS, now_ms + resync_ms - self._rng.jitter_ms(resync_ms // 4))
        for action in hosted.reconciler.reconcile(
            now_ms, self.assignments, hosted.records, holds_lease=hosted.holds_lease(now_ms), keys=keys
        ):
            self._perform_action(hosted, action, now_ms, reports)
        for key, at_ms in hosted.reconciler.requeue_at_ms.items():
            hosted.enqueue(key, at_ms)
        if hosted.reconciler.preparations:
            self._abandon_unneeded(hosted)
        self._run_probes(hosted, keys)
        return 0 if keys is None else len(keys)

    def _enqueue(self, name: str, key: str = ALL_KEYS, at_ms: int | None = None) -> None:
        """Schedule a reconcile of a replica, or of the whole node by default; now, or at `at_ms`."""
        hosted = self._nodes.get(name)
        if hosted is not None:
            hosted.enqueue(key, self._world.clock.now_ms() if at_ms is None else at_ms)
            self._wake.set()

    def _run_probes(self, hosted: HostedNode, keys: Collection[str] | None) -> None:
        """Run the probes that are due for the running attempts among `keys` (None: all)."""
        for attempt, record in hosted.records.items():
            if keys is not None and attempt.key not in keys:
                continue
            assignment = self.assignments.get(attempt.key)
            if (
                not record.alive
                or not record.pid
                or assignment is None
                or not hosted.reconciler.is_assigned(self.assignments, attempt)
            ):
                continue
            generation = self.assignments.spec_of(assignment.replica)
            inputs = NO_INPUTS if generation is None else self._inputs_of(hosted, attempt, assignment.replica, generation)
            if generation is not None and inputs is not None:
                target = ProbeTarget(
                    hosted.settings, record, assignment.replica, generation, hosted.reconciler.progress_of(attempt), inputs
                )
                on_result = partial(self._enqueue, hosted.name, attempt.key)
                next_ms = run_due_probes(self._world, target, self._spawn, on_result)
                if next_ms is not None:
                    self._enqueue(hosted.name, attempt.key, next_ms)

    def _perform_action(
        self, hosted: HostedNode, action: AgentAction, now_ms: int, reports: list[tuple[Actor, ReportAction]]
    ) -> None:
        match action:
            case ReportAction(_, move) if move.transition == "start" and not self._heartbeats.keeper_is_reachable:
                # Without the keeper the start cannot be performed. If the start is not claimed, the replica is placed
                # elsewhere after a timeout.
                pass
            case ReportAction(attempt, _):
                if (
                    hosted.lease_hold is not None
                    and self._may_report(hosted, attempt.key, now_ms)
                    and self._is_end_certain(hosted, action, now_ms)
                ):
                    self._in_flight[attempt.key] = None
                    reports.append((hosted.lease_hold.actor, action))
            case PrepareAction():
                self._prepare(hosted, action)
            case StartAction(attempt):
                if self._start_queue.may_start(attempt, hosted.name):
                    self._call_keeper_once("start", hosted.name, attempt, now_ms, lambda: self._start(hosted, action))
            case StopAction(attempt, grace_ms, result):
                self._call_keeper_once(
                    "stop", hosted.name, attempt, now_ms, lambda: self._keeper.stop(attempt, grace_ms, result)
                )
            case ForgetAction(attempt):
                self._call_keeper_once("forget", hosted.name, attempt, now_ms, lambda: self._forget(hosted, attempt))

    def _may_report(self, hosted: HostedNode, key: str, now_ms: int) -> bool:
        """Return whether a claim about this replica may be sent now.

        Not while another is in flight, nor before the assignments show the last accepted one, nor during the backoff after a
        refusal.
        """
        if key in self._in_flight or self._unconfirmed.is_unconfirmed(key, self.assignments.revision):
            return False
        at_ms = self._backoff_until_ms.get(key, 0)
        if at_ms > now_ms:
            self._enqueue(hosted.name, key, at_ms)
        return at_ms <= now_ms

    def _is_end_certain(self, hosted: HostedNode, report: ReportAction, now_ms: int) -> bool:
        """Return whether an end may be reported, that is, the keeper cannot start this attempt any more.

        A start requested earlier, perhaps by a previous agent process, may still be in progress in the keeper. So the agent
        blocks further starts first and reports the end only after the keeper confirmed that. A recorded process that exited
        and is not restarted needs no block.
        """
        has_record = report.attempt in hosted.records and report.move.transition != "stopped"
        if (
            report.move.transition not in _TERMINAL_TRANSITIONS
            or has_record
            or hosted.reconciler.progress_of(report.attempt).start_blocked
        ):
            return True
        self._call_keeper_once(
            "block start", hosted.name, report.attempt, now_ms, lambda: self._block_start(hosted, report.attempt)
        )
        return False

    async def _block_start(self, hosted: HostedNode, attempt: AttemptId) -> None:
        record = await self._keeper.block_start(attempt)
        hosted.reconciler.progress_of(attempt).start_blocked = record is None or not record.alive
        if record is not None:
            self._apply_record(record)

    async def _report(self, reports: Sequence[tuple[Actor, ReportAction]]) -> None:
        try:
            verdicts = await self._heartbeats.submit([report.move for _, report in reports], [actor for actor, _ in reports])
            for index, (actor, report) in enumerate(reports):
                self._log_debug(
                    report.move.transition, reason=report.move.reason, **log_fields(_node_of(actor), report.attempt)
                )
                self._on_verdict(report.attempt.key, _node_of(actor), None if verdicts is None else verdicts[index])
        finally:
            for actor, report in reports:
                self._in_flight.pop(report.attempt.key, None)
                self._enqueue(_node_of(actor), report.attempt.key)

    def _on_verdict(self, key: str, node: str, verdict: Verdict | None) -> None:
        if isinstance(verdict, Accepted):
            self._unconfirmed.add(key, node, verdict.revision)
            self._failures.pop(key, None)
            return
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause_ms = min(BACKOFF_MS_MAX, BACKOFF_MS << min(failures - 1, 10))
        self._backoff_until_ms[key] = self._world.clock.now_ms() + pause_ms // 2 + self._rng.jitter_ms(pause_ms // 2)

    # -- calls to the keeper -------------------------------------------------------------------------------------------

    def _call_keeper_once(
        self, operation: str, node: str, attempt: AttemptId, now_ms: int, call: Callable[[], Awaitable[None]]
    ) -> None:
        """Call the keeper unless the same call is in progress or was made less than KEEPER_RETRY_MS ago."""
        called_ms = self._keeper_calls.get((operation, attempt))
        if called_ms is not None and now_ms < called_ms + KEEPER_RETRY_MS:
            self._enqueue(node, attempt.key, called_ms + KEEPER_RETRY_MS)
            return
        if len(self._keeper_calls) > KEEPER_CALLS_MAX:
            late_ms = now_ms - 2 * KEEPER_RETRY_MS
            self._keeper_calls = {key: at_ms for key, at_ms in self._keeper_calls.items() if at_ms > late_ms}
        self._keeper_calls[operation, attempt] = now_ms
        if operation == "start":
            self._start_queue.mark_starting(attempt)
        self._spawn(self._call_keeper(operation, node, attempt, call), f"{operation} {attempt.key}")

    async def _call_keeper(self, operation: str, node: str, attempt: AttemptId, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
            if operation != "stop":  # a stop lasts for its grace period; keeping the entry prevents a repeated call until then
                self._keeper_calls.pop((operation, attempt), None)
        except WorldError as error:
            self._keeper_calls[operation, attempt] = self._world.clock.now_ms()
            if operation == "start":
                self._start_queue.release(attempt)
                self.starts.add("failed")
            self._log(f"{operation} {attempt.key}: {error}", **log_fields(node, attempt))
        self._enqueue(node, attempt.key)

    async def _release_slot(self, attempt: AttemptId, delay_ms: int) -> None:
        await self._world.clock.sleep_ms(delay_ms)
        self._start_queue.release(attempt)
        self._wake.set()

    async def _start(self, hosted: HostedNode, start: StartAction) -> None:
        known, port_specs = hosted.records.get(start.attempt), start.generation.spec.template.ports
        ports = known.ports if known is not None else await self._assign_ports({port.name: port.port for port in port_specs})
        preparation = hosted.reconciler.preparations.get(start.attempt)
        inputs = preparation.inputs if preparation is not None and preparation.inputs is not None else NO_INPUTS
        spec = build_process_spec(hosted.settings, start.attempt, start.replica, start.generation, ports, inputs)
        fence, directories = (
            fence_ms(start.generation),
            (hosted.settings.logs, hosted.settings.attempt_directory(start.attempt)),
        )
        record = await self._keeper.start(
            spec,
            restarts=start.restarts,
            fence_ms=fence,
            grace_ms=self._timing.kill_grace_ms,
            ports=ports,
            directories=directories,
        )
        self._spawn(self._release_slot(start.attempt, slot_hold_ms(spec)), f"slot of {start.attempt.key}")
        if record is not None and record.number == NO_START:
            raise DiskError(record.failed, record.cure)
        self._keeper_calls.pop(("stop", start.attempt), None)
        self.starts.add("begun" if record is not None else "late")
        self._log_debug("process started", number=start.restarts, late=record is None, **log_fields(hosted.name, start.attempt))
        if record is not None:
            self._apply_record(record)
        else:  # the fencing deadline has passed, or the renewal has not reached the keeper yet
            await self._sleep_with_jitter(self._timing.heartbeat_ms // 4)

    def _prepare(self, hosted: HostedNode, action: PrepareAction) -> PreparationProgress:
        preparation = hosted.reconciler.preparations[action.attempt] = PreparationProgress(action.restarts)
        record = hosted.records.get(action.attempt)
        is_running = record is not None and record.alive

        async def prepare() -> None:
            started_ms = self._world.clock.now_ms()
            await self._preparer.prepare(
                hosted.settings, action.attempt, action.replica, action.generation, preparation, is_running=is_running
            )
            if action.generation.spec.template.artifacts or action.generation.spec.template.rootfs:
                self.fetches.add((self._world.clock.now_ms() - started_ms) / 1000)
            self._enqueue(hosted.name)

        preparation.task = self._create_task(prepare(), f"prepare {action.attempt.key}")
        return preparation

    def _inputs_of(
        self, hosted: HostedNode, attempt: AttemptId, replica: Replica, generation: GenerationSpec
    ) -> PreparedInputs | None:
        """Return the prepared inputs of a running attempt, or None while they are being prepared.

        An agent that finds a process already running prepares its inputs again, for probes and exec sessions beside it.
        """
        if not needs_preparation(generation.spec.template):
            return NO_INPUTS
        preparation = hosted.reconciler.preparations.get(attempt)
        if preparation is None:
            preparation = self._prepare(hosted, PrepareAction(attempt, replica, generation, hosted.records[attempt].number))
        return (preparation.inputs or NO_INPUTS) if preparation.is_done else None

    def _abandon_unneeded(self, hosted: HostedNode) -> None:
        reconciler = hosted.reconciler
        for attempt in [
            attempt
            for attempt in reconciler.preparations
            if attempt not in hosted.records and not reconciler.should_run(self.assignments, attempt)
        ]:
            task = reconciler.preparations.pop(attempt).task
            self._spawn(self._abandon(hosted.settings, attempt, task), f"abandon {attempt.key}")

    async def _abandon(self, settings: NodeSettings, attempt: AttemptId, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._preparer.abandon(settings, attempt)

    async def _assign_ports(self, requested: dict[str, int]) -> dict[str, int]:
        free = iter(await self._world.ports.find_free(sum(port == 0 for port in requested.values())))
        return {name: port or next(free) for name, port in requested.items()}

    async def _forget(self, hosted: HostedNode, attempt: AttemptId) -> None:
        await self._keeper.forget(attempt)
        hosted.records.pop(attempt, None)
        preparation = hosted.reconciler.preparations.pop(attempt, None)
        if preparation is not None and preparation.task is not None:
            preparation.task.cancel()
        self._preparer.forget(attempt)
        for per_key in (self._backoff_until_ms, self._failures):
            per_key.pop(attempt.key, None)
        self._keeper_calls.pop(("stop", attempt), None)
        with suppress(DiskError):
            await self._batched_offload(lambda: self._world.disk.remove_tree(hosted.settings.attempt_directory(attempt)))

    # -- helpers -------------------------------------------------------------------------------------------------------

    async def _sleep_with_jitter(self, ms: int) -> None:
        await self._world.clock.sleep_ms(ms // 2 + self._rng.jitter_ms(max(1, ms // 2)))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        _ = self._create_task(work, name)

    def _create_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        if self._group is None:
            raise RuntimeError("Agent.run is not active: no task can be started")
        return self._group.create_task(work, name=name)


def _node_of(actor: Actor) -> str:
    return actor.lease.partition("/")[2]
