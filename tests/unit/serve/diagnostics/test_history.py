"""Is what happened told, folded, by whom and when, and only of what was asked about?"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from remit.commitment.outcomes import AuditEntry, BatchRecord, batch_key, encode_batch
from remit.model.metadata import RecordMetadata
from remit.model.objects import encode, key
from remit.model.records import Decision, DecisionSpec, Event, EventSpec
from remit.model.wire.api_types import HistoryEvent
from remit.serve.diagnostics.history import list_events, watch_events
from remit.store.chain import encode_head
from remit.store.protocol import HEAD, Commit, Head
from tests.unit.serve.watch_cache_fixtures import Told


def did(what: str, subject: str, code: str = "", who: str = "scheduler-1", role: str = "scheduler") -> AuditEntry:
    return AuditEntry(f"one.1.{what}", "", what, subject, who, role, "", 0, 0, 0, 0, code, "it is full" if code else "", "")


def noted(name: str, regarding: str, reason: str, type_: Any = "Normal") -> Event:
    spec = EventSpec(regarding=regarding, type=type_, reason=reason, message=f"{reason} happened", source="node-lifecycle")
    return Event(metadata=RecordMetadata(name=name), spec=spec)


class Scope(Told):
    """One that remembers as an authority writes: each commit has its batch, and what was noted in it."""

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

    async def told(self, regarding: str = "", limit: int = 100) -> list[HistoryEvent]:
        return (await list_events(self.looking(), regarding, limit))[1]


def waiting(name: str, *replicas: str, never: bool = False) -> Decision:
    spec = DecisionSpec(
        replicas=dict.fromkeys(replicas, ""), verdict="waiting", reason="no_room", detail="all are full", never=never
    )
    return Decision(metadata=RecordMetadata(name=name, tenant="t1"), spec=spec)


async def a_story(scope: Scope) -> None:
    await scope.commit(did("apply", "workload/t1/web", who="ann", role="operator"))
    await scope.commit(did("bind", "replica/t1/web-0", "no_room"), did("bind", "replica/t1/web-1"))
    await scope.commit(did("explain", "d1"), notes=(waiting("d1", "t1/web-0", "t1/web-2"),))
    await scope.commit(did("bind", "replica/t1/web-0", "no_room"))
    await scope.commit(did("mark", "n1", who="nodes", role="node-lifecycle"), notes=(noted("e1", "node/n1", "NodeReady"),))
    await scope.commit(did("move start", "replica/t1/web-api-0", who="n1", role="agent"))


def test_what_happened_before_a_long_quiet_time_is_told_still() -> None:
    async def told() -> tuple[list[HistoryEvent], list[HistoryEvent]]:
        scope = Scope()
        await scope.commit(did("apply", "workload/t1/web", who="ann", role="operator"))
        for _ in range(60):
            await scope.commit()
        return await scope.told(limit=3), await scope.told("workload/t1/web")

    for found in asyncio.run(told()):
        assert [(one.reason, one.at) for one in found] == [("Apply", "2026-01-01T00:00:01Z")]


def test_what_happened__is_told_with_who_did_it_and_when_the_newest_last() -> None:
    async def told() -> list[HistoryEvent]:
        scope = Scope()
        await a_story(scope)
        return await scope.told()

    found = asyncio.run(told())
    assert [(one.reason, one.regarding, one.source) for one in found] == [
        ("Apply", "workload/t1/web", "operator/ann"),
        ("Bind", "replica/t1/web-1", "scheduler-1"),
        ("no_room", "replica/t1/web-0", "scheduler"),
        ("no_room", "replica/t1/web-0", "scheduler-1"),
        ("Mark", "node/n1", "node-lifecycle/nodes"),
        ("NodeReady", "node/n1", "node-lifecycle"),
        ("Start", "replica/t1/web-api-0", "agent/n1"),
    ]
    assert found[2].message == "pending: all are full (and 1 more like it)" and found[2].type == "Warning"
    assert found[5].at == "2026-01-01T00:00:05Z" and found[5].revision == 5


def test_how_an_attempt_ended_is_told__as_a_warning_if_it_failed() -> None:
    async def told() -> list[HistoryEvent]:
        scope = Scope()
        await scope.commit(msgspec.structs.replace(did("move crash", "replica/t1/web-0"), detail="exit 7"))
        await scope.commit(msgspec.structs.replace(did("move finish", "replica/t1/web-1"), detail="ok"))
        return await scope.told()

    assert [(one.type, one.message) for one in asyncio.run(told())] == [
        ("Warning", "crash accepted: exit 7"),
        ("Normal", "finish accepted: ok"),
    ]


def test_what_happens_again__is_told_once_with_how_often_and_since_when() -> None:
    async def told() -> list[HistoryEvent]:
        scope = Scope()
        await a_story(scope)
        return await scope.told("replica/t1/web-0")

    waits, refused = asyncio.run(told())
    assert (refused.count, refused.first, refused.at) == (2, "2026-01-01T00:00:02Z", "2026-01-01T00:00:04Z")
    assert refused.message == "bind refused: it is full"
    assert waits.message == "pending: all are full" and waits.at == "2026-01-01T00:00:03Z"


def test_of_a_workload_its_replicas_are_told_too__and_no_other_ones_of_a_longer_name() -> None:
    async def told() -> list[str]:
        scope = Scope()
        await a_story(scope)
        return [one.regarding for one in await scope.told("workload/t1/web")]

    found = asyncio.run(told())
    assert set(found) == {"workload/t1/web", "replica/t1/web-0", "replica/t1/web-1", "replica/t1/web-2"}


def test_of_very_much_the_newest_is_told() -> None:
    async def told() -> list[HistoryEvent]:
        scope = Scope()
        for number in range(20):
            await scope.commit(did("bind", f"replica/t1/web-{number}"))
        return await scope.told(limit=3)

    assert [one.regarding for one in asyncio.run(told())] == [f"replica/t1/web-{number}" for number in (17, 18, 19)]


def test_what_waits_for_ever__says_so() -> None:
    async def told() -> list[HistoryEvent]:
        scope = Scope()
        await scope.commit(did("explain", "d1"), notes=(waiting("d1", "t1/big-0", never=True),))
        return await scope.told("replica/t1/big-0")

    (one,) = asyncio.run(told())
    assert one.message.endswith("it can never be placed with the nodes, quotas and policies declared now")


def test_a_watch__tells_what_happens_from_a_revision_on() -> None:
    async def told() -> list[Any]:
        scope = Scope()
        await a_story(scope)
        watch = watch_events(scope.looking(), "replica/t1/web-0", 3)
        found = [msgspec.json.decode(one) for one in (await anext(watch)).splitlines()]
        coming = asyncio.ensure_future(anext(watch))
        await scope.commit(did("bind", "replica/t1/web-9"))
        await scope.commit(did("bind", "replica/t1/web-0"))
        found += [msgspec.json.decode(one) for one in (await coming).splitlines()]
        await watch.aclose()
        return found

    refused, bookmark, bound, last = asyncio.run(told())
    assert (refused["type"], refused["object"]["reason"], refused["revision"]) == ("changed", "no_room", 4)
    assert bookmark == {"type": "bookmark", "revision": 4}
    assert bound["object"]["message"] == "bind accepted" and last == {"type": "bookmark", "revision": 8}


def test_a_watch_of_what_was_compacted__is_sent_to_list_anew() -> None:
    async def told() -> Any:
        scope = Scope()
        await a_story(scope)
        await scope.store.compact(5)
        watch = watch_events(scope.looking(), "", 1)
        return [msgspec.json.decode(one) async for one in watch]

    (last,) = asyncio.run(told())
    assert (last["type"], last["reason"]) == ("resync", "compacted")
