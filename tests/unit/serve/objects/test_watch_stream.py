"""Is a watch told everything once, from where it was asked on, and what does it hear when it cannot be?"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remit.serve.http import streams
from remit.serve.objects import watch_hub, watch_stream
from tests.unit.serve.in_memory_server import TOKEN, Api, api, story, tenant, workload

WORKLOADS = "/v1/tenants/acme/workloads"


@story
async def test_a_watch_tells_changes_deletions_and_bookmarks(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    listed = await api.must("GET", WORKLOADS)
    async with api.watch(f"{WORKLOADS}?watch=true&after={listed['metadata']['revision']}") as watched:
        made = await api.must("POST", WORKLOADS, workload("web", replicas=0))
        told = await watched.until("changed", "web")
        assert told["object"] == made and told["revision"] == made["metadata"]["revision"]
        assert (await watched.next())["type"] == "bookmark"
        gone = await api.must("DELETE", f"{WORKLOADS}/web")
        told = await watched.until("deleted", "web")
        assert told["object"] == {"kind": "Workload", "metadata": {"name": "web", "tenant": "acme"}}
        assert told["revision"] == gone["revision"]
        assert (await watched.next()) == {"type": "bookmark", "revision": gone["revision"]}


@story
async def test_a_watch_from_the_past_is_told_that_first_and_nothing_twice(api: Api) -> None:
    start = (await api.must("POST", "/v1/tenants", tenant()))["metadata"]["revision"]
    for i in range(20):
        await api.must("POST", WORKLOADS, workload(f"w{i}"))
    async with api.watch(f"{WORKLOADS}?watch=true&after={start}") as watched:
        seen = [(await watched.until("changed"))["object"]["metadata"]["name"] for _ in range(20)]
        await api.must("POST", WORKLOADS, workload("last"))
        seen.append((await watched.until("changed"))["object"]["metadata"]["name"])
    assert seen == [*(f"w{i}" for i in range(20)), "last"]


@story
async def test_watches_that_join_amid_writes_miss_and_repeat_nothing(api: Api) -> None:
    """Each takes up at the last bookmark of the one before, while others write."""
    after = (await api.must("POST", "/v1/tenants", tenant()))["metadata"]["revision"]
    seen: list[str] = []

    async def write() -> None:
        for i in range(60):
            await api.must("POST", WORKLOADS, workload(f"w{i:02d}"))

    writing = asyncio.ensure_future(write())
    while len(seen) < 60:
        pending: list[str] = []
        async with api.watch(f"{WORKLOADS}?watch=true&after={after}") as watched:
            for _ in range(6):
                line = await watched.next()
                if line["type"] == "changed":
                    pending.append(line["object"]["metadata"]["name"])
                elif line["type"] in ("bookmark", "heartbeat"):
                    seen += pending
                    pending, after = [], line["revision"]
    await writing
    assert seen == [f"w{i:02d}" for i in range(60)]


@story
async def test_whoever_keeps_up_is_told_as_it_happens__in_order_with_what_could_not_be_told_so(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    seen: list[str] = []
    async with api.watch(f"{WORKLOADS}?watch=true") as watched:
        await watched.until("bookmark")
        for i in range(30):  # every third time it cannot be told at once
            await api.must("POST", WORKLOADS, workload(f"w{i:02d}", replicas=0))
        while len(seen) < 30:
            line = await watched.next()
            if line["type"] == "changed":
                seen.append(line["object"]["metadata"]["name"])
                revision = line["revision"]
            else:
                assert line["type"] in ("bookmark", "heartbeat") and line["revision"] >= revision
        assert watched.at_once > 20
    assert seen == [f"w{i:02d}" for i in range(30)]


@story
async def test_a_selector_tells_what_no_longer_matches_as_deleted(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    async with api.watch(f"{WORKLOADS}?watch=true&labelSelector=app=web") as watched:
        await watched.until("bookmark")
        await api.must("PUT", f"{WORKLOADS}/other", workload("other", labels={"app": "db"}))
        await api.must("PUT", f"{WORKLOADS}/web", workload("web", labels={"app": "web"}))
        assert (await watched.until("changed"))["object"]["metadata"]["name"] == "web"
        await api.must("PUT", f"{WORKLOADS}/web", workload("web", labels={"app": "old"}))
        assert (await watched.until("deleted"))["object"]["metadata"]["name"] == "web"
        await api.must("PUT", f"{WORKLOADS}/web", workload("web", labels={"app": "older"}))
        await api.must("PUT", f"{WORKLOADS}/new", workload("new", labels={"app": "web"}))
        line: Any = {"type": ""}
        while line["type"] != "changed":
            line = await watched.next()
            assert line["type"] != "deleted", "what was not picked before is not deleted"
        assert line["object"]["metadata"]["name"] == "new"


@story
async def test_generations_are_watched_like_all_else__with_a_selector_and_without(api: Api) -> None:
    """A board keeps them unread until somebody asks."""
    await api.must("POST", "/v1/tenants", tenant())
    path = "/v1/tenants/acme/generations?watch=true"
    async with api.watch(path) as every, api.watch(f"{path}&fieldSelector=spec.workload=web") as some:
        for watched in (every, some):
            await watched.until("bookmark")
        await api.must("POST", WORKLOADS, workload("other", replicas=0))
        made = await api.must("POST", WORKLOADS, workload("web", replicas=0))
        assert (await every.until("changed"))["object"]["spec"]["workload"] == "other"
        for watched in (every, some):
            told = await watched.until("changed")
            assert (told["object"]["kind"], told["object"]["metadata"]["name"]) == ("Generation", "web/00000001")
            assert told["object"]["spec"]["spec"] == made["spec"]
        for name in ("other", "web"):
            await api.must("DELETE", f"{WORKLOADS}/{name}")
        assert (await every.until("deleted"))["object"]["metadata"]["name"] == "other/00000001"
        for watched in (every, some):
            told = await watched.until("deleted")
            assert told["object"] == {"kind": "Generation", "metadata": {"name": "web/00000001", "tenant": "acme"}}


@story
async def test_a_watch_of_nothing_beats(api: Api) -> None:
    async with api.watch("/v1/regions?watch=true") as watched:
        first = await watched.until("heartbeat")
        assert (await watched.until("heartbeat"))["revision"] > first["revision"]  # the authority's own beats move it on


@story
async def test_what_no_board_keeps_is_watched_too(api: Api) -> None:
    async with api.watch("/v1/events?watch=true") as watched:
        await watched.until("bookmark")
        assert (await watched.until("heartbeat"))["revision"] > 0


@story
async def test_a_watch_of_what_is_gone_or_not_yet_is_refused(api: Api) -> None:
    for name in ("a", "b"):
        await api.must("POST", "/v1/tenants", tenant(name))
    await api.store.compact(await api.store.revision())
    gone = await api.get("/v1/tenants?watch=true&after=1")
    assert (gone.status, gone.json["code"]) == (410, "compacted")
    ahead = await api.get("/v1/tenants?watch=true&after=1000000")
    assert (ahead.status, ahead.json["code"]) == (410, "compacted")
    wrong = await api.get("/v1/tenants?watch=true&after=-1")
    assert (wrong.status, wrong.json["field"]) == (400, "after")
    assert api.desk.streams.count == 0


@story
async def test_a_server_that_ends_tells_every_watch_to_come_back(api: Api) -> None:
    async with api.watch("/v1/tenants?watch=true") as watched:
        await watched.until("bookmark")
        api.desk.streams.closing.set()
        told = await watched.until("resync")
        assert told["reason"] == "shutdown" and "list again" in told["cure"]
        assert await watched.next() is None
    assert api.desk.streams.count == 0
    assert (await api.get("/readyz")).status == 503


def test_only_so_many_may_watch() -> None:
    async def main() -> None:
        async with api(watchers_max=3) as asked:
            async with asked.watch("/v1/tenants?watch=true") as one, asked.watch("/v1/nodes?watch=true") as other:
                await one.until("bookmark")
                await other.until("bookmark")
                more = await asked.get("/v1/tenants?watch=true")
                assert (more.status, more.json["code"]) == (429, "throttled")
                assert int(more.headers["retry-after"]) >= 1
                assert (await asked.get("/v1/tenants")).status == 200
            async with asked.watch("/v1/tenants?watch=true") as again:
                await again.until("bookmark")

    asyncio.run(main())


def test_one_who_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SEND_MS_MAX", 50)

    async def main() -> None:
        async with api() as asked:
            sent: list[Any] = []

            async def receive() -> dict[str, Any]:
                if sent:
                    await asyncio.Event().wait()
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(message: Any) -> None:
                sent.append(message)
                if message["type"] == "http.response.body":
                    await asyncio.Event().wait()

            scope = {"type": "http", "method": "GET", "path": "", "raw_path": b"/v1/tenants", "query_string": b"watch=true"}
            headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
            async with asyncio.timeout(5):
                await asked.app({**scope, "headers": headers}, receive, send)
            assert len(sent) == 2, "one piece was tried, and nothing after it"
            assert asked.desk.streams.count == 0

    asyncio.run(main())


def test_one_who_lags_too_far_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_hub, "PENDING_CHANGES_MAX", 3)
    listening = watch_hub.Subscription()
    for i in range(4):
        listening.deliver(news_of(watch_hub.ObjectChange(f"tenant/t{i}", b"{}", i + 1, None, None)))
    assert listening.is_lagging and listening.take() is None


def test_changes_of_one_object_are_folded() -> None:
    listening = watch_hub.Subscription()
    first = watch_hub.ObjectChange("tenant/a", b"1", 1, "before", "one")
    last = watch_hub.ObjectChange("tenant/a", b"2", 2, "one", "two")
    shared = news_of(first)
    listening.deliver(shared)
    listening.deliver(news_of(last))
    taken = listening.take()
    assert taken is not None and taken.changes == {"tenant/a": ("before", last)}
    assert shared.changes == {"tenant/a": ("before", first)}, "others have not been told of the last"
    assert listening.take() is None


def news_of(*all_told: watch_hub.ObjectChange) -> watch_hub.ChangeBatch:
    changes: dict[str, tuple[Any, watch_hub.ObjectChange]] = {}
    for told in all_told:
        watch_hub.merge_change(changes, told)
    return watch_hub.ChangeBatch(changes)


@story
async def test_a_watch_with_a_selector_is_told_of_a_large_batch_whole_while_others_are_answered(api: Api) -> None:
    count = 5 * watch_stream.CHANGES_PER_STEP + 3
    after = (await api.must("POST", "/v1/tenants", tenant()))["metadata"]["revision"]
    path = f"{WORKLOADS}?watch=true&after={after}&labelSelector=even=1,!odd"
    async with api.watch(path) as one, api.watch(path) as other:
        await one.until("bookmark")
        await other.until("bookmark")
        many = [workload(f"w{i:03d}", labels={"odd" if i % 2 else "even": "1"}) for i in range(count)]
        await api.must("POST", "/v1/apply", many)
        for watched in (one, other):
            seen, line = list[str](), await watched.until("changed")
            while len(seen) < (count + 1) // 2:
                if line["type"] == "changed":
                    seen.append(line["object"]["metadata"]["name"])
                if len(seen) < (count + 1) // 2:
                    line = await watched.next()
            assert sorted(seen) == [f"w{i:03d}" for i in range(0, count, 2)]
            assert (await watched.until("bookmark"))["revision"] > after
