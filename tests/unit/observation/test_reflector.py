"""Is a watch that cannot be read on after an interruption left alone while it is well, and given up when it is not?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from remit.client.authority_client import AuthorityClient
from remit.commitment.authority import Authority
from remit.model.claims import Actor, Apply, Role
from remit.model.kinds import Region
from remit.model.metadata import Metadata
from remit.observation.reflector import Reflector
from remit.observation.watch_cache import WatchCache
from remit.store.memory import MemoryStore
from remit.store.protocol import HEAD, Page, Row, Watch, WatchEvent
from remit.world.interfaces import World
from tests.unit.world.virtual_world import run_virtually, virtual_world

BEAT_MS = 1_000
IDLE_MS = 5_000


class Afar:
    """A store as it is read over a link: a watch of it is a generator, and over for good once it was interrupted."""

    def __init__(self, store: MemoryStore, world: World) -> None:
        self._store, self._world = store, world
        self.lists = self.watches = 0
        self.mute = False
        """Nothing comes any more of a watch, and it does not end either."""
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


class Following:
    """An authority that beats, and somebody who follows it from afar."""

    def __init__(self, world: World, authority: Authority, afar: Afar) -> None:
        self.world, self.authority, self.afar = world, authority, afar
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


def following(test: Callable[[Following], Awaitable[None]]) -> Callable[[], None]:
    def tell() -> None:
        async def whole() -> None:
            world, store = virtual_world(), MemoryStore()
            authority = await Authority.take_over(store, scope="r1", holder="a", clock=world.clock, ids=world.ids)
            afar = Afar(store, world)
            made = Following(world, authority, afar)
            source: Any = afar
            follower = Reflector(source, source, world, made.board, idle_ms=IDLE_MS)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(authority.run(heartbeat_ms=BEAT_MS)), group.create_task(follower.run())]
                async with asyncio.timeout(3_600):
                    while not made.board.is_current:
                        await made.sleep(10)
                await test(made)
                for task in tasks:
                    task.cancel()

        run_virtually(whole())

    tell.__name__, tell.__doc__, tell.__module__ = test.__name__, test.__doc__, test.__module__
    return tell


@following
async def test_a_watch_that_is_well_is_left_alone__however_often_it_was_looked_at(it: Following) -> None:
    await it.sleep(4 * IDLE_MS)
    assert (it.afar.lists, it.afar.watches) == (1, 1)
    await it.declare("r2")
    assert await it.seen_after_ms("r2") <= 10, "and nothing new is missed for a moment"


@following
async def test_a_watch_that_has_fallen_silent_is_given_up_and_all_is_listed_anew(it: Following) -> None:
    it.afar.mute = True
    await it.declare("r2")
    assert await it.seen_after_ms("r2") <= IDLE_MS + IDLE_MS // 2 + BEAT_MS
    assert (it.afar.lists, it.afar.watches) == (2, 2)
    it.afar.mute = False
    await it.declare("r3")
    assert await it.seen_after_ms("r3") <= 2 * IDLE_MS


@following
async def test_all_is_listed_anew_now_and_then__though_nothing_seems_wrong(it: Following) -> None:
    await it.sleep(5 * IDLE_MS - BEAT_MS)
    assert it.afar.lists == 1
    await it.sleep(5 * IDLE_MS + 2 * BEAT_MS)
    assert it.afar.lists in (2, 3)


@following
async def test_what_takes_long_to_list_is_listed_less_often(it: Following) -> None:
    it.afar.listing_ms = 500  # of each of two parts
    await it.sleep(11 * IDLE_MS)
    known = it.afar.lists
    assert known >= 2, "this one took long"
    await it.sleep(190_000)
    assert it.afar.lists == known
    await it.sleep(220_000)
    assert it.afar.lists > known


@following
async def test_whoever_follows_can_be_ended_in_the_middle_of_a_watch(it: Following) -> None:
    source: Any = it.afar
    task = asyncio.ensure_future(Reflector(source, source, it.world, WatchCache(it.world.clock), idle_ms=IDLE_MS).run())
    await it.sleep(IDLE_MS)
    task.cancel()
    await asyncio.wait({task}, timeout=1)
    assert task.cancelled()
