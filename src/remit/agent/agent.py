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
from remit.agent.hosted_node import ALL_KEYS, UnconfirmedWrites, LeaseContinuity, HostedNodeSpec, HostedNode
from remit.agent.keeper.protocol import NO_START, ProcessRecord, KeeperClient, ProcessTable
from remit.agent.preparation import PreparationProgress, Preparer
from remit.agent.probe_runner import ProbeTarget, run_due_probes
from remit.agent.reconciler import AgentAction, StopAction, ForgetAction, PrepareAction, ReportAction, StartAction
from remit.agent.run_spec import NO_INPUTS, NodeSettings, PreparedInputs, fence_ms, needs_preparation, build_order
from remit.agent.volumes import enforce_scratch_limits
from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.law.timing import Timing
from remit.model.claims import Accepted, Actor, Verdict
from remit.model.counters import LONG_SECONDS_BUCKETS, Histogram, BoundedCounter
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

    `revive` is called when the keeper does not answer and starts a new one if necessary. `tell` writes a line for operators
    and `note` a debug line. `epochs` is the file that records the lease epochs this agent held (hosted_node.py).
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
        self._nodes = {one.node.metadata.name: HostedNode(one.settings, timing, one.node) for one in hosted}
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
        tenure = self._nodes[node].lease_hold
        return tenure.actor if tenure is not None and tenure.is_valid(self._world.clock.now_ms()) else None

    def log_directories(self, copy: AttemptId) -> tuple[list[Path], bool]:
        """Return the directories that may contain the logs of an attempt, and whether more output can follow (it runs or is
        assigned).
        """
        for site in self._nodes.values():
            kept, ordered = site.records.get(copy), site.reconciler.is_assigned(self.assignments, copy)
            if kept is not None or ordered:
                return [site.settings.logs], ordered or (kept is not None and kept.alive)
        return [site.settings.logs for site in self._nodes.values()], False

    def running_attempt(self, copy: AttemptId) -> RunningAttempt | None:
        """Return the process of an attempt and the order it was started with, for exec.

        None: it does not run on this agent, or should no longer run. Raises `NotStarted` while its inputs are being looked
        up again.
        """
        for site in self._nodes.values():
            kept, order = site.records.get(copy), self.assignments.get(copy.key)
            if kept is None or not kept.alive or not kept.pid or order is None or not site.reconciler.is_assigned(self.assignments, copy):
                continue
            generation = self.assignments.spec_of(order.replica)
            if generation is not None:
                prepared = self._inputs_of(site, copy, order.replica, generation)
                if prepared is None:
                    cause = "its secrets and configs are being fetched again after a restart of the agent"
                    raise NotStarted(cause, "retry in a few seconds")
                like = build_order(site.settings, copy, order.replica, generation, kept.ports, prepared)
                return RunningAttempt(site.name, kept.running, like)
        return None

    @property
    def held_nodes(self) -> int:
        return sum(site.lease_hold is not None for site in self._nodes.values())

    def running_attempts(self) -> int:
        """Number of attempts with a live process, according to the keeper's last table."""
        return sum(kept.alive for site in self._nodes.values() for kept in site.records.values())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._follow_keeper(), name="keeper")
            await self._wait_for_table()
            known = {copy.file_name for site in self._nodes.values() for copy in site.records}
            await self._preparer.remove_orphans([site.settings.work for site in self._nodes.values()], known)
            group.create_task(self._follow_assignments(), name="orders")
            group.create_task(self._heartbeats.run_leases(), name="leases")
            group.create_task(self._heartbeats.run_heartbeats(), name="beats")
            group.create_task(self._heartbeats.run_usage(), name="uses")
            group.create_task(self._heartbeats.run_renewals(), name="renewals")
            group.create_task(enforce_scratch_limits(self._world, self._keeper, self.assignments, self._nodes, self._timing), name="scratch")
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

    # -- following assignments and the keeper ----------------------------------------------------------------------------------

    async def _follow_assignments(self) -> None:
        nodes = tuple(site.name for site in self._nodes.values() if site.node is not None)
        while True:
            with suppress(LinkError, TimeoutError):
                async with aclosing(self._feed(nodes)) as told:
                    while True:
                        # Servers send at least one message per heartbeat interval. On timeout, drop the stream even if the
                        # connection is still open.
                        async with self._world.clock.timeout_ms(self._timing.unknown_ms):
                            orders = await anext(told, None)
                        if orders is None or not self._is_newer(orders):
                            break  # the stream ended, or this server is behind what the agent has already seen
                        self._apply_assignments(orders)
            await self._sleep_with_jitter(self._timing.heartbeat_ms // 4)

    def _is_newer(self, told: AssignmentsUpdate) -> bool:
        """Return whether these assignments may replace the current ones.

        A lower revision is accepted only in a full list from a new store: a restored store continues after its last
        revision, so only a store created from scratch restarts at one. The incarnation must be the one that answers this
        agent's claims, so that a stale server cannot roll the agent back.
        """
        if told.revision >= self.assignments.revision:
            return True
        return told.whole and self.assignments.incarnation != told.incarnation == self._client.incarnation

    def _apply_assignments(self, orders: AssignmentsUpdate) -> None:
        if orders.revision < self.assignments.revision:
            self._unconfirmed.clear()
        for key, node in self.assignments.apply(orders).items():
            self._backoff_until_ms.pop(key, None)
            self._failures.pop(key, None)
            self._enqueue(node, key)
        for node in (*orders.nodes, *orders.nodes_gone) if not orders.whole else tuple(self._nodes):
            self._enqueue(node)
        if orders.whole:
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
            for site in self._nodes.values():
                site.records.clear()
                self._enqueue(site.name)
        for kept in table.kept:
            self._apply_record(kept)
        for gone in table.gone:
            for site in self._nodes.values():
                if site.records.pop(AttemptId(*gone), None) is not None:
                    self._enqueue(site.name, gone[0])
        self._table_received.set()

    def _apply_record(self, kept: ProcessRecord) -> None:
        site = self._nodes.get(kept.node)
        if site is None:
            # This node was hosted here under an earlier name. It gets no assignments, so its remaining processes are stopped.
            place = self._default_settings._replace(node=kept.node, logs=self._default_settings.logs.parent / kept.node)
            site = self._nodes[kept.node] = HostedNode(place, self._timing, None)
            self._log(f"node {kept.node} is no longer hosted by this agent; stopping its remaining processes")
        known = site.records.get(kept.attempt_id)
        # The reply to a start and the table report the same record: only a later stage counts as a change.
        if known is None or (kept.stage >= known.stage and kept != known):
            site.records[kept.attempt_id] = kept
            self._enqueue(site.name, kept.key)

    # -- reconciling and claims
    # -------------------------------------------------------------------------------------------------

    async def _reconcile_due(self) -> None:
        """Reconcile every node with a due key, and resync every node periodically."""
        clock = self._world.clock
        while True:
            self._wake.clear()
            now_ms, looks = clock.now_ms(), 0
            says: list[tuple[Actor, ReportAction]] = []
            for site in tuple(self._nodes.values()):
                if (due_ms := site.next_run_ms()) is not None and due_ms <= now_ms:
                    looks += self._reconcile_node(site, now_ms, says)
            for first in range(0, len(says), CLAIM_BATCH_MAX):
                self._spawn(self._report(says[first : first + CLAIM_BATCH_MAX]), "say")
            for node, copy in self._start_queue.admit():
                self._enqueue(node, copy.key)
            if looks >= BURST_KEYS:  # collect the changes of a burst into one request; a single change is handled at once
                await clock.sleep_ms(BURST_DELAY_MS)
            dues_ms = [due_ms for site in self._nodes.values() if (due_ms := site.next_run_ms()) is not None]
            until_ms = min(dues_ms, default=now_ms + self._timing.heartbeat_ms)
            with suppress(TimeoutError):
                async with clock.timeout_ms(max(1, until_ms - now_ms)):
                    await self._wake.wait()

    def _reconcile_node(self, site: HostedNode, now_ms: int, says: list[tuple[Actor, ReportAction]]) -> int:
        """Reconcile the due keys of one node. Returns their number, or 0 for a full resync."""
        keys = site.pop_due(now_ms)
        if keys is None:
            sweep_ms = RESYNC_HEARTBEATS * self._timing.heartbeat_ms
            site.enqueue(ALL_KEYS, now_ms + sweep_ms - self._rng.jitter_ms(sweep_ms // 4))
        for deed in site.reconciler.reconcile(now_ms, self.assignments, site.records, holds_lease=site.holds_lease(now_ms), keys=keys):
            self._perform(site, deed, now_ms, says)
        for key, at_ms in site.reconciler.requeue_at_ms.items():
            site.enqueue(key, at_ms)
        if site.reconciler.preparations:
            self._abandon_unneeded(site)
        self._run_probes(site, keys)
        return 0 if keys is None else len(keys)

    def _enqueue(self, name: str, key: str = ALL_KEYS, at_ms: int | None = None) -> None:
        """Schedule a reconcile of a replica, or of the whole node by default; now, or at `at_ms`."""
        site = self._nodes.get(name)
        if site is not None:
            site.enqueue(key, self._world.clock.now_ms() if at_ms is None else at_ms)
            self._wake.set()

    def _run_probes(self, site: HostedNode, keys: Collection[str] | None) -> None:
        """Run the probes that are due for the running attempts among `keys` (None: all)."""
        for copy, kept in site.records.items():
            if keys is not None and copy.key not in keys:
                continue
            order = self.assignments.get(copy.key)
            if not kept.alive or not kept.pid or order is None or not site.reconciler.is_assigned(self.assignments, copy):
                continue
            generation = self.assignments.spec_of(order.replica)
            prepared = NO_INPUTS if generation is None else self._inputs_of(site, copy, order.replica, generation)
            if generation is not None and prepared is not None:
                patient = ProbeTarget(site.settings, kept, order.replica, generation, site.reconciler.progress_of(copy), prepared)
                tell = partial(self._enqueue, site.name, copy.key)
                due_ms = run_due_probes(self._world, patient, self._spawn, tell)
                if due_ms is not None:
                    self._enqueue(site.name, copy.key, due_ms)

    def _perform(self, site: HostedNode, deed: AgentAction, now_ms: int, says: list[tuple[Actor, ReportAction]]) -> None:
        match deed:
            case ReportAction(_, move) if move.transition == "start" and not self._heartbeats.keeper_is_reachable:
                # Without the keeper the start cannot be performed. Unclaimed, the replica is placed elsewhere after a timeout.
                pass
            case ReportAction(copy, _):
                if site.lease_hold is not None and self._may_report(site, copy.key, now_ms) and self._is_end_certain(site, deed, now_ms):
                    self._in_flight[copy.key] = None
                    says.append((site.lease_hold.actor, deed))
            case PrepareAction():
                self._prepare(site, deed)
            case StartAction(copy):
                if self._start_queue.may_start(copy, site.name):
                    self._call_keeper_once("start", site.name, copy, now_ms, lambda: self._start(site, deed))
            case StopAction(copy, grace_ms, why):
                self._call_keeper_once("end", site.name, copy, now_ms, lambda: self._keeper.stop(copy, grace_ms, why))
            case ForgetAction(copy):
                self._call_keeper_once("leave", site.name, copy, now_ms, lambda: self._forget(site, copy))

    def _may_report(self, site: HostedNode, key: str, now_ms: int) -> bool:
        """Return whether a claim about this replica may be sent now.

        Not while another is in flight, nor before the assignments show the last accepted one, nor during the backoff after a
        refusal.
        """
        if key in self._in_flight or self._unconfirmed.is_unconfirmed(key, self.assignments.revision):
            return False
        at_ms = self._backoff_until_ms.get(key, 0)
        if at_ms > now_ms:
            self._enqueue(site.name, key, at_ms)
        return at_ms <= now_ms

    def _is_end_certain(self, site: HostedNode, say: ReportAction, now_ms: int) -> bool:
        """Return whether an end may be reported, that is, the keeper cannot start this attempt any more.

        A start requested earlier, perhaps by a previous agent process, may still be in progress in the keeper. So the agent
        blocks further starts first and reports the end only after the keeper confirmed that. A recorded process that exited
        and is not restarted needs no block.
        """
        known = say.attempt in site.records and say.move.transition != "stopped"
        if say.move.transition not in _TERMINAL_TRANSITIONS or known or site.reconciler.progress_of(say.attempt).start_blocked:
            return True
        self._call_keeper_once("bar", site.name, say.attempt, now_ms, lambda: self._block_start(site, say.attempt))
        return False

    async def _block_start(self, site: HostedNode, copy: AttemptId) -> None:
        kept = await self._keeper.block_start(copy)
        site.reconciler.progress_of(copy).start_blocked = kept is None or not kept.alive
        if kept is not None:
            self._apply_record(kept)

    async def _report(self, says: Sequence[tuple[Actor, ReportAction]]) -> None:
        try:
            verdicts = await self._heartbeats.submit([say.move for _, say in says], [actor for actor, _ in says])
            for index, (actor, say) in enumerate(says):
                self._log_debug(say.move.transition, reason=say.move.reason, **log_fields(_node_of(actor), say.attempt))
                self._on_verdict(say.attempt.key, _node_of(actor), None if verdicts is None else verdicts[index])
        finally:
            for actor, say in says:
                self._in_flight.pop(say.attempt.key, None)
                self._enqueue(_node_of(actor), say.attempt.key)

    def _on_verdict(self, key: str, node: str, verdict: Verdict | None) -> None:
        if isinstance(verdict, Accepted):
            self._unconfirmed.add(key, node, verdict.revision)
            self._failures.pop(key, None)
            return
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause_ms = min(BACKOFF_MS_MAX, BACKOFF_MS << min(failures - 1, 10))
        self._backoff_until_ms[key] = self._world.clock.now_ms() + pause_ms // 2 + self._rng.jitter_ms(pause_ms // 2)

    # -- calls to the keeper ---------------------------------------------------------------------------------------------------

    def _call_keeper_once(self, what: str, node: str, copy: AttemptId, now_ms: int, deed: Callable[[], Awaitable[None]]) -> None:
        """Call the keeper unless the same call is in progress or was made less than AGAIN_MS ago."""
        asked_ms = self._keeper_calls.get((what, copy))
        if asked_ms is not None and now_ms < asked_ms + KEEPER_RETRY_MS:
            self._enqueue(node, copy.key, asked_ms + KEEPER_RETRY_MS)
            return
        if len(self._keeper_calls) > KEEPER_CALLS_MAX:
            late_ms = now_ms - 2 * KEEPER_RETRY_MS
            self._keeper_calls = {one: at_ms for one, at_ms in self._keeper_calls.items() if at_ms > late_ms}
        self._keeper_calls[what, copy] = now_ms
        if what == "start":
            self._start_queue.mark_starting(copy)
        self._spawn(self._call_keeper(what, node, copy, deed), f"{what} {copy.key}")

    async def _call_keeper(self, what: str, node: str, copy: AttemptId, deed: Callable[[], Awaitable[None]]) -> None:
        try:
            await deed()
            if what != "end":  # a stop lasts for its grace period; keeping the entry prevents a repeated call until then
                self._keeper_calls.pop((what, copy), None)
        except WorldError as error:
            self._keeper_calls[what, copy] = self._world.clock.now_ms()
            if what == "start":
                self._start_queue.release(copy)
                self.starts.add("failed")
            self._log(f"{what} {copy.key}: {error}", **log_fields(node, copy))
        self._enqueue(node, copy.key)

    async def _release_slot(self, copy: AttemptId, after_ms: int) -> None:
        await self._world.clock.sleep_ms(after_ms)
        self._start_queue.release(copy)
        self._wake.set()

    async def _start(self, site: HostedNode, start: StartAction) -> None:
        known, asked = site.records.get(start.attempt), start.generation.spec.template.ports
        ports = known.ports if known is not None else await self._assign_ports({port.name: port.port for port in asked})
        making = site.reconciler.preparations.get(start.attempt)
        prepared = making.inputs if making is not None and making.inputs is not None else NO_INPUTS
        order = build_order(site.settings, start.attempt, start.replica, start.generation, ports, prepared)
        fence, rooms = fence_ms(start.generation), (site.settings.logs, site.settings.attempt_directory(start.attempt))
        kept = await self._keeper.start(
            order, restarts=start.restarts, fence_ms=fence, grace_ms=self._timing.kill_grace_ms, ports=ports, directories=rooms
        )
        self._spawn(self._release_slot(start.attempt, slot_hold_ms(order)), f"turn of {start.attempt.key}")
        if kept is not None and kept.number == NO_START:
            raise DiskError(kept.failed, kept.cure)
        self._keeper_calls.pop(("end", start.attempt), None)
        self.starts.add("begun" if kept is not None else "late")
        self._log_debug("process started", number=start.restarts, late=kept is None, **log_fields(site.name, start.attempt))
        if kept is not None:
            self._apply_record(kept)
        else:  # the fencing deadline has passed, or the renewal has not reached the keeper yet
            await self._sleep_with_jitter(self._timing.heartbeat_ms // 4)

    def _prepare(self, site: HostedNode, deed: PrepareAction) -> PreparationProgress:
        making = site.reconciler.preparations[deed.attempt] = PreparationProgress(deed.restarts)
        kept = site.records.get(deed.attempt)
        runs = kept is not None and kept.alive

        async def prepare() -> None:
            began_ms = self._world.clock.now_ms()
            await self._preparer.prepare(site.settings, deed.attempt, deed.replica, deed.generation, making, is_running=runs)
            if deed.generation.spec.template.artifacts or deed.generation.spec.template.rootfs:
                self.fetches.add((self._world.clock.now_ms() - began_ms) / 1000)
            self._enqueue(site.name)

        making.task = self._create_task(prepare(), f"prepare {deed.attempt.key}")
        return making

    def _inputs_of(self, site: HostedNode, copy: AttemptId, replica: Replica, generation: GenerationSpec) -> PreparedInputs | None:
        """Return the prepared inputs of a running attempt, or None while they are being prepared.

        An agent that finds a process already running prepares its inputs again, for probes and exec sessions beside it.
        """
        if not needs_preparation(generation.spec.template):
            return NO_INPUTS
        making = site.reconciler.preparations.get(copy)
        if making is None:
            making = self._prepare(site, PrepareAction(copy, replica, generation, site.records[copy].number))
        return (making.inputs or NO_INPUTS) if making.is_done else None

    def _abandon_unneeded(self, site: HostedNode) -> None:
        mind = site.reconciler
        for copy in [copy for copy in mind.preparations if copy not in site.records and not mind.should_run(self.assignments, copy)]:
            task = mind.preparations.pop(copy).task
            self._spawn(self._abandon(site.settings, copy, task), f"abandon {copy.key}")

    async def _abandon(self, place: NodeSettings, copy: AttemptId, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._preparer.abandon(place, copy)

    async def _assign_ports(self, wanted: dict[str, int]) -> dict[str, int]:
        free = iter(await self._world.ports.find_free(sum(port == 0 for port in wanted.values())))
        return {name: port or next(free) for name, port in wanted.items()}

    async def _forget(self, site: HostedNode, copy: AttemptId) -> None:
        await self._keeper.forget(copy)
        site.records.pop(copy, None)
        making = site.reconciler.preparations.pop(copy, None)
        if making is not None and making.task is not None:
            making.task.cancel()
        self._preparer.forget(copy)
        for known in (self._backoff_until_ms, self._failures):
            known.pop(copy.key, None)
        self._keeper_calls.pop(("end", copy), None)
        with suppress(DiskError):
            await self._batched_offload(lambda: self._world.disk.remove_tree(site.settings.attempt_directory(copy)))

    # -- helpers
    # ----------------------------------------------------------------------------------------------------------------

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
