"""An authority in memory, and controller loops on it with a watch cache each, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any

from remit.client.authority_client import AuthorityClient, RetriesExhausted
from remit.client.endpoint import AuthorityStatus, OutcomeUnknown
from remit.commitment.authority import Authority
from remit.correction.framework.actions import Action, ControllerPermissions, KeyTrigger, ReconcileResult
from remit.correction.framework.loop import Controller, ControllerLoop, LoopTiming, ReconcileTime
from remit.model.claims import Actor, AnyClaim, Apply, Mark, Operation, Verdict
from remit.model.kinds import Node, NodeHealth, Region
from remit.model.metadata import Metadata
from remit.model.objects import decode
from remit.model.records import Event
from remit.model.roles import Role
from remit.observation.reflector import Reflector
from remit.observation.watch_cache import WatchCache
from remit.store.memory import MemoryStore
from remit.world.interfaces import World
from tests.properties.authority_world import OPERATOR, node
from tests.unit.client.fake_authority import ForwardingEndpoint
from tests.unit.world.virtual_world import run_virtually, virtual_world

CADENCE = LoopTiming(heartbeat_ms=1_000)


class RecordingEndpoint(ForwardingEndpoint):
    """Records operations; loses answers while `lose` is set."""

    def __init__(self, authority: Authority) -> None:
        self.target = self.authority = authority
        self.operations: list[Operation] = []
        self.answers: list[Verdict] = []
        self.lose = False
        self.answer_after_ms = 0
        self.statuses = 0

    async def submit(self, operations: Sequence[Operation], /) -> Sequence[Verdict]:
        self.operations += operations
        verdicts = await self.authority.submit(operations)
        if self.lose:
            raise OutcomeUnknown("lost")
        if self.answer_after_ms:
            await self.authority.clock.sleep_ms(self.answer_after_ms)
        self.answers += verdicts
        return verdicts

    async def status(self) -> AuthorityStatus:
        self.statuses += 1
        return await self.authority.status()

    async def renew(self, actor: Actor, /) -> bool:
        return await self.authority.renew(actor)

    def claims(self, kind: type[Any]) -> list[Any]:
        return [operation.claim for operation in self.operations if isinstance(operation.claim, kind)]


class MarkReadyController(Controller):
    """Marks every node ready; a test can add actions with `more`."""

    permissions = ControllerPermissions(Role.NODES, claims=(Mark,), transitions=("evict", "doubt", "lose"))

    def __init__(self, board: WatchCache) -> None:
        super().__init__(board)
        self.reconciled: list[tuple[str, int]] = []
        self.more: Callable[[str], Iterable[ReconcileResult]] = lambda key: ()
        self.once = ""
        self.verdicts: list[tuple[str, Verdict | None]] = []

    def keys_for(self, key: str, old: Any, new: Any) -> Iterable[KeyTrigger]:
        return (key,) if key.startswith("node/") else ()

    def all_keys(self) -> Iterable[str]:
        return [key for key, _ in self.cache.of_kind("node/")]

    def reconcile(self, key: str, times: ReconcileTime) -> Iterator[ReconcileResult]:
        self.reconciled.append((key, times.now_ms))
        kept = self.cache.rows.get(key)
        if kept is None:
            return
        after = {NodeHealth.JOINING: NodeHealth.READY, NodeHealth.SUSPECT: NodeHealth.READY}
        if kept.obj.status.health in after:
            yield Action(Mark(kept.obj.metadata.name, kept.revision, NodeHealth.READY), self.once)
        yield from self.more(key)

    def on_verdict(self, key: str, action: Action, verdict: Verdict | None) -> None:
        self.verdicts.append((key, verdict))


class LoopBench:
    """An authority in its store, and controller loops with a cache each."""

    def __init__(self, world: World, store: MemoryStore, authority: Authority, group: asyncio.TaskGroup) -> None:
        self.world, self.store, self.authority, self._group = world, store, authority, group
        self.failures: list[RetriesExhausted] = []
        self._count = 0

    def loop(
        self, *, frozen: bool = False
    ) -> tuple[MarkReadyController, ControllerLoop, RecordingEndpoint, asyncio.Task[None]]:
        """`frozen`: its cache is fed no more after the first reconcile."""
        self._count += 1
        wire, board = RecordingEndpoint(self.authority), WatchCache(self.world.clock)
        name = f"c{self._count}"
        client = AuthorityClient({"a": wire}, Actor(name, Role.NODES), self.world)
        controller = MarkReadyController(board)
        loop = ControllerLoop(controller, client, self.world, name=name, timing=CADENCE, on_failure=self.failures.append)
        follower = Reflector(self.store, self.store, self.world, board, idle_ms=CADENCE.watch_idle_ms)
        feeding = self._group.create_task(follower.run())
        if frozen:
            self._group.create_task(self._freeze(controller, feeding))
        return controller, loop, wire, self._group.create_task(loop.run())

    async def _freeze(self, controller: MarkReadyController, feeding: asyncio.Task[None]) -> None:
        while not controller.reconciled:
            await self.sleep(1)
        feeding.cancel()

    async def sleep(self, ms: int) -> None:
        await self.world.clock.sleep_ms(ms)

    async def ask(self, actor: Actor, *claims: AnyClaim) -> list[Verdict]:
        return await AuthorityClient({"a": self.authority}, actor, self.world).submit_many(claims)

    async def nodes(self, *names: str) -> None:
        await self.ask(OPERATOR, *(Apply(node(name)) for name in names))

    async def health(self, name: str) -> str:
        row = await self.store.get(f"node/{name}")
        assert row is not None
        found = decode(row.value)
        assert isinstance(found, Node)
        return found.status.health

    async def events(self) -> list[str]:
        page = await self.store.range("event/", limit=100)
        found = [decode(row.value) for row in page.rows]
        return [event.spec.reason for event in found if isinstance(event, Event)]


def loop_test(test: Callable[[LoopBench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run_test() -> None:
        async def run_in_world() -> None:
            world, store = virtual_world(), MemoryStore()
            authority = await Authority.take_over(store, scope="r1", holder="a", clock=world.clock, ids=world.ids)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(authority.run(heartbeat_ms=1_000))]
                bench = LoopBench(world, store, authority, group)
                await bench.ask(OPERATOR, Apply(Region(metadata=Metadata(name="r1"))))
                await test(bench)
                for task in (*tasks, *group._tasks):
                    task.cancel()

        run_virtually(run_in_world())

    run_test.__name__, run_test.__doc__, run_test.__module__ = test.__name__, test.__doc__, test.__module__
    return run_test
