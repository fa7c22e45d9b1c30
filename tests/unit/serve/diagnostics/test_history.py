"""History: events are folded, with source and time, and filtered by object."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from remit.commitment.outcomes import AuditEntry, BatchRecord, batch_key, encode_batch
from remit.model.metadata import RecordMetadata
from remit.model.objects import encode, key
from remit.model.records import PROCESS_ENDED, Decision, DecisionSpec, Event, EventSpec
from remit.model.wire.api_types import HistoryEvent
from remit.serve.diagnostics.history import list_events, watch_events
from remit.store.chain import encode_head
from remit.store.protocol import HEAD, Commit, Head
from tests.unit.serve.watch_cache_fixtures import CacheFixture


def entry(action: str, subject: str, code: str = "", actor: str = "scheduler-1", role: str = "scheduler") -> AuditEntry:
    return AuditEntry(
        f"one.1.{action}", "", action, subject, actor, role, "", 0, 0, 0, 0, code, "it is full" if code else "", ""
    )


def recorded(name: str, regarding: str, reason: str, type_: Any = "Normal") -> Event:
    spec = EventSpec(regarding=regarding, type=type_, reason=reason, message=f"{reason} happened", source="node-lifecycle")
    return Event(metadata=RecordMetadata(name=name), spec=spec)


class Scope(CacheFixture):
    """A scope with history as an authority writes it: each commit has its batch record and its events."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = 0

    async def commit(self, *entries: AuditEntry, notes: tuple[Event | Decision, ...] = ()) -> None:
        self.sequence += 1
        at = f"2026-01-01T00:00:{self.sequence:02d}Z"
        head = Head("one", 1, self.sequence, "a", 0, "")
        batch = BatchRecord(1, 1, 1, 1, at, entries)
        puts = [(batch_key(self.sequence), encode_batch(batch)), (HEAD, encode_head(head))]
        await self.store.commit(Commit(puts=[*puts, *((key(note), encode(note)) for note in notes)]))
        self.board.advance(head, self.sequence)

    async def history(self, regarding: str = "", limit: int = 100) -> list[HistoryEvent]:
        return (await list_events(self.view_snapshots(), regarding, limit))[1]


def waiting(name: str, *replicas: str, never: bool = False) -> Decision:
    spec = DecisionSpec(
        replicas=dict.fromkeys(replicas, ""), verdict="waiting", reason="no_room", detail="all are full", never=never
    )
    return Decision(metadata=RecordMetadata(name=name, tenant="t1"), spec=spec)


async def commit_history(scope: Scope) -> None:
    await scope.commit(entry("apply", "workload/t1/web", actor="ann", role="operator"))
    await scope.commit(entry("bind", "replica/t1/web-0", "no_room"), entry("bind", "replica/t1/web-1"))
    await scope.commit(entry("explain", "d1"), notes=(waiting("d1", "t1/web-0", "t1/web-2"),))
    await scope.commit(entry("bind", "replica/t1/web-0", "no_room"))
    await scope.commit(
        entry("mark", "n1", actor="nodes", role="node-lifecycle"), notes=(recorded("e1", "node/n1", "NodeReady"),)
    )
    await scope.commit(entry("move start", "replica/t1/web-api-0", actor="n1", role="agent"))


def test_events_before_long_quiet_period_are_still_found() -> None:
    async def history() -> tuple[list[HistoryEvent], list[HistoryEvent]]:
        scope = Scope()
        await scope.commit(entry("apply", "workload/t1/web", actor="ann", role="operator"))
        for _ in range(60):
            await scope.commit()
        return await scope.history(limit=3), await scope.history("workload/t1/web")

    for found in asyncio.run(history()):
        assert [(one.reason, one.at) for one in found] == [("Applied", "2026-01-01T00:00:01Z")]


def test_events_have_source_and_time_and_are_ordered_oldest_first() -> None:
    async def history() -> list[HistoryEvent]:
        scope = Scope()
        await commit_history(scope)
        return await scope.history()

    found = asyncio.run(history())
    assert [(one.reason, one.regarding, one.source) for one in found] == [
        ("Applied", "workload/t1/web", "operator/ann"),
        ("Bound", "replica/t1/web-1", "scheduler-1"),
        ("no_room", "replica/t1/web-0", "scheduler"),
        ("no_room", "replica/t1/web-0", "scheduler-1"),
        ("HealthChanged", "node/n1", "node-lifecycle/nodes"),
        ("NodeReady", "node/n1", "node-lifecycle"),
        ("Starting", "replica/t1/web-api-0", "agent/n1"),
    ]
    assert found[2].message == "pending: all are full (and 1 more like it)" and found[2].type == "Warning"
    assert found[5].at == "2026-01-01T00:00:05Z" and found[5].revision == 5


def test_failed_attempt_is_warning_event() -> None:
    async def history() -> list[HistoryEvent]:
        scope = Scope()
        await scope.commit(msgspec.structs.replace(entry("move crash", "replica/t1/web-0"), detail="exit 7"))
        await scope.commit(msgspec.structs.replace(entry("move finish", "replica/t1/web-1"), detail="ok"))
        return await scope.history()

    assert [(one.type, one.message) for one in asyncio.run(history())] == [
        ("Warning", "exit 7"),
        ("Normal", "ok"),
    ]


def test_end_of_a_process_is_warning_event_although_it_is_restarted() -> None:
    async def history() -> list[HistoryEvent]:
        scope, unready = Scope(), entry("move unready", "replica/t1/web-0")
        await scope.commit(msgspec.structs.replace(unready, detail=f"{PROCESS_ENDED} (exit 3) and is restarted"))
        await scope.commit(msgspec.structs.replace(unready, detail="GET / returned 503"))
        return await scope.history()

    assert [(one.reason, one.type) for one in asyncio.run(history())] == [("NotReady", "Warning"), ("NotReady", "Normal")]


def test_created_replicas_are_events_of_a_workload() -> None:
    async def history() -> list[HistoryEvent]:
        scope = Scope()
        await scope.commit(entry("spawn", "sums"), entry("mark", "n1"))
        return await scope.history()

    assert [one.regarding for one in asyncio.run(history())] == ["workload/sums", "node/n1"]


def test_repeated_events_are_folded_with_count_and_first_time() -> None:
    async def history() -> list[HistoryEvent]:
        scope = Scope()
        await commit_history(scope)
        return await scope.history("replica/t1/web-0")

    waits, refused = asyncio.run(history())
    assert (refused.count, refused.first, refused.at) == (2, "2026-01-01T00:00:02Z", "2026-01-01T00:00:04Z")
    assert refused.message == "request to bind the replica refused: it is full"
    assert waits.message == "pending: all are full" and waits.at == "2026-01-01T00:00:03Z"


def test_events_of_workload_include_its_replicas_but_no_longer_names() -> None:
    async def history() -> list[str]:
        scope = Scope()
        await commit_history(scope)
        return [one.regarding for one in await scope.history("workload/t1/web")]

    found = asyncio.run(history())
    assert set(found) == {"workload/t1/web", "replica/t1/web-0", "replica/t1/web-1", "replica/t1/web-2"}


def test_limit_keeps_newest_events() -> None:
    async def history() -> list[HistoryEvent]:
        scope = Scope()
        for number in range(20):
            await scope.commit(entry("bind", f"replica/t1/web-{number}"))
        return await scope.history(limit=3)

    assert [one.regarding for one in asyncio.run(history())] == [f"replica/t1/web-{number}" for number in (17, 18, 19)]


def test_event_of_unplaceable_replica_says_never() -> None:
    async def history() -> list[HistoryEvent]:
        scope = Scope()
        await scope.commit(entry("explain", "d1"), notes=(waiting("d1", "t1/big-0", never=True),))
        return await scope.history("replica/t1/big-0")

    (one,) = asyncio.run(history())
    assert one.message.endswith("it can never be placed with the nodes, quotas and policies declared now")


def test_watch_yields_events_after_revision() -> None:
    async def history() -> list[Any]:
        scope = Scope()
        await commit_history(scope)
        watch = watch_events(scope.view_snapshots(), "replica/t1/web-0", 3)
        found = [msgspec.json.decode(one) for one in (await anext(watch)).splitlines()]
        coming = asyncio.ensure_future(anext(watch))
        await scope.commit(entry("bind", "replica/t1/web-9"))
        await scope.commit(entry("bind", "replica/t1/web-0"))
        found += [msgspec.json.decode(one) for one in (await coming).splitlines()]
        await watch.aclose()
        return found

    refused, bookmark, bound, last = asyncio.run(history())
    assert (refused["type"], refused["object"]["reason"], refused["revision"]) == ("changed", "no_room", 4)
    assert bookmark == {"type": "bookmark", "revision": 4}
    assert bound["object"]["message"] == "bound" and last == {"type": "bookmark", "revision": 8}


def test_watch_of_compacted_history_must_resync() -> None:
    async def history() -> Any:
        scope = Scope()
        await commit_history(scope)
        await scope.store.compact(5)
        watch = watch_events(scope.view_snapshots(), "", 1)
        return [msgspec.json.decode(one) async for one in watch]

    (last,) = asyncio.run(history())
    assert (last["type"], last["reason"]) == ("resync", "compacted")
