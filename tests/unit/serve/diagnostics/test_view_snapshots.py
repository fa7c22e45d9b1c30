"""Does whoever looks see what is committed, one state of it, and without anybody else having to wait?"""

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
from tests.unit.serve.watch_cache_fixtures import Here, T, Told


def scope() -> Told:
    """Two of web stand on n1, and one waits: the node is full."""
    web = (replica("web", 0, "serving", "n1"), replica("web", 1, "serving", "n1"), replica("web", 2))
    return Told(ready("n1", "2"), tenant("t1"), *work("web"), *web, replica("web-api", 0), *work("web-api"))


def entry(did: str, subject: str, code: str = "", actor: str = "s1", role: str = "scheduler") -> AuditEntry:
    return AuditEntry(
        f"one.1.{did}", "", did, subject, actor, role, "", 0, 0, 0, 0, code, "there is no room" if code else "", ""
    )


def batch(number: int, *entries: AuditEntry) -> tuple[str, bytes]:
    return batch_key(number), encode_batch(BatchRecord(1, 1, 1, 1, f"2026-01-01T00:00:0{number}Z", entries))


def decision(name: str, replica: str, reason: str = "no_room") -> Decision:
    spec = DecisionSpec(replicas={replica: ""}, verdict="waiting", reason=reason, detail="the node is full")
    return Decision(metadata=RecordMetadata(name=name, tenant="t1"), spec=spec)


def caught(failure: pytest.ExceptionInfo[ApiProblem]) -> tuple[int, str, str]:
    document = failure.value.document
    return document.status, document.code, document.cure


# -- the view ------------------------------------------------------------------------------------------------------------------


def test_a_view_is_made_once__and_made_anew_only_when_something_has_changed() -> None:
    told = scope()
    look = told.looking()

    async def ask() -> list[Any]:
        views = []
        for change in ((), (), (replica("web", 3),), ()):
            if change:
                told.tell(*change)
            views.append(await look.query(lambda look: look.view))
        return views

    one, two, three, four = asyncio.run(ask())
    assert one is two and three is four and three is not one
    assert (one.revision, three.revision) == (1, 2)
    assert "replica/t1/web-3" in three.replicas.slots and "replica/t1/web-3" not in one.replicas.slots


def test_a_beat_that_changes_nothing__moves_the_revision_of_the_same_view() -> None:
    told = scope()
    look = told.looking()

    async def ask() -> tuple[Any, Any]:
        first = await look.query(lambda look: look.view)
        told.tell()
        return first, await look.query(lambda look: (look.view, look.view.revision))

    first, (second, revision) = asyncio.run(ask())
    assert first is second and revision == 2


def test_sums_may_be_a_little_old__if_whoever_asks_says_so() -> None:
    told = scope()
    look = told.looking()

    async def ask() -> list[Any]:
        first = await look.query(lambda look: look.view)
        told.tell(replica("web", 3))
        told.clock.at_ms += 100
        old = await look.query(lambda look: look.view, age_ms=3_000)
        told.clock.at_ms += 3_000
        return [first, old, await look.query(lambda look: look.view, age_ms=3_000)]

    first, old, new = asyncio.run(ask())
    assert old is first and new is not first


def test_a_view_that_is_spoilt__is_nobody_elses() -> None:
    told = scope()
    look = told.looking()

    async def ask() -> list[Any]:
        return [await look.query(_view), await look.query_private(_view), await look.query(_view)]

    def _view(look: ViewSnapshot) -> Any:
        return look.view

    kept, spoilt, after = asyncio.run(ask())
    assert kept is spoilt and after is not spoilt


def test_what_was_committed_before_it_was_asked__is_seen() -> None:
    """The board is a moment behind the store; whoever wrote and then looks must find it."""
    told = scope()
    look = told.looking()

    async def ask() -> bool:
        await told.store.commit(_head(1))
        await told.store.commit(_head(2))
        asking = asyncio.ensure_future(look.query(lambda look: "replica/t1/late-0" in look.view.replicas.slots))
        await asyncio.sleep(0.01)
        assert not asking.done()
        told.tell(*work("late"), replica("late", 0))
        return await asking

    told.clock.sleep_ms = _really  # type: ignore[method-assign]
    assert asyncio.run(ask())


def _head(sequence: int) -> Commit:
    return Commit(puts=[(HEAD, encode_head(Head("one", 1, sequence, "a", 0, "")))])


async def _really(ms: int) -> None:
    await asyncio.sleep(ms / 1_000)


def test_a_board_that_does_not_catch_up__is_said_to_be_behind() -> None:
    told = scope()

    async def ask() -> None:
        for sequence in (1, 2):
            await told.store.commit(_head(sequence))
        await told.looking().query(lambda look: None)

    with pytest.raises(ApiProblem) as failure:
        asyncio.run(ask())
    assert caught(failure)[:2] == (503, "unavailable") and failure.value.headers["Retry-After"]


def test_too_many_who_wait__are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_snapshots, "QUERIES_MAX", 1)
    told = scope()
    look = ViewSnapshots(told.board, told.store, told.clock, Later())

    async def ask() -> Any:
        return await asyncio.gather(look.query(lambda look: 1), look.query(lambda look: 2), return_exceptions=True)

    first, second = asyncio.run(ask())
    assert first == 1 and isinstance(second, ApiProblem) and second.document.status == 429


class Later(Here):
    async def _do(self, work: Callable[[], T]) -> T:
        await asyncio.sleep(0.01)
        return work()


# -- explanations --------------------------------------------------------------------------------------------------------------


def test_an_explained_workload__says_what_limits_it_with_what_was_recorded_of_its_own_replicas() -> None:
    told = scope()
    told.board.head = Head("one", 1, 2, "a", 0, "")

    async def ask() -> WorkloadExplanation:
        mine, other = decision("d1", "t1/web-2"), decision("d2", "t1/web-api-0", "policy")
        await told.keep(mine, other, raw=[batch(1, entry("bind", "replica/t1/web-2", "no_room"))])
        await told.store.commit(_batch(batch(2, entry("bind", "replica/t1/web-api-0"))))
        told.tell()
        return await explain_workload(told.looking(), "t1", "web")

    found = asyncio.run(ask())
    assert (found.stages, found.limit) == ({"serving": 2, "queued": 1}, "no_room")
    assert [(one.by, one.reason) for one in found.history] == [("scheduler", "no_room"), ("authority", "no_room")]
    assert found.history[1].at == "2026-01-01T00:00:01Z"
    assert msgspec.json.decode(encode(found), type=WorkloadExplanation, dec_hook=dec_hook) == found


def _batch(row: tuple[str, bytes]) -> Commit:
    return Commit(puts=[row])


def test_an_explained_replica__tells_of_the_node_that_is_asked_about() -> None:
    told = scope()
    found = asyncio.run(explain_replica(told.looking(), "t1", "web-2", "n1"))
    assert found.waits is not None and found.waits.reason == "no_room"
    assert found.there is not None and not found.there.fits and found.there.broken[0].reason == "no_room"
    assert msgspec.json.decode(encode(found), type=ReplicaExplanation, dec_hook=dec_hook) == found


@pytest.mark.parametrize(
    ("what", "name", "node", "cure"),
    [
        (explain_workload, "wep", "", "did you mean web or web-api?"),
        (explain_replica, "web-9", "", "did you mean"),
        (explain_workload, "web", "n2", "there are n1"),
        (explain_replica, "web-2", "nowhere", "there are n1"),
    ],
)
def test_what_is_not_there__is_a_404_with_what_is(what: Any, name: str, node: str, cure: str) -> None:
    with pytest.raises(ApiProblem) as failure:
        asyncio.run(what(scope().looking(), "t1", name, node))
    status, code, told = caught(failure)
    assert (status, code) == (404, "not_found") and cure in told


def test_capacity__counts_what_fits_and_decodes_back() -> None:
    look = Told(ready("n1", "4"), tenant("t1")).looking()
    found = asyncio.run(capacity_for(look, workload("web", "1"), 3))
    assert (found.hard.replicas, found.most) == (3, 3)
    assert msgspec.json.decode(encode(found), type=CapacityAnswer, dec_hook=dec_hook) == found
    whole = asyncio.run(capacity_for(look, workload("web", "1")))
    assert whole.hard.replicas == 4 and whole.stop is not None and whole.stop.reason == "no_room"


def test_capacity_for_what_could_not_be_declared__names_the_field() -> None:
    with pytest.raises(ApiProblem) as failure:
        asyncio.run(capacity_for(scope().looking(), workload("web", priority="gold")))
    assert failure.value.document.field == "spec.priorityClass" and caught(failure)[0] == 422


def test_members_are_told_from_those_of_a_longer_name() -> None:
    keys = ["replica/t1/web-0", "replica/t1/web-11", "replica/t1/web-api-0", "replica/t2/web-1", "replica/t1/web-1-0"]
    assert replica_names(keys, "t1", "web") == {"web-0", "web-11"}
    assert replica_names(keys, "t1", "web-1") == {"web-1-0"}


def test_of_many_batches_the_newest_are_read__and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_PAGE_ROWS", 4)
    told = Told()

    async def read(last: int, most: int) -> list[int]:
        found = await read_batches(told.store, last, 0, most)
        return [int(row.key.rpartition("/")[2]) for row in found]

    async def asked() -> list[list[int]]:
        assert await read(5, 10) == []
        await told.keep(raw=[batch_raw(number) for number in (1, 2, 3, 5, 8, 13, 14, 20)])
        return [await read(20, 100), await read(20, 3), await read(13, 100), await read(14, 1)]

    assert asyncio.run(asked()) == [[1, 2, 3, 5, 8, 13, 14, 20], [13, 14, 20], [1, 2, 3, 5, 8, 13], [14]]


def batch_raw(number: int) -> tuple[str, bytes]:
    entry = AuditEntry("one.1.a", "", "bind", "replica/t1/web-0", "scheduler-1", "scheduler", "", 0, 0, 0, 0, "", "", "")
    return batch_key(number), encode_batch(BatchRecord(1, 1, 1, 1, "", (entry,)))
