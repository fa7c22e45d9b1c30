"""Base of all simulated roles: view, client, lease; records what it observes.

A `RoleContext` gives one process a watch cache of one scope and clients for it. A `SimulatedRole` holds a role by lease and
is level-triggered: it receives the keys that changed, reads their current state and sends claims as one batch. It acts only
while its lease is valid. A claim whose answer was lost is not tracked here: its effect shows in the view. The watch caches
and clients are the real ones; subclasses report what they observe, so that checks can compare it with the history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.endpoint import AuthorityStatus, Endpoint
from remit.client.lease_holder import LeaseHold, acquire
from remit.client.retry import RetryPolicy
from remit.client.rpc import EndpointStub
from remit.model.claims import Accepted, Actor, AnyClaim, Code, Evidence, Operation, Refused, Role, Vacate, Verdict
from remit.model.resources import Duration
from remit.model.wire.agent_messages import HeartbeatReport, NodeHeartbeat, NodeState
from remit.observation.cluster_objects import KINDS
from remit.observation.column_table import NONE
from remit.observation.reflector import Follower
from remit.observation.scheduler_view import View
from remit.observation.watch_cache import Board
from remit.simulate.world import random_streams
from remit.simulate.world.processes import SimProcess
from remit.simulate.world.store import StoreService
from remit.store.protocol import Head, Store
from remit.world.interfaces import Clock, World

if TYPE_CHECKING:
    from remit.simulate.actors.agents import SimulatedAgent

VIEW_PREFIXES: Final = ("replica/", *(f"{kind}/" for kind in KINDS))


class RecordedSchedulerView(View):
    def __init__(self, clock: Clock, observed: Callable[[str, int], None]) -> None:
        super().__init__(clock)
        self._observed = observed

    def reached(self, head: Head, revision: int) -> None:
        super().reached(head, revision)
        self._observed(head.incarnation, revision)

    def revisions(self) -> dict[str, int]:
        """The revision of each row in the view, by key."""
        kept, shapes = self.replicas, self.shapes
        found = {key: kept.at.revision[slot] for key, slot in kept.slots.items()}
        found |= self.things.revisions
        for path, owner in shapes.workloads.ids.items():
            if shapes.workloads.at.state[owner] != NONE:
                found[f"workload/{path}"] = shapes.workloads.at.revision[owner]
        for generation in shapes.ids.values():
            seen = shapes.seen(generation)
            found[f"generation/{seen.tenant}/{seen.workload}/{seen.number:08d}"] = shapes.at.revision[generation]
        return found


ChangeFilter = Callable[[str, Any, Any], bool]
"""Whether a change of a key, from the old to the new value, concerns a role."""


class RecordedWatchCache(Board):
    """A watch cache with its own reflector, which reports how far it has observed."""

    def __init__(
        self, store: Store, sure: Store, world: World, observed: Callable[[str, int], None], *, idle_ms: int = 10_000
    ) -> None:
        super().__init__(world.clock)
        self._observed = observed
        self._follower = Follower(store, sure, world, self, idle_ms=idle_ms)

    async def follow(self) -> None:
        await self._follower.follow()

    def reached(self, head: Head, revision: int) -> None:
        self._observed(head.incarnation, revision)
        super().reached(head, revision)


class ChangedKeys:
    """Keys that changed since the owner last took them. With `node`, all changes on that node; otherwise those that concern the
    role.
    """

    def __init__(self, board: Board, concerns: ChangeFilter, node: str = "") -> None:
        self.keys: dict[str, None] = dict.fromkeys(board.rows)
        self._board, self._concerns, self._all = board, concerns, bool(node)
        self._event = asyncio.Event()
        self._told = False
        board.subscribe(self, node)

    def changed(self, key: str, old: Any, new: Any) -> None:
        if self._all or self._concerns(key, old, new):
            self.keys[key] = None
            self._told = True

    def remind(self) -> None:
        """Wake the owner at the next commit of the scope."""
        self._told = True
        self._board.remind(self)

    def reached(self) -> None:
        if self._told:
            self._told = False
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

    def asked(self, asker: str, scope: str, operation: str) -> None: ...

    def answered(self, asker: str, scope: str, operation: Operation, verdict: Verdict) -> None: ...

    def gave_up(self, asker: str, scope: str, operation: str) -> None: ...

    def renewed(self, asker: str, scope: str, lease: str, epoch: int, sent_s: float) -> None: ...

    def observed(self, observer: str, scope: str, incarnation: str, revision: int) -> None: ...


class RunTiming:
    """Time constants of a run. DESIGN states them for a heartbeat interval of 2 s; they scale with the interval."""

    def __init__(self, beat_ms: int = 2_000) -> None:
        self.beat_ms = beat_ms
        self.suspect_ms = 3 * beat_ms
        self.unknown_ms = 15 * beat_ms // 2
        self.lease_ms = 12 * beat_ms
        self.server_beat_ms = beat_ms
        self.server_term_ms = 3 * beat_ms
        self.sweep_ms = 10 * beat_ms
        self.shape = RetryPolicy(
            deadline_ms=max(10_000, 2 * beat_ms), base_ms=max(50, beat_ms // 20), cap_ms=max(2_000, beat_ms // 2)
        )
        self.quiet = False
        """Set at the start of the quiet phase: roles submit nothing new, and liveness is checked from then on."""


class RecordedEndpoint:
    """An endpoint that reports each answer when it arrives."""

    def __init__(self, endpoint: Endpoint, process: SimProcess, scope: str, ear: ClientObserver) -> None:
        self._endpoint, self._asker, self._scope, self._ear = endpoint, process.name, scope, ear
        self._loop = process.loop

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        for operation in operations:
            self._ear.asked(self._asker, self._scope, operation.id)
        verdicts = await self._endpoint.submit(operations)
        for operation, verdict in zip(operations, verdicts, strict=False):
            self._ear.answered(self._asker, self._scope, operation, verdict)
        return verdicts

    async def status(self) -> AuthorityStatus:
        return await self._endpoint.status()

    async def renew(self, actor: Actor, /) -> bool:
        sent_s = self._loop.time()
        held = await self._endpoint.renew(actor)
        if held:
            self._ear.renewed(self._asker, self._scope, actor.lease, actor.epoch, sent_s)
        return held

    async def heartbeat(self, beats: Sequence[NodeHeartbeat], /) -> Sequence[bool]:
        sent_s = self._loop.time()
        held = await self._endpoint.heartbeat(beats)
        for beat, mine in zip(beats, held, strict=False):
            if mine:
                self._ear.renewed(self._asker, self._scope, beat.actor.lease, beat.actor.epoch, sent_s)
        return held

    async def heartbeat_ages(self) -> HeartbeatReport:
        return await self._endpoint.heartbeat_ages()

    async def node_states(self, nodes: Sequence[str], /) -> Sequence[NodeState]:
        return await self._endpoint.node_states(nodes)


class RecordedClient(AuthorityClient):
    """A client that reports each answer again when its caller receives it: both reports must be the same."""

    def __init__(self, seat: RoleContext, endpoints: Mapping[str, Endpoint], actor: Actor) -> None:
        super().__init__(endpoints, actor, seat.world, policy=seat.pace.shape)
        self._seat = seat

    async def _send(self, course: Any) -> list[Verdict]:
        verdicts = await super()._send(course)
        for operation, verdict in zip(course.operations, verdicts, strict=True):
            self._seat.ear.answered(self._seat.process.name, self._seat.scope, operation, verdict)
        return verdicts


class RoleContext:
    """One process in one scope."""

    def __init__(
        self, process: SimProcess, store: StoreService, servers: Sequence[str], ear: ClientObserver, pace: RunTiming
    ) -> None:
        self.process = process
        self.world: World = process.world
        self.scope = store.scope
        self.servers = tuple(servers)
        self.ear = ear
        self.pace = pace
        self.farm: SimulatedAgent | None = None
        """Set for agents, which use a real agent's assignments instead of `view`."""
        self.watched: RecordedSchedulerView | None = None
        """Set for schedulers, which use a real scheduler's view instead of `view`."""
        self.view = RecordedWatchCache(
            process.port(store, observer=True),
            process.port(store),
            process.world,
            self.observed,
            idle_ms=5 * pace.beat_ms,
        )

    def observed(self, incarnation: str, revision: int) -> None:
        self.ear.observed(self.process.name, self.scope, incarnation, revision)

    def give_up(self, error: RetriesExhausted) -> None:
        for operation in error.operation_ids:
            self.ear.gave_up(self.process.name, self.scope, operation)

    def client(self, actor: Actor) -> AuthorityClient:
        chance = self.world.chance
        names = chance.shuffled(self.servers)
        endpoints = {
            name: RecordedEndpoint(EndpointStub(self.world.link, name), self.process, self.scope, self.ear) for name in names
        }
        return RecordedClient(self, endpoints, actor)


class SimulatedRole:
    """One role in one scope."""

    role: ClassVar[Role]

    def __init__(self, seat: RoleContext, *, lease: str = "", node: str = "") -> None:
        self.seat = seat
        self.world = seat.world
        self.view = seat.view
        self.chance = seat.world.chance.stream(random_streams.role(self.role, lease))
        self.lease = lease or self.role.value
        self.changes = ChangedKeys(seat.view, self.concerns, node)
        self.actor = Actor(seat.process.name, self.role)
        self.client = seat.client(self.actor)
        self.tenure: LeaseHold | None = None

    def wants(self, keys: Sequence[str]) -> Iterable[AnyClaim]:
        """The claims to send now, after these keys have changed. A resync passes every key."""
        raise NotImplementedError

    def concerns(self, key: str, old: Any, new: Any) -> bool:
        """Whether this change wakes the role. A resync passes all keys in any case."""
        return True

    def heard(self, claim: AnyClaim, verdict: Verdict) -> None:
        """Called with the verdict of each claim."""

    # -- lease -----------------------------------------------------------------------------------------------------------

    async def play(self) -> None:
        """Acquire the lease, act while it is valid, and start again. Never returns."""
        while True:
            tenure = await self._acquire()
            if tenure is None:
                await self.world.clock.sleep_ms(self.seat.pace.beat_ms + self.chance.uniform_ms(self.seat.pace.beat_ms))
                continue
            self.tenure = tenure
            self.client.actor = self.actor = tenure.actor
            await self.began()
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(self._renew(tenure), name="renew")
                await self._act(tenure)
                renewing.cancel()
            self.tenure = None

    async def began(self) -> None:
        """Called after the lease was acquired."""
        self.look_at_all()

    def look_at_all(self) -> None:
        """Resync: enqueue every key, as if everything had changed."""
        self.changes.keys.update(dict.fromkeys(self.view.rows))
        self.changes.wake()

    async def _acquire(self) -> LeaseHold | None:
        self.client.actor = Actor(self.seat.process.name, self.role)
        try:
            found = await acquire(self.client, self.world.clock, self.lease, Duration(self.seat.pace.lease_ms))
        except RetriesExhausted as error:
            self.seat.give_up(error)
            return None
        return found if isinstance(found, LeaseHold) else None

    async def _renew(self, tenure: LeaseHold) -> None:
        pause_ms = self.seat.pace.lease_ms // 3
        while not tenure.is_lost:
            await self.world.clock.sleep_ms(pause_ms - self.chance.uniform_ms(pause_ms // 8))
            try:
                await tenure.renew(self.client, deadline_ms=pause_ms)
            except RetriesExhausted:
                continue
            self.renewed(tenure)

    def renewed(self, tenure: LeaseHold) -> None:
        """Called after a renewal was answered."""

    async def _act(self, tenure: LeaseHold) -> None:
        clock, pace = self.world.clock, self.seat.pace
        sweep_ms = clock.now_ms() + self.chance.uniform_ms(pace.sweep_ms)
        while tenure.is_valid(now_ms := clock.now_ms()):
            if now_ms >= sweep_ms:
                sweep_ms = now_ms + pace.sweep_ms + self.chance.uniform_ms(pace.sweep_ms // 4)
                self.look_at_all()
            try:
                async with clock.timeout_ms(max(1, min(sweep_ms, tenure.valid_until_ms) - now_ms)):
                    await self.changes.wait()
            except TimeoutError:
                continue
            await clock.sleep_ms(1 + self.chance.uniform_ms(20))
            await self.turn(tenure)
            if self.role is not Role.AGENT and self.chance.below(HAND_OVER_TURNS) == 0:
                await self._hand_over(tenure)

    async def _hand_over(self, tenure: LeaseHold) -> None:
        """Give up the lease, so that another process can take it. If there is no answer, the lease expires by itself."""
        tenure.mark_lost()
        await self.say([Vacate(self.lease)])
        await self.world.clock.sleep_ms(self.seat.pace.beat_ms // 8)

    async def turn(self, tenure: LeaseHold) -> None:
        """Take the changed keys and send the claims they lead to."""
        keys = self.changes.take()
        claims = list(self.wants(keys))
        if claims and tenure.is_valid(self.world.clock.now_ms()):
            await self.say(claims)

    async def say(self, claims: Sequence[AnyClaim], **more: Any) -> list[Verdict] | None:
        """Send claims; None if there was no answer. Their effect, if any, shows in the view."""
        evidence = Evidence(self.view.revision, self.view.age_ms())
        try:
            verdicts = await self.client.submit_many(claims, evidence=evidence, **more)
        except RetriesExhausted as error:
            self.seat.give_up(error)
            return None
        self.learn(claims, verdicts)
        return verdicts

    def learn(self, claims: Sequence[AnyClaim], verdicts: Sequence[Verdict]) -> None:
        for claim, verdict in zip(claims, verdicts, strict=True):
            self.heard(claim, verdict)
        if any(isinstance(verdict, Refused) and verdict.code is Code.STALE_EVIDENCE for verdict in verdicts):
            # The scope had no commit for longer than evidence may be old: retry everything at its next commit.
            self.changes.keys.update(dict.fromkeys(self.view.rows))
            self.changes.remind()


def accepted(verdict: Verdict) -> bool:
    return isinstance(verdict, Accepted)
