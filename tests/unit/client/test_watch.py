"""Watches of the SDK: every change is delivered once, also after failures."""

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
from remit.model.kinds import Config
from tests.unit.client.fake_api import TOKEN, FakeApi, serving
from tests.unit.client.raw_http import RawRequest, raw_server


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "RETRY_POLICY", RetryPolicy(base_ms=10, cap_ms=40))


def play(scene: Callable[[FakeApi, Api], Awaitable[None]]) -> None:
    async def main() -> None:
        fake = FakeApi()
        async with serving(fake) as url, Api(url, TOKEN, timeout_s=5) as api, asyncio.timeout(20):
            await scene(fake, api)

    asyncio.run(main())


class Reader:
    """Reads a watch as short words, without bookmarks. `known` is the reader's copy of the objects."""

    def __init__(self, events: AsyncGenerator[Any, None]) -> None:
        self.events = events
        self.known: dict[str, str] = {}

    async def next(self) -> str:
        while True:
            match await anext(self.events):
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

    async def wait_until_open(self) -> None:
        """The watch is open and has no event yet."""
        assert isinstance(await anext(self.events), Bookmark)

    async def take(self, count: int) -> list[str]:
        return [await self.next() for _ in range(count)]

    async def until_synced(self) -> list[str]:
        words = [await self.next()]
        while words[-1] != "synced":
            words.append(await self.next())
        return words


def test_watch_delivers_state_then_synced_then_changes() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a")
        fake.put("b")
        async with aclosing(api.watch(Config)) as events:
            reader = Reader(events)
            assert await reader.until_synced() == ["a=1", "b=1", "synced"]
            fake.put("a", "2")
            fake.drop("b")
            fake.put("c")
            assert await reader.take(3) == ["a=2", "-b", "c=1"]
        assert fake.requests[-1].query["after"] == "12"

    play(scene)


@pytest.mark.parametrize("why", ["cut", "compacted", "lagging", "shutdown", "restored"])
def test_watch_after_break_delivers_only_differences(why: str) -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        reasons: list[str] = []
        for name in "abcd":
            fake.put(name)
        async with aclosing(api.watch(Config, lost=reasons.append)) as events:
            reader = Reader(events)
            await reader.until_synced()
            fake.put("a", "seen")
            assert await reader.next() == "a=seen"
            # Changes during the break must come from the list, since the log is gone.
            fake.put("b", "2")
            fake.drop("c")
            fake.put("e")
            fake.log.clear()
            fake.end_watches(why)
            words = await reader.until_synced()
            if why == "restored":
                assert words == ["a=seen", "b=2", "d=1", "e=1", "-c", "synced"], "every object may differ: all are delivered"
            else:
                assert words == ["b=2", "e=1", "-c", "synced"]
            fake.put("d", "3")
            assert await reader.next() == "d=3"
            assert reader.known == {"a": "seen", "b": "2", "d": "3", "e": "1"}
        assert len(reasons) == 1
        assert reasons[0]

    play(scene)


def test_silent_watch_is_replaced() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a")
        async with aclosing(api.watch(Config, silence_s=0.2)) as events:
            reader = Reader(events)
            await reader.until_synced()
            fake.silent = True
            fake.put("a", "2")
            assert await reader.until_synced() == ["a=2", "synced"]

    play(scene)


def test_watch_waits_for_server_that_is_away() -> None:
    async def main() -> None:
        fake = FakeApi()
        fake.put("a")
        async with serving(fake) as url:
            api = Api(url, TOKEN, timeout_s=0.2)
            events = api.watch(Config)
            reader = Reader(events)
            await reader.until_synced()
        reading = asyncio.create_task(reader.until_synced())
        await asyncio.sleep(0.8)
        assert not reading.done()
        fake.put("b")
        async with serving(fake, int(url.rpartition(":")[2])):
            assert await asyncio.wait_for(reading, 10) == ["b=1", "synced"]
            await events.aclose()
            await api.close()

    asyncio.run(main())


def test_watch_of_restored_scope_delivers_all_although_revisions_agree() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a", "before")
        async with aclosing(api.watch(Config)) as events:
            reader = Reader(events)
            await reader.until_synced()
            await reader.wait_until_open()
            fake.rows["default", "a"]["spec"]["data"]["text"] = "after"  # at the same revision
            fake.incarnation = "inc2"
            fake.end_watches("cut")
            assert await reader.until_synced() == ["a=after", "synced"]
            await reader.wait_until_open()
            fake.revision = 3
            fake.rows["default", "a"]["spec"]["data"]["text"] = "earlier"
            fake.log.clear()
            fake.end_watches("cut")
            assert await reader.until_synced() == ["a=earlier", "synced"], "the revision went back"

    play(scene)


def test_watch_resumes_from_list() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        fake.put("a")
        fake.put("b")
        listed = await api.list(Config)
        fake.drop("a")
        async with aclosing(api.watch(Config, after=listed)) as events:
            reader = Reader(events)
            reader.known = {"a": "1", "b": "1"}
            await reader.wait_until_open()
            assert await reader.next() == "-a"
            fake.drop("b")
            fake.log.clear()
            fake.end_watches("cut")
            assert await reader.until_synced() == ["-b", "synced"]

    play(scene)


def test_watch_resumes_from_bare_revision() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        revision = fake.put("a")
        fake.drop("a")
        fake.put("b")
        async with aclosing(api.watch(Config, after=revision)) as events:
            reader = Reader(events)
            reader.known = {"a": "1"}
            assert await reader.take(2) == ["-a", "b=1"]

    play(scene)


def test_watch_of_one_name_uses_field_selector() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        async with aclosing(api.watch(Config, name="a", fields="spec.x=1", tenant=ALL_TENANTS)) as events:
            await Reader(events).until_synced()
            assert fake.requests[-1].path == "/v1/configs"
            assert fake.requests[-1].query["fieldSelector"] == "metadata.name=a,spec.x=1"

    play(scene)


def test_closed_watch_disconnects_from_server() -> None:
    async def scene(fake: FakeApi, api: Api) -> None:
        async with aclosing(api.watch(Config)) as events:
            await Reader(events).until_synced()
            reading = asyncio.create_task(Reader(events).next())
            while not fake.watchers:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.01)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        fake.wake()
        fake.put("a")
        await asyncio.sleep(0.05)
        fake.put("b")
        for _ in range(500):
            if fake.watchers:
                await asyncio.sleep(0.01)
        assert fake.watchers == 0

    play(scene)


def test_refused_or_unreachable_watch_raises() -> None:
    async def main() -> None:
        async with serving(FakeApi()) as url, Api(url, "another") as api:
            with pytest.raises(ApiError) as caught:
                await anext(api.watch(Config))
            assert caught.value.code == "unauthenticated"
        async with Api("http://127.0.0.1:1", TOKEN, timeout_s=0.1) as api:
            with pytest.raises(Unanswered):
                await anext(api.watch(Config))

    asyncio.run(main())


def test_undecodable_event_ends_watch() -> None:
    async def handler(request: RawRequest) -> None:
        if request.path == "/v1/status":
            request.answer(200, {"scope": "eu", "incarnation": "i"})
        elif "watch" not in request.query:
            request.answer(200, {"kind": "ConfigList", "metadata": {"revision": 1}, "items": []})
        else:
            request.begin()
            request.line({"type": "changed", "revision": 2, "object": {"kind": "Surprise"}})

    async def main() -> None:
        async with raw_server(handler) as url, Api(url, TOKEN) as api, aclosing(api.watch(Config)) as events:
            await anext(events)
            with pytest.raises(Unanswered, match="run the same version"):
                await anext(events)

    asyncio.run(main())


def test_endpoint_watch_compares_all_fields() -> None:
    items = [{"tenant": "t", "service": "s", "replica": f"s-{n}", "node": "n", "ports": {"http": 1}} for n in range(3)]
    cut = asyncio.Event()

    async def handler(request: RawRequest) -> None:
        if request.path == "/v1/status":
            request.answer(200, {"scope": "eu", "incarnation": "i"})
        elif "watch" not in request.query:
            request.answer(200, {"kind": "EndpointList", "metadata": {"revision": 1}, "items": items})
        else:
            request.begin()
            request.line({"type": "deleted", "revision": 2, "object": items[0]})
            await cut.wait()
            cut.clear()
            request.line({"type": "resync", "reason": "lagging"})
            request.end()

    async def main() -> None:
        async with raw_server(handler) as url, Api(url, TOKEN, tenant="t") as api, aclosing(api.watch_endpoints("s")) as events:
            first = [await anext(events) for _ in range(4)]
            assert [type(one) for one in first] == [Changed, Changed, Changed, Synced]
            assert await anext(events) == Deleted("Endpoint", "s-0", "t", 2)
            items[1]["ports"] = {"http": 2}
            del items[2], items[0]
            cut.set()
            changed = await anext(events)
            assert isinstance(changed, Changed)
            assert (changed.object.replica, changed.object.ports) == ("s-1", {"http": 2})
            assert await anext(events) == Deleted("Endpoint", "s-2", "t", 1)
            assert await anext(events) == Synced(1)

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------------------- blocking


@contextmanager
def served_in_thread(fake: FakeApi) -> Generator[tuple[str, asyncio.AbstractEventLoop], None, None]:
    """Serves in another thread, since the blocking client blocks this one."""
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


def test_blocking_client_returns_same_results() -> None:
    fake = FakeApi()
    with served_in_thread(fake) as (url, loop), BlockingApi(url, TOKEN) as api:
        loop.call_soon_threadsafe(fake.put, "a")
        assert api.wait(Config, "a", lambda one: one is not None, timeout_s=10) == api.get(Config, "a")
        listed = api.list(Config)
        assert isinstance(listed, ListResult)
        assert [one.metadata.name for one in listed.items] == ["a"]
        with pytest.raises(ApiError):
            api.get(Config, "b")
        events = api.watch(Config)
        assert isinstance(next(events), Changed)
        assert isinstance(next(events), Synced)
        assert isinstance(next(events), Bookmark)
        loop.call_soon_threadsafe(fake.end_watches, "cut")
        loop.call_soon_threadsafe(fake.put, "b")
        words = [one for one in (next(events) for _ in range(3)) if not isinstance(one, Bookmark)]
        assert isinstance(words[0], Changed)
        events.close()
        left = api.watch(Config)  # left open: closing the client closes it
        assert isinstance(next(left), Changed)
