"""Watch streams: every change once, from the requested revision, and an end with a reason otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remit.serve.http import streams
from remit.serve.objects import watch_hub, watch_stream
from tests.unit.serve.in_memory_server import TOKEN, Api, api, http_test, tenant, workload

WORKLOADS = "/v1/tenants/acme/workloads"


@http_test
async def test_watch_yields_changes_deletions_and_bookmarks(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    page = await api.must("GET", WORKLOADS)
    async with api.watch(f"{WORKLOADS}?watch=true&after={page['metadata']['revision']}") as watched:
        made = await api.must("POST", WORKLOADS, workload("web", replicas=0))
        line = await watched.until("changed", "web")
        assert line["object"] == made and line["revision"] == made["metadata"]["revision"]
        assert (await watched.next())["type"] == "bookmark"
        gone = await api.must("DELETE", f"{WORKLOADS}/web")
        line = await watched.until("deleted", "web")
        assert line["object"] == {"kind": "Workload", "metadata": {"name": "web", "tenant": "acme"}}
        assert line["revision"] == gone["revision"]
        assert (await watched.next()) == {"type": "bookmark", "revision": gone["revision"]}


@http_test
async def test_watch_from_past_revision_replays_without_duplicates(api: Api) -> None:
    start = (await api.must("POST", "/v1/tenants", tenant()))["metadata"]["revision"]
    for i in range(20):
        await api.must("POST", WORKLOADS, workload(f"w{i}"))
    async with api.watch(f"{WORKLOADS}?watch=true&after={start}") as watched:
        seen = [(await watched.until("changed"))["object"]["metadata"]["name"] for _ in range(20)]
        await api.must("POST", WORKLOADS, workload("last"))
        seen.append((await watched.until("changed"))["object"]["metadata"]["name"])
    assert seen == [*(f"w{i}" for i in range(20)), "last"]


@http_test
async def test_watches_resumed_amid_writes_miss_and_repeat_nothing(api: Api) -> None:
    """Each starts at the last bookmark of the previous one, while others write."""
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


@http_test
async def test_direct_and_queued_sends_keep_order(api: Api) -> None:
    await api.must("POST", "/v1/tenants", tenant())
    seen: list[str] = []
    async with api.watch(f"{WORKLOADS}?watch=true") as watched:
        await watched.until("bookmark")
        for i in range(30):  # every third time it cannot be sent directly
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


@http_test
async def test_object_leaving_selector_is_sent_as_deleted(api: Api) -> None:
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
            assert line["type"] != "deleted", "an object outside the selector is not reported deleted"
        assert line["object"]["metadata"]["name"] == "new"


@http_test
async def test_generations_are_watched_with_and_without_selector(api: Api) -> None:
    """The watch cache decodes them only on demand."""
    await api.must("POST", "/v1/tenants", tenant())
    path = "/v1/tenants/acme/generations?watch=true"
    async with api.watch(path) as every, api.watch(f"{path}&fieldSelector=spec.workload=web") as some:
        for watched in (every, some):
            await watched.until("bookmark")
        await api.must("POST", WORKLOADS, workload("other", replicas=0))
        made = await api.must("POST", WORKLOADS, workload("web", replicas=0))
        assert (await every.until("changed"))["object"]["spec"]["workload"] == "other"
        for watched in (every, some):
            line = await watched.until("changed")
            assert (line["object"]["kind"], line["object"]["metadata"]["name"]) == ("Generation", "web/00000001")
            assert line["object"]["spec"]["spec"] == made["spec"]
        for name in ("other", "web"):
            await api.must("DELETE", f"{WORKLOADS}/{name}")
        assert (await every.until("deleted"))["object"]["metadata"]["name"] == "other/00000001"
        for watched in (every, some):
            line = await watched.until("deleted")
            assert line["object"] == {"kind": "Generation", "metadata": {"name": "web/00000001", "tenant": "acme"}}


@http_test
async def test_idle_watch_of_objects_sends_heartbeats(api: Api) -> None:
    async with api.watch("/v1/regions?watch=true") as watched:
        first = await watched.until("heartbeat")
        assert (await watched.until("heartbeat"))["revision"] > first["revision"]  # heartbeats of the authority advance it


@http_test
async def test_uncached_kind_can_be_watched(api: Api) -> None:
    async with api.watch("/v1/events?watch=true") as watched:
        await watched.until("bookmark")
        assert (await watched.until("heartbeat"))["revision"] > 0


@http_test
async def test_watch_of_compacted_or_future_revision_is_refused(api: Api) -> None:
    for name in ("a", "b"):
        await api.must("POST", "/v1/tenants", tenant(name))
    await api.store.compact(await api.store.revision())
    gone = await api.get("/v1/tenants?watch=true&after=1")
    assert (gone.status, gone.json["code"]) == (410, "compacted")
    ahead = await api.get("/v1/tenants?watch=true&after=1000000")
    assert (ahead.status, ahead.json["code"]) == (410, "compacted")
    wrong = await api.get("/v1/tenants?watch=true&after=-1")
    assert (wrong.status, wrong.json["field"]) == (400, "after")
    assert api.server.open_watches == 0


@http_test
async def test_shutdown_tells_every_watch_to_resync(api: Api) -> None:
    async with api.watch("/v1/tenants?watch=true") as watched:
        await watched.until("bookmark")
        api.server.closing.set()
        line = await watched.until("resync")
        assert line["reason"] == "shutdown" and "list again" in line["cure"]
        assert await watched.next() is None
    assert api.server.open_watches == 0
    assert (await api.get("/readyz")).status == 503


def test_number_of_watches_is_limited() -> None:
    async def main() -> None:
        async with api(watchers_max=3) as client:
            async with client.watch("/v1/tenants?watch=true") as one, client.watch("/v1/nodes?watch=true") as other:
                await one.until("bookmark")
                await other.until("bookmark")
                more = await client.get("/v1/tenants?watch=true")
                assert (more.status, more.json["code"]) == (429, "throttled")
                assert int(more.headers["retry-after"]) >= 1
                assert (await client.get("/v1/tenants")).status == 200
            async with client.watch("/v1/tenants?watch=true") as again:
                await again.until("bookmark")

    asyncio.run(main())


def test_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SEND_MS_MAX", 50)

    async def main() -> None:
        async with api() as client:
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
                await client.app({**scope, "headers": headers}, receive, send)
            assert len(sent) == 2, "nothing is sent after the first piece"
            assert client.server.open_watches == 0

    asyncio.run(main())


def test_subscription_with_too_many_pending_changes_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_hub, "PENDING_CHANGES_MAX", 3)
    subscription = watch_hub.Subscription()
    for i in range(4):
        subscription.deliver(batch_of(watch_hub.ObjectChange(f"tenant/t{i}", b"{}", i + 1, None, None)))
    assert subscription.is_lagging and subscription.take() is None


def test_pending_changes_of_one_object_are_folded() -> None:
    subscription = watch_hub.Subscription()
    first = watch_hub.ObjectChange("tenant/a", b"1", 1, "before", "one")
    last = watch_hub.ObjectChange("tenant/a", b"2", 2, "one", "two")
    shared = batch_of(first)
    subscription.deliver(shared)
    subscription.deliver(batch_of(last))
    taken = subscription.take()
    assert taken is not None and taken.changes == {"tenant/a": ("before", last)}
    assert shared.changes == {"tenant/a": ("before", first)}, "the shared batch is unchanged"
    assert subscription.take() is None


def batch_of(*object_changes: watch_hub.ObjectChange) -> watch_hub.ChangeBatch:
    changes: dict[str, tuple[Any, watch_hub.ObjectChange]] = {}
    for line in object_changes:
        watch_hub.merge_change(changes, line)
    return watch_hub.ChangeBatch(changes)


@http_test
async def test_large_batch_reaches_watches_with_selector_whole(api: Api) -> None:
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
