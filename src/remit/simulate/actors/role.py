"""Base of all simulated roles: view, client, lease; records what it observes.

A `RoleContext` gives one process a watch cache of one scope and clients for it. A `SimulatedRole` holds a role by lease and
is level-triggered: it receives the keys that changed, reads their current state and sends claims as one batch. It acts only
while its lease is valid. A claim whose answer was lost is not tracked here: its effect shows in the view. The watch caches
and clients are the real ones; subclasses report what they observe, so that checks can compare it with the history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

from remit.agent.assignments import Assignments
from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.endpoint import AuthorityStatus, Endpoint
from remit.client.lease_holder import LeaseHold, acquire
from remit.client.retry import RetryPolicy
from remit.client.rpc import EndpointStub
from remit.model.claims import Accepted, Actor, AnyClaim, Code, Evidence, Operation, Refused, Vacate, Verdict
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeState
from remit.observation.cluster_objects import VIEWED_PREFIXES
from remit.observation.column_table import NONE
from remit.observation.reflector import Reflector
from remit.observation.scheduler_view import SchedulerView
from remit.observation.watch_cache import WatchCache
from remit.simulate.world import random_streams
from remit.simulate.world.processes import SimProcess
from remit.simulate.world.store import StoreService
from remit.store.protocol import Head, Store
from remit.world.interfaces import Clock, World

VIEW_PREFIXES: Final = ("replica/", *VIEWED_PREFIXES)


class RecordedSchedulerView(SchedulerView):
    def __init__(self, clock: Clock, observed: Callable[[str, int], None]) -> None:
        super().__init__(clock)
        self._observed = observed

    def advance(self, head: Head, revision: int) -> None:
        super().advance(head, revision)
        self._observed(head.incarnation, revision)

    def revisions(self) -> dict[str, int]:
        """The revision of each row in the view, by key."""
        replicas, shapes = self.replicas, self.shapes
        revisions = {key: replicas.at.revision[slot] for key, slot in replicas.slots.items()}
        revisions |= self.objects.revisions
        for path, owner in shapes.workloads.ids.items():
            if shapes.workloads.at.state[owner] != NONE:
                revisions[f"workload/{path}"] = shapes.workloads.at.revision[owner]
        for generation in shapes.ids.values():
            info = shapes.info(generation)
            revisions[f"generation/{info.tenant}/{info.workload}/{info.number:08d}"] = shapes.at.revision[generation]
        return revisions


ChangeFilter = Callable[[str, Any, Any], bool]
"""Whether a change of a key, from the old to the new value, concerns a role."""


class RecordedWatchCache(WatchCache):
    """A watch cache with its own reflector, which reports how far it has observed."""

    def __init__(
        self, store: Store, sure: Store, world: World, observed: Callable[[str, int], None], *, idle_ms: int = 10_000
    ) -> None:
        super().__init__(world.clock)
        self._observed = observed
        self._reflector = Reflector(store, sure, world, self, idle_ms=idle_ms)

    async def follow(self) -> None:
        await self._reflector.run()

    def advance(self, head: Head, revision: int) -> None:
        self._observed(head.incarnation, revision)
        super().advance(head, revision)


class ChangedKeys:
    """Keys that changed since the owner last took them. With `node`, all changes on that node; otherwise those that concern the
    role.
    """

    def __init__(self, cache: WatchCache, is_relevant: ChangeFilter, node: str = "") -> None:
        self.keys: dict[str, None] = dict.fromkeys(cache.rows)
        self._cache, self._is_relevant, self._every_change = cache, is_relevant, bool(node)
        self._event = asyncio.Event()
        self._pending_wake = False
        cache.subscribe(self, node)

    def on_change(self, key: str, old: Any, new: Any) -> None:
        if self._every_change or self._is_relevant(key, old, new):
            self.keys[key] = None
            self._pending_wake = True

    def wake_on_commit(self) -> None:
        """Wake the owner at the next commit of the scope."""
        self._pending_wake = True
        self._cache.notify_on_commit(self)

    def on_commit(self) -> None:
        if self._pending_wake:
            self._pending_wake = False
            self.wake()

    def wake(self) -> None:
        if self.keys:
            self._event.set()

    async def wait(self) -> None:
        await self._event.wait()

    def take(self) -> list[str]:
        self._event.clear()
        keys, self.keys = self.keys, {}
        return list(keys)


HAND_OVER_TURNS: Final = 250
"""After about this many turns a role gives up its lease."""


class ClientObserver(Protocol):
    """Receives what clients send and the answers they get."""

    def operation_sent(self, client: str, scope: str, operation: str) -> None: ...

    def operation_answered(self, client: str, scope: str, operation: Operation, verdict: Verdict) -> None: ...

    def operation_abandoned(self, client: str, scope: str, operation: str) -> None: ...

    def lease_renewed(self, client: str, scope: str, lease: str, epoch: int, sent_s: float) -> None: ...

    def revision_observed(self, observer: str, scope: str, incarnation: str, revision: int) -> None: ...


class RunTiming:
    """Time constants of a run, written independently of law/timing.py. They scale with the heartbeat interval."""

    def __init__(self, heartbeat_ms: int = 2_000) -> None:
        self.heartbeat_ms = heartbeat_ms
        self.suspect_ms = 3 * heartbeat_ms
        self.unknown_ms = 15 * heartbeat_ms // 2
        self.lease_ms = 12 * heartbeat_ms
        self.server_heartbeat_ms = heartbeat_ms
        self.server_term_ms = 3 * heartbeat_ms
        self.resync_ms = 10 * heartbeat_ms
        self.retry_policy = RetryPolicy(
            deadline_ms=max(10_000, 2 * heartbeat_ms), base_ms=max(50, heartbeat_ms // 20), cap_ms=max(2_000, heartbeat_ms // 2)
        )
        self.quiet = False
        """Set at the start of the quiet phase: roles submit nothing new, and liveness is checked from then on."""


class RecordedEndpoint:
    """An endpoint that reports each answer when it arrives."""

    def __init__(self, endpoint: Endpoint, process: SimProcess, scope: str, observer: ClientObserver) -> None:
        self._endpoint, self._client_name, self._scope, self._observer = endpoint, process.name, scope, observer
        self._loop = process.loop

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        for operation in operations:
            self._observer.operation_sent(self._client_name, self._scope, operation.id)
        verdicts = await self._endpoint.submit(operations)
        for operation, verdict in zip(operations, verdicts, strict=False):
            self._observer.operation_answered(self._client_name, self._scope, operation, verdict)
        return verdicts

    async def status(self) -> AuthorityStatus:
        return await self._endpoint.status()

    async def renew(self, actor: Actor, /) -> bool:
        sent_s = self._loop.time()
        renewed = await self._endpoint.renew(actor)
        if renewed:
            self._observer.lease_renewed(self._client_name, self._scope, actor.lease, actor.epoch, sent_s)
        return renewed

    async def heartbeat(self, heartbeats: Sequence[NodeHeartbeat], /) -> Sequence[bool]:
        sent_s = self._loop.time()
        renewed = await self._endpoint.heartbeat(heartbeats)
        for heartbeat, renewed_here in zip(heartbeats, renewed, strict=False):
            if renewed_here:
                self._observer.lease_renewed(
                    self._client_name, self._scope, heartbeat.actor.lease, heartbeat.actor.epoch, sent_s
                )
        return renewed

    async def heartbeat_ages(self) -> HeartbeatReport:
        return await self._endpoint.heartbeat_ages()

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return await self._endpoint.node_states(nodes)


class RecordedClient(AuthorityClient):
    """A client that reports each answer again when its caller receives it: both reports must be the same."""

    def __init__(self, context: RoleContext, endpoints: Mapping[str, Endpoint], actor: Actor) -> None:
        super().__init__(endpoints, actor, context.world, policy=context.timing.retry_policy)
        self._context = context

    async def _send(self, progress: Any) -> list[Verdict]:
        verdicts = await super()._send(progress)
        for operation, verdict in zip(progress.operations, verdicts, strict=True):
            self._context.observer.operation_answered(self._context.process.name, self._context.scope, operation, verdict)
        return verdicts


class RoleContext:
    """One process in one scope."""

    def __init__(
        self, process: SimProcess, store: StoreService, servers: Sequence[str], observer: ClientObserver, timing: RunTiming
    ) -> None:
        self.process = process
        self.world: World = process.world
        self.scope = store.scope
        self.servers = tuple(servers)
        self.observer = observer
        self.timing = timing
        self.assignments: Assignments | None = None
        """Set for agents, which use a real agent's assignments instead of `view`."""
        self.agent_nodes: tuple[str, ...] = ()
        self.scheduler_view: RecordedSchedulerView | None = None
        """Set for schedulers, which use a real scheduler's view instead of `view`."""
        self.view = RecordedWatchCache(
            process.port(store, observer=True),
            process.port(store),
            process.world,
            self.report_observed,
            idle_ms=5 * timing.heartbeat_ms,
        )

    def report_observed(self, incarnation: str, revision: int) -> None:
        self.observer.revision_observed(self.process.name, self.scope, incarnation, revision)

    def report_abandoned(self, error: RetriesExhausted) -> None:
        for operation in error.operation_ids:
            self.observer.operation_abandoned(self.process.name, self.scope, operation)

    def client(self, actor: Actor) -> AuthorityClient:
        randomness = self.world.randomness
        names = randomness.shuffled(self.servers)
        endpoints = {
            name: RecordedEndpoint(EndpointStub(self.world.link, name), self.process, self.scope, self.observer)
            for name in names
        }
        return RecordedClient(self, endpoints, actor)


class SimulatedRole:
    """One role in one scope."""

    role: ClassVar[Role]

    def __init__(self, context: RoleContext, *, lease: str = "", node: str = "") -> None:
        self.context = context
        self.world = context.world
        self.view = context.view
        self.rng = context.world.randomness.stream(random_streams.role(self.role, lease))
        self.lease = lease or self.role.value
        self.changed_keys = ChangedKeys(context.view, self.is_relevant, node)
        self.actor = Actor(context.process.name, self.role)
        self.client = context.client(self.actor)
        self.lease_hold: LeaseHold | None = None

    def claims_for(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        """The claims to send now, after these keys have changed. A resync passes every key."""
        raise NotImplementedError

    def is_relevant(self, key: str, old: Any, new: Any) -> bool:
        """Whether this change wakes the role. A resync passes all keys in any case."""
        return True

    def on_verdict(self, claim: AnyClaim, verdict: Verdict) -> None:
        """Called with the verdict of each claim."""

    # -- lease -----------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Acquire the lease, act while it is valid, and start again. Never returns."""
        while True:
            lease_hold = await self._acquire()
            if lease_hold is None:
                await self.world.clock.sleep_ms(
                    self.context.timing.heartbeat_ms + self.rng.jitter_ms(self.context.timing.heartbeat_ms)
                )
                continue
            self.lease_hold = lease_hold
            self.client.actor = self.actor = lease_hold.actor
            await self.on_lease_acquired()
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renew(lease_hold), name="renew")
                await self._act(lease_hold)
                renewing.cancel()
            self.lease_hold = None

    async def on_lease_acquired(self) -> None:
        """Called after the lease was acquired."""
        self.resync()

    def resync(self) -> None:
        """Resync: enqueue every key, as if everything had changed."""
        self.changed_keys.keys.update(dict.fromkeys(self.view.rows))
        self.changed_keys.wake()

    async def _acquire(self) -> LeaseHold | None:
        self.client.actor = Actor(self.context.process.name, self.role)
        try:
            acquired = await acquire(self.client, self.world.clock, self.lease, Duration(self.context.timing.lease_ms))
        except RetriesExhausted as error:
            self.context.report_abandoned(error)
            return None
        return acquired if isinstance(acquired, LeaseHold) else None

    async def _renew(self, lease_hold: LeaseHold) -> None:
        pause_ms = self.context.timing.lease_ms // 3
        while not lease_hold.is_lost:
            await self.world.clock.sleep_ms(pause_ms - self.rng.jitter_ms(pause_ms // 8))
            try:
                await lease_hold.renew(self.client, deadline_ms=pause_ms)
            except RetriesExhausted:
                continue
            self.on_renewed(lease_hold)

    def on_renewed(self, lease_hold: LeaseHold) -> None:
        """Called after a renewal was answered."""

    async def _act(self, lease_hold: LeaseHold) -> None:
        clock, timing = self.world.clock, self.context.timing
        next_resync_ms = clock.now_ms() + self.rng.jitter_ms(timing.resync_ms)
        while lease_hold.is_valid(now_ms := clock.now_ms()):
            if now_ms >= next_resync_ms:
                next_resync_ms = now_ms + timing.resync_ms + self.rng.jitter_ms(timing.resync_ms // 4)
                self.resync()
            try:
                async with clock.timeout_ms(max(1, min(next_resync_ms, lease_hold.valid_until_ms) - now_ms)):
                    await self.changed_keys.wait()
            except TimeoutError:
                continue
            await clock.sleep_ms(1 + self.rng.jitter_ms(20))
            await self.reconcile(lease_hold)
            if self.role is not Role.AGENT and self.rng.randrange(HAND_OVER_TURNS) == 0:
                await self._give_up_lease(lease_hold)

    async def _give_up_lease(self, lease_hold: LeaseHold) -> None:
        """Give up the lease, so that another process can take it. If there is no answer, the lease expires by itself."""
        lease_hold.mark_lost()
        await self.send([Vacate(self.lease)])
        await self.world.clock.sleep_ms(self.context.timing.heartbeat_ms // 8)

    async def reconcile(self, lease_hold: LeaseHold) -> None:
        """Take the changed keys and send the claims they lead to."""
        keys = self.changed_keys.take()
        claims = list(self.claims_for(keys))
        if claims and lease_hold.is_valid(self.world.clock.now_ms()):
            await self.send(claims)

    async def send(self, claims: Sequence[AnyClaim], **options: Any) -> list[Verdict] | None:
        """Send claims; None if there was no answer. Their effect, if any, shows in the view."""
        evidence = Evidence(self.view.revision, self.view.age_ms())
        try:
            verdicts = await self.client.submit_many(claims, evidence=evidence, **options)
        except RetriesExhausted as error:
            self.context.report_abandoned(error)
            return None
        self.on_verdicts(claims, verdicts)
        return verdicts

    def on_verdicts(self, claims: Sequence[AnyClaim], verdicts: Sequence[Verdict]) -> None:
        for claim, verdict in zip(claims, verdicts, strict=True):
            self.on_verdict(claim, verdict)
        if any(isinstance(verdict, Refused) and verdict.code is Code.STALE_EVIDENCE for verdict in verdicts):
            # The scope had no commit for longer than evidence may be old: retry everything at its next commit.
            self.changed_keys.keys.update(dict.fromkeys(self.view.rows))
            self.changed_keys.wake_on_commit()


def accepted(verdict: Verdict) -> bool:
    return isinstance(verdict, Accepted)
