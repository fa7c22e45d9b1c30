"""Is no change lost and none told twice, whatever happens to the server and to the way there?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from remit.client import watch
from remit.client.api import ALL_TENANTS, Api, ApiError, Changed, Deleted, ListResult, Synced, Unanswered
from remit.client.blocking import BlockingApi
from remit.client.retry import RetryPolicy
from remit.client.watch import Bookmark
from remit.model.secrets import Config
from tests.unit.client.fake_api import TOKEN, FakeApi, serving
from tests.unit.client.raw_http import Said, raw_server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "RETRY_POLICY", RetryPolicy(base_ms=10, cap_ms=40))


def play(scene: Callable[[FakeApi, Api], Awaitable[None]]) -> None:
    async def main() -> None:
        fake = FakeApi()
        async with serving(fake) as url, Api(url, TOKEN, timeout_s=5) as api, asyncio.timeout(20):
            await scene(fake, api)

    asyncio.run(main())


class Reader:
    """Reads a watch; events in short words, bookmarks left out. `known` is what its reader believes there is."""

    def __init__(self, told: AsyncGenerator[Any, None]) -> None:
        self._told = told
        self.known: dict[str, str] = {}

    async def next(self) -> str:
        while True:
            match await anext(self._told):
                case Changed(object=Config() as one):
                    self.known[one.metadata.name] = one.spec.data["text"]
                    return f"{one.metadata.name}={one.spec.data['text']}"
                case Deleted(kind="Config", name=name):
                    del self.known[name]
                    return f"-{name}"
                case Synced():
                    return "synced"
                case Bookmark():
                    continue
                case other:
                    raise AssertionError(other)

    async def listening(self) -> None:
        """The server has begun to tell, and has nothing yet."""
        assert isinstance(await anext(self._told), Bookmark)

    async def take(self, count: int) -> list[str]:
        return [await self.next() for _ in range(count)]

    async def until_synced(self) -> list[str]:
        words = [await self.next()]
        while words[-1] != "synced":
            words.append(await self.next())
        return words


def test_what_stands_then_synced_then_what_changes() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a")
        fake.put("b")
        async with aclosing(api.watch(Config)) as told:
            reader = Reader(told)
            assert await reader.until_synced() == ["a=1", "b=1", "synced"]
            fake.put("a", "2")
            fake.drop("b")
            fake.put("c")
            assert await reader.take(3) == ["a=2", "-b", "c=1"]
        assert fake.said[-1].query["after"] == "12"

    play(scene)


@pytest.mark.parametrize("why", ["cut", "compacted", "lagging", "shutdown", "restored"])
def test_after_a_break_only_what_differs_is_told(why: str) -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        reasons: list[str] = []
        for name in "abcd":
            fake.put(name)
        async with aclosing(api.watch(Config, lost=reasons.append)) as told:
            reader = Reader(told)
            await reader.until_synced()
            fake.put("a", "seen")
            assert await reader.next() == "a=seen"
            # What happens while nobody listens: these must be noticed by the list, since the log is gone.
            fake.put("b", "2")
            fake.drop("c")
            fake.put("e")
            fake.log.clear()
            fake.end_watches(why)
            words = await reader.until_synced()
            if why == "restored":
                assert words == ["a=seen", "b=2", "d=1", "e=1", "-c", "synced"], "all may be another: all is told"
            else:
                assert words == ["b=2", "e=1", "-c", "synced"]
            fake.put("d", "3")
            assert await reader.next() == "d=3"
            assert reader.known == {"a": "seen", "b": "2", "d": "3", "e": "1"}
        assert len(reasons) == 1
        assert reasons[0]

    play(scene)


def test_a_silent_watch_is_left() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a")
        async with aclosing(api.watch(Config, silence_s=0.2)) as told:
            reader = Reader(told)
            await reader.until_synced()
            fake.silent = True
            fake.put("a", "2")
            assert await reader.until_synced() == ["a=2", "synced"]

    play(scene)


def test_a_server_that_is_away_for_long_is_waited_for() -> None:
    async def main() -> None:
        fake = FakeApi()
        fake.put("a")
        async with serving(fake) as url:
            api = Api(url, TOKEN, timeout_s=0.2)
            told = api.watch(Config)
            reader = Reader(told)
            await reader.until_synced()
        reading = asyncio.create_task(reader.until_synced())
        await asyncio.sleep(0.8)
        assert not reading.done()
        fake.put("b")
        async with serving(fake, int(url.rpartition(":")[2])):
            assert await asyncio.wait_for(reading, 10) == ["b=1", "synced"]
            await told.aclose()
            await api.close()

    asyncio.run(main())


def test_a_scope_that_was_restored_meanwhile_is_told_whole_although_numbers_agree() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a", "before")
        async with aclosing(api.watch(Config)) as told:
            reader = Reader(told)
            await reader.until_synced()
            await reader.listening()
            fake.rows["default", "a"]["spec"]["data"]["text"] = "after"  # at the very same revision
            fake.incarnation = "inc2"
            fake.end_watches("cut")
            assert await reader.until_synced() == ["a=after", "synced"]
            await reader.listening()
            fake.revision = 3
            fake.rows["default", "a"]["spec"]["data"]["text"] = "earlier"
            fake.log.clear()
            fake.end_watches("cut")
            assert await reader.until_synced() == ["a=earlier", "synced"], "its revision has gone back"

    play(scene)


def test_a_watch_goes_on_from_a_list() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a")
        fake.put("b")
        listed = await api.list(Config)
        fake.drop("a")
        async with aclosing(api.watch(Config, after=listed)) as told:
            reader = Reader(told)
            reader.known = {"a": "1", "b": "1"}
            await reader.listening()
            assert await reader.next() == "-a"
            fake.drop("b")
            fake.log.clear()
            fake.end_watches("cut")
            assert await reader.until_synced() == ["-b", "synced"]

    play(scene)


def test_a_watch_goes_on_from_a_bare_revision() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        revision = fake.put("a")
        fake.drop("a")
        fake.put("b")
        async with aclosing(api.watch(Config, after=revision)) as told:
            reader = Reader(told)
            reader.known = {"a": "1"}
            assert await reader.take(2) == ["-a", "b=1"]

    play(scene)


def test_one_name_is_watched_alone() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        async with aclosing(api.watch(Config, name="a", fields="spec.x=1", tenant=ALL_TENANTS)) as told:
            await Reader(told).until_synced()
            assert fake.said[-1].path == "/v1/configs"
            assert fake.said[-1].query["fieldSelector"] == "metadata.name=a,spec.x=1"

    play(scene)


def test_whoever_leaves_a_watch_leaves_the_server_too() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        async with aclosing(api.watch(Config)) as told:
            await Reader(told).until_synced()
            reading = asyncio.create_task(Reader(told).next())
            while not fake.watchers:  # noqa: ASYNC110 - the server's affair
                await asyncio.sleep(0.01)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        fake.wake()
        fake.put("a")
        await asyncio.sleep(0.05)
        fake.put("b")
        while fake.watchers:  # noqa: ASYNC110 - the server's affair
            await asyncio.sleep(0.01)

    play(scene)


def test_what_the_server_will_not_have_ends_the_watch() -> None:
    async def main() -> None:
        async with serving(FakeApi()) as url, Api(url, "another") as api:
            with pytest.raises(ApiError) as caught:
                await anext(api.watch(Config))
            assert caught.value.code == "unauthenticated"
        async with Api("http://127.0.0.1:1", TOKEN, timeout_s=0.1) as api:
            with pytest.raises(Unanswered):
                await anext(api.watch(Config))

    asyncio.run(main())


def test_a_line_that_cannot_be_read_ends_the_watch() -> None:
    async def handler(said: Said) -> None:
        if said.path == "/v1/status":
            said.answer(200, {"scope": "eu", "incarnation": "i"})
        elif "watch" not in said.query:
            said.answer(200, {"kind": "ConfigList", "metadata": {"revision": 1}, "items": []})
        else:
            said.begin()
            said.line({"type": "changed", "revision": 2, "object": {"kind": "Surprise"}})

    async def main() -> None:
        async with raw_server(handler) as url, Api(url, TOKEN) as api, aclosing(api.watch(Config)) as told:
            await anext(told)
            with pytest.raises(Unanswered, match="run the same version"):
                await anext(told)

    asyncio.run(main())


def test_endpoints_are_compared_by_all_that_they_say() -> None:
    items = [{"tenant": "t", "service": "s", "replica": f"s-{n}", "node": "n", "ports": {"http": 1}} for n in range(3)]
    cut = asyncio.Event()

    async def handler(said: Said) -> None:
        if said.path == "/v1/status":
            said.answer(200, {"scope": "eu", "incarnation": "i"})
        elif "watch" not in said.query:
            said.answer(200, {"kind": "EndpointList", "metadata": {"revision": 1}, "items": items})
        else:
            said.begin()
            said.line({"type": "deleted", "revision": 2, "object": items[0]})
            await cut.wait()
            cut.clear()
            said.line({"type": "resync", "reason": "lagging"})
            said.end()

    async def main() -> None:
        async with raw_server(handler) as url, Api(url, TOKEN, tenant="t") as api, aclosing(api.watch_endpoints("s")) as told:
            first = [await anext(told) for _ in range(4)]
            assert [type(one) for one in first] == [Changed, Changed, Changed, Synced]
            assert await anext(told) == Deleted("Endpoint", "s-0", "t", 2)
            items[1]["ports"] = {"http": 2}
            del items[2], items[0]
            cut.set()
            changed = await anext(told)
            assert isinstance(changed, Changed)
            assert (changed.object.replica, changed.object.ports) == ("s-1", {"http": 2})
            assert await anext(told) == Deleted("Endpoint", "s-2", "t", 1)
            assert await anext(told) == Synced(1)

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------------- blocking


@contextmanager
def served_elsewhere(fake: FakeApi) -> Generator[tuple[str, asyncio.AbstractEventLoop], None, None]:
    """In a thread of its own: who blocks cannot serve."""
    begun, ended = threading.Event(), asyncio.Event()
    found: list[tuple[str, asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        async with serving(fake) as url:
            found.append((url, asyncio.get_running_loop()))
            begun.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert begun.wait(10)
    try:
        yield found[0]
    finally:
        found[0][1].call_soon_threadsafe(ended.set)
        thread.join(10)


def test_the_blocking_calls_are_the_same_ones() -> None:
    fake = FakeApi()
    with served_elsewhere(fake) as (url, loop), BlockingApi(url, TOKEN) as api:
        loop.call_soon_threadsafe(fake.put, "a")
        assert api.wait(Config, "a", lambda one: one is not None, timeout_s=10) == api.get(Config, "a")
        listed = api.list(Config)
        assert isinstance(listed, ListResult)
        assert [one.metadata.name for one in listed.items] == ["a"]
        with pytest.raises(ApiError):
            api.get(Config, "b")
        told = api.watch(Config)
        assert isinstance(next(told), Changed)
        assert isinstance(next(told), Synced)
        assert isinstance(next(told), Bookmark)
        loop.call_soon_threadsafe(fake.end_watches, "cut")
        loop.call_soon_threadsafe(fake.put, "b")
        words = [one for one in (next(told) for _ in range(3)) if not isinstance(one, Bookmark)]
        assert isinstance(words[0], Changed)
        told.close()
        left = api.watch(Config)  # left open: the whole is closed below
        assert isinstance(next(left), Changed)
