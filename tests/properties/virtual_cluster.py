"""Fixture: a small cluster in virtual time with one authority, the real controllers and scheduler, and simulated nodes.

Processes are simulated: a bound replica starts, becomes ready, and stops on request; that of a job runs for a second. Only a
test injects faults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from remit.assembly import build_controllers, build_scheduler
from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.endpoint import AuthorityStatus, OutcomeUnknown
from remit.commitment.authority import Authority
from remit.correction.controller_set import ControllerSet
from remit.correction.framework.loop import LoopTiming
from remit.model.claims import Accepted, Acquire, Actor, AnyClaim, Apply, Move, Operation, Verdict
from remit.model.kinds import Node, Workload
from remit.model.kinds.registry import AnyObject
from remit.model.records import Phase, Replica
from remit.model.resources import Duration
from remit.model.roles import Role
from remit.model.wire.agent_messages import NodeHeartbeat, NodeState
from remit.observation.reflector import Reflector
from remit.observation.watch_cache import WatchCache
from remit.proposal.scheduler import SchedulerTiming
from remit.store.memory import MemoryStore
from remit.world.interfaces import World
from tests.properties.authority_world import OPERATOR, tenant
from tests.unit.client.fake_authority import ForwardingEndpoint
from tests.unit.world.virtual_world import run_virtually, virtual_world

BEAT_MS: Final = 1_000
CADENCE: Final = LoopTiming(heartbeat_ms=BEAT_MS, claims_per_batch=1)
"""One claim at a time, so that there is a step between any two."""

_NEXT: Final = {Phase.BOUND: "start", Phase.STARTING: "run", Phase.DRAINING: "stop", Phase.STOPPING: "stopped"}


class FaultyWire(ForwardingEndpoint):
    """Counts the claims of controllers; at call `strike` it crashes them, or loses or repeats the answer."""

    def __init__(self, authority: Authority, strike: int = 0, how: str = "") -> None:
        self.target = self.authority = authority
        self.strike, self.how = strike, how
        self.operations: list[Operation] = []
        self.calls = 0
        self.died = asyncio.Event()

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        self.calls += 1
        how = self.how if self.calls == self.strike else ""
        if how == "before":
            await self._die()
        self.operations += operations
        verdicts = await self.authority.submit(operations)
        if how == "twice":
            assert list(await self.authority.submit(operations)) == list(verdicts)
        if how == "after":
            await self._die()
        if how == "lost":
            raise OutcomeUnknown("lost")
        return verdicts

    async def _die(self) -> None:
        self.died.set()
        await asyncio.Event().wait()

    async def status(self) -> AuthorityStatus:
        return await self.authority.status()

    async def renew(self, actor: Actor, /) -> bool:
        return await self.authority.renew(actor)


class VirtualCluster:
    def __init__(self, world: World, store: MemoryStore, authority: Authority, group: asyncio.TaskGroup) -> None:
        self.world, self.store, self.authority, self.group = world, store, authority, group
        self.board = WatchCache(world.clock)
        """Client of the test itself."""
        self.client = AuthorityClient({"a": authority}, OPERATOR, world)
        self.leases: dict[str, Actor] = {}
        self.silent: set[str] = set()
        self.healths: dict[str, list[str]] = {}
        """Health hiscenario by node."""
        self.board.subscribe(self)

    def on_change(self, key: str, old: Any, new: Any) -> None:
        if isinstance(new, Node):
            seen = self.healths.setdefault(new.metadata.name, [])
            if seen[-1:] != [new.status.health.value]:
                seen.append(new.status.health.value)

    def on_commit(self) -> None:
        pass

    async def sleep(self, ms: int) -> None:
        await self.world.clock.sleep_ms(ms)

    async def apply(self, *objects: AnyObject) -> None:
        for verdict in await self.client.submit_many([Apply(obj) for obj in objects]):
            assert isinstance(verdict, Accepted), verdict

    async def ask(self, *claims: AnyClaim) -> None:
        for verdict in await self.client.submit_many(claims):
            assert isinstance(verdict, Accepted), verdict

    # -- components ------------------------------------------------------------------------------------------------------

    def start_controllers(self, wire: FaultyWire, name: str = "crew") -> asyncio.Task[None]:
        def client_for(actor: Actor) -> AuthorityClient:
            return AuthorityClient({"a": wire}, actor, self.world)

        made: ControllerSet = build_controllers(self.store, self.store, client_for, self.world, name=name, timing=CADENCE)
        return self.group.create_task(made.run())

    async def run_restarted_controllers(self, wire: FaultyWire) -> None:
        """Restart them without any state whenever they have crashed."""
        while True:
            task = self.start_controllers(wire)
            await wire.died.wait()
            task.cancel()
            wire = FaultyWire(self.authority)

    async def add_nodes(self, *nodes: Node) -> None:
        await self.apply(tenant("t1", "100"), *nodes)
        follower = Reflector(self.store, self.store, self.world, self.board, idle_ms=5 * BEAT_MS)
        self.group.create_task(follower.run())
        for node in nodes:
            name = node.metadata.name
            actor = Actor(f"agent-{name}", Role.AGENT)
            asker = AuthorityClient({"a": self.authority}, actor, self.world)
            (verdict,) = await asker.submit_many([Acquire(f"agent/{name}", Duration(12 * BEAT_MS))])
            assert isinstance(verdict, Accepted)
            self.leases[name] = Actor(actor.name, Role.AGENT, f"agent/{name}", verdict.number)
            self.group.create_task(self._agent(name, asker))
        asker = AuthorityClient({"a": self.authority}, Actor("s", Role.SCHEDULER), self.world)
        rhythm = SchedulerTiming(lease_ms=12 * BEAT_MS, idle_ms=5 * BEAT_MS, batch_max=10)
        self.group.create_task(build_scheduler(self.store, self.store, asker, self.world, name="s", timing=rhythm).run())

    async def _agent(self, node: str, asker: AuthorityClient) -> None:
        beat_ms = 0
        ran: dict[str, int] = {}
        while True:
            now_ms = self.world.clock.now_ms()
            if node not in self.silent and self.board.head is not None:
                asker.actor = self.leases[node]
                if now_ms >= beat_ms:
                    beat_ms = now_ms + BEAT_MS
                    await asker.heartbeat([NodeHeartbeat(asker.actor, NodeState(node, settled=self.board.head.incarnation))])
                moves = [move for one in self.board.replicas_on(node) if (move := self._move(one.key, ran, now_ms)) is not None]
                if moves:
                    await self._say(asker, moves)
            await self.sleep(100)

    async def _say(self, asker: AuthorityClient, moves: Sequence[Move]) -> None:
        try:
            await asker.submit_many(moves)
        except RetriesExhausted as error:
            raise AssertionError("nothing fails here") from error

    def _move(self, key: str, ran: dict[str, int], now_ms: int) -> Move | None:
        kept = self.board.rows[key]
        replica: Replica = kept.obj
        status = replica.status
        workload: Workload | None = self.board.get(f"workload/{replica.metadata.tenant}/{replica.spec.workload}")
        name, result = _NEXT.get(status.phase, ""), ""
        if status.phase is Phase.RUNNING and workload is not None:
            if workload.spec.type != "job":
                name = "ready"
            elif now_ms - ran.setdefault(f"{key} {status.attempt}", now_ms) >= 1_000:
                name, result = "finish", "ok"
        if name == "stopped":
            result = "stopped"
        return Move(key, kept.revision, name, status.attempt, result) if name else None

    # -- state -----------------------------------------------------------------------------------------------------------

    def phases(self, workload: str) -> list[str]:
        return sorted(replica.obj.status.phase.value for replica in self.board.replicas_of("t1", workload))

    async def until(self, what: str, so: Callable[[], bool], within_ms: int = 120_000) -> None:
        until_ms = self.world.clock.now_ms() + within_ms
        while not so():
            if self.world.clock.now_ms() > until_ms:
                raise AssertionError(f"never {what}: {self.final_state()}")
            await self.sleep(200)

    def final_state(self) -> dict[str, Any]:
        """The state without operations, times and attempts."""
        found: dict[str, Any] = {}
        for key, kept in self.board.of_kind("workload/"):
            found[key] = self.phases(kept.obj.metadata.name), _conditions(kept.obj)
        for key, kept in self.board.of_kind("node/"):
            found[key] = kept.obj.status.health.value, _conditions(kept.obj)
        found["orphans"] = sorted(
            key
            for key, kept in self.board.of_kind("replica/")
            if f"workload/t1/{kept.obj.spec.workload}" not in self.board.rows
        )
        return found


def _conditions(obj: Workload | Node) -> dict[str, tuple[str, str, int]]:
    return {
        condition.type: (condition.status, condition.reason, condition.observed_generation)
        for condition in sorted(obj.status.conditions, key=str)
    }


def in_virtual_cluster(scenario: Callable[[VirtualCluster], Coroutine[Any, Any, None]]) -> None:
    async def run_test() -> None:
        world, store = virtual_world(), MemoryStore()
        authority = await Authority.take_over(
            store, scope="r1", holder="a", clock=world.clock, ids=world.ids, timing=CADENCE.timing
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(authority.run(heartbeat_ms=BEAT_MS))
            await scenario(VirtualCluster(world, store, authority, group))
            for task in tuple(group._tasks):
                task.cancel()

    run_virtually(run_test())
