"""View snapshots: queries see committed state, one consistent revision, and do not block each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from remit.commitment.outcomes import AuditEntry, BatchRecord, batch_key, encode_batch
from remit.model.metadata import RecordMetadata
from remit.model.objects import dec_hook, encode
from remit.model.records import Decision, DecisionSpec
from remit.proposal.explain.capacity import CapacityAnswer
from remit.proposal.explain.result_types import ReplicaExplanation, WorkloadExplanation
from remit.serve.diagnostics import history, view_snapshots
from remit.serve.diagnostics.explanations import capacity_for, explain_replica, explain_workload
from remit.serve.diagnostics.history import read_batches, replica_names
from remit.serve.diagnostics.view_snapshots import ViewSnapshot, ViewSnapshots
from remit.serve.http.replies import ApiProblem
from remit.store.chain import encode_head
from remit.store.protocol import HEAD, Commit, Head
from tests.properties.authority_world import workload
from tests.unit.observation.row_fixtures import ready, replica, tenant, work
from tests.unit.serve.watch_cache_fixtures import CacheFixture, InlineOffload, T


def scope() -> CacheFixture:
    """Two replicas of web run on n1, and one waits because the node is full."""
    web = (replica("web", 0, "serving", "n1"), replica("web", 1, "serving", "n1"), replica("web", 2))
    return CacheFixture(ready("n1", "2"), tenant("t1"), *work("web"), *web, replica("web-api", 0), *work("web-api"))


def entry(action: str, subject: str, code: str = "", actor: str = "s1", role: str = "scheduler") -> AuditEntry:
    return AuditEntry(
        f"one.1.{action}", "", action, subject, actor, role, "", 0, 0, 0, 0, code, "there is no room" if code else "", ""
    )


def batch(number: int, *entries: AuditEntry) -> tuple[str, bytes]:
    return batch_key(number), encode_batch(BatchRecord(1, 1, 1, 1, f"2026-01-01T00:00:0{number}Z", entries))


def decision(name: str, replica: str, reason: str = "no_room") -> Decision:
    spec = DecisionSpec(replicas={replica: ""}, verdict="waiting", reason=reason, detail="the node is full")
    return Decision(metadata=RecordMetadata(name=name, tenant="t1"), spec=spec)


def problem_of(failure: pytest.ExceptionInfo[ApiProblem]) -> tuple[int, str, str]:
    document = failure.value.document
    return document.status, document.code, document.cure


# -- the view ------------------------------------------------------------------------------------------------------------------


def test_view_is_built_once_and_rebuilt_only_after_change() -> None:
    cache = scope()
    snapshots = cache.view_snapshots()

    async def ask() -> list[Any]:
        views = []
        for change in ((), (), (replica("web", 3),), ()):
            if change:
                cache.apply(*change)
            views.append(await snapshots.query(lambda snapshots: snapshots.view))
        return views

    one, two, three, four = asyncio.run(ask())
    assert one is two and three is four and three is not one
    assert (one.revision, three.revision) == (1, 2)
    assert "replica/t1/web-3" in three.replicas.slots and "replica/t1/web-3" not in one.replicas.slots


def test_heartbeat_without_changes_advances_revision_of_same_view() -> None:
    cache = scope()
    snapshots = cache.view_snapshots()

    async def ask() -> tuple[Any, Any]:
        first = await snapshots.query(lambda snapshots: snapshots.view)
        cache.apply()
        return first, await snapshots.query(lambda snapshots: (snapshots.view, snapshots.view.revision))

    first, (second, revision) = asyncio.run(ask())
    assert first is second and revision == 2


def test_query_may_accept_view_up_to_given_age() -> None:
    cache = scope()
    snapshots = cache.view_snapshots()

    async def ask() -> list[Any]:
        first = await snapshots.query(lambda snapshots: snapshots.view)
        cache.apply(replica("web", 3))
        cache.clock.at_ms += 100
        old = await snapshots.query(lambda snapshots: snapshots.view, age_ms=3_000)
        cache.clock.at_ms += 3_000
        return [first, old, await snapshots.query(lambda snapshots: snapshots.view, age_ms=3_000)]

    first, old, new = asyncio.run(ask())
    assert old is first and new is not first


def test_private_query_result_is_not_shared() -> None:
    cache = scope()
    snapshots = cache.view_snapshots()

    async def ask() -> list[Any]:
        return [await snapshots.query(_view), await snapshots.query_private(_view), await snapshots.query(_view)]

    def _view(snapshots: ViewSnapshot) -> Any:
        return snapshots.view

    shared, private, after = asyncio.run(ask())
    assert shared is private and after is not private


def test_query_waits_until_cache_reaches_committed_state() -> None:
    """The watch cache lags behind the store; a client that writes and then reads must see its write."""
    cache = scope()
    snapshots = cache.view_snapshots()

    async def ask() -> bool:
        await cache.store.commit(_head(1))
        await cache.store.commit(_head(2))
        asking = asyncio.ensure_future(snapshots.query(lambda snapshots: "replica/t1/late-0" in snapshots.view.replicas.slots))
        await asyncio.sleep(0.01)
        assert not asking.done()
        cache.apply(*work("late"), replica("late", 0))
        return await asking

    cache.clock.sleep_ms = _sleep  # type: ignore[method-assign]
    assert asyncio.run(ask())


def _head(sequence: int) -> Commit:
    return Commit(puts=[(HEAD, encode_head(Head("one", 1, sequence, "a", 0, "")))])


async def _sleep(ms: int) -> None:
    await asyncio.sleep(ms / 1_000)


def test_query_gets_503_when_cache_does_not_catch_up() -> None:
    cache = scope()

    async def ask() -> None:
        for sequence in (1, 2):
            await cache.store.commit(_head(sequence))
        await cache.view_snapshots().query(lambda snapshots: None)

    with pytest.raises(ApiProblem) as failure:
        asyncio.run(ask())
    assert problem_of(failure)[:2] == (503, "unavailable") and failure.value.headers["Retry-After"]


def test_too_many_waiting_queries_get_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_snapshots, "QUERIES_MAX", 1)
    cache = scope()
    snapshots = ViewSnapshots(cache.board, cache.store, cache.clock, DelayedOffload())

    async def ask() -> Any:
        return await asyncio.gather(
            snapshots.query(lambda snapshots: 1), snapshots.query(lambda snapshots: 2), return_exceptions=True
        )

    first, second = asyncio.run(ask())
    assert first == 1 and isinstance(second, ApiProblem) and second.document.status == 429


class DelayedOffload(InlineOffload):
    async def _do(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(0.01)
        return work()


# -- explanations --------------------------------------------------------------------------------------------------------------


def test_explained_workload_has_limit_and_history_of_own_replicas() -> None:
    cache = scope()
    cache.board.head = Head("one", 1, 2, "a", 0, "")

    async def ask() -> WorkloadExplanation:
        mine, other = decision("d1", "t1/web-2"), decision("d2", "t1/web-api-0", "policy")
        await cache.store_only(mine, other, raw=[batch(1, entry("bind", "replica/t1/web-2", "no_room"))])
        await cache.store.commit(_batch(batch(2, entry("bind", "replica/t1/web-api-0"))))
        cache.apply()
        return await explain_workload(cache.view_snapshots(), "t1", "web")

    found = asyncio.run(ask())
    assert (found.stages, found.limit) == ({"serving": 2, "queued": 1}, "no_room")
    assert [(one.by, one.reason) for one in found.history] == [("scheduler", "no_room"), ("authority", "no_room")]
    assert found.history[1].at == "2026-01-01T00:00:01Z"
    assert msgspec.json.decode(encode(found), type=WorkloadExplanation, dec_hook=dec_hook) == found


def _batch(row: tuple[str, bytes]) -> Commit:
    return Commit(puts=[row])


def test_explained_replica_includes_queried_node() -> None:
    cache = scope()
    found = asyncio.run(explain_replica(cache.view_snapshots(), "t1", "web-2", "n1"))
    assert found.waits is not None and found.waits.reason == "no_room"
    assert found.there is not None and not found.there.fits and found.there.broken[0].reason == "no_room"
    assert msgspec.json.decode(encode(found), type=ReplicaExplanation, dec_hook=dec_hook) == found


@pytest.mark.parametrize(
    ("explain", "name", "node", "cure"),
    [
        (explain_workload, "wep", "", "did you mean web or web-api?"),
        (explain_replica, "web-9", "", "did you mean"),
        (explain_workload, "web", "n2", "there are n1"),
        (explain_replica, "web-2", "nowhere", "there are n1"),
    ],
)
def test_unknown_object_gets_404_with_suggestion(explain: Any, name: str, node: str, cure: str) -> None:
    with pytest.raises(ApiProblem) as failure:
        asyncio.run(explain(scope().view_snapshots(), "t1", name, node))
    status, code, cache = problem_of(failure)
    assert (status, code) == (404, "not_found") and cure in cache


def test_capacity_counts_fitting_replicas_and_decodes_back() -> None:
    snapshots = CacheFixture(ready("n1", "4"), tenant("t1")).view_snapshots()
    found = asyncio.run(capacity_for(snapshots, workload("web", "1"), 3))
    assert (found.hard.replicas, found.most) == (3, 3)
    assert msgspec.json.decode(encode(found), type=CapacityAnswer, dec_hook=dec_hook) == found
    unlimited = asyncio.run(capacity_for(snapshots, workload("web", "1")))
    assert unlimited.hard.replicas == 4 and unlimited.stop is not None and unlimited.stop.reason == "no_room"


def test_capacity_for_invalid_workload_names_field() -> None:
    with pytest.raises(ApiProblem) as failure:
        asyncio.run(capacity_for(scope().view_snapshots(), workload("web", priority="gold")))
    assert failure.value.document.field == "spec.priorityClass" and problem_of(failure)[0] == 422


def test_replica_names_exclude_workloads_with_longer_names() -> None:
    keys = ["replica/t1/web-0", "replica/t1/web-11", "replica/t1/web-api-0", "replica/t2/web-1", "replica/t1/web-1-0"]
    assert replica_names(keys, "t1", "web") == {"web-0", "web-11"}
    assert replica_names(keys, "t1", "web-1") == {"web-1-0"}


def test_newest_batches_are_read_without_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_PAGE_ROWS", 4)
    cache = CacheFixture()

    async def read(last: int, most: int) -> list[int]:
        found = await read_batches(cache.store, last, 0, most)
        return [int(row.key.rpartition("/")[2]) for row in found]

    async def scenario() -> list[list[int]]:
        assert await read(5, 10) == []
        await cache.store_only(raw=[batch_raw(number) for number in (1, 2, 3, 5, 8, 13, 14, 20)])
        return [await read(20, 100), await read(20, 3), await read(13, 100), await read(14, 1)]

    assert asyncio.run(scenario()) == [[1, 2, 3, 5, 8, 13, 14, 20], [13, 14, 20], [1, 2, 3, 5, 8, 13], [14]]


def batch_raw(number: int) -> tuple[str, bytes]:
    entry = AuditEntry("one.1.a", "", "bind", "replica/t1/web-0", "scheduler-1", "scheduler", "", 0, 0, 0, 0, "", "", "")
    return batch_key(number), encode_batch(BatchRecord(1, 1, 1, 1, "", (entry,)))
