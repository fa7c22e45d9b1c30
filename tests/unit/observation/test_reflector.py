"""Reflector over a remote store: a healthy watch is kept, a silent one is replaced by a new list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from remit.client.authority_client import AuthorityClient
from remit.commitment.authority import Authority
from remit.model.claims import Actor, Apply
from remit.model.kinds import Region
from remit.model.metadata import Metadata
from remit.model.roles import Role
from remit.observation.reflector import Reflector
from remit.observation.watch_cache import WatchCache
from remit.store.memory import MemoryStore
from remit.store.protocol import HEAD, Page, Row, Watch, WatchEvent
from remit.world.interfaces import World
from tests.unit.world.virtual_world import run_virtually, virtual_world

BEAT_MS = 1_000
IDLE_MS = 5_000


class RemoteStore:
    """A store read over a link: its watch is a generator, and is over for good once it was interrupted."""

    def __init__(self, store: MemoryStore, world: World) -> None:
        self._store, self._world = store, world
        self.lists = self.watches = 0
        self.mute = False
        """A watch yields nothing any more and does not end either."""
        self.listing_ms = 0

    async def get(self, key: str) -> Row | None:
        return await self._store.get(key)

    async def range(self, prefix: str, *, after: str = "", limit: int = 1_000, revision: int = 0) -> Page:
        if prefix == HEAD:
            self.lists += 1
        else:
            await self._world.clock.sleep_ms(self.listing_ms)
        return await self._store.range(prefix, after=after, limit=limit, revision=revision)

    async def watch(self, prefix: str, *, after: int) -> Generated:
        self.watches += 1
        return Generated(self._events(await self._store.watch(prefix, after=after)))

    async def _events(self, watch: Watch) -> AsyncGenerator[WatchEvent, None]:
        try:
            async for event in watch:
                if self.mute:
                    await asyncio.Event().wait()
                yield event
        finally:
            await watch.close()


class Generated:
    def __init__(self, events: AsyncGenerator[WatchEvent, None]) -> None:
        self._events = events

    def __aiter__(self) -> AsyncIterator[WatchEvent]:
        return self._events

    async def close(self) -> None:
        await self._events.aclose()


class ReflectedAuthority:
    """An authority with heartbeats and a reflector that follows it over a link."""

    def __init__(self, world: World, authority: Authority, remote: RemoteStore) -> None:
        self.world, self.authority, self.remote = world, authority, remote
        self.board = WatchCache(world.clock)

    async def sleep(self, ms: int) -> None:
        await self.world.clock.sleep_ms(ms)

    async def declare(self, name: str) -> None:
        client = AuthorityClient({"a": self.authority}, Actor("op", Role.OPERATOR), self.world)
        await client.submit(Apply(Region(metadata=Metadata(name=name))))

    async def seen_after_ms(self, name: str) -> int:
        began_ms = self.world.clock.now_ms()
        while f"region/{name}" not in self.board.rows:
            await self.sleep(10)
        return self.world.clock.now_ms() - began_ms


def reflector_test(test: Callable[[ReflectedAuthority], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        async def scenario() -> None:
            world, store = virtual_world(), MemoryStore()
            authority = await Authority.take_over(store, scope="r1", holder="a", clock=world.clock, ids=world.ids)
            remote = RemoteStore(store, world)
            made = ReflectedAuthority(world, authority, remote)
            source: Any = remote
            follower = Reflector(source, source, world, made.board, idle_ms=IDLE_MS)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(authority.run(heartbeat_ms=BEAT_MS)), group.create_task(follower.run())]
                async with asyncio.timeout(3_600):
                    while not made.board.is_current:
                        await made.sleep(10)
                await test(made)
                for task in tasks:
                    task.cancel()

        run_virtually(scenario())

    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    return run


@reflector_test
async def test_healthy_watch_is_kept_without_relisting(setup: ReflectedAuthority) -> None:
    await setup.sleep(4 * IDLE_MS)
    assert (setup.remote.lists, setup.remote.watches) == (1, 1)
    await setup.declare("r2")
    assert await setup.seen_after_ms("r2") <= 10, "new rows arrive immediately"


@reflector_test
async def test_silent_watch_is_replaced_by_new_list(setup: ReflectedAuthority) -> None:
    setup.remote.mute = True
    await setup.declare("r2")
    assert await setup.seen_after_ms("r2") <= IDLE_MS + IDLE_MS // 2 + BEAT_MS
    assert (setup.remote.lists, setup.remote.watches) == (2, 2)
    setup.remote.mute = False
    await setup.declare("r3")
    assert await setup.seen_after_ms("r3") <= 2 * IDLE_MS


@reflector_test
async def test_reflector_relists_periodically_without_errors(setup: ReflectedAuthority) -> None:
    await setup.sleep(5 * IDLE_MS - BEAT_MS)
    assert setup.remote.lists == 1
    await setup.sleep(5 * IDLE_MS + 2 * BEAT_MS)
    assert setup.remote.lists in (2, 3)


@reflector_test
async def test_slow_list_is_repeated_less_often(setup: ReflectedAuthority) -> None:
    setup.remote.listing_ms = 500  # of each of two parts
    await setup.sleep(11 * IDLE_MS)
    lists_before = setup.remote.lists
    assert lists_before >= 2, "the slow list was taken at least twice"
    await setup.sleep(190_000)
    assert setup.remote.lists == lists_before
    await setup.sleep(220_000)
    assert setup.remote.lists > lists_before


@reflector_test
async def test_reflector_can_be_cancelled_during_watch(setup: ReflectedAuthority) -> None:
    source: Any = setup.remote
    task = asyncio.ensure_future(Reflector(source, source, setup.world, WatchCache(setup.world.clock), idle_ms=IDLE_MS).run())
    await setup.sleep(IDLE_MS)
    task.cancel()
    await asyncio.wait({task}, timeout=1)
    assert task.cancelled()
